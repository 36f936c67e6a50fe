"""The segments of a chain as steps that run one after the other on one picture, and the last pass into a row.

Between two steps lies a uint8 picture in scratch. The last step writes the row itself where it can: a resize and a
geometric segment do, behind a pixel op the picture is copied through the last pass. A crop right behind a resize is
not a step: the resize computes just the window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from renaissance.core import exact_math
from renaissance.core.dtype import DType
from renaissance.data import draws, kernels, stages
from renaissance.data.chain import Segment, Size
from renaissance.data.finish import BAND, BYTES, line_constants
from renaissance.data.geometry import centre_offset, record_reals, segment_tables
from renaissance.data.pixel_ops import apply_pixel_op, pixel_op_tables
from renaissance.data.pixel_ops import scratch_bytes as pixel_scratch_bytes
from renaissance.data.recipe import Recipe
from renaissance.data.resize import taps_at_most
from renaissance.data.transforms import CenterCrop, Kind, RandomCrop, RandomResizedCrop, Resize, Transform
from renaissance.data.vectors import LANES, ROWS, STEP_WORDS

Bytes = npt.NDArray[np.uint8]
Key = tuple[np.uint32, np.uint32, int, np.uint32]
"""Both words of the seed, sample id, epoch word."""
Box = tuple[int, int, int, int]
Style = tuple[Any, ...]
"""(channels, padded, flip, erased box, line kind, constants, table): how a stage writes."""

_NO_BOX = (0, 0, 0, 0)
_NO_CONSTANTS = np.zeros((4, 0), np.float32)
_PLAN_STEPS = 256
_VALUES = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A flat read-only view, so that one compiled form of a kernel serves mapped files too."""
    view = array.reshape(-1)
    if view is array:
        view = array.view()
    view.flags.writeable = False
    return view


