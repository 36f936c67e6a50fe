"""Control edges: the orderings that data edges do not imply."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from renaissance.core.region import Region
from renaissance.graph.computation_graph import ComputationGraph, Node
from renaissance.graph.dependence import data_predecessors, effects, programs

Regions = Sequence[Region]


def add_control_edges(graph: ComputationGraph, regions: Regions, owner: Callable[[int], int]) -> ComputationGraph:
    """The graph with ``after`` edges for every conflict that no path of edges orders yet.

    Two nodes conflict when both touch the same storage (``owner`` maps a tensor to it) and one writes. Programs run
    one after the other, so only conflicts inside a program need an edge.
    """
    after: dict[int, set[int]] = {n.index: set(n.after) for n in graph.nodes}
    for ids in programs(graph.name):
        program = graph.program(ids)
        members = {n.index for n in program}
        before = data_predecessors(program, regions)
        access = [_storage_access(n, regions, owner) for n in program]
        reach: list[int] = []  # bit i: position i is ordered before this position
        position = {n.index: at for at, n in enumerate(program)}
        for at, node in enumerate(program):
            ordered = 0
            for p in before[node.index] | (after[node.index] & members):
                ordered |= reach[position[p]] | 1 << position[p]
            reads, writes = access[at]
            for other in range(at - 1, -1, -1):
                other_reads, other_writes = access[other]
                if not ordered >> other & 1 and (writes & (other_reads | other_writes) or reads & other_writes):
                    after[node.index].add(program[other].index)
                    ordered |= reach[other] | 1 << other
            reach.append(ordered)
    nodes = tuple(replace(n, after=tuple(sorted(after[n.index]))) for n in graph.nodes)
    return replace(graph, nodes=nodes)


def _storage_access(node: Node, regions: Regions, owner: Callable[[int], int]) -> tuple[set[int], set[int]]:
    effect = effects(node)

    def storage(tensors: Iterable[int], touched: Collection[Region]) -> set[int]:
        spanned = (i for i, r in enumerate(regions) if r in touched)
        return {owner(i) for i in (*tensors, *spanned)}

    return storage(effect.read_tensors, effect.read_regions), storage(effect.written_tensors, effect.written_regions)
