"""Damaged and hostile sets: opening and reading give samples or one of the project's errors, in little memory (law 7).

The same examples in every run. ``FUZZ_EXAMPLES=25000 pytest tests/unit/test_sources_fuzz.py`` makes that many new ones
for each of the four tests.
"""

import gzip
import os
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from source_builders import AT, Packed, cifar_records, grow_tree, idx_images, idx_labels, packed, small_dts

from renaissance.core.errors import CorruptSample, RenaissanceError
from renaissance.data.sources import Source

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
PEAK_LIMIT = 4 << 20
"""Bytes; the largest input is 35 kB."""


def fuzz(examples: int) -> settings:
    checks = list(HealthCheck)
    return settings(
        deadline=None,
        max_examples=EXAMPLES or examples,
        derandomize=not EXAMPLES,
        database=None,
        suppress_health_check=checks,
    )


EXTREMES = [0, 1, 2, 63, 64, 255, 256, 4095, 4096, 8192, 2**31 - 1, 2**31, 2**32 - 64, 2**32 - 1]
WORD = st.one_of(st.sampled_from(EXTREMES), st.integers(0, 2**32 - 1))


def changes(offsets: list[int], size: int) -> st.SearchStrategy:
    """Lists of changes: a word where the format keeps one or anywhere, some bytes, a cut, or bytes put in."""
    anywhere = st.integers(0, size)
    return st.lists(
        st.one_of(
            st.tuples(st.just("word"), st.sampled_from(offsets), WORD),
            st.tuples(st.just("step"), st.sampled_from(offsets), st.integers(-2, 2)),
            st.tuples(st.just("set"), anywhere, st.binary(min_size=1, max_size=12)),
            st.tuples(st.just("cut"), anywhere, st.none()),
            st.tuples(st.just("insert"), anywhere, st.binary(max_size=70)),
        ),
        min_size=1,
        max_size=4,
    )


def mutate(data: bytes, wanted: list[tuple], big_endian: bool = False) -> bytes:
    mutable, order = bytearray(data), ">" if big_endian else "<"
    for kind, at, what in wanted:
        at = min(at, len(mutable))
        if kind == "set":
            mutable[at : at + len(what)] = what
        elif kind == "cut":
            del mutable[at:]
        elif kind == "insert":
            mutable[at:at] = what
        elif len(mutable) >= at + 4:  # a whole field at once: what a hostile file looks like
            old = struct.unpack_from(f"{order}I", mutable, at)[0]
            new = what if kind == "word" else (old + what) % 2**32
            struct.pack_into(f"{order}I", mutable, at, new)
    return bytes(mutable)


def survives(opened: Callable[[], Source], folder: Path) -> None:
    """Open a set and read all of it; any exception but the project's own fails the test, and so does much memory."""
    before, refused = len(os.listdir("/proc/self/fd")), None
    tracemalloc.start()
    try:
        with opened() as source:
            read_all(source, folder)
    except RenaissanceError as error:
        refused = error
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert refused is None or str(folder) in str(refused)
    assert not isinstance(refused, CorruptSample)
    assert peak < PEAK_LIMIT
    assert len(os.listdir("/proc/self/fd")) == before


def read_all(source: Source, folder: Path) -> None:
    spec = source.spec
    assert source.labels.size == source.sizes.size == spec.samples > 0
    assert 0 <= source.labels.min() <= source.labels.max() < spec.num_classes
    assert spec.stored_bytes == source.sizes.sum() <= sum(stamp.size for stamp in spec.stamps)
    assert spec.largest == source.sizes.max()
    for sample in range(spec.samples):
        place = source.describe(sample)
        assert str(folder) in place
        try:
            stored = source.read(sample)
        except CorruptSample as error:
            if place not in str(error):
                raise
        else:
            assert len(stored) == source.size(sample) > 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def tiny(level: int | str) -> Packed:
    built = packed(level, block_bytes=4096, block_header=192)
    built.blocks = [[(p[: 60 + k], k % 5) for k, (p, _) in enumerate(block)] for block in built.blocks[:2]]
    return built


PACKED = {level: tiny(level).bytes() for level in (0, "RAW")}
NAMES = {0: "imagenet_train_lv0.dts", "RAW": "imagenet_train_raw.dts"}
TABLES = [4096 * block + 4 * word for block in (1, 2) for word in range(13)]


@given(level=st.sampled_from([0, "RAW"]), wanted=changes([*AT.values(), *TABLES], 3 * 4096), verify=st.booleans())
@fuzz(250)
def test_a_mutated_packed_file_gives_pictures_or_our_error(folder, level, wanted, verify):
    place = folder / "packed"
    place.mkdir(exist_ok=True)
    (place / NAMES[level]).write_bytes(mutate(PACKED[level], wanted))
    survives(lambda: Source.open("imagenet", place, "train", level=level, verify=verify), place)


RNG = np.random.default_rng(5)
GREY = RNG.integers(0, 256, (3, 28, 28, 1), dtype=np.uint8)
COLOR = RNG.integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
SMALL = {
    "mnist": ("mnist_train.dts", small_dts("mnist", [1, 2, 3], GREY)),
    "cifar10": ("cifar10_train.dts", small_dts("cifar10", [1, 2, 3], COLOR)),
    "cifar100": ("train.bin", cifar_records([(1, 2), (3, 4), (5, 6)], COLOR)),
}


