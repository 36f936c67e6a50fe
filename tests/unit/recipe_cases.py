"""Shared by the recipe tests: pictures, random chains, and rows from the kernels and from the reference."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt

from renaissance.core.dtype import DType
from renaissance.core.enums import NormMode
from renaissance.data import reference
from renaissance.data.compile import compile_recipe
from renaissance.data.recipe import Normalization, Recipe
from renaissance.data.transforms import (
    PAD_MODES,
    Pad,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomRotation,
    RandomScale,
    Transform,
)

Images = npt.NDArray[np.uint8]
SEED = 0x0123456789ABCDEF
MNIST_CHAIN = (Pad(2), RandomCrop(28), RandomRotation(20), RandomScale(0.8, 1.2), RandomErasing(0.5))


def pictures(count: int, height: int, width: int, channels: int, *, border: int = 0) -> Images:
    """Noise, with a black border (where short cuts for empty pixels could go wrong)."""
    images = np.zeros((count, height, width, channels), np.uint8)
    inner = images[:, border : height - border, border : width - border]
    inner[:] = np.random.default_rng(7).integers(0, 256, inner.shape, dtype=np.uint8)
    return images


def pixels_of(transforms: tuple[Transform, ...] | list[Transform], resolution: int, channels: int) -> Recipe:
    """A recipe without normalisation, so that uint8 output shows the pixels."""
    return Recipe.build(transforms, NormMode.NO_NORM, resolution, channels)


def rows(
    recipe: Recipe,
    images: Images,
    ids: list[int],
    *,
    seed: int = SEED,
    epoch: int = 3,
    dtype: DType = DType.UINT8,
    padded: int | None = None,
    validation: bool = False,
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint64]]:
    """(bytes [len(ids), row_bytes], row hashes) from the compiled kernels."""
    _, height, width, channels = images.shape
    compiled = compile_recipe(recipe, height, width, channels, dtype, padded)
    out = np.full((len(ids), compiled.row_bytes), 0xA5, np.uint8)
    hashes = np.zeros(len(ids), np.uint64)
    at = np.array(ids, np.int64)
    compiled.process(images, at, at, seed, epoch, validation, out, np.arange(len(ids)), hashes)
    return out, hashes


def expected(
    recipe: Recipe,
    images: Images,
    ids: list[int],
    dtype: DType = DType.UINT8,
    padded: int | None = None,
    epoch: int = 3,
) -> npt.NDArray[np.uint8]:
    """The same bytes from the NumPy reference."""
    return np.stack([reference.row(recipe, images[i], i, SEED, epoch, dtype, padded) for i in ids])


def random_recipe(rng: random.Random, channels: int, resolution: int, normalized: bool) -> Recipe:
    """Any chain that is allowed: every transform, fill, mode and order."""
    ops: list[Transform] = []
    resampled = False
    for _ in range(rng.randrange(6)):
        kind = rng.randrange(4)
        if kind == 0:
            mode = "constant" if resampled else rng.choice(PAD_MODES)
            ops.append(Pad(rng.randrange(4), _fill(rng, channels) if mode == "constant" else 0, mode))
        elif kind == 1:
            ops.append(RandomCrop(rng.randrange(1, 24)))
        elif kind == 2:
            ops.append(RandomRotation(rng.choice([0, 5, 20, 90, 360]), _fill(rng, channels)))
        else:
            ops.append(RandomScale(*sorted((rng.uniform(0.3, 2), rng.uniform(0.3, 2)))))
        resampled = resampled or kind >= 2
    ops.append(RandomCrop(resolution))
    if rng.random() < 0.5:
        ops.insert(rng.randrange(len(ops) + 1), RandomHorizontalFlip(rng.choice([0, 0.5, 1])))
    if rng.random() < 0.5:
        ops.insert(rng.randrange(len(ops) + 1), RandomErasing(rng.choice([0.5, 1])))
    norm = Normalization((0.2,) * channels, (0.3,) * channels) if normalized else NormMode.NO_NORM
    return Recipe.build(ops, norm, resolution, channels)


def _fill(rng: random.Random, channels: int) -> int | tuple[int, ...]:
    return rng.choice([0, 0, rng.randrange(256), tuple(rng.randrange(256) for _ in range(channels))])
