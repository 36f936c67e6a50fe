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
from renaissance.data.vectors import (
    LANES,
    blend16,
    copy16,
    is_aligned64,
    mirror5,
    stream64,
    write16_bf16,
    write16_fp16,
    write16_fp32,
)

BYTES, FP32, BF16, FP16, TABLE = range(5)
"""How a line is written. TABLE works for every type; BYTES is for uint8."""

TRIES = 64
BAND = 4096
"""Bytes of lines that are made before they are written."""
STREAMED = 256 << 10
"""Rows of at least so many bytes are written past the caches where they can be."""
PIECE = 192
"""Values that are written before they are hashed; a multiple of PERIOD."""
PERIOD = 48
"""Values after which constants repeat, for every number of channels that divides it; others use the table."""
Constants = npt.NDArray[np.float32]
_KINDS = {DType.FP32: FP32, DType.BF16: BF16, DType.FP16: FP16}


def line_constants(
    mean: tuple[float, ...],
    std: tuple[float, ...],
    table: npt.NDArray[np.unsignedinteger],
    dtype: DType,
    padded: int,
) -> tuple[int, Constants]:
    """How to write lines of pixels of ``padded`` channels, and the constants float32[4, PERIOD + LANES] for it.

    The four are: slope and offset of the exact part, slope and offset of the rest; they repeat with the channels.
    ``table`` [C,256] is what each pixel value must become: (p / 255 - mean) / std, rounded as ``compile`` says.
    """
    if dtype is DType.UINT8:
        return BYTES, np.zeros((4, 0), np.float32)
    if PERIOD % padded:
        return TABLE, np.zeros((4, 0), np.float32)
    constants = np.zeros((4, padded), np.float32)
    for channel, wanted in enumerate(table):
        found = _search(1.0 / (255.0 * std[channel]), -mean[channel] / std[channel], wanted, _KINDS[dtype])
        if found is None:
            return TABLE, np.zeros((4, 0), np.float32)
        constants[:, channel] = found
    return _KINDS[dtype], _repeated(constants)


