"""Packing: the file is what the tables say, its numbers are measured; only pictures and options decide its bytes."""

import json
import random
import struct
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from picture_trees import encoded, grow_pictures, parsed, picture, small_layout
from source_builders import grow_tree

from renaissance.core.errors import CorruptSample, FormatError, MissingFileError, RenaissanceError, ValueRejected
from renaissance.core.philox import philox
from renaissance.data.formats.imagenet import PictureLayout, imagenet_file_name, read_extension, read_imagenet_header
from renaissance.data.formats.imagenet_inputs import read_class_list
from renaissance.data.formats.imagenet_order import greedy_blocks, philox_shuffle
from renaissance.data.formats.imagenet_pack import PackOptions, PackResult, pack_imagenet
from renaissance.data.sources import Source

LEVELS = (0, 1, 2, 3, "RAW")


def pack(root: Path, output: Path, level: int | str = 0, split: str = "train", classes=None, **options) -> PackResult:
    output.mkdir(exist_ok=True)
    options.setdefault("layout", small_layout(level))
    options.setdefault("restart_windows", False)
    return pack_imagenet(root, output, split, PackOptions(level=level, **options), classes)


def label_of(name: str) -> int:
    return int(name.split("/")[0][1:])


@pytest.mark.parametrize("level", LEVELS)
def test_packed_file_is_what_the_tables_say(tmp_path, level):
    files = grow_pictures(tmp_path)
    result = pack(tmp_path, tmp_path / "out", level, order="file", layout=small_layout(level, 32768))
    assert result.path.name == f"imagenet_train_{'raw' if level == 'RAW' else f'lv{level}'}.dts"
    file = parsed(result.path, level)
    assert [label for _, label in file.pictures] == [label_of(name) for name in files]
    assert len(file.blocks) > 1
    header = file.header
    assert (header["is_train"], header["classes"], header["samples"]) == (1, 3, 24)
    assert header["most"] == max(map(len, file.blocks))
    assert header["area"] == max((24 + 9 * c + n) * (40 - n) for c in range(3) for n in range(8))
    sources = sum(map(len, files.values()))
    assert header["ratio"] == pytest.approx(result.path.stat().st_size / sources)
    assert file.region[144:4096] == bytes(4096 - 144)
    with Source.open("imagenet", str(tmp_path / "out"), "train", "dts", level, verify=True) as source:
        assert [source.read(i) for i in range(24)] == [stored for stored, _ in file.pictures]
        assert source.labels.tolist() == [label for _, label in file.pictures]
    if level == 0:
        assert [stored for stored, _ in file.pictures] == list(files.values())


def test_last_block_counts_for_the_most_pictures(tmp_path):
    large, small = encoded(picture(160, 120)).ljust(16000, b"\0"), encoded(picture(9, 9))
    grow_tree(tmp_path, "train", {"a": {"a.JPEG": large}, "b": {f"{i}.JPEG": small for i in range(9)}})
    result = pack(tmp_path, tmp_path / "out", order="file", layout=small_layout(0))
    assert [len(block) for block in parsed(result.path, 0).blocks] == [1, 9]
    assert result.header.most_pictures == 9


def test_blocks_close_at_the_cap_of_pictures(tmp_path):
    tiny = encoded(picture(1, 1), optimize=True)
    grow_tree(tmp_path, "train", {"a": {f"{i:04d}.JPEG": tiny for i in range(345)}})
    wide = PictureLayout(small_layout(0).level, 16384, 1 << 20, 8192)
    assert [len(b) for b in parsed(pack(tmp_path, tmp_path / "out", layout=wide).path, 0).blocks] == [340, 5]
    narrow = PictureLayout(small_layout(0).level, 16384, 1 << 20, 1280)
    assert pack(tmp_path, tmp_path / "o", layout=narrow).header.most_pictures == 105  # the table's room


def test_standard_file_has_the_published_sizes_and_a_hole_for_a_header(tmp_path):
    grow_pictures(tmp_path, classes=1, each=2)
    path = pack(tmp_path, tmp_path / "out", 1, layout=None).path
    assert path.stat().st_size == 2 * (16 << 20)
    assert path.stat().st_blocks * 512 < (16 << 20) + (1 << 20)
    header = parsed(path, 1).header
    assert (header["header_bytes"], header["block_bytes"], header["block_header"]) == (1 << 24, 1 << 24, 16384)
    assert PictureLayout.standard(0).block_header_bytes == 4096


