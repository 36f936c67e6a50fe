"""Kernels around convolutions: folding BN into weights, and a pass over the result where the library has no post-op.

All are element by element, so their bits do not depend on the team.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from renaissance.backend.cpu.intrinsics import ARGS, f32, my_range, u16, words
from renaissance.backend.cpu.kernels_common import BLOCK, Kernel, narrow, widen

BIAS_ROWS = 512
"""Pixels per partial sum of a bias gradient."""
FINISH_ADD, FINISH_RELU, FINISH_RELU6 = 1, 2, 4


@njit
def activate(value, mode):  # type: ignore[no-untyped-def]  # float32, FINISH_* -> float32; NaN stays NaN
    if mode & (FINISH_RELU | FINISH_RELU6):
        value = np.float32(0) if value <= np.float32(0) else value
    if mode & FINISH_RELU6:
        value = np.float32(6) if value > np.float32(6) else value
    return value


@Kernel
def finish(address):  # type: ignore[no-untyped-def]  # context: y, residual (or 0), elements, mode, 1 for bf16 or 0
    """y := act(y + residual), in place."""
    ctx = words(address)
    count, mode = ctx[ARGS + 2], ctx[ARGS + 3]
    start, stop = my_range(ctx, count, BLOCK)
    for first in range(start, stop, BLOCK):
        last = min(first + BLOCK, stop)
        if ctx[ARGS + 4]:
            y = u16(ctx[ARGS], count)[first:last]
            if mode & FINISH_ADD:
                add = u16(ctx[ARGS + 1], count)[first:last]
                for i in range(y.size):
                    y[i] = narrow(activate(widen(y[i]) + widen(add[i]), mode))
            else:
                for i in range(y.size):
                    y[i] = narrow(activate(widen(y[i]), mode))
        else:
            out = f32(ctx[ARGS], count)[first:last]
            if mode & FINISH_ADD:
                other = f32(ctx[ARGS + 1], count)[first:last]
                for i in range(out.size):
                    out[i] = activate(out[i] + other[i], mode)
            else:
                for i in range(out.size):
                    out[i] = activate(out[i], mode)


@Kernel
def fold_weights(address):  # type: ignore[no-untyped-def]  # context: w[K, per], scale fp32[K], out[K, per], K, per, 1 for bf16
    """out := w * scale per output channel, in fp32 and rounded once."""
    ctx = words(address)
    channels, per = ctx[ARGS + 3], ctx[ARGS + 4]
    start, stop = my_range(ctx, channels, 1)
    scales = f32(ctx[ARGS + 1], channels)
    for k in range(start, stop):
        scale, first, last = scales[k], k * per, (k + 1) * per
        if ctx[ARGS + 5]:
            w, out = u16(ctx[ARGS], last)[first:], u16(ctx[ARGS + 2], last)[first:]
            for i in range(out.size):
                out[i] = narrow(widen(w[i]) * scale)
        else:
            weights, folded = f32(ctx[ARGS], last)[first:], f32(ctx[ARGS + 2], last)[first:]
            for i in range(folded.size):
                folded[i] = weights[i] * scale


@Kernel
def fold_bias(address):  # type: ignore[no-untyped-def]  # context: eq_bias fp32[K], b fp32[K] or 0, scale fp32[K], out fp32[K], K
    """out := eq_bias + b * scale."""
    ctx = words(address)
    channels = ctx[ARGS + 4]
    eq_bias, out = f32(ctx[ARGS], channels), f32(ctx[ARGS + 3], channels)
    for k in range(out.size):
        out[k] = eq_bias[k]
    if ctx[ARGS + 1]:
        b, scale = f32(ctx[ARGS + 1], channels), f32(ctx[ARGS + 2], channels)
        for k in range(out.size):
            out[k] += b[k] * scale[k]


@Kernel
def bias_partials(address):  # type: ignore[no-untyped-def]  # context: dy [rows, K], partials fp32 [chunks, K], rows, K, 1 for bf16
    """Sums of the rows of each chunk of BIAS_ROWS, added in order."""
    ctx = words(address)
    rows, channels = ctx[ARGS + 2], ctx[ARGS + 3]
    start, stop = my_range(ctx, rows, BIAS_ROWS)
    for first in range(start, stop, BIAS_ROWS):
        sums = f32(ctx[ARGS + 1] + 4 * (first // BIAS_ROWS) * channels, channels)
        sums[:] = 0
        for row in range(first, min(first + BIAS_ROWS, stop)):
            if ctx[ARGS + 4]:
                line = u16(ctx[ARGS] + 2 * row * channels, channels)
                for k in range(sums.size):
                    sums[k] += widen(line[k])
            else:
                numbers = f32(ctx[ARGS] + 4 * row * channels, channels)
                for k in range(sums.size):
                    sums[k] += numbers[k]


@Kernel
def bias_total(address):  # type: ignore[no-untyped-def]  # context: partials fp32 [chunks, K], db fp32 [K], chunks, K
    """db := sum of the partial sums, added in order."""
    ctx = words(address)
    channels = ctx[ARGS + 3]
    total = f32(ctx[ARGS + 1], channels)
    total[:] = 0
    for chunk in range(ctx[ARGS + 2]):
        sums = f32(ctx[ARGS] + 4 * chunk * channels, channels)
        for k in range(total.size):
            total[k] += sums[k]
