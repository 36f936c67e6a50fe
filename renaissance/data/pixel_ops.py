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
from renaissance.data.draws import unit, words
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


@njit(cache=True, error_model="numpy")
def _luma(r, g, b):  # type: ignore[no-untyped-def]  # uint8 each -> int32 in 0..255
    return np.int32(
        np.int32(np.int32(r) * np.int32(19595) + np.int32(g) * np.int32(38470))
        + np.int32(np.int32(b) * np.int32(7471) + np.int32(32768))
    ) >> np.int32(16)


@njit(cache=True, error_model="numpy")
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


@njit(cache=True, error_model="numpy")
def _either(condition, yes, no):  # type: ignore[no-untyped-def]  # bool, int32, int32 -> int32
    """A choice without a branch, which would keep a loop from being vectorised."""
    return np.int32(no ^ np.int32(np.int32(yes ^ no) & -np.int32(condition)))


@njit(cache=True, error_model="numpy")
def _darker(value, numerator):  # type: ignore[no-untyped-def]  # int32 in 0..255, 0..65025 -> int32
    """value * numerator / 65025, to nearest: the product is below 2**24, so exact in float32."""
    return np.int32(np.float32(np.int32(value * numerator)) * np.float32(1.0 / 65025.0) + np.float32(0.5))


@njit(cache=True, error_model="numpy")
def _turn_hue(image, pixels, shift):  # type: ignore[no-untyped-def]
    """To 8-bit HSV, H + shift modulo 256, and back."""
    one = np.int32(1)
    for i in range(pixels):
        at = np.uint64(3 * i)
        r = np.int32(image[at])
        g = np.int32(image[at + np.uint64(1)])
        b = np.int32(image[at + np.uint64(2)])
        most = max(r, max(g, b))
        least = min(r, min(g, b))
        spread = np.int32(most - least)
        middle = np.int32(np.int32(r + g) + np.int32(b - most)) - least
        # Within its sector the hue rises or falls with the middle channel; its bounds are the odd sixths.
        red, green = r == most, g == most
        sector = _either(red, np.int32(0), _either(green, np.int32(2), np.int32(4)))
        rising = _either(red, np.int32(g < b), _either(green, np.int32(b <= r), np.int32(r <= g)))
        x = np.float32(np.int32(most - middle)) / np.float32(max(spread, one))
        sign = np.float32(np.int32(rising + rising - one))
        h = np.float32(np.int32(sector + one - rising - rising)) + sign * x
        h = h / np.float32(6.0)
        h = h + np.float32(h < np.float32(0.0))
        hue = np.int32(h * np.float32(255.0))
        s = np.int32(np.float32(spread) / np.float32(max(most, one)) * np.float32(255.0))
        six = np.int32(np.int32(np.int32(hue + shift) & np.int32(255)) * np.int32(6))
        sector = np.int32(np.int32(six * np.int32(32897)) >> np.int32(23))  # six / 255
        rest = np.int32(six - sector * np.int32(255))
        p = _darker(most, np.int32(np.int32(65025) - s * np.int32(255)))
        q = _darker(most, np.int32(np.int32(65025) - s * rest))
        u = _darker(most, np.int32(np.int32(65025) - s * np.int32(np.int32(255) - rest)))
        red = _either(sector == 1, q, _either(sector == 4, u, _either(np.uint32(sector - 2) < 2, p, most)))
        green = _either(
            sector == 3, q, _either(np.uint32(sector - 1) < 2, most, _either(np.uint32(sector - 4) < 2, p, u))
        )
        blue = _either(sector == 5, q, _either(sector == 2, u, _either(np.uint32(sector - 3) < 2, most, p)))
        image[at] = np.uint8(red)
        image[at + np.uint64(1)] = np.uint8(green)
        image[at + np.uint64(2)] = np.uint8(blue)


