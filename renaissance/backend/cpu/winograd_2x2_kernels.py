"""The kernels of Winograd's F(2x2, 3x3) in bfloat16 (see ``winograd_2x2``).

Forward: blocks of tiles, each one thread's from its first load to its last store. Weight gradient: with few channels
the rows of tiles are cut into shares, each one thread's with sums of its own, and the shares are added in order; with
many the sums are too large for that, and chunks of rows are transformed into memory that all threads share, then summed
part by part. So the bits do not depend on the team.
"""

from __future__ import annotations

from numba import njit

from renaissance.backend.cpu.intrinsics import ARGS, f32, my_range, team_rank, u32, words
from renaissance.backend.cpu.kernels_common import Kernel
from renaissance.backend.cpu.vectors import PAIR_COLUMNS, PAIR_ROWS, tile_pairs
from renaissance.backend.cpu.winograd_2x2 import (
    PARTS,
    TILE,
    read_gradient_pairs,
    read_row,
    read_row_pairs,
    read_weight_pairs,
    read_weights,
    write_tile,
    write_weights,
)
from renaissance.backend.cpu.winograd_kernels import EDGE, LANES, LINE, limits

RESULT_COLUMNS = 128
"""Output channels whose products are formed before they are transformed back."""


@Kernel
def pack_small(address):  # type: ignore[no-untyped-def]  # context: w, u, work, C, K, bytes per thread, 1 when turned
    """u[part][K/32][C/2][32] pairs from w[K,3,3,C]; turned: from w[C,3,3,K] turned by 180 degrees."""
    ctx = words(address)
    c, k, turned = ctx[ARGS + 3], ctx[ARGS + 4], ctx[ARGS + 6]
    work = ctx[ARGS + 2] + team_rank(ctx) * ctx[ARGS + 5]
    blocks = (k + PAIR_COLUMNS - 1) // PAIR_COLUMNS
    part = blocks * PAIR_COLUMNS * c * 2
    start, stop = my_range(ctx, blocks, 1)
    for block in range(start, stop):
        k0 = block * PAIR_COLUMNS
        width = min(PAIR_COLUMNS, k - k0)
        target = ctx[ARGS + 1] + k0 * c * 2
        if turned:  # the lanes run over the layer's input channels, which lie side by side
            for row in range(0, c, 2):
                first = ctx[ARGS] + ((row * 9 + 8) * k + k0) * 2
                for j in range(0, width, LANES):
                    place = target + row * LINE + j * 4
                    read_weight_pairs(first + j * 2, first + j * 2 + 18 * k, -2 * k, place, part)
            continue
        steps = c // 2
        for row in range(width):
            read_weights(ctx[ARGS] + (k0 + row) * 18 * c, 2 * c, work + row * c * 2, PAIR_COLUMNS * c * 2, c)
        for p in range(PARTS):
            source = u32(work + p * PAIR_COLUMNS * c * 2, PAIR_COLUMNS * steps)
            result = u32(target + p * part, PAIR_COLUMNS * steps)
            for s in range(steps):
                for row in range(width):
                    result[s * PAIR_COLUMNS + row] = source[row * steps + s]


