"""Type rules of the ops that look at images: convolution, normalisation, pooling, padding, views (see ``op_types``)."""

from __future__ import annotations

from renaissance.core.dtype import DType
from renaissance.core.region import align
from renaissance.core.shape import Shape
from renaissance.graph.op_types import (
    COUNTER,
    Attrs,
    FitRule,
    TensorType,
    TypeRule,
    Types,
    fail,
    same_float,
    same_type,
    vector,
    want,
)

PADDED_CHANNELS = 8
"""CHANNEL_PADDING fills up to a multiple of this many channels (spec/framework 3.1)."""
ONE_BYTE_KERNEL = 15
"""Largest pooling window whose positions fit one unsigned byte with values to spare; larger ones take two bytes."""


def window_output(op: str, shape: Shape, kernel: tuple[int, int], attrs: Attrs, channels: int) -> Shape:
    """Shape after a sliding window: floor((in + 2 pad - kernel) / stride) + 1 along H and W."""
    stride, pad = int(attrs["stride"]), int(attrs["pad"])
    height, width = ((size + 2 * pad - k) // stride + 1 for size, k in zip((shape.h, shape.w), kernel, strict=True))
    if min(height, width) < 1:
        raise fail(
            op,
            f"input {shape} with pad {pad} is smaller than the window {kernel[0]}x{kernel[1]}; use a larger image, "
            "more padding or fewer layers that shrink it",
        )
    return Shape(shape.n, height, width, channels)


def _conv_output(op: str, x: TensorType, w: TensorType, attrs: Attrs) -> TensorType:
    groups = int(attrs["groups"])
    k, r, s, c = w.shape.dims
    if c * groups != x.shape.c or k % groups:
        raise fail(op, f"input {x.shape} and weight {w.shape} in {groups} groups; expected [K,R,S,C/groups]")
    return TensorType(window_output(op, x.shape, (r, s), attrs, k), same_float(op, (x, w)))


def conv_fwd(ts: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    y = _conv_output("CONV_FWD", ts[0], ts[1], attrs)
    if len(ts) > 2:
        want("CONV_FWD", "bias", ts[2], vector(y.shape.c))
    return (y,)


def conv_inf(ts: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, w, scale, bias, *rest = ts
    y = _conv_output("CONV_INF", x, w, attrs)
    vectors = [("eq_scale", scale), ("eq_bias", bias)] + ([("b", rest.pop(0))] if attrs["bias"] else [])
    for role, given in vectors:
        want("CONV_INF", role, given, vector(y.shape.c))
    for given in rest:
        want("CONV_INF", "residual", given, y)
    return (y,)


def conv_bwd_weight(ts: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    dy, x = ts
    kernel, groups = int(attrs["kernel"]), int(attrs["groups"])
    same_float("CONV_BWD_WEIGHT", ts)
    expected = window_output("CONV_BWD_WEIGHT", x.shape, (kernel, kernel), attrs, dy.shape.c)
    if dy.shape != expected or x.shape.c % groups:
        raise fail("CONV_BWD_WEIGHT", f"gradient {dy.shape} with input {x.shape}; expected a gradient {expected}")
    weight = Shape(dy.shape.c, kernel, kernel, x.shape.c // groups)
    return TensorType(weight, DType.FP32), vector(dy.shape.c)


def given_shape(ts: Types, attrs: Attrs) -> tuple[TensorType | None, ...]:
    """For gradients of data whose shape only the declaration knows."""
    return (None,)


def conv_bwd_data_fits(ts: Types, outputs: Types, attrs: Attrs) -> None:
    dy, w = ts
    want("CONV_BWD_DATA", "dy", dy, _conv_output("CONV_BWD_DATA", outputs[0], w, attrs))


# Normalisation.


def bn_fwd(ts: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, *vectors, valid = ts[:6]
    column = vector(x.shape.c)
    for role, given in zip(("gamma", "beta", "prev_mean", "prev_var"), vectors, strict=True):
        want("BN_FWD", role, given, column)
    want("BN_FWD", "batch_valid", valid, COUNTER)
    return (same_type("BN_FWD", (x, *ts[6:])), column, column, column, column)


def bn_bwd(ts: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    dy, x, *vectors, valid = ts[:6]
    column = vector(x.shape.c)
    for role, given in zip(("gamma", "saved_mean", "saved_inv_std"), vectors, strict=True):
        want("BN_BWD", role, given, column)
    want("BN_BWD", "batch_valid", valid, COUNTER)
    dx = same_type("BN_BWD", (dy, x, *ts[6:]))
    return (dx, column, column, dx) if attrs["residual"] else (dx, column, column)


def bn_inf(ts: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, scale, bias, *residual = ts
    for role, given in (("eq_scale", scale), ("eq_bias", bias)):
        want("BN_INF", role, given, vector(x.shape.c))
    return (same_type("BN_INF", (x, *residual)),)


def bn_update_eq_params(ts: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    column = vector(ts[0].shape.c)
    for role, given in zip(("gamma", "beta", "mean", "var"), ts, strict=True):
        want("BN_UPDATE_EQ_PARAMS", role, given, column)
    return column, column


# Pooling.


def _pool_output(op: str, x: TensorType, attrs: Attrs) -> TensorType:
    kernel, pad = int(attrs["kernel"]), int(attrs["pad"])
    if 2 * pad > kernel:
        raise fail(op, f"pad {pad} with a window of {kernel}; expected at most half the window")
    return TensorType(window_output(op, x.shape, (kernel, kernel), attrs, x.shape.c), same_float(op, (x,)))


def pool(op: str) -> TypeRule:
    def rule(ts: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        return (_pool_output(op, ts[0], attrs),)

    return rule


def _pool_index(y: Shape, attrs: Attrs) -> TensorType:
    size = 1 if int(attrs["kernel"]) <= ONE_BYTE_KERNEL else 2
    return TensorType(Shape(y.n, y.h, y.w, y.c * size), DType.INT8)


def maxpool_fwd(ts: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    y = _pool_output("MAXPOOL_FWD", ts[0], attrs)
    return y, _pool_index(y.shape, attrs)


def maxpool_bwd_fits(ts: Types, outputs: Types, attrs: Attrs) -> None:
    dy, index = ts
    want("MAXPOOL_BWD", "dy", dy, _pool_output("MAXPOOL_BWD", outputs[0], attrs))
    want("MAXPOOL_BWD", "index", index, _pool_index(dy.shape, attrs))


def avgpool_bwd_fits(ts: Types, outputs: Types, attrs: Attrs) -> None:
    want("AVGPOOL_BWD", "dy", ts[0], _pool_output("AVGPOOL_BWD", outputs[0], attrs))


def gap_fwd(ts: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    return (TensorType(Shape(ts[0].shape.n, 1, 1, ts[0].shape.c), same_float("GAP_FWD", ts)),)


# Padding and views.


def channel_padding(ts: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    n, h, w, c = ts[0].shape.dims
    return (TensorType(Shape(n, h, w, align(c, PADDED_CHANNELS)), same_float("CHANNEL_PADDING_FWD", ts)),)


def inverse_of(op: str, forward: TypeRule) -> FitRule:
    """The check of a one-input gradient: the forward rule applied to the gradient of x gives the type of dy."""

    def fits(ts: Types, outputs: Types, attrs: Attrs) -> None:
        (expected,) = forward(outputs, attrs)
        if ts[0] != expected:
            raise fail(op, f"dy is {ts[0]}, dx {outputs[0]}; expected a dy of {expected}")

    return fits
