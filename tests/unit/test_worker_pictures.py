"""Workers on pictures: trees and packed files, fully and partly, damaged ones under every policy."""

from __future__ import annotations

import gc
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from picture_trees import grow_pictures, small_layout
from share_harness import LIMIT_SECONDS, Delivered, Workers, load, session_spec

from dataserver import filling
from renaissance.core.digest import xxh64
from renaissance.core.dtype import DType
from renaissance.core.enums import NormMode
from renaissance.core.errors import CorruptSample
from renaissance.data.formats.imagenet_pack import PackOptions, pack_imagenet
from renaissance.data.making import makers
from renaissance.data.making.policy import substitutes
from renaissance.data.making.spec import OnCorrupt
from renaissance.data.order import epoch_order
from renaissance.data.pictures import compile_pictures
from renaissance.data.recipe import Recipe
from renaissance.data.sources import Source
from renaissance.data.transforms import RandomHorizontalFlip, RandomResizedCrop

SAMPLES = 24
SIZE = 16
SEED = 5
RECIPE = Recipe.build(
    [RandomResizedCrop(SIZE), RandomHorizontalFlip(0.5)], NormMode.NO_NORM, resolution=SIZE, color_channels=3
)
Opener = Callable[..., Workers]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tree")
    assert len(grow_pictures(root)) == SAMPLES
    return root


@pytest.fixture(scope="module")
def packed(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int | str, Path]:
    """The same pictures packed in the order of the tree, so that sample ids agree; by level."""
    folders: dict[int | str, Path] = {}
    for level in (0, "RAW"):
        folders[level] = tmp_path_factory.mktemp(f"level{level}")
        options = PackOptions(level=level, order="file", layout=small_layout(level))
        result = pack_imagenet(tree, folders[level], "train", options)
        assert result.header.num_samples == SAMPLES
    return folders


@pytest.fixture
def workers() -> Iterator[Opener]:
    made, stores = [], []

    def make(folder: Path, how: str = "partial", count: int = 1, **changes: object) -> Workers:
        store, loaded, fd = load(folder, "imagenet", load=how)
        stores.append(store)
        made.append(Workers(session_spec(loaded, RECIPE, **({"batch_size": 7, "seed": SEED} | changes)), fd, count))
        return made[-1]

    yield make
    for session in made:
        session.close()
    for store in stores:
        store.close()


def digests(batches: list[Delivered]) -> list[str]:
    return [batch.digest.hex() for batch in batches]


@pytest.fixture(scope="module")
def expected(tree: Path) -> list[tuple[np.ndarray, int]]:
    """(row, label) of every sample in epoch 0, made alone."""
    recipe = compile_pictures(RECIPE, DType.UINT8, 3)
    rows = []
    with Source.open("imagenet", tree, "train") as source:
        for sample in range(SAMPLES):
            stored, row = np.frombuffer(source.read(sample), np.uint8), np.zeros(recipe.row_bytes, np.uint8)
            assert recipe.make(stored, source.spec.encoding, sample, SEED, 0, False, row) == xxh64(row)
            rows.append((row, int(source.labels[sample])))
    return rows


def test_every_row_is_what_the_recipe_makes_of_its_picture(
    tree: Path, workers: Opener, expected: list[tuple[np.ndarray, int]]
) -> None:
    order = epoch_order(SEED, 0, SAMPLES, shuffle=True)
    for batch in workers(tree, count=2).epoch():
        for p in range(7):
            if 7 * batch.index + p < SAMPLES:
                row, label = expected[order[7 * batch.index + p]]
                np.testing.assert_array_equal(batch.rows[p], row)
                assert batch.labels[p] == label
            else:
                assert not batch.rows[p].any()
                assert batch.labels[p] == -1


def test_bytes_do_not_depend_on_workers_load_or_container(
    tree: Path, packed: dict[int | str, Path], workers: Opener
) -> None:
    first = digests(workers(tree, "fully").epoch())
    for folder in (tree, packed[0]):
        for how in ("fully", "partial"):
            for count in (1, 2, 3, 7):
                assert digests(workers(folder, how, count).epoch()) == first, f"{folder.name}, {how}, {count} workers"
    raw = digests(workers(packed["RAW"], "fully").epoch())
    assert [digests(workers(packed["RAW"], "partial", count).epoch()) for count in (1, 3)] == [raw, raw]


def test_jumps_and_successors_in_the_middle_of_a_share(tree: Path, workers: Opener) -> None:
    first = workers(tree, "fully", batch_size=20)
    batches = digests(first.epoch() + first.epoch())
    session = workers(tree, "partial", 2, batch_size=20)
    for epoch, index in ((1, 1), (0, 0), (0, 1), (1, 0)):
        session.step()
        session.seek(epoch, index)
        session.replace(index)
        session.step()
        assert session.next().digest.hex() == batches[2 * epoch + index]


def test_order_by_blocks_delivers_each_sample_once(packed: dict[int | str, Path], workers: Opener) -> None:
    found = []
    for how in ("fully", "partial"):
        session = workers(packed[0], how, 2, order="blocks")
        assert session.spec.dataset.blocks > 1
        found.append(digests(session.epoch()))
        labels = np.concatenate([b.labels[: session.spec.valid_rows(b.index)] for b in session.epoch()])
        assert np.bincount(labels).tolist() == [8, 8, 8]
    assert found[0] == found[1]
    assert found[0] != digests(workers(packed[0]).epoch())


