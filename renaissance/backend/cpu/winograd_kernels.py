"""The kernels of Winograd's F(4x4, 3x3): weights to U, convolution, weight gradient (see ``winograd``).

Work is cut into blocks of tiles (convolution) or groups of channels (weights, weight gradient); every block is one
thread's from its first load to its last store, with V and M in that thread's part of the working memory. Sums over
channels and tiles run in a fixed order inside a block, so the bits do not depend on the team.
"""

from __future__ import annotations

from numba import njit

from renaissance.backend.cpu.intrinsics import ARGS, f32, my_range, team_rank, u16, words
from renaissance.backend.cpu.kernels_common import Kernel, widen
from renaissance.backend.cpu.winograd import (
    POSITIONS,
    TILE,
    TILE_BYTES,
    read_gradient,
    read_gradient_half,
    read_input,
    read_input_half,
    read_weights,
    read_weights_half,
    tiles_by_lines,
    tiles_by_tiles,
    write_output,
    write_output_half,
    write_weights,
)

LINE, LANES, GROUP = 64, 16, 16 * 64
"""Bytes of 16 floats; lanes; bytes of a 16 x 16 block."""
C_BLOCKS = 8
"""Blocks of 16 channels that a product sums at a time."""
EDGE = 2 * LINE
"""Bytes at the start of a thread's working memory: a line of zeros, and one that takes what belongs nowhere."""


@njit
def limits(first, size, length):  # type: ignore[no-untyped-def]  # int64 x 3 -> int64: which of size pixels from first exist
    low, high = max(0, -first), min(size, length - first)
    return low | max(high, 0) << 8


