"""One source picture to the bytes that a level stores (spec/data 1.7); also the work of packing processes.

Level 0 keeps the stream. Levels 1 to 3 scale it down, cut it (2 and 3) and encode it again, as Pillow does by default:
grey and CMYK stay what they are, palettes and alpha become RGB, Exif orientation is not applied. Level RAW stores the
RGB pixels that the decoder of ``renaissance.data.jpeg`` gives. Nothing is ever enlarged.
"""

from __future__ import annotations

import io
import os
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import PIL
from PIL import Image, features

from renaissance.core.errors import CorruptSample, RenaissanceError
from renaissance.data.formats.imagenet import MAX_PICTURE_BYTES, PictureLevel, pack_raw_picture, picture_level
from renaissance.data.jpeg import Decoder, PictureHeader, add_restarts, decoder_identity, read_header
from renaissance.data.jpeg.decoder import quiet, uses_turbo
from renaissance.data.sources.reading import SHORTAGES

TARGET_SIDE = 400
"""Short side of levels 1 to 3, in pixels."""
LONG_SIDE = 600
"""Long side that levels 2 and 3 cut to."""
SCALED_ABOVE = {1: 400, 2: 440, 3: 440}
"""Pictures whose short side is larger are scaled; those between the two values are only cut at levels 2 and 3."""
QUALITY = {1: 90, 2: 90, 3: 80}
RESTART_TARGET = 128
"""Wanted width, in pixels, of the parts that restart markers make: a crop decodes whole parts."""


@dataclass(frozen=True, slots=True)
class Making:
    """How pictures are made; crosses to the packing processes. ``short_side`` acts for level RAW, in pixels."""

    level: int | str
    short_side: int = 0
    restart_windows: bool = False


@dataclass(frozen=True, slots=True)
class Made:
    """A picture as it is stored; width and height are those of the stored picture, in pixels."""

    stored: bytes
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a source file cannot be stored; the text does not name it."""

    reason: str


_of_thread = threading.local()
"""A decoder owns memory that it reuses."""
FileState = tuple[int, int]
"""Bytes and time of the last change (ns) of a source file; (-1, -1) where there is none."""


def encoder_identity(level: PictureLevel) -> str | None:
    """The libraries whose versions decide the stored bytes of this level; None where the source's bytes are kept."""
    if level.raw:
        return f"{decoder_identity()}; resized by Pillow {PIL.__version__}"
    turbo = features.version("libjpeg_turbo") or features.version("jpg")
    return None if level.code == 0 else f"Pillow {PIL.__version__} (libjpeg-turbo {turbo})"


def make_picture(data: bytes, making: Making) -> Made:
    """The stored form of one source file. Raises CorruptSample (its text does not name the file)."""
    level = picture_level(making.level)
    header = read_header(np.frombuffer(data, np.uint8))
    if level.code == 0:
        stored = add_restarts(data, RESTART_TARGET) if making.restart_windows else data
        return Made(stored, header.width, header.height)
    if level.raw:
        pixels = _scaled_exactly(_decoder().decode(np.frombuffer(data, np.uint8), header).pixels, making.short_side)
        return Made(pack_raw_picture(pixels), pixels.shape[1], pixels.shape[0])
    stored, width, height = _encoded_again(data, header, level.code)
    if making.restart_windows:
        stored = add_restarts(stored, RESTART_TARGET)
    return Made(stored, width, height)


def _encoded_again(data: bytes, header: PictureHeader, level: int) -> tuple[bytes, int, int]:
    encoded = io.BytesIO()
    try:
        with quiet(), _opened(data, header) as picture:
            made = _for_jpeg(_cut(_scaled(_from_16_bits(picture), level), level))
            made.save(encoded, "JPEG", quality=QUALITY[level])
    except (OSError, ValueError, SyntaxError, EOFError, struct.error, Image.DecompressionBombError) as error:
        if isinstance(error, CorruptSample):
            raise
        raise CorruptSample(f"the {header.kind.upper()} is damaged: {error}") from None
    return encoded.getvalue(), made.width, made.height


