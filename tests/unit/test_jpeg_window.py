"""A window decoded alone has the bytes of the full decode, whichever way it was cut out."""

from __future__ import annotations

import jpeg_pictures as pictures
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renaissance.core.errors import CorruptSample, ValueRejected
from renaissance.data.jpeg import Decoded, Decoder, add_restarts, read_header
from renaissance.data.jpeg.cut import Cutter
from renaissance.data.jpeg.window import mcu_box, tiled_box, way_to_cut

Window = tuple[int, int, int, int]
DECODER, REFERENCE = Decoder(), Decoder()
RESTARTS: list[dict[str, int]] = [
    {}, {"restart_marker_blocks": 1}, {"restart_marker_blocks": 2}, {"restart_marker_blocks": 5},
    {"restart_marker_rows": 1}, {"restart_marker_rows": 2}, {"restart_marker_blocks": 1000},
]  # fmt: skip


def same_pixels(part: Decoded, full: pictures.Bytes, window: Window, d: int) -> bool:
    """Whether `part` covers the window, scaled, and has the pixels of `full` there."""
    x0, y0, x1, y1 = window[0] // d, window[1] // d, -(-window[2] // d), -(-window[3] // d)
    height, width, _ = part.pixels.shape
    assert part.x0 <= x0 and x1 <= part.x0 + width, "does not cover the window across"  # noqa: PT018
    assert part.y0 <= y0 and y1 <= part.y0 + height, "does not cover the window down"  # noqa: PT018
    return np.array_equal(part.pixels[y0 - part.y0 : y1 - part.y0, x0 - part.x0 : x1 - part.x0], full[y0:y1, x0:x1])


@st.composite
def windows(draw: st.DrawFn, width: int, height: int) -> Window:
    x0, y0 = draw(st.integers(0, width - 1)), draw(st.integers(0, height - 1))
    return x0, y0, draw(st.integers(x0 + 1, width)), draw(st.integers(y0 + 1, height))


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_a_window_has_the_bytes_of_the_full_decode(data: st.DataObject) -> None:
    width, height = data.draw(st.sampled_from([(150, 110), (97, 131), (65, 17), (9, 120), (33, 33), (128, 64)]))
    sampling = data.draw(st.sampled_from(pictures.SAMPLINGS))
    optimized = data.draw(st.booleans())
    stored = pictures.jpeg(width, height, sampling, quality=data.draw(st.sampled_from([40, 92])), optimize=optimized,
                           **data.draw(st.sampled_from(RESTARTS)))  # fmt: skip
    if data.draw(st.booleans()):
        stored = np.frombuffer(add_restarts(stored, data.draw(st.sampled_from([8, 32, 128]))), np.uint8)
    window = data.draw(windows(width, height))
    denominator, fast = data.draw(st.sampled_from([1, 1, 2, 4, 8])), data.draw(st.booleans())
    header = read_header(stored)
    full = REFERENCE.decode(stored, header, None, denominator, fast).pixels
    assert same_pixels(DECODER.decode(stored, header, window, denominator, fast), full, window, denominator)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_both_ways_of_cutting_give_the_same_bytes_also_where_they_do_not_pay(data: st.DataObject) -> None:
    width, height = 112, 80
    stored = pictures.jpeg(width, height, data.draw(st.sampled_from(["4:2:0", "4:2:2", "4:4:4", "gray"])),
                           **data.draw(st.sampled_from(RESTARTS)))  # fmt: skip
    header = read_header(stored)
    window = data.draw(windows(width, height))
    box = mcu_box(header, window, 1)
    tiled = tiled_box(header, box)
    full = REFERENCE.decode(stored, header).pixels
    for rectangle, is_tiled in [(box, False)] + ([(tiled, True)] if tiled else []):
        cut = Cutter().cut(stored, header, rectangle, is_tiled)
        assert cut is not None
        small = cut[0].copy()
        part = DECODER.decode(small, read_header(small)).pixels
        left, top = rectangle[0] * header.mcu_width, rectangle[1] * header.mcu_height
        assert same_pixels(Decoded(part, left, top), full, window, 1)


@pytest.mark.parametrize("restarts", RESTARTS[:5])
def test_a_small_window_is_cut_and_not_decoded_in_full(restarts: dict[str, int]) -> None:
    stored = pictures.jpeg(320, 240, "4:2:0", **restarts)
    part = Decoder().decode(stored, read_header(stored), (160, 100, 200, 130))
    assert part.pixels.size < 320 * 240 * 3 / 8
    assert (part.x0, part.y0) != (0, 0)


@pytest.mark.parametrize("sampling", ["4:2:0", "4:2:2"])
def test_a_narrow_last_column_is_upsampled_as_in_the_whole_picture(sampling: str) -> None:
    """Two chroma samples alone would be doubled plainly: libjpeg's fancy upsampling wants more than two."""
    stored = pictures.jpeg(100, 120, sampling)
    header = read_header(stored)
    window = (98, 20, 100, 60)
    part = Decoder().decode(stored, header, window)
    assert part.x0 > 0
    assert same_pixels(part, REFERENCE.decode(stored, header).pixels, window, 1)


