"""How batch normalisation walks a feature map: tiles of whole channel rows, chunks of tiles, sums per chunk.

An NHWC tensor is rows of C channels. A *tile* is 2**k rows side by side, 1024 to 2047 elements (one row when C is
larger), and so are the vectors of per-channel factors and sums: every inner loop then runs over a thousand contiguous
elements whatever C is, and sums over the rows of a tile are folded by halving it. A *chunk* is up to 64 tiles. Chunks
follow from the shape only; each gives one pair of float64 partial results per channel, which are added in chunk order.
So the bits do not depend on the number of threads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from renaissance.backend.cpu.intrinsics import ARGS, f64, i32, my_range, u8
from renaissance.backend.cpu.kernels_common import PARALLEL_ELEMENTS
from renaissance.backend.cpu.streams import compiled, set_tile, tile
from renaissance.backend.registry import CaptureContext
from renaissance.core.region import ALIGNMENT, align
from renaissance.core.shape import Shape

TILE = 1024
"""Least elements of a tile."""
LEAST_TILES, MOST_TILES = 4, 64
"""Tiles of a chunk. The mean of the first one is what the chunk's sums are shifted by, so 64 bounds how far that can be
from the chunk's own mean: by less than 8 standard deviations, whatever the data."""
CHUNKS = 16
"""A tensor is cut into at least as many chunks if they have LEAST_TILES tiles: enough to share between cores."""
CHANNELS = 64
"""Channels that one thread finishes at a time."""
LIMITS = {"none": (math.nan, math.nan), "relu": (0.0, math.nan), "relu6": (0.0, 6.0)}
"""Least and largest value that an activation lets through; NaN: no limit, since a comparison with it is false."""
FACTORS = 4
"""Tiles of per-channel factors that an element-wise pass reads."""
SUMS = 3
"""Tiles that each thread of a summing pass works in."""


APART = 320
"""Bytes between tiles. Without them the same place of two tiles would be a multiple of 4096 bytes apart, and the CPU
would take a load from one for the result of a store to the other until it has compared the whole addresses."""


@dataclass(frozen=True, slots=True)
class NormPlan:
    """Sizes of one normalisation, and where its working memory lies."""

    samples: int
    per_sample: int
    channels: int
    tile: int
    """Elements of a tile, a multiple of ``channels``."""
    chunk: int
    """Elements of a chunk, a multiple of ``tile``."""
    factors: int
    """Address of FACTORS tiles of float32, shared by all threads."""
    sums: int
    """Address of SUMS tiles of float32 per thread."""
    partials: int
    """Address of float64 [1 + chunks][2][channels]; row 0 is for the totals."""
    threads: int
    finishers: int
    """Threads for the passes over the partial results."""

    @classmethod
    def make(cls, shape: Shape, ctx: CaptureContext) -> NormPlan:
        """The plan for a tensor of this shape; takes the node's scratch memory."""
        channels, elements = shape.c, shape.numel
        size = channels
        while size < TILE:
            size *= 2
        tiles = -(-elements // size)
        chunk = size * min(max(-(-tiles // CHUNKS), LEAST_TILES), MOST_TILES)
        chunks = -(-elements // chunk)
        threads = ctx.threads if elements >= PARALLEL_ELEMENTS else 1
        finishers = ctx.threads if 2 * chunks * channels >= PARALLEL_ELEMENTS else 1
        tile_bytes = align(4 * size) + APART
        bytes_of = (FACTORS * tile_bytes, SUMS * tile_bytes * threads, 16 * (chunks + 1) * channels)
        factors = ctx.scratch(sum(bytes_of))
        sums = factors + bytes_of[0]
        per_sample = elements // shape.n
        partials = sums + bytes_of[1]
        return cls(shape.n, per_sample, channels, size, chunk, factors, sums, partials, threads, finishers)

    def words(self, batch_valid: int) -> tuple[int, ...]:
        """The first argument words of every kernel here (``SHARED`` of them); ``batch_valid`` 0: all samples count."""
        return (
            batch_valid,
            self.samples,
            self.per_sample,
            self.channels,
            self.tile,
            self.chunk,
            self.factors,
            self.sums,
            self.partials,
        )


VALID, SAMPLES, PER_SAMPLE, CHANNEL_COUNT, TILE_SIZE, CHUNK_SIZE, FACTOR_TILES, SUM_TILES, PARTIALS = range(
    ARGS, ARGS + 9
)
OWN = ARGS + 9
"""Index of a kernel's first word of its own."""


@compiled
def valid_elements(ctx):  # type: ignore[no-untyped-def]  # int64[:] -> int64, elements of the samples that count
    samples = ctx[SAMPLES]
    if ctx[VALID] != 0:
        samples = min(max(np.int64(i32(ctx[VALID], 1)[0]), np.int64(0)), samples)
    return samples * ctx[PER_SAMPLE]


@compiled
def tile_bytes(ctx):  # type: ignore[no-untyped-def]  # int64[:] -> int64, from one tile to the next (NormPlan.make)
    return (4 * ctx[TILE_SIZE] + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT + APART


@compiled
def spread(at, channels, size):  # type: ignore[no-untyped-def]  # int64 address, int64, int64: the first row to all rows of a tile
    have = channels
    while have < size:
        for i in range(have):
            set_tile(at + 4 * have, i, tile(at, i))
        have *= 2


@compiled
def fold(at, channels, size):  # type: ignore[no-untyped-def]  # int64 address, int64, int64: the first row := the sum of all rows
    have = size
    while have > channels:
        have //= 2
        for i in range(have):
            set_tile(at, i, tile(at, i) + tile(at + 4 * have, i))


@compiled
def clear(at, start, size):  # type: ignore[no-untyped-def]  # int64 address, int64, int64: elements start to size of a tile := 0
    for i in range(size - start):
        set_tile(at + 4 * start, i, np.float32(0))


@compiled
def spread_channels(ctx, factor, start, width):  # type: ignore[no-untyped-def]  # int64[:], int64, int64, int64: some channels of the first row to all rows of a factor tile
    at, channels = ctx[FACTOR_TILES] + factor * tile_bytes(ctx) + 4 * start, ctx[CHANNEL_COUNT]
    for row in range(channels, ctx[TILE_SIZE], channels):
        for c in range(width):
            set_tile(at + 4 * row, c, tile(at, c))


@compiled
def partials(ctx, chunk, which, start, width):  # type: ignore[no-untyped-def]  # int64[:], int64, 0 or 1, int64, int64 -> float64[width]
    """The first or second partial results of a chunk, for ``width`` channels from ``start`` on."""
    channels = ctx[CHANNEL_COUNT]
    return f64(ctx[PARTIALS] + 8 * ((2 * (chunk + 1) + which) * channels + start), width)


@compiled
def totals(ctx, which, start, width):  # type: ignore[no-untyped-def]  # int64[:], 0 or 1, int64, int64 -> float64[width], zeros
    sums = partials(ctx, -1, which, start, width)
    for c in range(width):
        sums[c] = 0.0
    return sums


@compiled
def clear_invalid(ctx, out, half, valid):  # type: ignore[no-untyped-def]  # int64[:], int64 address, 1 for bfloat16, int64 valid elements
    """The rows of the samples that don't count := 0 (this thread's share of them)."""
    width = np.int64(2) if half != 0 else np.int64(4)
    start, stop = my_range(ctx, (ctx[SAMPLES] * ctx[PER_SAMPLE] - valid) * width, TILE)
    rest = u8(out + valid * width + start, stop - start)
    for i in range(stop - start):
        rest[i] = 0
