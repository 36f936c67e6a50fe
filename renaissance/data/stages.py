"""Compiled stages of pictures of any size: a crop box resampled, or a window copied, into a row or a smaller picture.

Both work line by line: a line is made in cache, written in the delivered type, erased where it must be and hashed.
Writing bytes without a hash gives the picture that the next segment of a chain takes.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from renaissance.core.digest import XXH64_START, xxh64_end
from renaissance.data.finish import band_height, copy_pixels, erase_line, stream_line, streams, write_lines
from renaissance.data.resize import axis_weights, columns_of_rows, four_lines, plan_columns, row_of_lines
from renaissance.data.vectors import ROWS, WINDOW, end_stream, has_byte_dot_products

ZERO = np.int32(0)


@njit(cache=True, error_model="numpy", nogil=True)
def resize_stage(source, cut, box, size, window, target, style, scratch):  # type: ignore[no-untyped-def]
    """Resample a box of a picture to ``size`` x ``size`` and write the window asked for.

    source uint8[:]; cut: (start, pitch, width, height, low, high): where the cut-out pixels begin, bytes from row to
    row, their extent, and which bytes of a row, counted from ``start``, exist; box float64 (x0, y0, x1, y1) inside the
    cut; window: (x, y, width, height) of the resized picture; target: (bytes, values), one memory; style: (channels,
    padded, flip, erased box, kind, constants, table); scratch: ``pictures.Scratch.arrays``.
    Returns (True, XXH64 of the bytes), or (False, 0) when the plan does not fit in scratch.
    """
    start, pitch, width, height, low, high = cut
    x_begin, y_begin, columns_out, rows_out = window
    row_bytes, values = target
    channels, padded, flip = style[:3]
    first, number, weights, v_first, v_number, v_weights, bases, plan, ends, lines, line, sums = scratch
    stride = axis_weights(width, box[0], box[2], size, x_begin, columns_out, flip, first, number, weights)
    v_stride = axis_weights(height, box[1], box[3], size, y_begin, rows_out, False, v_first, v_number, v_weights)
    planned = has_byte_dot_products() and high - low >= WINDOW
    if planned:
        steps = plan_columns(
            first, number, weights, stride, columns_out, channels, padded, low, high, bases, plan, ends
        )
        if steps < 0:
            return False, np.uint64(0)
    columns = (first, number, weights, stride, columns_out, channels, padded, planned, high, bases, plan, ends)
    n = columns_out * padded
    line_bytes = (n + WINDOW - 1) // WINDOW * WINDOW
    slots = lines.size // line_bytes
    next_row = np.int64(v_first[0])
    last_row = np.int64(v_first[rows_out - 1]) + v_number[rows_out - 1] - 1
    lanes = row_bytes[: row_bytes.size // 8 * 8].view(np.uint64)
    state = XXH64_START
    streamed = streams(row_bytes, n, style[4])
    spare = np.empty((2, n if streamed else 1), np.uint32)
    for y in range(rows_out):
        while next_row < v_first[y] + v_number[y]:
            columns_of_rows(source, start, pitch, next_row, last_row, columns, lines, line_bytes, slots)
            next_row += ROWS
        if streamed:
            at, four = four_lines(line_bytes, slots, v_first[y], min(v_number[y], 4), v_weights, y * v_stride)
            if v_number[y] > 4:
                row_of_lines(
                    lines, line_bytes, slots, v_first[y], v_number[y], v_weights, y * v_stride, n, sums, line, 0
                )
                at = (-1, 0, 0, 0)
            before = spare[(y + 1) & 1]
            made = before.view(np.uint8), before.view(np.uint64)
            state = stream_line(made, (lines, at, four, line, spare[y & 1]), y - 1, n, style, row_bytes, state)
            erase_line(y, style[3], padded, spare[y & 1], 0)
            continue
        row_of_lines(lines, line_bytes, slots, v_first[y], v_number[y], v_weights, y * v_stride, n, sums, line, 0)
        state = write_lines(line, y, 1, n, style, values, lanes, state)
    if streamed:
        last = spare[(rows_out - 1) & 1]
        made = last.view(np.uint8), last.view(np.uint64)
        state = stream_line(
            made,
            (lines, (-1, 0, 0, 0), (ZERO, ZERO, ZERO, ZERO), line, spare[rows_out & 1]),
            rows_out - 1,
            n,
            style,
            row_bytes,
            state,
        )
        end_stream()
    return True, xxh64_end(row_bytes, state)


@njit(cache=True, error_model="numpy", nogil=True)
def copy_stage(source, cut, window, target, style, line):  # type: ignore[no-untyped-def]
    """Copy a window of a picture, with zeros where it reaches beyond, and return the XXH64 of what was written.

    source uint8[:]; cut: (start, pitch, width, height): where the pixels begin, bytes from row to row, their extent;
    window: (x, y, width, height), x and y may be negative; target and style as in ``resize_stage``.
    """
    start, pitch, width, height = cut
    x_begin, y_begin, columns_out, rows_out = window
    row_bytes, values = target
    channels, padded, flip = style[:3]
    n = columns_out * padded
    left, right = min(max(-x_begin, 0), columns_out), max(min(width - x_begin, columns_out), 0)
    lanes = row_bytes[: row_bytes.size // 8 * 8].view(np.uint64)
    state = XXH64_START
    at_once = band_height(rows_out, n)
    for i in range(at_once * n):
        line[i] = 0
    to = ((columns_out - 1 - left) if flip else left) * padded
    for y in range(0, rows_out, at_once):
        count = min(at_once, rows_out - y)
        for k in range(count):
            source_y = y_begin + y + k
            if 0 <= source_y < height and right > left:
                at = start + source_y * pitch + (x_begin + left) * channels
                copy_pixels(source, at, line, k * n + to, right - left, channels, padded, flip)
            else:
                for i in range(k * n, (k + 1) * n):
                    line[i] = 0
        state = write_lines(line, y, count, n, style, values, lanes, state)
    return xxh64_end(row_bytes, state)
