"""Compiled rows of chains that only move pixels: pads, crops and the flip, straight into the delivered type."""

from __future__ import annotations

import numpy as np
from numba import njit

from renaissance.core.digest import XXH64_START, xxh64_end
from renaissance.data.finish import band_height, copy_bytes, copy_pixels, write_lines


@njit(cache=True, error_model="numpy", _nrt=False)
def _run_of_pixels(cols, size):  # type: ignore[no-untyped-def]
    """(begin, end) of the columns that show neighbouring source pixels, if all others show a fill; else (0, -1)."""
    begin = 0
    while begin < size and cols[begin] < 0:
        begin += 1
    end = begin
    while end < size and cols[end] >= 0:
        if cols[end] != cols[begin] + (end - begin):
            return 0, -1
        end += 1
    for x in range(end, size):
        if cols[x] >= 0:
            return 0, -1
    return begin, end


@njit(cache=True, error_model="numpy", _nrt=False)
def _copy_runs(pixels, start, pitch, cols, rows, y, count, run, fills, shape, flip, line):  # type: ignore[no-untyped-def]
    """``count`` lines from output row ``y`` on that show a run of neighbouring pixels, and one fill around it.

    ``run``: (begin, end) of the columns; shape: (size, channels, padded); line holds one line more than ``count``.
    """
    begin, end = run
    size, channels, padded = shape
    n = size * padded
    around = count * n  # a line of nothing but fill
    code = min(min(cols[0], cols[size - 1]), min(rows[0], rows[size - 1]))
    for x in range(size):
        for c in range(channels):
            line[np.uint64(around + x * padded + c)] = fills[c, -code - 1] if code < 0 else np.uint8(0)
        for c in range(channels, padded):
            line[np.uint64(around + x * padded + c)] = 0
    to = (size - 1 - begin if flip else begin) * padded
    first = start + np.int64(cols[begin]) * channels if end > begin else start
    for k in range(count):
        row = np.int64(rows[y + k])
        if row < 0 or end - begin < size or padded > channels:
            copy_bytes(line, around, line, k * n, n)
        if row >= 0:
            copy_pixels(pixels, first + row * pitch, line, k * n + to, end - begin, channels, padded, flip)


@njit(cache=True, error_model="numpy", _nrt=False)
def _copy_pixel_by_pixel(pixels, start, pitch, cols, rows, y, count, fills, shape, flip, line):  # type: ignore[no-untyped-def]
    """The same for columns in any order and several fills."""
    size, channels, padded = shape
    at = 0
    for k in range(count):
        row = np.int64(rows[y + k])
        for place in range(size):
            x = size - 1 - place if flip else place
            code = min(row, cols[x])
            for c in range(channels):
                line[np.uint64(at + c)] = (
                    pixels[np.uint64(start + row * pitch + cols[x] * channels + c)]
                    if code >= 0
                    else fills[c, -code - 1]
                )
            for c in range(channels, padded):
                line[np.uint64(at + c)] = 0
            at += padded


@njit(cache=True, error_model="numpy", _nrt=False)
def copy_only(pixels, start, pitch, cols, rows, fills, shape, constant, style, line, out, row_bytes):  # type: ignore[no-untyped-def]
    """Write a row without resampling: every output pixel is one source pixel or a fill. Returns the hash of the row.

    cols, rows int32: source column and row behind each output column and row, or -(op + 1) for op's fill; shape:
    (size, channels, padded); constant: all fills that can show are equal; style as in ``finish.write_lines``; line:
    scratch uint8[>= 2 * size * padded + BAND]; out and row_bytes: the row as values and as bytes.
    """
    size, _, padded = shape
    n = size * padded
    flip = style[2]
    run = _run_of_pixels(cols, size)
    in_runs = constant and run[1] >= run[0]
    lanes = row_bytes[: row_bytes.size // 8 * 8].view(np.uint64)
    state = XXH64_START
    at_once = band_height(size, n)
    for y in range(0, size, at_once):
        count = min(at_once, size - y)
        if in_runs:
            _copy_runs(pixels, start, pitch, cols, rows, y, count, run, fills, shape, flip, line)
        else:
            _copy_pixel_by_pixel(pixels, start, pitch, cols, rows, y, count, fills, shape, flip, line)
        state = write_lines(line, y, count, n, style, out, lanes, state)
    return xxh64_end(row_bytes, state)
