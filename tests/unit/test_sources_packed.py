"""Packed pictures: every level read by offset, every field and table checked, damage named (laws 1 and 7)."""

import errno
import os
import struct
import zlib

import pytest
from source_builders import AT, packed, put, u32

from renaissance.core.errors import (
    CorruptSample,
    DigestMismatch,
    FormatError,
    MissingFileError,
    RenaissanceError,
    ValueRejected,
)
from renaissance.data.sources import Encoding, Source
from renaissance.data.sources import packed as packed_module

LEVELS = [0, 1, 2, 3, "RAW"]


def open_all(source: Source) -> list[bytes]:
    return [source.read(sample) for sample in range(source.spec.samples)]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("split", ["train", "val"])
def test_every_level_is_read_as_it_was_built(tmp_path, level, split):
    built = packed(level, split)
    path = built.write(tmp_path)
    with Source.open("imagenet", tmp_path, split, verify=True) as source:
        spec = source.spec
        assert open_all(source) == built.pictures
        assert source.labels.tolist() == built.labels
        assert source.sizes.tolist() == [len(p) for p in built.pictures]
        assert source.block_starts.tolist() == [0, 3, 4, 8]
        assert source.offsets.tolist()[3:5] == [4096 + 8192 + 256, 4096 + 2 * 8192 + 256]
        assert (spec.split, spec.format, spec.level, spec.samples, spec.num_classes) == (split, "dts", level, 8, 5)
        assert spec.encoding is (Encoding.RAW if level == "RAW" else Encoding.PICTURES)
        assert (spec.height, spec.width, spec.channels, spec.tree) == (0, 0, 3, False)
        assert spec.files == (str(path),)
        assert spec.stored_bytes == sum(map(len, built.pictures))
        assert spec.largest == max(map(len, built.pictures))
        assert source.describe(3) == f"{path}, picture 3 (block 1, offset {4096 + 8192 + 256})"
        assert source.class_names() is None


@pytest.mark.parametrize(
    ("header", "block", "block_header"), [(4096, 4096, 192), (16384, 12288, 4096), (8192, 65536, 16384)]
)
def test_sizes_of_header_and_blocks_come_from_the_header(tmp_path, header, block, block_header):
    built = packed(1, header_bytes=header, block_bytes=block, block_header=block_header)
    built.write(tmp_path)
    with Source.open("imagenet", tmp_path, "train", verify=True) as source:
        assert open_all(source) == built.pictures


def test_a_block_without_pictures_is_legal(tmp_path):
    built = packed(2)
    built.blocks.insert(1, [])
    built.write(tmp_path)
    with Source.open("imagenet", tmp_path, "train") as source:
        assert source.block_starts.tolist() == [0, 3, 3, 4, 8]
        assert open_all(source) == built.pictures
        assert "block 2," in source.describe(3)


def test_the_extension_in_the_header_region_is_not_needed(tmp_path):
    path = packed(0, header_bytes=8192).write(tmp_path)
    put(path, 4096, b"DTSX\xff\xff\xff\xff")
    with Source.open("imagenet", tmp_path, "train", verify=True) as source:
        assert source.spec.samples == 8


HEADER_DAMAGE = [
    ("magic", b".DTX", "magic is '.DTX'"),
    ("version", b"\4", "version is 4 0 0 0"),
    ("type", b"CIFAR100", "data set is 'CIFAR100'"),
    ("is_train", u32(0), "this is the other split"),
    ("is_train", u32(2), "is training set is 2"),
    ("level", u32(1), "compress level is 1"),
    ("level", u32(100), "compress level is 100"),
    ("preprocessed", u32(7), "validation set preprocessed is 7"),
    ("classes", u32(0), "number of classes is 0"),
    ("classes", u32(2**24 + 1), "number of classes is 16777217; expected 1 to 16777216"),
    ("layout", b"NCHW", "tensor layout is 'NCHW'"),
    ("width", u32(224), "image width is 224"),
    ("height", u32(224), "image height is 224"),
    ("channels", u32(1), "channels is 1"),
    ("color", b"GRAY", "colour type is 'GRAY'"),
    ("samples", u32(0), "number of samples is 0"),
    ("samples", u32(7), "blocks hold more"),
    ("samples", u32(9), "blocks hold 8"),
    ("samples", u32(2**32 - 1), "number of samples is 4294967295"),
    ("volumes", u32(2), "several volumes are not defined"),
    ("volume", u32(1), "several volumes are not defined"),
    ("total_blocks", u32(4), "blocks over all volumes is 4"),
    ("blocks", u32(2), "is 2; expected|is 3; expected 2"),
    ("blocks", u32(2**32 - 1), "expected 4294967295"),
    ("total_bytes", u32(1), "total bytes is 1"),
    ("header_bytes", u32(144), "header bytes is 144; expected a multiple of 4096"),
    ("header_bytes", u32(2**27), "header bytes is 134217728; expected a multiple of 4096 up to 67108864"),
    ("header_bytes", u32(8192), "expected 32768"),
    ("body_bytes", u32(1), "body bytes is 1"),
    ("block_bytes", u32(0), "bytes per block is 0"),
    ("block_bytes", u32(4096), "body bytes is 24576; expected 12288"),
    ("block_header", u32(0), "block header bytes is 0"),
    ("block_header", u32(8192), "block header bytes is 8192"),
    ("block_header", u32(320), "start of picture 0"),
    ("alignment", u32(32), "picture alignment is 32"),
    ("most", u32(2**31), "most pictures in one block"),
    ("ratio", struct.pack("<f", float("nan")), "compression ratio is nan"),
    ("mean", struct.pack("<f", 0.5), "normalisation mean is 0.5"),
    ("std", struct.pack("<f", 0.5), "normalisation std is 0.5"),
]


