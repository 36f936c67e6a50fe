"""A Picture as SVG: one self-contained file without scripts, fonts or links, the same bytes for the same picture."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from xml.sax.saxutils import escape

from renaissance.graph.picture import Box, Edge, EdgeStyle, Picture

BOX_WIDTH, BOX_HEIGHT = 200, 38
LANE_PITCH, ROW_PITCH = 214, 58
MARGIN, COLUMN_GAP, TOP = 24, 124, 96
PANEL_WIDTH, PANEL_LINE, PANEL_GAP = 440, 15, 12
BAND_ABOVE, BAND_BELOW = 15, 4
TITLE_CHARACTERS, DETAIL_CHARACTERS, PANEL_CHARACTERS = 26, 33, 68
"""What fits; longer text ends in an ellipsis and is whole in the box's hint."""
LONGEST_BULGE = 54

COLOURS = {
    "convolution": "#cfe2f7",
    "normalisation": "#d5ecd4",
    "activation": "#fdf0c4",
    "pooling": "#e4d7f2",
    "fully connected": "#f8d5cf",
    "sum": "#fbdcb6",
    "loss": "#f3c6dc",
    "other": "#e8e8e8",
}
STROKES = {EdgeStyle.DATA: ("#444", "1.3", "#arrow"), EdgeStyle.SAVED: ("#b9c4d0", "1", "#saved")}


def svg(picture: Picture) -> str:
    """The drawing as XML text."""
    left = _column_starts(picture)
    panel_left = left[-1]
    panels = list(_panels(picture, panel_left))
    height = max(TOP + picture.rows * ROW_PITCH, panels[-1][1] if panels else 0) + MARGIN
    width = panel_left + (PANEL_WIDTH + MARGIN if picture.panels else 0)
    body = [*_head(picture, left, width), *_bands(picture, left)]
    boxes = {box.key: box for box in picture.boxes}
    taken = {(box.column, box.lane, box.row) for box in picture.boxes}
    for style in (EdgeStyle.SAVED, EdgeStyle.DATA):  # what is kept lies below what flows
        body += [_edge(e, boxes, left, taken) for e in picture.edges if e.style is style]
    body += [_box(box, left) for box in picture.boxes]
    body += [text for text, _ in panels]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="11">\n' + "\n".join(body) + "\n</svg>\n"
    )


def _column_starts(picture: Picture) -> list[int]:
    """Left edges of the columns, and of what comes after the last."""
    left = [MARGIN + COLUMN_GAP // 2]
    for column in range(len(picture.columns)):
        left.append(left[-1] + picture.lanes(column) * LANE_PITCH + COLUMN_GAP)
    return left


def _head(picture: Picture, left: list[int], width: int) -> Iterator[str]:
    for name, colour in (("arrow", STROKES[EdgeStyle.DATA][0]), ("saved", STROKES[EdgeStyle.SAVED][0])):
        yield (
            f'<defs><marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
            f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{colour}"/></marker></defs>'
        )
    yield f'<rect width="{width}" height="100%" fill="white"/>'
    yield _text(MARGIN, 26, picture.title, size=16, bold=True)
    x = MARGIN
    used = {box.family for box in picture.boxes}
    for family, colour in COLOURS.items():
        if family in used:
            yield f'<rect x="{x}" y="38" width="12" height="12" fill="{colour}" stroke="#666" stroke-width="0.6"/>'
            yield _text(x + 17, 48, family)
            x += 34 + 6 * len(family)
    for name, x in zip(picture.columns, left, strict=False):
        yield _text(x, TOP - 23, name, size=13, bold=True)


def _bands(picture: Picture, left: list[int]) -> Iterator[str]:
    for band in picture.bands:
        x = left[band.column] - COLUMN_GAP // 2
        y = TOP + band.first_row * ROW_PITCH - BAND_ABOVE
        width = picture.lanes(band.column) * LANE_PITCH + COLUMN_GAP // 2
        height = (band.last_row - band.first_row) * ROW_PITCH + BAND_ABOVE + BOX_HEIGHT + BAND_BELOW
        yield f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="#f6f8fa" stroke="#d5dae0"/>'
        yield f'<text x="{x + 5}" y="{y + 10}" font-size="9" fill="#6a7580">{clean(band.label)}</text>'


def _place(box: Box, left: list[int]) -> tuple[int, int]:
    return left[box.column] + box.lane * LANE_PITCH, TOP + box.row * ROW_PITCH


def _box(box: Box, left: list[int]) -> str:
    x, y = _place(box, left)
    colour = COLOURS.get(box.family, COLOURS["other"])
    return (
        f"<g><title>{clean(box.hint or f'{box.title}: {box.detail}')}</title>"
        f'<rect x="{x}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="4" fill="{colour}" stroke="#666"/>'
        f"{_text(x + 8, y + 15, _short(box.title, TITLE_CHARACTERS), bold=True)}"
        f"{_text(x + 8, y + 30, _short(box.detail, DETAIL_CHARACTERS), size=10)}</g>"
    )


def _edge(edge: Edge, boxes: dict[int, Box], left: list[int], taken: set[tuple[int, int, int]]) -> str:
    path = _path(boxes[edge.source], boxes[edge.target], left, taken)
    colour, width, marker = STROKES[edge.style]
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}" marker-end="url({marker})"/>'


