"""The weight gradient in bfloat16 as one product over unfolded patches: any kernel, stride and padding, one group.

dw[K, tap, C] = sum over pixels of dy[K] * x[tap, C]. Patches are unfolded chunk by chunk, so that a chunk is summed
while it is in the cache. Chunks and slices are cut by size: the bits do not depend on the team.
"""

from __future__ import annotations

from renaissance.backend.cpu.conv_algorithms import Job, bias_bytes, bias_calls
from renaissance.backend.cpu.conv_winograd_2x2 import part_bytes
from renaissance.backend.cpu.pair_kernels import pair_products, unfold_pairs
from renaissance.backend.cpu.queue import kernel_call
from renaissance.backend.cpu.vectors import LANES, PAIR_COLUMNS, multiplies_bf16
from renaissance.backend.registry import Call
from renaissance.core.region import align

CHUNK_BYTES = 2 << 20
"""Both operands of a chunk: they stay in the third-level cache, and the team meets seldom."""
LEAST_STEPS = 128
"""Pairs of pixels of a chunk, at least: each chunk reads and writes the sums once."""


class UnfoldBackwardWeight:
    """dw (and db) from x and dy."""

    name = "unfold"

    @staticmethod
    def supports(job: Job) -> bool:
        s = job.shape
        return job.half and multiplies_bf16() and s.groups == 1 and not s.c % PAIR_COLUMNS and not s.k % LANES

    def __init__(self, job: Job) -> None:
        self.job, s = job, job.shape
        self.taps = s.r * s.s
        self.steps = -(-s.n * s.ho * s.wo // 2)
        fitting = CHUNK_BYTES // (4 * (self.taps * s.c + s.k))
        self.chunk = min(max(fitting, LEAST_STEPS), self.steps)
        self.room = self.chunk | 1  # odd: blocks of channels do not share a cache set
        self.v_part = part_bytes(self.room * s.c * 4)
        self.zeros = align(2 * max(s.c, s.k))
        self.v_bytes, self.z_bytes = align(self.taps * self.v_part), align(self.room * s.k * 4)
        self.own_bytes = self.zeros + self.v_bytes + self.z_bytes
        self.scratch_bytes = self.own_bytes + bias_bytes(job)

    def run(self, x: int, dy: int, dw: int, db: int, scratch: int) -> list[Call]:
        s, job = self.job.shape, self.job
        v = scratch + self.zeros
        z = v + self.v_bytes
        calls: list[Call] = []
        for first in range(0, self.steps, self.chunk):
            last = min(first + self.chunk, self.steps)
            unfold = (
                x, dy, v, z, scratch, s.n, s.h, s.w, s.c, s.ho, s.wo, s.k, s.r, s.s, s.stride, s.pad, first, last,
                self.room, self.v_part,
            )  # fmt: skip
            calls.append(kernel_call(unfold_pairs, unfold, job.label, threads=job.threads))
            products = (
                v, z, dw, self.taps, s.c, s.k, last - first, self.room, self.v_part, 0, 4 * s.c, 4 * self.taps * s.c,
                int(first > 0),
            )  # fmt: skip
            calls.append(kernel_call(pair_products, products, job.label, threads=job.threads))
        return [*calls, *bias_calls(job, dy, db, scratch + self.own_bytes)]
