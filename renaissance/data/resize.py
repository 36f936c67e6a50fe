"""Antialiased bilinear resizing, bit for bit what Pillow's ``Image.resize(size, BILINEAR, box)`` gives.

Two passes, columns first, with bytes in between and weights of 22 fraction bits in 32-bit integers. The weights come
from float64 operations in Pillow's order (its Resample.c, which this follows as a definition), the rest is integer
arithmetic: the same bytes on every host. Only the output columns and rows asked for are computed, only the source rows
they need are read, and between the passes a few rows are kept, not the picture.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from renaissance.data.vectors import (
    LANES,
    PRECISION,
    ROWS,
    STEP_WORDS,
    TAPS,
    WINDOW,
    blend16,
    has_byte_dot_products,
    weigh_group,
    weigh_pixel,
)

HALF = 1 << (PRECISION - 1)
ROUNDED = np.int32(HALF)


def taps_at_most(length: float, out: int) -> int:
    """Weights of one output value when ``length`` pixels become ``out``: the stride of the weight table."""
    return math.ceil(max(length / out, 1.0)) * 2 + 1


@njit(cache=True, error_model="numpy")
def axis_weights(size, low, high, out, begin, count, mirror, first, number, weights):  # type: ignore[no-untyped-def]
    """Weights of the output positions ``begin`` to ``begin + count`` of one axis; returns their stride.

    ``size`` source pixels, of which [low, high) (float32) become ``out``. first, number int32[count]: each position's
    first source pixel and how many it takes; weights int32[>= count * stride], zero past ``number``. ``mirror``: the
    positions are stored in reverse.
    """
    scale = np.float64(np.float32(np.float32(high) - np.float32(low))) / np.float64(out)
    spread = scale if scale > 1.0 else 1.0
    stride = np.int64(np.ceil(spread)) * 2 + 1
    inverse = 1.0 / spread
    shape = np.empty(stride, np.float64)
    for i in range(count):
        centre = np.float64(np.float32(low)) + (np.float64(begin + i) + 0.5) * scale
        least = np.int64(max(np.int64(centre - spread + 0.5), np.int64(0)))
        n = np.int64(min(np.int64(centre + spread + 0.5), np.int64(size))) - least
        total = 0.0
        for k in range(n):
            bell = 1.0 - abs((np.float64(k + least) - centre + 0.5) * inverse)
            shape[k] = bell if bell > 0.0 else 0.0
            total += shape[k]
        place = count - 1 - i if mirror else i
        first[place], number[place] = least, n
        at = place * stride
        for k in range(n):
            w = shape[k] / total if total != 0.0 else shape[k]
            weights[at + k] = np.int32(0.5 + w * 4194304.0)
        for k in range(np.int64(max(n, np.int64(0))), stride):
            weights[at + k] = 0
    return stride


@njit(cache=True, error_model="numpy")
def plan_columns(first, number, weights, stride, count, channels, padded, low, high, bases, plan, ends):  # type: ignore[no-untyped-def]
    """Cut the columns' weights into steps for ``weigh_group``; returns how many, or -1 if they do not fit.

    ``low`` and ``high``: bytes of a source row that may be read, counted from its first column's, at least WINDOW
    apart; bases int64[steps], plan uint32[steps * STEP_WORDS], ends int64[groups + 1]: where each group's steps begin.
    """
    done = np.empty(LANES + 1, np.int64)
    step = 0
    for group in range((count * padded + LANES - 1) // LANES):
        ends[group] = step
        lane0 = group * LANES
        x0 = lane0 // padded
        x1 = min((lane0 + LANES - 1) // padded + 1, count)
        for i in range(x1 - x0):
            done[i] = 0
        while True:
            base = high
            for x in range(x0, x1):
                if number[x] > done[x - x0]:
                    base = min(base, (first[x] + done[x - x0]) * channels)
            if base == high:
                break
            if step == bases.size:
                return -1
            base = max(min(base, high - WINDOW), low)
            bases[step] = base
            at = step * STEP_WORDS
            for word in range(STEP_WORDS):
                plan[np.uint64(at + word)] = 0
            for x in range(x0, x1):
                place = (first[x] + done[x - x0]) * channels - base
                taps = min(min(number[x] - done[x - x0], TAPS), (WINDOW - place) // channels)
                if taps <= 0:
                    continue
                high_bytes, middle_bytes, low_bytes = np.uint32(0), np.uint32(0), np.uint32(0)
                for k in range(taps):  # the weight in three signed bytes
                    w = weights[x * stride + done[x - x0] + k]
                    upper = (w + 128) >> 8
                    shift = np.uint32(8 * k)
                    low_bytes |= np.uint32(w & 255) << shift
                    middle_bytes |= np.uint32(upper & 255) << shift
                    high_bytes |= np.uint32((upper + 128) >> 8) << shift
                done[x - x0] += taps
                index = np.uint32(place) * np.uint32(0x01010101) + np.uint32(0x03020100) * np.uint32(channels)
                for c in range(channels):
                    lane = x * padded + c - lane0
                    if 0 <= lane < LANES:
                        plan[np.uint64(at + lane)] = index + np.uint32(c) * np.uint32(0x01010101)
                        plan[np.uint64(at + LANES + lane)] = high_bytes
                        plan[np.uint64(at + 2 * LANES + lane)] = middle_bytes
                        plan[np.uint64(at + 3 * LANES + lane)] = low_bytes
            step += 1
    ends[(count * padded + LANES - 1) // LANES] = step
    return step


@njit(cache=True, error_model="numpy")
def columns_of_rows(source, start, pitch, row, last_row, columns, lines, line_bytes, slots):  # type: ignore[no-untyped-def]
    """First pass for ROWS source rows from ``row`` on (none after ``last_row``), each into line ``row % slots``."""
    first, number, weights, stride, count, channels, padded, planned, high, bases, plan, ends = columns
    if has_byte_dot_products() and planned:
        r0, r1, r2, r3 = row, min(row + 1, last_row), min(row + 2, last_row), min(row + 3, last_row)
        at = (start + r0 * pitch, start + r1 * pitch, start + r2 * pitch, start + r3 * pitch)
        t0, t1, t2, t3 = (
            r0 % slots * line_bytes,
            r1 % slots * line_bytes,
            r2 % slots * line_bytes,
            r3 % slots * line_bytes,
        )
        for group in range((count * padded + LANES - 1) // LANES):
            to = (t0 + group * LANES, t1 + group * LANES, t2 + group * LANES, t3 + group * LANES)
            weigh_group(source, at, bases, plan, ends[group], ends[group + 1], lines, to)
        return
    for r in range(row, min(row + ROWS, last_row + 1)):
        begin = start + r * pitch
        target = r % slots * line_bytes
        for x in range(count):
            at = begin + first[x] * channels
            w = x * stride
            if channels == 3 and x + 1 < count and 3 * (first[x] + number[x]) < high:  # a byte more is read and written
                weigh_pixel(source, at, weights, w, number[x], lines, target + x * padded)
            elif channels == 3:
                red, green, blue = ROUNDED, ROUNDED, ROUNDED
                for k in range(number[x]):
                    weight = weights[np.uint64(w + k)]
                    place = np.uint64(at + 3 * k)
                    red += np.int32(source[place]) * weight
                    green += np.int32(source[place + np.uint64(1)]) * weight
                    blue += np.int32(source[place + np.uint64(2)]) * weight
                lines[np.uint64(target + x * padded)] = np.uint8(red >> PRECISION)
                lines[np.uint64(target + x * padded + 1)] = np.uint8(green >> PRECISION)
                lines[np.uint64(target + x * padded + 2)] = np.uint8(blue >> PRECISION)
            else:
                grey = ROUNDED
                for k in range(number[x]):
                    grey += np.int32(source[np.uint64(at + k)]) * weights[np.uint64(w + k)]
                lines[np.uint64(target + x * padded)] = np.uint8(grey >> PRECISION)
            for c in range(channels, padded):
                lines[np.uint64(target + x * padded + c)] = 0


@njit(cache=True, error_model="numpy")
def four_lines(line_bytes, slots, first, number, weights, at):  # type: ignore[no-untyped-def]
    """(places, weights) of the at most four lines of an output row; those that are missing weigh nothing."""
    l0 = first % slots * line_bytes
    l1 = (first + 1) % slots * line_bytes if number > 1 else l0
    l2 = (first + 2) % slots * line_bytes if number > 2 else l0
    l3 = (first + 3) % slots * line_bytes if number > 3 else l0
    w1 = weights[at + 1] if number > 1 else np.int32(0)
    w2 = weights[at + 2] if number > 2 else np.int32(0)
    w3 = weights[at + 3] if number > 3 else np.int32(0)
    return (l0, l1, l2, l3), (weights[at], w1, w2, w3)


@njit(cache=True, error_model="numpy")
def row_of_lines(lines, line_bytes, slots, first, number, weights, at, n, sums, out, to):  # type: ignore[no-untyped-def]
    """Second pass for one output row: ``number`` lines from source row ``first`` on, weighed by ``weights[at:]``."""
    if number <= 4:
        (l0, l1, l2, l3), (w0, w1, w2, w3) = four_lines(line_bytes, slots, first, number, weights, at)
        if n >= LANES:
            i = 0
            while i < n:
                i = min(i, n - LANES)  # the last sixteen overlap those before
                blend16(lines, (l0 + i, l1 + i, l2 + i, l3 + i), (w0, w1, w2, w3), out, to + i)
                i += LANES
            return
        for i in range(n):
            total = np.int32(np.int32(lines[np.uint64(l0 + i)]) * w0 + np.int32(lines[np.uint64(l1 + i)]) * w1)
            total = np.int32(total + np.int32(lines[np.uint64(l2 + i)]) * w2)
            total = np.int32(total + np.int32(lines[np.uint64(l3 + i)]) * w3)
            out[np.uint64(to + i)] = np.uint8(np.int32(total + ROUNDED) >> np.int32(PRECISION))
        return
    l0 = first % slots * line_bytes
    w0 = weights[at]
    for i in range(n):
        sums[np.uint64(i)] = np.int32(np.int32(lines[np.uint64(l0 + i)]) * w0 + ROUNDED)
    for k in range(1, number):
        line = (first + k) % slots * line_bytes
        w = weights[at + k]
        for i in range(n):
            sums[np.uint64(i)] = np.int32(sums[np.uint64(i)] + np.int32(lines[np.uint64(line + i)]) * w)
    for i in range(n):
        out[np.uint64(to + i)] = np.uint8(sums[np.uint64(i)] >> np.int32(PRECISION))