@njit(cache=True, error_model="numpy")
def _jitter(params, image, pixels, k0, k1, op, sample, epoch):  # type: ignore[no-untyped-def]
    order = np.empty(4, np.int64)
    n = 0
    for step in range(4):
        if params[step] > 0.0:
            order[n] = step
            n += 1
    _, r1, r2, r3 = words(k0, k1, 0, op, sample, epoch)
    for i in range(n - 1, 0, -1):
        j = bounded(r1 if i == 1 else (r2 if i == 2 else r3), i + 1)
        order[i], order[j] = order[j], order[i]
    w0, w1, w2, w3 = words(k0, k1, 1, op, sample, epoch)
    for i in range(n):
        step = order[i]
        if step == HUE:
            drawn = -params[HUE] + unit(w3) * (params[HUE] - -params[HUE])
            _turn_hue(image, pixels, np.int32(drawn * 255.0))
        else:
            low = max(0.0, 1.0 - params[step])
            word = w0 if step == BRIGHTNESS else (w1 if step == CONTRAST else w2)
            factor = np.float32(low + unit(word) * ((1.0 + params[step]) - low))
            if step == SATURATION:
                _saturate(image, pixels, factor)
            else:
                base = np.int32(0) if step == BRIGHTNESS else _mean_luma(image, pixels)
                _blend_with_one(image, 3 * pixels, base, factor)


@njit(cache=True, error_model="numpy")
def _range_of(least, most):  # type: ignore[no-untyped-def]  # uint8, uint8 -> int32 least, int32 spread, float32 scale
    """A channel of one value is stretched from 0..255 to itself."""
    spread = np.int32(most) - np.int32(least)
    if spread == 0:
        return np.int32(0), np.int32(255), np.float32(1.0 / 510.0)
    return np.int32(least), np.int32(spread), np.float32(1.0) / np.float32(2 * spread)


@njit(cache=True, error_model="numpy")
def _stretched(value, least, spread, scale):  # type: ignore[no-untyped-def]  # uint8, int32, int32, float32 -> uint8
    """(510 * (value - least) + spread) / (2 * spread), down: half a unit keeps the product away from whole numbers."""
    doubled = np.int32(np.int32(np.int32(np.int32(value) - least) * np.int32(510)) + spread)
    return np.uint8(np.int32((np.float32(doubled) + np.float32(0.5)) * scale))


@njit(cache=True, error_model="numpy")
def _autocontrast_grey(image, pixels):  # type: ignore[no-untyped-def]
    low, high = np.uint8(255), np.uint8(0)
    for i in range(pixels):
        low = min(low, image[np.uint64(i)])
        high = max(high, image[np.uint64(i)])
    least, spread, scale = _range_of(low, high)
    for i in range(pixels):
        image[np.uint64(i)] = _stretched(image[np.uint64(i)], least, spread, scale)


@njit(cache=True, error_model="numpy")
def _autocontrast_colour(image, pixels):  # type: ignore[no-untyped-def]
    """All channels of a pixel together, so that the loops run over contiguous memory."""
    low0, low1, low2 = np.uint8(255), np.uint8(255), np.uint8(255)
    high0, high1, high2 = np.uint8(0), np.uint8(0), np.uint8(0)
    for i in range(pixels):
        at = np.uint64(3 * i)
        v0, v1, v2 = image[at], image[at + np.uint64(1)], image[at + np.uint64(2)]
        low0, low1, low2 = min(low0, v0), min(low1, v1), min(low2, v2)
        high0, high1, high2 = max(high0, v0), max(high1, v1), max(high2, v2)
    least0, spread0, scale0 = _range_of(low0, high0)
    least1, spread1, scale1 = _range_of(low1, high1)
    least2, spread2, scale2 = _range_of(low2, high2)
    for i in range(pixels):
        at = np.uint64(3 * i)
        image[at] = _stretched(image[at], least0, spread0, scale0)
        image[at + np.uint64(1)] = _stretched(image[at + np.uint64(1)], least1, spread1, scale1)
        image[at + np.uint64(2)] = _stretched(image[at + np.uint64(2)], least2, spread2, scale2)


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
def _add_taps(sums, values, at, weights, n):  # type: ignore[no-untyped-def]
    """sums[x] += the weighted values at offsets at[0..3] (the first two and the last two share a weight)."""
    a0, a1, b0, b1 = at
    first, second = weights
    for x in range(n):
        one = np.uint32(values[np.uint64(a0 + x)]) + np.uint32(values[np.uint64(a1 + x)])
        two = np.uint32(values[np.uint64(b0 + x)]) + np.uint32(values[np.uint64(b1 + x)])
        sums[np.uint64(x)] += np.uint32(np.uint32(one * first) + np.uint32(two * second))


