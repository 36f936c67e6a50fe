"""The op table: complete, self-consistent, and its shape rules refuse what does not fit."""

import pytest
from graph_nodes import node

from renaissance.core.dtype import DType
from renaissance.core.errors import DTypeError, GraphError, MissingKernelError, RenaissanceError, ShapeError
from renaissance.core.shape import Shape
from renaissance.graph import OPS, GraphId, Variant, op_def
from renaissance.graph.computation_graph import AttrValue
from renaissance.graph.ids import train_program, val_program
from renaissance.graph.op_types import SCALAR
from renaissance.graph.ops import (
    Place,
    TensorType,
    check_arity,
    check_types,
    named_inputs,
    named_outputs,
    require_supported,
    roles_for,
)

BF16, FP32, INT32 = DType.BF16, DType.FP32, DType.INT32


def typed(dtype: DType, *sizes: int) -> TensorType:
    return TensorType(Shape(*sizes), dtype)


def test_the_vocabulary_is_complete() -> None:
    forward_backward = ["ACT", "AVGPOOL", "BN", "CHANNEL_PADDING", "DROPOUT", "FLATTEN", "GAP", "MAXPOOL", "SOFTMAX_CE"]
    compute = {f"{name}_{way}" for name in forward_backward for way in ("FWD", "BWD")}
    compute |= {f"{name}_{way}" for name in ("FC", "CONV") for way in ("FWD", "BWD_WEIGHT", "BWD_DATA")}
    compute |= {f"{name}_INF" for name in ("BN", "CONV", "MAXPOOL", "SOFTMAX_CE")}
    compute |= {"ADD_FWD", "GRAD_SUM", "INPUT_VIEW", "MEAN_LOGITS", "LABEL_COPY", "BN_UPDATE_EQ_PARAMS"}
    scalars = {"ADAM_STEP", "ACCUM_METRICS", "GRAD_SCALING", "DROPOUT_ADVANCE", "FLAG_OR", "LARS_UPDATE"}
    ranges = {"CHECK_NAN", "CLEAR", "COPY", "CAST_FP32_TO_HALF", "CAST_HALF_TO_FP32", "MEAN_ALLREDUCE", "EMA_UPDATE"}
    ranges |= {f"UPDATE_{kind}" for kind in ("SGD", "MOMENTUM", "NESTEROV", "ADAM", "ADAMW")}
    assert set(OPS) == compute | scalars | {f"RANGE_{name}" for name in ranges}


@pytest.mark.parametrize("name", sorted(OPS))
def test_absent_roles_are_trailing_and_state_ops_have_no_type_rule(name: str) -> None:
    definition = OPS[name]
    for roles in (
        definition.inputs,
        tuple(o.role for o in definition.outputs),
        tuple(s.role for s in definition.spans_in),
        tuple(s.role for s in definition.spans_out),
    ):
        optional = [r.endswith("?") for r in roles]
        assert optional == sorted(optional)
        decided = roles_for(definition, roles, dict.fromkeys(definition.attrs, "?"))
        assert set(decided) == {r for r in roles if r.removesuffix("?") not in definition.when}
        assert len(set(roles)) == len(roles)
    every = {r.removesuffix("?") for r in (*definition.inputs, *(o.role for o in definition.outputs))}
    assert set(definition.when) <= every
    assert {attr for attr, _ in definition.when.values()} <= set(definition.attrs)
    if definition.types is None:
        assert all(o.place is Place.STATE for o in definition.outputs)
    else:
        assert not definition.spans_in
        assert not definition.spans_out


def test_ids_and_variants_are_the_33_and_the_6() -> None:
    assert [g.value for g in GraphId] == list(range(33))
    assert [v.value for v in Variant] == list(range(6))
    assert [v.is_training for v in Variant] == [True] * 4 + [False] * 2
    assert sum(g.shape_invariant for g in GraphId) == 23


@pytest.mark.parametrize("slot", [0, 1])
def test_metrics_follow_the_nan_check_and_the_update_comes_last(slot: int) -> None:
    order = train_program(slot)
    assert order.index(GraphId.NAN_CHECK_AND_GRAD_SCALING) < order.index(GraphId.ACCUM_METRICS)
    assert order[-2:] == (GraphId.OPTIMIZER, GraphId.EMA_UPDATE)
    letter = "AB"[slot]
    assert {g.name[-1] for g in (*order, *val_program(slot)) if g.name.endswith(("_A", "_B"))} == {letter}