@pytest.mark.parametrize(("field", "data", "message"), HEADER_DAMAGE)
def test_a_wrong_header_field_is_named(tmp_path, field, data, message):
    path = packed(0).write(tmp_path)
    put(path, AT[field], data)
    with pytest.raises(FormatError, match=message) as caught:
        Source.open("imagenet", tmp_path, "train")
    assert str(path) in str(caught.value)


# Block 2 of the file holds four pictures: table at 12, offsets, sizes from 28, labels from 44, zeros from 60.
BLOCK_2 = 4096 + 2 * 8192
BLOCK_DAMAGE = [
    (0, b"LV1B", "magic is 'LV1B'; expected 'LV0B'"),
    (4, u32(1), "block id is 1; expected 2"),
    (8, u32(21), "number of pictures is 21; expected 0 to 20"),
    (8, u32(3), "start of picture|reserved word|size of picture|label of picture"),
    (8, u32(2**32 - 1), "number of pictures is 4294967295"),
    (12, u32(320), "start of picture 0 is 320; expected 256"),
    (16, u32(256), "start of picture 1 is 256; expected 320"),
    (20, u32(449), "start of picture 2 is 449; expected 448"),
    (24, u32(2**32 - 64), "start of picture 3"),
    (28, u32(0), "size of picture 0 is 0|start of picture 1"),
    (40, u32(0), "size of picture 3 is 0"),
    (40, u32(8192), "size of picture 3 is 8192; expected 1 to 7552"),
    (40, u32(2**32 - 1), "size of picture 3"),
    (44, u32(5), "label of picture 0 is 5; expected 0 to 4"),
    (56, u32(2**32 - 1), "label of picture 3"),
    (100, u32(1), "reserved word is 1"),
]


@pytest.mark.parametrize(("at", "data", "message"), BLOCK_DAMAGE)
def test_a_wrong_block_table_is_named(tmp_path, at, data, message):
    path = packed(0).write(tmp_path)
    put(path, BLOCK_2 + at, data)
    with pytest.raises(FormatError, match=message) as caught:
        Source.open("imagenet", tmp_path, "train")
    assert str(path) in str(caught.value)
    assert "offset" in str(caught.value)


@pytest.mark.parametrize("size", [0, 3, 143, 144, 4095, 4096, 4096 + 8192, 4096 + 3 * 8192 - 1])
def test_a_truncated_file_is_named(tmp_path, size):
    path = packed(0).write(tmp_path)
    os.truncate(path, size)
    with pytest.raises(FormatError, match=r"truncated|not a DTS file") as caught:
        Source.open("imagenet", tmp_path, "train")
    assert str(path) in str(caught.value)


def test_a_longer_file_is_named(tmp_path):
    path = packed(0).write(tmp_path)
    with path.open("ab") as file:
        file.write(b"x")
    with pytest.raises(FormatError, match="do not belong to it"):
        Source.open("imagenet", tmp_path, "train")


def test_verify_finds_any_flipped_bit_of_the_body(tmp_path):
    built = packed(3)
    path = built.write(tmp_path)
    put(path, 4096 + 3 * 8192 - 1, b"\1")
    Source.open("imagenet", tmp_path, "train").close()
    with pytest.raises(DigestMismatch, match=f"expected {zlib.crc32(built.body()):08x}"):
        Source.open("imagenet", tmp_path, "train", verify=True)


def test_verify_crosses_the_bound_of_what_is_read_at_once(tmp_path, monkeypatch):
    packed(3).write(tmp_path)
    monkeypatch.setattr("renaissance.data.sources.reading._CHUNK", 1000)
    Source.open("imagenet", tmp_path, "train", verify=True).close()


