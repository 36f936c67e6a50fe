"""Images of one size read by record, and any set attached in another process, equal to the set in memory (law 1)."""

import gzip
import os
import pickle
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from source_builders import (
    cifar_records,
    grow_tree,
    idx_images,
    idx_labels,
    packed,
    put,
    small_dts,
)

from renaissance.core.errors import (
    CorruptSample,
    DigestMismatch,
    FormatError,
    MissingFileError,
    RenaissanceError,
    ValueRejected,
)
from renaissance.data.formats import open_dataset
from renaissance.data.sources import Encoding, Source

N = 7
RNG = np.random.default_rng(3)
GREY = RNG.integers(0, 256, (N, 28, 28, 1), dtype=np.uint8)
COLOR = RNG.integers(0, 256, (N, 32, 32, 3), dtype=np.uint8)
LABELS = [3, 0, 9, 1, 1, 7, 2]
IMAGES = {"mnist": GREY, "cifar10": COLOR, "cifar100": COLOR}


def write_raw(folder: Path, name: str) -> list[Path]:
    """The published form; CIFAR-10 in five files of 2, 1, 1, 1 and 2 records."""
    if name == "mnist":
        files = {"train-images-idx3-ubyte": idx_images(GREY), "train-labels-idx1-ubyte": idx_labels(LABELS)}
    elif name == "cifar100":
        files = {"cifar-100-binary/train.bin": cifar_records([(19 - k, k) for k in LABELS], COLOR)}
    else:
        parts = zip([(0, 2), (2, 3), (3, 4), (4, 5), (5, 7)], range(1, 6), strict=True)
        files = {
            f"cifar-10-batches-bin/data_batch_{number}.bin": cifar_records([(k,) for k in LABELS[a:b]], COLOR[a:b])
            for (a, b), number in parts
        }
    for path, data in files.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(data)
    return [folder / path for path in files]


def write_dts(folder: Path, name: str) -> list[Path]:
    path = folder / f"{name}_train.dts"
    path.write_bytes(small_dts(name, LABELS, IMAGES[name]))
    return [path]


WRITERS = {"raw": write_raw, "dts": write_dts}
SETS = [(name, format) for name in IMAGES for format in WRITERS]


@pytest.mark.parametrize(("name", "format"), SETS)
def test_every_record_equals_the_set_in_memory(tmp_path, name, format):
    files = WRITERS[format](tmp_path, name)
    whole = open_dataset(name, tmp_path, "train")
    with Source.open(name, tmp_path, "train") as source:
        spec = source.spec
        assert (spec.name, spec.format, spec.encoding, spec.level, spec.tree) == (
            name,
            format,
            Encoding.PIXELS,
            None,
            False,
        )
        assert (spec.samples, spec.height, spec.width, spec.channels) == IMAGES[name].shape
        assert (spec.largest, spec.stored_bytes) == (IMAGES[name][0].size, IMAGES[name].nbytes)
        assert source.labels.tolist() == whole.labels.tolist() == LABELS
        assert source.sizes.tolist() == [IMAGES[name][0].size] * N
        assert source.block_starts is None
        out = bytearray(spec.largest + 3)
        for sample in (*range(N), 0, N - 1):
            assert source.read_into(sample, memoryview(out)) == spec.largest
            assert out[: spec.largest] == whole.images[sample].tobytes() == IMAGES[name][sample].tobytes()
            assert out[spec.largest :] == bytes(3)
        data_files = [str(path) for path in files if "labels" not in path.name]
        assert list(spec.files) == data_files
        assert source.describe(N - 1).startswith(data_files[-1])


def test_records_are_counted_in_their_own_file(tmp_path):
    files = write_raw(tmp_path, "cifar10")
    with Source.open("cifar10", tmp_path, "train") as source:
        assert source.describe(1) == f"{files[0]}, record 1 (offset 3074)"
        assert source.describe(2) == f"{files[1]}, record 0 (offset 1)"
        assert source.describe(6) == f"{files[4]}, record 1 (offset 3074)"


def test_files_directly_in_the_folder_and_the_size_of_reading_do_not_matter(tmp_path, monkeypatch):
    for path in write_raw(tmp_path, "cifar10"):
        path.rename(tmp_path / path.name)
    monkeypatch.setattr("renaissance.data.sources.pixels._RECORDS_AT_ONCE", 1)
    with Source.open("cifar10", tmp_path, "train") as source:
        assert [source.read(k) for k in range(N)] == [image.tobytes() for image in COLOR]