X, W, B = typed(BF16, 5, 2, 2, 3), typed(BF16, 7, 1, 1, 12), typed(FP32, 1, 1, 1, 7)
DY = typed(BF16, 5, 1, 1, 7)
LABEL = typed(INT32, 5, 1, 1, 1)


def test_fc_rules_read_a_sample_as_one_row() -> None:
    assert op_def("FC_FWD").types([X, W, B], {}) == (DY,)  # type: ignore[misc]
    dw, db = op_def("FC_BWD_WEIGHT").types([DY, X], {})  # type: ignore[misc]
    assert (dw, db) == (typed(FP32, 7, 1, 1, 12), B)
    check("FC_BWD_DATA", [DY, W, X], [X], mask="relu")
    with pytest.raises(ShapeError, match="5 rows of 12 values"):
        check("FC_BWD_DATA", [DY, W], [typed(BF16, 5, 2, 2, 4)], mask="none")


IMAGE, VECTOR = typed(BF16, 2, 7, 5, 6), typed(FP32, 1, 1, 1, 6)
CONV = {"stride": 2, "pad": 1, "groups": 3}
KERNEL, CONV_Y = typed(BF16, 9, 3, 3, 2), typed(BF16, 2, 4, 3, 9)
POOL = {"kernel": 3, "stride": 2, "pad": 1}
COUNT = typed(INT32, 1, 1, 1, 1)


def vector(channels: int) -> TensorType:
    return typed(FP32, 1, 1, 1, channels)


def check(op: str, inputs: list[TensorType], outputs: list[TensorType], **attrs: AttrValue) -> None:
    """Roles and types of one use of an op, as the graph verifier checks them."""
    definition = op_def(op)
    check_arity(op, "inputs", len(inputs), roles_for(definition, definition.inputs, attrs))
    check_arity(op, "outputs", len(outputs), roles_for(definition, [o.role for o in definition.outputs], attrs))
    check_types(op, definition, inputs, outputs, attrs)


