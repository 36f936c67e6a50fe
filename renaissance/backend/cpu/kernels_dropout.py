"""Dropout without a stored mask: forward and backward draw the same Philox words (docs/random-numbers.md, domain 4).

An element is multiplied by 1 / (1 - p) or by 0, so NaN and Inf come out as NaN even where they are dropped and the NaN
check sees them (law 5). Seed and step are read from the arena at every replay (law 4), and a word belongs to an element
index, so the bits do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from renaissance.backend.checks import expect, of_size
from renaissance.backend.cpu.intrinsics import ARGS, f32, i32, my_range, team_rank, u16, u32, words
from renaissance.backend.cpu.kernels_common import BLOCK, Kernel, narrow, same_type, team_for, widen
from renaissance.backend.cpu.kernels_guard import float_word
from renaissance.backend.cpu.queue import kernel_call
from renaissance.backend.cpu.streams import compiled
from renaissance.backend.registry import Call, CaptureContext, OpRegistry, label
from renaissance.core.dtype import DType
from renaissance.core.errors import ValueRejected
from renaissance.core.philox import Domain, dropout_threshold, philox_numba, purpose
from renaissance.graph.computation_graph import Node

LANES = 4
"""Words of one Philox block, hence elements per block."""

LAYERS = 1 << 24
"""Dropout layers that the purpose word can tell apart."""

N, X, Y, SEED_LOW, SEED_HIGH, STEP, PURPOSE, THRESHOLD, SCALE, HALF, KEEP = range(ARGS, ARGS + 11)


@compiled
def keep_factors(keep, blocks, first, key, purpose_word, step, threshold, scale):  # type: ignore[no-untyped-def]  # f32[4 * blocks], int, int, u32[2]...
    """Factor of every element of ``blocks`` Philox blocks from block ``first`` on."""
    zero = np.float32(0)
    for i in range(blocks):
        c0 = np.uint32(first + np.uint32(i))
        w0, w1, w2, w3 = philox_numba(key[0], key[1], c0, purpose_word, step, np.uint32(0))
        keep[4 * i] = scale if w0 >= threshold else zero
        keep[4 * i + 1] = scale if w1 >= threshold else zero
        keep[4 * i + 2] = scale if w2 >= threshold else zero
        keep[4 * i + 3] = scale if w3 >= threshold else zero


@Kernel
def drop(address):  # type: ignore[no-untyped-def]  # words: see above
    """y = x * factor (+ 0, which turns -0 into 0)."""
    ctx = words(address)
    key = (u32(ctx[SEED_LOW], 1)[0], u32(ctx[SEED_HIGH], 1)[0])
    step = u32(ctx[STEP], 1)[0]
    threshold, scale = np.uint32(ctx[THRESHOLD]), np.float32(np.int64(ctx[SCALE]).view(np.float64))
    keep = f32(ctx[KEEP] + 4 * BLOCK * team_rank(ctx), BLOCK)
    start, stop = my_range(ctx, ctx[N], BLOCK)
    for at in range(start, stop, BLOCK):
        n = min(BLOCK, stop - at)
        keep_factors(keep, (n + 3) // 4, np.uint32(at // 4), key, np.uint32(ctx[PURPOSE]), step, threshold, scale)
        if ctx[HALF] != 0:
            xh, yh = u16(ctx[X] + 2 * at, n), u16(ctx[Y] + 2 * at, n)
            for i in range(n):
                yh[i] = narrow(widen(xh[i]) * keep[i] + np.float32(0))
        else:
            x, y = f32(ctx[X] + 4 * at, n), f32(ctx[Y] + 4 * at, n)
            for i in range(n):
                y[i] = x[i] * keep[i] + np.float32(0)


@Kernel
def advance_dropout(address):  # type: ignore[no-untyped-def]  # words: has_nan, dropout_step (int32)
    ctx = words(address)
    if i32(ctx[ARGS], 1)[0] == 0:
        i32(ctx[ARGS + 1], 1)[0] += 1


def launch_dropout(node: Node, ctx: CaptureContext) -> Sequence[Call]:
    """DROPOUT_FWD (x -> y) and DROPOUT_BWD (dy -> dx): the same factors applied to another tensor."""
    x, y = ctx.tensor(node.inputs[0]), ctx.tensor(node.outputs[0])
    half = same_type(node, ctx, x.id, y.id)
    n = x.shape.numel
    of_size(node, y, n)
    seeds = [ctx.ptr(expect(node, ctx.tensor(i), DType.INT32, 1).id) for i in node.inputs[1:4]]
    p, layer = float(node.attrs["p"]), int(node.attrs["layer"])
    if not 0.0 <= p < 1.0:
        raise ValueRejected(f"{label(node)}: p is {p}; expected 0 <= p < 1")
    if not 0 <= layer < LAYERS:
        raise ValueRejected(f"{label(node)}: layer is {layer}; expected 0 to {LAYERS - 1}")
    threads = team_for(ctx, LANES * n)  # drawing costs as much as moving several times the bytes
    arguments = (
        *(n, ctx.ptr(x.id), ctx.ptr(y.id), *seeds, purpose(Domain.DROPOUT, layer)),
        *(dropout_threshold(p), float_word(1.0 / (1.0 - p)), half, ctx.scratch(4 * BLOCK * threads)),
    )
    return [kernel_call(drop, arguments, label(node), threads=threads)]


def launch_advance(node: Node, ctx: CaptureContext) -> Sequence[Call]:
    """DROPOUT_ADVANCE: a skipped step keeps its number, so its masks are drawn again by the next one (law 5)."""
    operands = [ctx.ptr(expect(node, ctx.tensor(i), DType.INT32, 1).id) for i in (node.inputs[0], node.outputs[0])]
    return [kernel_call(advance_dropout, operands, label(node))]


def register(registry: OpRegistry) -> None:
    """Add the launchers of this module to ``registry``."""
    registry.register("DROPOUT_FWD", "cpu", launch_dropout)
    registry.register("DROPOUT_BWD", "cpu", launch_dropout)
    registry.register("DROPOUT_ADVANCE", "cpu", launch_advance)