def test_the_way_with_the_smaller_cost_is_taken() -> None:
    plain = read_header(pictures.jpeg(320, 240, "4:2:0"))
    marked = read_header(pictures.jpeg(320, 240, "4:2:0", restart_marker_blocks=4))
    assert way_to_cut(plain, (0, 0, 320, 240), 1) is None
    way = way_to_cut(plain, (0, 0, 100, 100), 1)
    assert way == ((0, 0, 7, 7), False)
    assert way_to_cut(marked, (0, 0, 100, 100), 1) == ((0, 0, 8, 7), True)


def test_optimised_tables_without_the_code_that_a_cut_needs_are_replaced() -> None:
    pixels = np.zeros((64, 256), np.uint8)
    pixels[:] = (
        np.arange(256, dtype=np.uint8)[None, :] // 8 * 8
    )  # small steps; a cut on the right begins with a large one
    stored = pictures.encoded(pixels, optimize=True, quality=100)
    header = read_header(stored)
    window = (200, 24, 256, 48)
    assert way_to_cut(header, window, 1) is not None
    cut = Cutter().cut(stored, header, mcu_box(header, window, 1), False)
    assert cut is not None
    assert cut[0].tobytes().count(b"\xff\xc4\0\x1f") == 1, "the standard table should have been used"
    part = Decoder().decode(stored, header, window)
    assert part.x0 > 0
    assert same_pixels(part, REFERENCE.decode(stored, header).pixels, window, 1)


@pytest.mark.parametrize("kind", ["progressive", "png", "cmyk"])
def test_what_cannot_be_cut_is_decoded_in_full(kind: str) -> None:
    stored = {
        "progressive": lambda: pictures.jpeg(90, 70, progressive=True),
        "png": lambda: pictures.encoded(pictures.scene(90, 70), "PNG"),
        "cmyk": lambda: pictures.cmyk(90, 70, 0),
    }[kind]()
    part = Decoder().decode(stored, read_header(stored), (0, 0, 8, 8))
    assert part.pixels.shape == (70, 90, 3)


@pytest.mark.parametrize("window", [(0, 0, 0, 5), (5, 5, 4, 6), (-1, 0, 5, 5), (0, 0, 91, 5), (0, 0, 5, 71)])
def test_a_window_outside_the_picture_is_refused(window: Window) -> None:
    stored = pictures.jpeg(90, 70)
    with pytest.raises(ValueRejected, match="window"):
        Decoder().decode(stored, read_header(stored), window)


@pytest.mark.parametrize("restarts", RESTARTS[:3])
def test_truncation_is_found_whatever_the_window(restarts: dict[str, int]) -> None:
    stored = pictures.jpeg(160, 120, **restarts)
    header = read_header(stored)
    for cut in (len(stored) - 1, len(stored) * 2 // 3):
        with pytest.raises(CorruptSample):
            Decoder().decode(stored[:cut].copy(), header, (0, 0, 16, 16))


@pytest.mark.parametrize("restarts", RESTARTS[:3])
def test_damage_inside_the_window_is_named(restarts: dict[str, int]) -> None:
    stored = pictures.jpeg(160, 120, quality=95, **restarts)
    start = read_header(stored).scan_start
    damaged = pictures.patched(stored, start + 200, b"\xff\xd9")
    with pytest.raises(CorruptSample):
        Decoder().decode(damaged, read_header(damaged), (0, 0, 150, 60))


def test_data_left_over_in_a_segment_or_at_the_end_are_damage_inside_a_window() -> None:
    """libjpeg says so in a full decode; the small JPEG of a walk would not show it."""
    stored = pictures.jpeg(320, 120, restart_marker_rows=1)
    window = (300, 40, 320, 120)
    way = way_to_cut(read_header(stored), window, 1)
    assert way is not None
    assert not way[1]
    marker = stored.tobytes().index(b"\xff\xd3")
    for place in (marker, len(stored) - 2):
        damaged = pictures.inserted(stored, place, b"\x12\x34\x56" * 20)
        with pytest.raises(CorruptSample):
            Decoder().decode(damaged, read_header(damaged), window)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_damaged_stream_gives_the_bytes_of_its_full_decode_or_an_error(data: st.DataObject) -> None:
    """Where both decode, they agree: a walk that loses its way must never deliver something else."""
    stored = pictures.jpeg(96, 80, data.draw(st.sampled_from(["4:2:0", "4:4:4"])),
                           **data.draw(st.sampled_from(RESTARTS[:4]))).copy()  # fmt: skip
    header = read_header(stored)
    for _ in range(data.draw(st.integers(1, 3))):
        stored[data.draw(st.integers(header.scan_start, len(stored) - 3))] = data.draw(st.integers(0, 255))
    window = data.draw(windows(96, 80))
    try:
        full = REFERENCE.decode(stored, header).pixels
        part = DECODER.decode(stored, header, window)
    except CorruptSample:
        return
    assert same_pixels(part, full, window, 1)