def _repeated(constants: Constants) -> Constants:
    """The constants [4, channels] of one pixel, over a period and a vector more."""
    whole = np.tile(constants, (PERIOD + LANES) // constants.shape[1] + 1)
    return np.ascontiguousarray(whole[:, : PERIOD + LANES])


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
                write_values(
                    pixels, 0, 256, _repeated(constants[:, None]), kind, wanted.reshape(1, -1), 1, 1, written, 0
                )
                if (written == wanted).all():
                    return constants
    return None


@njit(cache=True, error_model="numpy", _nrt=False)
def copy_bytes(source, at, target, to, n):  # type: ignore[no-untyped-def]
    """``n`` bytes from ``source[at:]`` to ``target[to:]``, which do not overlap."""
    if n < LANES:
        for i in range(n):
            target[np.uint64(to + i)] = source[np.uint64(at + i)]
        return
    i = 0
    while i < n:
        i = min(i, n - LANES)
        copy16(source, at + i, target, to + i)
        i += LANES


@njit(cache=True, error_model="numpy", _nrt=False)
def write_values(line, at, n, constants, kind, table, channels, padded, values, to):  # type: ignore[no-untyped-def]
    """``n`` bytes of ``line`` (uint8) from ``at`` on become bit patterns of the delivered type at ``values[to:]``.

    They are whole pixels of ``padded`` channels, those past ``channels`` 0; constants as from ``line_constants``.
    """
    if n >= LANES and FP32 <= kind <= FP16:
        i, place = 0, 0
        while i < n:
            if i > n - LANES:  # the last sixteen overlap those before
                i = n - LANES
                place = i % PERIOD
            if kind == FP32:
                write16_fp32(line, at + i, constants, constants.shape[1], place, values, to + i)
            elif kind == BF16:
                write16_bf16(line, at + i, constants, constants.shape[1], place, values, to + i)
            else:
                write16_fp16(line, at + i, constants, constants.shape[1], place, values, to + i)
            i += LANES
            place = place + LANES if place < PERIOD - LANES else 0
    elif kind == BYTES:
        copy_bytes(line, at, values, to, n)
    else:  # also lines too short for a vector
        for i in range(0, n, padded):
            for c in range(channels):
                values[np.uint64(to + i + c)] = table[c, line[np.uint64(at + i + c)]]
            for c in range(channels, padded):
                values[np.uint64(to + i + c)] = 0


@njit(cache=True, error_model="numpy", _nrt=False)
def copy_pixels(source, at, line, to, n, channels, padded, flip):  # type: ignore[no-untyped-def]
    """``n`` neighbouring pixels of ``source`` from byte ``at`` on into pixels of ``padded`` channels at byte ``to``.

    ``flip``: the first pixel goes to ``to``, the next ones to its left. Channels past ``channels`` are not touched.
    """
    if channels == padded and not flip:
        copy_bytes(source, at, line, to, n * channels)
        return
    step = -padded if flip else padded
    done = 0
    if channels == 3:
        while padded == 3 and done + 5 < n:  # reads and overwrites a byte of the next pixel
            mirror5(source, at + 3 * done, line, to - 3 * done - 12)
            done += 5
        for x in range(done, n):
            place, target = np.uint64(at + 3 * x), np.uint64(to + step * x)
            line[target] = source[place]
            line[target + np.uint64(1)] = source[place + np.uint64(1)]
            line[target + np.uint64(2)] = source[place + np.uint64(2)]
    else:
        for x in range(n):
            line[np.uint64(to + step * x)] = source[np.uint64(at + x)]


@njit(cache=True, error_model="numpy", _nrt=False)
def erase_line(y, erased, padded, values, begin):  # type: ignore[no-untyped-def]
    """Zero what lies in the erased box (top, left, height, width) of line ``y``, which is at ``values[begin:]``."""
    top, left, height, width = erased
    if top <= y < top + height:
        for i in range(left * padded, (left + width) * padded):
            values[np.uint64(begin + i)] = 0


@njit(cache=True, error_model="numpy", _nrt=False)
def _write_and_hash(line, n, style, values, to, lanes, state):  # type: ignore[no-untyped-def]
    """``n`` bytes, whole vectors, to the delivered type at ``values[to:]``, a piece at a time; hashes each piece.

    The hash waits for its own results most of the time; the arithmetic of the next piece fills the gaps.
    """
    channels, padded, _, _, kind, constants, table = style
    for i in range(0, n, PIECE):
        count = min(PIECE, n - i)
        write_values(line, i, count, constants, kind, table, channels, padded, values, to + i)
        begin = (to + i) * values.itemsize // STRIPE
        state = xxh64_stripes(lanes, begin, begin + count * values.itemsize // STRIPE, state)
    return state


@njit(cache=True, error_model="numpy", _nrt=False)
def write_lines(line, y, count, n, style, values, lanes, state):  # type: ignore[no-untyped-def]
    """``count`` lines of ``n`` bytes, the first is line ``y`` of the picture: delivered type, erased box, hash.

    line uint8[>= count * n]; style: (channels, padded, flip, erased box, kind, constants, table); lanes: the row as
    uint64; returns the state of the hash.
    """
    channels, padded, _, erased, kind, constants, table = style
    if FP32 <= kind <= FP16 and n % LANES == 0 and (y + count <= erased[0] or erased[0] + erased[2] <= y):
        return _write_and_hash(line, count * n, style, values, y * n, lanes, state)
    write_values(line, 0, count * n, constants, kind, table, channels, padded, values, y * n)
    for k in range(count):
        erase_line(y + k, erased, padded, values, (y + k) * n)
    line_bytes = n * values.itemsize
    return xxh64_stripes(lanes, y * line_bytes // STRIPE, (y + count) * line_bytes // STRIPE, state)


@njit(cache=True, error_model="numpy", inline="always")
def band_height(size, n):  # type: ignore[no-untyped-def]
    """How many of ``size`` lines of ``n`` bytes to make before they are written: short lines together, in cache."""
    return min(max(BAND // n, 1), size)


@njit(cache=True, error_model="numpy", _nrt=False)
def streams(row_bytes, n, kind):  # type: ignore[no-untyped-def]
    """Whether lines of ``n`` values go to memory past the caches: large rows in float32, of whole cache lines.

    A row that no cache will hold until it is read need not be fetched before it is written, nor push others out. (Rows
    of half the size were measured to be no faster for it.)
    """
    return kind == FP32 and n % LANES == 0 and row_bytes.size >= STREAMED and is_aligned64(row_bytes)


@njit(cache=True, error_model="numpy", _nrt=False)
def stream_line(made, next_line, y, n, style, row_bytes, state):  # type: ignore[no-untyped-def]
    """Hash and stream out line ``y`` of a picture (-1: none), and meanwhile make the next one.

    ``made``: the float32 bits of line y, as bytes and as uint64; next_line: (lines, places of its four lines, their
    weights, line: scratch uint8[n], uint32[n]: where to make it); with places[0] < 0 ``line`` holds it already.
    The hash waits for its own results most of the time; the arithmetic of the next line fills the gaps.
    """
    bytes_, lanes = made
    lines, at, weights, line, values = next_line
    constants = style[5]
    h0, h1, h2, h3 = state
    place = 0
    begin = y * n * 4
    for i in range(0, n, LANES):
        if at[0] >= 0:
            blend16(lines, (at[0] + i, at[1] + i, at[2] + i, at[3] + i), weights, line, i)
        write16_fp32(line, i, constants, constants.shape[1], place, values, i)
        place = place + LANES if place < PERIOD - LANES else 0
        if y >= 0:
            stripe = i // 8
            h0, h1, h2, h3 = xxh64_stripes(lanes, stripe, stripe + 2, (h0, h1, h2, h3))
            stream64(bytes_, 4 * i, row_bytes, begin + 4 * i)
    return h0, h1, h2, h3
