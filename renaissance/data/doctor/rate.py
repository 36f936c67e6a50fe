"""How fast one core prepares samples of a set: measured on a few of its own, with the usual training recipe."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from renaissance.core.dtype import DType
from renaissance.core.enums import NormMode
from renaissance.core.errors import CorruptSample
from renaissance.data.compile import compile_recipe
from renaissance.data.doctor.files import Stored
from renaissance.data.pictures import PictureRecipe
from renaissance.data.recipe import Recipe
from renaissance.data.transforms import Pad, RandomCrop, RandomHorizontalFlip, RandomResizedCrop

SECONDS = 1.0
MOST_SAMPLES = 64
ROWS = 64

Work = Callable[[int], int]
"""Prepare samples for the n-th time; returns how many."""


def usual_recipe(stored: Stored, resolution: int) -> Recipe:
    """Crop, flip and normalise: what most training recipes of such a set cost."""
    if stored.images is None:
        return Recipe.build([RandomResizedCrop(resolution), RandomHorizontalFlip()], NormMode.IMAGENET, resolution)
    side, channels = stored.images.shape[1], stored.images.shape[3]
    mode = NormMode.MNIST if channels == 1 else NormMode.CIFAR
    chain = [Pad(4), RandomCrop(side), RandomHorizontalFlip()] if channels == 3 else [Pad(2), RandomCrop(side)]
    return Recipe.build(chain, mode, side, channels)


def rate_per_core(stored: Stored, samples: Sequence[int], resolution: int, seconds: float = SECONDS) -> float:
    """Samples per second of a core's time, fp32 rows; 0.0 when none of ``samples`` can be prepared.

    Takes about ``seconds``. Stored bytes are read before: the disk is not part of it. What other processes take of the
    core is not counted.
    """
    recipe = usual_recipe(stored, resolution)
    work = _pixels(stored, recipe) if stored.images is not None else _pictures(stored, recipe, samples)
    if not work(0):  # compiles the kernels, too
        return 0.0
    done, epoch, end, begin = 0, 1, time.perf_counter() + seconds, time.thread_time()
    while time.perf_counter() < end or not done:
        done += work(epoch)
        epoch += 1
    return done / max(time.thread_time() - begin, 1e-9)


def _pixels(stored: Stored, recipe: Recipe) -> Work:
    images = stored.images
    assert images is not None
    height, width, channels = images.shape[1:]
    compiled = compile_recipe(recipe, height, width, channels, DType.FP32)
    rows = np.arange(ROWS, dtype=np.int64)
    out, hashes = np.empty((ROWS, compiled.row_bytes), np.uint8), np.empty(ROWS, np.uint64)

    def work(epoch: int) -> int:
        at = (rows + epoch * ROWS) % len(images)
        compiled.process(images, at, at, 0, epoch, False, out, rows, hashes)
        return ROWS

    return work


def _pictures(stored: Stored, recipe: Recipe, samples: Sequence[int]) -> Work:
    assert stored.source is not None
    pictures, encoding = PictureRecipe(recipe, DType.FP32, recipe.color_channels), stored.encoding
    row = np.empty(pictures.row_bytes, np.uint8)
    usable: list[npt.NDArray[np.uint8]] = []
    for sample in samples[:: max(1, len(samples) // MOST_SAMPLES)][:MOST_SAMPLES]:
        with suppress(CorruptSample):  # reported where pictures are looked at
            data = np.frombuffer(stored.source.read(sample), np.uint8)
            pictures.make(data, encoding, sample, 0, 0, False, row)
            usable.append(data)

    def work(epoch: int) -> int:
        for number, data in enumerate(usable):
            pictures.make(data, encoding, number, 0, epoch, False, row)
        return len(usable)

    return work