class Scratch:
    """Memory that steps use and leave behind; grown when a step needs more. For one thread at a time."""

    def __init__(self) -> None:
        self.line = np.empty(0, np.uint8)
        self.pixel = np.empty(0, np.uint8)
        self._canvases = [np.empty(0, np.uint8), np.empty(0, np.uint8)]
        self._turn = 0
        self._columns = self._rows = (0, 0)
        self._steps = _PLAN_STEPS
        self._lines = 0
        self.resize: tuple[npt.NDArray[Any], ...] = ()
        self._grow_resize()

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        arrays = (self.line, self.pixel, *self._canvases, *self.resize)
        return sum(array.nbytes for array in arrays)

    def canvas(self, size: int) -> Bytes:
        """``size`` bytes for the next picture; the picture before stays valid."""
        self._turn ^= 1
        if self._canvases[self._turn].size < size:
            self._canvases[self._turn] = np.empty(size, np.uint8)
        return self._canvases[self._turn][:size]

    def fit_line(self, size: int) -> Bytes:
        if self.line.size < size:
            self.line = np.empty(size, np.uint8)
        return self.line

    def fit_pixel(self, size: int) -> Bytes:
        if self.pixel.size < size:
            self.pixel = np.empty(size, np.uint8)
        return self.pixel

    def fit_resize(self, box: tuple[float, float], size: int, columns: int, rows: int, padded: int) -> None:
        """Room to resample ``box`` (width, height) to ``size``, of which columns x rows pixels are wanted."""
        taps_x, taps_y = taps_at_most(box[0], size), taps_at_most(box[1], size)
        line_bytes = (columns * padded + 63) // 64 * 64
        lines = (taps_y + 2 * ROWS) * line_bytes
        wanted_columns = max(columns, self._columns[0]), max(columns * taps_x, self._columns[1])
        wanted_rows = max(rows, self._rows[0]), max(rows * taps_y, self._rows[1])
        fits = (wanted_columns, wanted_rows) == (self._columns, self._rows)
        line = self.resize[-2].size  # self.line may have grown since
        if fits and lines <= self._lines and columns * padded <= line:
            return
        self._columns, self._rows, self._lines = wanted_columns, wanted_rows, max(lines, self._lines)
        self.fit_line(columns * padded)
        self._grow_resize()

    def more_steps(self) -> None:
        """The plan of the columns did not fit: twice the room."""
        self._steps *= 2
        self._grow_resize()

    def _grow_resize(self) -> None:
        groups = self._steps + 1
        self.resize = (
            np.empty(self._columns[0], np.int32),
            np.empty(self._columns[0], np.int32),
            np.empty(self._columns[1], np.int32),
            np.empty(self._rows[0], np.int32),
            np.empty(self._rows[0], np.int32),
            np.empty(self._rows[1], np.int32),
            np.empty(self._steps, np.int64),
            np.empty(self._steps * STEP_WORDS, np.uint32),
            np.empty(max(groups, self.line.size // LANES + 2), np.int64),
            np.zeros(self._lines, np.uint8),
            self.line,
            np.empty(self.line.size, np.int32),
        )


@dataclass(frozen=True, slots=True, eq=False)
class LastPass:
    """FusedNormalization of a recipe for one output type: what a stage needs to write and hash the row."""

    recipe: Recipe
    dtype: DType
    padded: int
    table: npt.NDArray[Any]
    kind: int
    constants: npt.NDArray[np.float32]
    reals: npt.NDArray[np.float64]
    flip_op: int
    erase_op: int

    @classmethod
    def of(cls, recipe: Recipe, dtype: DType, padded: int, table: npt.NDArray[Any]) -> LastPass:
        """``table``: ``compile.pixel_table`` of the recipe's normalisation."""
        norm, fused = recipe.normalization, recipe.fused_normalization
        kind, constants = line_constants(norm.mean, norm.std, table, dtype, padded)
        flip_op = fused.flip[0] if fused.flip else -1
        erase_op = fused.erase[0] if fused.erase and fused.erase[1].p > 0 else -1
        return cls(recipe, dtype, padded, table, kind, constants, record_reals(fused), flip_op, erase_op)

    @property
    def row_bytes(self) -> int:
        return self.recipe.resolution**2 * self.padded * self.dtype.itemsize

    @property
    def is_drawn(self) -> bool:
        return self.flip_op >= 0 or self.erase_op >= 0

    def style(self, key: Key) -> Style:
        """How the row of this sample is written."""
        flip, box = False, _NO_BOX
        if self.is_drawn:
            flip, box = draws.draw_record(self.flip_op, self.erase_op, self.reals, self.recipe.resolution, key)
        return self.recipe.color_channels, self.padded, flip, box, self.kind, self.constants, self.table

    def target(self, row: Bytes) -> tuple[Bytes, npt.NDArray[Any]]:
        """The row as bytes and as values."""
        return row, row.view(_VALUES[self.dtype.itemsize])


def plain_style(channels: int) -> Style:
    """How a picture between two steps is written."""
    return channels, channels, False, _NO_BOX, BYTES, _NO_CONSTANTS, _IDENTITY[:channels]


_IDENTITY = np.tile(np.arange(256, dtype=np.uint8), (3, 1))


class Step(Protocol):
    """One segment (or a resize with its crop) on a picture of known size."""

    def run(self, picture: Bytes, key: Key, scratch: Scratch) -> Bytes:
        """The next picture, from a flat one that is not changed unless it lies in scratch."""

    def write(self, picture: Bytes, key: Key, scratch: Scratch, last: LastPass, row: Bytes) -> int:
        """The same as the last step: into ``row`` by the last pass. Returns the XXH64 of the row."""


class GeometryStep:
    """A segment of geometric transforms; the same kernel as recipes of one segment."""

    def __init__(self, segment: Segment, last: LastPass | None, channels: int) -> None:
        self._out = segment.out_size
        self._side = max(segment.out_size)  # the kernel makes squares; what is beyond the picture is cut off
        self._channels = channels
        if last is None:
            args = channels, _IDENTITY[:channels], BYTES, _NO_CONSTANTS, None
        else:
            args = last.padded, last.table, last.kind, last.constants, last.recipe.fused_normalization  # type: ignore[assignment]
        self._tables = segment_tables(segment, channels, *args)
        self._zero = frozen(np.zeros(1, np.int64))

    def _launch(self, picture: Bytes, key: Key, out: Bytes, values: npt.NDArray[Any]) -> int:
        k0, k1, sample, word = key
        hashes = np.empty(1, np.uint64)
        ids = frozen(np.array([sample], np.int64))
        kernels.process_rows(
            frozen(picture), self._zero, ids, self._zero, out, values, hashes, self._tables, k0, k1, word
        )
        return int(hashes[0])

    def run(self, picture: Bytes, key: Key, scratch: Scratch) -> Bytes:
        square = scratch.canvas(self._side * self._side * self._channels).reshape(1, -1)
        self._launch(picture, key, square, square)
        if self._out == (self._side, self._side):
            return square.reshape(-1)
        height, width = self._out
        cut = square.reshape(self._side, self._side, self._channels)[:height, :width]
        return np.ascontiguousarray(cut).reshape(-1)

    def write(self, picture: Bytes, key: Key, scratch: Scratch, last: LastPass, row: Bytes) -> int:
        bytes_, values = last.target(row)
        return self._launch(picture, key, bytes_.reshape(1, -1), values.reshape(1, -1))


class CropWindow:
    """The crops behind a resize as a window of its result, when no fill can show."""

    def __init__(self, segment: Segment | None, size: Size) -> None:
        self.size = segment.out_size if segment else size
        self._crops = tuple(zip(segment.ops, segment.sizes, strict=False)) if segment else ()

    @staticmethod
    def fits(segment: Segment) -> bool:
        return all(
            isinstance(op, CenterCrop | RandomCrop) and op.size <= min(size)
            for (_, op), size in zip(segment.ops, segment.sizes, strict=False)
        )

    def place(self, key: Key) -> Box:
        """(x, y, width, height) for this sample."""
        x = y = 0
        for (index, op), (height, width) in self._crops:
            left, top = crop_corner(index, op, width, height, key)
            x, y = x + left, y + top
        return x, y, self.size[1], self.size[0]


def crop_corner(index: int, op: Transform, width: int, height: int, key: Key) -> tuple[int, int]:
    """Left and top edge of a CenterCrop's or RandomCrop's window in a picture; negative where zeros show."""
    assert isinstance(op, CenterCrop | RandomCrop)
    if isinstance(op, CenterCrop):
        return centre_offset(width, op.size), centre_offset(height, op.size)
    missing = max(op.size - width, op.size - height, 0)
    spread = width + 2 * missing - op.size + 1, height + 2 * missing - op.size + 1
    left, top = draws.draw_corner(*spread, index, key)
    return left - missing, top - missing


class BoxRule:
    """The crop box of a resize, for pictures of any size."""

    def __init__(self, index: int, transform: Transform) -> None:
        assert isinstance(transform, Resize | RandomResizedCrop)
        self.size = transform.size
        self._index = index
        self._random = isinstance(transform, RandomResizedCrop)
        if isinstance(transform, RandomResizedCrop):
            (low, high), ratio = transform.scale, tuple(transform.ratio)
            self._args = low, high - low, ratio, exact_math.log2(ratio[1] / ratio[0])

    def box(self, width: int, height: int, key: Key) -> Box:
        """(x, y, width, height) for this sample."""
        if self._random:
            box: Box = draws.draw_resized_box(width, height, *self._args, self._index, key)
            return box
        side = min(width, height)
        return (width - side) // 2, (height - side) // 2, side, side


@dataclass(frozen=True, slots=True)
class Cut:
    """Pixels cut out of a picture: flat source, place of the first byte, bytes between rows, and the extent."""

    source: Bytes
    start: int
    pitch: int
    width: int
    height: int
    low: int
    """First byte of a row that exists, counted from its first cut-out pixel: at most 0."""
    high: int
    """Where a row's bytes end, counted likewise."""


def resample(
    cut: Cut,
    box: tuple[float, float, float, float],
    size: int,
    window: Box,
    style: Style,
    target: tuple[Bytes, npt.NDArray[Any]],
    scratch: Scratch,
) -> int:
    """``stages.resize_stage`` with scratch that fits; returns the hash."""
    scratch.fit_resize((box[2] - box[0], box[3] - box[1]), size, window[2], window[3], style[1])
    place = (cut.start, cut.pitch, cut.width, cut.height, cut.low, cut.high)
    while True:
        done, digest = stages.resize_stage(cut.source, place, box, size, window, target, style, scratch.resize)
        if done:
            return int(digest)
        scratch.more_steps()


class ResizeStep:
    """A resize of a picture of known size, and the crop behind it."""

    def __init__(self, segment: Segment, crop: Segment | None, channels: int) -> None:
        ((index, transform),) = segment.ops
        self._rule = BoxRule(index, transform)
        self._in = segment.in_size
        self._window = CropWindow(crop, segment.out_size)
        self._channels = channels

    def _resample(self, picture: Bytes, key: Key, style: Style, target: Any, scratch: Scratch) -> int:
        height, width = self._in
        x, y, w, h = self._rule.box(width, height, key)
        c = self._channels
        cut = Cut(frozen(picture), (y * width + x) * c, width * c, w, h, -x * c, (width - x) * c)
        box = 0.0, 0.0, float(w), float(h)
        return resample(cut, box, self._rule.size, self._window.place(key), style, target, scratch)

    def run(self, picture: Bytes, key: Key, scratch: Scratch) -> Bytes:
        height, width = self._window.size
        out = scratch.canvas(height * width * self._channels)
        self._resample(picture, key, plain_style(self._channels), (out, out), scratch)
        return out

    def write(self, picture: Bytes, key: Key, scratch: Scratch, last: LastPass, row: Bytes) -> int:
        return self._resample(picture, key, last.style(key), last.target(row), scratch)


class PixelStep:
    """A pixel op, in place."""

    def __init__(self, segment: Segment, channels: int) -> None:
        ((self._index, transform),) = segment.ops
        self._shape = (*segment.in_size, channels)
        self._tables = pixel_op_tables(transform)
        self._scratch = pixel_scratch_bytes(*self._shape)

    def run(self, picture: Bytes, key: Key, scratch: Scratch) -> Bytes:
        if not picture.flags.writeable:  # a stored picture
            stored, picture = picture, scratch.canvas(picture.size)
            picture[:] = stored
        k0, k1, sample, word = key
        scratch_bytes = scratch.fit_pixel(self._scratch)
        apply_pixel_op(*self._tables, picture, scratch_bytes, *self._shape, k0, k1, self._index, sample, word)
        return picture

    def write(self, picture: Bytes, key: Key, scratch: Scratch, last: LastPass, row: Bytes) -> int:
        return write_picture(self.run(picture, key, scratch), key, scratch, last, row)


def write_picture(picture: Bytes, key: Key, scratch: Scratch, last: LastPass, row: Bytes) -> int:
    """A finished picture through the last pass."""
    size, channels = last.recipe.resolution, last.recipe.color_channels
    cut = 0, size * channels, size, size
    line = scratch.fit_line(size * last.padded + BAND)
    digest = stages.copy_stage(frozen(picture), cut, (0, 0, size, size), last.target(row), last.style(key), line)
    return int(digest)


def steps_of(segments: tuple[Segment, ...], channels: int, last: LastPass) -> tuple[Step, ...]:
    """The steps that carry out ``segments``, which end at the recipe's resolution."""
    steps: list[Step] = []
    place = 0
    while place < len(segments):
        segment = segments[place]
        following = segments[place + 1] if place + 1 < len(segments) else None
        place += 1
        if segment.kind is Kind.PIXEL:
            steps.append(PixelStep(segment, channels))
        elif segment.kind is Kind.RESIZE:
            crop = following if following and following.kind is Kind.GEOMETRIC and CropWindow.fits(following) else None
            place += crop is not None
            steps.append(ResizeStep(segment, crop, channels))
        else:
            steps.append(GeometryStep(segment, last if place == len(segments) else None, channels))
    return tuple(steps)


def run_steps(steps: tuple[Step, ...], picture: Bytes, key: Key, scratch: Scratch, last: LastPass, row: Bytes) -> int:
    """Carry out a chain on a flat picture and write the row; returns its XXH64."""
    if not steps:
        return write_picture(picture, key, scratch, last, row)
    for step in steps[:-1]:
        picture = step.run(picture, key, scratch)
    return steps[-1].write(picture, key, scratch, last, row)
