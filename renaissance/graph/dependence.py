"""What a node touches, and which nodes depend on which through values.

A *value* is a tensor that one node of a step defines and later nodes read: activations, gradients, temporaries. All
other tensors are *state*: they may be written again, and only control edges order their accesses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from renaissance.core.region import Region
from renaissance.graph.computation_graph import Node
from renaissance.graph.ops import op_def

VALUE_REGIONS = frozenset(r for r in Region if r.series in "FTG" or r in (Region.S_MASK, Region.R_PREDICTED_LABEL))


@dataclass(frozen=True, slots=True)
class Effects:
    """Tensors and whole regions that a node reads and writes; read-modify-write is in both."""

    read_tensors: frozenset[int]
    written_tensors: frozenset[int]
    read_regions: frozenset[Region]
    written_regions: frozenset[Region]


def effects(node: Node) -> Effects:
    """The effects of a node by its entry in the op table."""
    definition = op_def(node.op)
    outputs = list(zip(node.outputs, definition.outputs, strict=False))
    spans = [
        *zip(node.spans_in, definition.spans_in, strict=False),
        *zip(node.spans_out, definition.spans_out, strict=False),
    ]
    return Effects(
        read_tensors=frozenset((*node.inputs, *(i for i, o in outputs if o.accumulates))),
        written_tensors=frozenset(node.outputs),
        read_regions=frozenset(r for span, role in spans if role.reads for r in span.regions),
        written_regions=frozenset(r for span, role in spans if role.writes for r in span.regions),
    )


def data_predecessors(program: Sequence[Node], regions: Sequence[Region]) -> Mapping[int, set[int]]:
    """Node index -> indices of the nodes that define the values it reads, by tensor or through a span.

    ``regions`` holds the region of every tensor id. Independent of the order of ``program``.
    """
    defined_by: dict[int, int] = {}
    by_region: dict[Region, set[int]] = {}
    for node in program:
        for tensor in node.outputs:
            if regions[tensor] in VALUE_REGIONS:
                defined_by.setdefault(tensor, node.index)
                by_region.setdefault(regions[tensor], set()).add(node.index)
    result: dict[int, set[int]] = {}
    for node in program:
        effect = effects(node)
        found = {defined_by[t] for t in effect.read_tensors if t in defined_by}
        for region in effect.read_regions:
            found |= by_region.get(region, set())
        result[node.index] = found - {node.index}
    return result
