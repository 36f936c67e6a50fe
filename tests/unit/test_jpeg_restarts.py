"""Restart markers are added without loss, where they tile the picture."""

from __future__ import annotations

import re

import jpeg_pictures as pictures
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renaissance.core.errors import CorruptSample, ValueRejected
from renaissance.data.jpeg import Decoder, add_restarts, read_header
from renaissance.data.jpeg.cut import Cutter
from renaissance.data.jpeg.restarts import MOST_GROWTH, restart_interval


def decoded(stored: bytes | pictures.Bytes) -> pictures.Bytes:
    data = np.frombuffer(bytes(stored), np.uint8)
    return Decoder().decode(data, read_header(data)).pixels


def restarts_in(stored: bytes) -> list[int]:
    """Numbers of the restart markers of the scan, in order."""
    scan = stored[read_header(np.frombuffer(stored, np.uint8)).scan_start :]
    return [found.group()[1] & 7 for found in re.finditer(rb"\xff[\xd0-\xd7]", scan)]


@pytest.mark.parametrize("options", [{}, {"optimize": True}, {"quality": 98}])
@pytest.mark.parametrize("sampling", pictures.SAMPLINGS)
def test_pixels_stay_and_segments_tile_the_rows(sampling: str, options: dict[str, int]) -> None:
    stored = pictures.jpeg(256, 192, sampling, **options)
    marked = add_restarts(stored, 64)
    header = read_header(np.frombuffer(marked, np.uint8))
    assert header.restart_interval * header.mcu_width == 64
    segments = header.mcu_columns * header.mcu_rows // header.restart_interval
    assert restarts_in(marked) == [i % 8 for i in range(segments - 1)]
    assert np.array_equal(decoded(marked), decoded(stored))
    assert np.array_equal(pictures.by_pillow(np.frombuffer(marked, np.uint8)), pictures.by_pillow(stored))
    assert len(stored) < len(marked) <= len(stored) * (1 + MOST_GROWTH)


def test_every_other_marker_and_what_follows_the_picture_are_kept() -> None:
    stored = np.concatenate(
        [pictures.jpeg(160, 96, comment=b"kept", exif=b"Exif\0\0MM\0*"), np.arange(50, dtype=np.uint8)]
    )
    marked = add_restarts(stored)
    header, after = read_header(stored), read_header(np.frombuffer(marked, np.uint8))
    assert marked[: header.scan_offset] == stored[: header.scan_offset].tobytes()
    assert marked[header.scan_offset : after.scan_offset] == b"\xff\xdd\0\4" + after.restart_interval.to_bytes(2, "big")
    assert marked.endswith(b"\xff\xd9" + bytes(range(50)))


@pytest.mark.parametrize(
    ("columns", "unit", "interval"),
    [(32, 16, 8), (63, 8, 21), (47, 8, 47), (62, 8, 31), (24, 16, 8), (1, 16, 1), (8, 16, 8), (24, 8, 12)],
)
def test_the_interval_divides_a_row_and_is_near_the_target(columns: int, unit: int, interval: int) -> None:
    assert restart_interval(columns, unit, 128) == interval


def test_tables_that_lack_a_code_get_the_standard_one() -> None:
    pixels = np.zeros((64, 256), np.uint8)
    pixels[:] = np.arange(256, dtype=np.uint8)[None, :] // 8 * 8
    stored = pictures.encoded(pixels, optimize=True, quality=100)
    marked = Cutter().with_restarts(stored, read_header(stored), 4)
    assert isinstance(marked, bytes)
    assert b"\xff\xc4\0\x1f" in marked
    assert np.array_equal(decoded(marked), decoded(stored))


@pytest.mark.parametrize("kind", ["progressive", "png", "cmyk", "has restarts", "would grow"])
def test_anything_else_is_returned_as_it_is(kind: str) -> None:
    stored = {
        "progressive": lambda: pictures.jpeg(90, 70, progressive=True),
        "png": lambda: pictures.encoded(pictures.scene(90, 70), "PNG"),
        "cmyk": lambda: pictures.cmyk(90, 70, 0),
        "has restarts": lambda: pictures.jpeg(90, 70, restart_marker_blocks=2),
        "would grow": lambda: pictures.encoded(np.zeros((256, 16, 3), np.uint8), quality=5),
    }[kind]()
    assert add_restarts(stored) == stored.tobytes()
    assert add_restarts(stored.tobytes()) == stored.tobytes()


def test_doing_it_twice_changes_nothing() -> None:
    once = add_restarts(pictures.jpeg(256, 192))
    assert add_restarts(once) == once


def test_a_damaged_picture_is_named() -> None:
    stored = pictures.jpeg(160, 120)
    start = read_header(stored).scan_start
    for damaged in (stored[: len(stored) * 2 // 3], pictures.patched(stored, start + 200, b"\xff\xd9")):
        with pytest.raises(CorruptSample):
            add_restarts(damaged)
    with pytest.raises(ValueRejected, match="target"):
        add_restarts(stored, 0)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_fuzzed_streams_are_marked_without_loss_or_named(data: st.DataObject) -> None:
    stored = pictures.jpeg(96, 80, data.draw(st.sampled_from(["4:2:0", "4:4:4", "gray"]))).copy()
    for _ in range(data.draw(st.integers(1, 4))):
        stored[data.draw(st.integers(20, len(stored) - 1))] = data.draw(st.integers(0, 255))
    try:
        marked = add_restarts(stored, 32)
        before = decoded(stored)
    except CorruptSample:
        return
    assert np.array_equal(decoded(marked), before)
