"""NumPy reference of every op: the golden model for tests, and what runs where oneDNN has no wheel.

Plain and readable comes first. Storage is what the tensors say (float32, int32, bfloat16 or float16), arithmetic is
float64, and each result is rounded once when it is stored. Semantics: spec/framework 3.9, 3.11, 4.1, 4.2, with what
spec 10 lists as wrong done right: a flagged step leaves no trace, rows past the valid count count for nothing,
clipping acts on unscaled gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from renaissance.backend.registry import Call, CaptureContext, Launcher, OpRegistry, PythonCall, label
from renaissance.core.dtype import DType, bf16_from_fp32, fp32_from_bf16
from renaissance.core.errors import DeviceError
from renaissance.core.region import Span
from renaissance.graph.computation_graph import Node
from renaissance.graph.ops import GRADIENT_LIMIT

F64 = npt.NDArray[np.float64]
MASKED = -1
TOP_K = 5
LARGEST_SCALE = 2.0**31
ROUNDING = 2.0**-24
"""Largest relative error of rounding to float32."""


class Operands:
    """Reads and writes the tensors and spans of one node as float64 (or integer) arrays."""

    def __init__(self, node: Node, ctx: CaptureContext) -> None:
        self.node = node
        self._ctx = ctx

    def read(self, tensor_id: int) -> F64:
        """A floating tensor [N,H,W,C] as float64."""
        return _widen(self._ctx.array(tensor_id), self._ctx.tensor(tensor_id).dtype)

    def rows(self, tensor_id: int) -> F64:
        """A floating tensor as a float64 matrix [N, H*W*C]."""
        values = self.read(tensor_id)
        return values.reshape(values.shape[0], -1)

    def write(self, tensor_id: int, values: npt.ArrayLike) -> None:
        """Round ``values`` once to the tensor's dtype and store them in its shape."""
        out = self._ctx.array(tensor_id)
        out[...] = _narrow(np.asarray(values), self._ctx.tensor(tensor_id).dtype).reshape(out.shape)

    def ints(self, tensor_id: int) -> npt.NDArray[np.int32]:
        """An INT32 tensor as a flat array (a view)."""
        return self._ctx.array(tensor_id).reshape(-1)

    def number(self, tensor_id: int) -> float:
        """A scalar tensor, float or integer."""
        value = self._ctx.array(tensor_id).reshape(-1)[0]
        return float(_widen(np.asarray([value]), self._ctx.tensor(tensor_id).dtype)[0])

    def flag(self, tensor_id: int) -> bool:
        return bool(self.ints(tensor_id)[0])

    def span(self, span: Span, dtype: DType = DType.FP32) -> npt.NDArray[Any]:
        """A writable flat view of a span."""
        return self._ctx.span_array(span, dtype)

    def span_dtype(self, span: Span) -> DType:
        return span.first.dtype(self._ctx.half)

    def attr(self, name: str, default: float) -> float:
        return float(self.node.attrs.get(name, default))


def _widen(values: npt.NDArray[Any], dtype: DType) -> F64:
    with np.errstate(invalid="ignore"):  # a signalling NaN is data here
        return (fp32_from_bf16(values) if dtype is DType.BF16 else values).astype(np.float64)


def _narrow(values: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any]:
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype is DType.BF16:
            return bf16_from_fp32(np.atleast_1d(values).astype(np.float32))
        return values.astype(dtype.numpy)


# Compute ops


def fc_fwd(op: Operands) -> None:
    """y = act(x . w^T + b); the bias may be absent."""
    x, w, *bias = op.node.inputs
    y = op.rows(x) @ op.rows(w).T
    if bias:
        y += op.read(bias[0]).reshape(-1)
    if op.node.attrs.get("activation", "none") == "relu":
        y = np.where(y <= 0, 0.0, y)
    op.write(op.node.outputs[0], y)


def fc_bwd_weight(op: Operands) -> None:
    """dw = dy^T . x and (with a bias) db = sum of dy over the rows, both overwritten."""
    dy, x = (op.rows(i) for i in op.node.inputs)
    op.write(op.node.outputs[0], dy.T @ x)
    if len(op.node.outputs) > 1:
        op.write(op.node.outputs[1], dy.sum(axis=0))


