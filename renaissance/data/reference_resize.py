"""What the resizes mean, in plain NumPy and float64: boxes, coefficients and the two passes (docs/recipes.md)."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from renaissance.data.reference_draws import Draws
from renaissance.data.transforms import FastRandomResizedCrop, RandomResizedCrop, Resize, Transform

Image = npt.NDArray[np.uint8]
Box = tuple[int, int, int, int]
"""(x0, y0, x1, y1) in pixels of the full picture, the far edges excluded."""


def crop_box(transform: Transform, height: int, width: int, draws: Draws) -> Box:
    """The part of a picture of that size that a resize transform looks at."""
    if isinstance(transform, Resize):
        side = min(width, height)
        x, y = (width - side) // 2, (height - side) // 2
        return x, y, x + side, y + side
    assert isinstance(transform, RandomResizedCrop)
    return random_box(transform, height, width, draws)


def random_box(transform: RandomResizedCrop, height: int, width: int, draws: Draws) -> Box:
    for attempt in range(10):
        first = 4 * attempt
        area = draws.uniform(first, *transform.scale) * (width * height)
        ratio = draws.log_uniform(first + 1, *transform.ratio)
        w, h = half_up(math.sqrt(area * ratio)), half_up(math.sqrt(area / ratio))
        if 1 <= w <= width and 1 <= h <= height:
            x, y = draws.below(first + 2, width - w + 1), draws.below(first + 3, height - h + 1)
            return x, y, x + w, y + h
    w, h = width, height
    if width / height < transform.ratio[0]:
        h = min(max(half_up(width / transform.ratio[0]), 1), height)
    elif width / height > transform.ratio[1]:
        w = min(max(half_up(height * transform.ratio[1]), 1), width)
    x, y = (width - w) // 2, (height - h) // 2
    return x, y, x + w, y + h


def denominator(transform: Transform, box: Box, decode: str) -> int:
    """1/f is the size at which a JPEG is decoded for a first stage with that box."""
    if decode == "exact" and not isinstance(transform, FastRandomResizedCrop):
        return 1
    assert isinstance(transform, Resize | RandomResizedCrop)
    shorter = min(box[2] - box[0], box[3] - box[1])
    return next(f for f in (8, 4, 2, 1) if f == 1 or shorter >= f * transform.size)


def resize_box(picture: Image, box: Box, size: int, f: int = 1) -> Image:
    """The box of the full picture, resampled to [size,size,C]; ``picture`` is the full picture at 1/f of its size."""
    x0, y0, x1, y1 = box
    left, top = x0 // f, y0 // f
    cut = picture[top : -(-y1 // f), left : -(-x1 // f)]
    across = x0 / f - left, x0 / f - left + (x1 - x0) / f
    down = y0 / f - top, y0 / f - top + (y1 - y0) / f
    return one_pass(one_pass(cut, size, across).swapaxes(0, 1), size, down).swapaxes(0, 1)


def one_pass(picture: Image, size: int, interval: tuple[float, float]) -> Image:
    """Columns of [h,w,C] resampled to [h,size,C]."""
    out = np.empty((picture.shape[0], size, picture.shape[2]), np.uint8)
    for i in range(size):
        first, weights = coefficients(picture.shape[1], size, interval, i)
        values = picture[:, first : first + len(weights)].astype(np.int64)
        total = np.einsum("hjc,j->hc", values, np.array(weights, np.int64)) + (1 << 21)
        out[:, i] = np.clip(total >> 22, 0, 255)
    return out


def coefficients(n: int, size: int, interval: tuple[float, float], i: int) -> tuple[int, list[int]]:
    """(first input pixel, 22-bit weights) of output pixel ``i``: Pillow's, for its BILINEAR filter."""
    b0, b1 = interval
    scale = (b1 - b0) / size
    support = max(scale, 1.0)
    centre = b0 + (i + 0.5) * scale
    first = max(0, int(centre - support + 0.5))
    last = min(n, int(centre + support + 0.5))
    raw = [max(0.0, 1.0 - abs((j + first - centre + 0.5) * (1.0 / support))) for j in range(last - first)]
    total = 0.0
    for weight in raw:
        total += weight
    return first, [int(weight / total * (1 << 22) + 0.5) for weight in raw]


def half_up(value: float) -> int:
    return math.floor(value + 0.5)