@Kernel
def winograd_pack(address):  # type: ignore[no-untyped-def]  # context: w KRSC, u, work, K, C, position bytes, bytes per thread, 1 for bf16
    """U for the forward convolution: u[36][K/16][C][16 of K]."""
    ctx = words(address)
    k_count, c_count, position, half = ctx[ARGS + 3], ctx[ARGS + 4], ctx[ARGS + 5], ctx[ARGS + 7]
    work = ctx[ARGS + 2] + team_rank(ctx) * ctx[ARGS + 6]
    turned = f32(work, 9 * LANES * LANES)
    blocks = c_count // LANES
    start, stop = my_range(ctx, k_count // LANES * blocks, 1)
    for block in range(start, stop):
        k0, c0 = block // blocks * LANES, block % blocks * LANES
        for k in range(LANES):
            for tap in range(9):
                first = ((k0 + k) * 9 + tap) * c_count + c0
                if half:
                    line = u16(ctx[ARGS] + 2 * first, LANES)
                    for c in range(LANES):
                        turned[(tap * LANES + c) * LANES + k] = widen(line[c])
                else:
                    numbers = f32(ctx[ARGS] + 4 * first, LANES)
                    for c in range(LANES):
                        turned[(tap * LANES + c) * LANES + k] = numbers[c]
        target = ctx[ARGS + 1] + (k0 // LANES * c_count + c0) * LINE
        for c in range(LANES):
            read_weights(work + c * LINE, GROUP, target + c * LINE, position)


@Kernel
def winograd_pack_turned(address):  # type: ignore[no-untyped-def]  # context: w KRSC, u, K, C, position bytes, 1 for bf16
    """U for the data gradient, weights turned by 180 degrees: u[36][C/16][K][16 of C]."""
    ctx = words(address)
    k_count, c_count, position, half = ctx[ARGS + 2], ctx[ARGS + 3], ctx[ARGS + 4], ctx[ARGS + 5]
    size = 2 if half else 4
    start, stop = my_range(ctx, k_count, 1)
    for k in range(start, stop):
        for block in range(c_count // LANES):
            source = ctx[ARGS] + ((k * 9 + 8) * c_count + block * LANES) * size
            target = ctx[ARGS + 1] + (block * k_count + k) * LINE
            if half:
                read_weights_half(source, -c_count * size, target, position)
            else:
                read_weights(source, -c_count * size, target, position)


@njit
def read_inputs(source, first, count, sizes, pad, half, target, per_block, zeros):  # type: ignore[no-untyped-def]  # see below
    """V[block][tile][36][16] of ``count`` tiles from number ``first``.

    source: address of the first channel wanted of the first pixel. sizes: (H, W, C, tiles down, tiles across, blocks of
    16 channels wanted). zeros: 64 bytes.
    """
    h, w, channels, down, across, blocks = sizes
    size = 2 if half else 4
    pixel, row = channels * size, w * channels * size
    for t in range(count):
        image, place = (first + t) // (down * across), (first + t) % (down * across)
        top, left = place // across * TILE - pad, place % across * TILE - pad
        rows, columns = limits(top, 6, h), limits(left, 6, w)
        corner = source + ((image * h + top) * w + left) * channels * size
        for block in range(blocks):
            lines = target + (block * per_block + t) * TILE_BYTES
            if half:
                read_input_half(corner + block * LANES * size, row, pixel, rows, columns, zeros, lines)
            else:
                read_input(corner + block * LANES * size, row, pixel, rows, columns, zeros, lines)


@njit
def read_gradients(source, first, count, sizes, half, target, per_block, zeros):  # type: ignore[no-untyped-def]  # as read_inputs
    """A dy A^T of ``count`` tiles; sizes: (Ho, Wo, K, tiles down, tiles across, blocks of 16 channels wanted)."""
    h, w, channels, down, across, blocks = sizes
    size = 2 if half else 4
    pixel, row = channels * size, w * channels * size
    for t in range(count):
        image, place = (first + t) // (down * across), (first + t) % (down * across)
        top, left = place // across * TILE, place % across * TILE
        rows, columns = limits(top, TILE, h), limits(left, TILE, w)
        corner = source + ((image * h + top) * w + left) * channels * size
        for block in range(blocks):
            lines = target + (block * per_block + t) * TILE_BYTES
            if half:
                read_gradient_half(corner + block * LANES * size, row, pixel, rows, columns, zeros, lines)
            else:
                read_gradient(corner + block * LANES * size, row, pixel, rows, columns, zeros, lines)


@njit
def write_outputs(m, first, count, sizes, half, target, per_block, edge, bias, residual, flags):  # type: ignore[no-untyped-def]  # as read_gradients
    """Outputs of ``count`` tiles from M[block][tile][36][16]. edge: 64 bytes of zeros, then 64 for what belongs
    nowhere; residual: what added to an output's address gives the residual's."""
    h, w, channels, down, across, blocks = sizes
    size = 2 if half else 4
    pixel, row = channels * size, w * channels * size
    for t in range(count):
        image, place = (first + t) // (down * across), (first + t) % (down * across)
        top, left = place // across * TILE, place % across * TILE
        rows, columns = limits(top, TILE, h), limits(left, TILE, w)
        corner = target + ((image * h + top) * w + left) * channels * size
        for block in range(blocks):
            lines, place = m + (block * per_block + t) * TILE_BYTES, corner + block * LANES * size
            add, nowhere = bias + block * LINE if bias else edge, edge + LINE
            if half:
                write_output_half(lines, place, row, pixel, rows, columns, nowhere, add, residual, flags)
            else:
                write_output(lines, place, row, pixel, rows, columns, nowhere, add, residual, flags)


@Kernel
def winograd_convolve(address):  # type: ignore[no-untyped-def]  # context: see below
    """y = act(conv(x, w) + bias + residual) for 3x3, stride 1.

    Context: x, u, bias (0: none), residual (0: none), y, work, N, H, W, C, Ho, Wo, K, pad, flags, 1 for bf16, tiles per
    block, bytes per thread, position bytes of U.
    """
    ctx = words(address)
    x, u, bias, residual, y = ctx[ARGS], ctx[ARGS + 1], ctx[ARGS + 2], ctx[ARGS + 3], ctx[ARGS + 4]
    n, h, w, c_count = ctx[ARGS + 6], ctx[ARGS + 7], ctx[ARGS + 8], ctx[ARGS + 9]
    ho, wo, k_count, pad = ctx[ARGS + 10], ctx[ARGS + 11], ctx[ARGS + 12], ctx[ARGS + 13]
    flags, half, per_block, u_position = ctx[ARGS + 14], ctx[ARGS + 15], ctx[ARGS + 16], ctx[ARGS + 18]
    work = ctx[ARGS + 5] + team_rank(ctx) * ctx[ARGS + 17]
    c_blocks, k_blocks = c_count // LANES, k_count // LANES
    v = work + EDGE
    m = v + c_blocks * per_block * TILE_BYTES
    f32(work, LANES)[:] = 0
    down, across = (ho + TILE - 1) // TILE, (wo + TILE - 1) // TILE
    inputs, outputs = (h, w, c_count, down, across, c_blocks), (ho, wo, k_count, down, across, k_blocks)
    start, stop = my_range(ctx, n * down * across, per_block)
    for first in range(start, stop, per_block):
        count = min(per_block, stop - first)
        read_inputs(x, first, count, inputs, pad, half, v, per_block, work)
        for p in range(POSITIONS):
            for k in range(k_blocks):
                for c in range(0, c_blocks, C_BLOCKS):  # a slice of U and one of V fit into the first-level cache
                    for g in range((count + LANES - 1) // LANES):
                        tiles_by_lines(
                            v + p * LINE + (c * per_block + g * LANES) * TILE_BYTES,
                            u + p * u_position + (k * c_count + c * LANES) * LINE,
                            m + p * LINE + (k * per_block + g * LANES) * TILE_BYTES,
                            min(C_BLOCKS, c_blocks - c),
                            per_block * TILE_BYTES,
                            GROUP,
                            c,
                        )
        write_outputs(m, first, count, outputs, half, y, per_block, work, bias, residual - y, flags)


@Kernel
def winograd_weight_gradient(address):  # type: ignore[no-untyped-def]  # context: see below
    """dw from x and dy for 3x3, stride 1.

    Context: x, dy, dw fp32 KRSC, work, N, H, W, C, Ho, Wo, K, pad, 1 for bf16, tiles per block, channels per group: of
    K, of C, bytes per thread.
    """
    ctx = words(address)
    x, dy, dw = ctx[ARGS], ctx[ARGS + 1], ctx[ARGS + 2]
    n, h, w, c_count = ctx[ARGS + 4], ctx[ARGS + 5], ctx[ARGS + 6], ctx[ARGS + 7]
    ho, wo, k_count, pad = ctx[ARGS + 8], ctx[ARGS + 9], ctx[ARGS + 10], ctx[ARGS + 11]
    half, per_block, k_group, c_group = ctx[ARGS + 12], ctx[ARGS + 13], ctx[ARGS + 14], ctx[ARGS + 15]
    work = ctx[ARGS + 3] + team_rank(ctx) * ctx[ARGS + 16]
    c_groups, k_blocks, c_blocks = c_count // c_group, k_group // LANES, c_group // LANES
    v = work + EDGE
    m = v + c_blocks * per_block * TILE_BYTES
    u = m + k_blocks * per_block * TILE_BYTES
    f32(work, LANES)[:] = 0
    down, across = (ho + TILE - 1) // TILE, (wo + TILE - 1) // TILE
    tiles, size = n * down * across, 2 if half else 4
    inputs, outputs = (h, w, c_count, down, across, c_blocks), (ho, wo, k_count, down, across, k_blocks)
    start, stop = my_range(ctx, k_count // k_group * c_groups, 1)
    for task in range(start, stop):
        k0, c0 = task // c_groups * k_group, task % c_groups * c_group
        for first in range(0, tiles, per_block):
            count = min(per_block, tiles - first)
            if count < per_block:
                f32(v, (c_blocks + k_blocks) * per_block * TILE_BYTES // 4)[:] = 0
            read_inputs(x + c0 * size, first, count, inputs, pad, half, v, per_block, work)
            read_gradients(dy + k0 * size, first, count, outputs, half, m, per_block, work)
            for p in range(POSITIONS):
                for k in range(k_blocks):
                    for c in range(c_blocks):
                        tiles_by_tiles(
                            m + p * LINE + k * per_block * TILE_BYTES,
                            v + p * LINE + c * per_block * TILE_BYTES,
                            u + p * LINE + (c * k_group + k * LANES) * TILE_BYTES,
                            per_block // LANES,
                            LANES * TILE_BYTES,
                            LANES * TILE_BYTES,
                            first,
                        )
        for k in range(k_group):
            for c in range(c_blocks):
                target = dw + ((k0 + k) * 9 * c_count + c0 + c * LANES) * 4
                write_weights(u + (c * k_group + k) * TILE_BYTES, target, c_count * 4)