@njit(cache=True, error_model="numpy")
def _start_sums(sums, values, at, weight, rounding, n):  # type: ignore[no-untyped-def]
    for x in range(n):
        sums[np.uint64(x)] = np.uint32(np.uint32(np.uint32(values[np.uint64(at + x)]) * weight) + rounding)


@njit(cache=True, error_model="numpy")
def _blur(image, scratch, height, width, channels, sigma):  # type: ignore[no-untyped-def]
    """First down the columns into one line of 1/256 grey steps, then along that line; row by row, from a copy."""
    radius = np.int64(np.floor(REACH * sigma))
    if radius == 0:
        return
    weights = np.zeros(radius + 2, np.uint32)  # one more, of 0: taps are taken two at a time
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
        _start_sums(sums, source, here, weights[0], np.uint32(1 << 7), pitch)
        for i in range(1, radius + 1, 2):
            up, down = max(y - i, 0) * pitch, min(y + i, height - 1) * pitch
            up2, down2 = max(y - i - 1, 0) * pitch, min(y + i + 1, height - 1) * pitch
            _add_taps(sums, source, (up, down, up2, down2), (weights[i], weights[i + 1]), pitch)
        for x in range(pitch):
            line[np.uint64(edge + x)] = np.uint16(sums[np.uint64(x)] >> np.uint32(8))
        for i in range(edge):
            line[i] = line[edge + i % channels]
            line[edge + pitch + i] = line[edge + pitch - channels + i % channels]
        _start_sums(sums, line, edge, weights[0], np.uint32(1 << 23), pitch)
        for i in range(1, radius + 1, 2):
            near, far = i * channels, min(i + 1, radius) * channels
            _add_taps(
                sums, line, (edge - near, edge + near, edge - far, edge + far), (weights[i], weights[i + 1]), pitch
            )
        for x in range(pitch):
            image[np.uint64(here + x)] = np.uint8(sums[np.uint64(x)] >> np.uint32(24))


@njit(cache=True, error_model="numpy")
def _not_above(limits, word):  # type: ignore[no-untyped-def]
    """How many of the rising ``limits`` (uint32) are not above ``word``."""
    low, high = 0, limits.size
    while low < high:
        middle = (low + high) >> 1
        if limits[middle] <= word:
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True, error_model="numpy")
def _noise(params, table, image, n, k0, k1, op, sample, epoch):  # type: ignore[no-untyped-def]
    drawn = np.empty(4 * BLOCKS_AT_ONCE, np.uint32)
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
            drawn[np.uint64(4 * b)] = w0
            drawn[np.uint64(4 * b + 1)] = w1
            drawn[np.uint64(4 * b + 2)] = w2
            drawn[np.uint64(4 * b + 3)] = w3
        count = min(n - at, 4 * BLOCKS_AT_ONCE)
        search = np.uint32(0)
        for i in range(count):
            word = drawn[np.uint64(i)]
            entry = table[np.uint64(word >> np.uint32(REST_BITS))]
            search |= entry
            step = np.int32(np.uint32(entry >> np.uint32(STEP_SHIFT)) & np.uint32(STEP_MASK))
            rest = np.uint32(word & np.uint32((1 << REST_BITS) - 1))
            steps[np.uint64(i)] = step + np.int32(rest >= np.uint32(entry & np.uint32((1 << STEP_SHIFT) - 1)))
        if search >> np.uint32(31):
            for i in range(count):
                if table[drawn[i] >> np.uint32(REST_BITS)] >> np.uint32(31):
                    found = first + _not_above(limits, drawn[i])
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
        r0, _, _, _ = words(k0, k1, 0, op, sample, epoch)
        if kind == BLUR:
            _blur(image, scratch, height, width, channels, params[0] + unit(r0) * params[1])
        elif unit(r0) < params[0]:
            if kind == GRAYSCALE:
                _grey(image, pixels)
            elif channels == 3:
                _autocontrast_colour(image, pixels)
            else:
                _autocontrast_grey(image, pixels)
