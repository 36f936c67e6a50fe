"""The one allocation of a rank: measured, taken once, and closed; pieces of it do not overlap."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest

from renaissance.backend.cuda.arena import DeviceArena
from renaissance.backend.cuda.calls import Buffer
from renaissance.backend.cuda.runtime import CudaRuntime
from renaissance.core.enums import StreamKind
from renaissance.core.errors import MemoryPlanError

BASE = 1 << 20


class Runtime:
    """Gives out ``BASE`` once."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.freed: list[int] = []

    def malloc(self, size: int) -> int:
        self.asked.append(size)
        return BASE

    def free(self, ptr: int) -> None:
        self.freed.append(ptr)

    def name_range(self, ptr: int, size: int, name: str) -> None:
        """Of no interest."""


def asked(arena: DeviceArena) -> list[Buffer]:
    """What launchers ask for, the same each time."""
    return [
        arena.tensor(0, 1000),
        arena.named("weights", 300),
        arena.named("weights", 100),
        arena.named("weights", 300),
        arena.scratch(StreamKind.COMP_1, 70),
        arena.scratch(StreamKind.COMP_1, 700),
        arena.scratch(StreamKind.UPDATE, 5),
    ]


def allocated() -> tuple[DeviceArena, Runtime]:
    arena, runtime = DeviceArena(1000), Runtime()
    asked(arena)
    arena.allocate(cast(CudaRuntime, runtime))
    return arena, runtime


def test_what_was_measured_lies_in_one_allocation_without_overlap() -> None:
    arena, runtime = allocated()
    tensor, first, other, again, small, large, update = asked(arena)
    assert runtime.asked == [arena.total_bytes] == [1024 + 512 + 256 + 768 + 256]
    assert arena.everything == Buffer(BASE, arena.total_bytes)
    assert (first, small.ptr) == (again, large.ptr), "the same place each time"
    pieces = sorted((tensor, first, other, large, update), key=lambda piece: piece.ptr)
    assert all(a.ptr + a.nbytes <= b.ptr for a, b in itertools.pairwise(pieces))
    assert all(piece.ptr % 256 == 0 for piece in pieces)
    assert pieces[-1].ptr + pieces[-1].nbytes <= BASE + arena.total_bytes


def test_nothing_is_given_out_that_was_not_measured() -> None:
    arena, runtime = allocated()
    with pytest.raises(MemoryPlanError, match="scratch of stream COMP_1: 800 bytes were asked for, 768 when the"):
        arena.scratch(StreamKind.COMP_1, 800)
    with pytest.raises(MemoryPlanError, match="working memory weights: 301 bytes were asked for after compile"):
        arena.named("weights", 301)
    with pytest.raises(MemoryPlanError, match="no bytes 1000 to 1025 in 1024"):
        arena.tensor(1000, 25)
    arena.free()
    arena.free()
    assert runtime.freed == [BASE]


def test_a_refused_allocation_says_how_much_was_wanted_and_what_to_do() -> None:
    def malloc(size: int) -> Any:
        raise RuntimeError("cudaErrorMemoryAllocation: out of memory")

    arena = DeviceArena(3 << 20)
    arena.named("weights", 1 << 20)
    with pytest.raises(MemoryPlanError, match=r"no 4 MiB .*\(3 MiB of tensors.*cudaErrorMemoryAllocation.*smaller"):
        arena.allocate(cast(CudaRuntime, SimpleNamespace(malloc=malloc)))


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, -1), (0, 11), (10, 1)])
def test_a_part_of_a_buffer_lies_inside_it(offset: int, nbytes: int) -> None:
    assert Buffer(256, 10).part(4, 6) == Buffer(260, 6)
    with pytest.raises(ValueError, match="of a buffer of 10"):
        Buffer(256, 10).part(offset, nbytes)