# ---------------------------------------------------------------------------------------------------- order


def names_in(path: Path, files: dict[str, bytes]) -> list[str]:
    by_data = {data: name for name, data in files.items()}
    return [by_data[stored] for stored, _ in parsed(path, 0).pictures]


@pytest.mark.parametrize("split", ["train", "val"])
def test_philox_order_is_that_of_the_page(tmp_path, split):
    files = grow_pictures(tmp_path, split=split)
    if split == "val":
        grow_pictures(tmp_path)
    expected = list(files)
    for i in range(len(expected) - 1, 0, -1):
        word = philox(7, i, 6 << 24 | 4, 0, 1 << 31 if split == "val" else 0)[0]
        j = word * (i + 1) >> 32
        expected[i], expected[j] = expected[j], expected[i]
    assert names_in(pack(tmp_path, tmp_path / "out", split=split, seed=7).path, files) == expected


def test_legacy_order_is_pythons_shuffle_of_the_list_by_file_name(tmp_path):
    pictures = [encoded(picture(20 + i, 20)) for i in range(9)]
    # By file name the classes mix, as they do in the validation set.
    tree = {
        "b": {f"v{i}.JPEG": pictures[i] for i in (0, 3, 4, 8)},
        "a": {f"v{i}.jpg": pictures[i] for i in (1, 2, 5, 6, 7)},
    }
    grow_tree(tmp_path, "train", tree)
    expected = list(range(9))
    random.seed(42)
    random.shuffle(expected)
    stored = [data for data, _ in parsed(pack(tmp_path, tmp_path / "out", order="python42").path, 0).pictures]
    assert stored == [pictures[i] for i in expected]


@pytest.mark.parametrize("order", ["philox", "python42"])
@pytest.mark.parametrize("each", [1, 40])
def test_greedy_packing_holds_every_picture_once_in_no_more_blocks(tmp_path, order, each):
    files = grow_pictures(tmp_path, each=each)
    greedy = pack(tmp_path, tmp_path / "greedy", order=order, packing="greedy")
    streaming = pack(tmp_path, tmp_path / "streaming", order=order)
    assert sorted(names_in(greedy.path, files)) == sorted(files)
    assert greedy.header.blocks <= streaming.header.blocks
    again = pack(tmp_path, tmp_path / "again", order=order, packing="greedy")
    assert again.path.read_bytes() == greedy.path.read_bytes()


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(1, 8), st.integers(0, 9))
def test_greedy_packing_of_any_sizes_is_a_packing(units, cap, seed):
    sizes = np.array(units, np.int64) * 64
    order = philox_shuffle(np.arange(sizes.size), seed, "train")
    shuffle = partial(philox_shuffle, seed=seed, split="train", round=1)
    blocks = greedy_blocks(sizes, order, (shuffle, shuffle), 6400, cap)
    assert sorted(np.concatenate(blocks).tolist()) == list(range(sizes.size))
    assert all(0 < block.size <= cap and sizes[block].sum() <= 6400 for block in blocks)


def test_greedy_packing_keeps_to_the_cap_and_leaves_out_what_fits_no_block(tmp_path):
    tiny, huge = encoded(picture(1, 1)), encoded(picture(200, 200), quality=100)
    grow_tree(tmp_path, "train", {"a": {f"{i:03d}.JPEG": tiny for i in range(60)} | {"huge.JPEG": huge}})
    layout = small_layout(0)
    assert len(huge) > layout.capacity
    with pytest.raises(CorruptSample, match=r"huge\.JPEG: takes \d+ bytes at level 0; a block holds 16128"):
        pack(tmp_path, tmp_path / "out", packing="greedy")
    result = pack(tmp_path, tmp_path / "out", packing="greedy", on_corrupt="skip")
    assert [len(block) for block in parsed(result.path, 0).blocks] == [20, 20, 20]
    assert [Path(path).name for path, _ in result.left_out] == ["huge.JPEG"]


# ---------------------------------------------------------------------------------------------------- labels


