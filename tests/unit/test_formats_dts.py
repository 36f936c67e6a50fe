"""DTS files: the bytes are what the specification's table says, existing files are read, and any damage is named."""

import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from renaissance.core.errors import DigestMismatch, FormatError, MissingFileError, RenaissanceError, ValueRejected
from renaissance.data.formats.dts import (
    HEADER_FIELDS,
    OFFSETS,
    DtsHeader,
    header_problems,
    layout_of,
    read_dts,
    read_dts_header,
    write_dts,
)
from renaissance.data.formats.idx import read_raw_mnist

REAL = Path(__file__).parents[2] / "data" / "mnist"

# Headers written by the existing exporter (spec/data-golden), with the size fields of MNIST three times too big.
GOLDEN = {
    "train": (
        "2e445453030000002020204d4e4953540100000000000000000000000a0000004e4857431c0000001c000000010000004752"
        "415960ea000001000000000000000100000001000000603d6a080000000000010000603c6a0800000000603c6a0800000000"
        "000000001003000060ea00000000803f00000000000000000000000000000000000000000000000032c4eb68"
    ),
    "val": (
        "2e445453030000002020204d4e4953540000000000000000000000000a0000004e4857431c0000001c000000010000004752"
        "41591027000001000000000000000100000001000000100b67010000000000010000100a670100000000100a670100000000"
        "0000000010030000102700000000803f0000000000000000000000000000000000000000000000009db58324"
    ),
}
GOLDEN_CIFAR10_TEST = (
    "2e4454530300000020434946415231300000000000000000000000000a0000004e4857432000000020000000030000002052"
    "4742102700000100000000000000010000000100000010e8d401000000000001000010e7d4010000000010e7d40100000000"
    "0000000000040000102700000000803f00000000000000000000000000000000000000000000000000000000"
)
GOLDEN_CRC = {"train": 0x68EBC432, "val": 0x2483B59D}


def specified_file(kind: str, train: bool, labels: bytes, pixels: bytes, sizes_as: int | None = None) -> bytes:
    """A file built from the table of spec/data 1.2 and 1.4, by hand; ``sizes_as`` is a false body size."""
    code, classes, side, channels, color = {
        "mnist": (b"   MNIST", 10, 28, 1, b"GRAY"),
        "cifar10": (b" CIFAR10", 10, 32, 3, b" RGB"),
        "cifar100": (b"CIFAR100", 100, 32, 3, b" RGB"),
    }[kind]
    n, body = len(labels), labels + pixels
    size = len(body) if sizes_as is None else sizes_as
    header = b".DTS" + bytes([3, 0, 0, 0]) + code
    header += struct.pack("<4I", train, 0, 0, classes)
    header += b"NHWC" + struct.pack("<3I", side, side, channels) + color
    header += struct.pack("<5I", n, 1, 0, 1, 1)
    header += struct.pack("<QIQ", 256 + size, 256, size)
    header += struct.pack("<5I", size, 0, 0, side * side, n)
    header += struct.pack("<7f", 1.0, 0, 0, 0, 0, 0, 0)
    header += struct.pack("<I", zlib.crc32(body))
    return header + bytes(112) + body


