"""What workers make of a session, without processes: bytes, policies, read-ahead, and what is freed."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from share_harness import LIMIT_SECONDS, Workers, load, session_spec

from renaissance.core.dtype import DType
from renaissance.core.enums import NormMode
from renaissance.core.errors import CorruptSample, FormatError
from renaissance.core.philox import philox
from renaissance.data.formats.dts import layout_of, write_dts
from renaissance.data.making import makers
from renaissance.data.making.policy import SUBSTITUTE_ATTEMPTS, substitutes
from renaissance.data.making.spec import LoadedSet, OnCorrupt
from renaissance.data.making.tables import EpochTables
from renaissance.data.order import epoch_order
from renaissance.data.recipe import Recipe
from renaissance.data.sources import Source
from renaissance.data.transforms import RandomCrop, RandomHorizontalFlip

SAMPLES = 211
RECIPE = Recipe.build([RandomCrop(32), RandomHorizontalFlip(0.5)], NormMode.CIFAR, resolution=32, color_channels=3)
PLAIN = Recipe.build([], NormMode.NO_NORM, resolution=32, color_channels=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("cifar10")
    rng = np.random.default_rng(1)
    labels, images = rng.integers(0, 10, SAMPLES, np.uint8), rng.integers(1, 256, (SAMPLES, 32, 32, 3), np.uint8)
    write_dts(place / layout_of("cifar10").file_name("train"), "cifar10", "train", labels, images)
    return place


@pytest.fixture
def opened(folder: Path) -> Iterator[Callable[..., tuple[LoadedSet, int]]]:
    stores = []

    def opener(how: str) -> tuple[LoadedSet, int]:
        store, loaded, fd = load(folder, "cifar10", load=how)
        stores.append(store)
        return loaded, fd

    yield opener
    for store in stores:
        store.close()


@pytest.fixture
def workers(opened: Callable[..., tuple[LoadedSet, int]]) -> Iterator[Callable[..., Workers]]:
    made: list[Workers] = []

    def make(how: str = "partial", count: int = 1, recipe: Recipe = RECIPE, **changes: object) -> Workers:
        loaded, fd = opened(how)
        made.append(Workers(session_spec(loaded, recipe, **({"dtype": DType.FP32} | changes)), fd, count))
        return made[-1]

    yield make
    for session in made:
        session.close()


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], None]], None]:
    """Call a function with the sample before each read from a file."""

    def install(hook: Callable[[int], None]) -> None:
        class Watched(Source):
            def read_into(self, sample: int, out: memoryview) -> int:
                hook(sample)
                return super().read_into(sample, out)

        monkeypatch.setattr(makers, "Source", Watched)

    return install


def check(condition: bool) -> None:
    assert condition


def damage(samples: set[int]) -> Callable[[int], None]:
    def hook(sample: int) -> None:
        if sample in samples:
            raise CorruptSample(f"cifar10.dts, record {sample}: cannot be read")

    return hook


@pytest.mark.parametrize("how", ["fully", "partial"])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 20])
def test_bytes_depend_neither_on_workers_nor_on_the_load(workers: Callable[..., Workers], how: str, count: int) -> None:
    alone = workers("fully", 1)
    session = workers(how, count)
    for _ in range(2):
        assert [b.digest for b in session.epoch()] == [b.digest for b in alone.epoch()]


def test_jump_and_successor_in_the_middle_of_a_share_give_the_same_bytes(
    workers: Callable[..., Workers], watch: Callable[..., None]
) -> None:
    release = threading.Event()
    held = set(epoch_order(5, 0, SAMPLES, shuffle=True)[60:62].tolist())  # of the first batch, one for each worker
    watch(lambda sample: None if sample not in held else check(release.wait(LIMIT_SECONDS)))
    expected = [b.digest for b in workers("fully", batch_size=100, recipe=RECIPE).epoch()]
    session = workers("partial", 2, batch_size=100)
    session.step()  # both workers have begun, and cannot finish
    session.seek(0, 2)
    session.step()
    release.set()
    assert session.next().digest == expected[2]
    for index in (2, 0, 1, 1):
        session.step()  # begun at the old place
        session.seek(0, index)
        session.replace(index % 2)
        session.step()
        assert session.next().digest == expected[index]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_partial_reads_each_sample_of_an_epoch_once_whatever_the_ranks(
    workers: Callable[..., Workers], watch: Callable[..., None], monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    monkeypatch.setattr("renaissance.data.making.tables.MAX_EPOCH", 0)  # nothing is read ahead of the second epoch
    reads: Counter[int] = Counter()
    lock = threading.Lock()

    def count(sample: int) -> None:
        with lock:
            reads[sample] += 1

    watch(count)
    delivered: list[bytes] = []
    for rank in range(world):
        session = workers(count=2, recipe=PLAIN, dtype=DType.UINT8, rank=rank, world_size=world)
        for batch in session.epoch():
            delivered += [row.tobytes() for row in batch.rows[: session.spec.valid_rows(batch.index)]]
        session.close()
    assert len(delivered) == len(set(delivered)) == SAMPLES
    assert reads == Counter(range(SAMPLES))


def test_worker_without_samples_looks_for_them_in_one_epoch_only(
    opened: Callable[..., tuple[LoadedSet, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer samples than ranks, or than rows, some workers have none: their reading threads spun for ever."""
    monkeypatch.setattr("renaissance.data.making.tables.MAX_EPOCH", 20)
    loaded, _ = opened("partial")
    labels = np.zeros(SAMPLES, np.int32)
    spec = session_spec(loaded, PLAIN, rank=SAMPLES + 1, world_size=SAMPLES + 2)
    for rows in ([0, 2], [1]):
        tables = EpochTables(replace(spec, rank=0 if rows == [1] else spec.rank), np.array(rows), labels, None)
        assert next(tables.upcoming(3, 0), None) is None
        assert list(tables._kept) == [3]


