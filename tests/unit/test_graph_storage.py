"""Storage by lifetime and the control edges it needs, on hand-made and random chains, and how near the layouts of real
networks come to the bound that no layout can undercut."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renaissance.core.dtype import DType
from renaissance.core.enums import OptimizerKind
from renaissance.core.errors import GraphError
from renaissance.core.region import Region
from renaissance.core.shape import Shape
from renaissance.graph import (
    BluePrint,
    CompiledModel,
    CompileRequest,
    ComputationGraph,
    GraphId,
    MemoryPlan,
    Node,
    PlanGates,
    Variant,
    compile_model,
)
from renaissance.graph.ordering import add_control_edges
from renaissance.graph.storage import HOMES, PACKED_REGIONS, pack_values
from renaissance.graph.verify import verify_program
from renaissance.zoo import mobilenet_v2, resnet50

FEATURE, SLOT, MASK, STATE = Region.F_FEATURE_FP32, Region.F_GRAD_SLOT_FP32, Region.S_MASK, Region.W_FC_BIAS


def node(index: int, inputs: Sequence[int], outputs: Sequence[int], graph: GraphId = GraphId.DEEP_FWD_BWD) -> Node:
    """A node of a made-up kind: ACT_FWD reads and writes what it is given."""
    return Node(index, "ACT_FWD", {"kind": "relu"}, tuple(inputs), tuple(outputs), (), (), graph, graph.stream)


def chain(*nodes: tuple[Sequence[int], Sequence[int]]) -> ComputationGraph:
    return ComputationGraph("train", tuple(node(i, *n) for i, n in enumerate(nodes)))


def plan_of(regions: Sequence[Region], offsets: Mapping[int, int], sizes: Sequence[int]) -> MemoryPlan:
    plan = MemoryPlan(PlanGates())
    for i, (region, size) in enumerate(zip(regions, sizes, strict=True)):
        plan.alloc(f"t{i}", Shape(), region.dtype(None), region, slot=size, at=offsets.get(i))
    plan.finalize()
    return plan


def test_values_of_a_chain_take_turns_in_two_slots() -> None:
    graph = chain(((0,), (1,)), ((1,), (2,)), ((2,), (3,)), ((3,), (4,)))
    storage = pack_values([graph], [STATE, *[FEATURE] * 4], [512] * 5)
    assert [storage.offsets[i] for i in (1, 2, 3, 4)] == [0, 512, 0, 512]
    assert storage.live == {FEATURE: 1024}


def test_a_small_value_goes_into_the_gap_beside_a_large_one() -> None:
    # 1 (1024) dies when 2 and 3 (512 each) are made from it one after the other; both then fit where 1 was.
    graph = chain(((0,), (1,)), ((1,), (4,)), ((4,), (2,)), ((4,), (3,)), ((2, 3), (5,)))
    storage = pack_values([graph], [STATE, *[FEATURE] * 5], [512, 1024, 512, 512, 512, 512])
    assert {storage.offsets[2], storage.offsets[3]} == {0, 512}
    assert max(storage.offsets.values()) + 512 == 1536 == storage.live[FEATURE]


def test_inputs_and_outputs_of_one_node_never_share_bytes() -> None:
    graph = chain(((0,), (1,)), ((1,), (2,)))
    storage = pack_values([graph], [STATE, FEATURE, FEATURE], [512] * 3)
    assert storage.offsets[1] != storage.offsets[2]


def test_a_value_that_is_read_after_its_program_keeps_its_bytes() -> None:
    nodes = [((0,), (1,)), ((0,), (2,)), ((2,), (3,)), ((3,), (4,))]
    free = pack_values([chain(*nodes)], [STATE, *[FEATURE] * 4], [512] * 5)
    kept = pack_values([chain(*nodes)], [STATE, *[FEATURE] * 4], [512] * 5, kept=[1])
    assert [free.offsets[i] for i in (2, 3, 4)].count(free.offsets[1]) > 0
    assert [kept.offsets[i] for i in (2, 3, 4)].count(kept.offsets[1]) == 0


def test_gradients_lie_where_activations_are_dead_and_only_the_rest_has_a_region_of_its_own() -> None:
    # Backwards through 1 <- 2: gradient 3 of 2 while 1 and 2 live; 4 of 1, when 2 is dead.
    graph = chain(((0,), (1,)), ((1,), (2,)), ((2,), (3,)), ((3, 1), (4,)), ((4,), (5,)))
    storage = pack_values([graph], [STATE, FEATURE, FEATURE, SLOT, SLOT, SLOT], [512] * 6)
    assert storage.regions == {1: FEATURE, 2: FEATURE, 3: SLOT, 4: FEATURE, 5: FEATURE}
    assert storage.offsets[4] == storage.offsets[2]
    alone = pack_values([graph], [STATE, FEATURE, FEATURE, SLOT, SLOT, SLOT], [512] * 6, reuse=False)
    assert [alone.regions[i] for i in (3, 4, 5)] == [SLOT] * 3
    assert len({(alone.regions[i], o) for i, o in alone.offsets.items()}) == 5


def test_memory_that_is_used_again_gets_the_edge_that_keeps_the_late_reader_safe() -> None:
    # 1 -> 2 -> 3 is a chain; node 1 reads 1 beside it and must have finished before 3 is written into its bytes.
    regions = [STATE, SLOT, SLOT, SLOT, MASK]
    graph = chain(((0,), (1,)), ((1,), (4,)), ((1,), (2,)), ((2,), (3,)))
    apart = add_control_edges(graph, plan_of(regions, {1: 0, 2: 512, 3: 1024, 4: 0}, [512] * 5))
    partly = add_control_edges(graph, plan_of(regions, {1: 0, 2: 768, 3: 256, 4: 0}, [512] * 5))
    assert [n.after for n in apart.nodes] == [(), (), (), ()]
    assert [n.after for n in partly.nodes] == [(), (), (), (1,)]


@st.composite
def programs(draw: st.DrawFn) -> tuple[ComputationGraph, list[Region], list[int]]:
    """Nodes that each define a value of some region from a few earlier ones."""
    count = draw(st.integers(1, 25))
    regions, nodes = [STATE], []
    for tensor in range(1, count + 1):
        inputs = draw(st.lists(st.integers(max(0, tensor - 6), tensor - 1), min_size=1, max_size=3, unique=True))
        regions.append(draw(st.sampled_from([FEATURE, FEATURE, SLOT, MASK])))
        nodes.append((inputs, (tensor,)))
    sizes = [256 * n for n in draw(st.lists(st.integers(2, 40), min_size=count + 1, max_size=count + 1))]
    return chain(*nodes), regions, [s + s % 512 for s in sizes]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(programs())
def test_any_program_is_packed_and_ordered_without_a_race(
    case: tuple[ComputationGraph, list[Region], list[int]],
) -> None:
    graph, regions, sizes = case
    storage = pack_values([graph], regions, sizes)
    assert storage == pack_values([graph], regions, sizes)
    placed = [storage.regions.get(i, r) for i, r in enumerate(regions)]
    plan = plan_of(placed, storage.offsets, sizes)
    ordered = add_control_edges(graph, plan)
    verify_program(ordered.nodes, plan)  # definitions, edges and races by bytes
    for region, live in storage.live.items():
        assert plan.region_bounds(region)[1] >= live
    for n in ordered.nodes:  # and no edge is one too many
        for edge in n.after:
            fewer = replace(n, after=tuple(i for i in n.after if i != edge))
            with pytest.raises(GraphError, match="race"):
                verify_program([fewer if other is n else other for other in ordered.nodes], plan)


def compiled(blueprint: BluePrint, **changes: object) -> CompiledModel:
    facts: dict[str, object] = {
        "height": 224,
        "width": 224,
        "channels": 3,
        "num_classes": 1000,
        "train_batch": 32,
        "val_batch": 64,
        "half": DType.BF16,
        "optimizer": OptimizerKind.SGD_NESTEROV,
    }
    return compile_model(blueprint, CompileRequest(**(facts | changes)))  # type: ignore[arg-type]


def value_bytes(model: CompiledModel) -> int:
    return sum(model.plans[0].region_bounds(r)[1] for r in PACKED_REGIONS)


@pytest.mark.parametrize("blueprint", [resnet50(), mobilenet_v2()], ids=["resnet50", "mobilenet_v2"])
def test_the_layout_of_a_real_network_is_within_a_tenth_of_the_bound(blueprint: BluePrint) -> None:
    model = compiled(blueprint)
    used = {r: model.plans[0].region_bounds(r)[1] for r in model.live_bytes}
    assert all(used[r] <= 1.1 * live for r, live in model.live_bytes.items())
    assert sum(used.values()) <= 1.02 * sum(model.live_bytes.values())
    slots = sum(used.get(slot, 0) for slot in HOMES)
    assert slots < 0.05 * sum(used.values())  # gradients live where activations were
    values = [model.tensor(i) for i in model.values]
    inference = [t for t in values if t.name.startswith("inf.")]
    training = sum(t.slot_bytes for t in values if t not in inference)
    assert sum(t.slot_bytes for t in inference) > 0.6 * sum(used.values())  # at twice the batch size, in the same bytes
    assert training > 1.8 * sum(used.values())


def test_a_large_validation_batch_does_not_make_training_values_larger() -> None:
    small, large = (compiled(mobilenet_v2(), val_batch=n, height=64, width=64) for n in (32, 128))
    assert value_bytes(large) <= 1.05 * value_bytes(small)
    assert large.tensor(large.logits, Variant.VAL_BASE).shape.n == 32
    assert large.tensor(large.val_logits, Variant.VAL_BASE).shape.n == 128


def test_without_reuse_every_value_has_bytes_of_its_own() -> None:
    model = compiled(mobilenet_v2(), reuse=False, height=64, width=64)
    places = sorted((t.offset, t.end) for t in map(model.tensor, model.values))
    assert all(a[1] <= b[0] for a, b in pairwise(places))
