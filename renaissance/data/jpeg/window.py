"""Which part of a JPEG must be decoded for a window of its pixels, and whether cutting it out pays.

Pixels inside the window must equal those of a full decode. Blocks are independent; what couples them is chroma
upsampling: libjpeg's "fancy" one looks at one chroma sample beyond, on either side, and is switched off for a picture
whose chroma is two samples wide or less.
"""

from __future__ import annotations

from renaissance.data.jpeg.header import PictureHeader

Window = tuple[int, int, int, int]
"""x0, y0, x1, y1 in full-size pixels, the last two excluded."""

LEAST_MCUS = 2
"""Of a cut in either direction: one MCU at the right edge could be so narrow that upsampling changes; and below 8 x 8
pixels simplejpeg cannot be told a scale."""
FIXED, WALK, WALK_SCALED, COPY = 0.07, 0.33, 0.4, 1.1
"""Costs relative to a full decode, measured on photographs (docs/jpeg.md): tables and header; walking over all Huffman
codes at full size and scaled; copying and decoding a part, per share of the picture."""


def mcu_box(header: PictureHeader, window: Window, denominator: int) -> Window:
    """Left, top, right and bottom MCU (the last two excluded) that decoding `window` at 1 / `denominator` needs."""
    x0, y0, x1, y1 = window
    left, right = _span(x0, x1, header.mcu_width, header.mcu_columns, denominator)
    top, bottom = _span(y0, y1, header.mcu_height, header.mcu_rows, denominator)
    return left, top, right, bottom


def _span(begin: int, end: int, unit: int, units: int, denominator: int) -> tuple[int, int]:
    """First and last (excluded) of `units` MCUs of `unit` pixels for the pixels begin..end of one axis."""
    if unit > 8:  # chroma may be subsampled: a sample covers two output pixels, and one more is needed on either side
        begin = max(begin // (2 * denominator) - 1, 0) * 2 * denominator
        end = (-(-end // (2 * denominator)) + 1) * 2 * denominator
    first, last = begin // unit, min(-(-end // unit), units)
    while last - first < min(LEAST_MCUS, units):
        first, last = max(first - 1, 0), last if first > 0 else last + 1
    return first, last


def tiled_box(header: PictureHeader, box: Window) -> Window | None:
    """`box` grown to whole restart segments; None when they do not tile the picture in rectangles."""
    left, top, right, bottom = box
    interval = header.restart_interval
    if interval == 0 or header.mcu_columns % interval:
        return None
    return left // interval * interval, top, -(-right // interval) * interval, bottom


def cost(header: PictureHeader, box: Window, denominator: int, tiled: bool) -> float:
    """Time of cutting out and decoding `box`, relative to a full decode; `tiled`: along restart segments only."""
    left, top, right, bottom = box
    columns, rows, interval = header.mcu_columns, header.mcu_rows, header.restart_interval
    share = COPY * (right - left) * (bottom - top) / (columns * rows)
    if tiled:
        return FIXED + share
    walked = columns * bottom  # without restart markers from the first block on, with them from the nearest one
    if interval:
        walked = min(walked, (bottom - top) * (right - left + interval // 2))
    return FIXED + (WALK if denominator == 1 else WALK_SCALED) * walked / (columns * rows) + share


def way_to_cut(header: PictureHeader, window: Window, denominator: int) -> tuple[Window, bool] | None:
    """The MCUs to cut out for `window` and whether along restart segments; None when a full decode is quicker."""
    box = mcu_box(header, window, denominator)
    costs = [(cost(header, box, denominator, False), box, False)]
    tiled = tiled_box(header, box)
    if tiled is not None:
        costs.append((cost(header, tiled, denominator, True), tiled, True))
    best = min(costs)
    return best[1:] if best[0] < 1.0 else None
