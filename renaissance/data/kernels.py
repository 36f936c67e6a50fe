"""Compiled kernels of a recipe: one call makes a worker's whole share of a batch, row by row, into the slot.

Invariants: geometry is integer arithmetic on 16.16 fixed-point coordinates with 8-bit bilinear weights, so a sample's
bytes are the same on every host; the only floats are a sample's few map coefficients, in float64 and a fixed order;
no fast-math; scratch is local to a call, so threads may share a plan. docs/recipes.md is the definition,
``reference.py`` says the same in plain NumPy.

Functions declared with ``_nrt=False`` allocate nothing and keep nothing: they do not count references to their callers'
arrays, which are atomic operations and took a third of the time of a small picture.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from renaissance.core.digest import xxh64
from renaissance.core.exact_math import sin_cos_degrees
from renaissance.core.philox import bounded
from renaissance.data.copies import copy_only
from renaissance.data.draws import erased_box, flips, unit, words
from renaissance.data.finish import BAND
from renaissance.data.prefetch import prefetch

PAD, CROP, ROTATE, SCALE, CENTER = range(5)

# Columns of the geometry table (int64[ops, GEO_COLUMNS]).
KIND, OP, IN_W, IN_H, OUT_W, OUT_H, SHIFT, COLS_AT, ROWS_AT, MASKED, GEO_COLUMNS = range(11)
# Entries of the integer head: sizes, and the op indices of flip and erase (-1: absent).
SIZE, HEIGHT, WIDTH, CHANNELS, PADDED, MAX_CANVAS, FLIP_OP, ERASE_OP = range(8)
# ... how many ops are undrawn and how many come before resampling, and which short cuts are exact.
STATIC, LEADING, PLAIN, CONTIGUOUS, BACKGROUND = range(8, 13)
# ... and how lines are written (``finish``).
LINE_KIND, HEAD_LENGTH = 13, 14

ONE = 65536
HALF = 32768
CACHE_LINE = 64
PREFETCH_BYTES = 16384
LAST_ID = (1 << 32) - 1


@njit(cache=True, error_model="numpy", inline="always")
def _fixed(value):  # type: ignore[no-untyped-def]  # float64 pixels -> int64 in 1/65536 pixel, half up
    return np.int64(np.floor(value * 65536.0 + 0.5))


@njit(cache=True, error_model="numpy", inline="always")
def _copy(source, target, n):  # type: ignore[no-untyped-def]
    for i in range(n):  # a loop, because slice assignment costs seconds of compile time
        target[np.uint64(i)] = source[np.uint64(i)]


@njit(cache=True, error_model="numpy", inline="always")
def _fill(target, value, n):  # type: ignore[no-untyped-def]
    for i in range(n):
        target[np.uint64(i)] = value


@njit(cache=True, error_model="numpy", _nrt=False)
def _leading_maps(geo, pad_maps, static_maps, offsets, begin, end, cols, rows, spare):  # type: ignore[no-untyped-def]
    """Fill ``cols``/``rows`` (int32): source column/row behind each base column/row, or -(op + 1) for op's fill.

    ``static_maps`` [2,n] holds the state after the ops before ``begin``, which draw nothing.
    """
    for axis in range(2):
        line = cols if axis == 0 else rows
        source = static_maps[axis]
        for g in range(begin, end):
            n_in = geo[g, IN_W + axis]
            n_out = geo[g, OUT_W + axis]
            shift = offsets[g, axis] - geo[g, SHIFT]
            if geo[g, KIND] == PAD:
                at = geo[g, COLS_AT + axis]
                _copy(source, spare, n_in)
                for x in range(n_out):
                    inner = pad_maps[at + x]
                    line[x] = spare[inner] if inner >= 0 else -(g + 1)
            elif geo[g, SHIFT] == 0:
                for x in range(n_out):  # reads ahead of its writes, so it may work in place
                    line[x] = source[np.uint64(x + shift)]
            else:
                _copy(source, spare, n_in)
                for x in range(n_out):
                    inner = x + shift
                    line[x] = spare[inner] if 0 <= inner < n_in else -(g + 1)
            source = line
        if begin == end:
            _copy(source, line, line.size)


@njit(cache=True, error_model="numpy", _nrt=False)
def _compose(geo, geo_real, offsets, first, k0, k1, sample, epoch, maps):  # type: ignore[no-untyped-def]
    """Fill ``maps`` (int64[ops, 6]): 16.16 coefficients that take output pixels to the input canvas of each op.

    Composed in float64 from the last op back to ``first``, the first op that resamples.
    """
    a, b, tx = 1.0, 0.0, 0.0
    c, d, ty = 0.0, 1.0, 0.0
    for g in range(geo.shape[0] - 1, first - 1, -1):
        kind = geo[g, KIND]
        cx = (geo[g, IN_W] - 1) * 0.5
        cy = (geo[g, IN_H] - 1) * 0.5
        if kind == ROTATE:
            r0, _, _, _ = words(k0, k1, 0, geo[g, OP], sample, epoch)
            sine, cosine = sin_cos_degrees(geo_real[g, 0] + unit(r0) * geo_real[g, 1])
            x, y = tx - cx, ty - cy
            a, c = cosine * a - sine * c, sine * a + cosine * c
            b, d = cosine * b - sine * d, sine * b + cosine * d
            tx, ty = cosine * x - sine * y + cx, sine * x + cosine * y + cy
        elif kind == SCALE:
            r0, r1, _, _ = words(k0, k1, 0, geo[g, OP], sample, epoch)
            rx = geo_real[g, 0] + unit(r0) * geo_real[g, 1]
            ry = geo_real[g, 0] + unit(r1) * geo_real[g, 1]
            a, b, tx = a / rx, b / rx, (tx - cx) / rx + cx
            c, d, ty = c / ry, d / ry, (ty - cy) / ry + cy
        else:
            tx += np.float64(offsets[g, 0] - geo[g, SHIFT])
            ty += np.float64(offsets[g, 1] - geo[g, SHIFT])
        maps[g, 0], maps[g, 1], maps[g, 2] = _fixed(a), _fixed(b), _fixed(tx)
        maps[g, 3], maps[g, 4], maps[g, 5] = _fixed(c), _fixed(d), _fixed(ty)


@njit(cache=True, error_model="numpy", _nrt=False)
def _clip_rows(map_x, map_y, map_0, low, high, size, begin, end):  # type: ignore[no-untyped-def]
    """Narrow each line's columns [begin, end) (float64[size]) to those with low <= map_x*x + map_y*y + map_0 < high.

    All numbers are integers below 2**53, for which the rounded-up quotient of doubles is exact: the quotient of two
    such integers never rounds to or past an integer it does not reach.
    """
    step, slope, start = np.float64(map_x), np.float64(map_y), np.float64(map_0)
    least, most = np.float64(low), np.float64(high)
    if map_x == 0:
        for y in range(size):
            q = start + slope * np.float64(y)
            end[y] = end[y] if least <= q < most else begin[y]
        return
    if map_x < 0:
        step, slope, start, least, most = -step, -slope, -start, 1.0 - most, 1.0 - least
    for y in range(size):
        q = start + slope * np.float64(y)
        first = min(max(begin[y], np.ceil((least - q) / step)), end[y])
        begin[y] = first
        end[y] = max(min(end[y], np.ceil((most - q) / step)), first)


@njit(cache=True, error_model="numpy", _nrt=False)
def _content_box(pixels, at, pitch, channels, box, background, seen):  # type: ignore[no-untyped-def]
    """Smallest box inside ``box`` (x0, x1, y0, y1 of the source) that holds every pixel unlike ``background``."""
    x0, x1, y0, y1 = box
    n = (x1 - x0) * channels
    _fill(seen, 0, n)
    top, bottom = y1, y0
    for y in range(y0, y1):
        start = at + y * pitch + x0 * channels
        any_bits = np.uint8(0)
        for i in range(n):
            bits = np.uint8(pixels[np.uint64(start + i)] ^ background)
            seen[np.uint64(i)] |= bits
            any_bits |= bits
        if any_bits:
            top = min(top, y)
            bottom = y + 1
    if bottom <= top:
        return x0, x0, y0, y0
    left = 0
    while seen[left] == 0:
        left += 1
    right = n
    while seen[right - 1] == 0:
        right -= 1
    return x0 + left // channels, x0 + (right + channels - 1) // channels, top, bottom


@njit(cache=True, error_model="numpy", _nrt=False)
def _pack(pixels, at, pitch, channels, cols, rows, box, direct, fills, border, plane, quads):  # type: ignore[no-untyped-def]
    """Fill ``quads`` (uint32[(h+1) * (w+1)]) with the four neighbours of each cell of the base box and its border.

    ``at`` is the place of the channel's first value in ``pixels``; ``fills`` and ``border`` are this channel's.
    """
    x0, x1, y0, y1 = box
    w, h = x1 - x0, y1 - y0
    stride = w + 2
    for i in range(stride * (h + 2)):
        plane[np.uint64(i)] = border
    for y in range(h):
        target = (y + 1) * stride + 1
        row = rows[y0 + y]
        if direct:
            start = at + row * pitch + cols[x0] * channels
            for x in range(w):
                plane[np.uint64(target + x)] = pixels[np.uint64(start + x * channels)]
        else:
            for x in range(w):
                col = cols[x0 + x]
                code = min(row, col)
                plane[target + x] = pixels[at + row * pitch + col * channels] if code >= 0 else fills[-code - 1]
    for y in range(h + 1):
        upper = y * stride
        lower = upper + stride
        cell = y * (w + 1)
        for x in range(w + 1):
            quads[np.uint64(cell + x)] = np.uint32(
                np.uint32(plane[np.uint64(upper + x)])
                | np.uint32(np.uint32(plane[np.uint64(upper + x + 1)]) << np.uint32(8))
                | np.uint32(np.uint32(plane[np.uint64(lower + x)]) << np.uint32(16))
                | np.uint32(np.uint32(plane[np.uint64(lower + x + 1)]) << np.uint32(24))
            )


@njit(cache=True, error_model="numpy", _nrt=False)
def _collect(quads, box, coefficients, size, begin, end, cells, weights, at_value):  # type: ignore[no-untyped-def]
    """Cells and weights of every pixel that samples the base, line after line; returns how many.

    Coordinates are uint32 on the cell grid of ``box``; ``at_value`` (int64[size]) is where each line starts.
    """
    stride = np.uint32(box[1] - box[0] + 1)
    dx, dy = np.uint32(coefficients[0]), np.uint32(coefficients[3])
    count = np.int64(0)
    for line in range(size):
        at_value[line] = count
        b = np.int64(begin[line])
        n = np.int64(end[line]) - b
        qx = coefficients[0] * b + coefficients[1] * line + coefficients[2] + 128 - (box[0] - 1) * ONE
        qy = coefficients[3] * b + coefficients[4] * line + coefficients[5] + 128 - (box[2] - 1) * ONE
        x, y = np.uint32(qx), np.uint32(qy)
        for i in range(n):
            place = np.uint32(np.uint32(np.uint32(y >> np.uint32(16)) * stride) + np.uint32(x >> np.uint32(16)))
            cells[np.uint64(count + i)] = quads[place]
            weights[np.uint64(count + i)] = np.uint32(np.uint32(x & np.uint32(0xFFFF)) | np.uint32(y << np.uint32(16)))
            x = np.uint32(x + dx)
            y = np.uint32(y + dy)
        count += n
    return count


@njit(cache=True, error_model="numpy", _nrt=False)
def _blend(cells, weights, count, values):  # type: ignore[no-untyped-def]
    """Bilinear values with weights of 8 bits; both rows of a cell are blended in the halves of one word."""
    mask = np.uint32(0x00FF00FF)
    for i in range(count):
        cell = cells[i]
        fx = np.uint32(np.uint32(weights[i] >> np.uint32(8)) & np.uint32(0xFF))
        fy = np.uint32(weights[i] >> np.uint32(24))
        left = np.uint32(np.uint32(cell & mask) * np.uint32(np.uint32(256) - fx))
        right = np.uint32(np.uint32(np.uint32(cell >> np.uint32(8)) & mask) * fx)
        both = np.uint32(left + right)
        top = np.uint32(np.uint32(both & np.uint32(0xFFFF)) * np.uint32(np.uint32(256) - fy))
        bottom = np.uint32(np.uint32(both >> np.uint32(16)) * fy)
        values[i] = np.uint8(np.uint32(np.uint32(top + bottom) + np.uint32(32768)) >> np.uint32(16))


@njit(cache=True, error_model="numpy", _nrt=False)
def _write_lines(canvas, at_value, begin, end, outside, values, size, channel, padded, flip, out):  # type: ignore[no-untyped-def]
    """Table values of one channel into the output; columns outside [begin, end) of a line are known to be ``outside``.

    ``at_value`` int64[size]: where in ``canvas`` column ``begin`` of each line lies.
    """
    edge = values[outside]
    if padded == 1:
        for i in range(size * size):
            out[np.uint64(i)] = edge
    else:
        for i in range(size * size):
            out[np.uint64(i * padded + channel)] = edge
    step = -padded if flip else padded
    for y in range(size):
        b, e = np.int64(begin[y]), np.int64(end[y])
        at = (y * size + (size - 1 - b if flip else b)) * padded + channel
        source = at_value[y]
        for x in range(e - b):
            out[np.uint64(at + x * step)] = values[canvas[np.uint64(source + x)]]


@njit(cache=True, error_model="numpy", _nrt=False)
def _erase(out, size, padded, box):  # type: ignore[no-untyped-def]
    """Zero one rectangle of a finished row."""
    top, left, h, w = box
    for y in range(top, top + h):
        for i in range((y * size + left) * padded, (y * size + left + w) * padded):
            out[np.uint64(i)] = 0


@njit(cache=True, error_model="numpy", _nrt=False)
def _base_box(pixels, start, pitch, cols, rows, base_w, base_h, head, scratch):  # type: ignore[no-untyped-def]
    """The part (x0, x1, y0, y1) of the base outside of which everything equals the border fill."""
    x0, x1, y0, y1 = 0, base_w, 0, base_h
    if head[CONTIGUOUS] == 0:
        return x0, x1, y0, y1
    while x0 < x1 and cols[x0] < 0:
        x0 += 1
    while x1 > x0 and cols[x1 - 1] < 0:
        x1 -= 1
    while y0 < y1 and rows[y0] < 0:
        y0 += 1
    while y1 > y0 and rows[y1 - 1] < 0:
        y1 -= 1
    if head[BACKGROUND] >= 0 and x1 > x0 and y1 > y0:
        sx, sy = cols[x0] - x0, rows[y0] - y0
        visible = (x0 + sx, x1 + sx, y0 + sy, y1 + sy)
        background = np.uint8(head[BACKGROUND])
        x0, x1, y0, y1 = _content_box(pixels, start, pitch, head[CHANNELS], visible, background, scratch)
        x0, x1, y0, y1 = x0 - sx, x1 - sx, y0 - sy, y1 - sy
    if x1 <= x0 or y1 <= y0:
        return 0, 0, 0, 0
    return x0, x1, y0, y1


@njit(cache=True, error_model="numpy", inline="always")
def _crosses(map_x, map_y, map_0, last, low, high):  # type: ignore[no-untyped-def]
    """Whether map_x*x + map_y*y + map_0 leaves [low, high) for some x, y in 0..last (it is extreme at corners)."""
    least = map_0 + min(map_x * last, 0) + min(map_y * last, 0)
    most = map_0 + max(map_x * last, 0) + max(map_y * last, 0)
    return least < low or most >= high


@njit(cache=True, error_model="numpy", _nrt=False)
def _mask(geo, first, maps, box, fills, size, plain, canvas, spans):  # type: ignore[no-untyped-def]
    """Set begin and end of every line to the columns that sample the base; paint the others unless ``plain``.

    ``fills``: this channel's, one per op. Goes from the last canvas back to the base, so the outermost fill wins.
    """
    begin, end, old_begin, old_end = spans
    _fill(begin, 0.0, size)
    _fill(end, np.float64(size), size)
    for g in range(geo.shape[0] - 1, first - 1, -1):
        if g > first and geo[g, MASKED] == 0:
            continue
        if not plain:
            _copy(begin, old_begin, size)
            _copy(end, old_end, size)
        for axis in range(2):
            a, b, t = maps[g, 3 * axis], maps[g, 3 * axis + 1], maps[g, 3 * axis + 2]
            if g == first:  # any coordinate with a neighbour in the box, rounded to 1/256 pixel
                low = (box[2 * axis] - 1) * ONE
                high = box[2 * axis + 1] * ONE if box[1] > box[0] else low
                _clip_rows(a, b, t + 128, low, high, size, begin, end)
            elif _crosses(a, b, t, size - 1, -HALF, geo[g, IN_W + axis] * ONE - HALF):
                _clip_rows(a, b, t, -HALF, geo[g, IN_W + axis] * ONE - HALF, size, begin, end)
        if not plain:
            for y in range(size):
                for x in range(np.int64(old_begin[y]), np.int64(begin[y])):
                    canvas[y * size + x] = fills[g]
                for x in range(np.int64(end[y]), np.int64(old_end[y])):
                    canvas[y * size + x] = fills[g]


@njit(cache=True, error_model="numpy", _nrt=False)
def _resample(pixels, start, pitch, cols, rows, first, geo, fills, maps, head, table, flip, work, out):  # type: ignore[no-untyped-def]
    """Chains with a rotation or scale: one bilinear sample per output pixel, masked by every canvas on the way."""
    plane, quads, canvas, cells, weights, at_value, spans = work
    begin, end, _, _ = spans
    size, channels, padded = head[SIZE], head[CHANNELS], head[PADDED]
    plain = head[PLAIN] != 0
    box = _base_box(pixels, start, pitch, cols, rows, geo[first, IN_W], geo[first, IN_H], head, plane)
    direct = head[CONTIGUOUS] != 0
    for c in range(channels):
        if c == 0 or not plain:
            _mask(geo, first, maps, box, fills[c], size, plain, canvas, spans)
        if box[1] > box[0]:
            _pack(pixels, start + c, pitch, channels, cols, rows, box, direct, fills[c], fills[c, first], plane, quads)
        count = _collect(quads, box, maps[first], size, begin, end, cells, weights, at_value)
        if plain:
            _blend(cells, weights, count, canvas)
        else:
            _blend(cells, weights, count, plane)
            for y in range(size):
                b = np.int64(begin[y])
                for x in range(np.int64(end[y]) - b):
                    canvas[y * size + b + x] = plane[at_value[y] + x]
                at_value[y] = y * size
            _fill(begin, 0.0, size)
            _fill(end, np.float64(size), size)
        _write_lines(canvas, at_value, begin, end, fills[c, first], table[c], size, c, padded, flip, out)


@njit(cache=True, error_model="numpy", inline="always")
def _one_sample(pixels, start, tables, key, work, lines, out, row_bytes):  # type: ignore[no-untyped-def]
    table, head, real, geo, geo_real, fills, pad_maps, static_maps, constants = tables
    k0, k1, sample, epoch = key
    n_ops = geo.shape[0]
    cols, rows, spare, offsets, maps, line = lines
    for g in range(n_ops):
        if geo[g, KIND] == CROP:
            r0, r1, _, _ = words(k0, k1, 0, geo[g, OP], sample, epoch)
            offsets[g, 0] = bounded(r0, geo[g, IN_W] + 2 * geo[g, SHIFT] - geo[g, OUT_W] + 1)
            offsets[g, 1] = bounded(r1, geo[g, IN_H] + 2 * geo[g, SHIFT] - geo[g, OUT_H] + 1)
        elif geo[g, KIND] == CENTER:
            offsets[g, 0], offsets[g, 1] = geo[g, COLS_AT], geo[g, ROWS_AT]
    flip = flips(head[FLIP_OP], real, k0, k1, sample, epoch)
    leading = head[LEADING]
    pitch = head[WIDTH] * head[CHANNELS]
    _leading_maps(geo, pad_maps, static_maps, offsets, head[STATIC], leading, cols, rows, spare)
    if leading == n_ops:
        box = erased_box(head[SIZE], head[ERASE_OP], real, k0, k1, sample, epoch)
        style = head[CHANNELS], head[PADDED], flip, box, head[LINE_KIND], constants, table
        shape = head[SIZE], head[CHANNELS], head[PADDED]
        constant = head[CONTIGUOUS] != 0
        return copy_only(pixels, start, pitch, cols, rows, fills, shape, constant, style, line, out, row_bytes)
    if head[PADDED] > head[CHANNELS]:
        _fill(out, 0, out.size)
    _compose(geo, geo_real, offsets, leading, k0, k1, sample, epoch, maps)
    _resample(pixels, start, pitch, cols, rows, leading, geo, fills, maps, head, table, flip, work, out)
    if head[ERASE_OP] >= 0:
        box = erased_box(head[SIZE], head[ERASE_OP], real, k0, k1, sample, epoch)
        _erase(out, head[SIZE], head[PADDED], box)
    return xxh64(row_bytes)


@njit(cache=True, error_model="numpy", _nrt=False)
def _make_rows(pixels, at, ids, rows_at, out, values, hashes, tables, key, lines, work):  # type: ignore[no-untyped-def]
    """The loop of ``process_rows``, in scratch of its caller."""
    k0, k1, epoch = key
    head = tables[1]
    sample_bytes = head[HEIGHT] * head[WIDTH] * head[CHANNELS]
    for i in range(ids.size):
        if i + 1 < ids.size and at[i + 1] >= 0 and sample_bytes <= PREFETCH_BYTES:
            for offset in range(0, sample_bytes, CACHE_LINE):
                prefetch(pixels, at[i + 1] * sample_bytes + offset)
        row = out[rows_at[i]]
        if at[i] < 0:
            _fill(row, 0, row.size)
            hashes[rows_at[i]] = xxh64(row)
        else:
            hashes[rows_at[i]] = _one_sample(
                pixels, at[i] * sample_bytes, tables, (k0, k1, ids[i], epoch), work, lines, values[rows_at[i]], row
            )


@njit(cache=True, error_model="numpy", nogil=True)
def process_rows(pixels, at, ids, rows_at, out, values, hashes, tables, k0, k1, epoch):  # type: ignore[no-untyped-def]
    """Make the pictures ``at`` into the rows ``rows_at`` of ``out``, with the draws of the samples ``ids``; hash them.

    pixels uint8[N*H*W*C]; at, ids, rows_at int64[k] (at -1: a zero row); out uint8[B,row_bytes] and values
    [B,S*S*padded] are the same memory, as bytes and as bit patterns of the output type; hashes uint64[B]; ``tables``:
    ``geometry.segment_tables``.
    Returns -1, or the first position whose picture, id or row is out of range (nothing is written then).
    """
    _, head, _, geo, _, _, _, _, _ = tables
    channels = head[CHANNELS]
    sample_bytes = head[HEIGHT] * head[WIDTH] * channels
    count = pixels.size // sample_bytes
    for i in range(ids.size):
        if at[i] < -1 or at[i] >= count or rows_at[i] < 0 or rows_at[i] >= out.shape[0]:
            return i
        if at[i] >= 0 and not 0 <= ids[i] <= LAST_ID:
            return i
    n = head[MAX_CANVAS]
    size = head[SIZE]
    n_ops = geo.shape[0]
    lines = (
        np.zeros(n, np.int32),
        np.zeros(n, np.int32),
        np.empty(n, np.int32),
        np.zeros((n_ops, 2), np.int64),
        np.empty((n_ops, 6), np.int64),
        np.empty(2 * size * head[PADDED] + BAND, np.uint8),
    )
    if head[LEADING] == n_ops:
        n = size = 0  # nothing is resampled, so no scratch for it
    work = (
        np.empty((n + 2) * (n + 2) * channels, np.uint8),
        np.empty((n + 1) * (n + 1), np.uint32),
        np.empty(size * size, np.uint8),
        np.empty(size * size, np.uint32),
        np.empty(size * size, np.uint32),
        np.empty(size, np.int64),
        (
            np.empty(size, np.float64),
            np.empty(size, np.float64),
            np.empty(size, np.float64),
            np.empty(size, np.float64),
        ),
    )
    _make_rows(pixels, at, ids, rows_at, out, values, hashes, tables, (k0, k1, epoch), lines, work)
    return -1
