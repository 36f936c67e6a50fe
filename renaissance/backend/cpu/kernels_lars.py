"""LARS and LARS-Nesterov (You, Gitman, Ginsburg 2017; spec/framework 4.2), one tensor per node.

    r = trust * |w| / (|g| + wd * |w| + eps), at most 100; 1 when a norm is below 1e-12
    m = beta * m + lr * r * (g + wd * w);  w = w - m, or Nesterov: w = w - (lr * r * (g + wd * w) + beta * m)

g is the gradient divided by the loss scale. Norms are over the tensor's own elements: float64 sums per block of fixed
size, added in order, so neither the vector width of another profile nor the number of threads moves a bit within one.
Every call does nothing when the flag is raised (law 5) and reads its scalars when it runs (law 4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from renaissance.backend.checks import expect
from renaissance.backend.cpu.intrinsics import ARGS, f32, f64, i32, my_range, team_rank, u16, u32, words
from renaissance.backend.cpu.kernels_common import BLOCK, Kernel, is_half, team_for
from renaissance.backend.cpu.kernels_update import half_copy
from renaissance.backend.cpu.queue import kernel_call
from renaissance.backend.cpu.streams import compiled
from renaissance.backend.registry import Call, CaptureContext, OpRegistry, label
from renaissance.core.dtype import DType
from renaissance.core.errors import ShapeError
from renaissance.graph.computation_graph import Node

SCALARS = ("lr", "wd", "beta", "trust", "eps", "scaling", "has_nan")
"""Scalar inputs of LARS_UPDATE in order; the gradient follows."""
LEAST_NORM = 1e-12
"""A tensor or gradient with a smaller norm is updated without a ratio."""
LARGEST_RATIO = 100.0

LANES = 64
"""Sums of squares that a block keeps side by side."""

# Words of both kernels: elements, addresses, 1 for Nesterov, partial sums (two float64 per block), sums of one thread
# to work in (LANES float64 each), scalars.
N, W, G, M, RATIO, HALF, NESTEROV, PARTIALS, SUMS, LR, WD, BETA, TRUST, EPS, SCALING, HAS_NAN = range(ARGS, ARGS + 16)


@compiled
def square_sum(x, sums, n):  # type: ignore[no-untyped-def]  # float32[n], float64[LANES], int64 -> float64
    """Element i enters sum i mod LANES; the sums are folded in halves: a fixed order, whatever vectors are used."""
    for k in range(LANES):
        sums[k] = 0.0
    whole = n // LANES * LANES
    for at in range(0, whole, LANES):
        row = x[at : at + LANES]
        for k in range(LANES):
            sums[k] += np.float64(row[k]) * np.float64(row[k])
    for k in range(n - whole):
        sums[k] += np.float64(x[whole + k]) * np.float64(x[whole + k])
    half = LANES // 2
    while half > 0:
        for k in range(half):
            sums[k] += sums[half + k]
        half //= 2
    return sums[0]


@Kernel
def lars_norms(address):  # type: ignore[no-untyped-def]  # words: see above
    """Sums of squares of the weights and of the (still scaled) gradient, per block."""
    ctx = words(address)
    if i32(ctx[HAS_NAN], 1)[0] != 0:
        return
    sums = f64(ctx[SUMS] + 8 * LANES * team_rank(ctx), LANES)
    start, stop = my_range(ctx, ctx[N], BLOCK)
    for at in range(start, stop, BLOCK):
        n = min(BLOCK, stop - at)
        partial = f64(ctx[PARTIALS] + 16 * (at // BLOCK), 2)
        partial[0] = square_sum(f32(ctx[W] + 4 * at, n), sums, n)
        partial[1] = square_sum(f32(ctx[G] + 4 * at, n), sums, n)


@compiled
def trust_ratio(ctx):  # type: ignore[no-untyped-def]  # int64[:] -> float64
    """The ratio from the partial sums, added in the order of the blocks."""
    blocks = (ctx[N] + BLOCK - 1) // BLOCK
    partial = f64(ctx[PARTIALS], 2 * blocks)
    w, g = 0.0, 0.0
    for i in range(blocks):
        w += partial[2 * i]
        g += partial[2 * i + 1]
    w, g = math.sqrt(w), math.sqrt(g) / np.float64(f32(ctx[SCALING], 1)[0])
    if w < LEAST_NORM or g < LEAST_NORM:
        return 1.0
    wd, eps = np.float64(f32(ctx[WD], 1)[0]), np.float64(f32(ctx[EPS], 1)[0])
    return min(np.float64(f32(ctx[TRUST], 1)[0]) * w / (g + wd * w + eps), LARGEST_RATIO)


@compiled
def lars_block(w, g, m, n, rate, wd, beta, unscale):  # type: ignore[no-untyped-def]  # float32[n] x3, int64, float32 x4
    for i in range(n):
        first = beta * m[i] + rate * (g[i] * unscale + wd * w[i])
        m[i] = first
        w[i] = w[i] - first


@compiled
def lars_nesterov_block(w, g, m, n, rate, wd, beta, unscale):  # type: ignore[no-untyped-def]  # float32[n] x3, int64, float32 x4
    for i in range(n):
        pull = rate * (g[i] * unscale + wd * w[i])
        first = beta * m[i] + pull
        m[i] = first
        w[i] = w[i] - (pull + beta * first)


@Kernel
def lars_update(address):  # type: ignore[no-untyped-def]  # words: see above
    """Every thread adds the same partial sums in the same order; the first one writes the ratio down."""
    ctx = words(address)
    if i32(ctx[HAS_NAN], 1)[0] != 0:
        return
    ratio = np.float32(trust_ratio(ctx))
    if team_rank(ctx) == 0:
        f32(ctx[RATIO], 1)[0] = ratio
    rate, wd, beta = f32(ctx[LR], 1)[0] * ratio, f32(ctx[WD], 1)[0], f32(ctx[BETA], 1)[0]
    unscale = np.float32(1.0) / f32(ctx[SCALING], 1)[0]
    start, stop = my_range(ctx, ctx[N], BLOCK)
    for at in range(start, stop, BLOCK):
        n = min(BLOCK, stop - at)
        w, g, m = f32(ctx[W] + 4 * at, n), f32(ctx[G] + 4 * at, n), f32(ctx[M] + 4 * at, n)
        if ctx[NESTEROV] != 0:
            lars_nesterov_block(w, g, m, n, rate, wd, beta, unscale)
        else:
            lars_block(w, g, m, n, rate, wd, beta, unscale)
        if ctx[HALF] != 0:
            half_copy(u32(ctx[W] + 4 * at, n), u16(ctx[HALF] + 2 * at, n), n)


def launch_lars(node: Node, ctx: CaptureContext) -> Sequence[Call]:
    """LARS_UPDATE: inputs (scalars, grad), outputs (weight, m, ratio[, half copy of the weight])."""
    if len(node.inputs) != len(SCALARS) + 1 or len(node.outputs) not in (3, 4):
        raise ShapeError(
            f"{label(node)}: {len(node.inputs)} inputs and {len(node.outputs)} outputs; expected "
            f"({', '.join(SCALARS)}, grad) and (weight, m, ratio, [half])"
        )
    *scalars, grad = (ctx.tensor(i) for i in node.inputs)
    weight, m, ratio = (ctx.tensor(i) for i in node.outputs[:3])
    n = expect(node, weight, DType.FP32).shape.numel
    for tensor in (grad, m):
        expect(node, tensor, DType.FP32, n)
    for name, tensor in zip(SCALARS, scalars, strict=True):
        expect(node, tensor, DType.INT32 if name == "has_nan" else DType.FP32, 1)
    expect(node, ratio, DType.FP32, 1)
    half = 0
    if len(node.outputs) == 4:
        tensor = ctx.tensor(node.outputs[3])
        is_half(node, tensor)
        half = ctx.ptr(expect(node, tensor, DType.BF16, n).id)
    threads = team_for(ctx, n)
    partials, sums = ctx.private(16 * -(-n // BLOCK)), ctx.scratch(8 * LANES * threads)
    arguments = (
        *(n, ctx.ptr(weight.id), ctx.ptr(grad.id), ctx.ptr(m.id), ctx.ptr(ratio.id), half),
        *(int(bool(node.attrs["nesterov"])), partials, sums, *(ctx.ptr(s.id) for s in scalars)),
    )
    return [
        kernel_call(lars_norms, arguments, f"{label(node)} norms", threads=threads),
        kernel_call(lars_update, arguments, label(node), threads=threads),
    ]


def register(registry: OpRegistry) -> None:
    """Add the launchers of this module to ``registry``."""
    registry.register("LARS_UPDATE", "cpu", launch_lars)
