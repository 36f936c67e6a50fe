"""Storage of values by lifetime: which bytes of its region an activation, gradient or temporary uses.

A value is alive in a program from the node that defines it to the last one that touches it, both included, so the
inputs and outputs of one node never share bytes. Two values of a region may overlap when no program has both alive at
once. Programs run one after the other, and a tensor has one place in all of them and in all variants.

The layout is found greedily, the largest value first, each in the smallest gap that fits among the values it meets
(Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020: greedy by size), and again with
the values in order of definition; the smaller result wins. Gradients of activations first go where activations are dead
already: what fits nowhere there is what the F_GRAD_SLOT regions are for. Nothing depends on hashing or addresses.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from renaissance.core.region import Region
from renaissance.graph.computation_graph import ComputationGraph, Node
from renaissance.graph.dependence import VALUE_REGIONS

Regions = Sequence[Region]
PACKED_REGIONS = frozenset(r for r in VALUE_REGIONS if r.series != "G")
"""Gradients of parameters are values too, but lie in spans that must have the order of their weights."""


HOMES: Mapping[Region, Region] = {
    Region.F_GRAD_SLOT_FP32: Region.F_FEATURE_FP32,
    Region.F_GRAD_SLOT_FP16: Region.F_FEATURE_FP16,
}
"""Region of gradients -> region of activations of the same type, whose dead parts they use."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Where the values lie: tensor -> its region, and its offset there in bytes.

    ``live`` is, for each region, the most bytes that are alive at once in any program: no layout of it is smaller.
    """

    regions: Mapping[int, Region]
    offsets: Mapping[int, int]
    live: Mapping[Region, int]


def lifetimes(program: Sequence[Node], regions: Regions, kept: Collection[int] = ()) -> dict[int, tuple[int, int]]:
    """First and last position in ``program`` at which each value is alive; ``kept`` ones are read after its end."""
    spans: dict[int, tuple[int, int]] = {}
    for at, node in enumerate(program):
        for tensor in (*node.inputs, *node.outputs):
            if regions[tensor] in VALUE_REGIONS:
                spans[tensor] = (spans.get(tensor, (at, at))[0], len(program) if tensor in kept else at)
    return spans


def pack_values(
    graphs: Sequence[ComputationGraph],
    regions: Regions,
    slots: Sequence[int],
    kept: Collection[int] = (),
    reuse: bool = True,
) -> Storage:
    """Give every tensor of PACKED_REGIONS its offset; ``slots`` holds the size of every tensor, in bytes.

    ``kept`` are values that are read from outside when their program has ended. ``reuse`` False: nothing overlaps.
    """
    meets = _alive(graphs, regions, kept)
    if not reuse:
        meets = dict.fromkeys(meets, ALWAYS)
    layouts: dict[Region, _Layout] = {}
    for region in sorted(PACKED_REGIONS):  # activations come before their gradients
        members = [i for i, r in enumerate(regions) if r is region]
        by_size = sorted(members, key=lambda i: (-slots[i], _birth(meets, i), i))
        if region in HOMES and reuse:
            home = layouts[HOMES[region]]
            by_size = [i for i in by_size if not home.add(i, limit=home.end)]
        by_birth = sorted(by_size, key=lambda i: (_birth(meets, i), -slots[i], i))
        tried = [_Layout(slots, meets, order) for order in (by_size, by_birth)]
        layouts[region] = min(tried, key=lambda layout: layout.end)
    where = {i: region for region, layout in layouts.items() for i in layout.offsets}
    offsets = {i: offset for layout in layouts.values() for i, offset in layout.offsets.items()}
    return Storage(where, offsets, _live(graphs, regions, slots, kept, where))


ALWAYS = -1
"""All bits: alive at every position."""


def _birth(meets: Mapping[int, int], tensor: int) -> int:
    bits = meets.get(tensor, ALWAYS)
    return bits & -bits


def _alive(graphs: Sequence[ComputationGraph], regions: Regions, kept: Collection[int]) -> dict[int, int]:
    """Tensor -> a bit for every position of every program at which it is alive."""
    alive: dict[int, int] = {}
    start = 0
    for graph in graphs:
        for ids in graph.programs:
            program = graph.program(ids)
            for tensor, (first, last) in lifetimes(program, regions, kept).items():
                alive[tensor] = alive.get(tensor, 0) | ((1 << last + 1 - first) - 1) << start + first
            start += len(program) + 1
    return alive


def _live(
    graphs: Sequence[ComputationGraph],
    regions: Regions,
    slots: Sequence[int],
    kept: Collection[int],
    where: Mapping[int, Region],
) -> dict[Region, int]:
    """The most bytes of each region that are alive at once."""
    live: dict[Region, int] = {}
    for graph in graphs:
        for ids in graph.programs:
            program = graph.program(ids)
            change: dict[Region, list[int]] = {}
            for tensor, (first, last) in lifetimes(program, regions, kept).items():
                if tensor in where:
                    steps = change.setdefault(where[tensor], [0] * (len(program) + 2))
                    steps[first] += slots[tensor]
                    steps[last + 1] -= slots[tensor]
            for region, steps in change.items():
                live[region] = max(live.get(region, 0), *accumulate(steps))
    return dict(sorted(live.items()))


class _Layout:
    """Offsets in one region, given one after the other: each in the smallest gap between values that it meets."""

    def __init__(self, slots: Sequence[int], meets: Mapping[int, int], order: Iterable[int]) -> None:
        self._slots, self._meets = slots, meets
        self._rows: list[tuple[int, int, int]] = []  # (offset, end, bits) of every value placed, by offset
        self.offsets: dict[int, int] = {}
        self.end = 0
        for tensor in order:
            self.add(tensor)

    def add(self, tensor: int, limit: int | None = None) -> bool:
        """Place ``tensor``; False, and nothing done, when it would end after ``limit``."""
        bits, size = self._meets.get(tensor, ALWAYS), self._slots[tensor]
        best, best_gap, free = -1, -1, 0
        for start, end, others in self._rows:
            if others & bits:
                gap = start - free
                if gap >= size and (best < 0 or gap < best_gap):
                    best, best_gap = free, gap
                if end > free:
                    free = end
        offset = best if best >= 0 else free
        if limit is not None and offset + size > limit:
            return False
        self.offsets[tensor] = offset
        insort(self._rows, (offset, offset + size, bits))
        self.end = max(self.end, offset + size)
        return True
