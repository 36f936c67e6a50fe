"""The update part of a step: which nodes each option gives, and law 5 from the first flag to the last counter."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from renaissance.backend.executor import GraphExecutor
from renaissance.core.dtype import DType
from renaissance.core.enums import OptimizerKind
from renaissance.core.errors import GraphError, RenaissanceError, ValueRejected
from renaissance.core.region import Region
from renaissance.graph import (
    BlockStyle,
    BluePrint,
    CompiledModel,
    CompileRequest,
    GraphId,
    Node,
    block,
    bn,
    cbr,
    compile_model,
    conv,
    dropout,
    fc,
    gap_fc,
    relu,
    seq,
    train_program,
    val_program,
    verify_model,
)
from renaissance.tensor import fill_parameter

NET = BluePrint(seq(cbr(4, 3, 1, 1), conv(6, 3, 2, 1), bn(), relu(), dropout(0.25), gap_fc(3)))
KINDS = tuple(OptimizerKind)
LARS = (OptimizerKind.LARS, OptimizerKind.LARS_NESTEROV)
WEIGHTS = ("conv", "fc")


def compiled(blueprint: BluePrint = NET, **changes: Any) -> CompiledModel:
    facts: dict[str, Any] = {
        "height": 5,
        "width": 6,
        "channels": 3,
        "num_classes": 3,
        "train_batch": 4,
        "val_batch": 3,
        "weight_decay": 0.1,
    }
    return compile_model(blueprint, CompileRequest(**(facts | changes)))


def ops(model: CompiledModel, graph: GraphId) -> list[str]:
    return [n.op for n in model.training.bucket(graph)]


def names(model: CompiledModel, ids: tuple[int, ...]) -> list[str]:
    return [model.tensor(i).name for i in ids]


@pytest.mark.parametrize("kind", KINDS)
def test_decay_is_for_weights_of_fc_and_convolution_alone(kind: OptimizerKind) -> None:
    model = compiled(optimizer=kind, half=DType.BF16)
    decayed = {p.name for p in model.parameters if p.decay}
    assert decayed == {p.name for p in model.parameters if p.half is not None}
    assert all(model.tensor(p.weight).region.name.endswith(("CONV", "FC_WEIGHT")) == p.decay for p in model.parameters)
    assert len(decayed) == 3
    updates = [n for n in model.training.nodes if n.op.startswith("RANGE_UPDATE_")]
    spans = {str(n.spans_out[0]): n.attrs["decay"] for n in updates}
    assert spans.pop("W_BN_BIAS..W_FC_BIAS") is False
    assert spans == ({} if kind in LARS else {"W_FC_WEIGHT..W_DEEP_CONV": True})
    if kind is OptimizerKind.SGD:  # upstream's plain SGD had no decay to read
        assert all(model.scalar("wd") in n.inputs for n in updates)


@pytest.mark.parametrize("kind", LARS)
def test_lars_updates_every_weight_with_a_ratio_of_its_own_before_the_loss_scale_changes(kind: OptimizerKind) -> None:
    model = compiled(optimizer=kind, half=DType.BF16, loss_scale=16.0)
    graphs = (GraphId.LARS_FC_OPT, GraphId.LARS_FIRST_CONV_OPT, GraphId.LARS_DEEP_CONV_OPT)
    nodes = [n for g in graphs for n in model.training.bucket(g)]
    assert [names(model, n.outputs)[0] for n in nodes] == ["fc1.weight", "conv1.weight", "conv2.weight"]
    for node in nodes:
        weight, m, ratio, half = names(model, node.outputs)
        assert (m, ratio, half) == (f"{weight}.m", f"{weight}.ratio", f"{weight}.half")
        assert model.tensor(node.outputs[2]).shape.numel == 1
        assert node.attrs["nesterov"] is (kind is OptimizerKind.LARS_NESTEROV)
    order = [n.op for n in model.training.program(train_program(0))]
    assert order.index("GRAD_SCALING") > max(i for i, op in enumerate(order) if op == "LARS_UPDATE")
    assert {p.name for p in model.parameters if p.ratio is not None} == {p.name for p in model.parameters if p.decay}


@pytest.mark.parametrize("half", [None, DType.BF16, DType.FP16])
def test_a_loss_scale_is_for_any_dtype(half: DType | None) -> None:
    plain, scaled = compiled(half=half), compiled(half=half, loss_scale=64.0)
    assert scaled.scalar_init["scaling"] == 64.0
    assert plain.scalar_init["scaling"] == (8192.0 if half is DType.FP16 else 1.0)
    assert ("GRAD_SCALING" in plain.training.ops) is (half is DType.FP16)
    assert ops(scaled, GraphId.OPTIMIZER)[-1] == "GRAD_SCALING"
    assert {"scaling", "good_steps"} <= set(names(scaled, scaled.state))


def test_ema_has_a_span_of_averages_and_inference_graphs_that_read_nothing_else() -> None:
    model = compiled(ema=True, half=DType.BF16, ema_decay=0.75)
    (average,) = model.training.bucket(GraphId.EMA_UPDATE)
    assert (str(average.spans_in[0]), str(average.spans_out[0])) == ("W_BN_BIAS..W_DEEP_CONV", "E_BN_BIAS..E_DEEP_CONV")
    assert model.scalar_init["ema_decay"] == 0.75
    averaged = {i for p in model.parameters for i in (p.ema, p.ema_half) if i is not None}
    main = {i for p in model.parameters for i in (p.weight, p.half) if i is not None}
    reads = {g: {i for n in model.inference.bucket(g) for i in n.inputs} for g in GraphId}
    assert not reads[GraphId.INF_EMA_A] & main
    assert not reads[GraphId.INF_MAIN_A] & averaged
    assert len(reads[GraphId.INF_EMA_A] & averaged) == len(reads[GraphId.INF_MAIN_A] & main) > 0
    assert reads[GraphId.CAST_EMA_FP32_TO_FP16] & averaged
    assert {p.ema for p in model.parameters} <= set(model.state)
    assert not {p.ema_half for p in model.parameters if p.ema_half is not None} & set(model.state)
    same = [[n.op for n in model.inference.program(val_program(0, ema))] for ema in (False, True)]
    assert same[0] == same[1]
    assert not [n for n in compiled().inference.nodes if n.graph in (GraphId.INF_EMA_A, GraphId.CAST_EMA_FP32_TO_FP16)]


def test_the_folded_form_of_every_batch_norm_is_made_from_what_the_pass_uses() -> None:
    model = compiled(ema=True)
    main = model.inference.bucket(GraphId.UPDATE_BN_INF_PARAMS)
    average = model.inference.bucket(GraphId.CAST_EMA_FP32_TO_FP16)
    assert len(main) == len(average) == len(model.batch_norms) == 2
    for norm, a, b in zip(model.batch_norms, main, average, strict=True):
        assert a.inputs == (norm.gamma, norm.beta, norm.prev_mean, norm.prev_var)
        assert b.inputs == (norm.ema_gamma, norm.ema_beta, norm.prev_mean, norm.prev_var)
        assert a.outputs == b.outputs == (norm.eq_scale, norm.eq_bias)
        assert not {norm.next_mean, norm.eq_scale} & set(model.state)
        assert {norm.prev_mean, norm.prev_var} <= set(model.state)


def test_the_order_of_law_5() -> None:
    model = compiled(ema=True, optimizer=OptimizerKind.ADAMW, loss_scale=2.0)
    program = [n.op for n in model.training.program(train_program(0))]
    tail = program[program.index("RANGE_CHECK_NAN") :]
    assert tail == [
        "RANGE_CHECK_NAN",
        "ACCUM_METRICS",
        "RANGE_COPY",
        "ADAM_STEP",
        "RANGE_UPDATE_ADAMW",
        "RANGE_UPDATE_ADAMW",
        "DROPOUT_ADVANCE",
        "GRAD_SCALING",
        "RANGE_EMA_UPDATE",
    ]
    (check,) = model.training.bucket(GraphId.NAN_CHECK_AND_GRAD_SCALING)
    assert [str(s) for s in check.spans_in] == ["G_BN_BIAS..G_DEEP_CONV", "R_RESULT", "B_NEXT_MEAN..B_NEXT_VAR"]


def test_statistics_are_reduced_over_ranks_before_the_flag_is_made() -> None:
    program = [n.graph for n in compiled(world_size=2).training.program(train_program(0))]
    comms = [program.index(g) for g in (GraphId.DEEP_COMM, GraphId.FIRST_COMM, GraphId.STATS_COMM)]
    assert max(comms) < program.index(GraphId.NAN_CHECK_AND_GRAD_SCALING)
    assert not [n for n in compiled().training.nodes if n.op == "RANGE_MEAN_ALLREDUCE"]


GUARDED = ("ACCUM_METRICS", "RANGE_COPY", "RANGE_UPDATE_MOMENTUM", "LARS_UPDATE", "DROPOUT_ADVANCE", "RANGE_EMA_UPDATE")


def changed(model: CompiledModel, op: str, change: Callable[[Node], Node]) -> CompiledModel:
    first = next(n for n in model.training.nodes if n.op == op)
    nodes = tuple(change(n) if n is first else n for n in model.training.nodes)
    return replace(model, training=replace(model.training, nodes=nodes))


@pytest.mark.parametrize("op", GUARDED)
def test_a_node_that_forgets_the_flag_is_named(op: str) -> None:
    model = compiled(ema=True, optimizer=OptimizerKind.LARS)
    flag, other = model.scalar("has_nan"), model.scalar("batch_valid")
    broken = changed(model, op, lambda n: replace(n, inputs=tuple(other if i == flag else i for i in n.inputs)))
    with pytest.raises(GraphError, match=f"{op} .* without reading has_nan"):
        verify_model(broken)


@pytest.mark.parametrize("dropped", [1, 2])
def test_a_check_that_overlooks_what_a_step_hands_on_is_named(dropped: int) -> None:
    def overlook(n: Node) -> Node:
        return replace(n, spans_in=tuple(s for i, s in enumerate(n.spans_in) if i != dropped))

    unseen = {1: "R_RESULT", 2: "B_NEXT_MEAN, B_NEXT_VAR"}[dropped]
    with pytest.raises(GraphError, match=f"does not look at {unseen}"):
        verify_model(changed(compiled(), "RANGE_CHECK_NAN", overlook))


def test_a_gradient_of_an_earlier_step_is_not_read_as_one_of_this() -> None:
    model = compiled(freeze_first_layer=True)
    clears = [str(s) for n in model.training.bucket(GraphId.ZERO_GRAD) for s in n.spans_out]
    assert clears == ["G_FIRST_CONV", "R_RESULT"]
    broken = changed(model, "RANGE_CLEAR", lambda n: replace(n, spans_out=(model.training.nodes[1].spans_out[0],)))
    with pytest.raises(RenaissanceError, match=r"G_FIRST_CONV|race"):
        verify_model(broken)


@pytest.mark.parametrize(
    ("layers", "trains"),
    [
        (seq(fc(4), relu(), fc(3)), "fc1.weight"),
        (seq(conv(4, 3, 1, 1, bias=True), relu(), gap_fc(3)), "conv1.bias"),
        (seq(bn(), conv(4, 3), gap_fc(3)), "bn"),
        (seq(block(4, BlockStyle.RESNET_3_3), gap_fc(3)), "nothing"),
    ],
)
def test_a_first_layer_that_cannot_be_frozen_alone_is_rejected(layers: Any, trains: str) -> None:
    with pytest.raises(ValueRejected, match=f"freeze_first_layer: the first layer trains {trains}"):
        compiled(BluePrint(layers), freeze_first_layer=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"ema_decay": 1.0},
        {"ema_decay": -0.1},
        {"trust_coefficient": 0.0},
        {"loss_scale": 0.5},
        {"loss_scale": float("inf")},
        {"loss_scale": float("nan")},
    ],
)
def test_a_bad_number_names_its_option(changes: dict[str, float]) -> None:
    with pytest.raises(ValueRejected, match=next(iter(changes))):
        compiled(**changes)


# -- behaviour, on the reference backend ----------------------------------------------------------------------------


def started(model: CompiledModel) -> GraphExecutor:
    """An executor with parameters, averages and statistics set and random inputs in slot A."""
    executor = GraphExecutor(model, backend="reference")
    for p in model.parameters:
        values = fill_parameter(p.init, p.shape, 1, p.ordinal)
        for tensor in (p.weight, p.ema):
            if tensor is not None:
                executor.array(tensor)[...] = values
    for norm in model.batch_norms:
        executor.array(norm.prev_var)[...] = 1.0
    for name, value in model.scalar_init.items():
        executor.write_scalar(name, value)
    executor.cast_weights()
    rng = np.random.default_rng(0)
    slot = executor.own_train_slots[0]
    slot.images[...] = rng.normal(size=slot.images.shape)
    slot.labels[...] = rng.integers(0, 3, slot.labels.shape)
    return executor


def state(executor: GraphExecutor, but: tuple[str, ...] = ()) -> dict[str, bytes]:
    tensors = [executor.model.tensor(i) for i in executor.model.state]
    return {t.name: executor.array(t.id).tobytes() for t in tensors if t.name not in but}


@pytest.mark.parametrize("kind", KINDS)
def test_law5_a_skipped_step_leaves_no_trace_but_the_loss_scale(kind: OptimizerKind) -> None:
    model = compiled(optimizer=kind, ema=True, loss_scale=64.0)
    executor = started(model)
    executor.run_train_step(0, lr=0.1, valid=4)
    before = state(executor)
    image = executor.own_train_slots[0].images[0, 0, 0]
    kept, image[0] = image[0], np.inf
    with np.errstate(invalid="ignore"):
        executor.run_train_step(0)
    assert executor.read_scalar("has_nan") == 1
    assert executor.read_scalar("scaling") == 32.0
    after = state(executor)
    assert {n for n in before if before[n] != after[n]} == {"scaling", "good_steps"}
    image[0] = kept
    executor.run_train_step(0)
    last = state(executor)
    assert {n for n in before if last[n] == before[n]} <= {"accum_top1", "accum_top5", "good_steps"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_convolution_stays_as_it_is_while_all_others_train(kind: OptimizerKind) -> None:
    executor = started(compiled(optimizer=kind, freeze_first_layer=True))
    executor.run_train_step(0, lr=0.1, valid=4)
    first, executor_state = "conv1.weight", state(executor)
    executor.write_scalar("first_frozen", 1)
    for _ in range(2):
        executor.run_train_step(0, frozen=True)
    assert executor.read_scalar("has_nan") == 0
    after = state(executor)
    frozen = {n for n in after if after[n] == executor_state[n]} - {"scaling", "accum_top1", "accum_top5"}
    assert frozen == {n for n in after if n == first or n.startswith(f"{first}.")}
    executor.write_scalar("first_frozen", 0)
    executor.run_train_step(0)
    assert state(executor)[first] != after[first]


def test_a_region_of_the_first_convolution_is_cleared_only_when_it_can_be_frozen() -> None:
    clears = [s for n in compiled().training.bucket(GraphId.ZERO_GRAD) for s in n.spans_out]
    assert all(Region.G_FIRST_CONV not in s.regions for s in clears)
