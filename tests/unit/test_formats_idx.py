"""idx files: plain and compressed say the same, every kind of damage is named, and memory follows the file's size."""

import gzip
import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest

from renaissance.core.errors import DigestMismatch, FormatError, MissingFileError, ValueRejected
from renaissance.data.catalogue import MNIST, published_file
from renaissance.data.formats.idx import (
    check_published,
    find_raw,
    read_idx,
    read_idx_images,
    read_idx_labels,
    read_raw_mnist,
)

REAL = Path(__file__).parents[2] / "data" / "mnist"
IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def zipped(data: bytes) -> bytes:
    return gzip.compress(data, compresslevel=1, mtime=0)  # without the time of day the bytes are the same each run


def image_bytes(n: int) -> bytes:
    pixels = np.random.default_rng(n).integers(0, 256, n * 784, dtype=np.uint8).tobytes()
    return struct.pack(">4I", 2051, n, 28, 28) + pixels


def label_bytes(labels: list[int]) -> bytes:
    return struct.pack(">2I", 2049, len(labels)) + bytes(labels)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three samples, extracted."""
    (tmp_path / IMAGES).write_bytes(image_bytes(3))
    (tmp_path / LABELS).write_bytes(label_bytes([7, 0, 9]))
    return tmp_path


def test_plain_and_compressed_files_say_the_same(folder):
    labels, images, source = read_raw_mnist(folder, "train")
    assert labels.tolist() == [7, 0, 9]
    assert images.shape == (3, 28, 28, 1)
    assert images.tobytes() == image_bytes(3)[16:]
    assert str(folder / IMAGES) in source
    for name in (IMAGES, LABELS):
        (folder / f"{name}.gz").write_bytes(zipped((folder / name).read_bytes()))
        assert find_raw(folder, name) == folder / name  # nothing to unpack when it is there already
        (folder / name).unlink()
    zipped_labels, zipped_images, source = read_raw_mnist(folder, "train")
    assert np.array_equal(zipped_labels, labels)
    assert np.array_equal(zipped_images, images)
    assert f"{IMAGES}.gz" in source


def test_compression_is_recognised_by_content_not_by_name(tmp_path):
    path = tmp_path / "labels"
    path.write_bytes(zipped(label_bytes([1, 2])))
    assert read_idx_labels(path, MNIST).tolist() == [1, 2]


def test_published_files_have_the_published_checksums():
    for published in MNIST.published:
        assert (REAL / published.name).stat().st_size == published.size
        check_published(REAL / published.name, published)
    labels, images, _ = read_raw_mnist(REAL, "val")
    assert images.shape == (10000, 28, 28, 1)
    # The classes of the test set, as counted in many papers.
    assert np.bincount(labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


def test_a_changed_published_file_is_named(tmp_path):
    published = published_file("t10k-labels-idx1-ubyte.gz")
    path = tmp_path / published.name
    path.write_bytes((REAL / published.name).read_bytes()[:-1])
    with pytest.raises(DigestMismatch, match=r"t10k-labels-idx1-ubyte\.gz: CRC-32 is .*; published as 5c1cf43b"):
        check_published(path, published)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "offset 0: idx magic is 0 .bytes none."),
        (b"\0\0\x08", "offset 0: idx magic"),
        (struct.pack(">4I", 2052, 1, 28, 28), "offset 0: idx magic is 2052 .bytes 00 00 08 04.; expected 2049"),
        (struct.pack("<4I", 2051, 1, 28, 28), "offset 0: idx magic"),
        (struct.pack(">3I", 2051, 1, 28), "ended at offset 12; an idx header needs 16"),
        (image_bytes(2)[:-1], "is 1583 bytes long; its header .2 x 28 x 28. makes 1584"),
        (image_bytes(2) + b"\0", "is 1585 bytes long"),
        (struct.pack(">4I", 2051, 2**32 - 1, 28, 28) + bytes(784), "is 800 bytes long"),
        (struct.pack(">4I", 2051, 1, 14, 56) + bytes(784), "offset 8: images of 14 x 56 pixels; expected 28 x 28"),
        (label_bytes([1]), "offset 0: idx magic is 2049; expected 2051 .images."),
    ],
)
def test_bad_image_files_are_named(tmp_path, data, message):
    path = tmp_path / "images"
    path.write_bytes(data)
    with pytest.raises(FormatError, match=message) as caught:
        read_idx_images(path, MNIST)
    assert str(path) in str(caught.value)


def test_label_over_nine_names_record_and_offset(tmp_path):
    path = tmp_path / "labels"
    path.write_bytes(label_bytes([0, 1, 2, 10, 255]))
    with pytest.raises(FormatError, match=r"labels: record 3 \(offset 11\): label is 10; expected 0 to 9. 2 of 5"):
        read_idx_labels(path, MNIST)


def test_counts_of_images_and_labels_must_agree(folder):
    (folder / LABELS).write_bytes(label_bytes([1, 2]))
    with pytest.raises(FormatError, match=f"{IMAGES}: 3 images but 2 labels in .*{LABELS}"):
        read_raw_mnist(folder, "train")


def test_an_empty_set_is_an_error(folder):
    (folder / IMAGES).write_bytes(image_bytes(0))
    (folder / LABELS).write_bytes(label_bytes([]))
    with pytest.raises(FormatError, match="holds no images"):
        read_raw_mnist(folder, "train")


def test_missing_files_are_named(folder):
    (folder / LABELS).unlink()
    with pytest.raises(MissingFileError, match=f"no {LABELS} .with or without .gz."):
        read_raw_mnist(folder, "train")
    with pytest.raises(MissingFileError, match="no t10k-images-idx3-ubyte and no t10k-labels-idx1-ubyte"):
        read_raw_mnist(folder, "val")
    with pytest.raises(ValueRejected, match="unknown split 'test'"):
        read_raw_mnist(folder, "test")


COMPRESSED = zipped(image_bytes(2))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (COMPRESSED[: len(COMPRESSED) // 2], "compressed data are damaged"),
        (COMPRESSED[:-1], "compressed data are damaged"),
        (COMPRESSED[:5], "compressed data are damaged"),
        (COMPRESSED[:-8] + b"\0\0\0\0" + COMPRESSED[-4:], "compressed data are damaged .CRC check failed"),
        (COMPRESSED[:-4] + b"\1\0\0\0", "compressed data are damaged"),
        (COMPRESSED[:12] + b"\xff\xff\xff" + COMPRESSED[15:], "compressed data are damaged|idx magic"),
        (COMPRESSED + b"trailing", "compressed data are damaged"),
        (zipped(b""), "offset 0: idx magic"),
        (zipped(image_bytes(2)[:-5]), "holds 1579 bytes; its header .2 x 28 x 28. makes 1584"),
        (zipped(image_bytes(2) + bytes(9)), "holds more bytes; its header .2 x 28 x 28. makes 1584"),
        (zipped(struct.pack(">4I", 2051, 2**31, 28, 28)), "announces 1683627180048 bytes, more than"),
    ],
)
def test_bad_compressed_files_are_named(tmp_path, data, message):
    path = tmp_path / "images.gz"
    path.write_bytes(data)
    with pytest.raises(FormatError, match=message) as caught:
        read_idx_images(path, MNIST)
    assert str(path) in str(caught.value)


def peak_bytes(path: Path) -> int:
    """Memory a failing read needs at its highest point."""
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            read_idx(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_bomb_is_unpacked_no_further_than_its_header_says(tmp_path):
    path = tmp_path / "bomb.gz"
    path.write_bytes(zipped(struct.pack(">4I", 2051, 1, 28, 28) + bytes(64 << 20)))
    assert peak_bytes(path) < 4 << 20


def test_a_false_count_does_not_reserve_memory(tmp_path):
    # 60 KB of incompressible padding in the gzip header make 60 MB plausible by size; the data still end at once.
    packer = zlib.compressobj(wbits=-15)
    data = struct.pack(">4I", 2051, 70_000, 28, 28)
    deflated = packer.compress(data) + packer.flush()
    name = b"x" * 60_000 + b"\0"
    tail = struct.pack("<2I", zlib.crc32(data), len(data))
    path = tmp_path / "images.gz"
    path.write_bytes(b"\x1f\x8b\x08\x08" + bytes(6) + name + deflated + tail)
    assert peak_bytes(path) < 4 << 20
