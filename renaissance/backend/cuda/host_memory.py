"""Host memory that the copy engine reads: the rings shared with the dataserver, as they are, or staged.

    memory = HostMemory(runtime)
    memory.cover(*station.memory)                       # a whole mapping, once, before anything is captured
    source = memory.slot(images.ctypes.data, nbytes)    # what a captured copy reads
    ...
    memory.before_copy(images.ctypes.data)              # before each launch of that copy; nothing when registered
    ...
    memory.close()                                      # before the mapping goes

The copy engine reads page-locked memory only. A ring is locked where it lies (``hostRegister``), so that a batch goes
from the dataserver's worker to the GPU without another copy. Where that fails (containers that forbid it, memory of
another kind) its batches go through a page-locked block of the same size, one ``memcpy`` each; where there is no such
block either, copies are issued one by one outside of captured programs (``eager``). Each ring takes the first way that
works, which is logged, and said by ``text``.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from mmap import PAGESIZE

from renaissance.backend.cuda.runtime import CudaRuntime
from renaissance.core.errors import ValueRejected
from renaissance.core.log import get_logger

_log = get_logger("backend.cuda.host_memory")


class Way(Enum):
    """How a block gets to the copy engine, best first."""

    REGISTERED = "read in place"
    LOCKED = "page-locked already"
    STAGED = "through a page-locked copy"
    PAGEABLE = "from pageable memory, step by step"


@dataclass(frozen=True, slots=True)
class _Block:
    """``nbytes`` from ``address`` on, which the copy engine finds at ``source``; ``why`` no better way was taken."""

    address: int
    nbytes: int
    way: Way
    source: int
    why: str = ""

    def holds(self, address: int, nbytes: int) -> bool:
        return self.address <= address and address + nbytes <= self.address + self.nbytes

    def touches(self, address: int, nbytes: int) -> bool:
        return self.address < address + nbytes and address < self.address + self.nbytes


class HostMemory:
    """The host memory that one device reads. Not for use while a program is captured, but for ``before_copy``."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._blocks: list[_Block] = []
        self._staged: dict[int, tuple[int, int]] = {}  # address of a slot -> where it is copied to, bytes

    def cover(self, address: int, nbytes: int) -> None:
        """Make a mapping readable; slots that lie in it need no more. A second time is harmless.

        Raises ValueRejected unless it is whole pages that no other mapping shares: CUDA locks pages.
        """
        if address % PAGESIZE or nbytes % PAGESIZE or nbytes < 1:
            raise ValueRejected(
                f"host memory at {address:#x}, {nbytes} bytes: expected whole pages of {PAGESIZE} bytes, a mapping's"
            )
        if any((b.address, b.nbytes) == (address, nbytes) for b in self._blocks):
            return
        for block in self._blocks:
            if block.touches(address, nbytes):
                raise ValueRejected(
                    f"host memory at {address:#x}, {nbytes} bytes: overlaps {block.nbytes} bytes at "
                    f"{block.address:#x}, which are covered already; cover a mapping once"
                )
        try:
            self._runtime.hostRegister(address, nbytes, 0)
        except RuntimeError as error:
            self._stage(address, nbytes, f"cannot be registered: {_words(error)}")
        else:
            self._add(_Block(address, nbytes, Way.REGISTERED, address))

    def adopt(self, address: int, nbytes: int) -> None:
        """Memory that is page-locked already (``PinnedBlock``): it is read in place, and its owner frees it."""
        self._blocks.append(_Block(address, nbytes, Way.LOCKED, address))

    def slot(self, address: int, nbytes: int) -> int:
        """Address that a copy of this slot reads; the same for the life of this object. Memory outside of every covered
        mapping is staged: its pages may be shared with others."""
        block = next((b for b in self._blocks if b.holds(address, nbytes)), None)
        if block is None:
            block = self._stage(address, nbytes, "lies outside of a covered mapping")
        source = block.source + address - block.address
        if block.way is Way.STAGED:
            known = self._staged.get(address, (source, 0))
            self._staged[address] = (source, max(nbytes, known[1]))
        return source

    def before_copy(self, address: int) -> None:
        """Bring the bytes of the slot at ``address`` to where the copy engine reads them. The copy of the slot's former
        contents must be done, as it is when the slot has been given back and filled again."""
        staged = self._staged.get(address)
        if staged is not None:
            ctypes.memmove(staged[0], address, staged[1])

    @property
    def eager(self) -> bool:
        """True when some memory is pageable: a copy of it cannot be captured and is issued before each launch."""
        return any(b.way is Way.PAGEABLE for b in self._blocks)

    def text(self) -> str:
        """What was chosen, e.g. "12.3 MB read in place"; "" without memory that there was a choice for."""
        sizes: dict[tuple[Way, str], int] = {}
        for block in (b for b in self._blocks if b.way is not Way.LOCKED):
            sizes[block.way, block.why] = sizes.get((block.way, block.why), 0) + block.nbytes
        return "; ".join(
            f"{size / 1e6:.1f} MB {way.value}" + (f" (it {why})" if why else "") for (way, why), size in sizes.items()
        )

    def close(self) -> None:
        """Wait for the device, then let go of the memory, which may be unmapped afterwards. May be called again."""
        blocks, self._blocks = self._blocks, []
        self._staged.clear()
        if not blocks:
            return
        # After a failed kernel every call fails, and that error has been raised already.
        with suppress(RuntimeError):
            self._runtime.deviceSynchronize()
        for block in blocks:
            with suppress(RuntimeError):
                if block.way is Way.REGISTERED:
                    self._runtime.hostUnregister(block.address)
                elif block.way is Way.STAGED:
                    self._runtime.freeHost(block.source)

    def _stage(self, address: int, nbytes: int, why: str) -> _Block:
        try:
            source = self._runtime.hostAlloc(nbytes, 0)
        except RuntimeError as error:
            why = f"{why}; page-locked memory: {_words(error)}"
            return self._add(_Block(address, nbytes, Way.PAGEABLE, address, why))
        return self._add(_Block(address, nbytes, Way.STAGED, source, why))

    def _add(self, block: _Block) -> _Block:
        self._blocks.append(block)
        say = _log.debug if block.way is Way.REGISTERED else _log.info
        say("host memory: %.1f MB %s%s", block.nbytes / 1e6, block.way.value, f" (it {block.why})" if block.why else "")
        return block


def _words(error: RuntimeError) -> str:
    return " ".join(str(error).split()) or type(error).__name__
