"""Convolution 3 x 3 with stride 1 by Winograd's algorithm F(2x2, 3x3), with matrix products of our own.

A tile of 2 x 2 results is made of a 4 x 4 patch of the input: both are transformed so that the convolution becomes 16
products of matrices [tiles, C] x [C, K], 16 multiplications where the plain sum has 36 (Lavin and Gray, "Fast
Algorithms for Convolutional Neural Networks", 2015). The gradient of the input is the same with the filter turned
round; the gradient of the weights is the transposed algorithm, 16 products [K, tiles] x [tiles, C]. Transformed
operands are bfloat16 in a bfloat16 model (one rounding more than a plain sum), sums are float32.

Everything is cut by size: a block of tiles, a chunk of the sum over tiles. So the bits do not depend on the number of
threads. Needs C and K that are multiples of 16, and AVX-512 (with BF16 for bfloat16): see ``fits``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from numba import njit

from renaissance.backend.cpu.intrinsics import ARGS, f32, i64, my_range, team_rank, u32, words
from renaissance.backend.cpu.kernels_common import Kernel
from renaissance.backend.cpu.queue import kernel_call
from renaissance.backend.cpu.vector_code import (
    LANES,
    TILE_COLUMNS,
    TILE_ROWS,
    gradient_fp32,
    gradient_pairs,
    has_half_products,
    has_vectors,
    input_bf16,
    input_fp32,
    input_pairs,
    output_bf16,
    output_fp32,
    tile_bf16,
    tile_fp32,
    weight_gradient,
    weight_pairs,
    weights_bf16,
    weights_fp32,
)
from renaissance.backend.registry import Call
from renaissance.core.region import align

PARTS = 16
"""Products: one per element of a transformed 4 x 4 patch."""
BLOCK_BYTES = 384 << 10
"""Transformed patches that a thread works on at a time: with the results they stay in the second-level cache."""
RESULT_COLUMNS = 128
"""Output channels whose products are formed before they are transformed back."""
CHUNK_TILES = 1024
"""Tiles between two additions to the sums of a weight gradient."""
TABLES = 64
"""Addresses that a thread keeps tables of."""


@dataclass(frozen=True)
class Convolution:
    """y[N,Ho,Wo,K] = x[N,H,W,C] * w[K,3,3,C], stride 1, ``pad`` zeros on each side; bfloat16 (``half``) or float32."""

    n: int
    h: int
    w: int
    c: int
    k: int
    pad: int
    half: bool

    @cached_property
    def out(self) -> tuple[int, int]:
        return self.h + 2 * self.pad - 2, self.w + 2 * self.pad - 2

    @cached_property
    def tiles(self) -> int:
        return self.n * -(-self.out[0] // 2) * -(-self.out[1] // 2)

    @property
    def size(self) -> int:
        """Bytes of an element of x, y and w."""
        return 2 if self.half else 4

    def turned(self) -> Convolution:
        """The convolution that gives the gradient of the input from the gradient of the output."""
        return Convolution(self.n, *self.out, self.k, self.c, 2 - self.pad, self.half)


def fits(c: int, k: int, kernel: int, stride: int, groups: int, pad: int, half: bool) -> bool:
    """Whether this module can compute such a convolution on this machine."""
    shape = (kernel, stride, groups) == (3, 1, 1) and 0 <= pad <= 2 and c % LANES == 0 and k % LANES == 0
    return shape and (has_half_products() if half else has_vectors())


def packed_bytes(conv: Convolution) -> int:
    """Bytes of the transformed weights."""
    return PARTS * align(conv.k, TILE_COLUMNS) * conv.c * conv.size


def pack_bytes(conv: Convolution, threads: int) -> int:
    """Scratch that ``pack`` needs."""
    return threads * _pack_share(conv)


def _pack_share(conv: Convolution) -> int:
    return align(8 * TABLES + PARTS * TILE_COLUMNS * conv.c * conv.size)


def pack(conv: Convolution, weights: int, packed: int, scratch: int, threads: int, turned: bool, name: str) -> Call:
    """Transform the weights of ``conv`` into ``packed``. With ``turned``, ``conv`` is ``turned()`` of the layer's and
    ``weights`` are still the layer's."""
    words = (weights, packed, conv.c, conv.k, scratch, _pack_share(conv), int(conv.half), int(turned))
    blocks = align(conv.k, TILE_COLUMNS) // TILE_COLUMNS
    return kernel_call(pack_weights, words, name, threads=min(threads, blocks))


