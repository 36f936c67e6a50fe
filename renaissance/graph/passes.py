"""Passes over a list of nodes. Each takes and returns plain data; ``compiler`` applies them in order.

eliminate_dead       nodes whose values nobody reads
clear_spans          which accumulating tensors a step has to clear (dead-store analysis of ZERO_GRAD)
mirror_inputs        graphs that depend on input slot A once more for slot B
order_nodes          index order = launch order

Fusions are in ``fusion``, storage and control edges in ``storage`` and ``ordering``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from renaissance.core.region import Region, Span
from renaissance.graph.computation_graph import Node
from renaissance.graph.dependence import VALUE_REGIONS, effects
from renaissance.graph.ids import GraphId, programs

Regions = Sequence[Region]

MIRRORED: Mapping[GraphId, GraphId] = {
    GraphId.FIRST_LAYER_FWD_A: GraphId.FIRST_LAYER_FWD_B,
    GraphId.FIRST_LAYER_BWD_A: GraphId.FIRST_LAYER_BWD_B,
    GraphId.INF_MAIN_A: GraphId.INF_MAIN_B,
    GraphId.INF_EMA_A: GraphId.INF_EMA_B,
}


def eliminate_dead(nodes: Sequence[Node], regions: Regions, keep: Collection[int]) -> list[Node]:
    """Drop nodes that write only values nobody reads; ``keep`` are values read from outside."""
    live: list[Node] = []
    read = set(keep)
    read_regions: set[Region] = set()
    for node in reversed(nodes):
        used = any(i in read or regions[i] in read_regions or regions[i] not in VALUE_REGIONS for i in node.outputs)
        if used or node.spans_out:
            live.append(node)
            effect = effects(node)
            read |= effect.read_tensors
            read_regions |= effect.read_regions
    return live[::-1]


def clear_spans(nodes: Sequence[Node], regions: Regions, candidates: Span) -> tuple[Span, ...]:
    """The parts of ``candidates`` that a step must clear first, as spans of whole regions.

    A tensor needs it when the first access in the step reads it or does not overwrite it in full. ``nodes`` is one
    step in order. Regions without such a tensor are left out: clearing them would be a dead store.
    """
    members: dict[Region, set[int]] = {}
    for tensor, region in enumerate(regions):
        members.setdefault(region, set()).add(tensor)
    overwritten: set[int] = set()
    dirty: set[Region] = set()
    for node in nodes:
        effect = effects(node)
        dirty |= {regions[i] for i in effect.read_tensors - overwritten}
        dirty |= {r for r in effect.read_regions if not members.get(r, set()) <= overwritten}
        overwritten |= effect.written_tensors - effect.read_tensors
        for region in effect.written_regions - effect.read_regions:
            overwritten |= members.get(region, set())
    spans: list[Span] = []
    for region in candidates.regions:
        if region in dirty and region in regions:
            if spans and spans[-1].last + 1 == region:
                spans[-1] = Span(spans[-1].first, region)
            else:
                spans.append(Span(region, region))
    return tuple(spans)


def mirror_inputs(nodes: Sequence[Node], swap: Mapping[int, int]) -> list[Node]:
    """The nodes with the A graphs repeated as B graphs; ``swap`` maps tensors of input slot A to slot B."""
    copies = [
        replace(n, graph=MIRRORED[n.graph], inputs=tuple(swap.get(i, i) for i in n.inputs))
        for n in nodes
        if n.graph in MIRRORED
    ]
    return [*nodes, *copies]


def order_nodes(nodes: Iterable[Node], graph_name: str) -> tuple[Node, ...]:
    """The nodes grouped by graph in launch order, with ``index`` = position."""
    launched = programs(graph_name)
    steps = [p for p in launched if len(p) == len(launched[0])]
    rank: dict[GraphId, int] = {}
    for graph in [g for same in zip(*steps, strict=True) for g in same] + [g for p in launched for g in p]:
        rank.setdefault(graph, len(rank))
    ordered = sorted(nodes, key=lambda n: rank[n.graph])  # stable: order within a graph is kept
    return tuple(replace(n, index=i) for i, n in enumerate(ordered))
