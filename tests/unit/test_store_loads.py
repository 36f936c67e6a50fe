"""The store: how sets are loaded, that one load delays nobody else, and that a failed one leaves nothing behind."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from dataserver import filling
from dataserver.server import ServeOptions, serve
from dataserver.store import DatasetStore
from renaissance.core.errors import CorruptSample, DataServerError, FormatError, ValueRejected
from renaissance.data.formats.dts import layout_of, write_dts
from renaissance.data.making.spec import NOT_STORED, Load, LoadedSet
from renaissance.data.sources import Source

LIMIT_SECONDS = 20.0
GIB = 1 << 30
PICTURES, PICTURE_BYTES = 40, 5000


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that only look like pictures: nothing here decodes them."""
    root = tmp_path_factory.mktemp("imagenet")
    rng = np.random.default_rng(2)
    for split in ("train", "val"):
        for number in range(PICTURES):
            folder = root / split / f"n{number % 4}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"p{number:03}.JPEG").write_bytes(rng.bytes(PICTURE_BYTES + number))
    return root


@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cifar10")
    labels, images = np.arange(20, dtype=np.uint8) % 10, np.zeros((20, 32, 32, 3), np.uint8)
    for split in ("train", "val"):
        write_dts(folder / layout_of("cifar10").file_name(split), "cifar10", split, labels, images)
    return folder


@pytest.fixture
def stores() -> Iterator[list[DatasetStore]]:
    made: list[DatasetStore] = []
    yield made
    for store in made:
        store.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def contents(loaded: LoadedSet, fd: int) -> tuple[list[bytes | None], np.ndarray]:
    """(stored bytes of every sample or None, labels) as a worker finds them in the memfd."""
    mapped = memoryview(mmap.mmap(fd, loaded.total_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ))
    assert loaded.source is not None
    source = Source.attach(loaded.source, mapped)
    places = loaded.places(mapped).tolist() if loaded.in_memory else []
    found = [
        None if p == int(NOT_STORED) else bytes(mapped[p : p + int(source.sizes[s])]) for s, p in enumerate(places)
    ]
    return found, source.labels.copy()


def test_fully_holds_every_stored_byte_and_partial_the_index(tree: Path, stores: list[DatasetStore]) -> None:
    with Source.open("imagenet", tree, "train") as source:
        expected = [source.read(sample) for sample in range(PICTURES)]
        labels = source.labels.copy()
    for how in ("fully", "partial"):
        stores.append(DatasetStore({"imagenet": tree}, load=how))
        loaded, fd = stores[-1].load("imagenet", "train", GIB)
        assert loaded.load == how
        found, held_labels = contents(loaded, fd)
        assert found == (expected if how == "fully" else [])
        np.testing.assert_array_equal(held_labels, labels)
        assert os.fstat(fd).st_size == loaded.total_bytes == stores[-1].loaded_bytes
        assert stores[-1].load("imagenet", "train", GIB) == (loaded, fd)


