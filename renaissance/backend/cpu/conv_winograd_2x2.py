"""Winograd's F(2x2, 3x3) (``winograd_2x2``) as algorithms that ``conv_choice`` can take."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from renaissance.backend.cpu import winograd_2x2 as winograd
from renaissance.backend.cpu.conv_algorithms import Job, bias_bytes, bias_calls, finish_call
from renaissance.backend.cpu.conv_kernels import FINISH_ADD, FINISH_RELU
from renaissance.backend.registry import Call
from renaissance.core.region import align

_NO_LIMITS = np.array([-np.inf, np.inf], np.float32)
_RELU = np.array([0, np.inf], np.float32)


def _convolution(job: Job) -> winograd.Convolution:
    s = job.shape
    return winograd.Convolution(s.n, s.h, s.w, s.c, s.k, s.pad, job.half)


def _supports(job: Job) -> bool:
    s = job.shape
    return s.r == s.s and winograd.fits(s.c, s.k, s.r, s.stride, s.groups, s.pad, job.half)


class SmallWinogradForward:
    """y = relu(conv(x, w) + b + residual); the residual in a pass of its own."""

    name = "winograd 2x2"
    supports = staticmethod(_supports)

    def __init__(self, job: Job) -> None:
        self._job, self._conv = job, _convolution(job)
        self.packed_bytes = winograd.packed_bytes(self._conv)
        zeros = 0 if job.bias else 4 * job.shape.k
        self._zeros = np.zeros(zeros // 4, np.float32)
        run, pack = winograd.forward_bytes(self._conv, job.threads), winograd.pack_bytes(self._conv, job.threads)
        self.scratch_bytes = max(run, pack)
        self.layout: Hashable = ("winograd 2x2", job.dtype)

    def pack(self, w: int, packed: int, scratch: int) -> list[Call]:
        job = self._job
        return [winograd.pack(self._conv, w, packed, scratch, job.threads, False, f"{job.label} pack")]

    def run(self, x: int, packed: int, b: int, residual: int, y: int, scratch: int) -> list[Call]:
        job = self._job
        limits = _RELU if job.relu and not job.residual else _NO_LIMITS
        bias = b if job.bias else self._zeros.ctypes.data
        calls: list[Call] = [
            winograd.forward(
                self._conv, x, packed, y, scratch, job.threads, job.label, bias, limits.ctypes.data, keep=(self._zeros,)
            )
        ]
        if job.residual:
            calls.append(finish_call(job, y, residual, FINISH_ADD | FINISH_RELU * job.relu))
        return calls


class SmallWinogradBackwardData:
    """dx: the convolution of dy with the filters turned round."""

    name = "winograd 2x2"
    supports = staticmethod(_supports)

    def __init__(self, job: Job) -> None:
        self._job, self._conv = job, _convolution(job).turned()
        self.packed_bytes = winograd.packed_bytes(self._conv)
        self._zeros = np.zeros(job.shape.c, np.float32)
        run, pack = winograd.forward_bytes(self._conv, job.threads), winograd.pack_bytes(self._conv, job.threads)
        self.scratch_bytes = max(run, pack)

    def pack(self, w: int, packed: int, scratch: int) -> list[Call]:
        job = self._job
        return [winograd.pack(self._conv, w, packed, scratch, job.threads, True, f"{job.label} pack")]

    def run(self, dy: int, packed: int, dx: int, scratch: int) -> list[Call]:
        job, zeros = self._job, self._zeros
        return [
            winograd.forward(
                self._conv, dy, packed, dx, scratch, job.threads, job.label,
                zeros.ctypes.data, _NO_LIMITS.ctypes.data, keep=(zeros,),
            )
        ]  # fmt: skip


class SmallWinogradBackwardWeight:
    """dw by the transposed algorithm."""

    name = "winograd 2x2"

    supports = staticmethod(_supports)

    def __init__(self, job: Job) -> None:
        self._job, self._conv = job, _convolution(job)
        self._bytes = align(winograd.weights_bytes(self._conv, job.threads))
        self.scratch_bytes = self._bytes + bias_bytes(job)

    def run(self, x: int, dy: int, dw: int, db: int, scratch: int) -> list[Call]:
        job = self._job
        calls = winograd.backward_weights(self._conv, x, dy, dw, scratch, job.threads, job.label)
        return [*calls, *bias_calls(job, dy, db, scratch + self._bytes)]