def test_a_part_keeps_the_numbers_of_the_list_of_classes(tmp_path):
    files = grow_pictures(tmp_path, classes=2, each=2, split="val")
    listing = tmp_path / "classes.txt"
    listing.write_text("n77 not here\nn01 second folder\nn05\nn00 first folder\n")
    result = pack(tmp_path, tmp_path / "out", split="val", classes=read_class_list(listing), order="file")
    assert [label for _, label in parsed(result.path, 0).pictures] == [3, 3, 1, 1]
    assert result.header.num_classes == 4
    assert read_extension(result.path, result.header)["classes"] == ["n77", "n01", "n05", "n00"]
    assert len(files) == 4
    with pytest.raises(FormatError, match="n01: class n01 is not in the list of classes"):
        pack(tmp_path, tmp_path / "out2", split="val", classes=["n00"])


def test_validation_takes_its_numbers_from_train(tmp_path):
    grow_pictures(tmp_path, classes=3, each=1)
    val = {"n02": {"v1.JPEG": encoded(picture(9, 9))}}
    grow_tree(tmp_path, "val", val)
    result = pack(tmp_path, tmp_path / "out", split="val")
    assert result.path.name == "imagenet_val_lv0.dts"
    assert (result.header.num_classes, result.header.is_train) == (3, 0)
    assert parsed(result.path, 0).pictures[0][1] == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "is empty"), ("a\n\nb\n", "line 2 is empty"), ("a\nb x\nb y\n", "line 3: class 'b' is also on line 2")],
)
def test_bad_list_of_classes_is_named(tmp_path, text, message):
    (tmp_path / "list").write_text(text)
    with pytest.raises(FormatError, match=message):
        read_class_list(tmp_path / "list")
    with pytest.raises(MissingFileError, match="nowhere: no such file"):
        read_class_list(tmp_path / "nowhere")


def test_list_of_classes_may_begin_with_a_byte_order_mark_and_ends_somewhere(tmp_path):
    (tmp_path / "list").write_bytes(b"\xef\xbb\xbfa\nb\r\n")
    assert read_class_list(tmp_path / "list") == ("a", "b")
    with pytest.raises(FormatError, match="/dev/zero: is longer than 67108864 bytes"):
        read_class_list(Path("/dev/zero"))


# ---------------------------------------------------------------------------------------------------- the same bytes


@pytest.mark.parametrize("level", [0, 2])
def test_number_of_processes_changes_no_byte(tmp_path, level):
    grow_pictures(tmp_path, each=15)
    one = pack(tmp_path, tmp_path / "one", level, jobs=1)
    two = pack(tmp_path, tmp_path / "two", level, jobs=2)
    assert one.path.read_bytes() == two.path.read_bytes()


def tiny_png(number: int) -> bytes:
    """The start of a PNG of 1 x 1, enough for level 0, and bytes that no library had a part in."""
    start = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR" + struct.pack(">IIBBBBBI", 1, 1, 8, 2, 0, 0, 0, 0)
    return start + bytes(range(number)) * 7


@pytest.mark.parametrize(
    ("options", "crc"),
    [
        ({}, "85dabfe5"),
        ({"seed": 1}, "e3bfeb2a"),
        ({"order": "python42"}, "4dab9e0d"),
        ({"order": "file"}, "5dbb3a8e"),
        ({"packing": "greedy"}, "596e4792"),
    ],
)
def test_bytes_of_a_file_stay_what_they_are(tmp_path, options, crc):
    tree = {f"c{c}": {f"{c}_{i}.JPEG": tiny_png(20 * c + i) for i in range(20)} for c in range(5)}
    grow_tree(tmp_path, "train", tree)
    result = pack(tmp_path, tmp_path / "out", **options)
    assert f"{result.header.body_crc32:08x}" == crc
    assert parsed(result.path, 0).header["crc"] == result.header.body_crc32


