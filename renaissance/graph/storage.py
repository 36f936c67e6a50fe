"""Storage of values by lifetime: which tensors of a region may use the same bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from renaissance.core.region import Region
from renaissance.graph.computation_graph import ComputationGraph, Node
from renaissance.graph.dependence import VALUE_REGIONS, programs

Regions = Sequence[Region]
PACKED_REGIONS = frozenset({Region.F_GRAD_SLOT_FP32, Region.F_GRAD_SLOT_FP16})


def lifetimes(program: Sequence[Node], regions: Regions) -> dict[int, tuple[int, int]]:
    """First and last position in ``program`` at which each value is touched."""
    spans: dict[int, tuple[int, int]] = {}
    for at, node in enumerate(program):
        for tensor in (*node.inputs, *node.outputs):
            if regions[tensor] in VALUE_REGIONS:
                spans[tensor] = (spans.get(tensor, (at, at))[0], at)
    return spans


def share_storage(graphs: Sequence[ComputationGraph], regions: Regions) -> dict[int, int]:
    """Tensor -> tensor whose storage it can use, for tensors of PACKED_REGIONS.

    First fit in order of definition: a tensor takes the first storage of its region in which no tensor is alive at the
    same time, in any program. A chain of layers needs two gradient slots.
    """
    alive = [lifetimes(g.program(p), regions) for g in graphs for p in programs(g.name)]
    order = sorted(
        {t for life in alive for t in life if regions[t] in PACKED_REGIONS},
        key=lambda t: (min(life[t][0] for life in alive if t in life), t),
    )
    members: dict[int, list[int]] = {}
    share: dict[int, int] = {}
    for tensor in order:
        for owner, others in members.items():
            free = regions[owner] is regions[tensor] and owner < tensor
            if free and not any(_meet(life, tensor, other) for life in alive for other in others):
                share[tensor] = owner
                others.append(tensor)
                break
        else:
            members[tensor] = [tensor]
    return share


def _meet(life: Mapping[int, tuple[int, int]], a: int, b: int) -> bool:
    if a not in life or b not in life:
        return False
    return life[a][0] <= life[b][1] and life[b][0] <= life[a][1]