@pytest.mark.parametrize("kind", ["packed", "cifar10", "tree"])
def test_a_folder_whose_name_is_no_text_is_shown_with_escapes(tmp_path, kind):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/s\xe9t"))
    folder.mkdir()
    if kind == "tree":
        grow_tree(folder, "train", {"a": {"x.jpg": b"x"}})
    elif kind == "packed":
        packed(0).write(folder)
    else:
        write_raw(folder, kind)
    with Source.open("cifar10" if kind == "cifar10" else "imagenet", folder, "train") as source:
        assert source.read(0)
        for text in (source.spec.source, source.describe(0)):
            assert "/s\\xe9t" in text
            assert text.isprintable()
        os.rename(folder, tmp_path / "gone")
        source.close()
        with pytest.raises(RenaissanceError, match=r"/s\\xe9t"):
            source.read(0)


def test_the_packed_file_comes_first_unless_the_other_is_asked_for(tmp_path):
    write_raw(tmp_path, "mnist")
    write_dts(tmp_path, "mnist")
    assert Source.open("mnist", tmp_path, "train").spec.format == "dts"
    assert Source.open("mnist", tmp_path, "train", format="raw").spec.format == "raw"


@pytest.mark.parametrize("which", [0, 1])
def test_compressed_idx_images_are_refused_with_what_to_do(tmp_path, which):
    path = write_raw(tmp_path, "mnist")[which]
    path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes(), 1))
    path.unlink()
    if which == 1:  # labels are read whole anyway
        assert Source.open("mnist", tmp_path, "train").labels.tolist() == LABELS
        return
    with pytest.raises(ValueRejected, match=r"ubyte.gz: is compressed.*gunzip -k.*renaissance pack mnist"):
        Source.open("mnist", tmp_path, "train")


def test_an_archive_is_refused_with_what_to_do(tmp_path):
    for path in write_raw(tmp_path, "cifar10"):
        path.unlink()
    with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz"):
        pass
    with pytest.raises(ValueRejected, match=r"tar.gz: is compressed.*tar -xzf.*renaissance pack cifar10"):
        Source.open("cifar10", tmp_path, "train")


DTS_SIZE = 256 + N + GREY.nbytes


@pytest.mark.parametrize(
    ("name", "format", "number", "at", "data", "message"),
    [
        ("mnist", "dts", 0, 16, b"\0", "this is the other split"),
        ("mnist", "dts", 0, 36, b"\x1d", "image width is 29"),
        ("mnist", "dts", 0, 200, b"\1", "offset 200: reserved byte"),
        ("mnist", "dts", 0, 52, b"\6", "is 5751 bytes long|total bytes"),
        ("mnist", "dts", 0, 258, b"\x0a", r"record 2 \(offset 258\): label is 10"),
        ("mnist", "dts", 0, DTS_SIZE, b"x", "do not belong"),
        ("cifar100", "dts", 0, 8, b" CIFAR10", "data set is ' CIFAR10'; expected 'CIFAR100'"),
        ("mnist", "raw", 0, 0, b"\1", "idx magic"),
        ("mnist", "raw", 0, 0, struct.pack(">I", 2049), "idx magic is 2049; expected 2051|its header makes"),
        ("mnist", "raw", 0, 4, struct.pack(">I", 8), "its header makes"),
        ("mnist", "raw", 0, 8, struct.pack(">I", 14), "images of 14 x 28"),
        ("mnist", "raw", 1, 8, b"\x0a", r"record 0 \(offset 8\): label is 10"),
        ("mnist", "raw", 1, 0, idx_labels(LABELS)[:4] + struct.pack(">I", 6), "bytes"),
        ("cifar10", "raw", 4, 3073, b"\x0a", r"data_batch_5.bin: record 1 \(offset 3073\): label is 10"),
        ("cifar10", "raw", 1, 3073, b"x", "record 1"),
        ("cifar100", "raw", 0, 2 * 3074, b"\x14", r"record 2 \(offset 6148\): coarse label is 20"),
        ("cifar100", "raw", 0, 2 * 3074 + 1, b"\x64", r"record 2 \(offset 6149\): fine label is 100"),
    ],
)
def test_damage_is_named_when_a_set_is_opened(tmp_path, name, format, number, at, data, message):
    path = WRITERS[format](tmp_path, name)[number]
    put(path, at, data)
    with pytest.raises(FormatError, match=message) as caught:
        Source.open(name, tmp_path, "train")
    assert str(path) in str(caught.value)


def test_unequal_counts_are_named(tmp_path):
    path = write_raw(tmp_path, "mnist")[1]
    path.write_bytes(idx_labels(LABELS[:-1]))
    with pytest.raises(FormatError, match="7 images but 6 labels"):
        Source.open("mnist", tmp_path, "train")