def fc_bwd_data(op: Operands) -> None:
    """dx = dy . w, zeroed where the layer below was cut off by its ReLU."""
    dx = op.rows(op.node.inputs[0]) @ op.rows(op.node.inputs[1])
    if op.node.attrs.get("mask", "none") == "relu":
        dx = np.where(op.rows(op.node.inputs[2]) <= 0, 0.0, dx)
    op.write(op.node.outputs[0], dx)


def relu_fwd(op: Operands) -> None:
    x = op.read(op.node.inputs[0])
    op.write(op.node.outputs[0], np.where(x <= 0, 0.0, x))


def relu_bwd(op: Operands) -> None:
    dy, y = (op.read(i) for i in op.node.inputs[:2])
    op.write(op.node.outputs[0], np.where(y <= 0, 0.0, dy))


def reshape(op: Operands) -> None:
    """FLATTEN_FWD and FLATTEN_BWD: the same logical elements in another shape."""
    op.write(op.node.outputs[0], op.read(op.node.inputs[0]))


def label_copy(op: Operands) -> None:
    op.ints(op.node.outputs[0])[:] = op.ints(op.node.inputs[0])


def softmax_ce(op: Operands, logits: F64, labels: npt.NDArray[np.int32], smoothing: float) -> tuple[F64, F64]:
    """(probabilities [N,K], losses [N]); masked rows give zeros, rows with NaN or +Inf give NaN."""
    count, classes = logits.shape
    bad = np.flatnonzero((labels < MASKED) | (labels >= classes))
    if bad.size:
        raise DeviceError(
            f"{label(op.node)}: row {bad[0]} has label {labels[bad[0]]}; expected {MASKED} (masked) to {classes - 1}"
        )
    with np.errstate(invalid="ignore", under="ignore"):
        shifted = logits - logits.max(axis=1, keepdims=True)
        shifted[np.isnan(shifted).any(axis=1)] = np.nan
        exponentials = np.exp(shifted)
        total = exponentials.sum(axis=1, keepdims=True)
        losses = np.log(total[:, 0]) - (1 - smoothing) * shifted[np.arange(count), np.maximum(labels, 0)]
        if smoothing > 0:
            losses -= smoothing / classes * shifted.sum(axis=1)
        probs = exponentials / total
    masked = labels == MASKED
    probs[masked], losses[masked] = 0.0, 0.0
    return probs, losses


def softmax_ce_fwd(op: Operands) -> None:
    logits, labels, smoothing, valid = op.node.inputs
    probs, losses = softmax_ce(op, op.rows(logits), op.ints(labels), op.number(smoothing))
    op.write(op.node.outputs[0], probs)
    op.write(op.node.outputs[1], losses)
    op.write(op.node.outputs[2], losses.sum() / max(op.number(valid), 1))


def softmax_ce_inf(op: Operands) -> None:
    logits, labels, smoothing, valid = op.node.inputs
    z, y, divisor = op.rows(logits), op.ints(labels), max(op.number(valid), 1)
    probs, losses = softmax_ce(op, z, y, op.number(smoothing))
    finite = ~np.isnan(z).any(axis=1)
    predicted = np.where(finite, np.where(np.isnan(z), -np.inf, z).argmax(axis=1), MASKED)
    own = z[np.arange(len(y)), np.maximum(y, 0)][:, None]
    lower = np.arange(z.shape[1])[None, :] < y[:, None]
    rank = ((z > own) | ((z == own) & lower)).sum(axis=1)
    counts = finite & (y != MASKED)
    top1 = (counts & (rank == 0)).sum()
    top5 = (counts & (rank < TOP_K)).sum() if z.shape[1] >= TOP_K else top1
    for out, value in zip(
        op.node.outputs[1:], (probs, losses, losses.sum() / divisor, top1 / divisor, top5 / divisor), strict=True
    ):
        op.write(out, value)
    op.ints(op.node.outputs[0])[:] = predicted


