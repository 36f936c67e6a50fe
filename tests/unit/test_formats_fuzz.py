"""Arbitrary and mutated bytes: a parser gives a data set or one of the project's errors, in little memory."""

import gzip
import io
import struct
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renaissance.core.errors import RenaissanceError
from renaissance.data.formats.archive import extract_archive
from renaissance.data.formats.cifar import CIFAR_LAYOUTS, read_cifar_archive, read_cifar_file
from renaissance.data.formats.dts import read_dts, read_dts_header, write_dts
from renaissance.data.formats.idx import read_idx, read_idx_header, read_raw_mnist

PEAK_LIMIT = 4 << 20
"""Bytes; the largest input below is a few kilobytes, and one chunk of reading is a megabyte."""

MUTATION = st.tuples(st.sampled_from(["set", "cut", "insert", "word"]), st.integers(0, 4000), st.binary(max_size=12))
EXTREMES = [0, 1, 255, 256, 2**31 - 1, 2**31, 2**32 - 1]


def zipped(data: bytes) -> bytes:
    return gzip.compress(data, compresslevel=1, mtime=0)  # without the time of day an example can be replayed


def mutate(data: bytes, changes: list[tuple[str, int, bytes]]) -> bytes:
    mutable = bytearray(data)
    for kind, at, extra in changes:
        at %= len(mutable) + 1
        if kind == "set":
            mutable[at : at + len(extra)] = extra
        elif kind == "cut":
            del mutable[at:]
        elif kind == "insert":
            mutable[at:at] = extra
        else:  # a whole field at once: what a damaged or hostile header looks like
            at -= at % 4
            mutable[at : at + 4] = struct.pack("<I" if len(extra) % 2 else ">I", EXTREMES[len(extra) % len(EXTREMES)])
    return bytes(mutable)


def survives(read: Callable[[Path], object], path: Path) -> None:
    """Call a reader; any exception but the project's own fails the test, and so does much memory."""
    message = str(path)
    tracemalloc.start()
    try:
        read(path)
    except RenaissanceError as error:
        message = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert str(path) in message
    assert peak < PEAK_LIMIT


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def good_dts(folder: Path) -> bytes:
    path = folder / "good.dts"
    images = np.random.default_rng(0).integers(0, 256, (3, 28, 28, 1), dtype=np.uint8)
    write_dts(path, "mnist", "train", np.array([1, 2, 3], dtype=np.uint8), images)
    return path.read_bytes()


GOOD_IMAGES = struct.pack(">4I", 2051, 3, 28, 28) + bytes(range(256)) * 9 + bytes(48)
GOOD_LABELS = struct.pack(">2I", 2049, 3) + bytes([1, 2, 3])


@given(changes=st.lists(MUTATION, min_size=1, max_size=4), verify=st.booleans())
@settings(deadline=None, max_examples=250)
def test_mutated_dts_gives_samples_or_our_error(folder, good_dts, changes, verify):
    path = folder / "mutated.dts"
    path.write_bytes(mutate(good_dts, changes))
    survives(lambda p: read_dts(p, verify=verify), path)
    survives(read_dts_header, path)


@given(data=st.binary(max_size=600), magic=st.booleans())
@settings(deadline=None, max_examples=100)
def test_arbitrary_bytes_are_no_dts(folder, data, magic):
    path = folder / "arbitrary.dts"
    path.write_bytes(b".DTS\3\0\0\0   MNIST" * magic + data)
    with pytest.raises(RenaissanceError):
        read_dts(path)
    survives(read_dts, path)


@given(changes=st.lists(MUTATION, min_size=1, max_size=4), compressed=st.booleans(), damage_inside=st.booleans())
@settings(deadline=None, max_examples=250)
def test_mutated_idx_gives_arrays_or_our_error(folder, changes, compressed, damage_inside):
    path = folder / "mutated-idx"
    if not compressed:
        data = mutate(GOOD_IMAGES, changes)
    elif damage_inside:
        data = zipped(mutate(GOOD_IMAGES, changes))
    else:
        data = mutate(zipped(GOOD_IMAGES), changes)
    path.write_bytes(data)
    survives(read_idx, path)
    survives(read_idx_header, path)


@given(images=st.lists(MUTATION, max_size=2), labels=st.lists(MUTATION, max_size=2))
@settings(deadline=None, max_examples=100)
def test_mutated_pair_gives_samples_or_our_error(folder, images, labels):
    pair = folder / "pair"
    pair.mkdir(exist_ok=True)
    (pair / "train-images-idx3-ubyte").write_bytes(mutate(GOOD_IMAGES, images))
    (pair / "train-labels-idx1-ubyte").write_bytes(mutate(GOOD_LABELS, labels))
    survives(lambda p: read_raw_mnist(p, "train"), pair)


RECORDS = b"".join(bytes([label]) + bytes(range(256)) * 12 for label in (3, 0, 9))


def tarred(names: list[str]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = len(RECORDS)
            tar.addfile(info, io.BytesIO(RECORDS))
    return made.getvalue()


GOOD_TAR = tarred(["cifar-10-batches-bin/test_batch.bin"])
LONG_TAR = tarred(["cifar-10-batches-bin/" + "x" * 200, "cifar-10-batches-bin/test_batch.bin"])  # has a PAX header


@given(changes=st.lists(MUTATION, min_size=1, max_size=4))
@settings(deadline=None, max_examples=100)
def test_mutated_records_give_samples_or_our_error(folder, changes):
    path = folder / "test_batch.bin"
    path.write_bytes(mutate(RECORDS, changes))
    survives(lambda p: read_cifar_file(p, CIFAR_LAYOUTS["cifar10"]), path)


@given(
    tar=st.sampled_from([GOOD_TAR, LONG_TAR]),
    changes=st.lists(MUTATION, min_size=1, max_size=4),
    damage_inside=st.booleans(),
    compressed=st.booleans(),
)
@settings(deadline=None, max_examples=250)
def test_mutated_archive_gives_samples_or_our_error(folder, tar, changes, damage_inside, compressed):
    path = folder / "cifar-10-binary.tar.gz"
    if not compressed:
        path.write_bytes(mutate(tar, changes))
    else:
        path.write_bytes(zipped(mutate(tar, changes)) if damage_inside else mutate(zipped(tar), changes))
    survives(lambda p: read_cifar_archive(p, CIFAR_LAYOUTS["cifar10"], "val"), path)
    survives(lambda p: extract_archive(p, folder, "cifar-10-batches-bin"), path)
    assert not list(folder.glob(".*.tmp"))


def test_the_unmutated_files_are_good(folder, good_dts):
    for name, data in (("images", GOOD_IMAGES), ("images.gz", zipped(GOOD_IMAGES)), ("set.dts", good_dts)):
        (folder / name).write_bytes(data)
    assert read_idx(folder / "images")[1].shape == (3, 28, 28)
    assert read_idx(folder / "images.gz")[1].shape == (3, 28, 28)
    assert read_dts(folder / "set.dts")[1].tolist() == [1, 2, 3]
    for tar in (GOOD_TAR, zipped(LONG_TAR)):
        (folder / "set.tar").write_bytes(tar)
        assert read_cifar_archive(folder / "set.tar", CIFAR_LAYOUTS["cifar10"], "val")[0].tolist() == [3, 0, 9]
