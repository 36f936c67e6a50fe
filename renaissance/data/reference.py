"""What a recipe means, in plain NumPy: the oracle that the compiled kernels are tested against.

Written from docs/recipes.md and docs/random-numbers.md, not from the kernels: no shared code, no short cuts, one
sample at a time, the C library's sine and exponential. Slow; never used to deliver data. Resizes are in
``reference_resize.py``, pixel ops in ``reference_pixels.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from renaissance.core.dtype import DType, bf16_from_fp32
from renaissance.core.philox import epoch_word
from renaissance.data.recipe import Recipe
from renaissance.data.reference_draws import Draws
from renaissance.data.reference_pixels import pixel_op
from renaissance.data.reference_resize import crop_box, denominator, resize_box
from renaissance.data.transforms import (
    CenterCrop,
    Kind,
    Pad,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomRotation,
    RandomScale,
    Transform,
)

Image = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Stage:
    """One step from an output canvas back to its input canvas: q = matrix @ (x, y, 1), and what shows outside."""

    matrix: Floats  # [2,3]
    size: tuple[int, int]  # input canvas (height, width)
    out_size: tuple[int, int]  # output canvas (height, width)
    fill: npt.NDArray[np.uint8]  # [C]


def sample(
    recipe: Recipe,
    image: Image,
    sample_id: int,
    seed: int,
    epoch: int,
    validation: bool = False,
    scaled: Callable[[int], Image] | None = None,
) -> Image:
    """The chain and the flip: uint8 [S,S,C] from uint8 [h,w,C] of any size.

    ``scaled(f)`` gives the picture decoded at 1/f of its size; without it nothing is decoded at reduced size.
    """
    word = epoch_word(epoch, validation)
    picture = image
    for number, segment in enumerate(recipe.segments(image.shape[0], image.shape[1])):
        draws = [Draws(seed, op, sample_id, word) for op, _ in segment.ops]
        transforms = [transform for _, transform in segment.ops]
        if segment.kind is Kind.GEOMETRIC:
            picture = geometry(transforms, picture, segment.out_size, draws)
        elif segment.kind is Kind.PIXEL:
            picture = pixel_op(transforms[0], picture, draws[0])
        else:
            box = crop_box(transforms[0], picture.shape[0], picture.shape[1], draws[0])
            f = denominator(transforms[0], box, recipe.decode) if scaled is not None and number == 0 else 1
            source = scaled(f) if scaled is not None and number == 0 else picture
            picture = resize_box(source, box, segment.out_size[0], f)
    fused = recipe.fused_normalization
    if fused.flip is not None:
        op, flip = fused.flip
        if flips(flip, Draws(seed, op, sample_id, word)):
            picture = picture[:, ::-1]
    return np.ascontiguousarray(picture)


def geometry(transforms: Sequence[Transform], base: Image, size: tuple[int, int], draws: Sequence[Draws]) -> Image:
    """One segment of geometric transforms, as one resampling pass."""
    stages: list[Stage] = []
    for transform, words in zip(transforms, draws, strict=True):
        before = stages[-1].out_size if stages else (base.shape[0], base.shape[1])
        if not stages and not isinstance(transform, RandomRotation | RandomScale):
            base = shift_pixels(transform, base, words)
        else:
            stages.append(stage_of(transform, before, base.shape[2], words))
    return resample(base, stages, size) if stages else base


def row(
    recipe: Recipe,
    image: Image,
    sample_id: int,
    seed: int,
    epoch: int,
    dtype: DType = DType.FP32,
    padded_channels: int | None = None,
    validation: bool = False,
    scaled: Callable[[int], Image] | None = None,
) -> npt.NDArray[np.uint8]:
    """The delivered bytes of one sample, uint8 [S * S * padded_channels * itemsize]; ``scaled`` as in ``sample``."""
    picture = sample(recipe, image, sample_id, seed, epoch, validation, scaled)
    height, width, channels = picture.shape
    if dtype is DType.UINT8:
        values: npt.NDArray[Any] = picture.copy()
    else:
        fused = recipe.fused_normalization
        mean, std = np.array(fused.mean, np.float64), np.array(fused.std, np.float64)
        exact = ((picture.astype(np.float64) / 255.0 - mean) / std).astype(np.float32)
        values = bf16_from_fp32(exact) if dtype is DType.BF16 else exact.astype(dtype.numpy)
    full = np.zeros((height, width, padded_channels or channels), values.dtype)
    full[:, :, :channels] = values
    erase = recipe.fused_normalization.erase
    if erase is not None:
        op, erasing = erase
        box = erased_box(erasing, height, width, Draws(seed, op, sample_id, epoch_word(epoch, validation)))
        if box is not None:
            top, left, h, w = box
            full[top : top + h, left : left + w] = 0
    return full.reshape(-1).view(np.uint8)


def shift_pixels(transform: Transform, image: Image, draws: Draws) -> Image:
    """Pads and crops before any resampling move whole pixels."""
    if isinstance(transform, Pad):
        return pad(image, transform)
    if isinstance(transform, CenterCrop):
        return centre(image, transform.size)
    assert isinstance(transform, RandomCrop)
    return crop(image, transform.size, draws)


def pad(image: Image, transform: Pad) -> Image:
    p = transform.padding
    around = ((p, p), (p, p), (0, 0))
    if transform.mode != "constant":
        return np.pad(image, around, mode=transform.mode)  # type: ignore[call-overload,no-any-return]
    padded = np.empty((image.shape[0] + 2 * p, image.shape[1] + 2 * p, image.shape[2]), np.uint8)
    padded[:] = transform.fill_values
    padded[p : p + image.shape[0], p : p + image.shape[1]] = image
    return padded


def crop(image: Image, size: int, draws: Draws) -> Image:
    missing = max(size - image.shape[1], size - image.shape[0], 0)
    if missing:
        image = pad(image, Pad(missing))
    left = draws.below(0, image.shape[1] - size + 1)
    top = draws.below(1, image.shape[0] - size + 1)
    return image[top : top + size, left : left + size]


def centre(image: Image, size: int) -> Image:
    out = np.zeros((size, size, image.shape[2]), np.uint8)
    height, width = image.shape[:2]
    top, left = max(height - size, 0) // 2, max(width - size, 0) // 2
    part = image[top : top + size, left : left + size]
    top, left = max(size - height, 0) // 2, max(size - width, 0) // 2
    out[top : top + part.shape[0], left : left + part.shape[1]] = part
    return out


def stage_of(transform: Transform, size: tuple[int, int], channels: int, draws: Draws) -> Stage:
    """The inverse map of one transform on a canvas of ``size`` (height, width)."""
    height, width = size
    cx, cy = (width - 1) / 2, (height - 1) / 2
    fill = np.zeros(channels, np.uint8)
    out = size
    resamples = isinstance(transform, RandomRotation | RandomScale)
    if isinstance(transform, RandomRotation):
        angle = math.radians(draws.uniform(0, -transform.degrees, transform.degrees))
        linear = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
        fill[:] = transform.fill_values
    elif isinstance(transform, RandomScale):
        rx = draws.uniform(0, transform.min_ratio, transform.max_ratio)
        ry = draws.uniform(1, transform.min_ratio, transform.max_ratio)
        linear = np.array([[1 / rx, 0.0], [0.0, 1 / ry]])
    else:
        linear = np.eye(2)
    if resamples:
        centre = np.array([cx, cy])
        shift = centre - linear @ centre
    elif isinstance(transform, Pad):
        shift = np.full(2, -float(transform.padding))
        out = (height + 2 * transform.padding, width + 2 * transform.padding)
        fill[:] = transform.fill_values
    elif isinstance(transform, CenterCrop):
        x, y = (
            (side - transform.size) // 2 if side >= transform.size else -((transform.size - side) // 2)
            for side in (width, height)
        )
        shift = np.array([x, y], np.float64)
        out = (transform.size, transform.size)
    else:
        assert isinstance(transform, RandomCrop)
        missing = max(transform.size - width, transform.size - height, 0)
        left = draws.below(0, width + 2 * missing - transform.size + 1)
        top = draws.below(1, height + 2 * missing - transform.size + 1)
        shift = np.array([left - missing, top - missing], np.float64)
        out = (transform.size, transform.size)
    return Stage(np.column_stack([linear, shift]), size, out, fill)


def fixed(values: Floats) -> npt.NDArray[np.int64]:
    """Pixels to 1/65536 pixels, half up."""
    return np.floor(values * 65536.0 + 0.5).astype(np.int64)


def resample(base: Image, stages: list[Stage], out_size: tuple[int, int]) -> Image:
    """One bilinear sample of ``base`` per output pixel, masked by every canvas between the base and the output."""
    ys, xs = np.mgrid[0 : out_size[0], 0 : out_size[1]].astype(np.int64)
    out = np.zeros((*out_size, base.shape[2]), np.uint8)
    undecided = np.ones(out_size, bool)
    total = np.eye(3)
    for number in range(len(stages) - 1, -1, -1):
        stage = stages[number]
        total = np.vstack([stage.matrix, [0.0, 0.0, 1.0]]) @ total
        c = fixed(total[:2])
        qx = c[0, 0] * xs + c[0, 1] * ys + c[0, 2]
        qy = c[1, 0] * xs + c[1, 1] * ys + c[1, 2]
        if number == 0:
            values = bilinear(base, qx, qy, stage.fill)
            out[undecided] = values[undecided]
        else:
            height, width = stage.size
            inside = (qx >= -32768) & (qx < width * 65536 - 32768) & (qy >= -32768) & (qy < height * 65536 - 32768)
            out[undecided & ~inside] = stage.fill
            undecided &= inside
    return out


def bilinear(base: Image, qx: npt.NDArray[np.int64], qy: npt.NDArray[np.int64], fill: npt.NDArray[np.uint8]) -> Image:
    """Values at 16.16 coordinates, which are first rounded to 1/256 pixel; outside the base lies ``fill``."""
    height, width = base.shape[:2]
    tx, ty = (qx + 128) >> 8, (qy + 128) >> 8
    x0, y0 = tx >> 8, ty >> 8
    wx, wy = tx & 255, ty & 255

    def at(y: npt.NDArray[np.int64], x: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
        values = base[np.clip(y, 0, height - 1), np.clip(x, 0, width - 1)].astype(np.int64)
        return np.where(inside[..., None], values, fill.astype(np.int64))

    wx, wy = wx[..., None], wy[..., None]
    top = at(y0, x0) * (256 - wx) + at(y0, x0 + 1) * wx
    bottom = at(y0 + 1, x0) * (256 - wx) + at(y0 + 1, x0 + 1) * wx
    values: Image = ((top * (256 - wy) + bottom * wy + 32768) >> 16).astype(np.uint8)
    return values


def flips(transform: RandomHorizontalFlip, draws: Draws) -> bool:
    return draws.unit(0) < transform.p


def erased_box(transform: RandomErasing, height: int, width: int, draws: Draws) -> tuple[int, int, int, int] | None:
    """(top, left, height, width) of the rectangle that is set to 0, or None."""
    if not draws.unit(0) < transform.p:
        return None
    for attempt in range(1, 11):
        first = 4 * attempt
        area = draws.uniform(first, *transform.scale) * height * width
        ratio = draws.log_uniform(first + 1, *transform.ratio)
        h = math.floor(math.sqrt(area * ratio) + 0.5)
        w = math.floor(math.sqrt(area / ratio) + 0.5)
        if 0 < h < height and 0 < w < width:
            return draws.below(first + 2, height - h + 1), draws.below(first + 3, width - w + 1), h, w
    return None