@given(name=st.sampled_from(list(SMALL)), wanted=changes([*AT.values(), 256, 3074, 6148], 9500), verify=st.booleans())
@fuzz(200)
def test_a_mutated_file_of_small_images_gives_images_or_our_error(folder, name, wanted, verify):
    place = folder / "small"
    place.mkdir(exist_ok=True)
    file, data = SMALL[name]
    (place / file).write_bytes(mutate(data, wanted))
    survives(lambda: Source.open(name, place, "train", verify=verify), place)


@given(
    images=changes([0, 4, 8, 12], 2400) | st.just([]),
    labels=changes([0, 4], 11) | st.just([]),
    zipped=st.sampled_from([None, "before", "after"]),
)
@fuzz(200)
def test_mutated_idx_files_give_images_or_our_error(folder, images, labels, zipped):
    place = folder / "idx"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    data = idx_labels([1, 2, 3])
    if zipped == "before":
        data = gzip.compress(mutate(data, labels, True), 1, mtime=0)
    elif zipped == "after":
        data = mutate(gzip.compress(data, 1, mtime=0), labels, True)
    else:
        data = mutate(data, labels, True)
    (place / f"train-labels-idx1-ubyte{'.gz' if zipped else ''}").write_bytes(data)
    (place / "train-images-idx3-ubyte").write_bytes(mutate(idx_images(GREY), images, True))
    survives(lambda: Source.open("mnist", place, "train"), place)


# Trees: whatever names and kinds of entries there are, the result is what a plain listing says, or our error.

NAME = st.one_of(
    st.sampled_from(
        [b"a.JPEG", b"b.jpg", b"B.Jpg", b".a.jpg", b"x.txt", b"jpg", b"\xff\xfe.jpeg", b"a\n.jpg", b"a.jpg "]
    ),
    st.binary(min_size=1, max_size=12).map(lambda b: b.replace(b"/", b"_").replace(b"\0", b"_") + b".jpg"),
)
CLASS = st.one_of(
    st.sampled_from([b"n01", b"n02", b"N01", b".git", b"\xff", b"a.jpg", b"new\nline", b"\xc3\xa4"]),
    st.binary(min_size=1, max_size=5).map(lambda b: b.replace(b"/", b"_").replace(b"\0", b"_") + b"k"),
)
KIND = st.sampled_from(["file"] * 12 + ["empty", "folder", "link", "pipe"])
FOLDERS = st.dictionaries(CLASS, st.dictionaries(NAME, KIND, max_size=6), max_size=5)


def grow(root: Path, split: str, classes: dict[bytes, dict[bytes, str]]) -> None:
    (root / split).mkdir()
    for class_name, files in classes.items():
        plain = {
            name: b"" if kind == "empty" else name + b"!" for name, kind in files.items() if kind in ("file", "empty")
        }
        grow_tree(root, split, {class_name: plain})
        for name, kind in files.items():
            path = os.path.join(os.fsencode(root), os.fsencode(split), class_name, name)
            if kind == "folder":
                os.mkdir(path)
            elif kind == "link":
                os.symlink(b"/etc/passwd", path)
            elif kind == "pipe":
                os.mkfifo(path)


def expected(classes: dict[bytes, dict[bytes, str]], known: list[bytes]) -> list[tuple[int, bytes, str]] | None:
    """(label, name, kind) of every picture in order; None when the tree must be refused."""
    found = []
    for class_name in sorted(name for name in classes if not name.startswith(b".")):
        if class_name not in known:
            return None
        pictures = sorted(
            name
            for name in classes[class_name]
            if not name.startswith(b".") and name.lower().endswith((b".jpg", b".jpeg"))
        )
        if any(classes[class_name][name] not in ("file", "empty") for name in pictures):
            return None
        found += [(known.index(class_name), name, classes[class_name][name]) for name in pictures]
    return found or None


@given(train=FOLDERS, val=FOLDERS, split=st.sampled_from(["train", "val"]), same=st.booleans())
@fuzz(150)
def test_any_tree_is_read_as_a_plain_listing_says_or_refused(folder, train, val, split, same):
    root = folder / "tree"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    grow(root, "train", train)
    grow(root, "val", train if same else val)
    known = sorted(name for name in train if not name.startswith(b"."))
    wanted = expected(train if same or split == "train" else val, known)
    if split == "train" and {label for label, _, _ in wanted or []} != set(range(len(known))):
        wanted = None  # a training class without pictures
    refused = None
    before = len(os.listdir("/proc/self/fd"))
    try:
        with Source.open("imagenet", root, split, format="raw") as source:
            assert wanted is not None
            assert source.labels.tolist() == [label for label, _, _ in wanted]
            for sample, (_, name, kind) in enumerate(wanted):
                if kind == "empty":
                    with pytest.raises(CorruptSample, match="is empty"):
                        source.read_into(sample, memoryview(bytearray(64)))
                else:
                    assert source.read(sample) == name + b"!"
                assert source.describe(sample).isprintable()
    except RenaissanceError as error:
        refused = error
    if refused is not None:
        assert wanted is None, refused
        assert str(root) in str(refused)
        assert str(refused).isprintable()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_unmutated_sets_are_good(tmp_path):
    for level, data in PACKED.items():
        (tmp_path / NAMES[level]).write_bytes(data)
        with Source.open("imagenet", tmp_path, "train", level=level, verify=True) as source:
            assert source.spec.samples == 4
    for name, (file, data) in SMALL.items():
        (tmp_path / file).write_bytes(data)
        with Source.open(name, tmp_path, "train") as source:
            assert len(source.read(2)) == source.spec.largest
