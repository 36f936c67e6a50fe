"""CIFAR as published: one set of pixels wherever the files lie, planes interleaved, and every kind of damage named."""

import gzip
import io
import shutil
import tarfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from renaissance.cli import main as cli
from renaissance.core.errors import FormatError, MissingFileError
from renaissance.data.formats import archive as archives
from renaissance.data.formats import dataset_files, open_dataset
from renaissance.data.formats.cifar import (
    CIFAR_LAYOUTS,
    check_cifar_file,
    find_cifar,
    interleaved,
    read_cifar_file,
    read_raw_cifar10,
    read_raw_cifar100,
)

COUNTS = {"data_batch_1.bin": 3, "data_batch_2.bin": 1, "data_batch_3.bin": 4, "data_batch_4.bin": 2}
COUNTS |= {"data_batch_5.bin": 2049, "test_batch.bin": 5, "train.bin": 7, "test.bin": 2}
TRAIN = [f"data_batch_{i}.bin" for i in range(1, 6)]


def record(generator: np.random.Generator, labels: list[int]) -> bytes:
    return bytes(labels) + generator.integers(0, 256, 3072, dtype=np.uint8).tobytes()


def content(name: str, seed: int = 0) -> bytes:
    """A file of ``COUNTS[name]`` records, made from the format's description alone."""
    generator = np.random.default_rng([seed, *name.encode()])
    if name.startswith(("train", "test.")):
        rows = [[int(generator.integers(20)), int(generator.integers(100))] for _ in range(COUNTS[name])]
    else:
        rows = [[int(generator.integers(10))] for _ in range(COUNTS[name])]
    return b"".join(record(generator, labels) for labels in rows)


def fill(folder: Path, names: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(content(name))
    return folder


def archive(path: Path, folder: str, names: list[str], extra: list[tarfile.TarInfo] = ()) -> Path:
    with tarfile.open(path, "w:gz", compresslevel=1) as tar:
        for info in extra:
            tar.addfile(info, io.BytesIO(b"?" * info.size))
        for name in names:
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size = len(content(name))
            tar.addfile(info, io.BytesIO(content(name)))
    return path


@pytest.fixture
def ten(tmp_path: Path) -> Path:
    """A data folder with both splits of a tiny CIFAR-10 in the published sub-folder."""
    fill(tmp_path / "cifar-10-batches-bin", [*TRAIN, "test_batch.bin"])
    return tmp_path


def test_planes_become_interleaved_pixels(ten):
    labels, images, _ = read_raw_cifar10(ten, "val")
    data = content("test_batch.bin")
    for sample in range(5):
        at = sample * 3073
        assert labels[sample] == data[at]
        for channel, row, column in [(0, 0, 0), (0, 0, 31), (1, 7, 2), (2, 31, 31)]:
            assert images[sample, row, column, channel] == data[at + 1 + channel * 1024 + row * 32 + column]


def test_fine_labels_count(tmp_path):
    fill(tmp_path, ["train.bin", "test.bin"])
    labels, images, _ = read_raw_cifar100(tmp_path, "train")
    data = content("train.bin")
    assert labels.tolist() == [data[i * 3074 + 1] for i in range(7)]
    assert images[6, 3, 4].tolist() == [data[6 * 3074 + 2 + c * 1024 + 3 * 32 + 4] for c in range(3)]


def test_batches_come_one_after_the_other(ten):
    labels, images, source = read_raw_cifar10(ten, "train")
    assert source.endswith("data_batch_1.bin to data_batch_5.bin")
    assert (labels.shape, images.shape) == ((2059,), (2059, 32, 32, 3))
    first = 0
    for name in TRAIN:
        part, pixels = read_cifar_file(ten / "cifar-10-batches-bin" / name, CIFAR_LAYOUTS["cifar10"])
        assert np.array_equal(labels[first : first + COUNTS[name]], part)
        assert np.array_equal(images[first : first + COUNTS[name]], pixels)
        first += COUNTS[name]


@pytest.mark.parametrize("split", ["train", "val"])
def test_every_place_gives_the_same_pixels(ten, tmp_path_factory, split):
    flat, packed = tmp_path_factory.mktemp("flat"), tmp_path_factory.mktemp("packed")
    fill(flat, [*TRAIN, "test_batch.bin"])
    # In another order than the samples', as in the published archive.
    archive(packed / "cifar-10-binary.tar.gz", "cifar-10-batches-bin", ["test_batch.bin", *reversed(TRAIN)])
    labels, images, _ = read_raw_cifar10(ten, split)
    for folder in (flat, packed):
        others, pixels, source = read_raw_cifar10(folder, split)
        assert str(folder) in source
        assert np.array_equal(labels, others)
        assert np.array_equal(images, pixels)
    assert find_cifar(packed, "cifar10", split) is None


def test_record_layout_says_where_one_sample_is(tmp_path):
    # What reading single samples from the file relies on.
    for name, file in (("cifar10", "test_batch.bin"), ("cifar100", "test.bin")):
        layout, path = CIFAR_LAYOUTS[name], fill(tmp_path, [file]) / file
        labels, images = read_cifar_file(path, layout)
        one = path.read_bytes()[layout.record_bytes :][: layout.record_bytes]
        assert one[layout.label_offset] == labels[1]
        assert np.array_equal(interleaved(np.frombuffer(one[layout.pixel_offset :], np.uint8))[0], images[1])


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_packed_and_published_give_equal_arrays(tmp_path, capsys, name):
    layout = CIFAR_LAYOUTS[name]
    fill(tmp_path / layout.folder, [file for files in layout.files.values() for file in files])
    assert cli.main(["pack", name, "--input", str(tmp_path), "--output", str(tmp_path)]) == 0
    for split in ("train", "val"):
        raw, packed = (open_dataset(name, tmp_path, split, format) for format in ("raw", "dts"))
        assert (raw.format, packed.format) == ("raw", "dts")
        assert np.array_equal(raw.images, packed.images)
        assert np.array_equal(raw.labels, packed.labels)
    assert cli.main(["verify", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(f"{layout.files['val'][0]}: {name} val, " in line and line.startswith("ok") for line in lines)


def test_files_of_the_set_are_found(ten):
    archive(ten / "cifar-10-binary.tar.gz", "x", [])
    names = [path.relative_to(ten).as_posix() for path in dataset_files("cifar", ten)]
    assert names == [f"cifar-10-batches-bin/{name}" for name in [*TRAIN, "test_batch.bin"]] + ["cifar-10-binary.tar.gz"]


def test_missing_batches_are_named(ten):
    (ten / "cifar-10-batches-bin" / "data_batch_4.bin").unlink()
    with pytest.raises(MissingFileError, match=r"cifar-10-batches-bin: no data_batch_4\.bin; a set is read only with"):
        read_raw_cifar10(ten, "train")
    with pytest.raises(MissingFileError, match=r"no train\.bin, neither in cifar-100-binary .*fetch cifar100"):
        open_dataset("cifar100", ten, "train")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda data: data[:-1],
            r"is 15364 bytes long; expected records of 3073 bytes .*record 4 \(offset 12292\) has",
        ),
        (lambda data: data + b"\0", r"record 5 \(offset 15365\) has 1"),
        (lambda data: b"", "it is empty"),
        (lambda data: bytes(3074), "it may be cifar100"),
        (lambda data: data[:6146] + b"\x0a" + data[6147:], r"record 2 \(offset 6146\): label is 10; expected 0 to 9"),
    ],
)
def test_damage_is_named(ten, change, message):
    path = ten / "cifar-10-batches-bin" / "test_batch.bin"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(FormatError, match=message) as caught:
        read_raw_cifar10(ten, "val")
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize(("at", "value", "what"), [(3074, 20, "coarse label is 20"), (3075, 100, "fine label is 100")])
def test_both_labels_of_cifar100_are_checked(tmp_path, at, value, what):
    data = bytearray(content("train.bin"))
    data[at] = value
    (tmp_path / "train.bin").write_bytes(data)
    with pytest.raises(FormatError, match=rf"record 1 \(offset {at}\): {what}"):
        read_raw_cifar100(tmp_path, "train")


