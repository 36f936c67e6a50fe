"""The last pass over a picture: bytes to the delivered type, erased rectangle, hash; one line at a time, in cache.

A delivered value is defined by a table of 256 entries per channel (``compile.pixel_table``). For fp32, fp16 and bf16
the lines are not looked up but computed, p * a + b in float32 split so that the large part is exact, which vectorises.
The constants are searched and tried on all 256 pixel values when a recipe is compiled; if none gives the table's very
bits, the table is used. So arithmetic and table are the same bytes, and none of it depends on the host.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from numba import njit

from renaissance.core.digest import STRIPE, xxh64_stripes
from renaissance.core.dtype import DType

BYTES, FP32, BF16, FP16, TABLE = range(5)
"""How a line is written. TABLE works for every type; BYTES is for uint8."""

TRIES = 64
Constants = npt.NDArray[np.float32]
_KINDS = {DType.FP32: FP32, DType.BF16: BF16, DType.FP16: FP16}


def line_constants(
    mean: tuple[float, ...],
    std: tuple[float, ...],
    table: npt.NDArray[np.unsignedinteger],
    dtype: DType,
    pixels: int,
    padded: int,
) -> tuple[int, Constants]:
    """How to write a line of ``pixels`` pixels, and the constants float32[4, pixels * padded] for it.

    The four are: slope and offset of the exact part, slope and offset of the rest.
    ``table`` [C,256] is what each pixel value must become: (p / 255 - mean) / std, rounded as ``compile`` says.
    """
    if dtype is DType.UINT8:
        return BYTES, np.zeros((4, 0), np.float32)
    constants = np.zeros((4, padded), np.float32)
    for channel, wanted in enumerate(table):
        found = _search(1.0 / (255.0 * std[channel]), -mean[channel] / std[channel], wanted, _KINDS[dtype])
        if found is None:
            return TABLE, np.zeros((4, 0), np.float32)
        constants[:, channel] = found
    return _KINDS[dtype], np.ascontiguousarray(np.tile(constants, pixels))


def _search(slope: float, offset: float, wanted: npt.NDArray[np.unsignedinteger], kind: int) -> Constants | None:
    """Four constants with which ``write_line`` gives every entry of ``wanted``, or None."""
    largest = max(abs(offset), abs(255.0 * slope + offset), abs(255.0 * slope))
    pixels = np.arange(256, dtype=np.uint8)
    written = np.zeros_like(wanted)
    with np.errstate(over="ignore"):
        for attempt in range(TRIES):
            quantum = math.ldexp(1.0, math.frexp(largest)[1] - 24 + attempt % 2)  # multiples below 2**24 are exact
            a, b = round(slope / quantum) * quantum, round(offset / quantum) * quantum
            nudge = math.ldexp(quantum, -20) * ((attempt + 2) // 4) * (1 - attempt // 2 % 2 * 2)
            constants = np.array([a, b, slope - a, offset - b + nudge], np.float32)
            if np.isfinite(constants).all():
                each = np.ascontiguousarray(np.repeat(constants[:, None], 256, axis=1))
                write_line(pixels, 0, 256, each, kind, wanted.reshape(1, -1), 1, 1, written, 0)
                if (written == wanted).all():
                    return constants
    return None


@njit(cache=True, error_model="numpy", inline="always")
def _affine(pixel, constants, i):  # type: ignore[no-untyped-def]  # uint8 -> float32
    p = np.float32(pixel)
    exact = np.float32(p * constants[0, i]) + constants[1, i]
    return np.float32(np.float32(exact) + np.float32(np.float32(p * constants[2, i]) + constants[3, i]))


@njit(cache=True, error_model="numpy", inline="always")
def _half(x):  # type: ignore[no-untyped-def]  # float32 below 65520 in size -> its fp16 bits, to nearest even
    bits = x.view(np.uint32)
    sign = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(0x8000))
    size = np.uint32(bits & np.uint32(0x7FFFFFFF))
    odd = np.uint32(np.uint32(size >> np.uint32(13)) & np.uint32(1))
    normal = np.uint32(np.uint32(size + odd - np.uint32(0x38000000 - 0xFFF)) >> np.uint32(13))
    small = np.uint32(np.float32(size.view(np.float32) + np.float32(0.5)).view(np.uint32) - np.uint32(0x3F000000))
    return np.uint16(sign | (small if size < np.uint32(0x38800000) else normal))


@njit(cache=True, error_model="numpy")
def write_line(line, at, n, constants, kind, table, channels, padded, values, to):  # type: ignore[no-untyped-def]
    """``n`` bytes of ``line`` (uint8) from ``at`` on become bit patterns of the delivered type at ``values[to:]``.

    The line holds whole pixels of ``padded`` channels, those past ``channels`` 0; constants float32[4,n].
    """
    if kind == FP32:
        for i in range(n):
            values[np.uint64(to + i)] = _affine(line[np.uint64(at + i)], constants, np.uint64(i)).view(np.uint32)
    elif kind == BF16:
        for i in range(n):
            bits = _affine(line[np.uint64(at + i)], constants, np.uint64(i)).view(np.uint32)
            odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
            values[np.uint64(to + i)] = np.uint16(np.uint32(bits + odd + np.uint32(0x7FFF)) >> np.uint32(16))
    elif kind == FP16:
        for i in range(n):
            values[np.uint64(to + i)] = _half(_affine(line[np.uint64(at + i)], constants, np.uint64(i)))
    elif kind == BYTES:
        for i in range(n):
            values[np.uint64(to + i)] = line[np.uint64(at + i)]
    else:
        for i in range(0, n, padded):
            for c in range(channels):
                values[np.uint64(to + i + c)] = table[c, line[np.uint64(at + i + c)]]
            for c in range(channels, padded):
                values[np.uint64(to + i + c)] = 0


@njit(cache=True, error_model="numpy", inline="always")
def copy_pixels(source, at, line, to, n, channels, padded, flip):  # type: ignore[no-untyped-def]
    """``n`` neighbouring pixels of ``source`` from byte ``at`` on into pixels of ``padded`` channels at byte ``to``.

    ``flip``: the first pixel goes to ``to``, the next ones to its left. Channels past ``channels`` are not touched.
    """
    if flip:
        if channels == 3:
            for x in range(n):
                place, target = np.uint64(at + 3 * x), np.uint64(to - padded * x)
                line[target] = source[place]
                line[target + np.uint64(1)] = source[place + np.uint64(1)]
                line[target + np.uint64(2)] = source[place + np.uint64(2)]
        else:
            for x in range(n):
                line[np.uint64(to - padded * x)] = source[np.uint64(at + x)]
    elif channels == padded:
        for i in range(n * channels):
            line[np.uint64(to + i)] = source[np.uint64(at + i)]
    else:
        for x in range(n):
            for c in range(channels):
                line[np.uint64(to + padded * x + c)] = source[np.uint64(at + channels * x + c)]


@njit(cache=True, error_model="numpy", inline="always")
def end_line(values, words, y, n, padded, erased, state):  # type: ignore[no-untyped-def]
    """What is left to do for line ``y``, just written: its part of the erased box, and its part of the hash.

    ``n`` values a line; erased: (top, left, height, width) in pixels; words: the row as uint64.
    """
    top, left, height, width = erased
    if top <= y < top + height:
        begin = y * n + left * padded
        for i in range(width * padded):
            values[np.uint64(begin + i)] = 0
    line_bytes = n * values.itemsize
    return xxh64_stripes(words, y * line_bytes // STRIPE, (y + 1) * line_bytes // STRIPE, state)
