"""Sums of products of bfloat16 over pairs of pixels: what every weight gradient in bfloat16 ends in.

Operands lie as pairs [part][block of 16 channels][step][16], where a step is two pixels (or tiles). ``unfold_pairs``
makes them from images: for each tap of a kernel the input pixels that it meets, two outputs at a time.
"""

from __future__ import annotations

from numba import njit

from renaissance.backend.cpu.intrinsics import ARGS, my_range, u16, words
from renaissance.backend.cpu.kernels_common import Kernel
from renaissance.backend.cpu.vectors import LANES, LINE, PAIR_COLUMNS, PAIR_ROWS, pair_lines, tile_pairs

SLICE_STEPS = 128
"""Steps that a product sums at a time: a slice of V stays in the first-level cache."""
ROW_GROUP = 64
"""Rows of a unit of work."""
UNFOLD_STEPS = 8
"""Steps that a thread unfolds at a time."""


@Kernel
def pair_products(address):  # type: ignore[no-untyped-def]  # context: see below
    """sums[part][K][C] = Z^T V over the steps of a chunk, plus the sums so far with ``add``.

    Context: V, Z, sums, parts, C, K, steps, room (steps that a block has room for), bytes from one part of V to the
    next, of Z, of sums, bytes from one row of sums to the next, add.
    """
    ctx = words(address)
    v, z, sums, parts, c, k = ctx[ARGS], ctx[ARGS + 1], ctx[ARGS + 2], ctx[ARGS + 3], ctx[ARGS + 4], ctx[ARGS + 5]
    steps, block_bytes, v_part, z_part = ctx[ARGS + 6], ctx[ARGS + 7] * LINE, ctx[ARGS + 8], ctx[ARGS + 9]
    s_part, row_bytes, add = ctx[ARGS + 10], ctx[ARGS + 11], ctx[ARGS + 12]
    blocks, groups = c // PAIR_COLUMNS, (k + ROW_GROUP - 1) // ROW_GROUP
    start, stop = my_range(ctx, parts * blocks * groups, 1)
    for unit in range(start, stop):
        p, column, first = unit // groups // blocks, unit // groups % blocks * PAIR_COLUMNS, unit % groups * ROW_GROUP
        for step in range(0, steps, SLICE_STEPS):
            b = v + p * v_part + column // LANES * block_bytes + step * LINE
            count = min(SLICE_STEPS, steps - step)
            for row in range(first, min(first + ROW_GROUP, k), PAIR_ROWS):
                a = z + p * z_part + row // LANES * block_bytes + step * LINE + row % LANES * 4
                target = sums + p * s_part + row * row_bytes + column * 4
                tile_pairs(a, b, target, count, 4, LINE, LINE, block_bytes, row_bytes, add + step)


@njit
def following(column, row, image, columns, rows):  # type: ignore[no-untyped-def]  # int64 x 5 -> the next pixel's place
    column += 1
    if column == columns:
        column, row = 0, row + 1
        if row == rows:
            row, image = 0, image + 1
    return column, row, image


@Kernel
def unfold_pairs(address):  # type: ignore[no-untyped-def]  # context: see below
    """V[tap][C/16][step][16] and Z[K/16][step][16] of the pairs of output pixels first..last-1.

    Context: x, dy, v, z, zeros (2 max(C, K) bytes), N, H, W, C, Ho, Wo, K, R, S, stride, pad, first, last, room, bytes
    from one tap of V to the next.
    """
    ctx = words(address)
    x, dy, v, z, zeros = ctx[ARGS], ctx[ARGS + 1], ctx[ARGS + 2], ctx[ARGS + 3], ctx[ARGS + 4]
    n, h, w, c = ctx[ARGS + 5], ctx[ARGS + 6], ctx[ARGS + 7], ctx[ARGS + 8]
    ho, wo, k, r, s = ctx[ARGS + 9], ctx[ARGS + 10], ctx[ARGS + 11], ctx[ARGS + 12], ctx[ARGS + 13]
    stride, pad, begin, end = ctx[ARGS + 14], ctx[ARGS + 15], ctx[ARGS + 16], ctx[ARGS + 17]
    block_bytes, v_part = ctx[ARGS + 18] * LINE, ctx[ARGS + 19]
    pixels = n * ho * wo
    u16(zeros, max(c, k))[:] = 0
    start, stop = my_range(ctx, end - begin, UNFOLD_STEPS)
    q = 2 * (begin + start)
    column, row, image = q % wo, q // wo % ho, q // wo // ho
    for i in range(start, stop):
        left, top, source = column * stride - pad, row * stride - pad, x + image * h * w * c * 2
        column, row, image = following(column, row, image, wo, ho)
        other_left, other_top, other = column * stride - pad, row * stride - pad, x + image * h * w * c * 2
        column, row, image = following(column, row, image, wo, ho)
        second = q + 1 < pixels
        pair_lines(dy + q * k * 2, dy + (q + 1) * k * 2 if second else zeros, z + i * LINE, block_bytes, k)
        q += 2
        for up in range(r):
            for across in range(s):
                y0, x0, y1, x1 = top + up, left + across, other_top + up, other_left + across
                inside = 0 <= y0 < h and 0 <= x0 < w
                other_inside = second and 0 <= y1 < h and 0 <= x1 < w
                a = source + (y0 * w + x0) * c * 2 if inside else zeros
                b = other + (y1 * w + x1) * c * 2 if other_inside else zeros
                pair_lines(a, b, v + (up * s + across) * v_part + i * LINE, block_bytes, c)