def softmax_ce_bwd(op: Operands) -> None:
    """(p - eps/K - (1-eps) [c == y]) * scaling / valid."""
    probs, labels, smoothing, valid, scaling = op.node.inputs
    p, y, eps = op.rows(probs), op.ints(labels), op.number(smoothing)
    grad = p - eps / p.shape[1]
    grad[np.arange(len(y)), np.maximum(y, 0)] -= 1 - eps
    grad *= op.number(scaling) / max(op.number(valid), 1)
    grad[y == MASKED] = 0.0
    op.write(op.node.outputs[0], grad)


# Step state


def adam_step(op: Operands) -> None:
    has_nan, step, beta1, beta2 = op.node.inputs
    if op.flag(has_nan):
        return
    t = int(op.ints(step)[0]) + 1
    op.ints(op.node.outputs[0])[0] = t
    for out, beta in zip(op.node.outputs[1:], (beta1, beta2), strict=True):
        op.write(out, 1.0 / (1.0 - op.number(beta) ** t))


def grad_scaling(op: Operands) -> None:
    has_nan, scaling, good_steps = op.node.inputs[:3]
    scale, good = op.number(scaling), op.ints(good_steps)
    if op.flag(has_nan):
        op.write(scaling, max(op.attr("floor", 1.0), scale * op.attr("backoff", 0.5)))
        good[0] = 0
        return
    good[0] += 1
    if good[0] >= op.attr("growth_interval", 2000):
        op.write(scaling, min(LARGEST_SCALE, scale * 2.0))
        good[0] = 0


def accum_metrics(op: Operands) -> None:
    """sum += valid * value; a product within float32's rounding of a whole number (of hits) is that number."""
    *sums, count = op.node.outputs
    valid, *values = op.node.inputs
    if len(values) == len(sums) + 1 and op.flag(values.pop()):
        return
    n = op.number(valid)
    for value, total in zip(values, sums, strict=True):
        product = n * op.number(value)
        if np.isfinite(product) and abs(product - np.floor(product + 0.5)) <= abs(product) * ROUNDING:
            product = np.floor(product + 0.5)
        op.write(total, op.number(total) + product)
    op.write(count, op.number(count) + n)


# Range ops


def range_clear(op: Operands) -> None:
    for span in op.node.spans_out:
        op.span(span, DType.UINT8)[:] = 0


def range_copy(op: Operands) -> None:
    op.span(op.node.spans_out[0], DType.UINT8)[:] = op.span(op.node.spans_in[0], DType.UINT8)


def range_cast(op: Operands) -> None:
    """Both casts: element count is the smaller of the two spans."""
    source, out = op.node.spans_in[0], op.node.spans_out[0]
    from_type, to_type = op.span_dtype(source), op.span_dtype(out)
    values, target = op.span(source, from_type), op.span(out, to_type)
    n = min(values.size, target.size)
    target[:n] = _narrow(_widen(values[:n], from_type), to_type)


def range_check_nan(op: Operands) -> None:
    """flag := any NaN, Inf or, without clip, magnitude from GRADIENT_LIMIT on; with clip > 0 the unscaled gradient is
    clamped to +-clip."""
    spans = [op.span(span) for span in op.node.spans_in]
    clip = op.attr("clip", 0.0)
    overflow = np.inf if clip > 0 else GRADIENT_LIMIT
    op.ints(op.node.outputs[0])[0] = int(any(not (np.abs(g) < overflow).all() for g in spans))
    if clip > 0:
        limit = np.float32(clip) * np.float32(op.number(op.node.inputs[0]))
        for g in spans:
            np.clip(g, -limit, limit, out=g)