POOLED = typed(BF16, 2, 4, 3, 6)
USES: list[tuple[str, list[TensorType], list[TensorType], dict[str, AttrValue]]] = [
    ("CONV_FWD", [IMAGE, KERNEL], [CONV_Y], {**CONV, "activation": "relu"}),
    ("CONV_FWD", [IMAGE, KERNEL, vector(9)], [CONV_Y], {**CONV, "activation": "none"}),
    ("CONV_BWD_WEIGHT", [CONV_Y, IMAGE], [typed(FP32, 9, 3, 3, 2), vector(9)], {**CONV, "kernel": 3}),
    ("CONV_BWD_DATA", [CONV_Y, KERNEL], [IMAGE], {**CONV}),
    # H of the input does not follow from that of the output with stride 2
    ("CONV_BWD_DATA", [CONV_Y, KERNEL], [typed(BF16, 2, 8, 6, 6)], {**CONV}),
    (
        "CONV_INF",
        [IMAGE, KERNEL, vector(9), vector(9), vector(9), CONV_Y],
        [CONV_Y],
        {**CONV, "activation": "relu6", "bias": True, "residual": True},
    ),
    (
        "CONV_INF",
        [IMAGE, KERNEL, vector(9), vector(9), CONV_Y],
        [CONV_Y],
        {**CONV, "activation": "none", "bias": False, "residual": True},
    ),
    (
        "BN_FWD",
        [IMAGE, *[VECTOR] * 4, COUNT, IMAGE],
        [IMAGE, *[VECTOR] * 4],
        {"momentum": 0.1, "eps": 1e-5, "activation": "relu6"},
    ),
    (
        "BN_BWD",
        [IMAGE, IMAGE, *[VECTOR] * 3, COUNT],
        [IMAGE, VECTOR, VECTOR],
        {"activation": "none", "dys": 1, "residual": False},
    ),
    (
        "BN_BWD",
        [IMAGE, IMAGE, *[VECTOR] * 3, COUNT, IMAGE, IMAGE],
        [IMAGE, VECTOR, VECTOR, IMAGE],
        {"activation": "relu", "dys": 2, "residual": True},
    ),
    ("BN_INF", [IMAGE, VECTOR, VECTOR, IMAGE], [IMAGE], {"activation": "relu"}),
    ("BN_UPDATE_EQ_PARAMS", [VECTOR] * 4, [VECTOR] * 2, {"eps": 1e-5}),
    ("MAXPOOL_FWD", [IMAGE], [POOLED, typed(DType.INT8, 2, 4, 3, 6)], {**POOL}),
    ("MAXPOOL_BWD", [POOLED, typed(DType.INT8, 2, 4, 3, 6)], [IMAGE], {**POOL}),
    ("MAXPOOL_INF", [IMAGE], [POOLED], {**POOL}),
    # from 16 on a position takes two bytes
    (
        "MAXPOOL_FWD",
        [typed(BF16, 1, 16, 16, 4)],
        [typed(BF16, 1, 1, 1, 4), typed(DType.INT8, 1, 1, 1, 8)],
        {"kernel": 16, "stride": 1, "pad": 0},
    ),
    ("AVGPOOL_FWD", [IMAGE], [POOLED], {**POOL, "count_include_pad": False}),
    ("AVGPOOL_BWD", [POOLED], [IMAGE], {**POOL, "count_include_pad": False}),
    ("GAP_FWD", [IMAGE], [typed(BF16, 2, 1, 1, 6)], {}),
    ("GAP_BWD", [typed(BF16, 2, 1, 1, 6)], [IMAGE], {}),
    ("CHANNEL_PADDING_FWD", [IMAGE], [typed(BF16, 2, 7, 5, 8)], {}),
    ("CHANNEL_PADDING_BWD", [typed(BF16, 2, 7, 5, 8)], [IMAGE], {}),
    ("FLATTEN_BWD", [typed(BF16, 2, 1, 1, 210)], [IMAGE], {}),
    ("DROPOUT_FWD", [IMAGE, COUNT, COUNT, COUNT], [IMAGE], {"p": 0.5, "layer": 1}),
    ("MEAN_LOGITS", [DY] * 5, [DY], {}),
    ("INPUT_VIEW", [IMAGE], [IMAGE], {"flip": True, "dy": 0, "dx": -1}),
    (
        "LARS_UPDATE",
        [*[SCALAR] * 6, COUNT, typed(FP32, 9, 3, 3, 2)],
        [typed(FP32, 9, 3, 3, 2), typed(FP32, 9, 3, 3, 2), SCALAR, KERNEL],
        {"nesterov": True},
    ),
]


@pytest.mark.parametrize("use", USES, ids=lambda use: str(use[0]))
def test_every_rule_takes_what_fits_and_refuses_each_tensor_of_another_shape(
    use: tuple[str, list[TensorType], list[TensorType], dict[str, AttrValue]],
) -> None:
    op, inputs, outputs, attrs = use
    check(op, inputs, outputs, **attrs)
    for tensors in (inputs, outputs):
        for i, given in enumerate(tensors):
            tensors[i] = TensorType(Shape(given.shape.n, given.shape.h, given.shape.w, given.shape.c + 5), given.dtype)
            with pytest.raises((ShapeError, GraphError), match=op):
                check(op, inputs, outputs, **attrs)
            tensors[i] = given


@pytest.mark.parametrize(
    ("op", "inputs", "attrs"),
    [
        ("BN_BWD", 6, {"activation": "relu", "dys": 1, "residual": False}),
        ("BN_BWD", 7, {"activation": "none", "dys": 1, "residual": False}),
        ("BN_BWD", 7, {"activation": "relu", "dys": 2, "residual": False}),
        ("CONV_INF", 5, {**CONV, "activation": "none", "bias": False, "residual": False}),
        ("CONV_INF", 5, {**CONV, "activation": "none", "bias": True, "residual": True}),
        ("FC_BWD_DATA", 2, {"mask": "relu"}),
        ("FC_BWD_DATA", 3, {"mask": "none"}),
    ],
)
def test_an_input_is_there_exactly_when_its_attribute_calls_for_it(
    op: str, inputs: int, attrs: dict[str, AttrValue]
) -> None:
    definition = op_def(op)
    with pytest.raises(GraphError, match=f"{inputs} inputs; expected"):
        check_arity(op, "inputs", inputs, roles_for(definition, definition.inputs, attrs))


