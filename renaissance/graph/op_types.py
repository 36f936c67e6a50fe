"""Type rules: shape and element type of an op's outputs from those of its inputs. The op table points here.

This file has the types themselves, what rules share, and the rules of products, activations, the loss and the updates;
``op_types_image`` has those of convolution, normalisation, pooling and what else looks at H and W.

A rule returns one entry per output that is present. None stands for a shape that the inputs do not determine (the H of
a strided convolution's input): the declaration gives it, and the ``fits`` check of the op applies the forward rule to
it. Rules raise ShapeError or DTypeError whose text starts with the name of the op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from renaissance.core.dtype import DType
from renaissance.core.errors import DTypeError, ShapeError
from renaissance.core.shape import Shape
from renaissance.graph.computation_graph import AttrValue

FLOATS = (DType.FP32, DType.FP16, DType.BF16)


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape and element type of one tensor in one variant. ``dtype`` None in a rule: any float, the caller's choice."""

    shape: Shape
    dtype: DType | None

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype.name if self.dtype is not None else 'float'}"


Types = Sequence[TensorType]
Attrs = Mapping[str, AttrValue]
TypeRule = Callable[[Types, Attrs], tuple[TensorType | None, ...]]
FitRule = Callable[[Types, Types, Attrs], None]
"""(inputs, outputs, attributes) -> nothing, or an error."""

SAVES_INPUT = frozenset({"silu", "hardswish"})
"""Activations whose derivative is computed from x; that of the others from y."""

SCALAR = TensorType(Shape(), DType.FP32)
COUNTER = TensorType(Shape(), DType.INT32)


def fail(op: str, text: str) -> ShapeError:
    return ShapeError(f"{op}: {text}")


def features(t: TensorType) -> int:
    """Values per sample."""
    return t.shape.numel // t.shape.n


def same_float(op: str, types: Types) -> DType:
    """The one floating type of ``types``; raises DTypeError."""
    dtype = types[0].dtype
    if dtype not in FLOATS or any(t.dtype is not dtype for t in types):
        raise DTypeError(f"{op}: element types {[str(t) for t in types]}; expected one floating type")
    return dtype


def same_type(op: str, types: Types) -> TensorType:
    """The type that all of ``types`` have; raises ShapeError or DTypeError."""
    dtype = same_float(op, types)
    if any(t.shape != types[0].shape for t in types):
        raise fail(op, f"shapes {', '.join(str(t.shape) for t in types)}; expected equal ones")
    return TensorType(types[0].shape, dtype)


def vector(channels: int) -> TensorType:
    """A per-channel parameter or statistic."""
    return TensorType(Shape.of(channels), DType.FP32)


def want(op: str, role: str, given: TensorType, expected: TensorType) -> None:
    """Raise ShapeError unless a tensor has exactly this type."""
    if given != expected:
        raise fail(op, f"{role} is {given}; expected {expected}")


# Products.


def fc_fwd(ts: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, w = ts[:2]
    if features(x) != w.shape.c:
        raise fail("FC_FWD", f"input {x.shape} has {features(x)} values per sample, the weight reads {w.shape.c}")
    if len(ts) > 2:
        want("FC_FWD", "bias", ts[2], vector(w.shape.n))
    return (TensorType(Shape(x.shape.n, 1, 1, w.shape.n), same_float("FC_FWD", (x, w))),)


def fc_bwd_weight(ts: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    dy, x = ts
    same_float("FC_BWD_WEIGHT", ts)
    if dy.shape.n != x.shape.n:
        raise fail("FC_BWD_WEIGHT", f"gradient {dy.shape} and input {x.shape} have different batch sizes")
    return TensorType(Shape(features(dy), 1, 1, features(x)), DType.FP32), vector(features(dy))


def fc_bwd_data(ts: Types, attrs: Attrs) -> tuple[TensorType | None, ...]:
    dy, w = ts[:2]
    same_float("FC_BWD_DATA", ts)
    if features(dy) != w.shape.n:
        raise fail("FC_BWD_DATA", f"gradient {dy.shape} does not fit the weight {w.shape}")
    if len(ts) == 3 and features(ts[2]) != w.shape.c:
        raise fail("FC_BWD_DATA", f"mask {ts[2].shape} does not fit the weight {w.shape}")
    return (None,)


def fc_bwd_data_fits(ts: Types, outputs: Types, attrs: Attrs) -> None:
    """dx may have any shape with as many values per sample as the weight reads."""
    dy, w, *_ = ts
    if outputs[0].shape.n != dy.shape.n or features(outputs[0]) != w.shape.c or outputs[0].dtype is not dy.dtype:
        raise fail("FC_BWD_DATA", f"dx is {outputs[0]}; expected {dy.shape.n} rows of {w.shape.c} values like {dy}")


# Element by element.


def elementwise(op: str) -> TypeRule:
    """The rule of an op whose tensors all have one type, its one output too."""

    def rule(ts: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        return (same_type(op, ts),)

    return rule


def flatten(ts: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    return (TensorType(Shape(ts[0].shape.n, 1, 1, features(ts[0])), same_float("FLATTEN_FWD", ts)),)


def label_copy(ts: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    if ts[0].dtype is not DType.INT32:
        raise DTypeError(f"LABEL_COPY: labels are {ts[0]}; expected INT32")
    return (ts[0],)


def dropout(op: str) -> TypeRule:
    """Values and the two halves of the seed and the step count."""

    def rule(ts: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        for role, given in zip(("seed_low", "seed_high", "dropout_step"), ts[1:], strict=True):
            want(op, role, given, COUNTER)
        return (TensorType(ts[0].shape, same_float(op, ts[:1])),)

    return rule


# The loss.


def _check_logits(op: str, logits: TensorType, label: TensorType) -> Shape:
    shape = logits.shape
    if shape.h != 1 or shape.w != 1 or label != TensorType(Shape(shape.n), DType.INT32):
        raise fail(op, f"logits {logits} with labels {label}; expected [N,1,1,K] and [N,1,1,1] INT32")
    return shape


def softmax_fwd(ts: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    shape = _check_logits("SOFTMAX_CE_FWD", ts[0], ts[1])
    return TensorType(shape, DType.FP32), TensorType(Shape(shape.n), DType.FP32), SCALAR


def softmax_bwd(ts: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    return (TensorType(_check_logits("SOFTMAX_CE_BWD", ts[0], ts[1]), None),)


def softmax_inf(ts: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    shape = _check_logits("SOFTMAX_CE_INF", ts[0], ts[1])
    column = Shape(shape.n)
    predicted = TensorType(column, DType.INT32)
    return predicted, TensorType(shape, DType.FP32), TensorType(column, DType.FP32), SCALAR, SCALAR, SCALAR


# Updates.


def lars_update(ts: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    """Seven scalars (the last one the flag) and a gradient; weight and moment are of its type."""
    *scalars, flag, grad = ts
    for given in scalars:
        want("LARS_UPDATE", "a scalar", given, SCALAR)
    want("LARS_UPDATE", "has_nan", flag, COUNTER)
    want("LARS_UPDATE", "grad", grad, TensorType(grad.shape, DType.FP32))
    return grad, grad, SCALAR, TensorType(grad.shape, None)
