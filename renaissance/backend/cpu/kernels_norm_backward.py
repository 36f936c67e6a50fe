"""Batch normalisation backward, with the gradient of the activation and of a second consumer in the same passes.

g = dy (+ dy2), 0 where the activation cut y off; dbeta = sum g; dgamma = inv_std sum g (x - mean);
dx = gamma inv_std (g - (dbeta + (x - mean) inv_std dgamma) / n)   (Ioffe and Szegedy 2015)

The first pass sums g and g (x - mean) per chunk in float32, the second adds the chunks in order in float64, the third
computes dx, backwards through the chunks (see ``kernels_norm``). If g is not just dy, the first pass stores it,
rounded, where the third would write anyway: in dresidual when that is asked for (it is g), else in dx.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from renaissance.backend.checks import expect, of_size
from renaissance.backend.cpu.intrinsics import f32, my_range, team_rank, words
from renaissance.backend.cpu.kernels_common import Kernel, same_type
from renaissance.backend.cpu.norm_tiles import (
    CHANNEL_COUNT,
    CHANNELS,
    CHUNK_SIZE,
    FACTOR_TILES,
    OWN,
    SUM_TILES,
    SUMS,
    TILE_SIZE,
    NormPlan,
    clear,
    clear_invalid,
    fold,
    partials,
    spread,
    spread_channels,
    tile_bytes,
    totals,
    valid_elements,
)
from renaissance.backend.cpu.queue import kernel_call
from renaissance.backend.cpu.streams import (
    BF16,
    FP32,
    OPEN_SPANS,
    ahead,
    compiled,
    fma,
    load,
    passes,
    set_tile,
    store,
    tile,
)
from renaissance.backend.registry import Call, CaptureContext, label
from renaissance.core.dtype import DType
from renaissance.graph.computation_graph import Node


@compiled
def add_gradients(kind, dy, x, n, size, means, first, second):  # type: ignore[no-untyped-def]  # FP32 or BF16; int64 addresses and sizes
    """Sums of dy and dy (x - mean) over the tiles of n elements, by place in the tile."""
    for at in range(0, n, size):
        a, b = ahead(kind, dy, at), ahead(kind, x, at)
        for i in range(min(size, n - at)):
            g = load(kind, a, i)
            set_tile(first, i, tile(first, i) + g)
            set_tile(second, i, fma(g, load(kind, b, i) - tile(means, i), tile(second, i)))


@compiled
def gate_and_add_gradients(kind, dy, y, span, x, g_out, n, size, means, first, second):  # type: ignore[no-untyped-def]  # FP32 or BF16; int64 addresses, span and sizes
    """The same of g, which is stored."""
    for at in range(0, n, size):
        a, b, c, out = ahead(kind, dy, at), ahead(kind, x, at), ahead(kind, y, at), ahead(kind, g_out, at)
        for i in range(min(size, n - at)):
            g = load(kind, a, i)
            g = g if passes(kind, c, i, span) else np.float32(0)
            store(kind, out, i, g)
            set_tile(first, i, tile(first, i) + g)
            set_tile(second, i, fma(g, load(kind, b, i) - tile(means, i), tile(second, i)))


@compiled
def gate_and_add_two_gradients(kind, dy, dy2, y, span, x, g_out, n, size, means, first, second):  # type: ignore[no-untyped-def]  # FP32 or BF16; int64 addresses, span and sizes
    """The same with the gradients of two consumers."""
    for at in range(0, n, size):
        a, b, c, out = ahead(kind, dy, at), ahead(kind, x, at), ahead(kind, y, at), ahead(kind, g_out, at)
        d = ahead(kind, dy2, at)
        for i in range(min(size, n - at)):
            g = load(kind, a, i) + load(kind, d, i)
            g = g if passes(kind, c, i, span) else np.float32(0)
            store(kind, out, i, g)
            set_tile(first, i, tile(first, i) + g)
            set_tile(second, i, fma(g, load(kind, b, i) - tile(means, i), tile(second, i)))


@compiled
def chunk_gradients(kind, dy, dy2, y, span, x, g_out, n, size, means, first, second):  # type: ignore[no-untyped-def]  # as above; dy2 or g_out 0: none
    if dy2 != 0:
        gate_and_add_two_gradients(kind, dy, dy2, y, span, x, g_out, n, size, means, first, second)
    elif g_out != 0:
        gate_and_add_gradients(kind, dy, y, span, x, g_out, n, size, means, first, second)
    else:
        add_gradients(kind, dy, x, n, size, means, first, second)


@Kernel
def sum_gradients(address):  # type: ignore[no-untyped-def]  # words: NormPlan.words, bf16?, dy, dy2 or 0, y, its open span, x, g or 0, saved mean
    ctx = words(address)
    half, dy, dy2, y, span = ctx[OWN], ctx[OWN + 1], ctx[OWN + 2], ctx[OWN + 3], ctx[OWN + 4]
    x, g = ctx[OWN + 5], ctx[OWN + 6]
    channels, size, chunk, step = ctx[CHANNEL_COUNT], ctx[TILE_SIZE], ctx[CHUNK_SIZE], tile_bytes(ctx)
    means = ctx[SUM_TILES] + team_rank(ctx) * SUMS * step
    first, second = means + step, means + 2 * step
    saved = f32(ctx[OWN + 7], channels)
    for c in range(channels):
        set_tile(means, c, saved[c])
    spread(means, channels, size)
    width = np.int64(2) if half != 0 else np.int64(4)
    start, stop = my_range(ctx, valid_elements(ctx), chunk)
    for at in range(start, stop, chunk):
        n = min(chunk, stop - at)
        off = width * at
        d, out = dy2 + off if dy2 != 0 else np.int64(0), g + off if g != 0 else np.int64(0)
        clear(first, 0, size)
        clear(second, 0, size)
        if half != 0:
            chunk_gradients(BF16, dy + off, d, y + off, span, x + off, out, n, size, means, first, second)
        else:
            chunk_gradients(FP32, dy + off, d, y + off, span, x + off, out, n, size, means, first, second)
        fold(first, channels, size)
        fold(second, channels, size)
        sum_g, sum_gx = partials(ctx, at // chunk, 0, 0, channels), partials(ctx, at // chunk, 1, 0, channels)
        for c in range(channels):
            sum_g[c], sum_gx[c] = np.float64(tile(first, c)), np.float64(tile(second, c))


@Kernel
def finish_gradients(address):  # type: ignore[no-untyped-def]  # words: NormPlan.words, gamma, saved mean, saved inv std, dgamma, dbeta
    """dgamma, dbeta, and the factor tiles of dx = (x - mean) a + b + g c."""
    ctx = words(address)
    channels, chunk, step, valid = ctx[CHANNEL_COUNT], ctx[CHUNK_SIZE], tile_bytes(ctx), valid_elements(ctx)
    factors, n = ctx[FACTOR_TILES], np.float64(max(valid // channels, 1))
    start, stop = my_range(ctx, channels, CHANNELS)
    for at in range(start, stop, CHANNELS):
        width = min(CHANNELS, stop - at)
        gamma, mean = f32(ctx[OWN] + 4 * at, width), f32(ctx[OWN + 1] + 4 * at, width)
        inv_std = f32(ctx[OWN + 2] + 4 * at, width)
        dgamma, dbeta = f32(ctx[OWN + 3] + 4 * at, width), f32(ctx[OWN + 4] + 4 * at, width)
        sum_g, sum_gx = totals(ctx, 0, at, width), totals(ctx, 1, at, width)
        for k in range((valid + chunk - 1) // chunk):
            first, second = partials(ctx, k, 0, at, width), partials(ctx, k, 1, at, width)
            for c in range(width):
                sum_g[c] += first[c]
                sum_gx[c] += second[c]
        for c in range(width):
            std = np.float64(inv_std[c])
            dbeta[c], dgamma[c] = np.float32(sum_g[c]), np.float32(sum_gx[c] * std)
            scale = np.float64(gamma[c]) * std
            set_tile(factors, at + c, mean[c])
            set_tile(factors + step, at + c, np.float32(-scale * std * std * sum_gx[c] / n))
            set_tile(factors + 2 * step, at + c, np.float32(-scale * sum_g[c] / n))
            set_tile(factors + 3 * step, at + c, np.float32(scale))
        for factor in range(4):
            spread_channels(ctx, factor, at, width)


@compiled
def chunk_dx(kind, g, x, dx, n, size, factors, step):  # type: ignore[no-untyped-def]  # FP32 or BF16; int64 addresses and sizes; dx may be g
    means, slopes, offsets, scales = factors, factors + step, factors + 2 * step, factors + 3 * step
    for at in range(0, n, size):
        a, b, out = ahead(kind, g, at), ahead(kind, x, at), ahead(kind, dx, at)
        for i in range(min(size, n - at)):
            rest = fma(load(kind, b, i) - tile(means, i), tile(slopes, i), tile(offsets, i))
            store(kind, out, i, fma(load(kind, a, i), tile(scales, i), rest))


@Kernel
def gradient_of_x(address):  # type: ignore[no-untyped-def]  # words: NormPlan.words, bf16?, g, x, dx, dresidual or 0
    ctx = words(address)
    half, g, x, dx, chunk = ctx[OWN], ctx[OWN + 1], ctx[OWN + 2], ctx[OWN + 3], ctx[CHUNK_SIZE]
    size, factors, step, valid = ctx[TILE_SIZE], ctx[FACTOR_TILES], tile_bytes(ctx), valid_elements(ctx)
    start, stop = my_range(ctx, valid, chunk)
    at = start + (stop - start - 1) // chunk * chunk
    while at >= start:
        n = min(chunk, stop - at)
        if half != 0:
            chunk_dx(BF16, g + 2 * at, x + 2 * at, dx + 2 * at, n, size, factors, step)
        else:
            chunk_dx(FP32, g + 4 * at, x + 4 * at, dx + 4 * at, n, size, factors, step)
        at -= chunk
    clear_invalid(ctx, dx, half, valid)
    if ctx[OWN + 4] != 0:
        clear_invalid(ctx, ctx[OWN + 4], half, valid)


def launch_backward(node: Node, ctx: CaptureContext) -> Sequence[Call]:
    """BN_BWD: inputs dy, x, gamma, saved_mean, saved_inv_std, batch_valid[, y][, dy2]; outputs dx, dgamma, dbeta
    [, dresidual]."""
    dy, x, gamma, mean, inv_std, batch_valid, *rest = node.inputs
    dx, dgamma, dbeta, *residual = node.outputs
    activation, two = str(node.attrs["activation"]), int(node.attrs["dys"]) == 2
    y = rest[0] if activation != "none" else dy  # whose whole span is open
    dy2 = rest[-1:] if two else []
    shape = ctx.tensor(x).shape
    features = (x, dy, y, dx, *dy2, *residual)
    half = same_type(node, ctx, *features)
    for i in features:
        of_size(node, ctx.tensor(i), shape.numel)
    for i in (gamma, mean, inv_std, dgamma, dbeta):
        expect(node, ctx.tensor(i), DType.FP32, shape.c)
    plan = NormPlan.make(shape, ctx)
    shared = plan.words(ctx.ptr(expect(node, ctx.tensor(batch_valid), DType.INT32, 1).id))
    stored = ctx.ptr(residual[0]) if residual else ctx.ptr(dx) if two or activation != "none" else 0
    second, g = ctx.ptr(dy2[0]) if two else 0, stored or ctx.ptr(dy)
    sums = (half, ctx.ptr(dy), second, ctx.ptr(y), OPEN_SPANS[activation][half], ctx.ptr(x), stored, ctx.ptr(mean))
    vectors = [ctx.ptr(i) for i in (gamma, mean, inv_std, dgamma, dbeta)]
    last = (half, g, ctx.ptr(x), ctx.ptr(dx), ctx.ptr(residual[0]) if residual else 0)
    return [
        kernel_call(sum_gradients, (*shared, *sums), f"{label(node)} sums", threads=plan.threads),
        kernel_call(finish_gradients, (*shared, *vectors), f"{label(node)} finish", threads=plan.finishers),
        kernel_call(gradient_of_x, (*shared, *last), label(node), threads=plan.threads),
    ]
