"""Packed pictures as bytes: what is packed is parsed back, and no bit of a header or table can change unnoticed."""

import json
import re
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from picture_trees import small_layout
from source_builders import AT, LEVEL_NUMBER, Packed, packed

from renaissance.core.errors import CorruptSample, FormatError, ValueRejected
from renaissance.data.formats.dts import DtsHeader
from renaissance.data.formats.imagenet import (
    LEVELS,
    PictureLayout,
    imagenet_file_name,
    imagenet_header,
    imagenet_header_problems,
    pack_block,
    pack_extension,
    pack_raw_picture,
    parse_block,
    parse_extension,
    parse_raw_picture,
    picture_level,
)

# Fields with more than one right value, which only the rest of the file can contradict.
FREE = {"preprocessed", "block_header", "classes", "samples", "area", "most", "ratio", "crc"}


def test_levels_are_those_of_the_page():
    assert {level.name: level.code for level in LEVELS.values()} == LEVEL_NUMBER
    assert [level.magic for level in LEVELS.values()] == [b"LV0B", b"LV1B", b"LV2B", b"LV3B", b"RAWB"]
    assert [level.block_header_bytes for level in LEVELS.values()] == [4096, 16384, 16384, 16384, 16384]
    assert [level.picture_cap for level in LEVELS.values()] == [340, 1000, 1000, 1000, 1000]
    assert [PictureLayout.standard(name).table_capacity for name in LEVELS] == [340, 1364, 1364, 1364, 1364]
    assert [PictureLayout.standard(name).capacity for name in (0, 1)] == [16_773_120, 16_760_832]
    assert [picture_level(name).name for name in ("2", 2, "raw", "RAW")] == [2, 2, "RAW", "RAW"]
    for wrong in (4, "lv0", "", None, 100, True):
        with pytest.raises(ValueRejected, match="expected one of: 0, 1, 2, 3, RAW"):
            picture_level(wrong)  # type: ignore[arg-type]


def test_names_of_files_are_the_published_ones():
    assert imagenet_file_name("train", 0) == "imagenet_train_lv0.dts"
    assert imagenet_file_name("val", "3") == "imagenet_val_lv3.dts"
    assert imagenet_file_name("val", "raw") == "imagenet_val_raw.dts"


@pytest.mark.parametrize("level", list(LEVELS))
def test_header_is_the_specified_one(level):
    built: Packed = packed(level, header_bytes=1 << 24, block_bytes=1 << 24, block_header=4096 if level == 0 else 16384)
    record = built.bytes()[:144]
    made = imagenet_header(
        PictureLayout.standard(level), "train", num_classes=5, num_samples=8, blocks=3, largest_area=12,
        most_pictures=4, compression_ratio=1.0, body_crc32=zlib.crc32(built.body()),
    )  # fmt: skip
    assert made.pack() == record
    assert list(imagenet_header_problems(DtsHeader.unpack(record), "train", level, (1 << 24) * 4)) == []
    assert PictureLayout.of(made) == PictureLayout.standard(level)


def test_no_bit_of_a_header_changes_unnoticed():
    record = packed().bytes()[:144]
    size = len(packed().bytes())
    field_at = sorted((at, name) for name, at in AT.items())
    for bit in range(144 * 8):
        field = next(name for at, name in reversed(field_at) if at <= bit // 8)
        flipped = bytearray(record)
        flipped[bit // 8] ^= 1 << bit % 8
        problems = list(imagenet_header_problems(DtsHeader.unpack(bytes(flipped)), "train", 0, size))
        if field not in FREE:
            assert problems, f"{field}, bit {bit}"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("is_train", 0, "offset 16: is training set is 0; expected 1; this is the other split"),
        ("level", 2, "offset 20: compress level is 2; expected 0"),
        ("samples", 0, "offset 52: number of samples is 0; expected 1 to"),
        ("samples", 3 * 20 + 1, r"offset 52: number of samples is 61; expected 1 to 60 \(3 blocks\)"),
        ("classes", 0, "offset 28: number of classes is 0"),
        ("most", 21, "offset 108: most pictures in one block is 21; expected 0 to 20"),
        ("volumes", 2, "offset 56: number of volumes is 2; expected 1; files of several volumes are not defined"),
        ("header_bytes", 5000, "offset 80: header bytes is 5000; expected a multiple of 4096"),
        ("block_header", 8192, "offset 96: block header bytes is 8192; expected a multiple of 64 from 64 to 8191"),
    ],
)
def test_wrong_number_is_named(field, value, message):
    record = bytearray(packed().bytes()[:144])
    struct.pack_into("<I", record, AT[field], value)
    problems = list(imagenet_header_problems(DtsHeader.unpack(bytes(record)), "train", 0))
    assert len(problems) == 1
    assert re.search(message, problems[0])


