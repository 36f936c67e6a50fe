"""What ends a step: NaN check, optimizers, EMA, loss scale, counters, and the copies between regions.

Formulas: spec/framework 3.11 and 4.2. Law 5: an op that reads the flag of a bad step leaves everything as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from renaissance.backend.reference.operands import F64, Op, Operands, narrow, widen
from renaissance.core.dtype import DType
from renaissance.graph.ops import GRADIENT_LIMIT

LARGEST_SCALE = 2.0**31
SMALLEST_NORM = 1e-12
"""Below it LARS takes the trust ratio 1."""
LARGEST_RATIO = 100.0


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


def range_clear(op: Operands) -> None:
    for span in op.node.spans_out:
        op.span(span, DType.UINT8)[:] = 0


def range_copy(op: Operands) -> None:
    """Bytes of one span to another; with a flag among the inputs only when it is 0."""
    if not any(op.flag(i) for i in op.node.inputs):
        op.span(op.node.spans_out[0], DType.UINT8)[:] = op.span(op.node.spans_in[0], DType.UINT8)


def range_cast(op: Operands) -> None:
    """Both casts: element count is the smaller of the two spans."""
    source, out = op.node.spans_in[0], op.node.spans_out[0]
    from_type, to_type = op.span_dtype(source), op.span_dtype(out)
    values, target = op.span(source, from_type), op.span(out, to_type)
    n = min(values.size, target.size)
    target[:n] = narrow(widen(values[:n], from_type), to_type)


def range_check_nan(op: Operands) -> None:
    """flag := any NaN or Inf in any span or, without clip, a gradient from GRADIENT_LIMIT on; with clip > 0 the
    unscaled gradient is clamped to +-clip. The spans after the first are watched only."""
    grad, *watched = (op.span(span) for span in op.node.spans_in)
    clip = op.attr("clip", 0.0)
    overflow = np.inf if clip > 0 else GRADIENT_LIMIT
    clean = (np.abs(grad) < overflow).all() and all(np.isfinite(values).all() for values in watched)
    op.ints(op.node.outputs[0])[0] = int(not clean)
    if clip > 0:
        limit = np.float32(clip) * np.float32(op.number(op.node.inputs[0]))
        np.clip(grad, -limit, limit, out=grad)


def range_ema_update(op: Operands) -> None:
    """E = d E + (1 - d) W."""
    decay, has_nan = op.node.inputs
    if op.flag(has_nan):
        return
    d, average = op.number(decay), op.span(op.node.spans_out[0])
    average[:] = d * average.astype(np.float64) + (1 - d) * op.span(op.node.spans_in[0]).astype(np.float64)


def flag_or(op: Operands) -> None:
    op.ints(op.node.outputs[0])[0] = int(any(op.flag(i) for i in op.node.inputs))


def dropout_advance(op: Operands) -> None:
    """dropout_step += 1 unless the step was skipped."""
    has_nan, _ = op.node.inputs
    op.ints(op.node.outputs[0])[0] += 0 if op.flag(has_nan) else 1


def lars_update(op: Operands) -> None:
    """LARS and LARS-Nesterov of one tensor: r = trust |w| / (|g| + wd |w| + eps), at most 100, 1 for a zero norm."""
    *scalars, scaling, has_nan, grad = op.node.inputs
    weight, m, ratio, *half = op.node.outputs
    if op.flag(has_nan):
        return
    lr, wd, beta, trust, eps = (op.number(i) for i in scalars)
    w, g = op.read(weight), op.read(grad) / op.number(scaling)
    w_norm, g_norm = float(np.linalg.norm(w)), float(np.linalg.norm(g))
    small = w_norm < SMALLEST_NORM or g_norm < SMALLEST_NORM
    r = 1.0 if small else min(trust * w_norm / (g_norm + wd * w_norm + eps), LARGEST_RATIO)
    step = lr * r * (g + wd * w)
    moment = beta * op.read(m) + step
    op.write(ratio, r)
    op.write(m, moment)
    op.write(weight, w - (step + beta * moment if op.node.attrs["nesterov"] else moment))
    for copy in half:
        op.write(copy, op.read(weight))


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
            op.write_span(span, stored.astype(np.float64))


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

OPS: dict[str, Op] = {
    "ADAM_STEP": adam_step,
    "GRAD_SCALING": grad_scaling,
    "DROPOUT_ADVANCE": dropout_advance,
    "FLAG_OR": flag_or,
    "LARS_UPDATE": lars_update,
    "RANGE_CLEAR": range_clear,
    "RANGE_COPY": range_copy,
    "RANGE_CAST_FP32_TO_HALF": range_cast,
    "RANGE_CAST_HALF_TO_FP32": range_cast,
    "RANGE_CHECK_NAN": range_check_nan,
    "RANGE_EMA_UPDATE": range_ema_update,
    **{f"RANGE_UPDATE_{kind}": range_update for kind in UPDATES},
}
