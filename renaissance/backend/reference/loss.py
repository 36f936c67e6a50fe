"""Softmax cross-entropy with label smoothing, and the metrics of an epoch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from renaissance.backend.reference.operands import F64, Op, Operands
from renaissance.backend.registry import label
from renaissance.core.errors import DeviceError

MASKED = -1
TOP_K = 5
ROUNDING = 2.0**-24
"""Largest relative error of rounding to float32."""


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


OPS: dict[str, Op] = {
    "LABEL_COPY": label_copy,
    "SOFTMAX_CE_FWD": softmax_ce_fwd,
    "SOFTMAX_CE_BWD": softmax_ce_bwd,
    "SOFTMAX_CE_INF": softmax_ce_inf,
    "ACCUM_METRICS": accum_metrics,
}
