"""What `read_header` says of a picture, and that no bytes make it do anything but say so or raise CorruptSample."""

from __future__ import annotations

import struct

import jpeg_pictures as pictures
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renaissance.core.errors import CorruptSample, ValueRejected
from renaissance.data.jpeg import MAX_PIXELS, read_header

JPEG = pictures.jpeg(50, 34)
FRAME = pictures.frame_offset(JPEG)


def exif(entries: list[tuple[int, int]], order: str = ">") -> bytes:
    body = struct.pack(order + "HIH", 42, 8, len(entries))
    for tag, value in entries:
        body += struct.pack(order + "HHIHH", tag, 3, 1, value, 0)
    payload = b"Exif\0\0" + (b"MM" if order == ">" else b"II") + body
    return b"\xff\xe1" + struct.pack(">H", len(payload) + 2) + payload


@pytest.mark.parametrize(
    ("sampling", "unit"),
    [
        ("4:4:4", (8, 8)),
        ("4:2:2", (16, 8)),
        ("4:2:0", (16, 16)),
        ("4:4:0", (8, 16)),
        ("4:1:1", (32, 8)),
        ("gray", (8, 8)),
    ],
)
def test_geometry_of_a_jpeg(sampling: str, unit: tuple[int, int]) -> None:
    header = read_header(pictures.jpeg(37, 29, sampling))
    assert (header.kind, header.width, header.height, header.bits) == ("jpeg", 37, 29, 8)
    assert (header.mcu_width, header.mcu_height) == unit
    assert (header.mcu_columns, header.mcu_rows) == (-(-37 // unit[0]), -(-29 // unit[1]))
    assert header.color == ("gray" if sampling == "gray" else "ycc")
    assert header.baseline
    assert not header.progressive
    assert not header.arithmetic


def test_offsets_point_at_the_markers() -> None:
    header = read_header(JPEG)
    assert header.frame_offset == FRAME
    assert JPEG[FRAME + 1] == 0xC0
    assert JPEG[header.scan_offset + 1] == 0xDA
    length = struct.unpack(">H", JPEG[header.scan_offset + 2 : header.scan_offset + 4].tobytes())[0]
    assert header.scan_start == header.scan_offset + 2 + length


def test_progressive_restart_interval_and_fill_bytes() -> None:
    assert read_header(pictures.jpeg(40, 40, progressive=True)).progressive
    assert not read_header(pictures.jpeg(40, 40, progressive=True)).baseline
    assert read_header(pictures.jpeg(40, 40, restart_marker_blocks=3)).restart_interval == 3
    assert read_header(pictures.inserted(JPEG, FRAME, b"\xff\xff")).frame_offset == FRAME + 2


@pytest.mark.parametrize(("transform", "color"), [(0, "cmyk"), (2, "ycck")])
def test_four_components(transform: int, color: str) -> None:
    assert read_header(pictures.cmyk(20, 20, transform)).color == color


@pytest.mark.parametrize(
    ("jfif", "ids", "color"), [(True, b"RGB", "ycc"), (False, b"RGB", "rgb"), (False, b"abc", "ycc")]
)
def test_three_components_without_jfif_are_rgb_when_they_are_called_so(jfif: bool, ids: bytes, color: str) -> None:
    stored = JPEG.copy()
    if not jfif:
        stored[stored.tobytes().index(b"JFIF")] = ord("X")
    for i, name in enumerate(ids):
        stored[FRAME + 10 + 3 * i] = name
    assert read_header(stored).color == color


@pytest.mark.parametrize("order", [">", "<"])
def test_orientation_is_told_in_both_byte_orders(order: str) -> None:
    assert read_header(JPEG).orientation == 1
    assert read_header(pictures.inserted(JPEG, 2, exif([(0x010F, 7), (0x0112, 6)], order))).orientation == 6


@pytest.mark.parametrize("entries", [[(0x0112, 9)], [(0x0112, 0)], [(0x010F, 6)], []])
def test_an_orientation_that_means_nothing_is_one(entries: list[tuple[int, int]]) -> None:
    assert read_header(pictures.inserted(JPEG, 2, exif(entries))).orientation == 1


@pytest.mark.parametrize(
    ("mode", "color", "bits"),
    [("L", "gray", 8), ("RGB", "rgb", 8), ("RGBA", "rgb+alpha", 8), ("LA", "gray+alpha", 8), ("P", "palette", 8)],
)
def test_a_png_is_recognised_by_its_content(mode: str, color: str, bits: int) -> None:
    header = read_header(pictures.encoded(pictures.scene(30, 20), "PNG", mode))
    assert (header.kind, header.width, header.height, header.color, header.bits) == ("png", 30, 20, color, bits)


@pytest.mark.parametrize(
    ("stored", "part"),
    [
        (np.zeros(0, np.uint8), "nothing"),
        (np.zeros(40, np.uint8), "not a picture"),
        (pictures.encoded(pictures.scene(9, 9), "GIF"), "GIF"),
        (pictures.encoded(pictures.scene(9, 9), "BMP"), "BMP"),
        (pictures.encoded(pictures.scene(9, 9), "WEBP"), "WebP"),
        (pictures.encoded(pictures.scene(9, 9), "TIFF"), "TIFF"),
        (pictures.patched(JPEG, FRAME + 1, b"\xc3"), "lossless"),
        (pictures.patched(JPEG, FRAME + 1, b"\xc5"), "hierarchical"),
        (pictures.patched(JPEG, FRAME + 4, b"\x0c"), "12 bits"),
        (pictures.patched(JPEG, FRAME + 4, b"\x10"), "16 bits"),
        (pictures.patched(JPEG, FRAME + 5, b"\0\0"), "DNL"),
        (pictures.patched(JPEG, FRAME + 7, b"\0\0"), "0 x 34"),
        (pictures.patched(JPEG, FRAME + 11, b"\x51"), "sampling factor"),
        (pictures.patched(JPEG, FRAME + 9, b"\x02"), "frame header"),
        (pictures.patched(JPEG, FRAME, b"\xff\xda"), "before any frame header"),
        (pictures.inserted(JPEG, FRAME, JPEG[FRAME : FRAME + 19].tobytes()), "two frame headers"),
        (pictures.inserted(JPEG, FRAME, b"\xff\xd9"), "EOI"),
        (pictures.inserted(JPEG, FRAME, b"\0"), "marker"),
        (pictures.encoded(pictures.scene(9, 9), "PNG")[:30], "IHDR"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(stored: pictures.Bytes, part: str) -> None:
    with pytest.raises(CorruptSample, match=part):
        read_header(stored)


def test_a_decompression_bomb_is_refused_before_anything_is_allocated() -> None:
    with pytest.raises(CorruptSample, match="65000 x 65000 pixels, more than the limit"):
        read_header(pictures.patched(JPEG, FRAME + 5, struct.pack(">HH", 65000, 65000)))
    png = pictures.encoded(pictures.scene(9, 9), "PNG")
    with pytest.raises(CorruptSample, match="limit"):
        read_header(pictures.patched(png, 16, struct.pack(">II", 50_000, 50_000)))
    with pytest.raises(CorruptSample, match="more than the limit of 1699"):
        read_header(JPEG, 50 * 34 - 1)
    assert read_header(JPEG, 50 * 34).pixels == 50 * 34
    with pytest.raises(ValueRejected):
        read_header(JPEG, MAX_PIXELS + 1)


def test_a_small_stream_that_claims_millions_of_pixels_is_cut() -> None:
    with pytest.raises(CorruptSample, match="need at least"):
        read_header(pictures.patched(JPEG, FRAME + 5, struct.pack(">HH", 8000, 8000)))


def test_a_progressive_jpeg_of_very_many_scans_is_refused() -> None:
    stored = pictures.jpeg(16, 16, progressive=True)
    with pytest.raises(CorruptSample, match="scans"):
        read_header(pictures.inserted(stored, len(stored) - 2, b"\xff\xda\0\x08\x01\x01\0\x01\x3f\0" * 200))


def test_a_header_cut_anywhere_is_named() -> None:
    for length in range(2, read_header(JPEG).scan_start):
        with pytest.raises(CorruptSample):
            read_header(JPEG[:length])


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_changed_bytes_are_read_or_named(data: st.DataObject) -> None:
    stored = data.draw(st.sampled_from([JPEG, pictures.inserted(JPEG, 2, exif([(0x0112, 6)]))])).copy()
    for _ in range(data.draw(st.integers(1, 6))):
        stored[data.draw(st.integers(2, min(len(stored), 800) - 1))] = data.draw(st.integers(0, 255))
    stored = stored[: data.draw(st.integers(2, len(stored)))]
    try:
        header = read_header(stored)
    except CorruptSample:
        return
    assert 1 <= header.pixels <= MAX_PIXELS
    assert 1 <= header.orientation <= 8


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_after_a_jpeg_magic_are_read_or_named(tail: bytes) -> None:
    try:
        read_header(np.frombuffer(b"\xff\xd8\xff" + tail, np.uint8))
    except CorruptSample:
        return