def _opened(data: bytes, header: PictureHeader) -> Image.Image:
    """The picture in the mode that Pillow gives it, with the metadata that Pillow hands on when it encodes.

    What Pillow takes for intact may be damaged: it ignores libjpeg's warnings and fills with grey, which would then be
    encoded as if it were the picture. So our decoder, which gives the same pixels in less time, has a look first.
    """
    picture = Image.open(io.BytesIO(data), formats=(header.kind.upper(),))
    if not uses_turbo(header):
        return picture
    pixels = _decoder().decode(np.frombuffer(data, np.uint8), header).pixels
    if header.color == "gray":
        return picture
    decoded = Image.fromarray(pixels)
    decoded.info = picture.info
    return decoded


def _from_16_bits(picture: Image.Image) -> Image.Image:
    # Pillow would clip at 255; the decoder keeps the high byte, and so do we.
    if not picture.mode.startswith("I"):
        return picture
    return Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))


def _scaled(picture: Image.Image, level: int) -> Image.Image:
    if min(picture.size) <= SCALED_ABOVE[level]:
        return picture
    # Truncation of the double-precision product: some short sides become 399 (539, 578, ...), as in existing files.
    scale = TARGET_SIDE / min(picture.size)
    return picture.resize(
        (int(picture.width * scale), int(picture.height * scale)), Image.Resampling.LANCZOS
    )  # palettes take the nearest pixel, Pillow's rule, because they are looked up afterwards


def _cut(picture: Image.Image, level: int) -> Image.Image:
    if level == 1 or (max(picture.size) <= LONG_SIDE and min(picture.size) <= TARGET_SIDE):
        return picture
    limits = (LONG_SIDE, TARGET_SIDE) if picture.width > picture.height else (TARGET_SIDE, LONG_SIDE)
    width, height = min(picture.width, limits[0]), min(picture.height, limits[1])
    left, top = (picture.width - width) // 2, (picture.height - height) // 2
    return picture.crop((left, top, left + width, top + height))


def _for_jpeg(picture: Image.Image) -> Image.Image:
    return picture if picture.mode in ("L", "RGB", "CMYK") else picture.convert("RGB")


def _scaled_exactly(pixels: npt.NDArray[np.uint8], short_side: int) -> npt.NDArray[np.uint8]:
    """Level RAW is ours: its short side is exactly the one asked for, the long one rounded down in integers."""
    height, width, _ = pixels.shape
    short = min(height, width)
    if short <= short_side:
        return pixels
    size = width * short_side // short, height * short_side // short
    scaled = Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS)
    return np.frombuffer(scaled.tobytes(), np.uint8).reshape(size[1], size[0], 3)  # np.asarray is twice as slow


def _decoder() -> Decoder:
    decoder: Decoder | None = getattr(_of_thread, "decoder", None)
    if decoder is None:
        decoder = _of_thread.decoder = Decoder()
    return decoder


def file_state(path: str) -> FileState:
    """Size and time of a source file."""
    try:
        status = os.stat(path)
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns


def make_from_file(path: str, making: Making) -> tuple[Made | Refused, FileState]:
    """Read and make one picture; whatever is wrong with the file comes back as Refused."""
    state = file_state(path)
    if state[0] > MAX_PICTURE_BYTES:
        return Refused(f"is {state[0]} bytes long; pictures up to {MAX_PICTURE_BYTES} bytes are read"), state
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_PICTURE_BYTES + 1)
        if len(data) != state[0]:
            return Refused("changed while it was read"), state
        return make_picture(data, making), state
    except CorruptSample as error:
        return Refused(str(error)), state
    except OSError as error:
        if error.errno in SHORTAGES:  # says nothing about the picture
            raise RenaissanceError(
                f"{path}: cannot be read now: {error.strerror}; try again with fewer --jobs"
            ) from error
        return Refused(f"cannot be read: {error.strerror}"), state


def make_chunk(work: tuple[Sequence[str], Making]) -> list[tuple[Made | Refused, FileState]]:
    """Several pictures at once: what a packing process does between two messages."""
    paths, making = work
    return [make_from_file(path, making) for path in paths]
