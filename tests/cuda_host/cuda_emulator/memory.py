"""Memory whose neighbours cannot be touched, and whose unwritten bytes are NaN."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from cuda_emulator.build import KernelError

PAGE = mmap.PAGESIZE
GUARD = 1 << 20
"""Bytes without access on both sides; they take address space only."""
ALIGNMENT = 256
NAN_BYTE = 0xFF
"""0xFFFF... is a NaN in every floating type, and -1 as an integer."""
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Allocation:
    """``nbytes`` at ``ptr``, a multiple of ALIGNMENT, between bytes that cannot be touched."""

    name: str
    ptr: int
    nbytes: int
    bytes: npt.NDArray[np.uint8] = field(repr=False)
    before: npt.NDArray[np.uint8] = field(repr=False)
    """The bytes from the guard to it."""
    behind: npt.NDArray[np.uint8] = field(repr=False)
    """The bytes from it to the other guard."""


class GuardedMemory:
    """Allocations with GUARD bytes without access on both sides, as close to their ends as the alignment allows.

    An access of a guard ends a launch as a memory fault; ``check`` finds writes between an allocation and its guards.
    The memory lives as long as this object and the arrays that came from it.
    """

    def __init__(self) -> None:
        self._allocations: list[Allocation] = []

    def allocate(self, nbytes: int, name: str = "") -> Allocation:
        """Bytes that are all NaN_BYTE; ``name`` is for messages. Raises MemoryError."""
        body = max(1, -(-nbytes // PAGE)) * PAGE
        pages = mmap.mmap(-1, body + 2 * GUARD, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = np.frombuffer(pages, np.uint8)
        base = int(whole.ctypes.data)
        for guard in (base, base + GUARD + body):
            if _libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(GUARD), 0):
                raise MemoryError(f"mprotect: {ctypes.get_errno()}")
        inside = whole[GUARD : GUARD + body]
        inside[:] = NAN_BYTE
        start = (body - nbytes) // ALIGNMENT * ALIGNMENT
        found = Allocation(
            name, base + GUARD + start, nbytes, inside[start : start + nbytes], inside[:start], inside[start + nbytes :]
        )
        self._allocations.append(found)
        return found

    def array(self, values: npt.NDArray[Any], name: str = "") -> npt.NDArray[Any]:
        """A copy of an array in memory of its own."""
        copy = self.allocate(values.nbytes, name).bytes.view(values.dtype).reshape(values.shape)
        copy[...] = values
        return copy

    def check(self) -> None:
        """Raises KernelError when a byte between an allocation and its guards has been written."""
        for a in self._allocations:
            what = f"the {a.nbytes} bytes of {a.name or hex(a.ptr)}"
            if not (a.behind == NAN_BYTE).all():
                raise KernelError(f"written {int(np.flatnonzero(a.behind != NAN_BYTE)[0])} bytes past {what}")
            if not (a.before == NAN_BYTE).all():
                raise KernelError(f"written before {what}")