def test_picture_that_would_fill_the_memory_is_named():
    layout = PictureLayout(LEVELS[0], 4096, 1 << 30, 4096)
    table = bytearray(4096)
    struct.pack_into("<4s5I", table, 0, b"LV0B", 0, 1, 4096, (256 << 20) + 1, 0)
    with pytest.raises(FormatError, match=r"offset 4112: .*size of picture 0 is 268435457; expected 1 to 268435456"):
        parse_block(table, layout, 0, 5, "file")


def test_table_that_would_fill_the_memory_is_named():
    record = bytearray(packed().bytes()[:144])
    struct.pack_into("<II", record, AT["block_bytes"], 1 << 30, 1 << 25)
    problem = next(imagenet_header_problems(DtsHeader.unpack(bytes(record))))
    assert "block header bytes is 33554432; expected a multiple of 64 from 64 to 16777216" in problem


def test_infinite_ratio_is_named():
    for value in (float("nan"), float("inf"), -1.0):
        record = bytearray(packed().bytes()[:144])
        struct.pack_into("<f", record, AT["ratio"], value)
        assert "compression ratio" in next(imagenet_header_problems(DtsHeader.unpack(bytes(record))))


pictures = st.lists(st.tuples(st.binary(min_size=1, max_size=300), st.integers(0, 4)), max_size=20)


@given(pictures)
def test_block_that_is_packed_is_parsed_back(entries):
    layout = small_layout(1)
    data = pack_block(layout, 3, [p for p, _ in entries], [label for _, label in entries])
    table = parse_block(data, layout, 3, 5, "file")
    assert table.labels.tolist() == [label for _, label in entries]
    found = [bytes(data[o : o + s]) for o, s in zip(table.offsets.tolist(), table.sizes.tolist(), strict=True)]
    assert found == [p for p, _ in entries]
    assert len(data) == layout.block_bytes


@given(pictures.filter(bool), st.data())
def test_no_bit_of_a_table_changes_unnoticed(entries, data):
    layout = small_layout(1)
    block = pack_block(layout, 3, [p for p, _ in entries], [label for _, label in entries])
    bit = data.draw(st.integers(0, layout.block_header_bytes * 8 - 1))
    block[bit // 8] ^= 1 << bit % 8
    try:
        table = parse_block(bytes(block[: layout.block_header_bytes]), layout, 3, 5, "file")
    except FormatError as error:
        assert str(error).startswith("file: offset ")  # noqa: PT017
    else:  # a length within the same padding, or another class
        n = len(entries)
        word = (bit // 8 - 12) // 4
        assert n <= word < 3 * n
        assert len(table.sizes) == n


def test_block_that_is_too_full_is_refused():
    layout = small_layout(1)
    for pictures_, labels in (([b"x"] * 21, [0] * 21), ([bytes(16129)], [0]), ([b"x"], [])):
        with pytest.raises(ValueRejected, match=r"block 0: .* a block holds 20 pictures of 16128 bytes together"):
            pack_block(layout, 0, pictures_, labels)


def test_raw_picture_is_stored_as_the_page_says():
    pixels = np.arange(2 * 5 * 3, dtype=np.uint8).reshape(2, 5, 3)
    stored = pack_raw_picture(pixels)
    assert stored == struct.pack("<II", 5, 2) + bytes(range(30))
    assert np.array_equal(parse_raw_picture(np.frombuffer(stored, np.uint8)), pixels)
    for damaged in (stored[:-1], stored + b"x", stored[:7], b"", struct.pack("<II", 0, 2), b"\xff" * 40):
        with pytest.raises(CorruptSample, match="picture of level RAW says"):
            parse_raw_picture(np.frombuffer(damaged, np.uint8))
    for wrong in (pixels[:, :, 0], pixels.astype(np.int16), pixels[:0]):
        with pytest.raises(ValueRejected, match=r"level RAW stores uint8 \[h, w, 3\]"):
            pack_raw_picture(wrong)


@given(st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=9) | st.none(), max_size=4))
def test_extension_that_is_packed_is_parsed_back(content):
    data = pack_extension(content, 8192)
    assert parse_extension(data + b"rest", 8192, "file") == content
    text = data[12:]
    assert data[:12] == b"DTSX" + struct.pack("<II", len(text), zlib.crc32(text))
    assert json.loads(text) == content


@given(st.binary(max_size=64))
def test_damaged_extension_is_an_error_or_none(data):
    for region in (data, b"DTSX" + data, b"DTSX" + struct.pack("<II", len(data), zlib.crc32(data)) + data):
        try:
            found = parse_extension(region, 8192, "file")
        except FormatError as error:
            assert "file: offset 4096: extension" in str(error)  # noqa: PT017
        else:
            assert found is None or isinstance(found, dict)


def test_extension_without_room_is_refused():
    with pytest.raises(ValueRejected, match="do not fit into a header region of 4096 bytes"):
        pack_extension({}, 4096)
    deep = b"[" * 3000
    with pytest.raises(FormatError, match="is not JSON"):
        parse_extension(b"DTSX" + struct.pack("<II", 3000, zlib.crc32(deep)) + deep, 8192, "file")