def linked(kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin")
    info.type, info.linkname = kind, "/etc/passwd"
    return info


def sized(name: str, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size = size
    return info


def announced(size: int) -> tarfile.TarInfo:
    """A member whose PAX header says another size than its data have."""
    info = sized("cifar-10-batches-bin/data_batch_1.bin", 0)
    info.pax_headers = {"size": str(size)}
    return info


@pytest.mark.parametrize(
    ("names", "extra", "message"),
    [
        ([*TRAIN], [sized("../outside", 4)], "member '../outside' lies outside"),
        ([*TRAIN], [sized("/etc/passwd", 4)], "member '/etc/passwd' lies outside"),
        ([*TRAIN], [linked(tarfile.SYMTYPE)], "is not a plain file"),
        ([*TRAIN], [linked(tarfile.CHRTYPE)], "is not a plain file"),
        ([*TRAIN], [announced(3073 * 10**7)], "says it is 30730000000 bytes long; the archive holds less"),
        (TRAIN[:4], [], "holds no cifar-10-batches-bin/data_batch_5.bin"),
        ([*TRAIN, TRAIN[0]], [], "data_batch_1.bin: is in the archive twice"),
        (TRAIN[1:], [sized(f"cifar-10-batches-bin/{TRAIN[0]}", 3072)], "data_batch_1.bin: is 3072 bytes long"),
    ],
)
def test_archives_that_are_not_the_published_one_are_refused(tmp_path, names, extra, message):
    archive(tmp_path / "cifar-10-binary.tar.gz", "cifar-10-batches-bin", names, extra)
    with pytest.raises(FormatError, match=message):
        read_raw_cifar10(tmp_path, "train")


@pytest.mark.parametrize("cut", [0, 1, 3, 100, 9000, -1, -9])
def test_a_broken_archive_is_an_error_wherever_it_breaks(tmp_path, cut):
    path = archive(tmp_path / "cifar-100-binary.tar.gz", "cifar-100-binary", ["train.bin", "test.bin"])
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    with pytest.raises(FormatError, match=r"the archive is damaged|ends .* bytes before"):
        read_raw_cifar100(tmp_path, "train")
    flipped = bytearray(whole)
    flipped[-5] ^= 1  # the gzip checksum
    path.write_bytes(flipped)
    with pytest.raises(FormatError, match=r"the archive is damaged .CRC"):
        read_raw_cifar100(tmp_path, "train")


def test_an_archive_bomb_costs_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MAX_UNPACKED_BYTES", 32 << 20)
    path = tmp_path / "cifar-10-binary.tar.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for name in ("one", "two"):
            file.write(sized(f"cifar-10-batches-bin/{name}.bin", 20 << 20).tobuf())
            file.write(bytes(20 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="unpacks to more than 33554432 bytes"):
            read_raw_cifar10(tmp_path, "val")
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_only_published_names_are_described(tmp_path):
    path = fill(tmp_path, ["test.bin"]) / "test.bin"
    assert check_cifar_file(path) == "cifar100 val, 2 samples"
    shutil.copy(path, tmp_path / "other.bin")
    assert check_cifar_file(tmp_path / "other.bin") is None
    tar = archive(tmp_path / "cifar-100-binary.tar.gz", "cifar-100-binary", ["train.bin", "test.bin"])
    assert check_cifar_file(tar) == "cifar100 archive, 7 + 2 samples"
