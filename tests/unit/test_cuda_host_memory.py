"""HostMemory: what the copy engine reads, in the order registered, staged, pageable, on a small runtime of lists."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from renaissance.backend.cuda.host_memory import HostMemory
from renaissance.core.errors import ValueRejected

PAGE = mmap.PAGESIZE


class FakeRuntime:
    """Registers and allocates host memory, or refuses; keeps the order of calls. Names are CUDA's."""

    def __init__(self, *, register: bool = True, alloc: bool = True) -> None:
        self.register, self.alloc = register, alloc
        self.calls: list[tuple[object, ...]] = []
        self.blocks: dict[int, np.ndarray] = {}

    def hostRegister(self, ptr: int, size: int, flags: int) -> None:  # noqa: N802
        self.calls.append(("register", ptr, size))
        if not self.register:
            raise RuntimeError("cudaErrorNotSupported: operation not supported")

    def hostUnregister(self, ptr: int) -> None:  # noqa: N802
        self.calls.append(("unregister", ptr))

    def hostAlloc(self, size: int, flags: int) -> int:  # noqa: N802
        self.calls.append(("alloc", size))
        if not self.alloc:
            raise RuntimeError("cudaErrorMemoryAllocation: out of memory")
        block = np.zeros(size, np.uint8)
        self.blocks[block.ctypes.data] = block
        return block.ctypes.data

    def freeHost(self, ptr: int) -> None:  # noqa: N802
        self.calls.append(("free", ptr))
        del self.blocks[ptr]

    def deviceSynchronize(self) -> None:  # noqa: N802
        self.calls.append(("synchronize",))


class Ring:
    """Two slots of a page each in an anonymous mapping, behind a control page."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, 3 * PAGE)
        whole = np.frombuffer(self._map, np.uint8)
        self.memory = whole.ctypes.data, whole.nbytes
        self.slots = [whole[PAGE : 2 * PAGE], whole[2 * PAGE :]]
        self.addresses = [slot.ctypes.data for slot in self.slots]


def test_a_ring_is_registered_once_and_read_where_it_lies() -> None:
    ring, runtime = Ring(), FakeRuntime()
    memory = HostMemory(runtime)
    memory.cover(*ring.memory)
    memory.cover(*ring.memory)
    assert [memory.slot(address, PAGE) for address in ring.addresses] == ring.addresses
    memory.before_copy(ring.addresses[0])
    assert runtime.calls == [("register", *ring.memory)]
    assert memory.text() == f"{3 * PAGE / 1e6:.1f} MB read in place"
    assert not memory.eager
    memory.close()
    memory.close()
    assert runtime.calls[1:] == [("synchronize",), ("unregister", ring.memory[0])], "nothing is read any more, then"


def test_a_ring_that_cannot_be_registered_goes_through_a_page_locked_copy(caplog: pytest.LogCaptureFixture) -> None:
    ring, runtime = Ring(), FakeRuntime(register=False)
    memory = HostMemory(runtime)
    with caplog.at_level("INFO", "renaissance.backend.cuda.host_memory"):
        memory.cover(*ring.memory)
    assert "through a page-locked copy (it cannot be registered: cudaErrorNotSupported" in caplog.text
    sources = [memory.slot(address, PAGE) for address in ring.addresses]
    (base, staged), *others = runtime.blocks.items()
    assert not others, "one block of the same size"
    assert sources == [base + PAGE, base + 2 * PAGE]
    for value, (slot, address) in enumerate(zip(ring.slots, ring.addresses, strict=True), 1):
        slot[:] = value
        memory.before_copy(address)
        slot[:] = 0
    assert (staged[PAGE : 2 * PAGE] == 1).all()
    assert (staged[2 * PAGE :] == 2).all()
    assert "through a page-locked copy" in memory.text()
    memory.close()
    assert runtime.calls[-2:] == [("synchronize",), ("free", base)]


def test_without_page_locked_memory_copies_are_issued_one_by_one() -> None:
    ring, runtime = Ring(), FakeRuntime(register=False, alloc=False)
    memory = HostMemory(runtime)
    memory.cover(*ring.memory)
    assert memory.slot(ring.addresses[1], PAGE) == ring.addresses[1]
    assert memory.eager
    assert "step by step (it cannot be registered: cudaErrorNotSupported" in memory.text()
    assert "page-locked memory: cudaErrorMemoryAllocation: out of memory)" in memory.text()
    memory.close()
    assert [call[0] for call in runtime.calls] == ["register", "alloc", "synchronize"]


def test_memory_that_is_no_mapping_is_staged_since_its_pages_are_shared() -> None:
    values, runtime = np.arange(100, dtype=np.float32), FakeRuntime()
    memory = HostMemory(runtime)
    source = memory.slot(values.ctypes.data, values.nbytes)
    memory.before_copy(values.ctypes.data)
    assert np.array_equal(runtime.blocks[source].view(np.float32), values)
    assert memory.slot(values.ctypes.data, values.nbytes) == source, "asked again, nothing is allocated"
    assert [call[0] for call in runtime.calls] == ["alloc"]


def test_memory_that_is_page_locked_already_is_read_in_place_and_left_to_its_owner() -> None:
    runtime = FakeRuntime()
    memory, own = HostMemory(runtime), runtime.hostAlloc(64, 0)
    memory.adopt(own, 64)
    assert memory.slot(own + 16, 48) == own + 16
    memory.before_copy(own + 16)
    assert memory.text() == ""
    memory.close()
    assert runtime.calls == [("alloc", 64), ("synchronize",)]


def test_only_whole_pages_are_covered_and_no_page_twice() -> None:
    ring, runtime = Ring(), FakeRuntime()
    memory, (address, nbytes) = HostMemory(runtime), ring.memory
    for bad in ((address + 8, nbytes), (address, nbytes - 1), (address, 0)):
        with pytest.raises(ValueRejected, match="expected whole pages"):
            memory.cover(*bad)
    memory.cover(address, 2 * PAGE)
    with pytest.raises(ValueRejected, match="covered already; cover a mapping once"):
        memory.cover(address + PAGE, PAGE)
    assert [call[0] for call in runtime.calls] == ["register"]


def test_a_device_that_has_failed_does_not_keep_the_memory() -> None:
    ring, runtime = Ring(), FakeRuntime()
    memory = HostMemory(runtime)
    memory.cover(*ring.memory)

    def fail() -> None:
        raise RuntimeError("cudaErrorIllegalAddress")

    runtime.deviceSynchronize = fail  # type: ignore[method-assign]
    memory.close()
    assert runtime.calls[-1] == ("unregister", ring.memory[0])
