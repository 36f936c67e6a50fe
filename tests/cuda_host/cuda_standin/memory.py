"""Device and page-locked host memory of the stand-in: real memory between guards, NaN until it is written."""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from cuda_standin.errors import CudaError

Range = tuple[int, int]
"""First byte and the byte after the last."""
ALIGNMENT = 256
"""What cudaMalloc promises at least."""
GUARD = 1 << 20
"""Bytes without access on both sides of a block: an index that is far off jumps over a page."""
UNWRITTEN = 0xFF
"""Every byte of new memory: NaN in all three floating types, -1 in integers, so that what nobody wrote shows."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def overlap(first: Sequence[Range], second: Sequence[Range]) -> Range | None:
    """The lowest bytes that two ascending sequences of ranges share."""
    i = j = 0
    while i < len(first) and j < len(second):
        low, high = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if low < high:
            return low, high
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return None


def merged(ranges: Iterable[Range]) -> list[Range]:
    """The same bytes as ascending ranges that neither overlap nor touch."""
    result: list[Range] = []
    for low, high in sorted(r for r in ranges if r[0] < r[1]):
        if result and low <= result[-1][1]:
            result[-1] = (result[-1][0], max(high, result[-1][1]))
        else:
            result.append((low, high))
    return result


class GuardedBlock:
    """``size`` bytes whose end, rounded up to ``ALIGNMENT``, is the end of accessible memory."""

    def __init__(self, size: int) -> None:
        page = mmap.PAGESIZE
        self.size, self._body = size, -(-max(size, 1) // page) * page
        self._map = mmap.mmap(-1, self._body + 2 * GUARD)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._start = base + GUARD
        ctypes.memset(self._start, UNWRITTEN, self._body)
        for guard in (base, base + GUARD + self._body):
            if _libc.mprotect(guard, GUARD, 0):
                raise OSError(ctypes.get_errno(), "mprotect failed")
        self.address = self._start + self._body - -(-max(size, 1) // ALIGNMENT) * ALIGNMENT

    def damage(self) -> str | None:
        """What was written beside the block, short of the guards; None if nothing was."""
        before, after = self.address - self._start, self._start + self._body - self.address - self.size
        for start, length, where in ((self._start, before, "before"), (self.address + self.size, after, "behind")):
            if ctypes.string_at(start, length).strip(bytes([UNWRITTEN])):
                return f"something was written {where} an allocation of {self.size} bytes"
        return None

    def close(self) -> None:
        """Unmap it."""
        self._map.close()


class Ranges:
    """Disjoint ranges, each found by any address inside."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: dict[int, int] = {}

    def add(self, start: int, size: int) -> None:
        self._starts.insert(bisect_right(self._starts, start), start)
        self._ends[start] = start + size

    def remove(self, start: int) -> None:
        self._starts.remove(start)
        del self._ends[start]

    def find(self, address: int) -> Range | None:
        """The range with ``address`` inside (or at its start, if it is empty)."""
        i = bisect_right(self._starts, address) - 1
        if i < 0:
            return None
        start = self._starts[i]
        return (start, self._ends[start]) if address < max(self._ends[start], start + 1) else None

    def starts_at(self, start: int) -> bool:
        return start in self._ends

    def meets(self, start: int, size: int) -> bool:
        """Whether any byte of a new range is taken."""
        return any(low < start + size and start < high for low, high in self._ends.items())


class Memory:
    """All memory that the stand-in may touch, and the names of its pieces."""

    def __init__(self) -> None:
        self.device, self.host = Ranges(), Ranges()
        self.blocks: dict[int, GuardedBlock] = {}
        self.generation = 0
        """Changes whenever memory goes away."""
        self._names: dict[tuple[int, int, str], None] = {}

    def allocate(self, size: int, *, host: bool = False) -> int:
        block = GuardedBlock(size)
        self.blocks[block.address] = block
        (self.host if host else self.device).add(block.address, size)
        return block.address

    def release(self, address: int, *, host: bool = False) -> None:
        table = self.host if host else self.device
        if address not in self.blocks or not table.starts_at(address):
            raise CudaError("InvalidValue", f"{address:#x} was not allocated, or has been freed")
        table.remove(address)
        block = self.blocks.pop(address)
        damage = block.damage()
        self._names = {k: None for k in self._names if not address <= k[0] < address + max(block.size, 1)}
        block.close()
        self.generation += 1
        if damage:
            raise CudaError("IllegalAddress", damage)

    def intact(self) -> None:
        """Raise if anything was written beside an allocation."""
        for block in self.blocks.values():
            damage = block.damage()
            if damage:
                raise CudaError("IllegalAddress", damage)

    def range(self, address: int, size: int, what: str, *, host: bool = False) -> Range:
        """The bytes from ``address`` on, which must lie inside one allocation."""
        if size == 0:
            return address, address
        found = (self.host if host else self.device).find(address)
        if found is None:
            if host:
                raise CudaError(
                    "InvalidValue", f"{what}: asynchronous copies need page-locked (registered) host memory"
                )
            raise CudaError("IllegalAddress", f"{what}: {address:#x} is not device memory")
        if address + size > found[1]:
            past = address + size - found[1]
            raise CudaError(
                "InvalidValue", f"{what}: {size} bytes at {self.name(address)} run {past} past the allocation"
            )
        return address, address + size

    def alive(self, low: int, high: int) -> bool:
        """Whether the bytes are still allocated or registered."""
        return any((found := table.find(low)) is not None and high <= found[1] for table in (self.device, self.host))

    def call(self, address: int, size: int, name: str) -> None:
        """Name a piece of memory."""
        self._names[address, address + size, name] = None

    def name(self, low: int, high: int | None = None) -> str:
        """What lies at an address: the smallest pieces named there (memory is used again, so there may be several)."""
        high = low + 1 if high is None else high
        found = sorted((end - start, name) for start, end, name in self._names if start < high and low < end)
        smallest = [name for size, name in found if size < 64 * max(found[0][0], 1)][:3] if found else []
        return " or ".join(smallest) or hex(low)