def range_update(op: Operands) -> None:
    """All optimizer kinds, spec/framework 4.2; g is the gradient divided by the loss scale."""
    kind = op.node.op.removeprefix("RANGE_UPDATE_")
    *ids, scaling, has_nan = op.node.inputs
    if op.flag(has_nan):
        return
    lr, wd, *rest = (op.number(i) for i in ids)
    decay = wd if op.node.attrs["decay"] else 0.0
    w_span, *other = op.node.spans_out
    stored, *states = (op.span(s) for s in (w_span, *op.node.spans_in[1:]))
    w = stored.astype(np.float64)
    g = op.span(op.node.spans_in[0]).astype(np.float64) / op.number(scaling)
    with np.errstate(under="ignore"):
        stored[:] = UPDATES[kind](w, g, lr, decay, rest, states)
    for span in other:
        if op.span_dtype(span).is_half:
            op.span(span, op.span_dtype(span))[:] = _narrow(stored.astype(np.float64), op.span_dtype(span))


States = Sequence[npt.NDArray[np.float32]]


def sgd(w: F64, g: F64, lr: float, decay: float, rest: Sequence[float], states: States) -> F64:
    return w * (1 - lr * decay) - lr * g


def momentum(w: F64, g: F64, lr: float, decay: float, rest: Sequence[float], states: States) -> F64:
    m = rest[0] * states[0].astype(np.float64) + g
    states[0][:] = m
    return w * (1 - lr * decay) - lr * m


def nesterov(w: F64, g: F64, lr: float, decay: float, rest: Sequence[float], states: States) -> F64:
    m = rest[0] * states[0].astype(np.float64) + g
    states[0][:] = m
    return w * (1 - lr * decay) - lr * (rest[0] * m + g)


def adam(w: F64, g: F64, lr: float, decay: float, rest: Sequence[float], states: States) -> F64:
    return _adam(w, g + decay * w, lr, rest, states)


def adamw(w: F64, g: F64, lr: float, decay: float, rest: Sequence[float], states: States) -> F64:
    return _adam(w * (1 - lr * decay), g, lr, rest, states)


def _adam(w: F64, g: F64, lr: float, rest: Sequence[float], states: States) -> F64:
    beta1, beta2, eps, correction1, correction2 = rest
    m = beta1 * states[0].astype(np.float64) + (1 - beta1) * g
    v = beta2 * states[1].astype(np.float64) + (1 - beta2) * g * g
    states[0][:], states[1][:] = m, v
    return w - lr * (m * correction1) / (np.sqrt(v * correction2) + eps)


UPDATES = {"SGD": sgd, "MOMENTUM": momentum, "NESTEROV": nesterov, "ADAM": adam, "ADAMW": adamw}

OPS: dict[str, Callable[[Operands], None]] = {
    "FC_FWD": fc_fwd,
    "FC_BWD_WEIGHT": fc_bwd_weight,
    "FC_BWD_DATA": fc_bwd_data,
    "RELU_FWD": relu_fwd,
    "RELU_BWD": relu_bwd,
    "FLATTEN_FWD": reshape,
    "FLATTEN_BWD": reshape,
    "LABEL_COPY": label_copy,
    "SOFTMAX_CE_FWD": softmax_ce_fwd,
    "SOFTMAX_CE_BWD": softmax_ce_bwd,
    "SOFTMAX_CE_INF": softmax_ce_inf,
    "ADAM_STEP": adam_step,
    "GRAD_SCALING": grad_scaling,
    "ACCUM_METRICS": accum_metrics,
    "RANGE_CLEAR": range_clear,
    "RANGE_COPY": range_copy,
    "RANGE_CAST_FP32_TO_HALF": range_cast,
    "RANGE_CAST_HALF_TO_FP32": range_cast,
    "RANGE_CHECK_NAN": range_check_nan,
    **{f"RANGE_UPDATE_{kind}": range_update for kind in UPDATES},
}


def _launcher(function: Callable[[Operands], None]) -> Launcher:
    def launch(node: Node, ctx: CaptureContext) -> Sequence[Call]:
        op = Operands(node, ctx)
        return [PythonCall(lambda: function(op), label(node))]

    return launch


def register(registry: OpRegistry) -> None:
    """Add every op of this module to ``registry`` as backend "reference"."""
    for name, function in OPS.items():
        registry.register(name, "reference", _launcher(function))