def test_slow_disk_of_one_session_does_not_keep_a_worker_from_another(
    workers: Callable[..., Workers], watch: Callable[..., None]
) -> None:
    release, reached = threading.Event(), threading.Event()

    def block(sample: int) -> None:
        reached.set()
        assert release.wait(LIMIT_SECONDS)

    watch(block)
    slow, quick = workers("partial"), workers("fully")
    try:
        assert not slow.step()  # at once: there is nothing to do yet
        assert reached.wait(LIMIT_SECONDS)
        expected = [b.digest for b in workers("fully").epoch()]
        assert [b.digest for b in quick.epoch()] == expected
        assert not slow.step()
        slow.ready.clear()
        release.set()
        assert slow.ready.wait(LIMIT_SECONDS)  # the worker would be woken
        assert [b.digest for b in slow.epoch()] == expected
    finally:
        release.set()


def test_session_closed_while_the_disk_hangs_does_not_wait_for_it(
    workers: Callable[..., Workers], watch: Callable[..., None]
) -> None:
    release, reached = threading.Event(), threading.Event()

    def block(sample: int) -> None:
        reached.set()
        assert release.wait(LIMIT_SECONDS)

    watch(block)
    session = workers()
    session.step()
    assert reached.wait(LIMIT_SECONDS)
    readers = [t for t in threading.enumerate() if t.name == "read-ahead"]
    assert readers
    session.close()  # returns at once
    release.set()
    for thread in readers:
        thread.join(LIMIT_SECONDS)
        assert not thread.is_alive()


def test_damaged_sample_fails_the_session_by_default_and_names_it(
    workers: Callable[..., Workers], watch: Callable[..., None]
) -> None:
    order = epoch_order(5, 0, SAMPLES, shuffle=True)
    bad = int(order[20])
    watch(damage({bad}))
    session = workers(count=2)
    with pytest.raises(CorruptSample, match=f"record {bad}: cannot be read; on_corrupt substitute or blank would"):
        session.epoch()
    assert [(r["sample"], r["epoch"], r["batch"], r["action"]) for r in session.reports] == [(bad, 0, 1, "fail")]


