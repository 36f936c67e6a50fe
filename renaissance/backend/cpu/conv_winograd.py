"""3x3 convolutions of stride 1 as ``winograd``: forward, data gradient, weight gradient; fp32 inside for both types."""

from __future__ import annotations

from collections.abc import Hashable

from renaissance.backend.cpu.conv_algorithms import Job, bias_bytes, bias_calls
from renaissance.backend.cpu.onednn import onednn
from renaissance.backend.cpu.onednn_primitives import ConvShape
from renaissance.backend.cpu.queue import kernel_call
from renaissance.backend.cpu.winograd import ADD_RESIDUAL, APPLY_RELU, POSITIONS, TILE_BYTES
from renaissance.backend.cpu.winograd_kernels import (
    EDGE,
    GROUP,
    LANES,
    LINE,
    winograd_convolve,
    winograd_pack,
    winograd_pack_turned,
    winograd_weight_gradient,
)
from renaissance.backend.registry import Call
from renaissance.core.region import align

CHANNELS = 32
"""Channels must be multiples of this."""
WIDE = 64 * 64
"""Elements of C x K from which groups of 64 channels still make several tasks."""


def supports_winograd(job: Job) -> bool:
    """3x3, stride 1, one group, channels in whole vectors, and a CPU with the registers for it."""
    s = job.shape
    return (
        (s.r, s.s, s.stride, s.groups) == (3, 3, 1, 1)
        and s.pad <= 2
        and not s.c % CHANNELS
        and not s.k % CHANNELS
        and onednn().isa.startswith("avx512")
    )


def position_bytes(lines: int) -> int:
    """Bytes from one of the 36 positions to the next. Odd in lines: at a power of two, all 36 lines of a tile would
    fall into the same set of the first-level cache."""
    return (lines | 1) * LINE


class Convolution:
    """What forward and data gradient share: a convolution from ``c`` to ``k`` channels."""

    def __init__(self, job: Job, shape: ConvShape) -> None:
        self.job, self.shape = job, shape
        self.tiles = block_tiles(shape)
        self.u_position = position_bytes(shape.k // LANES * shape.c)
        self.thread_bytes = align(EDGE + self.tiles * (shape.c + shape.k) // LANES * TILE_BYTES)
        self.packed_bytes = POSITIONS * self.u_position
        self.scratch_bytes = job.threads * max(self.thread_bytes, align(9 * GROUP))

    def call(self, x: int, packed: int, b: int, residual: int, y: int, scratch: int) -> Call:
        s, job = self.shape, self.job
        flags = ADD_RESIDUAL * job.residual | APPLY_RELU * job.relu
        arguments = (
            x, packed, b, residual, y, scratch, s.n, s.h, s.w, s.c, s.ho, s.wo, s.k, s.pad, flags, int(job.half),
            self.tiles, self.thread_bytes, self.u_position,
        )  # fmt: skip
        return kernel_call(winograd_convolve, arguments, job.label, threads=job.threads)


class WinogradForward(Convolution):
    """y = relu(conv(x, w) + b + residual)."""

    name = "winograd 4x4"
    supports = staticmethod(supports_winograd)

    def __init__(self, job: Job) -> None:
        super().__init__(job, job.shape)
        self.layout: Hashable = ("winograd 4x4", job.dtype)

    def pack(self, w: int, packed: int, scratch: int) -> list[Call]:
        s, job = self.shape, self.job
        arguments = (w, packed, scratch, s.k, s.c, self.u_position, align(9 * GROUP), int(job.half))
        return [kernel_call(winograd_pack, arguments, f"{job.label} pack", threads=job.threads)]

    def run(self, x: int, packed: int, b: int, residual: int, y: int, scratch: int) -> list[Call]:
        return [self.call(x, packed, b, residual, y, scratch)]


class WinogradBackwardData(Convolution):
    """dx is the convolution of dy with the turned weights, padded by what is missing to 2."""

    name = "winograd 4x4"
    supports = staticmethod(supports_winograd)

    def __init__(self, job: Job) -> None:
        s = job.shape
        super().__init__(job, ConvShape(s.n, s.ho, s.wo, s.k, s.c, 3, 3, 1, 2 - s.pad, 1, s.h, s.w))

    def pack(self, w: int, packed: int, scratch: int) -> list[Call]:
        s, job = self.job.shape, self.job
        arguments = (w, packed, s.k, s.c, self.u_position, int(job.half))
        return [kernel_call(winograd_pack_turned, arguments, f"{job.label} pack", threads=job.threads)]

    def run(self, dy: int, packed: int, dx: int, scratch: int) -> list[Call]:
        return [self.call(dy, packed, 0, 0, dx, scratch)]


class WinogradBackwardWeight:
    """dw by groups of channels, each over all tiles."""

    name = "winograd 4x4"

    supports = staticmethod(supports_winograd)

    def __init__(self, job: Job) -> None:
        self.job, s = job, job.shape
        self.tiles = 32
        wide = s.c * s.k > WIDE
        self.k_group = 64 if s.k % 64 == 0 and (wide or s.c >= 64) else CHANNELS
        self.c_group = 64 if s.c % 64 == 0 and wide else CHANNELS
        blocks = self.tiles * (self.c_group + self.k_group) // LANES + self.k_group * self.c_group // LANES
        self.thread_bytes = align(EDGE + blocks * TILE_BYTES)
        self.scratch_bytes = job.threads * self.thread_bytes + bias_bytes(job)

    def run(self, x: int, dy: int, dw: int, db: int, scratch: int) -> list[Call]:
        s, job = self.job.shape, self.job
        arguments = (
            x, dy, dw, scratch, s.n, s.h, s.w, s.c, s.ho, s.wo, s.k, s.pad, int(job.half), self.tiles, self.k_group,
            self.c_group, self.thread_bytes,
        )  # fmt: skip
        main = kernel_call(winograd_weight_gradient, arguments, job.label, threads=job.threads)
        return [main, *bias_calls(job, dy, db, scratch + job.threads * self.thread_bytes)]


def block_tiles(shape: ConvShape) -> int:
    """Tiles per block: V and M of a block should stay in the second-level cache."""
    return 32 if shape.c <= 256 else 64
