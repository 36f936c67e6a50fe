"""Stored pictures of any size to delivered rows: header, draws, decoding of the part that is needed, resize, the rest.

Only what the first stage of the recipe can see is decoded, at the scale that docs/recipes.md ("Decode mode") names;
pixels of the packed level RAW are read where they lie. The bytes depend on (stored bytes, recipe, seed, epoch,
validation, sample id) only.
"""

from __future__ import annotations

import io
import math
import struct

import numpy as np
import numpy.typing as npt
from PIL import Image

from renaissance.core.dtype import DType
from renaissance.core.errors import CorruptSample, DTypeError, ShapeError, ValueRejected
from renaissance.core.philox import epoch_word, seed_words
from renaissance.data import kernels, stages
from renaissance.data.chain import square_side
from renaissance.data.compile import MAX_PADDED_CHANNELS, pixel_table
from renaissance.data.finish import BAND
from renaissance.data.jpeg import MAX_PIXELS, Decoder, PictureHeader, read_header
from renaissance.data.jpeg.loading import load_kernels
from renaissance.data.recipe import Recipe
from renaissance.data.sources.spec import Encoding
from renaissance.data.steps import (
    Box,
    BoxRule,
    CropWindow,
    Cut,
    Key,
    LastPass,
    Scratch,
    Style,
    crop_corner,
    frozen,
    plain_style,
    resample,
    run_steps,
    steps_of,
)
from renaissance.data.transforms import FastRandomResizedCrop, Kind

Bytes = npt.NDArray[np.uint8]

CHANNELS = 3
RAW_HEADER = 8
"""Bytes before the pixels of level RAW: u32 width, u32 height."""
DENOMINATORS = (8, 4, 2)


