"""Checks of finalized memory plans (spec/framework 3.7), independent of the code that lays them out.

``verify_plan`` checks one plan, ``verify_plans`` that the six plans of a model agree. A plan is read only through its
tensors and bounds, so that a wrong offset is found whatever caused it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from renaissance.core.errors import MemoryPlanError
from renaissance.core.region import (
    ALIGNMENT,
    BIAS_SPAN,
    BUCKET_DEEP,
    BUCKET_FIRST,
    EMA_WEIGHT_SPAN,
    HALF_EMA_SPAN,
    HALF_WEIGHT_SPAN,
    NAN_SPAN,
    NEXT_STATS_SPAN,
    PREV_STATS_SPAN,
    WEIGHT_SPAN,
    ZERO_GRAD_SPAN,
    Region,
    Span,
)
from renaissance.graph.ids import Variant
from renaissance.graph.memory_plan import MemoryPlan
from renaissance.tensor.dtensor import DTensor

Lifetimes = Sequence[Mapping[int, tuple[int, int]]]
"""Per program: tensor id -> (first, last) position at which it is touched."""

ADJACENT = (
    Span(Region.B_PREV_MEAN, Region.B_NEXT_VAR),
    WEIGHT_SPAN,
    BIAS_SPAN,
    HALF_WEIGHT_SPAN,
    BUCKET_FIRST,
    BUCKET_DEEP,
    Span(Region.G_FIRST_CONV, Region.G_DEEP_CONV),
    NAN_SPAN,
    ZERO_GRAD_SPAN,
    Span(Region.I_A_LABEL, Region.I_B_DATA),
    HALF_EMA_SPAN,
)
"""Groups of regions that a bulk operation treats as one range of bytes."""

_KINDS = ("BN_BIAS", "BN_WEIGHT", "FC_BIAS", "FC_WEIGHT", "FIRST_CONV", "DEEP_CONV")


def _series(series: str) -> Span:
    return Span(Region[f"{series}_{_KINDS[0]}"], Region[f"{series}_{_KINDS[-1]}"])


PAIRED: tuple[tuple[Span, Span, int], ...] = (
    *((_series(s), _series("W"), 1) for s in "EGMV"),
    (HALF_WEIGHT_SPAN, WEIGHT_SPAN, 2),
    (HALF_EMA_SPAN, EMA_WEIGHT_SPAN, 2),
    (Span(Region.G_FC_WEIGHT_FP16, Region.G_DEEP_CONV_FP16), WEIGHT_SPAN, 2),
    (NEXT_STATS_SPAN, PREV_STATS_SPAN, 1),
)
"""(span, its master, factor): spans that one operation walks through together. The same tensors in the same order, at
relative offsets that differ by the factor: a half slot is half as large."""

COUNTED = (
    (Span(Region.N_FC_WEIGHT, Region.N_DEEP_CONV), WEIGHT_SPAN),
    (Span(Region.W_EQ_BIAS, Region.W_EQ_SCALE), Span(Region.W_BN_BIAS, Region.W_BN_WEIGHT)),
    (PREV_STATS_SPAN, Span(Region.W_BN_BIAS, Region.W_BN_WEIGHT)),
)
"""Spans that have one tensor for each of another, whatever its size."""


def verify_plan(plan: MemoryPlan, lifetimes: Lifetimes = ()) -> None:
    """Raise MemoryPlanError when the plan breaks a rule.

    ``lifetimes`` lets values share bytes whose lifetimes do not meet; a tensor it does not mention lives always.
    """
    _check_bounds(plan)
    _check_tensors(plan)
    _check_overlap(plan, lifetimes)
    for span in ADJACENT:
        _check_adjacent(plan, span)
    for span, master, factor in PAIRED:
        _check_pairing(plan, span, master, factor)
    for span, master in COUNTED:
        _check_counts(plan, span, master)


def verify_plans(plans: Sequence[MemoryPlan]) -> None:
    """Raise MemoryPlanError unless all plans have the same tensors at the same places; only shapes may differ."""
    base = plans[Variant.TRAIN_BASE]
    for plan in plans:
        if len(plan.tensors) != len(base.tensors):
            raise MemoryPlanError(f"{plan.name} has {len(plan.tensors)} tensors, {base.name} {len(base.tensors)}")
        if plan.total_bytes != base.total_bytes:
            raise MemoryPlanError(f"{plan.name} needs {plan.total_bytes} bytes, {base.name} {base.total_bytes}")
        for a, b in zip(base.tensors, plan.tensors, strict=True):
            for what in ("id", "name", "dtype", "region", "slot_bytes", "offset"):
                left, right = getattr(a, what), getattr(b, what)
                if left != right:
                    raise MemoryPlanError(f"tensor {a.name!r}: {what} is {left} in {base.name}, {right} in {plan.name}")


def _check_bounds(plan: MemoryPlan) -> None:
    cursor = 0
    for region in Region:
        base, size = plan.region_bounds(region)
        if base < cursor or base % ALIGNMENT or size % ALIGNMENT:
            raise MemoryPlanError(
                f"{plan.name}: region {region.name} at {base} +{size}; expected a multiple of {ALIGNMENT}, "
                f"at least {cursor}"
            )
        cursor = base + size
    if cursor > plan.total_bytes:
        raise MemoryPlanError(f"{plan.name}: regions end at {cursor}, the arena at {plan.total_bytes}")


def _check_tensors(plan: MemoryPlan) -> None:
    for tensor in plan.tensors:
        if tensor.offset < 0 or tensor.offset % ALIGNMENT:
            raise MemoryPlanError(f"{plan.name}: {tensor} is not at a multiple of {ALIGNMENT}")
        base, size = plan.region_bounds(tensor.region)
        if plan.is_external(tensor.id):
            base, size = 0, plan.external_bytes(tensor.region)
        if not base <= tensor.offset or tensor.offset + tensor.slot_bytes > base + size:
            raise MemoryPlanError(f"{plan.name}: {tensor} lies outside its region at {base} +{size}")


def _check_overlap(plan: MemoryPlan, lifetimes: Lifetimes) -> None:
    alive = _alive_bits(lifetimes)
    spaces: dict[int, list[DTensor]] = {}
    for tensor in plan.tensors:
        space = tensor.region.value if plan.is_external(tensor.id) else -1
        spaces.setdefault(space, []).append(tensor)
    for tensors in spaces.values():
        open_tensors: list[DTensor] = []
        for tensor in sorted(tensors, key=lambda t: (t.offset, t.id)):
            open_tensors = [t for t in open_tensors if t.end > tensor.offset]
            mine = alive.get(tensor.id, ALWAYS)
            for other in open_tensors:
                if mine & alive.get(other.id, ALWAYS):
                    raise MemoryPlanError(f"{plan.name}: {tensor} overlaps {other} while both are alive")
            open_tensors.append(tensor)


ALWAYS = -1
"""All bits: a tensor without a lifetime, which is not a value of any program."""


def _alive_bits(lifetimes: Lifetimes) -> dict[int, int]:
    """Tensor -> a bit for every position of every program at which it is alive."""
    alive: dict[int, int] = {}
    start = 0
    for life in lifetimes:
        for tensor, (first, last) in life.items():
            alive[tensor] = alive.get(tensor, 0) | ((1 << (last - first + 1)) - 1) << (start + first)
        start += 1 + max((last for _, last in life.values()), default=0)
    return alive


def _check_adjacent(plan: MemoryPlan, span: Span) -> None:
    for before, after in zip(span.regions, span.regions[1:], strict=False):
        base, size = plan.region_bounds(before)
        if base + size != plan.region_bounds(after)[0]:
            raise MemoryPlanError(
                f"{plan.name}: {before.name} ends at {base + size}, {after.name} starts at "
                f"{plan.region_bounds(after)[0]}; expected {span} to be one range"
            )


def _check_pairing(plan: MemoryPlan, span: Span, master: Span, factor: int) -> None:
    """A populated mirror of a span has the same tensors in the same order at the same relative places."""
    if not any(plan.is_populated(r) for r in span.regions):
        return
    _check_counts(plan, span, master)
    base, master_base = plan.region_bounds(span.first)[0], plan.region_bounds(master.first)[0]
    for region, paired in zip(span.regions, master.regions, strict=True):
        for a, b in zip(map(plan.tensor, plan.ids(region)), map(plan.tensor, plan.ids(paired)), strict=True):
            if a.shape != b.shape:
                raise MemoryPlanError(f"{plan.name}: {a.name} {a.shape} is paired with {b.name} {b.shape}")
            if (a.offset - base) * factor != b.offset - master_base:
                raise MemoryPlanError(
                    f"{plan.name}: {a.name} is {a.offset - base} bytes into {span}, {b.name} "
                    f"{b.offset - master_base} bytes into its span; expected a factor of {factor}"
                )


def _check_counts(plan: MemoryPlan, span: Span, master: Span) -> None:
    """A populated span has as many tensors in each region as its master."""
    if not any(plan.is_populated(r) for r in span.regions):
        return
    for region, paired in zip(span.regions, master.regions, strict=True):
        mine, theirs = plan.ids(region), plan.ids(paired)
        if len(mine) != len(theirs):
            raise MemoryPlanError(f"{plan.name}: {region.name} has {len(mine)} tensors, {paired.name} {len(theirs)}")
