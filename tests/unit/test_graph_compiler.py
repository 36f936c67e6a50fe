"""compile_model on the documented example and at the edges of what it accepts."""

from dataclasses import replace
from pathlib import Path

import pytest
from graph_models import EXAMPLE, example_request

from renaissance.core.dtype import DType
from renaissance.core.enums import CompileInfo, InitKind, OptimizerKind
from renaissance.core.errors import DTypeError, MissingKernelError, ShapeError, ValueRejected
from renaissance.core.region import Region
from renaissance.core.shape import Shape
from renaissance.graph import (
    BluePrint,
    GraphId,
    Variant,
    build_arch_plan,
    compile_model,
    compiler,
    fc,
    graph_dot,
    model_text,
    relu,
    seq,
)
from renaissance.tensor.init import Initializer

PAGE = Path(__file__).parents[2] / "docs" / "compiler.md"
MODEL = compile_model(EXAMPLE, example_request())


def names(ids: tuple[int, ...]) -> list[str]:
    return [MODEL.tensor(i).name for i in ids]


@pytest.mark.parametrize("part", [i for i in CompileInfo if i not in (CompileInfo.NONE, CompileInfo.ALL)])
def test_the_documented_plan_is_the_printed_plan(part: CompileInfo) -> None:
    assert f"```\n{model_text(MODEL, part)}```" in PAGE.read_text()


def test_the_documented_atlas_is_the_printed_atlas() -> None:
    assert MODEL.atlas.text() in PAGE.read_text()
    assert MODEL.atlas.text() in model_text(MODEL)


def test_compiling_twice_gives_the_same_text() -> None:
    assert model_text(compile_model(EXAMPLE, example_request())) == model_text(MODEL)


def test_dot_has_every_node_and_both_kinds_of_edges() -> None:
    dot = graph_dot(MODEL.training, MODEL.plans[0])
    assert all(f"n{n.index} [label=" in dot for n in MODEL.training.nodes)
    assert "n7 -> n8;" in dot
    assert "n18 -> n19 [style=dashed];" in dot


def test_parameters_know_everything_that_belongs_to_them() -> None:
    assert [p.name for p in MODEL.parameters] == [f"fc{i}.{r}" for i in range(1, 5) for r in ("weight", "bias")]
    assert [p.ordinal for p in MODEL.parameters] == list(range(8))
    weight, bias = MODEL.parameters[:2]
    assert weight.shape == Shape(1024, 1, 1, 784)
    assert weight.half is not None
    ids = (weight.weight, weight.half, weight.grad, weight.m, weight.v)
    assert [MODEL.tensor(i).region.series for i in ids if i is not None] == list("WAGMV")
    assert (weight.decay, bias.decay, bias.half) == (True, False, None)
    assert (weight.init.kind, bias.init.kind) == (InitKind.KAIMING_UNIFORM, InitKind.ZEROS)


def test_the_initializer_of_the_request_is_used() -> None:
    chosen = compile_model(EXAMPLE, example_request(initializer=Initializer().fc(InitKind.XAVIER_NORMAL)))
    assert chosen.parameters[0].init.kind is InitKind.XAVIER_NORMAL


def test_ids_of_inputs_are_fixed() -> None:
    assert [(s.label, s.data) for s in MODEL.inputs] == [(0, 1), (2, 3)]
    assert names((0, 1, 2, 3, 4)) == ["label_a", "data_a", "label_b", "data_b", "label_smce"]
    assert MODEL.tensor(1).dtype is DType.BF16


def test_every_optimizer_has_the_scalars_and_moments_it_needs() -> None:
    base = {"has_nan", "lr", "scaling", "label_smoothing", "loss", "top1", "top5", "batch_valid", "wd"}
    base |= {"accum_loss", "accum_top1", "accum_top5", "accum_count", "seed_low", "seed_high", "dropout_step"}
    adam = {"beta", "beta2", "eps", "step", "bias_corr1", "bias_corr2"}
    expected = {
        OptimizerKind.SGD: (set(), ""),
        OptimizerKind.SGD_MOMENTUM: ({"beta"}, "M"),
        OptimizerKind.SGD_NESTEROV: ({"beta"}, "M"),
        OptimizerKind.LARS: ({"beta", "trust", "eps"}, "M"),
        OptimizerKind.LARS_NESTEROV: ({"beta", "trust", "eps"}, "M"),
        OptimizerKind.ADAM: (adam, "MV"),
        OptimizerKind.ADAMW: (adam, "MV"),
    }
    for kind, (more, moments) in expected.items():
        model = compile_model(EXAMPLE, example_request(optimizer=kind))
        assert set(model.scalars) == base | more
        assert set(model.scalar_init) == set(model.scalars)
        assert {t.region.series for t in model.plans[0].tensors} & {"M", "V"} == set(moments)
        updates = [n for n in model.training.nodes if n.op.startswith("RANGE_UPDATE")]
        decay = [False] if "trust" in more else [True, False]  # weights of LARS have an update each
        assert [n.attrs["decay"] for n in updates] == decay
        assert [len(n.spans_in) for n in updates] == [1 + len(moments)] * len(decay)
        assert [len(n.spans_out) for n in updates] == [1 + d for d in decay]
        assert sum(n.op == "LARS_UPDATE" for n in model.training.nodes) == (4 if "trust" in more else 0)