def test_target_is_left_alone_when_it_is_what_this_would_write(tmp_path):
    grow_pictures(tmp_path)
    first = pack(tmp_path, tmp_path / "out", seed=3)
    before = first.path.stat()
    again = pack(tmp_path, tmp_path / "out", seed=3)
    assert again.up_to_date
    assert again.header == first.header
    assert (first.path.stat().st_ino, first.path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    with pytest.raises(RenaissanceError, match=r"exists and was packed differently \(order\); --force replaces it"):
        pack(tmp_path, tmp_path / "out", seed=4)
    grow_tree(tmp_path, "train", {"n09": {"new.JPEG": encoded(picture(9, 9))}})
    with pytest.raises(RenaissanceError, match=r"packed differently \(classes, source\)"):
        pack(tmp_path, tmp_path / "out", seed=3)
    assert pack(tmp_path, tmp_path / "out", seed=3, replace=True).header.num_samples == 25
    first.path.write_bytes(b"something else")
    with pytest.raises(
        RenaissanceError, match=r"not a DTS file\. The existing file is not usable; --force replaces it"
    ):
        pack(tmp_path, tmp_path / "out", seed=3)


def test_restart_windows_are_on_where_pictures_are_encoded_again_and_the_file_says_so(tmp_path):
    grow_pictures(tmp_path, classes=1, each=2)
    for level, expected in ((0, None), (1, {"target": 128}), ("RAW", None)):
        result = pack(tmp_path, tmp_path / "out", level, restart_windows=None)
        assert read_extension(result.path, result.header)["restart"] == expected
    result = pack(tmp_path, tmp_path / "on", 0, restart_windows=True, jobs=2)
    assert read_extension(result.path, result.header)["restart"] == {"target": 128}


def test_file_stays_up_to_date_under_another_version_of_the_libraries(tmp_path, monkeypatch):
    grow_pictures(tmp_path, classes=1, each=2)
    pack(tmp_path, tmp_path / "out", 1)
    monkeypatch.setattr("renaissance.data.formats.imagenet_pack.encoder_identity", lambda level: "another")
    assert pack(tmp_path, tmp_path / "out", 1).up_to_date
    monkeypatch.setattr("renaissance.data.formats.imagenet_pack.REVISION", 2)
    with pytest.raises(RenaissanceError, match=r"packed differently \(revision\)"):
        pack(tmp_path, tmp_path / "out", 1)


# ---------------------------------------------------------------------------------------------------- bad pictures

BAD = {
    "cut.JPEG": (encoded(picture(60, 60))[:500], "stream ends"),
    "empty.JPEG": (b"", "not a picture"),
    "gif.JPEG": (b"GIF89a" + bytes(50), "GIF"),
    "text.JPEG": (b"hello, this is a text", "not a picture"),
    "bomb.JPEG": (
        b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR" + struct.pack(">IIBBBBBI", 60000, 60000, 8, 2, 0, 0, 0, 0),
        "limit",
    ),
}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_picture_ends_the_run_by_name_and_leaves_no_file(tmp_path, name):
    grow_pictures(tmp_path, classes=1)
    data, reason = BAD[name]
    (tmp_path / "train" / "n00" / name).write_bytes(data)
    with pytest.raises(CorruptSample, match=rf"train/n00/{name}: .*({reason}).*--on-corrupt skip"):
        pack(tmp_path, tmp_path / "out", 1)
    assert not (tmp_path / "out" / "imagenet_train_lv1.dts").exists()


def test_bad_pictures_are_left_out_and_listed_on_request(tmp_path):
    grow_pictures(tmp_path, classes=2)
    for name, (data, _) in BAD.items():
        (tmp_path / "train" / "n01" / name).write_bytes(data)
    result = pack(tmp_path, tmp_path / "out", 1, on_corrupt="skip")
    assert {Path(path).name for path, _ in result.left_out} == set(BAD)
    assert result.header.num_samples == 16
    assert len(parsed(result.path, 1).pictures) == 16
    assert read_extension(result.path, result.header)["left_out"] == len(BAD)
    assert pack(tmp_path, tmp_path / "out", 1, on_corrupt="skip").up_to_date
    with pytest.raises(RenaissanceError, match="5 pictures are left out"):
        pack(tmp_path, tmp_path / "out", 1)


def test_set_without_one_good_picture_is_an_error(tmp_path):
    grow_tree(tmp_path, "train", {"a": {"a.JPEG": b"no", "b.JPEG": b"nor this"}})
    with pytest.raises(FormatError, match="not one of its 2 pictures can be packed"):
        pack(tmp_path, tmp_path / "out", on_corrupt="skip")
    assert list((tmp_path / "out").iterdir()) == []


# ---------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": 4}, "unknown compress level 4; expected one of: 0, 1, 2, 3, RAW"),
        ({"level": True}, "unknown compress level True"),
        ({"order": "random"}, "order is 'random'; expected one of: philox, python42, file"),
        ({"packing": "best"}, "packing is 'best'"),
        ({"on_corrupt": "ignore"}, "on_corrupt is 'ignore'"),
        ({"jobs": 0}, "jobs is 0"),
        ({"level": 1, "short_side": 256}, "a short side is chosen for level RAW"),
        ({"level": "RAW", "short_side": 0}, "short side is 0"),
        ({"order": "file", "seed": 1}, "a seed acts in order philox"),
        ({"seed": -1}, "seed is -1"),
        ({"level": "RAW", "restart_windows": True}, "level RAW stores pixels"),
        ({"level": 1, "packing": "greedy"}, "greedy packing needs sizes that are known"),
        ({"order": "file", "packing": "greedy"}, "greedy packing needs"),
        ({"restart_windows": True, "packing": "greedy"}, "greedy packing needs"),
        ({"level": 1, "layout": PictureLayout.standard(0)}, "the layout is one of level 0"),
    ],
)
def test_option_acts_or_raises(options, message):
    with pytest.raises(ValueRejected, match=message):
        PackOptions(**options).settled()


