"""Read-ahead: order, each sample once, bounded memory, errors in their place, and nobody ever waits for a read."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renaissance.core.errors import CorruptSample, ValueRejected
from renaissance.data import readahead
from renaissance.data.readahead import MIN_BUDGET, ReadAhead

LIMIT_SECONDS = 10.0


class Disk:
    """Samples whose bytes follow from their number; counts what is read, and can hold reads back."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = np.array(sizes, np.uint32)
        self.reads: Counter[int] = Counter()
        self.open = 0
        self.damaged: set[int] = set()
        self.held: dict[int, threading.Event] = {}
        self.reached: dict[int, threading.Event] = {}
        self.lock = threading.Lock()

    def content(self, sample: int) -> np.ndarray:
        return (np.arange(self.sizes[sample]) * 7 + sample).astype(np.uint8)

    def hold(self, sample: int) -> threading.Event:
        """Its read begins (``reached``) and ends when the returned event is set."""
        self.reached[sample] = threading.Event()
        self.held[sample] = threading.Event()
        return self.held[sample]


class DiskSource:
    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        disk.open += 1

    def read_into(self, sample: int, out: memoryview) -> int:
        disk = self.disk
        with disk.lock:
            disk.reads[sample] += 1
        if sample in disk.held:
            disk.reached[sample].set()
            assert disk.held[sample].wait(LIMIT_SECONDS)
        if sample in disk.damaged:
            raise CorruptSample(f"sample {sample} is damaged")
        content = disk.content(sample)
        out[: content.size] = content.data
        return content.size

    def close(self) -> None:
        with self.disk.lock:
            self.disk.open -= 1


class Consumer:
    """Takes like a worker: when nothing is there it waits to be told."""

    def __init__(self, disk: Disk, budget: int = MIN_BUDGET, readers: int = 2) -> None:
        self.disk = disk
        self.ready = threading.Semaphore(0)
        sources = [DiskSource(disk) for _ in range(readers)]
        self.ahead = ReadAhead(sources, disk.sizes, budget, self.ready.release)

    def take(self) -> tuple[int, str]:
        """(sample, "" or the error); compares the bytes."""
        while (got := self.ahead.take()) is None:
            assert self.ready.acquire(timeout=LIMIT_SECONDS), "nobody said that the sample is there"
        if got.error is None:
            np.testing.assert_array_equal(got.stored, self.disk.content(got.sample))
            return got.sample, ""
        return got.sample, str(got.error)

    def take_all(self, count: int) -> list[int]:
        return [self.take()[0] for _ in range(count)]

    def close(self) -> None:
        self.ahead.close()
        assert self.ahead.join(LIMIT_SECONDS)
        assert self.disk.open == 0


@pytest.fixture
def opened() -> Iterator[list[Consumer]]:
    consumers: list[Consumer] = []
    yield consumers
    for consumer in consumers:
        consumer.close()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 40_000), min_size=1, max_size=60),
    st.lists(st.integers(0, 10**6), max_size=120),
    st.integers(1, 3),
)
def test_samples_come_in_the_order_given_and_each_is_read_once(
    sizes: list[int], order: list[int], readers: int
) -> None:
    disk = Disk(sizes)
    wanted = [sample % len(sizes) for sample in order]
    consumer = Consumer(disk, readers=readers)
    consumer.ahead.restart(wanted)
    assert consumer.take_all(len(wanted)) == wanted
    assert disk.reads == Counter(wanted)
    consumer.close()


def test_order_is_kept_while_an_early_read_is_slow(opened: list[Consumer]) -> None:
    disk = Disk([100] * 20)
    release = disk.hold(0)
    consumer = Consumer(disk)
    opened.append(consumer)
    consumer.ahead.restart(range(20))
    assert disk.reached[0].wait(LIMIT_SECONDS)
    assert consumer.ahead.take() is None  # though later ones may be there
    release.set()
    assert consumer.take_all(20) == list(range(20))


def test_memory_is_bounded_by_the_budget_and_reading_goes_on_as_space_comes_back(opened: list[Consumer]) -> None:
    size, count = 10_000, 50
    disk = Disk([size] * count)
    release = disk.hold(count - 1)
    consumer = Consumer(disk, budget=8 * size)
    opened.append(consumer)
    assert consumer.ahead.capacity < 9 * size
    consumer.ahead.restart(range(count))
    for taken in range(count - 1):
        assert consumer.take() == (taken, "")
        with disk.lock:
            assert len(disk.reads) <= taken + 8
    release.set()
    assert consumer.take() == (count - 1, "")


