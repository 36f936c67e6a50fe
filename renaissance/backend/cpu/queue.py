"""The CPU form of a captured graph: arrays of native calls, replayed by one compiled loop.

One call of ``NativeQueue.launch`` runs the whole program with the GIL released and no Python in between: oneDNN
primitives, kernels on a team of OpenMP threads, and serial kernels. oneDNN and our kernels share libiomp5's one team,
so there is never more than one pool of threads. Denormals are flushed to zero while the loop runs (Adam's first moment
decays into them), and the caller's floating-point control is restored afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numba import njit

from renaissance.backend.cpu.intrinsics import ARGS, FLUSH_DENORMALS, STATUS, call4, get_mxcsr, i64, set_mxcsr
from renaissance.backend.cpu.threads import runtime
from renaissance.backend.registry import NativeCall, flat_view
from renaissance.core.errors import DeviceError
from renaissance.graph.captured import CaptureMode

COLUMNS = 6
"""Words per entry: function, four arguments, address of the status word (0: the return value is the status)."""
NO_FAILURE = -1


@njit(cache=True, nogil=True)
def _replay(program, result):  # type: ignore[no-untyped-def]  # int64[n, COLUMNS], int64[2] -> None
    control = get_mxcsr()
    set_mxcsr(control | FLUSH_DENORMALS)
    result[0] = NO_FAILURE
    for i in range(program.shape[0]):
        returned = call4(program[i, 0], program[i, 1], program[i, 2], program[i, 3], program[i, 4])
        status = returned & 0xFFFFFFFF if program[i, 5] == 0 else i64(program[i, 5], 1)[0]
        if status != 0:
            result[0] = i
            result[1] = status
            break
    set_mxcsr(control)


class NativeQueue:
    """A frozen program of native calls (a ``CapturedGraph``). Safe to launch from one thread at a time."""

    mode = CaptureMode.QUEUE

    def __init__(self, calls: Sequence[NativeCall], explain: Callable[[int], str] = str) -> None:
        """``explain`` turns a oneDNN status number into words for the error message."""
        self._calls = tuple(calls)  # keeps contexts, argument arrays and library handles alive
        self._explain = explain
        self._program = np.zeros((len(calls), COLUMNS), np.int64)
        for row, call in zip(self._program, self._calls, strict=True):
            row[:] = (call.fn, *call.args, call.status)
        self._result = np.zeros(2, np.int64)

    def __len__(self) -> int:
        return len(self._calls)

    def launch(self) -> None:
        """Run every call in order. Raises DeviceError naming the node whose call failed; later calls are not run."""
        _replay(self._program, self._result)
        if self._result[0] != NO_FAILURE:
            self._fail()

    def _fail(self) -> None:
        index, status = int(self._result[0]), int(self._result[1])
        call = self._calls[index]
        if call.status:
            flat_view(call.status, 1, np.dtype(np.int64))[0] = 0  # the next launch starts clean
            reason = f"kernel status {status}"
        else:
            reason = self._explain(status)
        raise DeviceError(f"call {index + 1} of {len(self._calls)}, {call.label}: {reason}; expected status 0")

    def dump(self) -> str:
        """One line per call, stable text without addresses."""
        return "\n".join(f"{i:4d}  {call.label}" for i, call in enumerate(self._calls))


def kernel_call(
    kernel: Any, arguments: Sequence[int], label: str, *, threads: int = 1, keep: tuple[object, ...] = ()
) -> NativeCall:
    """A call of a Numba kernel (see ``intrinsics``) with the given argument words.

    ``kernel`` is a ``cfunc`` of signature ``KERNEL``; its words ``ARGS``... are ``arguments``. With ``threads`` 1 it
    runs in the launching thread, else once on every thread of a team of that size. ``label`` names the node in errors.
    ``keep`` holds objects that must live as long as the call.
    """
    context = np.zeros(ARGS + len(arguments), np.int64)
    context[ARGS:] = arguments
    address = context.ctypes.data
    status = address + STATUS * context.itemsize
    held = (kernel, context, *keep)
    if threads == 1:
        return NativeCall(kernel.address, (address, 0, 0, 0), label, status, held)
    omp = runtime()
    context[0], context[1], context[3] = omp.thread_num, omp.num_threads, threads
    return NativeCall(omp.parallel, (kernel.address, address, threads, 0), label, status, held)


def team_call(threads: int) -> NativeCall:
    """Sets the team size of the launching thread: the first call of a program, since the size belongs to a thread."""
    always_zero = np.zeros(1, np.int64)
    return NativeCall(
        runtime().set_num_threads, (threads, 0, 0, 0), f"team of {threads}", always_zero.ctypes.data, (always_zero,)
    )
