"""Storage of values by lifetime: which bytes of its region an activation, gradient or temporary uses.

A value is alive in a program from the node that defines it to the last one that touches it, both included, so the
inputs and outputs of one node never share bytes. Two values of a region may overlap when no program has both alive at
once. Programs run one after the other, and a tensor has one place in all of them and in all variants.

The layout is found greedily, the largest value first, each in the smallest gap that fits among the values it meets
(Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020: greedy by size), and again with
the values in order of definition; the smaller result wins. Nothing depends on hashing or addresses.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from renaissance.core.region import Region
from renaissance.graph.computation_graph import ComputationGraph, Node
from renaissance.graph.dependence import VALUE_REGIONS

Regions = Sequence[Region]
PACKED_REGIONS = frozenset(r for r in VALUE_REGIONS if r.series != "G")
"""Gradients of parameters are values too, but lie in spans that must have the order of their weights."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Where the values lie: tensor -> offset in its region, in bytes.

    ``live`` is, for each region, the most bytes that are alive at once in any program: no layout is smaller.
    """

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
    alive, live = _alive(graphs, regions, slots, kept)
    offsets: dict[int, int] = {}
    for region in sorted(PACKED_REGIONS):
        members = [i for i, r in enumerate(regions) if r is region]
        sizes = {i: slots[i] for i in members}
        never = 0 if reuse else 1  # a common bit: everything meets everything
        masks = {i: alive.get(i, 0) << 1 | never for i in members}
        by_size = sorted(members, key=lambda i: (-sizes[i], masks[i] & -masks[i], i))
        by_birth = sorted(members, key=lambda i: (masks[i] & -masks[i], -sizes[i], i))
        layouts = [_lay_out(order, sizes, masks) for order in (by_size, by_birth)]
        offsets |= min(layouts, key=lambda placed: _end(placed, sizes))
    return Storage(offsets, live)


def _alive(
    graphs: Sequence[ComputationGraph], regions: Regions, slots: Sequence[int], kept: Collection[int]
) -> tuple[dict[int, int], dict[Region, int]]:
    """Tensor -> a bit for every position of every program at which it is alive; the most bytes alive per region."""
    alive: dict[int, int] = {}
    live: dict[Region, int] = {}
    start = 0
    for graph in graphs:
        for ids in graph.programs:
            program = graph.program(ids)
            change: dict[Region, list[int]] = {}
            for tensor, (first, last) in lifetimes(program, regions, kept).items():
                region = regions[tensor]
                if region in PACKED_REGIONS:
                    alive[tensor] = alive.get(tensor, 0) | ((1 << last + 1 - first) - 1) << start + first
                    steps = change.setdefault(region, [0] * (len(program) + 2))
                    steps[first] += slots[tensor]
                    steps[last + 1] -= slots[tensor]
            for region, steps in change.items():
                now = 0
                for step in steps:
                    now += step
                    live[region] = max(live.get(region, 0), now)
            start += len(program) + 1
    return alive, live


def _lay_out(order: Sequence[int], sizes: Mapping[int, int], masks: Mapping[int, int]) -> dict[int, int]:
    """Offsets, given one after the other: the smallest gap between values that are alive at the same time."""
    placed: dict[int, int] = {}
    by_offset: list[int] = []
    for tensor in order:
        mask, size = masks[tensor], sizes[tensor]
        best, best_gap, free = -1, -1, 0
        for other in by_offset:
            if masks[other] & mask:
                gap = placed[other] - free
                if gap >= size and (best < 0 or gap < best_gap):
                    best, best_gap = free, gap
                free = max(free, placed[other] + sizes[other])
        offset = best if best >= 0 else free
        at = next((k for k, other in enumerate(by_offset) if placed[other] > offset), len(by_offset))
        by_offset.insert(at, tensor)
        placed[tensor] = offset
    return placed


def _end(placed: Mapping[int, int], sizes: Mapping[int, int]) -> int:
    return max((offset + sizes[i] for i, offset in placed.items()), default=0)
