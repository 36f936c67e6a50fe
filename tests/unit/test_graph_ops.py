"""The op table: complete, self-consistent, and its shape rules refuse what does not fit."""

import pytest

from renaissance.core.dtype import DType
from renaissance.core.errors import DTypeError, GraphError, MissingKernelError, RenaissanceError, ShapeError
from renaissance.core.shape import Shape
from renaissance.graph import OPS, GraphId, Variant, op_def
from renaissance.graph.ids import train_program, val_program
from renaissance.graph.ops import Place, TensorType, check_arity, require_supported

BF16, FP32, INT32 = DType.BF16, DType.FP32, DType.INT32


def typed(dtype: DType, *sizes: int) -> TensorType:
    return TensorType(Shape(*sizes), dtype)


def test_the_vocabulary_is_complete() -> None:
    compute = {
        "FC_FWD", "FC_BWD_WEIGHT", "FC_BWD_DATA", "RELU_FWD", "RELU_BWD", "FLATTEN_FWD", "FLATTEN_BWD", "LABEL_COPY",
        "SOFTMAX_CE_FWD", "SOFTMAX_CE_BWD", "SOFTMAX_CE_INF", "ADAM_STEP", "ACCUM_METRICS", "GRAD_SCALING",
    }  # fmt: skip
    ranges = {"CHECK_NAN", "CLEAR", "COPY", "CAST_FP32_TO_HALF", "CAST_HALF_TO_FP32", "MEAN_ALLREDUCE"} | {
        f"UPDATE_{kind}" for kind in ("SGD", "MOMENTUM", "NESTEROV", "ADAM", "ADAMW")
    }
    assert set(OPS) == compute | {f"RANGE_{name}" for name in ranges}


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
        assert len(set(roles)) == len(roles)
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
    assert order[-1] is GraphId.OPTIMIZER
    letter = "AB"[slot]
    assert {g.name[-1] for g in (*order, *val_program(slot)) if g.name.endswith(("_A", "_B"))} == {letter}


X, W, B = typed(BF16, 5, 2, 2, 3), typed(BF16, 7, 1, 1, 12), typed(FP32, 1, 1, 1, 7)
DY = typed(BF16, 5, 1, 1, 7)
LABEL = typed(INT32, 5, 1, 1, 1)


def test_fc_rules_read_a_sample_as_one_row() -> None:
    assert op_def("FC_FWD").types([X, W, B], {}) == (DY,)  # type: ignore[misc]
    dw, db = op_def("FC_BWD_WEIGHT").types([DY, X], {})  # type: ignore[misc]
    assert (dw, db) == (typed(FP32, 7, 1, 1, 12), B)
    (dx,) = op_def("FC_BWD_DATA").types([DY, W, X], {"mask": "relu"})  # type: ignore[misc]
    assert (dx.shape.n, dx.shape.numel, dx.dtype) == (5, 60, BF16)


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
        ("FC_BWD_DATA", [DY, W], {"mask": "relu"}, ShapeError),
        ("FC_BWD_DATA", [DY, W, X], {"mask": "none"}, ShapeError),
        ("FC_BWD_DATA", [DY, W, DY], {"mask": "relu"}, ShapeError),
        ("RELU_BWD", [X, DY], {}, ShapeError),
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
    with pytest.raises(MissingKernelError, match="FC_FWD, RELU_FWD"):
        require_supported(frozenset({"RELU_FWD", "FC_FWD", "LABEL_COPY"}), frozenset({"LABEL_COPY"}))
    require_supported(frozenset({"RELU_FWD"}), None)
    with pytest.raises(GraphError, match="expected x, w"):
        check_arity("FC_FWD #1", "inputs", 4, ("x", "w", "b?"))
