"""Batch normalisation forward: the statistics of a batch, and y = act((x - mean) scale + shift (+ residual)).

A first pass reads x once and leaves, per chunk and channel, the mean and the sum of squared deviations from it; a
second, small one combines them in chunk order in float64 (Chan, Golub and LeVeque 1983) and turns them into per-channel
factors; a third computes y. The third walks the chunks backwards: what the first read last is still in the cache. Only
the first ``batch_valid`` samples count; the rows of the others become 0.

A NaN or Inf in a channel makes y and the running statistics of that channel NaN, which the NaN check then sees (law 5).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from renaissance.backend.checks import expect, of_size
from renaissance.backend.cpu import kernels_norm_backward
from renaissance.backend.cpu.intrinsics import f32, my_range, team_rank, words
from renaissance.backend.cpu.kernels_common import Kernel, same_type
from renaissance.backend.cpu.kernels_guard import float_word
from renaissance.backend.cpu.norm_tiles import (
    CHANNEL_COUNT,
    CHANNELS,
    CHUNK_SIZE,
    FACTOR_TILES,
    LIMITS,
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
from renaissance.backend.cpu.streams import BF16, FP32, ahead, compiled, fma, load, set_tile, store, tile
from renaissance.backend.registry import Call, CaptureContext, OpRegistry, label
from renaissance.core.dtype import DType
from renaissance.graph.computation_graph import Node

# Statistics


@compiled
def add_tiles(kind, x, n, size, shift, first, second):  # type: ignore[no-untyped-def]  # FP32 or BF16; int64 addresses and sizes
    """Sums of x - shift and of its square over the tiles of n elements, by place in the tile."""
    for at in range(0, n, size):
        a = ahead(kind, x, at)
        for i in range(min(size, n - at)):
            v = load(kind, a, i) - tile(shift, i)
            set_tile(first, i, tile(first, i) + v)
            set_tile(second, i, fma(v, v, tile(second, i)))


@compiled
def chunk_statistics(kind, x, n, channels, size, tiles, step, means, squares):  # type: ignore[no-untyped-def]  # FP32 or BF16; int64 addresses and sizes; float64[C] out
    """Means and sums of squared deviations of n elements, by channel; SUMS ``tiles`` to work in."""
    shift, first, second = tiles, tiles + step, tiles + 2 * step
    head = min(n, size)
    for i in range(head):
        set_tile(shift, i, load(kind, x, i))
    clear(shift, head, size)
    fold(shift, channels, size)
    share = np.float32(1) / np.float32(head // channels)
    for c in range(channels):
        set_tile(shift, c, tile(shift, c) * share)
    spread(shift, channels, size)
    clear(first, 0, size)
    clear(second, 0, size)
    add_tiles(kind, x, n, size, shift, first, second)
    fold(first, channels, size)
    fold(second, channels, size)
    rows = np.float64(n // channels)
    for c in range(channels):
        off = np.float64(tile(first, c)) / rows
        left = np.float64(tile(second, c)) - off * off * rows
        means[c] = np.float64(tile(shift, c)) + off
        squares[c] = 0.0 if left < 0.0 else left  # a NaN stays


@Kernel
def batch_statistics(address):  # type: ignore[no-untyped-def]  # words: NormPlan.words, x, bf16?
    ctx = words(address)
    x, channels, size, chunk, step = ctx[OWN], ctx[CHANNEL_COUNT], ctx[TILE_SIZE], ctx[CHUNK_SIZE], tile_bytes(ctx)
    tiles = ctx[SUM_TILES] + team_rank(ctx) * SUMS * step
    start, stop = my_range(ctx, valid_elements(ctx), chunk)
    for at in range(start, stop, chunk):
        n = min(chunk, stop - at)
        means, squares = partials(ctx, at // chunk, 0, 0, channels), partials(ctx, at // chunk, 1, 0, channels)
        if ctx[OWN + 1] != 0:
            chunk_statistics(BF16, x + 2 * at, n, channels, size, tiles, step, means, squares)
        else:
            chunk_statistics(FP32, x + 4 * at, n, channels, size, tiles, step, means, squares)


@compiled
def combine(ctx, start, stop, valid):  # type: ignore[no-untyped-def]  # int64[:]; int64 channels start to stop; int64 -> float64 means, sums of squared deviations
    """Over all chunks, in their order; the results lie in the row of totals."""
    channels, chunk = ctx[CHANNEL_COUNT], ctx[CHUNK_SIZE]
    chunks, width, n = (valid + chunk - 1) // chunk, stop - start, np.float64(valid // channels)
    rows, last = np.float64(chunk // channels), np.float64((valid - (chunks - 1) * chunk) // channels)
    mean, squares = totals(ctx, 0, start, width), totals(ctx, 1, start, width)
    for k in range(chunks):
        part = partials(ctx, k, 0, start, width)
        weight = rows if k < chunks - 1 else last
        for c in range(width):
            mean[c] += part[c] * weight
    for c in range(width):
        mean[c] /= n
    for k in range(chunks):
        part, left = partials(ctx, k, 0, start, width), partials(ctx, k, 1, start, width)
        weight = rows if k < chunks - 1 else last
        for c in range(width):
            off = part[c] - mean[c]
            squares[c] += left[c] + off * off * weight
    return mean, squares


@Kernel
def finish_statistics(address):  # type: ignore[no-untyped-def]  # words: NormPlan.words, gamma, beta, prev mean, prev var, saved mean, saved inv std, next mean, next var, momentum, eps (float64 bits)
    """Batch and running statistics, and the factor tiles mean, scale, shift. No valid sample: the old ones stay."""
    ctx = words(address)
    step, valid = tile_bytes(ctx), valid_elements(ctx)
    momentum, eps = np.int64(ctx[OWN + 8]).view(np.float64), np.int64(ctx[OWN + 9]).view(np.float64)
    means, scales, shifts = ctx[FACTOR_TILES], ctx[FACTOR_TILES] + step, ctx[FACTOR_TILES] + 2 * step
    n = np.float64(valid // ctx[CHANNEL_COUNT])
    start, stop = my_range(ctx, ctx[CHANNEL_COUNT], CHANNELS)
    for at in range(start, stop, CHANNELS):
        width = min(CHANNELS, stop - at)
        gamma, beta = f32(ctx[OWN] + 4 * at, width), f32(ctx[OWN + 1] + 4 * at, width)
        prev_mean, prev_var = f32(ctx[OWN + 2] + 4 * at, width), f32(ctx[OWN + 3] + 4 * at, width)
        saved_mean, saved_inv_std = f32(ctx[OWN + 4] + 4 * at, width), f32(ctx[OWN + 5] + 4 * at, width)
        next_mean, next_var = f32(ctx[OWN + 6] + 4 * at, width), f32(ctx[OWN + 7] + 4 * at, width)
        mean, squares = combine(ctx, at, at + width, valid)
        if valid == 0:
            for c in range(width):
                mean[c], squares[c] = np.float64(prev_mean[c]), np.float64(prev_var[c])
        rows, pairs = max(n, 1.0), max(n - 1.0, 1.0)
        share = momentum if valid > 0 else 0.0
        for c in range(width):
            inv_std = 1.0 / np.sqrt(squares[c] / rows + eps)
            saved_mean[c], saved_inv_std[c] = np.float32(mean[c]), np.float32(inv_std)
            next_mean[c] = np.float32((1.0 - share) * np.float64(prev_mean[c]) + share * mean[c])
            next_var[c] = np.float32((1.0 - share) * np.float64(prev_var[c]) + share * (squares[c] / pairs))
            scale = np.float64(gamma[c]) * inv_std
            missed = mean[c] - np.float64(np.float32(mean[c]))
            set_tile(means, at + c, np.float32(mean[c]))
            set_tile(scales, at + c, np.float32(scale))
            set_tile(shifts, at + c, np.float32(np.float64(beta[c]) - missed * scale))
        for factor in range(3):
            spread_channels(ctx, factor, at, width)


# y


@compiled
def normalise_chunk(kind, x, y, n, size, factors, step, low, high):  # type: ignore[no-untyped-def]  # FP32 or BF16; int64 addresses and sizes; float32, float32
    means, scales, shifts = factors, factors + step, factors + 2 * step
    for at in range(0, n, size):
        a, out = ahead(kind, x, at), ahead(kind, y, at)
        for i in range(min(size, n - at)):
            v = fma(load(kind, a, i) - tile(means, i), tile(scales, i), tile(shifts, i))
            v = low if v < low else v
            v = high if v > high else v
            store(kind, out, i, v)


@compiled
def normalise_and_add_chunk(kind, x, other, y, n, size, factors, step, low, high):  # type: ignore[no-untyped-def]  # FP32 or BF16; int64 addresses and sizes; float32, float32
    means, scales, shifts = factors, factors + step, factors + 2 * step
    for at in range(0, n, size):
        a, b, out = ahead(kind, x, at), ahead(kind, other, at), ahead(kind, y, at)
        for i in range(min(size, n - at)):
            v = fma(load(kind, a, i) - tile(means, i), tile(scales, i), tile(shifts, i)) + load(kind, b, i)
            v = low if v < low else v
            v = high if v > high else v
            store(kind, out, i, v)


@Kernel
def normalise(address):  # type: ignore[no-untyped-def]  # words: NormPlan.words, bf16?, x, y, residual or 0, least, largest (float64 bits)
    ctx = words(address)
    half, x, y, other, size, chunk = ctx[OWN], ctx[OWN + 1], ctx[OWN + 2], ctx[OWN + 3], ctx[TILE_SIZE], ctx[CHUNK_SIZE]
    low = np.float32(np.int64(ctx[OWN + 4]).view(np.float64))
    high = np.float32(np.int64(ctx[OWN + 5]).view(np.float64))
    factors, step, valid = ctx[FACTOR_TILES], tile_bytes(ctx), valid_elements(ctx)
    start, stop = my_range(ctx, valid, chunk)
    at = start + (stop - start - 1) // chunk * chunk
    while at >= start:
        n = min(chunk, stop - at)
        if half != 0 and other != 0:
            normalise_and_add_chunk(BF16, x + 2 * at, other + 2 * at, y + 2 * at, n, size, factors, step, low, high)
        elif half != 0:
            normalise_chunk(BF16, x + 2 * at, y + 2 * at, n, size, factors, step, low, high)
        elif other != 0:
            normalise_and_add_chunk(FP32, x + 4 * at, other + 4 * at, y + 4 * at, n, size, factors, step, low, high)
        else:
            normalise_chunk(FP32, x + 4 * at, y + 4 * at, n, size, factors, step, low, high)
        at -= chunk
    clear_invalid(ctx, y, half, valid)


# Inference


@Kernel
def inference_factors(address):  # type: ignore[no-untyped-def]  # words: NormPlan.words, scale, bias
    """The factor tiles of y = x scale + bias."""
    ctx = words(address)
    channels, size, step = ctx[CHANNEL_COUNT], ctx[TILE_SIZE], tile_bytes(ctx)
    scale, bias = f32(ctx[OWN], channels), f32(ctx[OWN + 1], channels)
    means, scales, shifts = ctx[FACTOR_TILES], ctx[FACTOR_TILES] + step, ctx[FACTOR_TILES] + 2 * step
    clear(means, 0, size)
    for c in range(channels):
        set_tile(scales, c, scale[c])
        set_tile(shifts, c, bias[c])
    spread(scales, channels, size)
    spread(shifts, channels, size)


@Kernel
def equivalent_parameters(address):  # type: ignore[no-untyped-def]  # words: gamma, beta, mean, var, scale, bias, C, eps (float64 bits)
    ctx = words(address)
    at = 4
    channels, eps = ctx[at + 6], np.int64(ctx[at + 7]).view(np.float64)
    gamma, beta, mean, var = (
        f32(ctx[at], channels),
        f32(ctx[at + 1], channels),
        f32(ctx[at + 2], channels),
        f32(ctx[at + 3], channels),
    )
    scale, bias = f32(ctx[at + 4], channels), f32(ctx[at + 5], channels)
    for c in range(channels):
        factor = np.float64(gamma[c]) / np.sqrt(np.float64(var[c]) + eps)
        scale[c] = np.float32(factor)
        bias[c] = np.float32(np.float64(beta[c]) - np.float64(mean[c]) * factor)


# Launchers


def launch_forward(node: Node, ctx: CaptureContext) -> Sequence[Call]:
    """BN_FWD: inputs x, gamma, beta, prev_mean, prev_var, batch_valid[, residual]; outputs y, saved_mean,
    saved_inv_std, next_mean, next_var."""
    x, gamma, beta, prev_mean, prev_var, batch_valid, *residual = node.inputs
    y, *statistics = node.outputs
    shape = ctx.tensor(x).shape
    half = same_type(node, ctx, x, y, *residual)
    for i in (x, y, *residual):
        of_size(node, ctx.tensor(i), shape.numel)
    vectors = [
        expect(node, ctx.tensor(i), DType.FP32, shape.c).id for i in (gamma, beta, prev_mean, prev_var, *statistics)
    ]
    valid = ctx.ptr(expect(node, ctx.tensor(batch_valid), DType.INT32, 1).id)
    plan = NormPlan.make(shape, ctx)
    shared = plan.words(valid)
    numbers = (float_word(float(node.attrs["momentum"])), float_word(float(node.attrs["eps"])))
    finish = (*shared, *(ctx.ptr(i) for i in vectors), *numbers)
    other = ctx.ptr(residual[0]) if residual else 0
    return [
        kernel_call(batch_statistics, (*shared, ctx.ptr(x), half), f"{label(node)} statistics", threads=plan.threads),
        kernel_call(finish_statistics, finish, f"{label(node)} finish", threads=plan.finishers),
        _normalise(node, plan, shared, (half, ctx.ptr(x), ctx.ptr(y), other)),
    ]


def launch_inference(node: Node, ctx: CaptureContext) -> Sequence[Call]:
    """BN_INF: inputs x, eq_scale, eq_bias[, residual]; output y."""
    x, scale, bias, *residual = node.inputs
    (y,) = node.outputs
    shape = ctx.tensor(x).shape
    half = same_type(node, ctx, x, y, *residual)
    for i in (x, y, *residual):
        of_size(node, ctx.tensor(i), shape.numel)
    vectors = [ctx.ptr(expect(node, ctx.tensor(i), DType.FP32, shape.c).id) for i in (scale, bias)]
    plan = NormPlan.make(shape, ctx)
    shared = plan.words(0)
    other = ctx.ptr(residual[0]) if residual else 0
    return [
        kernel_call(inference_factors, (*shared, *vectors), f"{label(node)} factors"),
        _normalise(node, plan, shared, (half, ctx.ptr(x), ctx.ptr(y), other)),
    ]


def _normalise(node: Node, plan: NormPlan, shared: Sequence[int], operands: Sequence[int]) -> Call:
    limits = [float_word(limit) for limit in LIMITS[str(node.attrs["activation"])]]
    return kernel_call(normalise, (*shared, *operands, *limits), label(node), threads=plan.threads)


def launch_equivalent(node: Node, ctx: CaptureContext) -> Sequence[Call]:
    """BN_UPDATE_EQ_PARAMS: inputs gamma, beta, mean, var; outputs eq_scale, eq_bias."""
    channels = ctx.tensor(node.inputs[0]).shape.numel
    vectors = [ctx.ptr(expect(node, ctx.tensor(i), DType.FP32, channels).id) for i in (*node.inputs, *node.outputs)]
    return [kernel_call(equivalent_parameters, (*vectors, channels, float_word(float(node.attrs["eps"]))), label(node))]


def register(registry: OpRegistry) -> None:
    """Add the launchers of batch normalisation, forward and backward, to ``registry``."""
    registry.register("BN_FWD", "cpu", launch_forward)
    registry.register("BN_BWD", "cpu", kernels_norm_backward.launch_backward)
    registry.register("BN_INF", "cpu", launch_inference)
    registry.register("BN_UPDATE_EQ_PARAMS", "cpu", launch_equivalent)