class PictureRecipe:
    """One recipe for pictures of any size and one output type. Owns scratch and a decoder: one per thread."""

    def __init__(self, recipe: Recipe, dtype: DType, padded_channels: int) -> None:
        self.recipe = recipe
        self.dtype = dtype
        self.padded_channels = padded_channels
        self._index, self._first = recipe.require_variable_sizes()
        self._last = LastPass.of(recipe, dtype, padded_channels, pixel_table(recipe.normalization, dtype))
        self._is_resize = self._first.kind is Kind.RESIZE
        self._rule = BoxRule(self._index, self._first) if self._is_resize else None
        fast = recipe.decode == "fast" or isinstance(self._first, FastRandomResizedCrop)
        self._fast = fast
        self._scales = fast or recipe.decode == "scaled"
        side = square_side(self._first)
        self._side = side
        rest = recipe.segments(side, side, self._index + 1)
        crop = (
            rest[0]
            if rest and rest[0].kind is Kind.GEOMETRIC and self._is_resize and CropWindow.fits(rest[0])
            else None
        )
        self._window = CropWindow(crop, (side, side))
        self._steps = steps_of(rest[1:] if crop else rest, CHANNELS, self._last)
        self._is_random = recipe.is_random
        self._scratch = Scratch()
        self._decoder = Decoder()
        self._seed: int | None = None
        self._key = seed_words(0)
        self._compile()

    @property
    def row_bytes(self) -> int:
        """Bytes of one delivered sample."""
        return self._last.row_bytes

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        """[S,S,padded_channels] of one delivered sample."""
        return self.recipe.resolution, self.recipe.resolution, self.padded_channels

    @property
    def scratch_bytes(self) -> int:
        """Memory kept between calls: bounded by the largest picture so far, and by the decoder's own bound."""
        return self._scratch.nbytes + self._decoder.scratch_bytes

    def make(
        self,
        stored: Bytes,
        encoding: Encoding,
        sample_id: int,
        seed: int,
        epoch: int,
        validation: bool,
        out_row: Bytes,
    ) -> int:
        """Make the row of one sample from its stored bytes (uint8[n]); returns the XXH64 of the row.

        ``out_row`` uint8[row_bytes] is written in place, and may be half written after an error. Raises CorruptSample
        (which does not name the file) when the stored bytes are damaged; ShapeError, DTypeError or ValueRejected for
        arguments that do not fit.
        """
        key = self._checked(stored, sample_id, seed, epoch, validation, out_row)
        if encoding is Encoding.RAW:
            return self._make_raw(stored, key, out_row)
        if encoding is not Encoding.PICTURES:
            raise ValueRejected(f"make: encoding is {encoding!r}; expected PICTURES or RAW")
        return self._make_picture(stored, read_header(stored), key, out_row)

    def _checked(self, stored: Bytes, sample_id: int, seed: int, epoch: int, validation: bool, out_row: Bytes) -> Key:
        if stored.dtype != np.uint8 or stored.ndim != 1 or not stored.flags.c_contiguous:
            raise DTypeError(f"make: stored is {stored.dtype} {stored.shape}; expected contiguous uint8[n]")
        if out_row.dtype != np.uint8 or out_row.shape != (self.row_bytes,) or not out_row.flags.c_contiguous:
            raise ShapeError(f"make: out_row is {out_row.dtype} {out_row.shape}; expected uint8[{self.row_bytes}]")
        if validation and self._is_random:
            self.recipe.require_deterministic()
        if seed != self._seed:
            if not 0 <= seed < 1 << 64:
                raise ValueRejected(f"make: seed is {seed}; expected 0 to 2**64 - 1")
            self._seed, self._key = seed, seed_words(seed)
        if not 0 <= sample_id <= kernels.LAST_ID:
            raise ValueRejected(f"make: sample_id is {sample_id}; expected 0 to {kernels.LAST_ID}")
        return *self._key, sample_id, np.uint32(epoch_word(epoch, validation))

    def _make_raw(self, stored: Bytes, key: Key, row: Bytes) -> int:
        width, height = raw_size(stored)
        box = self._box(width, height, key)
        return self._write(frozen(stored), RAW_HEADER, width, height, (0, 0), box, 1, key, row)

    def _make_picture(self, stored: Bytes, header: PictureHeader, key: Key, row: Bytes) -> int:
        box = self._box(header.width, header.height, key)
        f = self._denominator(header, box[2], box[3])
        left, top, right, bottom = self._seen(box, f, key)
        seen = max(left, 0), max(top, 0), min(right, header.width), min(bottom, header.height)
        decoded = self._decoder.decode(stored, header, seen, f, self._fast)
        pixels = np.ascontiguousarray(decoded.pixels)
        corner = decoded.x0, decoded.y0
        return self._write(frozen(pixels), 0, pixels.shape[1], pixels.shape[0], corner, box, f, key, row)

    def _box(self, width: int, height: int, key: Key) -> Box:
        """What the first stage sees (x, y, width, height); a crop may reach beyond the picture."""
        if self._rule is not None:
            return self._rule.box(width, height, key)
        x, y = crop_corner(self._index, self._first, width, height, key)
        return x, y, self._side, self._side

    def _seen(self, box: Box, f: int, key: Key) -> Box:
        """(x0, y0, x1, y1): at least the pixels that count; of a resized box, those behind the crop's window."""
        x, y, w, h = box
        window = self._window.place(key)
        if self._rule is None or window[2:] == (self._side, self._side):
            return x, y, x + w, y + h
        x0, x1 = _reach(window[0], window[2], w, self._side, f)
        y0, y1 = _reach(window[1], window[3], h, self._side, f)
        return x + x0, y + y0, x + x1, y + y1

    def _denominator(self, header: PictureHeader, width: int, height: int) -> int:
        if self._scales and self._is_resize and header.kind == "jpeg":
            for f in DENOMINATORS:
                if min(width, height) >= f * self._side:
                    return f
        return 1

    def _write(
        self,
        source: Bytes,
        start: int,
        width: int,
        height: int,
        corner: tuple[int, int],
        box: Box,
        f: int,
        key: Key,
        row: Bytes,
    ) -> int:
        """Cut ``box`` (of the full-size picture) out of pixels width x height, whose first stands at ``corner`` of the
        picture at 1/f; resize or copy; carry out the rest.
        """
        last, steps, scratch = self._last, self._steps, self._scratch
        style: Style
        if steps:
            columns, rows = self._window.size[1], self._window.size[0]
            canvas = scratch.canvas(columns * rows * CHANNELS)
            style, target = plain_style(CHANNELS), (canvas, canvas)
        else:
            style, target = last.style(key), last.target(row)
        x, y, w, h = box
        if self._rule is None:
            window = x - corner[0], y - corner[1], w, h
            line = scratch.fit_line(w * max(CHANNELS, self.padded_channels) + BAND)
            digest = int(
                stages.copy_stage(source, (start, width * CHANNELS, width, height), window, target, style, line)
            )
        else:
            left, top = x // f, y // f
            right, bottom = -(-(x + w) // f), -(-(y + h) // f)
            inner = x / f - left, y / f - top, (x + w) / f - left, (y + h) / f - top
            left, right, top, bottom = left - corner[0], right - corner[0], top - corner[1], bottom - corner[1]
            cut = Cut(
                source,
                start + (top * width + left) * CHANNELS,
                width * CHANNELS,
                right - left,
                bottom - top,
                -left * CHANNELS,
                (width - left) * CHANNELS,
            )
            digest = resample(cut, inner, self._side, self._window.place(key), style, target, scratch)
        if steps:
            return run_steps(steps, canvas, key, scratch, last, row)
        return digest

    def _compile(self) -> None:
        """Compile, or load from the cache, every kernel that ``make`` needs, on a small picture of each encoding."""
        picture = np.zeros((9, 40, CHANNELS), np.uint8)
        raw = np.frombuffer(struct.pack("<II", 40, 9) + picture.tobytes(), np.uint8)
        file = io.BytesIO()
        Image.fromarray(picture).save(file, "JPEG")
        jpeg = np.frombuffer(file.getvalue(), np.uint8)
        row = np.zeros(self.row_bytes, np.uint8)
        self.make(raw, Encoding.RAW, 0, 0, 0, False, row)
        self.make(jpeg, Encoding.PICTURES, 0, 0, 0, False, row)
        load_kernels()


def _reach(begin: int, count: int, length: int, size: int, f: int) -> tuple[int, int]:
    """The part of ``length`` pixels, a little generous, that ``count`` of the ``size`` resized ones are made from."""
    scale = length / size
    spread = max(scale, f) + 2 * f
    low, high = math.floor((begin + 0.5) * scale - spread), math.ceil((begin + count - 0.5) * scale + spread)
    return max(low, 0), min(high, length)


def raw_size(stored: Bytes) -> tuple[int, int]:
    """(width, height) of a sample of level RAW; raises CorruptSample when its length does not match."""
    if stored.size < RAW_HEADER:
        raise CorruptSample(f"RAW picture: {stored.size} bytes; expected at least {RAW_HEADER} (width and height)")
    width, height = struct.unpack("<II", stored[:RAW_HEADER].tobytes())
    if not (width and height and width * height <= MAX_PIXELS):
        raise CorruptSample(
            f"RAW picture: {width}x{height} pixels at offset 0; expected at least 1x1 and at most {MAX_PIXELS} pixels"
        )
    expected = RAW_HEADER + width * height * CHANNELS
    if stored.size != expected:
        raise CorruptSample(f"RAW picture: {stored.size} bytes for {width}x{height} pixels; expected {expected}")
    return width, height


def compile_pictures(recipe: Recipe, dtype: DType = DType.FP32, padded_channels: int | None = None) -> PictureRecipe:
    """Fix a recipe to one output type for pictures of any size, and compile the kernels if they are not cached yet.

    ``padded_channels`` (default 3) is the number of channels written; those past the third are 0. Raises ShapeError,
    DTypeError or ValueRejected naming what does not fit, among them a first transform that is not a crop or resize.
    """
    padded = CHANNELS if padded_channels is None else padded_channels
    if recipe.color_channels != CHANNELS:
        raise ShapeError(f"compile_pictures: pictures have {CHANNELS} channels, the recipe {recipe.color_channels}")
    if not CHANNELS <= padded <= MAX_PADDED_CHANNELS:
        raise ShapeError(f"compile_pictures: padded_channels is {padded}; expected {CHANNELS} to {MAX_PADDED_CHANNELS}")
    return PictureRecipe(recipe, dtype, padded)
