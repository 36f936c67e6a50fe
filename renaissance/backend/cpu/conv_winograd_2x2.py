"""3x3 convolutions of stride 1 in bfloat16 as ``winograd_2x2``: forward, data gradient, weight gradient."""

from __future__ import annotations

from collections.abc import Hashable

from renaissance.backend.cpu.conv_algorithms import Job, bias_bytes, bias_calls
from renaissance.backend.cpu.onednn_primitives import ConvShape
from renaissance.backend.cpu.pair_kernels import pair_products
from renaissance.backend.cpu.queue import kernel_call
from renaissance.backend.cpu.vectors import PAIR_COLUMNS, PAIR_ROWS
from renaissance.backend.cpu.winograd import ADD_RESIDUAL, APPLY_RELU
from renaissance.backend.cpu.winograd_2x2 import PARTS, TILE, fits
from renaissance.backend.cpu.winograd_2x2_kernels import (
    RESULT_COLUMNS,
    convolve_small,
    pack_small,
    small_back,
    small_patches,
    small_shares,
)
from renaissance.backend.cpu.winograd_kernels import EDGE, LINE
from renaissance.backend.registry import Call
from renaissance.core.region import align

BLOCK_BYTES = 256 << 10
"""V of a block of tiles: with the products it stays in the second-level cache."""
MOST_TILES = 64
NARROW = 128 * 128
"""Elements of C x K up to which a weight gradient is summed in shares: the team meets once, not for every chunk."""
SHARES = 8
CHUNK_STEPS, CHUNK_STEPS_WIDE = 64, 512
"""Pairs of tiles between two additions to the sums: few where both operands and sums fit into the second-level cache,
many where the sums are too large for it."""


def supports_small(job: Job) -> bool:
    """3x3, stride 1, one group, bfloat16, channels in whole vectors, and a CPU that multiplies bfloat16."""
    s = job.shape
    plain = (s.r, s.s, s.stride, s.groups) == (3, 3, 1, 1) and s.pad <= 2
    return plain and job.half and fits(s.c, s.k)


