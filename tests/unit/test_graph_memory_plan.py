"""MemoryPlan: the layout algorithm of spec/framework 3.7, and checks that notice any wrong offset."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renaissance.core.dtype import DType
from renaissance.core.enums import OptimizerKind
from renaissance.core.errors import MemoryPlanError, PhaseError
from renaissance.core.region import HALF_WEIGHT_SPAN, WEIGHT_SPAN, Region, Span
from renaissance.core.shape import Shape
from renaissance.graph import MemoryPlan, PlanGates
from renaissance.graph.memory_checks import verify_plan
from renaissance.graph.memory_plan import INPUT_REGIONS

AMP = PlanGates(half=DType.BF16, optimizer=OptimizerKind.ADAMW)
FP32 = DType.FP32


def weights(sizes: list[int], gates: PlanGates = AMP) -> MemoryPlan:
    plan = MemoryPlan(gates)
    for i, size in enumerate(sizes):
        for series in "WAGMV":
            region = Region[f"{series}_FC_WEIGHT"]
            plan.alloc(f"{series}{i}", Shape(size, 1, 1, 11), region.dtype(gates.half), region)
    plan.finalize()
    return plan


def move(plan: MemoryPlan, tensor: int, by: int) -> None:
    plan._tensors[tensor] = plan._tensors[tensor].at(plan._tensors[tensor].offset + by)


def test_slots_and_bases_follow_the_table_of_the_spec() -> None:
    plan = MemoryPlan(AMP)
    plan.alloc("bias", Shape.of(121), FP32, Region.W_FC_BIAS)
    plan.alloc("scalar", Shape(), FP32, Region.S_SCALAR_FP32)
    plan.alloc("weight", Shape.of(256), FP32, Region.W_FC_WEIGHT)
    plan.alloc("bias2", Shape.of(1), FP32, Region.W_FC_BIAS)
    plan.alloc("half", Shape.of(256), DType.BF16, Region.A_FC_WEIGHT)
    plan.finalize()
    assert [t.slot_bytes for t in plan.tensors] == [1024, 512, 1536, 512, 768]
    assert [t.offset for t in plan.tensors] == [0, 1024 + 512 + 1536 + 768, 1536, 1024, 1536 + 1536]
    assert plan.total_bytes == 1024 + 512 + 1536 + 512 + 768
    assert plan.region_bounds(Region.W_FC_BIAS) == (0, 1536)
    assert plan.region_bounds(Region.B_PREV_MEAN) == (0, 0)
    assert plan.resolve_span(Span(Region.W_FC_BIAS, Region.W_DEEP_CONV)) == (0, 3072)
    assert plan.ids(Region.W_FC_BIAS) == (0, 3)


def test_a_half_span_has_exactly_half_the_offsets_of_its_masters() -> None:
    plan = weights([3, 50, 1, 7])
    verify_plan(plan)
    base, size = plan.resolve_span(WEIGHT_SPAN)
    half_base, half_size = plan.resolve_span(HALF_WEIGHT_SPAN)
    assert size == 2 * half_size
    for master, half in zip(plan.ids(Region.W_FC_WEIGHT), plan.ids(Region.A_FC_WEIGHT), strict=True):
        assert plan.tensor(master).offset - base == 2 * (plan.tensor(half).offset - half_base)


def test_the_phases_of_a_plan_are_guarded() -> None:
    plan = MemoryPlan(AMP)
    with pytest.raises(PhaseError, match="before finalize"):
        _ = plan.total_bytes
    plan.alloc("w", Shape.of(3), FP32, Region.W_FC_WEIGHT)
    plan.finalize()
    with pytest.raises(PhaseError, match="twice"):
        plan.finalize()
    with pytest.raises(PhaseError, match="after finalize"):
        plan.alloc("late", Shape.of(3), FP32, Region.W_FC_WEIGHT)
    with pytest.raises(MemoryPlanError, match="no tensor #1"):
        plan.tensor(1)


@pytest.mark.parametrize(
    ("region", "gates"),
    [
        (Region.A_FC_WEIGHT, PlanGates()),
        (Region.G_FC_WEIGHT_FP16, PlanGates()),
        (Region.F_FEATURE_FP16, PlanGates()),
        (Region.F_FEATURE_FP32, AMP),
        (Region.M_FC_WEIGHT, PlanGates(optimizer=OptimizerKind.SGD)),
        (Region.V_FC_WEIGHT, PlanGates(optimizer=OptimizerKind.SGD_MOMENTUM)),
        (Region.N_FC_WEIGHT, AMP),
        (Region.E_FC_WEIGHT, AMP),
        (Region.E_FC_WEIGHT_FP16, PlanGates(has_ema=True)),
        (Region.W_EQ_BIAS, PlanGates(bn_folded=False)),
        (Region.S_SCALAR_FP16, PlanGates()),
    ],
)
def test_a_closed_region_is_refused_by_name(region: Region, gates: PlanGates) -> None:
    with pytest.raises(MemoryPlanError, match=region.name):
        MemoryPlan(gates).alloc("x", Shape.of(1), region.dtype(gates.half), region)


def test_a_region_holds_only_its_dtype() -> None:
    with pytest.raises(MemoryPlanError, match="INT32; region W_FC_WEIGHT holds FP32"):
        MemoryPlan(AMP).alloc("x", Shape.of(1), DType.INT32, Region.W_FC_WEIGHT)


def test_external_regions_take_no_arena_memory() -> None:
    plan = MemoryPlan(AMP, external=INPUT_REGIONS)
    a = plan.alloc("data_a", Shape(5, 28, 28, 1), DType.BF16, Region.I_A_DATA)
    b = plan.alloc("data_b", Shape(5, 28, 28, 1), DType.BF16, Region.I_B_DATA)
    s = plan.alloc("lr", Shape(), FP32, Region.S_SCALAR_FP32)
    plan.finalize()
    verify_plan(plan)
    assert plan.total_bytes == 512
    assert (plan.tensor(a).offset, plan.tensor(b).offset, plan.tensor(s).offset) == (0, 0, 0)
    assert plan.is_external(a)
    assert not plan.is_external(s)
    assert plan.external_bytes(Region.I_A_DATA) == plan.tensor(a).slot_bytes
    assert "external" in plan.dump_layout()


def test_a_packed_region_is_as_large_as_its_last_byte_and_its_tensors_overlap_only_while_dead() -> None:
    plan = MemoryPlan(PlanGates())
    region = Region.F_GRAD_SLOT_FP32
    a = plan.alloc("a", Shape.of(10), FP32, region, at=0)
    b = plan.alloc("b", Shape.of(5000), FP32, region, at=512)
    c = plan.alloc("c", Shape.of(10), FP32, region, at=256)
    after = plan.alloc("lr", Shape(), FP32, Region.S_SCALAR_FP32)
    plan.finalize({region: 20480})
    assert [plan.tensor(i).offset for i in (a, b, c)] == [0, 512, 256]
    assert plan.region_bounds(region) == (0, plan.tensor(b).end)
    assert plan.tensor(after).offset == plan.tensor(b).end
    assert "+20992, 20480 alive at once" in plan.dump_layout()
    with pytest.raises(MemoryPlanError, match="both are alive"):
        verify_plan(plan)
    verify_plan(plan, [{a: (0, 1), b: (3, 4), c: (2, 2)}])
    verify_plan(plan, [{a: (0, 1), c: (2, 2)}, {c: (0, 1), b: (2, 2)}, {a: (0, 5), b: (0, 5)}])
    with pytest.raises(MemoryPlanError, match="both are alive"):
        verify_plan(plan, [{a: (0, 1), b: (3, 4), c: (1, 2)}])
    with pytest.raises(MemoryPlanError, match="both are alive"):
        verify_plan(plan, [{a: (0, 1), b: (3, 4), c: (2, 2)}, {b: (5, 6), c: (6, 7)}])
    with pytest.raises(MemoryPlanError, match="both are alive"):
        verify_plan(plan, [{a: (0, 1), b: (3, 4)}])  # c is no value of any program: it lives always


def test_a_region_is_packed_or_it_is_not() -> None:
    plan = MemoryPlan(PlanGates())
    plan.alloc("a", Shape.of(10), FP32, Region.F_GRAD_SLOT_FP32, at=0)
    with pytest.raises(MemoryPlanError, match="'b' has no offset in F_GRAD_SLOT_FP32"):
        plan.alloc("b", Shape.of(10), FP32, Region.F_GRAD_SLOT_FP32)


def test_unpaired_tensors_are_noticed() -> None:
    plan = MemoryPlan(AMP)
    plan.alloc("w", Shape.of(3), FP32, Region.W_FC_WEIGHT)
    plan.alloc("w2", Shape.of(4), FP32, Region.W_FC_WEIGHT)
    plan.alloc("g", Shape.of(3), FP32, Region.G_FC_WEIGHT)
    plan.finalize()
    with pytest.raises(MemoryPlanError, match="G_FC_WEIGHT has 1 tensors, W_FC_WEIGHT 2"):
        verify_plan(plan)


def test_paired_tensors_in_another_order_are_noticed() -> None:
    plan = MemoryPlan(AMP)
    for series, sizes in (("W", (3, 4)), ("G", (4, 3))):
        for size in sizes:
            plan.alloc(f"{series}{size}", Shape.of(size), FP32, Region[f"{series}_FC_WEIGHT"])
    plan.finalize()
    with pytest.raises(MemoryPlanError, match="is paired with"):
        verify_plan(plan)


def test_paired_slots_of_different_sizes_are_noticed() -> None:
    plan = MemoryPlan(AMP)
    for series, slot in (("W", None), ("A", 1024)):
        region = Region[f"{series}_FC_WEIGHT"]
        for i in range(2):
            plan.alloc(f"{series}{i}", Shape.of(3), region.dtype(AMP.half), region, slot=slot)
    plan.finalize()
    with pytest.raises(MemoryPlanError, match="expected a factor of 2"):
        verify_plan(plan)


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 300), min_size=1, max_size=8), data=st.data())
def test_any_moved_tensor_is_noticed(sizes: list[int], data: st.DataObject) -> None:
    plan = weights(sizes)
    verify_plan(plan)
    tensor = data.draw(st.integers(0, len(plan.tensors) - 1))
    by = data.draw(st.sampled_from([-512, -256, 256, 512, 4096]))
    if plan.tensor(tensor).offset + by >= 0:
        move(plan, tensor, by)
        with pytest.raises(MemoryPlanError):
            verify_plan(plan)


def test_a_gap_between_the_regions_of_a_bucket_is_noticed() -> None:
    plan = weights([3])
    for region in Region:
        if region > Region.G_FC_WEIGHT:
            base, size = plan._bounds[region]
            plan._bounds[region] = (base + 256, size)
            for i in plan.ids(region):
                move(plan, i, 256)
    plan._total += 256
    with pytest.raises(MemoryPlanError, match="one range"):
        verify_plan(plan)


def test_a_region_that_runs_backwards_is_noticed() -> None:
    plan = weights([3])
    plan._bounds[Region.S_MASK] = (0, 0)
    with pytest.raises(MemoryPlanError, match="S_MASK"):
        verify_plan(plan)


@pytest.mark.parametrize("fault", [None, "order", "ratio", "folded", "statistics"])
def test_spans_that_are_walked_through_together_must_match(fault: str | None) -> None:
    gates = PlanGates(optimizer=OptimizerKind.LARS)
    plan = MemoryPlan(gates)
    channels = (3, 300)
    for series in ("W_BN_BIAS", "W_BN_WEIGHT", "G_BN_BIAS", "G_BN_WEIGHT", "M_BN_BIAS", "M_BN_WEIGHT"):
        for c in channels:
            plan.alloc(f"{series}{c}", Shape.of(c), FP32, Region[series])
    for series in ("W_EQ_BIAS", "W_EQ_SCALE", "B_PREV_MEAN", "B_PREV_VAR", "B_NEXT_MEAN", "B_NEXT_VAR"):
        order = channels[::-1] if (series, fault) == ("B_NEXT_VAR", "order") else channels
        dropped = {"W_EQ_SCALE": "folded", "B_PREV_VAR": "statistics"}.get(series, "none") == fault
        for c in order[dropped:]:
            plan.alloc(f"{series}{c}", Shape.of(c), FP32, Region[series])
    for series in ("W_DEEP_CONV", "G_DEEP_CONV", "M_DEEP_CONV"):
        plan.alloc(series, Shape(4, 3, 3, 2), FP32, Region[series])
    for _ in range(2 if fault == "ratio" else 1):
        plan.alloc("ratio", Shape(), FP32, Region.N_DEEP_CONV)
    plan.finalize()
    if fault is None:
        verify_plan(plan)
        return
    named = {
        "order": "B_NEXT_VAR300 .* is paired with B_PREV_VAR3",
        "ratio": "N_DEEP_CONV has 2 tensors, W_DEEP_CONV 1",
        "folded": "W_EQ_SCALE has 1 tensors, W_BN_WEIGHT 2",
        "statistics": "B_NEXT_VAR has 2 tensors, B_PREV_VAR 1|B_PREV_VAR has 1 tensors, W_BN_WEIGHT 2",
    }
    with pytest.raises(MemoryPlanError, match=named[fault]):
        verify_plan(plan)