def test_blank_leaves_a_row_of_zeros_with_label_minus_1(
    workers: Callable[..., Workers], watch: Callable[..., None]
) -> None:
    order = epoch_order(5, 0, SAMPLES, shuffle=True)
    whole = workers("fully", batch_size=50).epoch()
    bad = {int(order[k]) for k in (0, 51, 99, 210)}
    watch(damage(bad))
    digests = []
    for count in (1, 2, 3, 7):
        session = workers(count=count, batch_size=50, on_corrupt=OnCorrupt.BLANK)
        batches = session.epoch()
        for k in range(SAMPLES):
            batch, row = batches[k // 50], k % 50
            if k in (0, 51, 99, 210):
                assert batch.labels[row] == -1
                assert not batch.rows[row].any()
            else:
                assert batch.labels[row] == whole[k // 50].labels[row]
                assert (batch.rows[row] == whole[k // 50].rows[row]).all()
        digests.append([b.digest for b in batches])
        assert {r["sample"] for r in session.reports if r["epoch"] == 0} == bad
        assert {r["action"] for r in session.reports} == {"blank"}
    assert all(d == digests[0] for d in digests)


def test_substitute_has_the_pixels_of_another_and_the_draws_of_its_own(
    workers: Callable[..., Workers], watch: Callable[..., None]
) -> None:
    """Every flip decides; with p = 0.5 an own and a foreign draw differ in half of the cases."""
    order = epoch_order(5, 0, SAMPLES, shuffle=True)
    bad = [int(order[k]) for k in range(0, SAMPLES, 7)]
    stands_in = {}
    for sample in bad:
        candidates = substitutes(5, 0, False, sample, SAMPLES)
        stands_in[sample] = next(s for s in candidates if s not in bad)
    flips = Recipe.build([RandomHorizontalFlip(0.5)], NormMode.NO_NORM, resolution=32, color_channels=3)
    loaded_session = workers("fully", recipe=PLAIN, dtype=DType.UINT8, batch_size=SAMPLES, shuffle=False)
    plain = loaded_session.next()
    images, labels = plain.rows.reshape(-1, 32, 32, 3), plain.labels
    watch(damage(set(bad)))
    digests = []
    for count in (1, 2, 3, 7):
        session = workers(
            count=count, recipe=flips, dtype=DType.UINT8, batch_size=SAMPLES, on_corrupt=OnCorrupt.SUBSTITUTE
        )
        batch = session.next()
        for row, sample in enumerate(order.tolist()):
            source = stands_in.get(sample, sample)
            word = philox(5, 0, 1 << 24, sample, 0)[0]
            expected = images[source, :, ::-1] if (word >> 8) * 2.0**-24 < 0.5 else images[source]
            np.testing.assert_array_equal(batch.rows[row].reshape(32, 32, 3), expected)
            assert batch.labels[row] == labels[source]
        assert {r["sample"]: r["substitute"] for r in session.reports if r["epoch"] == 0} == stands_in
        digests.append(batch.digest)
    assert len(set(digests)) == 1


def test_substitutes_that_are_all_damaged_fail_the_session(
    workers: Callable[..., Workers], watch: Callable[..., None]
) -> None:
    watch(damage(set(range(SAMPLES))))
    session = workers(on_corrupt=OnCorrupt.SUBSTITUTE)
    with pytest.raises(CorruptSample, match=f"none of {SUBSTITUTE_ATTEMPTS} samples drawn to take its place"):
        session.next()
    assert session.reports[-1]["action"] == "fail"


def test_what_is_not_the_damage_of_one_sample_is_no_matter_for_the_policy(
    workers: Callable[..., Workers], watch: Callable[..., None]
) -> None:
    def replaced(sample: int) -> None:
        raise FormatError("cifar10.dts: is another file now")

    watch(replaced)
    session = workers(on_corrupt=OnCorrupt.BLANK)
    with pytest.raises(FormatError, match="is another file now"):
        session.next()
    assert session.reports == []


def test_substitutes_follow_the_page_on_random_numbers() -> None:
    expected = [philox(9, a, 8 << 24, 77, 3 | 1 << 31)[0] * 1000 >> 32 for a in range(SUBSTITUTE_ATTEMPTS)]
    assert list(substitutes(9, 3, True, 77, 1000)) == expected


@pytest.mark.parametrize("how", ["fully", "partial"])
def test_ring_and_index_of_a_closed_session_are_unmapped_without_the_garbage_collector(
    workers: Callable[..., Workers], watch: Callable[..., None], how: str
) -> None:
    watch(damage({3, 4, 5}))
    before = mapped()
    gc.disable()
    try:
        session = workers(how, 2, on_corrupt=OnCorrupt.SUBSTITUTE)
        session.epoch()
        readers = [t for t in threading.enumerate() if t.name == "read-ahead"]
        del session.ring, session.board
        session.close()
        for thread in readers:
            thread.join(LIMIT_SECONDS)
        del readers
        assert mapped() == before
    finally:
        gc.enable()


def mapped() -> int:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:" in line for line in lines)