def part_bytes(nbytes: int) -> int:
    """Bytes from one part to the next: odd in lines, so that the parts of a tile fall into different cache sets."""
    return (align(nbytes, LINE) // LINE | 1) * LINE


class SmallConvolution:
    """What forward and data gradient share: a convolution from ``c`` to ``k`` channels."""

    def __init__(self, job: Job, shape: ConvShape, *, turned: bool) -> None:
        self.job, self.shape, self.turned = job, shape, turned
        columns = align(shape.k, PAIR_COLUMNS)
        fitting = BLOCK_BYTES // (PARTS * shape.c * 2) // PAIR_ROWS * PAIR_ROWS
        self.tiles = min(max(fitting, PAIR_ROWS), MOST_TILES)
        widest = min(RESULT_COLUMNS, columns)
        self.v_part, self.m_part = part_bytes(self.tiles * shape.c * 2), part_bytes(self.tiles * widest * 4)
        self.thread_bytes = align(EDGE + widest * 4 + PARTS * (self.v_part + self.m_part))
        self.pack_bytes = 0 if turned else align(PARTS * PAIR_COLUMNS * shape.c * 2)
        self.packed_bytes = PARTS * columns * shape.c * 2
        self.scratch_bytes = job.threads * max(self.thread_bytes, self.pack_bytes)

    def pack(self, w: int, packed: int, scratch: int) -> list[Call]:
        s = self.shape
        arguments = (w, packed, scratch, s.c, s.k, self.pack_bytes, int(self.turned))
        return [kernel_call(pack_small, arguments, f"{self.job.label} pack", threads=self.job.threads)]

    def call(self, x: int, packed: int, b: int, residual: int, y: int, scratch: int) -> Call:
        s, job = self.shape, self.job
        flags = ADD_RESIDUAL * job.residual | APPLY_RELU * job.relu
        arguments = (
            x, packed, b, residual, y, scratch, s.n, s.h, s.w, s.c, s.ho, s.wo, s.k, s.pad, flags, self.tiles,
            self.thread_bytes, self.v_part, self.m_part,
        )  # fmt: skip
        return kernel_call(convolve_small, arguments, job.label, threads=job.threads)


class SmallWinogradForward(SmallConvolution):
    """y = relu(conv(x, w) + b + residual)."""

    name = "winograd 2x2"
    supports = staticmethod(supports_small)

    def __init__(self, job: Job) -> None:
        super().__init__(job, job.shape, turned=False)
        self.layout: Hashable = ("winograd 2x2", job.dtype)

    def run(self, x: int, packed: int, b: int, residual: int, y: int, scratch: int) -> list[Call]:
        return [self.call(x, packed, b, residual, y, scratch)]


class SmallWinogradBackwardData(SmallConvolution):
    """dx is the convolution of dy with the turned weights, padded by what is missing to 2."""

    name = "winograd 2x2"
    supports = staticmethod(supports_small)

    def __init__(self, job: Job) -> None:
        s = job.shape
        super().__init__(job, ConvShape(s.n, s.ho, s.wo, s.k, s.c, 3, 3, 1, 2 - s.pad, 1, s.h, s.w), turned=True)

    def run(self, dy: int, packed: int, dx: int, scratch: int) -> list[Call]:
        return [self.call(dy, packed, 0, 0, dx, scratch)]


class SmallWinogradBackwardWeight:
    """dw by shares of the rows of tiles where the sums are small, else by chunks of rows."""

    name = "winograd 2x2"

    @staticmethod
    def supports(job: Job) -> bool:
        return supports_small(job) and job.shape.c % PAIR_COLUMNS == 0

    def __init__(self, job: Job) -> None:
        self.job, s = job, job.shape
        self.rows = s.n * -(-s.ho // TILE)
        self.steps = -(-s.wo // TILE // 2)
        self.shares = min(SHARES, self.rows) if s.c * s.k <= NARROW else 1
        chunk = CHUNK_STEPS if self.shares > 1 else CHUNK_STEPS_WIDE
        self.chunk = max(1, min(chunk // self.steps, self.rows))
        self.room = self.chunk * self.steps | 1  # odd: blocks of channels do not share a cache set either
        self.v_part, self.z_part = part_bytes(self.room * s.c * 4), part_bytes(self.room * s.k * 4)
        self.s_part = part_bytes(s.k * s.c * 4)
        self.work_bytes = align(EDGE + PARTS * (self.v_part + self.z_part))
        self.work_all = self.work_bytes * (job.threads if self.shares > 1 else 1)
        self.share_bytes = align(PARTS * self.s_part)
        self.own_bytes = self.work_all + self.shares * self.share_bytes
        self.scratch_bytes = self.own_bytes + bias_bytes(job)

    def run(self, x: int, dy: int, dw: int, db: int, scratch: int) -> list[Call]:
        s, job, sums = self.job.shape, self.job, scratch + self.work_all
        calls = self._by_shares(x, dy, scratch, sums) if self.shares > 1 else self._by_chunks(x, dy, scratch, sums)
        back = (sums, dw, s.c, s.k, self.s_part, self.shares, self.share_bytes)
        calls.append(kernel_call(small_back, back, job.label, threads=job.threads))
        return [*calls, *bias_calls(job, dy, db, scratch + self.own_bytes)]

    def _by_shares(self, x: int, dy: int, work: int, sums: int) -> list[Call]:
        s, job = self.job.shape, self.job
        arguments = (
            x, dy, work, sums, s.h, s.w, s.c, s.ho, s.wo, s.k, s.pad, self.rows, self.shares, self.chunk, self.v_part,
            self.z_part, self.s_part, self.share_bytes, self.room, self.work_bytes,
        )  # fmt: skip
        return [kernel_call(small_shares, arguments, job.label, threads=job.threads)]

    def _by_chunks(self, x: int, dy: int, work: int, sums: int) -> list[Call]:
        s, job, v = self.job.shape, self.job, work + EDGE
        z = v + PARTS * self.v_part
        calls: list[Call] = []
        for first in range(0, self.rows, self.chunk):
            last = min(first + self.chunk, self.rows)
            patches = (
                x, dy, v, z, work, s.h, s.w, s.c, s.ho, s.wo, s.k, s.pad, first, last, self.v_part, self.z_part,
                self.room,
            )  # fmt: skip
            calls.append(kernel_call(small_patches, patches, job.label, threads=job.threads))
            products = (
                v, z, sums, PARTS, s.c, s.k, (last - first) * self.steps, self.room, self.v_part, self.z_part,
                self.s_part, 4 * s.c, int(first > 0),
            )  # fmt: skip
            calls.append(kernel_call(pair_products, products, job.label, threads=job.threads))
        return calls
