"""Compiled pixel ops: ColorJitter, grayscale, autocontrast, blur and noise on one finished uint8 picture, in place.

Invariants: the bytes are those that docs/recipes.md defines ("Pixel ops") and ``reference_pixels.py`` computes, on any
host: integers, or float32 operations in the order given there, never fused. Nothing is kept between calls, so threads
may share an op.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from renaissance.core.exact_math import exp2
from renaissance.core.philox import bounded, philox_numba
from renaissance.data.normal_steps import (
    BIAS,
    FIRST_STEP,
    REST_BITS,
    STEP_MASK,
    STEP_SHIFT,
    THRESHOLDS,
    normal_steps,
)
from renaissance.data.transforms import (
    MAX_SIGMA,
    ColorJitter,
    GaussianBlur,
    GaussianNoise,
    RandomAutocontrast,
    RandomGrayscale,
    Transform,
)

JITTER, GRAYSCALE, AUTOCONTRAST, BLUR, NOISE = range(5)
PARAMS = 8
"""Length of the float64 parameters of every op."""

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
AUGMENTATION = 1 << 24
NOISE_DOMAIN = 5 << 24
REACH = 2.628260884878466
"""sqrt(-ln 0.001): where the bell of the blur falls to a thousandth, in standard deviations."""
LOG2E_HALF = 0.7213475204444817
MAX_RADIUS = int(REACH * MAX_SIGMA)
BLOCKS_AT_ONCE = 64


def pixel_op_tables(transform: Transform) -> tuple[int, npt.NDArray[np.float64], npt.NDArray[np.uint32]]:
    """(kind, parameters float64[PARAMS], table uint32[n]) that ``apply_pixel_op`` takes for ``transform``."""
    params = np.zeros(PARAMS, np.float64)
    table = np.zeros(0, np.uint32)
    if isinstance(transform, ColorJitter):
        params[:4] = transform.brightness, transform.contrast, transform.saturation, transform.hue
        return JITTER, params, table
    if isinstance(transform, RandomGrayscale | RandomAutocontrast):
        params[0] = transform.p
        return GRAYSCALE if isinstance(transform, RandomGrayscale) else AUTOCONTRAST, params, table
    if isinstance(transform, GaussianBlur):
        params[:2] = transform.sigma_min, transform.sigma_max - transform.sigma_min
        return BLUR, params, table
    if isinstance(transform, GaussianNoise):
        params[0] = transform.clip
        return NOISE, params, normal_steps(transform.mean, transform.sigma, transform.clip)
    raise TypeError(f"{transform.name} is no pixel op")


def scratch_bytes(height: int, width: int, channels: int) -> int:
    """Bytes of scratch that ``apply_pixel_op`` needs for one picture."""
    return height * width * channels + 2 * (width + 2 * MAX_RADIUS) * channels


@njit(cache=True, error_model="numpy", inline="always")
def _words(k0, k1, block, op, sample, epoch):  # type: ignore[no-untyped-def]
    return philox_numba(k0, k1, np.uint32(block), np.uint32(AUGMENTATION | op), np.uint32(sample), np.uint32(epoch))


@njit(cache=True, error_model="numpy", inline="always")
def _unit(word):  # type: ignore[no-untyped-def]  # uint32 -> float64 in [0, 1)
    return np.float64(word >> np.uint32(8)) * 5.9604644775390625e-08


@njit(cache=True, error_model="numpy", inline="always")
def _luma(r, g, b):  # type: ignore[no-untyped-def]  # uint8 each -> int32 in 0..255
    return np.int32(
        np.int32(np.int32(r) * np.int32(19595) + np.int32(g) * np.int32(38470))
        + np.int32(np.int32(b) * np.int32(7471) + np.int32(32768))
    ) >> np.int32(16)


@njit(cache=True, error_model="numpy", inline="always")
def _blend(base, value, factor):  # type: ignore[no-untyped-def]  # int32, uint8, float32 -> uint8
    """trunc(base + factor * (value - base)), clipped; multiplication and addition each rounded to float32."""
    v = np.float32(base) + factor * np.float32(np.int32(np.int32(value) - base))
    v = min(max(v, np.float32(0.0)), np.float32(255.0))
    return np.uint8(np.int32(v))


@njit(cache=True, error_model="numpy")
def _blend_with_one(image, n, base, factor):  # type: ignore[no-untyped-def]
    """Brightness and contrast: every value blended with one number."""
    for i in range(n):
        image[np.uint64(i)] = _blend(base, image[np.uint64(i)], factor)


@njit(cache=True, error_model="numpy")
def _mean_luma(image, pixels):  # type: ignore[no-untyped-def]
    """The mean of L over the picture, half up."""
    total = np.int64(0)
    for i in range(pixels):
        at = np.uint64(3 * i)
        total += np.int64(_luma(image[at], image[at + np.uint64(1)], image[at + np.uint64(2)]))
    return np.int32((2 * total + pixels) // (2 * pixels))


@njit(cache=True, error_model="numpy")
def _saturate(image, pixels, factor):  # type: ignore[no-untyped-def]
    for i in range(pixels):
        at = np.uint64(3 * i)
        r, g, b = image[at], image[at + np.uint64(1)], image[at + np.uint64(2)]
        base = _luma(r, g, b)
        image[at] = _blend(base, r, factor)
        image[at + np.uint64(1)] = _blend(base, g, factor)
        image[at + np.uint64(2)] = _blend(base, b, factor)


@njit(cache=True, error_model="numpy")
def _grey(image, pixels):  # type: ignore[no-untyped-def]
    for i in range(pixels):
        at = np.uint64(3 * i)
        base = np.uint8(_luma(image[at], image[at + np.uint64(1)], image[at + np.uint64(2)]))
        image[at] = base
        image[at + np.uint64(1)] = base
        image[at + np.uint64(2)] = base


@njit(cache=True, error_model="numpy", inline="always")
def _hue_of(r, g, b, most, spread, middle):  # type: ignore[no-untyped-def]  # int32 each -> int32 in 0..255
    """Pillow's 8-bit hue: on which side of its sector's bound the middle channel is decides sign and offset."""
    x = np.float32(np.int32(most - middle)) / np.float32(max(spread, np.int32(1)))
    red, green = r == most, g == most
    if red:
        rising = g < b
        offset = np.float32(-1.0) if rising else np.float32(1.0)
    elif green:
        rising = b <= r
        offset = np.float32(1.0) if rising else np.float32(3.0)
    else:
        rising = r <= g
        offset = np.float32(3.0) if rising else np.float32(5.0)
    h = offset + (x if rising else -x)
    h = h / np.float32(6.0)
    h = h + np.float32(1.0) if h < np.float32(0.0) else h
    return np.int32(h * np.float32(255.0))


@njit(cache=True, error_model="numpy", inline="always")
def _darker(value, numerator):  # type: ignore[no-untyped-def]  # int32: value * numerator / 65025, nearest
    return np.int32(np.float32(np.int32(value * numerator)) * np.float32(1.0 / 65025.0) + np.float32(0.5))


@njit(cache=True, error_model="numpy")
def _turn_hue(image, pixels, shift):  # type: ignore[no-untyped-def]
    """To 8-bit HSV, H + shift modulo 256, and back. The products below 2**24 are exact in float32."""
    for i in range(pixels):
        at = np.uint64(3 * i)
        r = np.int32(image[at])
        g = np.int32(image[at + np.uint64(1)])
        b = np.int32(image[at + np.uint64(2)])
        most = max(r, max(g, b))
        least = min(r, min(g, b))
        spread = np.int32(most - least)
        hue = _hue_of(r, g, b, most, spread, np.int32(r + g + b - most - least))
        s = np.int32(np.float32(spread) / np.float32(max(most, np.int32(1))) * np.float32(255.0))
        six = np.int32(np.int32(np.int32(hue + shift) & np.int32(255)) * np.int32(6))
        sector = np.int32(np.int32(six * np.int32(32897)) >> np.int32(23))  # six / 255
        rest = np.int32(six - sector * np.int32(255))
        p = _darker(most, np.int32(np.int32(65025) - s * np.int32(255)))
        q = _darker(most, np.int32(np.int32(65025) - s * rest))
        u = _darker(most, np.int32(np.int32(65025) - s * np.int32(np.int32(255) - rest)))
        first = sector == 0 or sector == 5 or sector == 6
        red = most if first else (q if sector == 1 else (u if sector == 4 else p))
        green = (
            most if (sector == 1 or sector == 2) else (u if (sector == 0 or sector == 6) else (q if sector == 3 else p))
        )
        blue = most if (sector == 3 or sector == 4) else (u if sector == 2 else (q if sector == 5 else p))
        image[at] = np.uint8(red)
        image[at + np.uint64(1)] = np.uint8(green)
        image[at + np.uint64(2)] = np.uint8(blue)


@njit(cache=True, error_model="numpy")
def _jitter(params, image, pixels, k0, k1, op, sample, epoch):  # type: ignore[no-untyped-def]
    order = np.empty(4, np.int64)
    n = 0
    for factor in range(4):
        if params[factor] > 0.0:
            order[n] = factor
            n += 1
    _, r1, r2, r3 = _words(k0, k1, 0, op, sample, epoch)
    for i in range(n - 1, 0, -1):
        j = bounded(r1 if i == 1 else (r2 if i == 2 else r3), i + 1)
        order[i], order[j] = order[j], order[i]
    w0, w1, w2, w3 = _words(k0, k1, 1, op, sample, epoch)
    for i in range(n):
        step = order[i]
        if step == HUE:
            drawn = -params[HUE] + _unit(w3) * (params[HUE] - -params[HUE])
            _turn_hue(image, pixels, np.int32(drawn * 255.0))
        else:
            low = max(0.0, 1.0 - params[step])
            word = w0 if step == BRIGHTNESS else (w1 if step == CONTRAST else w2)
            factor = np.float32(low + _unit(word) * ((1.0 + params[step]) - low))
            if step == SATURATION:
                _saturate(image, pixels, factor)
            else:
                base = np.int32(0) if step == BRIGHTNESS else _mean_luma(image, pixels)
                _blend_with_one(image, 3 * pixels, base, factor)


@njit(cache=True, error_model="numpy")
def _autocontrast(image, pixels, channels):  # type: ignore[no-untyped-def]
    table = np.empty(256, np.uint8)
    for c in range(channels):
        least, most = np.uint8(255), np.uint8(0)
        for i in range(pixels):
            value = image[np.uint64(i * channels + c)]
            least = min(least, value)
            most = max(most, value)
        spread = np.int32(most) - np.int32(least)
        if spread > 0:
            for value in range(spread + 1):
                table[least + value] = (510 * value + spread) // (2 * spread)
            for i in range(pixels):
                at = np.uint64(i * channels + c)
                image[at] = table[image[at]]


@njit(cache=True, error_model="numpy")
def _blur_weights(sigma, radius, weights):  # type: ignore[no-untyped-def]
    """Fill weights[0..radius] (uint32) so that weights[0] + 2 * (the others) = 65536."""
    total = 1.0
    scale = LOG2E_HALF / (sigma * sigma)
    bell = np.empty(radius + 1, np.float64)
    for i in range(1, radius + 1):
        bell[i] = exp2(-np.float64(i * i) * scale)
        total += 2.0 * bell[i]
    rest = np.int64(65536)
    for i in range(1, radius + 1):
        weights[i] = np.uint32(np.floor(65536.0 * bell[i] / total + 0.5))
        rest -= 2 * np.int64(weights[i])
    weights[0] = np.uint32(rest)


@njit(cache=True, error_model="numpy")
def _blur(image, scratch, height, width, channels, sigma):  # type: ignore[no-untyped-def]
    radius = np.int64(np.floor(REACH * sigma))
    if radius == 0:
        return
    weights = np.empty(radius + 1, np.uint32)
    _blur_weights(sigma, radius, weights)
    pitch = width * channels
    edge = radius * channels
    line = scratch[: 2 * (pitch + 2 * edge)].view(np.uint16)
    source = scratch[2 * (width + 2 * MAX_RADIUS) * channels :]
    sums = np.empty(pitch, np.uint32)
    for i in range(height * pitch):
        source[np.uint64(i)] = image[np.uint64(i)]
    for y in range(height):
        here = y * pitch
        weight = weights[0]
        for x in range(pitch):
            sums[np.uint64(x)] = np.uint32(np.uint32(source[np.uint64(here + x)]) * weight) + np.uint32(128)
        for i in range(1, radius + 1):
            above, below = max(y - i, 0) * pitch, min(y + i, height - 1) * pitch
            weight = weights[i]
            for x in range(pitch):
                both = np.uint32(source[np.uint64(above + x)]) + np.uint32(source[np.uint64(below + x)])
                sums[np.uint64(x)] += np.uint32(both * weight)
        for x in range(pitch):
            line[np.uint64(edge + x)] = np.uint16(sums[np.uint64(x)] >> np.uint32(8))
        for i in range(radius):
            for c in range(channels):
                line[i * channels + c] = line[edge + c]
                line[edge + pitch + i * channels + c] = line[edge + pitch - channels + c]
        weight = weights[0]
        for x in range(pitch):
            sums[np.uint64(x)] = np.uint32(np.uint32(line[np.uint64(edge + x)]) * weight) + np.uint32(8388608)
        for i in range(1, radius + 1):
            left, right = edge - i * channels, edge + i * channels
            weight = weights[i]
            for x in range(pitch):
                both = np.uint32(line[np.uint64(left + x)]) + np.uint32(line[np.uint64(right + x)])
                sums[np.uint64(x)] += np.uint32(both * weight)
        for x in range(pitch):
            image[np.uint64(here + x)] = np.uint8(sums[np.uint64(x)] >> np.uint32(24))


@njit(cache=True, error_model="numpy")
def _noise(params, table, image, n, k0, k1, op, sample, epoch):  # type: ignore[no-untyped-def]
    words = np.empty(4 * BLOCKS_AT_ONCE, np.uint32)
    steps = np.empty(4 * BLOCKS_AT_ONCE, np.int32)
    clip = params[0] != 0.0
    c1 = np.uint32(NOISE_DOMAIN | op)
    first = np.int64(np.int32(table[FIRST_STEP]))
    limits = table[THRESHOLDS:]
    for at in range(0, n, 4 * BLOCKS_AT_ONCE):
        start = np.uint32(at >> 2)
        for b in range(BLOCKS_AT_ONCE):
            w0, w1, w2, w3 = philox_numba(
                k0, k1, np.uint32(start + np.uint32(b)), c1, np.uint32(sample), np.uint32(epoch)
            )
            words[np.uint64(4 * b)] = w0
            words[np.uint64(4 * b + 1)] = w1
            words[np.uint64(4 * b + 2)] = w2
            words[np.uint64(4 * b + 3)] = w3
        count = min(n - at, 4 * BLOCKS_AT_ONCE)
        search = np.uint32(0)
        for i in range(count):
            word = words[np.uint64(i)]
            entry = table[np.uint64(word >> np.uint32(REST_BITS))]
            search |= entry
            step = np.int32(np.uint32(entry >> np.uint32(STEP_SHIFT)) & np.uint32(STEP_MASK))
            rest = np.uint32(word & np.uint32((1 << REST_BITS) - 1))
            steps[np.uint64(i)] = step + np.int32(rest >= np.uint32(entry & np.uint32((1 << STEP_SHIFT) - 1)))
        if search >> np.uint32(31):
            for i in range(count):
                if table[words[i] >> np.uint32(REST_BITS)] >> np.uint32(31):
                    found = first + np.searchsorted(limits, words[i], side="right")
                    steps[i] = found + BIAS if clip else found & 255
        if clip:
            for i in range(count):
                value = np.int32(image[np.uint64(at + i)]) + steps[np.uint64(i)] - np.int32(BIAS)
                image[np.uint64(at + i)] = np.uint8(min(max(value, np.int32(0)), np.int32(255)))
        else:
            for i in range(count):
                image[np.uint64(at + i)] = np.uint8(np.int32(image[np.uint64(at + i)]) + steps[np.uint64(i)])


@njit(cache=True, error_model="numpy", nogil=True)
def apply_pixel_op(kind, params, table, image, scratch, height, width, channels, k0, k1, op, sample, epoch):  # type: ignore[no-untyped-def]
    """Carry out one pixel op in place.

    ``kind``, ``params`` and ``table`` come from ``pixel_op_tables``; image uint8[>= height*width*channels], contiguous
    [y][x][channel]; scratch uint8[>= scratch_bytes(height, width, channels)], its start aligned to 2 bytes; k0, k1
    uint32: the seed words; op, sample int64: the op index and the sample id; epoch uint32: the epoch word.
    """
    pixels = height * width
    if kind == JITTER:
        _jitter(params, image, pixels, k0, k1, op, sample, epoch)
    elif kind == NOISE:
        _noise(params, table, image, pixels * channels, k0, k1, op, sample, epoch)
    else:
        r0, _, _, _ = _words(k0, k1, 0, op, sample, epoch)
        if kind == BLUR:
            _blur(image, scratch, height, width, channels, params[0] + _unit(r0) * params[1])
        elif _unit(r0) < params[0]:
            if kind == GRAYSCALE:
                _grey(image, pixels)
            else:
                _autocontrast(image, pixels, channels)
