"""Softmax cross-entropy with label smoothing (spec/framework 4.1, without the 1e-8 guards: log-sum-exp needs none).

Rows are independent and each is computed by one thread in class order, so nothing depends on the thread count; the
batch loss is a serial sum of the row losses in row order. Rows labelled -1 (past the end of the last batch) give no
loss and no gradient. A row with NaN or +Inf gives a NaN loss, NaN gradients and no prediction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numba import njit

from renaissance.backend.checks import expect, of_size
from renaissance.backend.cpu.intrinsics import ARGS, STATUS, f32, i32, my_range, u8, u16, words
from renaissance.backend.cpu.kernels_common import Kernel, is_half, narrow, team_for, widen
from renaissance.backend.cpu.queue import kernel_call
from renaissance.backend.registry import Call, CaptureContext, OpRegistry, label
from renaissance.core.dtype import DType
from renaissance.core.errors import ShapeError
from renaissance.graph.computation_graph import Node

MASKED = -1
"""Label of a row past the end of the last batch."""
TOP_K = 5
HIT_1, HIT_5 = 1, 2
BAD_LABEL = 1000
"""Status of a label outside -1..K-1: this plus the row number."""
LOG2_E = np.float64(1.4426950408889634)
LN_2 = np.float64(0.6931471805599453)
TAYLOR = tuple(1.0 / math.factorial(k) for k in range(10))
"""Coefficients of exp; on |r| <= ln(2) / 2 the terms left out are below 1e-11."""
SMALLEST_EXPONENT = np.float64(-87.0)
"""Below it exp() is no normal float32; such a probability is 0 whether or not the thread flushes denormals."""


@njit(cache=True, error_model="numpy")
def exp_f32(x):  # type: ignore[no-untyped-def]  # float64 <= 0, not NaN -> float32
    """exp by Taylor terms in float64 (relative error 1e-11), rounded once: the same bits whatever libm is installed."""
    low = max(x, SMALLEST_EXPONENT)
    n = math.floor(low * LOG2_E + 0.5)
    r = low - n * LN_2
    p = np.float64(TAYLOR[9])
    for k in range(8, -1, -1):
        p = p * r + TAYLOR[k]
    scale = np.int64((np.int64(n) + np.int64(1023)) << np.int64(52)).view(np.float64)
    value = np.float32(p * scale)
    if x < SMALLEST_EXPONENT:
        value = np.float32(0.0)
    return value


@njit(cache=True, error_model="numpy")
def exp_row(row, top):  # type: ignore[no-untyped-def]  # float32[K] in place, float32
    for c in range(row.size):
        row[c] = exp_f32(np.float64(row[c]) - np.float64(top))


@njit(cache=True, error_model="numpy")
def softmax_row(row, target, smoothing):  # type: ignore[no-untyped-def]  # float32[K] logits -> probabilities in place; returns the loss
    """Loss of one sample; ``target`` is a valid class. A row with NaN or +Inf becomes NaN as a whole."""
    classes = row.size
    top = row[0]
    broken = False
    shifted_sum = 0.0
    for c in range(classes):
        broken |= np.isnan(row[c])
        if row[c] > top:
            top = row[c]
    if broken or np.isinf(top):
        for c in range(classes):
            row[c] = np.nan
        return np.float32(np.nan)
    if smoothing > 0.0:
        for c in range(classes):
            shifted_sum += np.float64(row[c]) - np.float64(top)
    shifted_label = np.float64(row[target]) - np.float64(top)
    exp_row(row, top)
    total = 0.0
    for c in range(classes):
        total += np.float64(row[c])
    inverse = np.float32(1.0 / total)
    for c in range(classes):
        row[c] *= inverse
    loss = math.log(total) - (1.0 - smoothing) * shifted_label
    if smoothing > 0.0:
        loss -= smoothing / classes * shifted_sum
    return np.float32(loss)


@njit(cache=True, error_model="numpy")
def gradient_row(probs, full, half, is_half, off, on, factor, target):  # type: ignore[no-untyped-def]  # float32[K] -> float32[K] or uint16[K]
    own = (probs[target] - off - on) * factor
    if is_half:
        for c in range(probs.size):
            half[c] = narrow((probs[c] - off) * factor)
        half[target] = narrow(own)
    else:
        for c in range(probs.size):
            full[c] = (probs[c] - off) * factor
        full[target] = own


@njit(cache=True)
def rank_row(row, target):  # type: ignore[no-untyped-def]  # float32[K] logits, target or -1 -> (predicted, hits)
    """First maximum (-1 with a NaN) and which of HIT_1, HIT_5 the target earns; ties go to the lower class."""
    best = 0
    for c in range(row.size):
        if np.isnan(row[c]):
            return np.int32(MASKED), np.uint8(0)
        if row[c] > row[best]:
            best = c
    if target < 0:
        return np.int32(best), np.uint8(0)
    rank = 0
    for c in range(row.size):
        if row[c] > row[target] or (row[c] == row[target] and c < target):
            rank += 1
    hits = HIT_1 if rank == 0 else 0
    if rank == 0 or (rank < TOP_K and row.size >= TOP_K):
        hits |= HIT_5
    return np.int32(best), np.uint8(hits)


@Kernel
def softmax_rows(address):  # type: ignore[no-untyped-def]  # words: logits, bf16?, labels, smoothing, probs, losses, predicted or 0, hits, N, K
    """Probabilities, row losses and (inference) predictions and hits. Status: a target out of range."""
    ctx = words(address)
    rows, classes = ctx[ARGS + 8], ctx[ARGS + 9]
    labels, losses = i32(ctx[ARGS + 2], rows), f32(ctx[ARGS + 5], rows)
    smoothing = np.float64(f32(ctx[ARGS + 3], 1)[0])
    start, stop = my_range(ctx, rows, 1)
    for r in range(start, stop):
        row = f32(ctx[ARGS + 4] + 4 * r * classes, classes)
        if ctx[ARGS + 1] != 0:
            half = u16(ctx[ARGS] + 2 * r * classes, classes)
            for c in range(classes):
                row[c] = widen(half[c])
        else:
            logits = f32(ctx[ARGS] + 4 * r * classes, classes)
            for c in range(classes):
                row[c] = logits[c]
        target = labels[r]
        if target < MASKED or target >= classes:
            ctx[STATUS] = BAD_LABEL + r
            target = np.int32(MASKED)
        if ctx[ARGS + 6] != 0:
            predicted, hits = rank_row(row, target)
            i32(ctx[ARGS + 6], rows)[r] = predicted
            u8(ctx[ARGS + 7], rows)[r] = hits
        if target == MASKED:
            losses[r] = np.float32(0)
            for c in range(classes):
                row[c] = np.float32(0)
        else:
            losses[r] = softmax_row(row, target, smoothing)


@Kernel
def mean_over_valid(address):  # type: ignore[no-untyped-def]  # words: losses, N, valid, loss, hits or 0, top1, top5
    """Fixed-order sums over the rows, divided by the valid count (an empty batch gives 0)."""
    ctx = words(address)
    rows = ctx[ARGS + 1]
    losses = f32(ctx[ARGS], rows)
    valid = np.float64(max(i32(ctx[ARGS + 2], 1)[0], 1))
    total = 0.0
    for r in range(rows):
        total += np.float64(losses[r])
    f32(ctx[ARGS + 3], 1)[0] = np.float32(total / valid)
    if ctx[ARGS + 4] != 0:
        hits = u8(ctx[ARGS + 4], rows)
        top1, top5 = 0, 0
        for r in range(rows):
            top1 += hits[r] & HIT_1
            top5 += (hits[r] & HIT_5) >> 1
        f32(ctx[ARGS + 5], 1)[0] = np.float32(top1 / valid)
        f32(ctx[ARGS + 6], 1)[0] = np.float32(top5 / valid)


@Kernel
def softmax_gradient(address):  # type: ignore[no-untyped-def]  # words: probs, labels, smoothing, valid, scaling, dlogits, bf16?, N, K
    """(p - eps / K - (1 - eps) [c == y]) * scaling / valid; 0 for masked rows."""
    ctx = words(address)
    rows, classes = ctx[ARGS + 7], ctx[ARGS + 8]
    labels = i32(ctx[ARGS + 1], rows)
    smoothing = f32(ctx[ARGS + 2], 1)[0]
    off = smoothing / np.float32(classes)
    on = np.float32(1.0) - smoothing
    factor = f32(ctx[ARGS + 4], 1)[0] / np.float32(max(i32(ctx[ARGS + 3], 1)[0], 1))
    start, stop = my_range(ctx, rows, 1)
    for r in range(start, stop):
        probs = f32(ctx[ARGS] + 4 * r * classes, classes)
        half = ctx[ARGS + 6] != 0
        size = 2 if half else 4
        out = ctx[ARGS + 5] + size * r * classes
        if labels[r] < 0 or labels[r] >= classes:
            empty = u8(out, size * classes)
            for i in range(empty.size):
                empty[i] = 0
        else:
            gradient_row(probs, f32(out, classes), u16(out, classes), half, off, on, factor, labels[r])


def launch_forward(node: Node, ctx: CaptureContext) -> Sequence[Call]:
    """SOFTMAX_CE_FWD: (logits, label, smoothing, valid) -> (probs, row losses, loss)."""
    probs, losses, loss = node.outputs[:3]
    arguments, size = _row_arguments(node, ctx, probs, losses, 0, 0)
    reduce = (ctx.ptr(losses), size[0], ctx.ptr(node.inputs[3]), ctx.ptr(loss), 0, 0, 0)
    return _rows_then_mean(node, ctx, arguments, size, reduce)


def launch_inference(node: Node, ctx: CaptureContext) -> Sequence[Call]:
    """SOFTMAX_CE_INF: the same inputs -> (predicted, probs, row losses, loss, top1, top5)."""
    predicted, probs, losses, loss, top1, top5 = node.outputs
    rows = ctx.tensor(node.inputs[0]).shape.n
    expect(node, ctx.tensor(predicted), DType.INT32, rows)
    hits = ctx.private(rows)
    arguments, size = _row_arguments(node, ctx, probs, losses, ctx.ptr(predicted), hits)
    reduce = (ctx.ptr(losses), rows, ctx.ptr(node.inputs[3]), ctx.ptr(loss), hits, ctx.ptr(top1), ctx.ptr(top5))
    return _rows_then_mean(node, ctx, arguments, size, reduce)


def launch_backward(node: Node, ctx: CaptureContext) -> Sequence[Call]:
    """SOFTMAX_CE_BWD: (probs, label, smoothing, valid, scaling) -> (dlogits)."""
    probs, labels, smoothing, valid, scaling = (ctx.tensor(i) for i in node.inputs)
    out = of_size(node, ctx.tensor(node.outputs[0]), probs.shape.numel)
    rows, classes = matrix_size(node, ctx, probs.id)
    expect(node, labels, DType.INT32, rows)
    arguments = (
        *(ctx.ptr(t.id) for t in (probs, labels, smoothing, valid, scaling, out)),
        int(is_half(node, out)),
        rows,
        classes,
    )
    threads = team_for(ctx, rows * classes)
    return [kernel_call(softmax_gradient, arguments, label(node), threads=threads)]


def matrix_size(node: Node, ctx: CaptureContext, tensor_id: int) -> tuple[int, int]:
    """(rows, classes) of a tensor [N,1,1,K]; ShapeError otherwise."""
    tensor = ctx.tensor(tensor_id)
    if tensor.shape.h != 1 or tensor.shape.w != 1:
        raise ShapeError(f"{label(node)}: tensor {tensor.name!r} is {tensor.shape}; expected [N,1,1,classes]")
    return tensor.shape.n, tensor.shape.c


def _row_arguments(
    node: Node, ctx: CaptureContext, probs: int, losses: int, predicted: int, hits: int
) -> tuple[tuple[int, ...], tuple[int, int]]:
    logits = ctx.tensor(node.inputs[0])
    rows, classes = matrix_size(node, ctx, logits.id)
    expect(node, ctx.tensor(node.inputs[1]), DType.INT32, rows)
    expect(node, ctx.tensor(probs), DType.FP32, rows * classes)
    expect(node, ctx.tensor(losses), DType.FP32, rows)
    pointers = (ctx.ptr(node.inputs[1]), ctx.ptr(node.inputs[2]), ctx.ptr(probs), ctx.ptr(losses))
    half = int(is_half(node, logits))
    return (ctx.ptr(logits.id), half, *pointers, predicted, hits, rows, classes), (rows, classes)


def _rows_then_mean(
    node: Node, ctx: CaptureContext, arguments: Sequence[int], size: tuple[int, int], reduce: Sequence[int]
) -> Sequence[Call]:
    threads = team_for(ctx, size[0] * size[1])
    return [
        kernel_call(softmax_rows, arguments, label(node), threads=threads),
        kernel_call(mean_over_valid, reduce, f"{label(node)} mean"),
    ]


def register(registry: OpRegistry) -> None:
    """Add the launchers of this module to ``registry``."""
    registry.register("SOFTMAX_CE_FWD", "cpu", launch_forward)
    registry.register("SOFTMAX_CE_INF", "cpu", launch_inference)
    registry.register("SOFTMAX_CE_BWD", "cpu", launch_backward)