@pytest.mark.parametrize(
    "header",
    [struct.pack("<2I", 0, 0), struct.pack("<2I", 9, 8), struct.pack("<2I", 2**32 - 1, 2**32 - 1)],
)
def test_raw_pixels_must_have_the_size_they_say(tmp_path, header):
    path = packed("RAW").write(tmp_path)
    put(path, 4096 + 8192 + 256, header)
    with Source.open("imagenet", tmp_path, "train") as source:
        with pytest.raises(CorruptSample, match=r"picture 3 \(block 1, offset 12544\): is 6008 bytes and says"):
            source.read(3)
        assert len(source.read(4)) == source.sizes[4]


@pytest.mark.parametrize("stored", [b"1234567", struct.pack("<2I", 0, 5), struct.pack("<2I", 5, 0)])
def test_raw_pictures_without_pixels_are_corrupt(tmp_path, stored):
    built = packed("RAW")
    built.blocks = [[(stored, 0)]]
    built.write(tmp_path)
    with Source.open("imagenet", tmp_path, "train") as source, pytest.raises(CorruptSample, match="bytes and says"):
        source.read(0)


def test_the_only_level_is_taken_and_several_must_be_chosen_from(tmp_path):
    packed(2).write(tmp_path)
    assert Source.open("imagenet", tmp_path, "train").spec.level == 2
    packed("RAW").write(tmp_path)
    with pytest.raises(ValueRejected, match="levels 2, RAW; choose one"):
        Source.open("imagenet", tmp_path, "train")
    assert Source.open("imagenet", tmp_path, "train", level="raw").spec.level == "RAW"
    assert Source.open("imagenet", tmp_path, "train", level="2", format="dts").spec.level == 2


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"level": 1}, MissingFileError, "imagenet_train_lv1.dts: no such file; the folder has level 2"),
        ({"level": 4}, ValueRejected, "unknown compress level 4"),
        ({"level": True}, ValueRejected, "unknown compress level True"),
        ({"level": 2, "format": "raw"}, ValueRejected, "a folder tree has no levels"),
        ({"format": "zip"}, ValueRejected, "unknown data format 'zip'"),
        ({"split": "test"}, ValueRejected, "unknown split"),
        ({"name": "svhn"}, ValueRejected, "unknown data set"),
        ({"split": "val"}, MissingFileError, "no imagenet_val_lv0.dts .* and no folder train"),
        ({"split": "val", "format": "dts"}, MissingFileError, "no imagenet_val_lv0.dts"),
        ({"format": "raw"}, MissingFileError, "train: no such folder"),
        ({"format": "raw", "verify": True}, ValueRejected, "no checksums"),
        ({"folder": "/nowhere/at/all"}, MissingFileError, "no such folder"),
    ],
)
def test_impossible_requests_are_named(tmp_path, options, error, message):
    packed(2).write(tmp_path)
    with pytest.raises(error, match=message):
        Source.open(**{"name": "imagenet", "folder": tmp_path, "split": "train"} | options)


@pytest.mark.parametrize("sample", [-1, 8, 2**40])
def test_a_sample_that_does_not_exist_is_refused(tmp_path, sample):
    packed(0).write(tmp_path)
    with Source.open("imagenet", tmp_path, "train") as source:
        for call in (source.read, source.size, source.describe):
            with pytest.raises(IndexError, match="expected 0 to 7"):
                call(sample)


def test_a_buffer_that_is_too_small_is_refused_and_a_larger_one_keeps_its_rest(tmp_path):
    built = packed(0)
    built.write(tmp_path)
    with Source.open("imagenet", tmp_path, "train") as source:
        with pytest.raises(ValueRejected, match="is 65 bytes; the buffer has room for 64"):
            source.read_into(2, memoryview(bytearray(64)))
        out = bytearray(b"z" * 70)
        assert source.read_into(2, memoryview(out)) == 65
        assert out == built.pictures[2] + b"zzzzz"


# What happens to a file while it is served.


def attached(source: Source) -> Source:
    index = bytearray(source.spec.index_bytes)
    source.write_index(memoryview(index))
    return Source.attach(source.spec, bytes(index))


@pytest.mark.parametrize("change", ["cut", "grown", "rewritten"])
def test_a_file_written_to_while_served_ends_the_run_and_is_not_taken_for_damage(tmp_path, change):
    path = packed(0).write(tmp_path)
    with Source.open("imagenet", tmp_path, "train") as source:
        source.read(0)
        if change == "rewritten":
            path.write_bytes(path.read_bytes())
            os.utime(path, ns=(1, 1))  # the clock of a file system may be too coarse to show it
        else:
            os.truncate(path, BLOCK_2 + 256 + 10 if change == "cut" else 1 << 20)
        for sample in (0, 4):
            with pytest.raises(FormatError, match=f"{path}: changed since the set was opened") as caught:
                source.read(sample)
            assert not isinstance(caught.value, CorruptSample)