def block_tiles(conv: Convolution) -> int:
    """Tiles that a thread transforms at a time: a multiple of TILE_ROWS."""
    fitting = BLOCK_BYTES // (PARTS * conv.c * conv.size) // TILE_ROWS * TILE_ROWS
    return int(min(max(fitting, TILE_ROWS), 64, align(conv.tiles, TILE_ROWS)))


def _forward_share(conv: Convolution) -> int:
    columns = min(RESULT_COLUMNS, align(conv.k, TILE_COLUMNS))
    return align(8 * TABLES) + align(
        block_tiles(conv) * PARTS * (conv.c * conv.size + columns * 4) + 4 * (conv.c + columns)
    )


def forward_bytes(conv: Convolution, threads: int) -> int:
    """Scratch that ``forward`` needs."""
    return threads * _forward_share(conv)


def forward(
    conv: Convolution,
    x: int,
    packed: int,
    y: int,
    scratch: int,
    threads: int,
    name: str,
    bias: int,
    limits: int,
    keep: tuple[object, ...] = (),
) -> Call:
    """y = act(conv(x, w) + bias): ``bias`` is the address of K float32, ``limits`` that of the least and the greatest
    value of act."""
    words = (
        *(x, packed, y, conv.n, conv.h, conv.w, conv.c, *conv.out, conv.k, conv.pad, conv.tiles, block_tiles(conv)),
        *(scratch, _forward_share(conv), bias, limits, int(conv.half), RESULT_COLUMNS),
    )
    return kernel_call(forward_tiles, words, name, threads=threads, keep=keep)


def _chunk(conv: Convolution) -> int:
    return min(CHUNK_TILES, align(conv.tiles, 2))


def weights_bytes(conv: Convolution, threads: int) -> int:
    """Scratch that ``backward_weights`` needs: transformed operands of a chunk, sums, a share for each thread."""
    _, _, shares, share = _gradient_layout(conv)
    return shares + threads * share


def _gradient_layout(conv: Convolution) -> tuple[int, int, int, int]:
    """Offsets of the transformed gradients, the sums and the threads' shares in the scratch (the patches are at 0), and
    the bytes of a share."""
    chunk = _chunk(conv)
    z = align(PARTS * chunk * align(conv.c, TILE_COLUMNS) * conv.size)
    sums = z + align(PARTS * chunk * conv.k * conv.size)
    shares = sums + align(PARTS * conv.k * align(conv.c, TILE_COLUMNS) * 4)
    return z, sums, shares, align(8 * TABLES + 4 * max(conv.c, conv.k))