def test_defaults_are_filled_in():
    settled = PackOptions(level="raw").settled()
    assert (settled.level, settled.short_side, settled.seed, settled.restart_windows) == ("RAW", 256, 42, False)
    assert [PackOptions(level=level).settled().restart_windows for level in (0, 1, 2, 3)] == [False, True, True, True]
    assert PackOptions(order="file").settled().seed is None


# ---------------------------------------------------------------------------------------------------- extension


def test_extension_stands_where_the_page_says_and_reading_does_not_need_it(tmp_path):
    grow_pictures(tmp_path, classes=2, each=2)
    result = pack(tmp_path, tmp_path / "out", "RAW", short_side=20)
    data = bytearray(result.path.read_bytes())
    assert data[4096:4100] == b"DTSX"
    length, crc = struct.unpack_from("<II", data, 4100)
    text = bytes(data[4108 : 4108 + length])
    assert zlib.crc32(text) == crc
    content = json.loads(text)
    assert (content["level"], content["short_side"], content["classes"]) == ("RAW", 20, ["n00", "n01"])
    assert content["source"]["pictures"] == 4
    assert content["restart"] is None
    data[4108 + 5] ^= 1
    result.path.write_bytes(data)
    header, problems = read_imagenet_header(result.path, "train", "RAW")
    assert problems == []
    with pytest.raises(FormatError, match="offset 4096: extension: CRC-32"):
        read_extension(result.path, header)
    with Source.open("imagenet", str(tmp_path / "out"), "train", "dts", "RAW", verify=True) as source:
        assert source.spec.samples == 4


def test_names_of_classes_are_left_out_when_the_region_has_no_room(tmp_path):
    grow_tree(tmp_path, "train", {f"class{i:0100d}": {"a.JPEG": encoded(picture(4, 4))} for i in range(130)})
    result = pack(tmp_path, tmp_path / "out")
    assert read_extension(result.path, result.header)["classes"] is None
    assert result.header.num_classes == 130


def test_raw_level_stores_the_decoded_pixels_at_exactly_the_short_side(tmp_path):
    wide, tall, small = picture(61, 40), picture(30, 97), picture(12, 9)
    pictures = {"0.JPEG": wide, "1.JPEG": tall, "2.JPEG": small}
    grow_tree(tmp_path, "train", {"a": {name: encoded(p, "PNG") for name, p in pictures.items()}})
    result = pack(tmp_path, tmp_path / "out", "RAW", order="file", short_side=20)
    stored = [data for data, _ in parsed(result.path, "RAW").pictures]
    sizes = [struct.unpack_from("<II", data) for data in stored]
    assert sizes == [(30, 20), (20, 64), (12, 9)]
    for data, (width, height), original in zip(stored, sizes, pictures.values(), strict=True):
        expected = original if original.size == (width, height) else original.resize((width, height), 1)
        assert data[8:] == np.asarray(expected).tobytes()
    assert result.header.largest_area == 20 * 64
    assert imagenet_file_name("train", "raw") == result.path.name