def test_bytes_that_cannot_be_had_are_damage(tmp_path, monkeypatch):
    packed(0).write(tmp_path)
    with Source.open("imagenet", tmp_path, "train") as source:
        monkeypatch.setattr(os, "preadv", lambda *_: 0)
        with pytest.raises(CorruptSample, match=r"picture 4 \(block 2, offset 20736\): only 0 of 63 bytes"):
            source.read(4)


def test_a_file_written_to_while_it_is_opened_is_refused(tmp_path, monkeypatch):
    path = packed(0).write(tmp_path)
    parse = packed_module.parse_block

    def parse_and_touch(*arguments: object) -> object:
        os.utime(path, ns=(1, 1))
        return parse(*arguments)

    monkeypatch.setattr(packed_module, "parse_block", parse_and_touch)
    with pytest.raises(FormatError, match="was written to while being opened"):
        Source.open("imagenet", tmp_path, "train")


def test_a_file_replaced_between_its_header_and_its_blocks_is_refused(tmp_path, monkeypatch):
    path = packed(0).write(tmp_path)
    read_header = packed_module.read_imagenet_header

    def read_and_replace(*arguments: object) -> object:
        found = read_header(*arguments)
        packed(0, classes=9).write(tmp_path)
        return found

    monkeypatch.setattr(packed_module, "read_imagenet_header", read_and_replace)
    with pytest.raises(FormatError, match=f"{path}: was replaced while being opened"):
        Source.open("imagenet", tmp_path, "train")


def test_the_index_cannot_be_changed_by_a_reader(tmp_path):
    packed(0).write(tmp_path)
    with Source.open("imagenet", tmp_path, "train") as source:
        for array in (source.labels, source.sizes, source.offsets, source.block_starts):
            assert not array.flags.writeable


@pytest.mark.parametrize("change", ["size", "time", "gone", "link", "folder", "pipe"])
def test_a_file_that_is_no_longer_the_one_that_was_indexed_is_refused(tmp_path, change):
    path = packed(0).write(tmp_path)
    with attached(Source.open("imagenet", tmp_path, "train")) as source:
        if change == "size":
            os.truncate(path, path.stat().st_size + 1)
        elif change == "time":
            os.utime(path, ns=(1, 1))
        else:
            path.rename(tmp_path / "elsewhere")
        if change == "link":
            path.symlink_to(tmp_path / "elsewhere")
        elif change == "folder":
            path.mkdir()
        elif change == "pipe":
            os.mkfifo(path)
        with pytest.raises(RenaissanceError) as caught:
            source.read(0)
        assert str(path) in str(caught.value)
        assert not isinstance(caught.value, CorruptSample)
        assert isinstance(
            caught.value, FormatError if change in ("size", "time", "folder", "pipe") else RenaissanceError
        )


def test_a_link_out_of_the_folder_is_refused_and_one_inside_is_followed(tmp_path):
    served, outside = tmp_path / "served", tmp_path / "outside"
    served.mkdir()
    outside.mkdir()
    path = packed(0).write(outside)
    link = served / path.name
    link.symlink_to(path)
    with pytest.raises(FormatError, match="is a link out of its folder"):
        Source.open("imagenet", served, "train")
    link.unlink()
    path.rename(served / "moved.dts")
    link.symlink_to("moved.dts")
    with Source.open("imagenet", served, "train") as source:
        assert source.spec.files == (str(served / "moved.dts"),)
        assert len(source.read(0)) == 1


def test_short_reads_are_continued(tmp_path, monkeypatch):
    built = packed(0)
    built.write(tmp_path)
    preadv = os.preadv
    with Source.open("imagenet", tmp_path, "train") as source:
        monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:13]], offset))
        assert open_all(source) == built.pictures


@pytest.mark.parametrize(
    ("number", "corrupt"), [(errno.EIO, True), (errno.ESTALE, True), (errno.ENOMEM, False), (errno.EMFILE, False)]
)
def test_errors_of_the_disk_are_damage_and_shortages_are_not(tmp_path, monkeypatch, number, corrupt):
    packed(0).write(tmp_path)
    with Source.open("imagenet", tmp_path, "train") as source:
        source.read(0)

        def refuse(*_: object) -> int:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "preadv", refuse)
        with pytest.raises(RenaissanceError, match=r"picture 1 \(block 0, offset 4416\)") as caught:
            source.read(1)
        assert isinstance(caught.value, CorruptSample) is corrupt


def test_reading_goes_on_after_close(tmp_path):
    built = packed(0)
    built.write(tmp_path)
    source = Source.open("imagenet", tmp_path, "train")
    before = len(os.listdir("/proc/self/fd"))
    source.read(0)
    source.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert source.read(3) == built.pictures[3]
    source.close()