def backward_weights(conv: Convolution, x: int, dy: int, dw: int, scratch: int, threads: int, name: str) -> list[Call]:
    """dw[K,3,3,C] (float32) = gradient of the weights, overwritten."""
    *offsets, share = _gradient_layout(conv)
    z, sums, shares = (scratch + offset for offset in offsets)
    shape = (conv.n, conv.h, conv.w, conv.c, *conv.out, conv.k, conv.pad)
    calls: list[Call] = []
    chunk = _chunk(conv)
    for start in range(0, conv.tiles, chunk):
        count = min(chunk, conv.tiles - start)
        steps = -(-count // 2) if conv.half else count
        patches = (x, dy, scratch, z, shares, *shape, conv.tiles, start, count, chunk, int(conv.half), share)
        calls.append(kernel_call(gradient_patches, patches, name, threads=threads))
        products = (scratch, z, sums, conv.c, conv.k, steps, chunk, int(start > 0), int(conv.half))
        calls.append(kernel_call(gradient_products, products, name, threads=threads))
    calls.append(kernel_call(gradient_back, (sums, dw, conv.c, conv.k), name, threads=threads))
    return calls


@njit(cache=True)
def _fill_table(table, base, zeros, first_row, first_column, side, h, w, pixel):  # type: ignore[no-untyped-def]
    """Addresses of the pixels of a side x side patch of one image; ``zeros`` for those outside. All int64."""
    for i in range(side):
        for j in range(side):
            row, column = first_row + i, first_column + j
            inside = 0 <= row < h and 0 <= column < w
            table[side * i + j] = base + (row * w + column) * pixel if inside else zeros


@Kernel
def pack_weights(address):  # type: ignore[no-untyped-def]  # words: weights, packed, C, K, scratch, its share, half, turned
    """packed[part][K/32][C/2][32] pairs (or [C][32] float32) from w[K,3,3,C], or from w[C,3,3,K] turned round."""
    ctx = words(address)
    c, k, half, turned = ctx[ARGS + 2], ctx[ARGS + 3], ctx[ARGS + 6], ctx[ARGS + 7]
    size = 2 if half else 4
    tables = ctx[ARGS + 4] + team_rank(ctx) * ctx[ARGS + 5]
    first, second = i64(tables, 16), i64(tables + 128, 16)
    temporary = tables + 8 * TABLES
    blocks = (k + TILE_COLUMNS - 1) // TILE_COLUMNS
    part = blocks * TILE_COLUMNS * c * size
    start, stop = my_range(ctx, blocks, 1)
    for block in range(start, stop):
        k0 = block * TILE_COLUMNS
        width = min(TILE_COLUMNS, k - k0)
        target = ctx[ARGS + 1] + block * TILE_COLUMNS * c * size
        if turned:  # the vector runs over the layer's input channels, which lie side by side
            for row in range(0, c, 2 if half else 1):
                for i in range(9):
                    first[i] = ctx[ARGS] + ((row * 9 + 8 - i) * k + k0) * size
                    second[i] = ctx[ARGS] + (((row + 1) * 9 + 8 - i) * k + k0) * size
                if half:
                    weight_pairs((tables, tables + 128, target + row * 64, part, width))
                else:
                    weights_fp32((tables, target + row * 128, part, width))
            continue
        stride = TILE_COLUMNS * c * size  # temporary[part][32][C]
        for row in range(width):
            for i in range(9):
                first[i] = ctx[ARGS] + (((k0 + row) * 9 + i) * c) * size
            if half:
                weights_bf16((tables, temporary + row * c * size, stride, c))
            else:
                weights_fp32((tables, temporary + row * c * size, stride, c))
        steps = c // 2 if half else c
        for p in range(PARTS):
            source = u32(temporary + p * stride, TILE_COLUMNS * steps)
            result = u32(target + p * part, TILE_COLUMNS * steps)
            for s in range(steps):
                for row in range(width):
                    result[s * TILE_COLUMNS + row] = source[row * steps + s]


@Kernel
def forward_tiles(address):  # type: ignore[no-untyped-def]  # words: see ``forward``
    ctx = words(address)
    x, packed, y = ctx[ARGS], ctx[ARGS + 1], ctx[ARGS + 2]
    h, w, c = ctx[ARGS + 4], ctx[ARGS + 5], ctx[ARGS + 6]
    out_h, out_w, k, pad = ctx[ARGS + 7], ctx[ARGS + 8], ctx[ARGS + 9], ctx[ARGS + 10]
    tiles, block, half = ctx[ARGS + 11], ctx[ARGS + 12], ctx[ARGS + 17]
    size = 2 if half else 4
    steps = c // 2 if half else c
    rows, columns = (out_h + 1) // 2, (out_w + 1) // 2
    tables = ctx[ARGS + 13] + team_rank(ctx) * ctx[ARGS + 14]
    table, targets = i64(tables, 16), i64(tables + 128, 4)
    widest = min(ctx[ARGS + 18], (k + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS)
    patches = tables + 8 * TABLES
    results = patches + block * PARTS * c * size
    zeros = results + block * PARTS * widest * 4
    nowhere = zeros + c * 4
    f32(zeros, c)[:] = 0
    k_blocks = (k + TILE_COLUMNS - 1) // TILE_COLUMNS
    part = k_blocks * TILE_COLUMNS * c * size
    start, stop = my_range(ctx, tiles, block)
    for first in range(start, stop, block):
        count = min(block, stop - first)
        for t in range(count):
            tile = first + t
            image = tile // (rows * columns)
            row, column = (tile // columns) % rows * 2, tile % columns * 2
            _fill_table(table, x + image * h * w * c * size, zeros, row - pad, column - pad, 4, h, w, c * size)
            if half:
                input_bf16((tables, patches + t * c * size, block * c * size, c))
            else:
                input_fp32((tables, patches + t * c * size, block * c * size, c))
        for k0 in range(0, k, widest):
            width = min(widest, k - k0)
            for p in range(PARTS):
                for j in range(0, width, TILE_COLUMNS):
                    b = packed + p * part + (k0 + j) * c * size
                    for t in range(0, count, TILE_ROWS):
                        a = patches + (p * block + t) * c * size
                        m = results + ((p * block + t) * widest + j) * 4
                        if half:
                            tile_bf16((a, b, m, steps, c * size, 4, 4 * TILE_COLUMNS, widest * 4, 0))
                        else:
                            tile_fp32((a, b, m, steps, c * size, 4, 4 * TILE_COLUMNS, widest * 4, 0))
            for t in range(count):
                tile = first + t
                image = tile // (rows * columns)
                row, column = (tile // columns) % rows * 2, tile % columns * 2
                origin = y + (image * out_h * out_w * k + k0) * size
                _fill_table(targets, origin, nowhere, row, column, 2, out_h, out_w, k * size)
                m, stride = results + t * widest * 4, block * widest * 4
                bias, limits = ctx[ARGS + 15] + k0 * 4, ctx[ARGS + 16]
                if half:
                    output_bf16((m, stride, tables + 128, width, bias, limits))
                else:
                    output_fp32((m, stride, tables + 128, width, bias, limits))


@Kernel
def gradient_patches(address):  # type: ignore[no-untyped-def]  # words: see ``backward_weights``
    """V[part][step][C] and Z[part][step][K] of a chunk of tiles; a step is two tiles (pairs) or one (float32)."""
    ctx = words(address)
    x, dy, v, z = ctx[ARGS], ctx[ARGS + 1], ctx[ARGS + 2], ctx[ARGS + 3]
    h, w, c = ctx[ARGS + 6], ctx[ARGS + 7], ctx[ARGS + 8]
    out_h, out_w, k, pad = ctx[ARGS + 9], ctx[ARGS + 10], ctx[ARGS + 11], ctx[ARGS + 12]
    tiles, first, count, chunk, half = (
        ctx[ARGS + 13], ctx[ARGS + 14], ctx[ARGS + 15], ctx[ARGS + 16], ctx[ARGS + 17],
    )  # fmt: skip
    size = 2 if half else 4
    per = 2 if half else 1
    rows, columns = (out_h + 1) // 2, (out_w + 1) // 2
    padded = (c + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS
    tables = ctx[ARGS + 4] + team_rank(ctx) * ctx[ARGS + 18]
    zeros = tables + 8 * TABLES
    f32(zeros, max(c, k))[:] = 0
    stride_v, stride_z = chunk // per * padded * 4, chunk // per * k * 4
    start, stop = my_range(ctx, (count + per - 1) // per, 1)
    for step in range(start, stop):
        for i in range(per):
            tile = first + step * per + i
            image = tile // (rows * columns)
            row, column = (tile // columns) % rows * 2, tile % columns * 2
            height = h if tile < tiles else 0  # the tile that makes an odd number even is all zeros
            out_height = out_h if tile < tiles else 0
            _fill_table(
                i64(tables + 128 * i, 16),
                x + image * h * w * c * size,
                zeros,
                row - pad,
                column - pad,
                4,
                height,
                w,
                c * size,
            )
            base = dy + image * out_h * out_w * k * size
            _fill_table(i64(tables + 256 + 32 * i, 4), base, zeros, row, column, 2, out_height, out_w, k * size)
        if half:
            input_pairs((tables, tables + 128, v + step * padded * 4, stride_v, c))
            gradient_pairs((tables + 256, tables + 288, z + step * k * 4, stride_z, k))
        else:
            input_fp32((tables, v + step * padded * 4, stride_v, c))
            gradient_fp32((tables + 256, z + step * k * 4, stride_z, k))


@Kernel
def gradient_products(address):  # type: ignore[no-untyped-def]  # words: V, Z, sums, C, K, steps, chunk, add, half
    """sums[part][K][C] (+)= Z^T V over the steps of a chunk."""
    ctx = words(address)
    v, z, sums, c, k = ctx[ARGS], ctx[ARGS + 1], ctx[ARGS + 2], ctx[ARGS + 3], ctx[ARGS + 4]
    steps, chunk, add, half = ctx[ARGS + 5], ctx[ARGS + 6], ctx[ARGS + 7], ctx[ARGS + 8]
    most = chunk // 2 if half else chunk
    padded = (c + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS
    blocks = padded // TILE_COLUMNS
    start, stop = my_range(ctx, PARTS * blocks, 1)
    for unit in range(start, stop):
        p, block = unit // blocks, unit % blocks
        b = v + (p * most * padded + block * TILE_COLUMNS) * 4
        for row in range(0, k, TILE_ROWS):
            a = z + (p * most * k + row) * 4
            m = sums + ((p * k + row) * padded + block * TILE_COLUMNS) * 4
            if half:
                tile_bf16((a, b, m, steps, 4, k * 4, padded * 4, padded * 4, add))
            else:
                tile_fp32((a, b, m, steps, 4, k * 4, padded * 4, padded * 4, add))


@Kernel
def gradient_back(address):  # type: ignore[no-untyped-def]  # words: sums, dw, C, K
    """dw[K,3,3,C] from sums[part][K][C]."""
    ctx = words(address)
    c, k = ctx[ARGS + 2], ctx[ARGS + 3]
    padded = (c + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS
    start, stop = my_range(ctx, k, 8)
    for row in range(start, stop):
        weight_gradient((ctx[ARGS] + row * padded * 4, k * padded * 4, ctx[ARGS + 1] + row * 9 * c * 4, c * 4, c))