@pytest.mark.parametrize("chunk", [1, 5000, 12_000, 1 << 23])
def test_chunks_of_any_size_give_the_same_memory(
    tree: Path, stores: list[DatasetStore], monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(filling, "CHUNK_BYTES", chunk)
    stores.append(DatasetStore({"imagenet": tree}, load="fully"))
    found, _ = contents(*stores[-1].load("imagenet", "val", GIB))
    with Source.open("imagenet", tree, "val") as source:
        assert found == [source.read(sample) for sample in range(PICTURES)]


def test_auto_loads_pixels_fully_and_pictures_when_they_fit_in_a_quarter(
    tree: Path, cifar: Path, stores: list[DatasetStore]
) -> None:
    stored = sum(PICTURE_BYTES + number for number in range(PICTURES))
    for limit, expected in ((4 * stored - 4, Load.PARTIAL), (4 * stored, Load.FULLY)):
        stores.append(DatasetStore({"imagenet": tree}))
        assert stores[-1].load("imagenet", "train", limit)[0].load is expected
    stores.append(DatasetStore({"cifar10": cifar}))
    assert stores[-1].load("cifar10", "train", 20 * 3072 + 4096)[0].load is Load.FULLY
    stores.append(DatasetStore({"cifar10": cifar}, load="partial"))
    assert stores[-1].load("cifar10", "train", GIB)[0].load is Load.PARTIAL


def test_limit_holds_for_all_sets_together(tree: Path, stores: list[DatasetStore]) -> None:
    stores.append(store := DatasetStore({"imagenet": tree}, load="fully"))
    one = store.load("imagenet", "train", GIB)[0].total_bytes
    with pytest.raises(DataServerError, match=f"takes [0-9]+ bytes, {one - 1} are left for data; .* --load partial"):
        store.load("imagenet", "val", 2 * one - 1)
    with pytest.raises(DataServerError, match=f"takes [0-9]+ bytes, {one - 1} are left for data"):
        store.load("imagenet", "val", 3 * one, one + 1)  # rings of open sessions count too
    assert store.loaded_bytes == one
    assert store.load("imagenet", "val", 2 * one + 4096)[0].samples == PICTURES


def test_failed_load_leaves_nothing_and_can_be_tried_again(tmp_path: Path, stores: list[DatasetStore]) -> None:
    labels, images = np.arange(20, dtype=np.uint8) % 10, np.zeros((20, 32, 32, 3), np.uint8)
    path = tmp_path / layout_of("cifar10").file_name("train")
    write_dts(path, "cifar10", "train", labels, images)
    good = path.read_bytes()
    path.write_bytes(good[:-100])
    for how in ("fully", "partial"):
        path.write_bytes(good[:-100])
        stores.append(store := DatasetStore({"cifar10": tmp_path}, load=how))
        before = descriptors()
        for _ in range(3):
            with pytest.raises(FormatError):
                store.load("cifar10", "train", GIB)
        assert (descriptors(), store.loaded_bytes, store.progress()) == (before, 0, [])
        path.write_bytes(good)
        assert store.load("cifar10", "train", GIB)[0].samples == 20


class Stage:
    """Reads of the loader stop here until they are let through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, split: str = "train") -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        stage = self

        class Staged(Source):
            def read_into(self, sample: int, out: memoryview) -> int:
                if self.spec.split == split:
                    stage.reached.set()
                    assert stage.go.wait(LIMIT_SECONDS)
                return super().read_into(sample, out)

        monkeypatch.setattr(filling, "Source", Staged)


def test_load_delays_neither_other_splits_nor_those_who_ask_how_it_goes(
    tree: Path, stores: list[DatasetStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(monkeypatch)
    monkeypatch.setattr(filling, "CHUNK_BYTES", 10_000)
    stores.append(store := DatasetStore({"imagenet": tree}, load="fully"))
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(store.load, "imagenet", "train", GIB) for _ in range(3)]
        assert stage.reached.wait(LIMIT_SECONDS)
        (progress,) = store.progress()
        assert (progress.name, progress.split, progress.done_bytes) == ("imagenet", "train", 0)
        assert progress.total_bytes > PICTURES * PICTURE_BYTES
        assert store.loaded_bytes > progress.total_bytes
        assert store.load("imagenet", "val", GIB)[0].samples == PICTURES  # in this thread, at once
        assert not any(future.done() for future in waiting)
        stage.go.set()
        first, *others = [future.result(LIMIT_SECONDS) for future in waiting]
    assert all(other == first for other in others)  # loaded once
    assert store.progress() == []


def test_load_is_given_up_soon_when_the_daemon_stops(
    tree: Path, stores: list[DatasetStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(monkeypatch)
    before = descriptors()
    stores.append(store := DatasetStore({"imagenet": tree}, load="fully"))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.load, "imagenet", "train", GIB)
        assert stage.reached.wait(LIMIT_SECONDS)
        store.interrupt()
        stage.go.set()
        with pytest.raises(DataServerError, match="not loaded, the dataserver is stopping"):
            waiting.result(LIMIT_SECONDS)
    with pytest.raises(DataServerError, match="the dataserver is stopping"):
        store.load("imagenet", "val", GIB)
    store.close()
    assert (descriptors(), store.loaded_bytes) == (before, 0)


def test_sample_that_cannot_be_read_is_left_to_the_policy_of_each_session(
    tree: Path, stores: list[DatasetStore], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Damaged(Source):
        def read_into(self, sample: int, out: memoryview) -> int:
            if sample in (3, 17):
                raise CorruptSample(f"sample {sample} cannot be read")
            return super().read_into(sample, out)

    monkeypatch.setattr(filling, "Source", Damaged)
    stores.append(DatasetStore({"imagenet": tree}, load="fully"))
    found, _ = contents(*stores[-1].load("imagenet", "train", GIB))
    assert [sample for sample, stored in enumerate(found) if stored is None] == [3, 17]


def test_error_of_a_reading_thread_ends_the_load(
    tree: Path, stores: list[DatasetStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Replaced(Source):
        def read_into(self, sample: int, out: memoryview) -> int:
            if sample == 30:
                raise FormatError("another file")
            return super().read_into(sample, out)

    stores.append(store := DatasetStore({"imagenet": tree}, load="fully"))
    before = descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(filling, "Source", Replaced)
        patch.setattr(filling, "CHUNK_BYTES", 10_000)
        with pytest.raises(FormatError, match="another file"):
            store.load("imagenet", "train", GIB)
    assert (descriptors(), store.loaded_bytes) == (before, 0)
    assert store.load("imagenet", "train", GIB)[0].samples == PICTURES


@pytest.mark.parametrize("name", ["../secret", "/etc", "imagenet/../..", "", "."])
def test_names_that_look_like_paths_are_no_data_sets(tree: Path, stores: list[DatasetStore], name: str) -> None:
    stores.append(store := DatasetStore({"imagenet": tree}))
    with pytest.raises(ValueRejected, match="unknown data set"):
        store.check(name, "train")
    with pytest.raises(ValueRejected, match="split is"):
        store.check("imagenet", name or "../train")


def test_options_that_nothing_can_obey_are_refused(tree: Path, cifar: Path) -> None:
    with pytest.raises(ValueRejected, match="read-ahead is 1000 bytes; expected at least 65536"):
        serve(ServeOptions({"imagenet": tree}, workers=1, read_ahead=1000))
    with pytest.raises(ValueRejected, match="load is 'half'; expected one of: auto, fully, partial"):
        DatasetStore({"imagenet": tree}, load="half")
    with pytest.raises(ValueRejected, match="level is 2, but only packed pictures have levels"):
        DatasetStore({"cifar10": cifar}, level=2)
    DatasetStore({"cifar10": cifar, "imagenet": tree}, level=2).close()
