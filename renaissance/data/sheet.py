"""A contact sheet: rows of pictures with text, as one PNG. Equal arguments give equal bytes with the same Pillow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont, features

from renaissance.core.errors import ValueRejected
from renaissance.core.files import written_when_complete

MAX_PIXELS = 100_000_000
"""Of a whole sheet: 300 MB while it is drawn."""
MIN_CELL = 112
"""Pictures smaller than this many pixels are shown enlarged by a whole number, pixel by pixel."""
MARGIN, GAP, LINE, FONT_SIZE = 16, 8, 17, 13
"""Pixels: around the sheet, between cells, from text line to text line, and of the letters."""
PAPER, INK, FAINT, DAMAGED = (250, 250, 248), (20, 20, 20), (110, 110, 110), (170, 30, 30)
MIN_WIDTH = 640

Pixels = npt.NDArray[np.uint8]
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """A picture, uint8[h,w,1 or 3], or None where there is none, and the text below it."""

    pixels: Pixels | None
    caption: str


@dataclass(frozen=True, slots=True, eq=False)
class SheetRow:
    """Text above, then pictures beside each other."""

    title: str
    cells: Sequence[Cell]


def cell_size(side: int) -> int:
    """Height of the cells of a sheet whose pictures have ``side`` pixels."""
    return side * max(1, -(-MIN_CELL // side))


def contact_sheet(heading: Sequence[str], rows: Sequence[SheetRow], height: int) -> Image.Image:
    """Draw ``rows`` under the lines of ``heading``; pictures are ``height`` pixels high, at most twice as wide.

    Raises ValueRejected for a sheet of more than MAX_PIXELS.
    """
    font = _font()
    widths = _column_widths(rows, height)
    width = max(sum(widths) + GAP * max(0, len(widths) - 1) + 2 * MARGIN, MIN_WIDTH)
    lines = [part for line in heading for part in _wrapped(line, font, width - 2 * MARGIN)]
    row_height = 2 * LINE + height + 2 * GAP
    total = 2 * MARGIN + LINE * len(lines) + GAP + row_height * len(rows)
    if width * total > MAX_PIXELS:
        raise ValueRejected(
            f"the sheet would have {width}x{total} pixels; expected at most {MAX_PIXELS}: show fewer samples or draws"
        )
    sheet = Image.new("RGB", (width, total), PAPER)
    draw = ImageDraw.Draw(sheet)
    y = MARGIN
    for line in lines:
        draw.text((MARGIN, y), line, INK, font)
        y += LINE
    y += GAP
    for row in rows:
        draw.text((MARGIN, y), _shortened(row.title, font, width - 2 * MARGIN), INK, font)
        _draw_cells(sheet, draw, font, row, widths, y + LINE, height)
        y += row_height
    return sheet


def _draw_cells(
    sheet: Image.Image,
    draw: ImageDraw.ImageDraw,
    font: Font,
    row: SheetRow,
    widths: Sequence[int],
    y: int,
    height: int,
) -> None:
    x = MARGIN
    for cell, width in zip(row.cells, widths, strict=False):
        if cell.pixels is not None:
            sheet.paste(_fitted(cell.pixels, height), (x, y))
        else:
            draw.rectangle((x, y, x + width - 1, y + height - 1), outline=DAMAGED)
        ink = FAINT if cell.pixels is not None else DAMAGED
        draw.text((x, y + height), _shortened(cell.caption, font, width), ink, font)
        x += width + GAP


def write_png(path: Path, sheet: Image.Image) -> None:
    """Write the sheet; the file appears when it is complete. Raises RenaissanceError naming ``path``."""
    with written_when_complete(path) as file:
        sheet.save(file, "PNG", optimize=False)


def _column_widths(rows: Sequence[SheetRow], height: int) -> list[int]:
    widths: list[int] = []
    for row in rows:
        for column, cell in enumerate(row.cells):
            own = height if cell.pixels is None else _fitted_size(cell.pixels.shape, height)[0]
            if column == len(widths):
                widths.append(own)
            widths[column] = max(widths[column], own)
    return widths


def _fitted_size(shape: tuple[int, ...], height: int) -> tuple[int, int]:
    """(width, height) at which a picture is shown: whole multiples when enlarged."""
    h, w = shape[0], shape[1]
    larger = min(height // h, 2 * height // w)
    if larger >= 1:
        return w * larger, h * larger
    share = min(height / h, 2 * height / w)
    return max(1, round(w * share)), max(1, round(h * share))


def _fitted(pixels: Pixels, height: int) -> Image.Image:
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    size = _fitted_size(pixels.shape, height)
    kind = Image.Resampling.NEAREST if size[0] >= image.width else Image.Resampling.BILINEAR
    return image.resize(size, kind).convert("RGB")


def _font() -> Font:
    return ImageFont.load_default(FONT_SIZE) if features.check("freetype2") else ImageFont.load_default()


def _plain(text: str) -> str:
    """What every font of Pillow can draw."""
    return text.encode("latin-1", "backslashreplace").decode("latin-1")


def _shortened(text: str, font: Font, width: int) -> str:
    """The text, with its middle left out when it is too wide."""
    text = _plain(text)
    if font.getlength(text) <= width:
        return text
    kept = len(text)
    while kept and font.getlength(f"{text[: (kept + 1) // 2]}...{text[len(text) - kept // 2 :]}") > width:
        kept -= 1
    return f"{text[: (kept + 1) // 2]}...{text[len(text) - kept // 2 :]}"


def _wrapped(text: str, font: Font, width: int) -> list[str]:
    lines = [""]
    for word in _plain(text).split(" "):
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if font.getlength(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return [_shortened(line, font, width) for line in lines if line]
