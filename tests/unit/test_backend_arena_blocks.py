"""MemoryArena: aligned zeroed blocks before compile ends, none afterwards."""

from __future__ import annotations

import mmap
import sys

import pytest

from renaissance.backend import MemoryArena
from renaissance.backend.arena import HUGE_PAGE
from renaissance.core.errors import MemoryPlanError
from renaissance.core.region import ALIGNMENT


@pytest.mark.parametrize(("nbytes", "boundary"), [(1, ALIGNMENT), (5000, ALIGNMENT), (HUGE_PAGE + 1, HUGE_PAGE)])
def test_blocks_are_zeroed_and_aligned(nbytes: int, boundary: int) -> None:
    arena = MemoryArena(nbytes)
    block = arena.block(nbytes, "test")
    for memory in (arena.bytes, block):
        assert memory.size == nbytes
        assert memory.ctypes.data % boundary == 0
        assert not memory.any()
    block[:] = 7
    assert not arena.bytes.any()


def test_allocations_are_counted_and_end_with_seal() -> None:
    arena = MemoryArena(256)
    assert arena.allocations == 1
    arena.block(64, "test")
    assert (arena.allocations, arena.total_bytes) == (2, 320)
    arena.seal()
    with pytest.raises(MemoryPlanError, match="scratch: 64 bytes were asked for after compile"):
        arena.block(64, "scratch")
    assert arena.allocations == 2


def test_views_stay_inside() -> None:
    arena = MemoryArena(512)
    arena.view(256, 256)[:] = 1
    assert arena.bytes.sum() == 256
    for offset, nbytes in ((256, 257), (-1, 4), (0, -1)):
        with pytest.raises(MemoryPlanError, match="arena of 512 bytes"):
            arena.view(offset, nbytes)
    with pytest.raises(MemoryPlanError, match="test: a block of 0 bytes"):
        arena.block(0, "test")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_is_private_so_that_huge_pages_can_back_it() -> None:
    """Shared anonymous memory is never backed by huge pages where they are "madvise"; a step is 6 % slower then."""
    arena = MemoryArena(HUGE_PAGE)
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, permissions = line.split()[:2]
            low, high = (int(x, 16) for x in span.split("-"))
            if low <= arena.base < high:
                assert permissions == "rw-p"
                break
        else:
            raise AssertionError("the arena is not in the process's memory map")


def test_a_kernel_without_huge_pages_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(mmap.mmap):
        def madvise(self, *arguments: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Plain)
    assert not MemoryArena(HUGE_PAGE).bytes.any()