def samples(kind: str, n: int) -> tuple[np.ndarray, np.ndarray]:
    info = layout_of(kind).info
    random = np.random.default_rng(n)
    images = random.integers(0, 256, (n, info.height, info.width, info.channels), dtype=np.uint8)
    return random.integers(0, info.num_classes, n, dtype=np.uint8), images


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A good training file of five MNIST samples."""
    path = tmp_path / "mnist_train.dts"
    labels, images = samples("mnist", 5)
    path.write_bytes(specified_file("mnist", True, labels.tobytes(), images.tobytes()))
    return path


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize("kind", ["mnist", "cifar10", "cifar100"])
@pytest.mark.parametrize("split", ["train", "val"])
def test_written_file_is_byte_for_byte_the_specified_one(tmp_path, kind, split):
    labels, images = samples(kind, 7)
    path = tmp_path / "set.dts"
    header = write_dts(path, kind, split, labels, images)
    assert path.read_bytes() == specified_file(kind, split == "train", labels.tobytes(), images.tobytes())
    assert header == read_dts_header(path)[0]
    assert [p.name for p in tmp_path.iterdir()] == ["set.dts"]


@pytest.mark.parametrize("kind", ["mnist", "cifar10", "cifar100"])
def test_specified_file_is_read_back(tmp_path, kind):
    labels, images = samples(kind, 4)
    path = tmp_path / "set.dts"
    path.write_bytes(specified_file(kind, False, labels.tobytes(), images.tobytes()))
    header, read_labels, read_images = read_dts(path, kind, "val")
    assert header.num_samples == 4
    assert np.array_equal(read_labels, labels)
    assert np.array_equal(read_images, images)
    assert read_images.flags.c_contiguous


@pytest.mark.parametrize("split", ["train", "val"])
def test_existing_tools_mnist_file_is_read_and_ours_differs_only_in_its_sizes(tmp_path, split):
    labels, images, _ = read_raw_mnist(REAL, split)
    golden = bytes.fromhex(GOLDEN[split])
    theirs, ours = tmp_path / "theirs.dts", tmp_path / "ours.dts"
    theirs.write_bytes(golden + bytes(112) + labels.tobytes() + images.tobytes())
    header, read_labels, read_images = read_dts(theirs, "mnist", split)
    assert header.body_crc32 == GOLDEN_CRC[split]
    assert np.array_equal(read_labels, labels)
    assert np.array_equal(read_images, images)

    body = len(labels) * 785
    right = bytearray(golden)
    struct.pack_into("<Q", right, 72, 256 + body)
    struct.pack_into("<QI", right, 84, body, body)
    assert write_dts(ours, "mnist", split, labels, images).body_crc32 == GOLDEN_CRC[split]
    assert ours.stat().st_size == 256 + body
    with ours.open("rb") as file:
        assert file.read(256) == right + bytes(112)


@pytest.mark.parametrize("golden", [*GOLDEN.values(), GOLDEN_CIFAR10_TEST])
def test_existing_headers_are_valid_and_pack_to_themselves(golden):
    header = DtsHeader.unpack(bytes.fromhex(golden))
    assert list(header_problems(header)) == []
    assert header.pack() == bytes.fromhex(golden)


def test_table_is_the_specified_record():
    assert sum(struct.calcsize("<" + field.code) for field in HEADER_FIELDS) == 144
    assert [field.name for field in HEADER_FIELDS] == list(DtsHeader.__dataclass_fields__)
    specified = {"num_samples": 52, "total_bytes": 72, "body_bytes": 84, "compression_ratio": 112, "body_crc32": 140}
    assert {name: OFFSETS[name] for name in specified} == specified


def test_wrong_sizes_are_accepted_only_as_mnist_writers_made_them(tmp_path):
    labels, images = samples("mnist", 3)
    path = tmp_path / "mnist_test.dts"
    path.write_bytes(specified_file("mnist", False, labels.tobytes(), images.tobytes(), sizes_as=3 * 2353))
    read_dts(path, "mnist", "val")
    overwrite(path, 84, struct.pack("<Q", 3 * 785))  # one field right, the others wrong: nobody wrote that
    with pytest.raises(FormatError, match="offset 72: total bytes is 7315; expected 2611"):
        read_dts(path, "mnist", "val")
    path.write_bytes(specified_file("mnist", False, labels.tobytes(), images.tobytes(), sizes_as=3 * 2354))
    with pytest.raises(FormatError, match="total bytes"):
        read_dts(path, "mnist", "val")


# One wrong value for every field of the header: (field, bytes written over it, what the message must say).
WRONG_FIELDS = [
    ("magic", b".DTZ", r"offset 0: magic is '\.DTZ'; expected '\.DTS'"),
    ("version", b"\x04\0\0\0", "version is 4 0 0 0; expected 3 0 0 0"),
    ("dataset_type", b"IMAGENET", "data set is 'IMAGENET'; expected '   MNIST'"),
    ("is_train", struct.pack("<I", 0), "is training set is 0; expected 1; this is the other split"),
    ("compress_level", struct.pack("<I", 4), "compress level is 4"),
    ("val_preprocessed", struct.pack("<I", 2), "validation set preprocessed is 2"),
    ("num_classes", struct.pack("<I", 11), "number of classes is 11; expected 10"),
    ("layout", b"NCHW", "tensor layout is 'NCHW'; expected 'NHWC'"),
    ("width", struct.pack("<I", 29), "image width is 29; expected 28"),
    ("height", struct.pack("<I", 27), "image height is 27; expected 28"),
    ("channels", struct.pack("<I", 3), "channels is 3; expected 1"),
    ("color", b" RGB", "colour type is ' RGB'; expected 'GRAY'"),
    ("num_samples", struct.pack("<I", 6), "is 4181 bytes long; 6 samples .offset 52. make 4966"),
    ("num_volumes", struct.pack("<I", 2), "number of volumes is 2; expected 1"),
    ("volume_id", struct.pack("<I", 1), "volume id is 1; expected 0"),
    ("total_blocks", struct.pack("<I", 2), "blocks over all volumes is 2; expected 1"),
    ("blocks", struct.pack("<I", 0), "blocks in this file is 0; expected 1"),
    ("total_bytes", struct.pack("<Q", 1 << 40), "total bytes is 1099511627776; expected 4181"),
    ("header_bytes", struct.pack("<I", 512), "header bytes is 512; expected 256"),
    ("body_bytes", struct.pack("<Q", 3924), "body bytes is 3924; expected 3925"),
    ("block_bytes", struct.pack("<I", 3926), "bytes per block is 3926; expected 3925"),
    ("block_header_bytes", struct.pack("<I", 64), "block header bytes is 64; expected 0"),
    ("alignment", struct.pack("<I", 64), "picture alignment is 64; expected 0"),
    ("largest_area", struct.pack("<I", 783), "largest picture area is 783; expected 784"),
    ("most_pictures", struct.pack("<I", 4), "most pictures in one block is 4; expected 5"),
    ("compression_ratio", struct.pack("<f", float("nan")), "compression ratio is nan; expected 1.0"),
    ("mean", struct.pack("<3f", 0, 0.5, 0), "normalisation mean is 0.0 0.5 0.0"),
    ("std", struct.pack("<3f", 0, 0, 1), "normalisation std is 0.0 0.0 1.0"),
]


@pytest.mark.parametrize(("field", "data", "message"), WRONG_FIELDS)
def test_a_wrong_field_is_named_with_offset_found_and_expected(small, field, data, message):
    overwrite(small, OFFSETS[field], data)
    with pytest.raises(FormatError, match=message) as caught:
        read_dts(small, "mnist", "train")
    assert str(small) in str(caught.value)
    assert f"offset {OFFSETS[field]}" in str(caught.value)


def test_every_field_has_a_wrong_value_above():
    assert {field for field, _, _ in WRONG_FIELDS} | {"body_crc32"} == set(OFFSETS)


def test_every_flipped_byte_of_a_file_is_detected(small):
    good = small.read_bytes()
    free = {OFFSETS["compress_level"], OFFSETS["val_preprocessed"]}  # low byte: other values are legal there
    undetected = set()
    for offset in [*range(256 + 5), *range(256 + 5, len(good), 97), len(good) - 1]:
        overwrite(small, offset, bytes([good[offset] ^ 0x01]))
        try:
            read_dts(small, "mnist", "train")
            undetected.add(offset)
        except RenaissanceError:
            pass
        overwrite(small, offset, good[offset : offset + 1])
    assert undetected == free


def test_a_flipped_body_byte_is_named_by_both_checksums(small):
    good = small.read_bytes()
    overwrite(small, 2000, bytes([good[2000] ^ 0x80]))
    with pytest.raises(DigestMismatch, match=r"CRC-32 of the body .* is [0-9a-f]{8}; expected [0-9a-f]{8}"):
        read_dts(small, "mnist", "train")
    read_dts(small, "mnist", "train", verify=False)


@pytest.mark.parametrize("length", [0, 1, 4, 143, 144, 255, 256, 257, 4180])
def test_truncation_anywhere_is_an_error_naming_the_file(small, length):
    small.write_bytes(small.read_bytes()[:length])
    with pytest.raises(FormatError, match=r"mnist_train\.dts.*(truncated|not a DTS file)"):
        read_dts(small, "mnist", "train")


def test_trailing_bytes_are_an_error(small):
    small.write_bytes(small.read_bytes() + b"\0")
    with pytest.raises(FormatError, match=r"4182 bytes long; 5 samples .* make 4181.*do not belong"):
        read_dts(small, "mnist", "train")


def test_label_out_of_range_names_record_and_offset(tmp_path):
    _, images = samples("mnist", 3)
    path = tmp_path / "set.dts"
    path.write_bytes(specified_file("mnist", True, bytes([0, 9, 10]), images.tobytes()))
    with pytest.raises(FormatError, match=r"set\.dts: record 2 \(offset 258\): label is 10; expected 0 to 9"):
        read_dts(path, "mnist", "train")


@pytest.mark.parametrize("count", [0, 2**32 - 1, 2**32 // 785 + 1])
def test_impossible_sample_counts_allocate_nothing(small, count):
    overwrite(small, OFFSETS["num_samples"], struct.pack("<I", count))
    with pytest.raises(FormatError, match="count is wrong"):
        read_dts(small, "mnist", "train")


def test_an_empty_set_is_not_a_file(tmp_path):
    path = tmp_path / "set.dts"
    path.write_bytes(specified_file("mnist", True, b"", b""))
    with pytest.raises(FormatError, match="number of samples is 0; expected 1 to"):
        read_dts(path, "mnist", "train")


def test_reserved_bytes_must_be_zero(small):
    overwrite(small, 200, b"\x07")
    with pytest.raises(FormatError, match="offset 200: reserved byte is 7; expected 0"):
        read_dts(small)


def test_a_file_of_another_set_or_split_is_refused(small):
    read_dts(small)
    with pytest.raises(FormatError, match="data set is '   MNIST'; expected ' CIFAR10'"):
        read_dts(small, "cifar10", "train")
    with pytest.raises(FormatError, match="is training set is 1; expected 0; this is the other split"):
        read_dts(small, "mnist", "val")


def test_missing_files_folders_and_pipes_are_named(tmp_path):

    with pytest.raises(MissingFileError, match=r"no\.dts: no such file"):
        read_dts(tmp_path / "no.dts")
    with pytest.raises(FormatError, match=r"folder|regular"):
        read_dts(tmp_path)
    os.mkfifo(tmp_path / "pipe.dts")
    with pytest.raises(FormatError, match="regular file"):
        read_dts(tmp_path / "pipe.dts")


def test_writer_refuses_what_does_not_fit(tmp_path):
    labels, images = samples("mnist", 3)
    path = tmp_path / "set.dts"
    bad = [
        (labels, images[:2]),
        (labels.astype(np.int32), images),
        (labels, images.astype(np.float32)),
        (labels, images[:, :27]),
        (labels[:0], images[:0]),
    ]
    for wrong_labels, wrong_images in bad:
        with pytest.raises(ValueRejected, match=r"set\.dts"):
            write_dts(path, "mnist", "train", wrong_labels, wrong_images)
    with pytest.raises(FormatError, match="record 0"):
        write_dts(path, "mnist", "train", np.array([10, 0, 0], dtype=np.uint8), images)
    with pytest.raises(ValueRejected, match="unknown split 'test'"):
        write_dts(path, "mnist", "test", labels, images)
    with pytest.raises(ValueRejected, match="'imagenet' is known, but"):
        write_dts(path, "imagenet", "train", labels, images)
    assert list(tmp_path.iterdir()) == []


def test_writer_takes_views_that_are_not_contiguous(tmp_path):
    labels, images = samples("mnist", 6)
    path = tmp_path / "set.dts"
    write_dts(path, "mnist", "train", labels[::2], images[::2])
    assert np.array_equal(read_dts(path)[2], images[::2])