def test_only_fp16_scales_the_loss() -> None:
    assert MODEL.scalar_init["scaling"] == 1.0
    assert "GRAD_SCALING" not in MODEL.training.ops
    fp16 = compile_model(EXAMPLE, example_request(half=DType.FP16))
    assert fp16.scalar_init["scaling"] == 8192.0
    last = fp16.training.bucket(GraphId.OPTIMIZER)[-1]
    assert last.op == "GRAD_SCALING"  # after the update, which divides by the scale of its gradients
    assert fp16.scalars["good_steps"] in fp16.state


def test_without_amp_nothing_is_half() -> None:
    model = compile_model(EXAMPLE, example_request(half=None))
    assert all(t.dtype in (DType.FP32, DType.INT32) for t in model.plans[0].tensors)
    assert GraphId.CAST_MAIN_FP32_TO_FP16 not in model.training.graph_ids
    assert all(p.half is None for p in model.parameters)


def test_fully_overwritten_gradients_are_not_cleared() -> None:
    (clear,) = MODEL.training.bucket(GraphId.ZERO_GRAD)
    assert [s.regions for s in clear.spans_out] == [(Region.R_RESULT,)]


def test_clipping_rewrites_the_gradients_it_checks() -> None:
    model = compile_model(EXAMPLE, example_request(grad_clip=0.5))
    (check,) = model.training.bucket(GraphId.NAN_CHECK_AND_GRAD_SCALING)
    assert check.attrs["clip"] == 0.5
    assert check.spans_out == check.spans_in[:1]  # the others are only watched


def test_communication_exists_only_with_several_ranks() -> None:
    comms = {GraphId.DEEP_COMM, GraphId.FIRST_COMM, GraphId.VAL_RESULT_COMM}
    alone, pair = MODEL, compile_model(EXAMPLE, example_request(world_size=2))
    assert not comms & {*alone.training.graph_ids, *alone.inference.graph_ids}
    assert comms <= {*pair.training.graph_ids, *pair.inference.graph_ids}
    check = pair.training.bucket(GraphId.NAN_CHECK_AND_GRAD_SCALING)[0]
    reduced = {n.index for n in pair.training.nodes if n.op == "RANGE_MEAN_ALLREDUCE"}
    assert set(check.after) & reduced, "the flag is computed from reduced gradients, so all ranks skip together"


def test_state_is_what_a_resume_needs() -> None:
    state = set(names(MODEL.state))
    for p in MODEL.parameters:
        assert {p.name, f"{p.name}.m", f"{p.name}.v"} <= state
    assert {"step", "scaling", "accum_loss", "accum_count"} <= state
    assert not state & {"has_nan", "lr", "fc1.weight.half", "fc1.weight.grad"}


def test_short_last_batches_get_their_own_shapes_and_captures() -> None:
    model = compile_model(EXAMPLE, example_request(train_last=50, val_last=200))
    base, last = model.atlas.entries[Variant.TRAIN_BASE], model.atlas.entries[Variant.TRAIN_LAST]
    assert base[GraphId.DEEP_FWD_BWD].captured != last[GraphId.DEEP_FWD_BWD].captured
    assert base[GraphId.OPTIMIZER].captured == last[GraphId.OPTIMIZER].captured
    val = [model.atlas.entry(v, GraphId.INF_MAIN_A).captured for v in (Variant.VAL_BASE, Variant.VAL_LAST)]
    assert val[0] == val[1]
    assert model.tensor(model.logits, Variant.TRAIN_LAST).shape.n == 50
    assert model.tensor(model.logits).offset == model.tensor(model.logits, Variant.TRAIN_LAST).offset
    assert len(model.atlas.captures) == len(MODEL.atlas.captures) + 5


def test_equal_variants_collapse() -> None:
    for graph_id in GraphId:
        train = {MODEL.atlas.entry(v, graph_id).captured for v in Variant if v.is_training}
        assert len(train) == 1
    first = MODEL.atlas.captures[0]
    assert (first.graph_id, [n.op for n in first.nodes]) == (GraphId.FIRST_LAYER_FWD_A, ["LABEL_COPY", "FC_FWD"])


