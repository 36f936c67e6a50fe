"""From a recipe (a value) to a CompiledRecipe (tables for the kernels), for one source size and one output type.

Everything that does not depend on the sample is decided here, once, so that ``process`` is one compiled call. A
CompiledRecipe holds no state: the same arguments give the same bytes, from any thread or process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from renaissance.core import exact_math
from renaissance.core.dtype import DType, bf16_from_fp32
from renaissance.core.errors import DTypeError, ShapeError, ValueRejected
from renaissance.core.philox import epoch_word, seed_words
from renaissance.data import kernels
from renaissance.data.recipe import Normalization, Recipe
from renaissance.data.transforms import MAX_SIZE, Pad, RandomCrop, RandomRotation, RandomScale

DELIVERED = (DType.FP32, DType.BF16, DType.FP16, DType.UINT8)
"""Element types a batch can be delivered in."""
MAX_PADDED_CHANNELS = 64

_Tables = tuple[npt.NDArray[Any], ...]


def pixel_table(normalization: Normalization, dtype: DType) -> npt.NDArray[np.unsignedinteger]:
    """What each pixel value becomes: bit patterns [C,256] of ``dtype``.

    (pixel / 255 - mean) / std in float64, rounded once to fp32; the half types round that fp32 value to nearest even.
    uint8 delivers the pixels themselves, so it needs NO_NORM. Raises DTypeError or ValueRejected.
    """
    channels = len(normalization.mean)
    if dtype is DType.UINT8:
        if not normalization.is_identity:
            raise ValueRejected(
                f"dtype uint8 delivers pixels as they are, but normalization is {normalization.name}; "
                "choose NO_NORM, or fp32, fp16 or bf16"
            )
        return np.tile(np.arange(256, dtype=np.uint8), (channels, 1))
    if dtype not in DELIVERED:
        raise DTypeError(f"images cannot be delivered as {dtype.name}; expected {', '.join(t.name for t in DELIVERED)}")
    mean = np.array(normalization.mean, np.float64)[:, None]
    std = np.array(normalization.std, np.float64)[:, None]
    values = ((np.arange(256, dtype=np.float64) / 255.0 - mean) / std).astype(np.float32)
    if dtype is DType.FP32:
        return values.view(np.uint32)
    if dtype is DType.BF16:
        return bf16_from_fp32(values)
    if np.abs(values).max() > np.finfo(np.float16).max:
        raise ValueRejected(f"normalization std {normalization.std!r} gives values beyond fp16; choose bf16 or fp32")
    return values.astype(np.float16).view(np.uint16)


@dataclass(frozen=True, slots=True, eq=False)
class CompiledRecipe:
    """Tables of one recipe for sources [height,width,channels] and rows [S,S,padded_channels] of ``dtype``."""

    recipe: Recipe
    height: int
    width: int
    channels: int
    dtype: DType
    padded_channels: int
    _tables: _Tables

    @property
    def row_bytes(self) -> int:
        """Bytes of one delivered sample."""
        return self.recipe.resolution**2 * self.padded_channels * self.dtype.itemsize

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        """[S,S,padded_channels] of one delivered sample."""
        return self.recipe.resolution, self.recipe.resolution, self.padded_channels

    def process(
        self,
        images: npt.NDArray[np.uint8],
        at: npt.NDArray[np.int64],
        ids: npt.NDArray[np.int64],
        seed: int,
        epoch: int,
        validation: bool,
        out: npt.NDArray[np.uint8],
        rows: npt.NDArray[np.int64],
        row_hashes: npt.NDArray[np.uint64],
    ) -> None:
        """Make the pictures ``at`` (int64[k], -1 = a row of zeros) into the rows ``rows`` (int64[k]) of a slot.

        ``ids`` (int64[k]) are the sample ids whose draws are used; with a whole set in ``images`` they equal ``at``.
        images uint8[N,H,W,C]; out uint8[B,row_bytes], written in place; row_hashes uint64[B], the XXH64 of each
        written row. The bytes depend on (picture, recipe, seed, epoch, validation, id) only. Releases the GIL. Raises
        ShapeError or DTypeError for arrays that do not fit, ValueRejected for a picture, id or row out of range, an epoch
        outside 0..2**31-1, or a random recipe used for validation.
        """
        if images.ndim != 4 or images.shape[1:] != (self.height, self.width, self.channels):
            raise ShapeError(
                f"process: images are {images.shape}; the recipe was compiled for "
                f"[N,{self.height},{self.width},{self.channels}]"
            )
        if out.ndim != 2 or out.shape[1] != self.row_bytes:
            raise ShapeError(f"process: out is {out.shape}; expected [B,{self.row_bytes}] bytes")
        if at.ndim != 1 or not at.shape == ids.shape == rows.shape:
            raise ShapeError(
                f"process: at {at.shape}, ids {ids.shape} and rows {rows.shape} must be vectors of one length"
            )
        if row_hashes.shape != out.shape[:1]:
            raise ShapeError(f"process: row_hashes are {row_hashes.shape}; expected {out.shape[:1]}")
        for name, array, wanted in (
            ("images", images, np.uint8),
            ("at", at, np.int64),
            ("ids", ids, np.int64),
            ("out", out, np.uint8),
            ("rows", rows, np.int64),
            ("row_hashes", row_hashes, np.uint64),
        ):
            if array.dtype != wanted or not array.flags.c_contiguous:
                raise DTypeError(f"process: {name} is {array.dtype}; expected a contiguous {np.dtype(wanted)} array")
        if validation and self.recipe.is_random:
            self.recipe.require_deterministic()
        if not 0 <= seed < 1 << 64:
            raise ValueRejected(f"process: seed is {seed}; expected 0 to 2**64 - 1")
        bad = self._launch(images, at, ids, seed, epoch_word(epoch, validation), out, rows, row_hashes)
        if bad >= 0:
            raise ValueRejected(
                f"process: position {bad} asks for picture {at[bad]} of {images.shape[0]} as sample {ids[bad]} in row "
                f"{rows[bad]} of {out.shape[0]}; expected pictures -1 to {images.shape[0] - 1}"
            )

    def _launch(
        self,
        images: npt.NDArray[np.uint8],
        at: npt.NDArray[np.int64],
        ids: npt.NDArray[np.int64],
        seed: int,
        word: int,
        out: npt.NDArray[np.uint8],
        rows: npt.NDArray[np.int64],
        row_hashes: npt.NDArray[np.uint64],
    ) -> int:
        """The compiled call. Inputs go in as read-only views, so that one compiled form serves mapped files too."""
        pixels, at, ids, rows = images.reshape(-1), at.view(), ids.view(), rows.view()
        for array in (pixels, at, ids, rows):
            array.flags.writeable = False
        k0, k1 = seed_words(seed)
        return int(
            kernels.process_rows(
                pixels,
                at,
                ids,
                rows,
                out,
                out.view(self._tables[0].dtype),
                row_hashes,
                self._tables,
                k0,
                k1,
                np.uint32(word),
            )
        )


def compile_recipe(
    recipe: Recipe,
    height: int,
    width: int,
    channels: int,
    dtype: DType = DType.FP32,
    padded_channels: int | None = None,
) -> CompiledRecipe:
    """Fix a recipe to sources of one size and one output type, and compile the kernels if they are not cached yet.

    ``padded_channels`` (default: ``channels``) is the number of channels written; those past ``channels`` are 0.
    Raises ShapeError, DTypeError or ValueRejected naming what does not fit.
    """
    padded = channels if padded_channels is None else padded_channels
    if channels != recipe.color_channels:
        raise ShapeError(f"compile_recipe: the pictures have {channels} channels, the recipe {recipe.color_channels}")
    if not channels <= padded <= MAX_PADDED_CHANNELS:
        raise ShapeError(f"compile_recipe: padded_channels is {padded}; expected {channels} to {MAX_PADDED_CHANNELS}")
    for axis, side in (("height", height), ("width", width)):
        if not 1 <= side <= MAX_SIZE:
            raise ShapeError(f"compile_recipe: {axis} is {side}; expected 1 to {MAX_SIZE} pixels")
    sizes = recipe.canvas_sizes(height, width)
    geo, geo_real, fills, pad_maps = _geometry_tables(recipe, sizes)
    tables = (
        pixel_table(recipe.normalization, dtype),
        _head(recipe, geo, fills, (height, width), padded, max(max(size) for size in sizes)),
        _real(recipe),
        geo,
        geo_real,
        np.ascontiguousarray(fills.T),
        pad_maps,
        _static_maps(recipe, height, width, max(max(size) for size in sizes)),
    )
    compiled = CompiledRecipe(recipe, height, width, channels, dtype, padded, tables)
    nothing = np.empty(0, np.int64)
    empty = np.zeros((0, height, width, channels), np.uint8)
    compiled._launch(
        empty, nothing, nothing, 0, 0, np.zeros((1, compiled.row_bytes), np.uint8), nothing, np.zeros(1, np.uint64)
    )
    return compiled


_GeometryTables = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.uint8], npt.NDArray[np.int32]]


def _geometry_tables(recipe: Recipe, sizes: tuple[tuple[int, int], ...]) -> _GeometryTables:
    """One line per geometric transform, in order: see the column names in ``kernels``."""
    n = len(recipe.geometry)
    geo = np.zeros((n, kernels.GEO_COLUMNS), np.int64)
    geo_real = np.zeros((n, 2), np.float64)
    fills = np.zeros((n, recipe.color_channels), np.uint8)
    pad_maps: list[npt.NDArray[np.int32]] = [np.empty(0, np.int32)]
    at = 0
    for g, (index, transform) in enumerate(recipe.geometry):
        (h_in, w_in), (h_out, w_out) = sizes[g], sizes[g + 1]
        geo[g, kernels.OP : kernels.OUT_H + 1] = index, w_in, h_in, w_out, h_out
        geo[g, kernels.MASKED] = 1
        if isinstance(transform, Pad):
            geo[g, kernels.KIND] = kernels.PAD
            geo[g, kernels.SHIFT] = transform.padding
            fills[g] = transform.fill_values
            for column, side in ((kernels.COLS_AT, w_in), (kernels.ROWS_AT, h_in)):
                geo[g, column] = at
                pad_maps.append(_pad_map(side, transform))
                at += pad_maps[-1].size
        elif isinstance(transform, RandomCrop):
            shift = max(transform.size - w_in, transform.size - h_in, 0)
            geo[g, kernels.KIND], geo[g, kernels.SHIFT] = kernels.CROP, shift
            geo[g, kernels.MASKED] = int(shift > 0)
        elif isinstance(transform, RandomRotation):
            geo[g, kernels.KIND] = kernels.ROTATE
            geo_real[g] = -transform.degrees, 2.0 * transform.degrees
            fills[g] = transform.fill_values
        elif isinstance(transform, RandomScale):
            geo[g, kernels.KIND] = kernels.SCALE
            geo_real[g] = transform.min_ratio, transform.max_ratio - transform.min_ratio
    return geo, geo_real, fills, np.concatenate(pad_maps)


def _static_maps(recipe: Recipe, height: int, width: int, canvas: int) -> npt.NDArray[np.int32]:
    """Source index behind each column [0] and row [1] after the Pads at the front, or -(op + 1) for their fills."""
    maps = np.zeros((2, canvas), np.int32)
    for axis, side in enumerate((width, height)):
        line = np.arange(side, dtype=np.int32)
        for g, (_, transform) in enumerate(recipe.geometry[: _count_static(recipe)]):
            assert isinstance(transform, Pad)
            inner = _pad_map(line.size, transform)
            line = np.where(inner >= 0, line[inner], np.int32(-(g + 1)))
        maps[axis, : line.size] = line
    return maps


def _count_static(recipe: Recipe) -> int:
    count = 0
    for _, transform in recipe.geometry:
        if not isinstance(transform, Pad):
            break
        count += 1
    return count


def _pad_map(side: int, transform: Pad) -> npt.NDArray[np.int32]:
    """Input index behind each output index along one axis; -1 where the fill shows."""
    inside = np.arange(side, dtype=np.int32)
    p = transform.padding
    if transform.mode == "constant":
        return np.pad(inside, p, mode="constant", constant_values=-1)
    return np.pad(inside, p, mode=transform.mode)  # type: ignore[call-overload,no-any-return]


def _head(
    recipe: Recipe,
    geo: npt.NDArray[np.int64],
    fills: npt.NDArray[np.uint8],
    source: tuple[int, int],
    padded: int,
    canvas: int,
) -> npt.NDArray[np.int64]:
    """Integers that hold for the whole recipe, among them which short cuts are exact for it."""
    kinds = geo[:, kernels.KIND]
    resampling = np.flatnonzero((kinds == kernels.ROTATE) | (kinds == kernels.SCALE))
    leading = int(resampling[0]) if resampling.size else len(kinds)
    can_show = fills[geo[:, kernels.MASKED] != 0]
    one_fill_each = bool((can_show == can_show[:1]).all())
    only_constant = all(t.mode == "constant" for _, t in recipe.geometry if isinstance(t, Pad))
    head = np.zeros(kernels.HEAD_LENGTH, np.int64)
    head[kernels.SIZE] = recipe.resolution
    head[kernels.HEIGHT], head[kernels.WIDTH] = source
    head[kernels.CHANNELS] = recipe.color_channels
    head[kernels.PADDED] = padded
    head[kernels.STATIC] = _count_static(recipe)
    head[kernels.LEADING] = leading
    head[kernels.PLAIN] = one_fill_each
    head[kernels.CONTIGUOUS] = one_fill_each and only_constant
    head[kernels.BACKGROUND] = int(can_show[0, 0]) if one_fill_each and len(set(can_show[:1].flat)) == 1 else -1
    fused = recipe.fused_normalization
    head[kernels.FLIP_OP] = fused.flip[0] if fused.flip else -1
    head[kernels.ERASE_OP] = fused.erase[0] if fused.erase and fused.erase[1].p > 0 else -1
    head[kernels.MAX_CANVAS] = canvas
    return head


def _real(recipe: Recipe) -> npt.NDArray[np.float64]:
    real = np.zeros(kernels.REAL_LENGTH, np.float64)
    fused = recipe.fused_normalization
    if fused.flip:
        real[kernels.FLIP_P] = fused.flip[1].p
    if fused.erase:
        erase = fused.erase[1]
        real[kernels.ERASE_P] = erase.p
        real[kernels.AREA_LOW] = erase.scale[0]
        real[kernels.AREA_SPAN] = erase.scale[1] - erase.scale[0]
        real[kernels.RATIO_LOW] = erase.ratio[0]
        real[kernels.RATIO_LOG] = exact_math.log2(erase.ratio[1] / erase.ratio[0])
    return real
