"""MemoryArena: the one allocation of a rank, and the binding of the input regions to memory the arena does not own.

The arena is as large as the largest plan of the six variants, starts at a multiple of 256 (of a huge page, when it is
large) and is zeroed. ``allocations`` counts what was taken from the system; after compile it stays what it is (law 3).
"""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from renaissance.core.errors import MemoryPlanError
from renaissance.core.region import ALIGNMENT, align

HUGE_PAGE = 2 << 20
"""Bytes; blocks of at least this size start on such a boundary, and the kernel is asked to back them by huge pages."""


class MemoryArena:
    """A zeroed block of ``nbytes`` and any number of working blocks, all taken before the first step.

    Raises MemoryPlanError for a block of zero bytes, and for a block asked for after ``seal``.
    """

    def __init__(self, nbytes: int) -> None:
        self.allocations = 0
        self._blocks: list[npt.NDArray[np.uint8]] = []
        self._sealed = False
        self.bytes = self.block(nbytes, "arena")
        self.base = int(self.bytes.ctypes.data)

    @property
    def nbytes(self) -> int:
        """Bytes of the main block."""
        return self.bytes.size

    @property
    def total_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(b.size for b in self._blocks)

    def block(self, nbytes: int, what: str) -> npt.NDArray[np.uint8]:
        """A zeroed block that lives as long as the arena; its address is a multiple of 256."""
        if nbytes < 1:
            raise MemoryPlanError(f"{what}: a block of {nbytes} bytes was asked for; expected at least 1")
        if self._sealed:
            raise MemoryPlanError(f"{what}: {nbytes} bytes were asked for after compile; nothing is allocated then")
        boundary = HUGE_PAGE if nbytes >= HUGE_PAGE else ALIGNMENT
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # huge pages need private memory
        memory = mmap.mmap(-1, align(nbytes, mmap.PAGESIZE) + boundary, flags=flags)
        if nbytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages refuses the hint
                memory.madvise(mmap.MADV_HUGEPAGE)  # fewer TLB misses: weights and moments are streamed every step
        raw = np.frombuffer(memory, np.uint8)
        start = -int(raw.ctypes.data) % boundary
        self.allocations += 1
        self._blocks.append(raw[start : start + nbytes])
        self._blocks[-1][:] = 0  # touch every page now, so that no step pays for it
        return self._blocks[-1]

    def adopt(self, memory: npt.NDArray[np.uint8]) -> None:
        """Make reserved memory (see ``reserve``) one of the arena's blocks: its pages are touched and counted."""
        if self._sealed:
            raise MemoryPlanError(
                f"{memory.size} bytes of scratch were asked for after compile; nothing is allocated then"
            )
        if memory.size:
            self.allocations += 1
            self._blocks.append(memory)
            memory[:] = 0

    def seal(self) -> None:
        """Refuse further blocks."""
        self._sealed = True

    def view(self, offset: int, nbytes: int) -> npt.NDArray[Any]:
        """Writable bytes ``offset`` to ``offset + nbytes`` of the main block."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise MemoryPlanError(f"arena of {self.nbytes} bytes: no bytes {offset} to {offset + nbytes}")
        return self.bytes[offset : offset + nbytes]


def reserve() -> tuple[npt.NDArray[np.uint8], int]:
    """(bytes, address) of address space as large as this machine's memory, of which no page exists until it is touched.

    Where the system promises memory only when it has it (strict overcommit), the reservation is as large as it allows.
    Raises MemoryPlanError when not even a page can be had.
    """
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    while size >= mmap.PAGESIZE:
        try:
            memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError:
            size //= 2
            continue
        raw = np.frombuffer(memory, np.uint8)
        start = -int(raw.ctypes.data) % HUGE_PAGE
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return raw[start : start + size], int(raw.ctypes.data) + start
    raise MemoryPlanError("no address space can be reserved for scratch memory; expected at least one page")
