"""Tables of one geometric segment for the kernels, and its two ways to run: alone, or as the last stage of a chain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from renaissance.core import exact_math
from renaissance.data import draws, kernels
from renaissance.data.chain import Op, Segment, Size
from renaissance.data.transforms import (
    CenterCrop,
    FusedNormalization,
    Kind,
    Pad,
    RandomCrop,
    RandomRotation,
    RandomScale,
)

Tables = tuple[npt.NDArray[Any], ...]
GeometryTables = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.uint8], npt.NDArray[np.int32]]


def no_geometry(size: Size) -> Segment:
    """The segment that leaves a picture as it is."""
    return Segment(Kind.GEOMETRIC, (), (size,))


def segment_tables(
    segment: Segment,
    channels: int,
    padded: int,
    table: npt.NDArray[Any],
    kind: int,
    constants: npt.NDArray[np.float32],
    fused: FusedNormalization | None,
) -> Tables:
    """Everything ``kernels.process_rows`` needs; ``fused`` is None for a segment that is not the last stage.

    ``table``, ``kind`` and ``constants``: how lines are written (``finish.line_constants``). The segment's last size
    must be square.
    """
    geo, geo_real, fills, pad_maps = _geometry_tables(segment, channels)
    canvas = max(max(size) for size in segment.sizes)
    head = _head(segment, geo, fills, channels, padded, canvas)
    head[kernels.LINE_KIND] = kind
    head[kernels.FLIP_OP] = fused.flip[0] if fused and fused.flip else -1
    head[kernels.ERASE_OP] = fused.erase[0] if fused and fused.erase and fused.erase[1].p > 0 else -1
    return (
        table,
        head,
        record_reals(fused),
        geo,
        geo_real,
        np.ascontiguousarray(fills.T),
        pad_maps,
        _static_maps(segment, canvas),
        constants,
    )


def record_reals(fused: FusedNormalization | None) -> npt.NDArray[np.float64]:
    """The chances and ranges of flip and erase."""
    real = np.zeros(draws.REAL_LENGTH, np.float64)
    if fused and fused.flip:
        real[draws.FLIP_P] = fused.flip[1].p
    if fused and fused.erase:
        erase = fused.erase[1]
        real[draws.ERASE_P] = erase.p
        real[draws.AREA_LOW] = erase.scale[0]
        real[draws.AREA_SPAN] = erase.scale[1] - erase.scale[0]
        real[draws.RATIO_LOW] = erase.ratio[0]
        real[draws.RATIO_LOG] = exact_math.log2(erase.ratio[1] / erase.ratio[0])
    return real


def _geometry_tables(segment: Segment, channels: int) -> GeometryTables:
    """One line per geometric transform, in order: see the column names in ``kernels``."""
    n = len(segment.ops)
    geo = np.zeros((n, kernels.GEO_COLUMNS), np.int64)
    geo_real = np.zeros((n, 2), np.float64)
    fills = np.zeros((n, channels), np.uint8)
    pad_maps: list[npt.NDArray[np.int32]] = [np.empty(0, np.int32)]
    at = 0
    for g, (index, transform) in enumerate(segment.ops):
        (h_in, w_in), (h_out, w_out) = segment.sizes[g], segment.sizes[g + 1]
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
        elif isinstance(transform, CenterCrop):
            missing = int(transform.size > min(w_in, h_in))  # one pixel of shift tells the kernels that a fill may show
            geo[g, kernels.KIND], geo[g, kernels.SHIFT], geo[g, kernels.MASKED] = kernels.CENTER, missing, missing
            for column, side in ((kernels.COLS_AT, w_in), (kernels.ROWS_AT, h_in)):
                geo[g, column] = centre_offset(side, transform.size) + missing
        elif isinstance(transform, RandomRotation):
            geo[g, kernels.KIND] = kernels.ROTATE
            geo_real[g] = -transform.degrees, 2.0 * transform.degrees
            fills[g] = transform.fill_values
        elif isinstance(transform, RandomScale):
            geo[g, kernels.KIND] = kernels.SCALE
            geo_real[g] = transform.min_ratio, transform.max_ratio - transform.min_ratio
    return geo, geo_real, fills, np.concatenate(pad_maps)


def centre_offset(side: int, size: int) -> int:
    """Where a centred window of ``size`` begins on an axis of ``side`` pixels; negative when it is larger."""
    return (side - size) // 2 if side >= size else -((size - side) // 2)


def _static_maps(segment: Segment, canvas: int) -> npt.NDArray[np.int32]:
    """Source index behind each column [0] and row [1] after the Pads at the front, or -(op + 1) for their fills."""
    maps = np.zeros((2, canvas), np.int32)
    height, width = segment.in_size
    for axis, side in enumerate((width, height)):
        line = np.arange(side, dtype=np.int32)
        for g, (_, transform) in enumerate(segment.ops[: _count_static(segment.ops)]):
            assert isinstance(transform, Pad)
            inner = _pad_map(line.size, transform)
            line = np.where(inner >= 0, line[inner], np.int32(-(g + 1)))
        maps[axis, : line.size] = line
    return maps


def _count_static(ops: Sequence[Op]) -> int:
    count = 0
    for _, transform in ops:
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
    segment: Segment,
    geo: npt.NDArray[np.int64],
    fills: npt.NDArray[np.uint8],
    channels: int,
    padded: int,
    canvas: int,
) -> npt.NDArray[np.int64]:
    """Integers that hold for the whole segment, among them which short cuts are exact for it."""
    kinds = geo[:, kernels.KIND]
    resampling = np.flatnonzero((kinds == kernels.ROTATE) | (kinds == kernels.SCALE))
    leading = int(resampling[0]) if resampling.size else len(kinds)
    can_show = fills[geo[:, kernels.MASKED] != 0]
    one_fill_each = bool((can_show == can_show[:1]).all())
    only_constant = all(t.mode == "constant" for _, t in segment.ops if isinstance(t, Pad))
    head = np.zeros(kernels.HEAD_LENGTH, np.int64)
    head[kernels.SIZE] = max(segment.out_size)
    head[kernels.HEIGHT], head[kernels.WIDTH] = segment.in_size
    head[kernels.CHANNELS] = channels
    head[kernels.PADDED] = padded
    head[kernels.STATIC] = _count_static(segment.ops)
    head[kernels.LEADING] = leading
    head[kernels.PLAIN] = one_fill_each
    head[kernels.CONTIGUOUS] = one_fill_each and only_constant
    head[kernels.BACKGROUND] = int(can_show[0, 0]) if one_fill_each and len(set(can_show[:1].flat)) == 1 else -1
    head[kernels.MAX_CANVAS] = canvas
    return head