@Kernel
def convolve_small(address):  # type: ignore[no-untyped-def]  # context: see below
    """y = act(conv(x, w) + bias + residual) for 3x3, stride 1, bfloat16.

    Context: x, u, bias (0: none), residual (0: none), y, work, N, H, W, C, Ho, Wo, K, pad, flags, tiles per block,
    bytes per thread, bytes from one part of V to the next, of M.
    """
    ctx = words(address)
    x, u, bias, residual, y = ctx[ARGS], ctx[ARGS + 1], ctx[ARGS + 2], ctx[ARGS + 3], ctx[ARGS + 4]
    n, h, w, c = ctx[ARGS + 6], ctx[ARGS + 7], ctx[ARGS + 8], ctx[ARGS + 9]
    ho, wo, k, pad = ctx[ARGS + 10], ctx[ARGS + 11], ctx[ARGS + 12], ctx[ARGS + 13]
    flags, per_block, v_part, m_part = ctx[ARGS + 14], ctx[ARGS + 15], ctx[ARGS + 17], ctx[ARGS + 18]
    down, across = (ho + TILE - 1) // TILE, (wo + TILE - 1) // TILE
    k_blocks = (k + PAIR_COLUMNS - 1) // PAIR_COLUMNS
    widest = min(RESULT_COLUMNS, k_blocks * PAIR_COLUMNS)
    work = ctx[ARGS + 5] + team_rank(ctx) * ctx[ARGS + 16]
    no_bias = work + EDGE
    v = no_bias + widest * 4
    m = v + PARTS * v_part
    f32(work, LANES)[:] = 0
    f32(no_bias, widest)[:] = 0
    u_part = k_blocks * PAIR_COLUMNS * c * 2
    start, stop = my_range(ctx, n * down * across, per_block)
    for first in range(start, stop, per_block):
        count = min(per_block, stop - first)
        t = 0
        while t < count:
            row, column = (first + t) // across, (first + t) % across
            run = min(across - column, count - t)
            top, left = row % down * TILE - pad, column * TILE - pad
            source = x + ((row // down * h + top) * w + left) * c * 2
            read_row(source, w * c * 2, c * 2, limits(top, 4, h), left, w, work, v + t * c * 2, v_part, run, c)
            t += run
        for k0 in range(0, k, widest):
            width = min(widest, k - k0)
            for p in range(PARTS):
                for j in range(0, width, PAIR_COLUMNS):
                    b = u + p * u_part + (k0 + j) * c * 2
                    for g in range(0, count, PAIR_ROWS):
                        a = v + p * v_part + g * c * 2
                        target = m + p * m_part + (g * widest + j) * 4
                        tile_pairs(a, b, target, c // 2, c * 2, 4, 2 * LINE, LINE, widest * 4, 0)
            for t in range(count):
                row, column = (first + t) // across, (first + t) % across
                top, left = row % down * TILE, column * TILE
                target = y + (((row // down * ho + top) * wo + left) * k + k0) * 2
                rows, columns = limits(top, TILE, ho), limits(left, TILE, wo)
                add = bias + k0 * 4 if bias else no_bias
                lines, nowhere = m + t * widest * 4, work + LINE
                write_tile(
                    lines, m_part, target, wo * k * 2, k * 2, rows, columns, nowhere, add, residual - y, flags, width
                )


@njit
def transform_row(x, dy, v, z, zeros, row, sizes, pad, v_part, z_part, block_bytes):  # type: ignore[no-untyped-def]  # sizes: (H, W, C, Ho, Wo, K)
    """V and Z of one row of tiles, of which there are N * ceil(Ho/2)."""
    h, w, c, ho, wo, k = sizes
    down, steps = (ho + TILE - 1) // TILE, ((wo + TILE - 1) // TILE + 1) // 2
    image, top = row // down, row % down * TILE
    source = x + ((image * h + top - pad) * w - pad) * c * 2
    rows = limits(top - pad, 4, h)
    read_row_pairs(source, w * c * 2, c * 2, rows, -pad, w, zeros, v, v_part, block_bytes, steps, c)
    source = dy + (image * ho + top) * wo * k * 2
    rows = limits(top, TILE, ho)
    read_gradient_pairs(source, wo * k * 2, k * 2, rows, wo, zeros, z, z_part, block_bytes, steps, k)


@Kernel
def small_patches(address):  # type: ignore[no-untyped-def]  # context: see below
    """V and Z of the rows of tiles first..last-1.

    Context: x, dy, v, z, zeros (64 bytes), H, W, C, Ho, Wo, K, pad, first, last, bytes from one part of V to the next,
    of Z, steps that a block has room for.
    """
    ctx = words(address)
    x, dy, v, z, zeros = ctx[ARGS], ctx[ARGS + 1], ctx[ARGS + 2], ctx[ARGS + 3], ctx[ARGS + 4]
    sizes = (ctx[ARGS + 5], ctx[ARGS + 6], ctx[ARGS + 7], ctx[ARGS + 8], ctx[ARGS + 9], ctx[ARGS + 10])
    pad, first, v_part, z_part, room = ctx[ARGS + 11], ctx[ARGS + 12], ctx[ARGS + 14], ctx[ARGS + 15], ctx[ARGS + 16]
    f32(zeros, LANES)[:] = 0
    row_bytes = ((sizes[4] + TILE - 1) // TILE + 1) // 2 * LINE
    start, stop = my_range(ctx, ctx[ARGS + 13] - first, 1)
    for i in range(start, stop):
        at = i * row_bytes
        transform_row(x, dy, v + at, z + at, zeros, first + i, sizes, pad, v_part, z_part, room * LINE)


@Kernel
def small_shares(address):  # type: ignore[no-untyped-def]  # context: see below
    """sums[share][part][K][C]: every share of the rows of tiles is one thread's, chunk by chunk, with V and Z its own.

    Context: x, dy, work, sums, H, W, C, Ho, Wo, K, pad, rows of tiles, shares, rows per chunk, bytes from one part of V
    to the next, of Z, of sums, bytes per share, room, bytes per thread.
    """
    ctx = words(address)
    x, dy, sums = ctx[ARGS], ctx[ARGS + 1], ctx[ARGS + 3]
    sizes = (ctx[ARGS + 4], ctx[ARGS + 5], ctx[ARGS + 6], ctx[ARGS + 7], ctx[ARGS + 8], ctx[ARGS + 9])
    pad, rows, shares, chunk = ctx[ARGS + 10], ctx[ARGS + 11], ctx[ARGS + 12], ctx[ARGS + 13]
    v_part, z_part, s_part, block_bytes = ctx[ARGS + 14], ctx[ARGS + 15], ctx[ARGS + 16], ctx[ARGS + 18] * LINE
    c, k = sizes[2], sizes[5]
    zeros = ctx[ARGS + 2] + team_rank(ctx) * ctx[ARGS + 19]
    v = zeros + EDGE
    z = v + PARTS * v_part
    f32(zeros, LANES)[:] = 0
    steps = ((sizes[4] + TILE - 1) // TILE + 1) // 2
    start, stop = my_range(ctx, shares, 1)
    for share in range(start, stop):
        total = sums + share * ctx[ARGS + 17]
        begin, end = rows * share // shares, rows * (share + 1) // shares
        for first in range(begin, end, chunk):
            count = min(chunk, end - first)
            for i in range(count):
                at = i * steps * LINE
                transform_row(x, dy, v + at, z + at, zeros, first + i, sizes, pad, v_part, z_part, block_bytes)
            for p in range(PARTS):
                for column in range(0, c, PAIR_COLUMNS):
                    b = v + p * v_part + column // LANES * block_bytes
                    for row in range(0, k, PAIR_ROWS):
                        a = z + p * z_part + row // LANES * block_bytes + row % LANES * 4
                        target = total + p * s_part + (row * c + column) * 4
                        tile_pairs(a, b, target, count * steps, 4, LINE, LINE, block_bytes, c * 4, first - begin)


@Kernel
def small_back(address):  # type: ignore[no-untyped-def]  # context: sums, dw, C, K, part bytes of sums, shares, bytes per share
    """dw[K,3,3,C] from sums[share][part][K][C]; shares are added in order, into the first."""
    ctx = words(address)
    c, part, shares = ctx[ARGS + 2], ctx[ARGS + 4], ctx[ARGS + 5]
    start, stop = my_range(ctx, ctx[ARGS + 3], 8)
    for row in range(start, stop):
        for p in range(PARTS):
            total = f32(ctx[ARGS] + p * part + row * c * 4, c)
            for share in range(1, shares):
                more = f32(ctx[ARGS] + share * ctx[ARGS + 6] + p * part + row * c * 4, c)
                for i in range(total.size):
                    total[i] += more[i]
        write_weights(ctx[ARGS] + row * c * 4, part, ctx[ARGS + 1] + row * 9 * c * 4, c * 4, c)