@pytest.mark.parametrize("name", list(IMAGES))
def test_verify_reads_the_pixels_of_packed_files(tmp_path, name):
    path = write_dts(tmp_path, name)[0]
    Source.open(name, tmp_path, "train", verify=True).close()
    put(path, path.stat().st_size - 1, bytes([int(IMAGES[name].flat[-1]) ^ 1]))
    Source.open(name, tmp_path, "train").close()
    with pytest.raises(DigestMismatch, match="CRC-32 of the body"):
        Source.open(name, tmp_path, "train", verify=True)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"level": 1}, ValueRejected, "only packed pictures have levels"),
        ({"format": "raw", "verify": True}, ValueRejected, "no checksums"),
        ({"format": "dts"}, MissingFileError, "mnist_train.dts: no such file; make it with `renaissance pack mnist`"),
        ({"split": "val"}, MissingFileError, "no t10k-images-idx3-ubyte and no .*, or a packed mnist_test.dts"),
        ({"name": "cifar10"}, MissingFileError, "no data_batch_1.bin"),
    ],
)
def test_impossible_requests_are_named(tmp_path, options, error, message):
    write_raw(tmp_path, "mnist")
    with pytest.raises(error, match=message):
        Source.open(**{"name": "mnist", "folder": tmp_path, "split": "train"} | options)


@pytest.mark.parametrize(("name", "format"), SETS)
def test_a_file_cut_or_replaced_while_served_is_noticed(tmp_path, name, format):
    path = next(p for p in reversed(WRITERS[format](tmp_path, name)) if "labels" not in p.name)
    with Source.open(name, tmp_path, "train") as source:
        source.read(N - 1)
        os.truncate(path, path.stat().st_size - 5)
        for _ in range(2):
            with pytest.raises(FormatError, match=f"{path}: changed since the set was opened"):
                source.read(N - 1)
            source.close()


@pytest.mark.parametrize(("name", "format"), SETS)
def test_bytes_that_cannot_be_had_are_damage(tmp_path, monkeypatch, name, format):
    WRITERS[format](tmp_path, name)
    with Source.open(name, tmp_path, "train") as source:
        monkeypatch.setattr(os, "preadv", lambda *_: 0)
        with pytest.raises(CorruptSample, match=r", record \d \(offset \d+\): only 0 of"):
            source.read(N - 1)


# Another process: the spec crosses as a pickle, the index as shared bytes.

READ_ALL = """
import mmap, pickle, sys
from renaissance.data.sources import Source
spec = pickle.load(open(sys.argv[1], "rb"))
with open(sys.argv[2], "rb") as file:
    index = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
with Source.attach(spec, memoryview(index)) as source:
    stored = [source.read(k) for k in range(spec.samples)]
    places = [source.describe(k) for k in range(spec.samples)]
    starts = None if source.block_starts is None else source.block_starts.tolist()
    writeable = source.labels.flags.writeable
    pickle.dump((stored, places, source.labels.tolist(), source.sizes.tolist(), starts, writeable), sys.stdout.buffer)
"""


@pytest.mark.parametrize("kind", ["packed", "tree", "cifar10"])
def test_another_process_reads_the_same_bytes_from_the_same_index(tmp_path, kind):
    if kind == "packed":
        packed(1).write(tmp_path)
    elif kind == "tree":
        grow_tree(tmp_path, "train", {"b": {"1.jpg": b"b1", "2.jpg": b"b22"}, b"\xff": {b"\xfe.jpg": b"f"}})
    else:
        write_raw(tmp_path, "cifar10")
    source = Source.open("cifar10" if kind == "cifar10" else "imagenet", tmp_path, "train")
    (tmp_path / "spec").write_bytes(pickle.dumps(source.spec))
    index = bytearray(source.spec.index_bytes)
    source.write_index(memoryview(index))
    (tmp_path / "index").write_bytes(index)
    assert len(index) % 4096 == 0
    run = subprocess.run(
        [sys.executable, "-c", READ_ALL, tmp_path / "spec", tmp_path / "index"], capture_output=True, check=True
    )
    stored, places, labels, sizes, starts, writeable = pickle.loads(run.stdout)
    assert stored == [source.read(k) for k in range(source.spec.samples)]
    assert places == [source.describe(k) for k in range(source.spec.samples)]
    assert (labels, sizes) == (source.labels.tolist(), source.sizes.tolist())
    assert starts == (None if source.block_starts is None else source.block_starts.tolist())
    assert not writeable
    source.close()


def test_an_index_needs_its_whole_buffer(tmp_path):
    source = Source.open("imagenet", packed(0).write(tmp_path).parent, "train")
    for call in (source.write_index, lambda buffer: Source.attach(source.spec, buffer)):
        with pytest.raises(ValueRejected, match="the buffer has 4095 bytes; expected at least 4096"):
            call(memoryview(bytearray(4095)))