def _path(source: Box, target: Box, left: list[int], taken: set[tuple[int, int, int]]) -> str:
    """The way of an edge, without passing through boxes where that can be had simply."""
    (sx, sy), (tx, ty) = _place(source, left), _place(target, left)
    s_middle, t_middle = sx + BOX_WIDTH // 2, tx + BOX_WIDTH // 2
    s_level, t_level = sy + BOX_HEIGHT // 2, ty + BOX_HEIGHT // 2
    down = source.row < target.row
    s_end, t_end = (sy + BOX_HEIGHT, ty) if down else (sy, ty + BOX_HEIGHT)
    if source.column != target.column:
        bend = COLUMN_GAP // 2
        start, end = sx + BOX_WIDTH, tx
        return f"M{start},{s_level} C{start + bend},{s_level} {end - bend},{t_level} {end},{t_level}"
    if source.row == target.row:
        start, end = (sx + BOX_WIDTH, tx) if sx < tx else (sx, tx + BOX_WIDTH)
        return f"M{start},{s_level} L{end},{t_level}"
    between = range(min(source.row, target.row) + 1, max(source.row, target.row))
    is_free = not any((source.column, source.lane, row) in taken for row in between)
    if not between or (source.lane == target.lane and is_free):
        bend = (1 if down else -1) * (ROW_PITCH - BOX_HEIGHT)
        return f"M{s_middle},{s_end} C{s_middle},{s_end + bend} {t_middle},{t_end - bend} {t_middle},{t_end}"
    if source.lane > target.lane:  # along the source's lane, then into the side of the target
        end = tx + BOX_WIDTH
        return f"M{s_middle},{s_end} C{s_middle},{t_level} {s_middle},{t_level} {end},{t_level}"
    if source.lane < target.lane:  # out of the side of the source, then along the target's lane
        start = sx + BOX_WIDTH
        return f"M{start},{s_level} C{t_middle},{s_level} {t_middle},{s_level} {t_middle},{t_end}"
    bulge = min(LONGEST_BULGE, 16 + 7 * abs(source.row - target.row))  # further out the longer the way
    return f"M{sx},{s_level} C{sx - bulge},{s_level} {tx - bulge},{t_level} {tx},{t_level}"


def _panels(picture: Picture, x: int) -> Iterator[tuple[str, int]]:
    """Every panel with the height at which it ends."""
    y = TOP - BAND_ABOVE
    for panel in picture.panels:
        lines = [part for line in panel.lines for part in textwrap.wrap(line, PANEL_CHARACTERS, subsequent_indent="  ")]
        height = PANEL_LINE * (len(lines) + 1) + 10
        rows = "".join(_text(x + 8, y + 17 + PANEL_LINE * (i + 1), line, size=10) for i, line in enumerate(lines))
        yield (
            f'<rect x="{x}" y="{y}" width="{PANEL_WIDTH}" height="{height}" rx="4" fill="#f6f8fa" stroke="#d5dae0"/>'
            f"{_text(x + 8, y + 17, panel.title, bold=True)}{rows}",
            y + height,
        )
        y += height + PANEL_GAP


def _text(x: int, y: int, text: str, size: int = 11, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" font-size="{size}"{weight}>{clean(text)}</text>'


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def clean(text: str) -> str:
    """Text as XML: escaped, and without the characters that XML 1.0 does not allow at all."""
    allowed = (c for c in text if c in "\t\n" or " " <= c <= "\ud7ff" or "\ue000" <= c <= "\ufffd" or c > "\uffff")
    return escape("".join(allowed))
