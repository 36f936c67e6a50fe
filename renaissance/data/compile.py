"""From a recipe (a value) to a CompiledRecipe (tables for the kernels), for one source size and one output type.

Everything that does not depend on the sample is decided here, once; a recipe of geometric transforms alone is then one
compiled call. A CompiledRecipe holds no state: the same arguments give the same bytes, from any thread or process.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from renaissance.core.digest import xxh64
from renaissance.core.dtype import DType, bf16_from_fp32
from renaissance.core.errors import DTypeError, ShapeError, ValueRejected
from renaissance.core.philox import epoch_word, seed_words
from renaissance.data import kernels
from renaissance.data.geometry import Tables, no_geometry, segment_tables
from renaissance.data.recipe import Normalization, Recipe
from renaissance.data.steps import LastPass, Scratch, Step, frozen, run_steps, steps_of
from renaissance.data.transforms import MAX_SIZE, Kind

DELIVERED = (DType.FP32, DType.BF16, DType.FP16, DType.UINT8)
"""Element types a batch can be delivered in."""
MAX_PADDED_CHANNELS = 64
_LARGEST_FP16 = 65504.0
_LARGEST_BF16 = float.fromhex("0x1.fep127")


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
    with np.errstate(over="ignore"):
        values = ((np.arange(256, dtype=np.float64) / 255.0 - mean) / std).astype(np.float32)
    largest = _LARGEST_FP16 if dtype is DType.FP16 else _LARGEST_BF16
    if not np.abs(values).max() <= largest:
        advice = "choose bf16 or fp32" if dtype is DType.FP16 else "check them"
        raise ValueRejected(
            f"normalization mean {normalization.mean!r}, std {normalization.std!r} gives values beyond "
            f"{dtype.name.lower()} ({largest:.5g}); {advice}"
        )
    if dtype is DType.FP32:
        return values.view(np.uint32)
    if dtype is DType.BF16:
        return bf16_from_fp32(values)
    return values.astype(np.float16).view(np.uint16)


@dataclass(frozen=True, slots=True, eq=False)
class CompiledRecipe:
    """Tables of one recipe for sources [height,width,channels] and rows [S,S,padded_channels] of ``dtype``.

    A recipe of geometric transforms alone is one compiled call for all samples; other chains go step by step.
    """

    recipe: Recipe
    height: int
    width: int
    channels: int
    dtype: DType
    padded_channels: int
    _last: LastPass
    _tables: Tables | None  # of a chain that is one geometric segment, or none
    _steps: tuple[Step, ...]  # of any other chain

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
        written row. The bytes depend on (picture, recipe, seed, epoch, validation, id) only. Releases the GIL.
        Raises ShapeError or DTypeError for arrays that do not fit, ValueRejected for a picture, id or row out of range,
        an epoch outside 0..2**31-1, or a random recipe used for validation.
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
        """Make the rows; -1, or the first position that is out of range (nothing is written then)."""
        k0, k1 = seed_words(seed)
        if self._tables is not None:
            values = out.view(self._tables[0].dtype)
            inputs = frozen(images), frozen(at), frozen(ids), frozen(rows)
            return int(kernels.process_rows(*inputs, out, values, row_hashes, self._tables, k0, k1, np.uint32(word)))
        bad = (at < -1) | (at >= len(images)) | (rows < 0) | (rows >= len(out))
        bad |= (at >= 0) & ((ids < 0) | (ids > kernels.LAST_ID))
        if bad.any():
            return int(bad.argmax())
        scratch = Scratch()
        for picture, sample, row in zip(at.tolist(), ids.tolist(), rows.tolist(), strict=True):
            if picture < 0:
                out[row] = 0
                row_hashes[row] = xxh64(out[row])
                continue
            key = k0, k1, sample, np.uint32(word)
            row_hashes[row] = run_steps(self._steps, frozen(images[picture]), key, scratch, self._last, out[row])
        return -1


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
    recipe.require_stored_pixels()
    segments = recipe.segments(height, width)
    last = LastPass.of(recipe, dtype, padded, pixel_table(recipe.normalization, dtype))
    tables: Tables | None = None
    steps: tuple[Step, ...] = ()
    if all(segment.kind is Kind.GEOMETRIC for segment in segments):  # neighbours are one segment, so at most one
        segment = segments[0] if segments else no_geometry((height, width))
        fused = recipe.fused_normalization
        tables = segment_tables(segment, channels, padded, last.table, last.kind, last.constants, fused)
    else:
        steps = steps_of(segments, channels, last)
    compiled = CompiledRecipe(recipe, height, width, channels, dtype, padded, last, tables, steps)
    _compile_kernels(compiled)
    return compiled


def _compile_kernels(compiled: CompiledRecipe) -> None:
    """Run what ``process`` will run: on nothing, or, for a chain of steps, on one black picture."""
    count = int(compiled._tables is None)
    shape = compiled.height, compiled.width, compiled.channels
    which = np.zeros(count, np.int64)
    out = np.zeros((1, compiled.row_bytes), np.uint8)
    compiled._launch(np.zeros((count, *shape), np.uint8), which, which, 0, 0, out, which, np.zeros(1, np.uint64))
