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
    HALF_WEIGHT_SPAN,
    NAN_SPAN,
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
    Span(Region.E_FC_WEIGHT_FP16, Region.E_DEEP_CONV_FP16),
)
"""Groups of regions that a bulk operation treats as one range of bytes."""

_KINDS = ("BN_BIAS", "BN_WEIGHT", "FC_BIAS", "FC_WEIGHT", "FIRST_CONV", "DEEP_CONV")
_WEIGHTS = _KINDS[3:]
PAIRED: tuple[tuple[Span, int], ...] = (
    *((Span(Region[f"{s}_{_KINDS[0]}"], Region[f"{s}_{_KINDS[-1]}"]), 1) for s in "EGMV"),
    (HALF_WEIGHT_SPAN, 2),
    (Span(Region.E_FC_WEIGHT_FP16, Region.E_DEEP_CONV_FP16), 2),
    (Span(Region.G_FC_WEIGHT_FP16, Region.G_DEEP_CONV_FP16), 2),
)
"""Spans that mirror the W regions, with the factor between relative offsets (a half slot is half as large)."""


def verify_plan(plan: MemoryPlan, lifetimes: Lifetimes = ()) -> None:
    """Raise MemoryPlanError when the plan breaks a rule.

    ``lifetimes`` lets values share bytes whose lifetimes do not meet; a tensor it does not mention lives always.
    """
    _check_bounds(plan)
    _check_tensors(plan)
    _check_overlap(plan, lifetimes)
    for span in ADJACENT:
        _check_adjacent(plan, span)
    for span, factor in PAIRED:
        _check_pairing(plan, span, factor)


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
    spaces: dict[int, list[DTensor]] = {}
    for tensor in plan.tensors:
        space = tensor.region.value if plan.is_external(tensor.id) else -1
        spaces.setdefault(space, []).append(tensor)
    for tensors in spaces.values():
        open_tensors: list[DTensor] = []
        for tensor in sorted(tensors, key=lambda t: (t.offset, t.id)):
            open_tensors = [t for t in open_tensors if t.end > tensor.offset]
            for other in open_tensors:
                if not _apart(tensor.id, other.id, lifetimes):
                    raise MemoryPlanError(f"{plan.name}: {tensor} overlaps {other} while both are alive")
            open_tensors.append(tensor)


def _apart(a: int, b: int, lifetimes: Lifetimes) -> bool:
    """True when both are values of some program and are never alive together."""
    if not all(any(i in life for life in lifetimes) for i in (a, b)):
        return False
    both = [(life[a], life[b]) for life in lifetimes if a in life and b in life]
    return all(x[1] < y[0] or y[1] < x[0] for x, y in both)


def _check_adjacent(plan: MemoryPlan, span: Span) -> None:
    for before, after in zip(span.regions, span.regions[1:], strict=False):
        base, size = plan.region_bounds(before)
        if base + size != plan.region_bounds(after)[0]:
            raise MemoryPlanError(
                f"{plan.name}: {before.name} ends at {base + size}, {after.name} starts at "
                f"{plan.region_bounds(after)[0]}; expected {span} to be one range"
            )


def _check_pairing(plan: MemoryPlan, span: Span, factor: int) -> None:
    """A populated mirror of the W regions has the same tensors in the same order at the same relative places."""
    if not any(plan.is_populated(r) for r in span.regions):
        return
    masters = [Region[f"W_{_kind(r)}"] for r in span.regions]
    base, master_base = plan.region_bounds(span.first)[0], plan.region_bounds(masters[0])[0]
    for region, master in zip(span.regions, masters, strict=True):
        mine, theirs = plan.ids(region), plan.ids(master)
        if len(mine) != len(theirs):
            raise MemoryPlanError(f"{plan.name}: {region.name} has {len(mine)} tensors, {master.name} {len(theirs)}")
        for a, b in zip(map(plan.tensor, mine), map(plan.tensor, theirs), strict=True):
            if a.shape != b.shape:
                raise MemoryPlanError(f"{plan.name}: {a.name} {a.shape} is paired with {b.name} {b.shape}")
            if (a.offset - base) * factor != b.offset - master_base:
                raise MemoryPlanError(
                    f"{plan.name}: {a.name} is {a.offset - base} bytes into {span}, {b.name} "
                    f"{b.offset - master_base} bytes into its span; expected a factor of {factor}"
                )


def _kind(region: Region) -> str:
    return region.name.partition("_")[2].removesuffix("_FP16")