BAD = {3: b"", 10: b"not a picture at all", 17: None}
"""Sample -> its new bytes; None cuts it in half."""


@pytest.fixture(scope="module")
def damaged(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("damaged") / "tree"
    shutil.copytree(tree, root)
    files = sorted((root / "train").glob("*/*"))
    with Source.open("imagenet", root, "train") as source:
        for sample, content in BAD.items():
            path = Path(source.describe(sample))
            assert path in files
            whole = path.read_bytes()
            path.write_bytes(whole[: len(whole) // 2] if content is None else content)
    return root


def test_damaged_picture_fails_the_session_and_is_named(damaged: Path, workers: Opener) -> None:
    for how in ("fully", "partial"):
        session = workers(damaged, how, shuffle=False)
        with pytest.raises(CorruptSample, match=r"damaged.*n00_3\.JPEG: .*on_corrupt substitute or blank would go on"):
            session.epoch()
        assert [(r["sample"], r["action"]) for r in session.reports] == [(3, "fail")]


@pytest.mark.parametrize("how", ["fully", "partial"])
def test_damaged_picture_keeps_nothing_mapped_without_the_garbage_collector(
    damaged: Path, workers: Opener, how: str
) -> None:
    """The frames of its error held the ring when nothing came after it in what a worker makes at once."""

    def mapped() -> set[str]:
        """Inodes of what is mapped; a mapping of an earlier test may still go away."""
        lines = Path("/proc/self/maps").read_text().splitlines()
        return {line.split()[4] for line in lines if "memfd:" in line}

    before = mapped()
    gc.disable()
    try:
        session = workers(damaged, how, batch_size=4, shuffle=False, on_corrupt=OnCorrupt.BLANK)
        session.next()
        assert [r["sample"] for r in session.reports][:1] == [3]  # the last of the batch
        readers = [t for t in threading.enumerate() if t.name == "read-ahead"]
        del session.ring, session.board
        session.close()
        for thread in readers:
            thread.join(LIMIT_SECONDS)
        del readers
        assert mapped() <= before
    finally:
        gc.enable()


@pytest.mark.parametrize("policy", [OnCorrupt.BLANK, OnCorrupt.SUBSTITUTE])
def test_damaged_pictures_under_a_policy(
    damaged: Path, workers: Opener, expected: list[tuple[np.ndarray, int]], policy: OnCorrupt
) -> None:
    order = epoch_order(SEED, 0, SAMPLES, shuffle=True)
    found = set()
    for how in ("fully", "partial"):
        for count in (1, 2, 3, 7):
            session = workers(damaged, how, count, on_corrupt=policy)
            batches = session.epoch()
            found.add(tuple(digests(batches)))
            reports = {r["sample"]: r for r in session.reports if r["epoch"] == 0}
            assert set(reports) == set(BAD)
    assert len(found) == 1
    for p, sample in enumerate(order.tolist()):
        row, label = batches[p // 7].rows[p % 7], batches[p // 7].labels[p % 7]
        report = reports.get(sample)
        if report is None:
            np.testing.assert_array_equal(row, expected[sample][0])
            assert label == expected[sample][1]
        elif policy is OnCorrupt.BLANK:
            assert (label, row.any(), report["substitute"]) == (-1, False, None)
        else:
            other = next(s for s in substitutes(SEED, 0, False, sample, SAMPLES) if s not in BAD)
            assert (report["substitute"], label) == (other, expected[other][1])
            with Source.open("imagenet", damaged, "train") as source:
                stored = np.frombuffer(source.read(other), np.uint8)
                wanted = np.zeros_like(row)
                recipe = compile_pictures(RECIPE, DType.UINT8, 3)
                recipe.make(stored, source.spec.encoding, sample, SEED, 0, False, wanted)
            np.testing.assert_array_equal(row, wanted)


def test_picture_unreadable_when_the_set_was_loaded_is_damaged_in_every_session(
    tree: Path, workers: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unreadable(Source):
        def read_into(self, sample: int, out: memoryview) -> int:
            if sample == 6:
                raise CorruptSample("sample 6 cannot be read: Input/output error")
            return super().read_into(sample, out)

    for module in (filling, makers):
        monkeypatch.setattr(module, "Source", Unreadable)
    fully = workers(tree, "fully", on_corrupt=OnCorrupt.SUBSTITUTE)
    partial = workers(tree, "partial", on_corrupt=OnCorrupt.SUBSTITUTE)
    assert digests(fully.epoch()) == digests(partial.epoch())
    texts = {str(r["text"]) for r in fully.reports + partial.reports}
    assert texts == {"sample 6 cannot be read: Input/output error"}


def test_picture_that_changed_after_it_was_indexed_is_damaged_not_another_picture(
    tree: Path, workers: Opener, tmp_path: Path
) -> None:
    root = tmp_path / "tree"
    shutil.copytree(tree, root)
    session = workers(root, "partial", shuffle=False, on_corrupt=OnCorrupt.BLANK)
    with Source.open("imagenet", root, "train") as source:
        gone, grown = Path(source.describe(2)), Path(source.describe(5))
    gone.unlink()
    grown.write_bytes(grown.read_bytes() + b"more")
    labels = session.next().labels
    assert [sample for sample in range(7) if labels[sample] < 0] == [2, 5]
    assert {str(gone.name) in str(r["text"]) or str(grown.name) in str(r["text"]) for r in session.reports} == {True}