def test_another_resolution_does_not_fit_an_fc_and_says_so() -> None:
    with pytest.raises(ShapeError, match=r"layer fc1 reads a different number.*VAL_BASE 1024.*put a gap\(\) before it"):
        compile_model(EXAMPLE, example_request(val_size=(32, 32)))


def test_an_op_the_backend_cannot_run_fails_by_name() -> None:
    ops = MODEL.training.ops | MODEL.inference.ops
    compile_model(EXAMPLE, example_request(supported_ops=ops))
    with pytest.raises(MissingKernelError, match="LABEL_COPY"):
        compile_model(EXAMPLE, example_request(supported_ops=ops - {"LABEL_COPY"}))


def test_inputs_lie_in_the_arena_when_they_are_not_shared_slots() -> None:
    inside = compile_model(EXAMPLE, example_request(external_inputs=False))
    assert not inside.plans[0].external
    assert MODEL.plans[0].external
    assert inside.arena_bytes > MODEL.arena_bytes
    assert "FLATTEN_FWD" not in inside.training.ops  # a sample is a row without gaps


def test_layers_without_a_bias_have_no_bias_tensors() -> None:
    model = compile_model(BluePrint(seq(fc(16, bias=False), relu(), fc(10, bias=False))), example_request())
    assert [p.name for p in model.parameters] == ["fc1.weight", "fc2.weight"]
    assert [n.attrs["decay"] for n in model.training.nodes if n.op.startswith("RANGE_UPDATE")] == [True]
    assert {len(n.outputs) for n in model.training.nodes if n.op == "FC_BWD_WEIGHT"} == {1}


def test_hyper_parameters_may_be_whole_numbers() -> None:
    model = compile_model(EXAMPLE, example_request(grad_clip=1, label_smoothing=0, weight_decay=0))
    assert [n.attrs["clip"] for n in model.training.nodes if n.op == "RANGE_CHECK_NAN"] == [1.0]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"train_batch": 0}, ValueRejected, "train_batch is 0"),
        ({"val_last": 201}, ValueRejected, "val_last is 201"),
        ({"world_size": 0}, ValueRejected, "world_size"),
        ({"val_size": (0, 3)}, ValueRejected, "val_size"),
        ({"half": DType.INT8}, DTypeError, "INT8"),
        ({"trust_coefficient": 0.0}, ValueRejected, "trust_coefficient is 0.0"),
        ({"ema_decay": 1.0}, ValueRejected, "ema_decay is 1.0"),
        ({"loss_scale": 0.5}, ValueRejected, "loss_scale is 0.5"),
        ({"beta2": 1.0}, ValueRejected, "beta2 is 1.0"),
        ({"beta2": 0.999999999}, ValueRejected, "beta2 is 0.999999999"),
        ({"eps": 0.0}, ValueRejected, "eps is 0.0"),
        ({"weight_decay": float("nan")}, ValueRejected, "weight_decay"),
        ({"label_smoothing": -0.1}, ValueRejected, "label_smoothing"),
        ({"grad_clip": float("inf")}, ValueRejected, "grad_clip"),
    ],
)
def test_a_bad_request_names_the_option(changes: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        example_request(**changes)


def test_an_unknown_scalar_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueRejected, match=r"momentum.*has_nan"):
        MODEL.scalar("momentum")


def test_each_stage_adds_only_what_it_says() -> None:
    request = example_request(ema=True)
    plan = build_arch_plan(EXAMPLE, Shape(1, 28, 28, 1), 10)
    drafted = compiler.draft(plan, request)
    assert all(not n.after for n in (*drafted.training, *drafted.inference))
    tensors = len(drafted.table.decls)
    settled, graphs = compiler.settle(drafted, request)
    assert len(settled.table.decls) < tensors  # masked gradients that the fusions made are not all used
    assert sorted(n.op for n in graphs[0].nodes) == sorted(n.op for n in drafted.training)
    assert [n.index for n in graphs[0].nodes] == list(range(len(graphs[0].nodes)))
    storage, plans = compiler.place(settled, graphs, request)
    assert [p.total_bytes for p in plans] == [plans[0].total_bytes] * len(Variant)
    connected = compiler.connect(graphs, plans)
    for before, after in zip(graphs, connected, strict=True):
        assert tuple(replace(n, after=()) for n in after.nodes) == before.nodes
        assert any(n.after for n in after.nodes)
    model = compiler.index(plan, request, settled, connected, storage, plans)
    assert model_text(model) == model_text(compile_model(EXAMPLE, request))