def test_inputs_and_outputs_are_known_by_role() -> None:
    folded = node(0, "CONV_INF", (1, 2, 3, 4, 5), (6,), **CONV, activation="none", bias=False, residual=True)
    assert named_inputs(folded) == {"x": 1, "w": 2, "eq_scale": 3, "eq_bias": 4, "residual": 5}
    bn = node(0, "BN_BWD", range(6), (10, 11, 12, 13), activation="none", dys=1, residual=True)
    assert named_outputs(bn) == {"dx": 10, "dgamma": 11, "dbeta": 12, "dresidual": 13}
    assert named_inputs(node(0, "FC_FWD", (1, 2), (3,), activation="none")) == {"x": 1, "w": 2}


def test_a_window_larger_than_the_image_is_named_with_what_to_do() -> None:
    with pytest.raises(ShapeError, match=r"CONV_FWD: input \[2,7,5,6\] with pad 0 .* 9x9; use a larger image"):
        check("CONV_FWD", [IMAGE, typed(BF16, 4, 9, 9, 6)], [CONV_Y], stride=1, pad=0, groups=1, activation="none")
    with pytest.raises(ShapeError, match=r"MAXPOOL_INF: pad 2 with a window of 3"):
        check("MAXPOOL_INF", [IMAGE], [IMAGE], kernel=3, stride=1, pad=2)


def test_softmax_rules_give_fp32_probabilities_and_scalars() -> None:
    logits = typed(BF16, 5, 1, 1, 3)
    probs, partials, loss = op_def("SOFTMAX_CE_FWD").types([logits, LABEL], {})  # type: ignore[misc]
    assert (probs, partials, loss) == (typed(FP32, 5, 1, 1, 3), typed(FP32, 5, 1, 1, 1), typed(FP32, 1, 1, 1, 1))
    assert len(op_def("SOFTMAX_CE_INF").types([logits, LABEL], {})) == 6  # type: ignore[misc]


@pytest.mark.parametrize(
    ("op", "types", "attrs", "error"),
    [
        ("FC_FWD", [typed(BF16, 5, 1, 1, 11), W, B], {}, ShapeError),
        ("FC_FWD", [X, W, typed(BF16, 1, 1, 1, 7)], {}, ShapeError),
        ("FC_FWD", [typed(FP32, 5, 2, 2, 3), W, B], {}, DTypeError),
        ("FC_FWD", [typed(INT32, 5, 1, 1, 12), typed(INT32, 7, 1, 1, 12)], {}, DTypeError),
        ("FC_BWD_WEIGHT", [typed(BF16, 4, 1, 1, 7), X], {}, ShapeError),
        ("FC_BWD_DATA", [X, W], {"mask": "none"}, ShapeError),
        ("FC_BWD_DATA", [DY, W, DY], {"mask": "relu"}, ShapeError),
        ("ACT_BWD", [X, DY], {}, ShapeError),
        ("LABEL_COPY", [typed(FP32, 5, 1, 1, 1)], {}, DTypeError),
        ("SOFTMAX_CE_FWD", [X, LABEL], {}, ShapeError),
        ("SOFTMAX_CE_FWD", [DY, typed(INT32, 4, 1, 1, 1)], {}, ShapeError),
    ],
)
def test_type_rules_refuse_what_does_not_fit(
    op: str, types: list[TensorType], attrs: dict[str, str], error: type[RenaissanceError]
) -> None:
    with pytest.raises(error, match=op if op != "FLATTEN" else ""):
        op_def(op).types(types, attrs)  # type: ignore[misc]


def test_unknown_and_unsupported_ops_are_named() -> None:
    with pytest.raises(MissingKernelError, match="WARP_DRIVE"):
        op_def("WARP_DRIVE")
    with pytest.raises(MissingKernelError, match="ACT_FWD, FC_FWD"):
        require_supported(frozenset({"ACT_FWD", "FC_FWD", "LABEL_COPY"}), frozenset({"LABEL_COPY"}))
    require_supported(frozenset({"ACT_FWD"}), None)
    with pytest.raises(GraphError, match="expected x, w"):
        check_arity("FC_FWD #1", "inputs", 4, ("x", "w", "b?"))
