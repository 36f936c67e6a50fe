"""Control edges: the orderings that data edges do not imply.

Two nodes conflict when both touch the same bytes and one of them writes. Bytes are those of a finished plan, so values
that share memory are covered as well as state that is written more than once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from renaissance.core.region import Region
from renaissance.graph.computation_graph import ComputationGraph, Node
from renaissance.graph.dependence import data_predecessors, effects
from renaissance.graph.memory_plan import MemoryPlan


def add_control_edges(graph: ComputationGraph, plan: MemoryPlan) -> ComputationGraph:
    """The graph with ``after`` edges for every conflict that no path of edges orders yet.

    Programs run one after the other, so only conflicts inside a program need an edge.
    """
    regions = tuple(t.region for t in plan.tensors)
    cells = _Cells(graph.nodes, plan)
    after: dict[int, set[int]] = {n.index: set(n.after) for n in graph.nodes}
    for ids in graph.programs:
        _order_program(graph.program(ids), regions, cells, after)
    nodes = tuple(replace(n, after=tuple(sorted(after[n.index]))) for n in graph.nodes)
    return replace(graph, nodes=nodes)


def ordered(program: Sequence[Node], plan: MemoryPlan) -> tuple[Node, ...]:
    """One launch sequence by itself, with the control edges that keep its order where it matters."""
    after: dict[int, set[int]] = {n.index: set(n.after) for n in program}
    _order_program(program, tuple(t.region for t in plan.tensors), _Cells(program, plan), after)
    return tuple(replace(n, after=tuple(sorted(after[n.index]))) for n in program)


def first_conflict(a: Sequence[Node], b: Sequence[Node], plan: MemoryPlan) -> tuple[Node, Node] | None:
    """A node of each that touch the same bytes, one of them writing; None when both may run at the same time."""
    cells = _Cells([*a, *b], plan)
    for left in a:
        for right in b:
            written, other = cells.written[left.index], cells.written[right.index]
            if written & (other | cells.read[right.index]) or other & cells.read[left.index]:
                return left, right
    return None


def _order_program(
    program: Sequence[Node], regions: Sequence[Region], cells: _Cells, after: dict[int, set[int]]
) -> None:
    members = {n.index for n in program}
    before = data_predecessors(program, regions)
    reach: list[int] = []  # bit i of an entry: position i is ordered before this position
    position = {n.index: at for at, n in enumerate(program)}
    readers: dict[int, int] = {}  # cell -> the positions that have read it, as bits
    writers: dict[int, int] = {}
    for at, node in enumerate(program):
        ordered = 0
        for p in before[node.index] | (after[node.index] & members):
            ordered |= reach[position[p]] | 1 << position[p]
        conflicts = 0
        for cell in cells.read[node.index]:
            conflicts |= writers.get(cell, 0)
        for cell in cells.written[node.index]:
            conflicts |= writers.get(cell, 0) | readers.get(cell, 0)
        missing = conflicts & ~ordered
        while missing:  # the latest first: what is before it needs no edge of its own
            other = missing.bit_length() - 1
            after[node.index].add(program[other].index)
            ordered |= reach[other] | 1 << other
            missing &= ~ordered
        reach.append(ordered)
        for cell in cells.read[node.index]:
            readers[cell] = readers.get(cell, 0) | 1 << at
        for cell in cells.written[node.index]:
            writers[cell] = writers.get(cell, 0) | 1 << at


class _Cells:
    """Memory cut at every byte where something begins or ends; a cell is the number of such a piece."""

    def __init__(self, nodes: Sequence[Node], plan: MemoryPlan) -> None:
        found = {n.index: effects(n) for n in nodes}
        ranges = {
            index: (_ranges(e.read_tensors, e.read_regions, plan), _ranges(e.written_tensors, e.written_regions, plan))
            for index, e in found.items()
        }
        cuts = sorted({cut for pair in ranges.values() for rs in pair for r in rs for cut in r})
        number = {cut: i for i, cut in enumerate(cuts)}

        def cells(touched: Iterable[tuple[Cut, Cut]]) -> frozenset[int]:
            return frozenset(i for first, last in touched for i in range(number[first], number[last]))

        self.read = {index: cells(pair[0]) for index, pair in ranges.items()}
        self.written = {index: cells(pair[1]) for index, pair in ranges.items()}


Cut = tuple[int, int]
"""(address space, byte): space -1 is the arena, others are external regions."""


def _ranges(tensors: Iterable[int], touched: Iterable[Region], plan: MemoryPlan) -> list[tuple[Cut, Cut]]:
    found = []
    for tensor in map(plan.tensor, tensors):
        space = tensor.region.value if plan.is_external(tensor.id) else -1
        found.append(((space, tensor.offset), (space, tensor.end)))
    for region in touched:
        base, size = plan.region_bounds(region)
        if size:
            found.append(((-1, base), (-1, base + size)))
    return found