def test_tiny_samples_are_bounded_in_number(opened: list[Consumer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readahead, "MAX_ENTRIES", 4)
    most = 0

    class Counting(Disk):
        def content(self, sample: int) -> np.ndarray:
            nonlocal most
            most = max(most, len(consumer.ahead._live))
            return super().content(sample)

    disk = Counting([1] * 200)
    release, third = disk.hold(0), disk.hold(3)
    third.set()
    consumer = Consumer(disk)
    opened.append(consumer)
    consumer.ahead.restart(range(200))
    assert disk.reached[3].wait(LIMIT_SECONDS)
    release.set()
    assert consumer.take_all(200) == list(range(200))
    assert most == 4


@pytest.mark.parametrize("size", [64, 65, 9_000, MIN_BUDGET // 2, MIN_BUDGET])
def test_places_of_samples_never_overlap(opened: list[Consumer], size: int) -> None:
    """Also when the buffer is filled to its last byte."""
    overlaps = []

    class Watching(Disk):
        def content(self, sample: int) -> np.ndarray:
            with consumer.ahead._changed:
                places = sorted((entry.start, entry.end) for entry in consumer.ahead._live)
            overlaps.extend(pair for pair in itertools.pairwise(places) if pair[0][1] > pair[1][0])
            return super().content(sample)

    count = 3 * MIN_BUDGET // size + 2
    consumer = Consumer(Watching([size] * count))
    opened.append(consumer)
    consumer.ahead.restart(range(count))
    assert consumer.take_all(count) == list(range(count))
    assert overlaps == []


def test_sample_larger_than_the_budget_still_fits(opened: list[Consumer]) -> None:
    disk = Disk([5, 3 * MIN_BUDGET, 5, 3 * MIN_BUDGET])
    consumer = Consumer(disk)
    opened.append(consumer)
    consumer.ahead.restart([1, 0, 3, 2, 1])
    assert consumer.take_all(5) == [1, 0, 3, 2, 1]


def test_error_appears_at_its_position_and_reading_goes_on(opened: list[Consumer]) -> None:
    disk = Disk([100] * 10)
    disk.damaged = {4}
    consumer = Consumer(disk)
    opened.append(consumer)
    consumer.ahead.restart(range(10))
    taken = [consumer.take() for _ in range(10)]
    assert taken == [(n, "sample 4 is damaged" if n == 4 else "") for n in range(10)]


def test_order_that_fails_is_an_error_at_that_position(opened: list[Consumer]) -> None:
    def order() -> Iterator[int]:
        yield 1
        raise CorruptSample("no order")

    consumer = Consumer(Disk([10] * 3))
    opened.append(consumer)
    consumer.ahead.restart(order())
    assert [consumer.take(), consumer.take()] == [(1, ""), (-1, "no order")]
    consumer.ahead.restart([2, 0])
    assert consumer.take_all(2) == [2, 0]


def test_restart_drops_what_was_read_ahead_and_does_not_wait_for_reads(opened: list[Consumer]) -> None:
    """The space of a read that is still going on is not given to others meanwhile."""
    disk = Disk([20_000] * 12)
    release = disk.hold(3)
    consumer = Consumer(disk)
    opened.append(consumer)
    consumer.ahead.restart([3, 4, 5])
    assert disk.reached[3].wait(LIMIT_SECONDS)
    consumer.ahead.restart([6, 7, 8, 9, 10, 11])  # returns at once
    assert consumer.ahead.take() is None
    release.set()
    assert consumer.take_all(6) == [6, 7, 8, 9, 10, 11]


def test_restart_at_every_point_gives_the_new_order(opened: list[Consumer]) -> None:
    disk = Disk([9_000] * 30)
    consumer = Consumer(disk)
    opened.append(consumer)
    rng = np.random.default_rng(3)
    for _ in range(60):
        order = rng.integers(0, 30, 25).tolist()
        consumer.ahead.restart(order)
        count = int(rng.integers(0, 26))
        assert consumer.take_all(count) == order[:count]


def test_close_does_not_wait_for_a_read_that_never_ends() -> None:
    disk = Disk([100] * 4)
    release = disk.hold(0)
    consumer = Consumer(disk, readers=1)
    consumer.ahead.restart(range(4))
    assert disk.reached[0].wait(LIMIT_SECONDS)
    consumer.ahead.close()  # returns at once
    assert disk.open == 1
    release.set()
    assert consumer.ahead.join(LIMIT_SECONDS)
    assert disk.open == 0
    assert disk.reads == Counter([0])


def test_nothing_is_read_before_an_order_is_given_or_after_its_end() -> None:
    disk = Disk([100] * 4)
    consumer = Consumer(disk)
    assert consumer.ahead.take() is None
    consumer.ahead.restart([2])
    assert consumer.take() == (2, "")
    assert consumer.ahead.take() is None
    consumer.close()
    assert disk.reads == Counter([2])


def test_threads_begin_with_the_first_order() -> None:
    disk = Disk([100] * 4)
    before = threading.active_count()
    consumer = Consumer(disk)
    assert threading.active_count() == before
    assert disk.open == 2
    consumer.close()
    assert threading.active_count() == before


def test_budget_that_holds_nothing_is_refused() -> None:
    with pytest.raises(ValueRejected, match="read-ahead: 100 bytes for 1 sources"):
        ReadAhead([DiskSource(Disk([1]))], np.ones(1, np.uint32), 100, lambda: None)
