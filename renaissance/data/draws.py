"""Compiled draws of transforms (docs/random-numbers.md): words and numbers, crop boxes, the flip and the erased box."""

from __future__ import annotations

import numpy as np
from numba import njit

from renaissance.core.exact_math import exp2
from renaissance.core.philox import bounded, philox_numba

# Entries of the chances and ranges of flip and erase (float64[REAL_LENGTH]).
FLIP_P, ERASE_P, AREA_LOW, AREA_SPAN, RATIO_LOW, RATIO_LOG, REAL_LENGTH = range(7)

ATTEMPTS = 10
AUGMENTATION = 1 << 24


@njit(cache=True, error_model="numpy", inline="always")
def words(k0, k1, block, op, sample, epoch):  # type: ignore[no-untyped-def]
    """One block of the draws of op ``op``."""
    return philox_numba(k0, k1, np.uint32(block), np.uint32(AUGMENTATION | op), np.uint32(sample), np.uint32(epoch))


@njit(cache=True, error_model="numpy", inline="always")
def unit(word):  # type: ignore[no-untyped-def]  # uint32 -> float64 in [0, 1)
    return np.float64(word >> np.uint32(8)) * 5.9604644775390625e-08


@njit(cache=True, error_model="numpy")
def erased_box(size, op, real, k0, k1, sample, epoch):  # type: ignore[no-untyped-def]
    """RandomErasing's rectangle (top, left, height, width), in the coordinates of the flipped picture; or zeros."""
    if op < 0:
        return 0, 0, 0, 0
    r0, _, _, _ = words(k0, k1, 0, op, sample, epoch)
    if not unit(r0) < real[ERASE_P]:
        return 0, 0, 0, 0
    for attempt in range(1, ATTEMPTS + 1):
        r0, r1, r2, r3 = words(k0, k1, attempt, op, sample, epoch)
        area = (real[AREA_LOW] + unit(r0) * real[AREA_SPAN]) * np.float64(size * size)
        ratio = real[RATIO_LOW] * exp2(unit(r1) * real[RATIO_LOG])
        h = np.int64(np.floor(np.sqrt(area * ratio) + 0.5))
        w = np.int64(np.floor(np.sqrt(area / ratio) + 0.5))
        if 0 < h < size and 0 < w < size:
            return bounded(r2, size - h + 1), bounded(r3, size - w + 1), h, w
    return 0, 0, 0, 0


@njit(cache=True, error_model="numpy")
def flips(op, real, k0, k1, sample, epoch):  # type: ignore[no-untyped-def]
    """Whether RandomHorizontalFlip acts."""
    if op < 0:
        return False
    r0, _, _, _ = words(k0, k1, 0, op, sample, epoch)
    return unit(r0) < real[FLIP_P]


@njit(cache=True, error_model="numpy")
def draw_resized_box(width, height, scale_low, scale_span, ratio, ratio_log, op, key):  # type: ignore[no-untyped-def]
    """RandomResizedCrop's box (x, y, width, height); ``ratio`` (low, high), ``ratio_log`` is log2(high / low)."""
    k0, k1, sample, epoch = key
    low, high = ratio
    for attempt in range(ATTEMPTS):
        r0, r1, r2, r3 = words(k0, k1, attempt, op, sample, epoch)
        area = (scale_low + unit(r0) * scale_span) * np.float64(width * height)
        shape = low * exp2(unit(r1) * ratio_log)
        w = np.int64(np.floor(np.sqrt(area * shape) + 0.5))
        h = np.int64(np.floor(np.sqrt(area / shape) + 0.5))
        if 1 <= w <= width and 1 <= h <= height:
            return bounded(r2, width - w + 1), bounded(r3, height - h + 1), w, h
    w, h = np.int64(width), np.int64(height)
    shape = np.float64(width) / np.float64(height)
    if shape < low:
        h = min(max(np.int64(np.floor(np.float64(width) / low + 0.5)), np.int64(1)), h)
    elif shape > high:
        w = min(max(np.int64(np.floor(np.float64(height) * high + 0.5)), np.int64(1)), w)
    return (width - w) // 2, (height - h) // 2, w, h


@njit(cache=True, error_model="numpy")
def draw_corner(spread_x, spread_y, op, key):  # type: ignore[no-untyped-def]
    """RandomCrop's left and top edge, each one of ``spread`` places."""
    k0, k1, sample, epoch = key
    r0, r1, _, _ = words(k0, k1, 0, op, sample, epoch)
    return bounded(r0, spread_x), bounded(r1, spread_y)


@njit(cache=True, error_model="numpy")
def draw_record(flip_op, erase_op, reals, size, key):  # type: ignore[no-untyped-def]
    """(whether to flip, erased box) of the finished picture."""
    k0, k1, sample, epoch = key
    return flips(flip_op, reals, k0, k1, sample, epoch), erased_box(size, erase_op, reals, k0, k1, sample, epoch)
