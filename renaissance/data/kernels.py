"""Compiled kernels of a recipe: one call makes a worker's whole share of a batch, row by row, into the slot.

Invariants: geometry is integer arithmetic on 16.16 fixed-point coordinates with 8-bit bilinear weights, so a sample's
bytes are the same on every host; the only floats are a sample's few map coefficients, in float64 and a fixed order;
no fast-math; scratch is local to a call, so threads may share a plan. docs/recipes.md is the definition,
``reference.py`` says the same in plain NumPy.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from renaissance.core.digest import xxh64
from renaissance.core.philox import bounded, philox_numba
from renaissance.data.exact_math import exp2, sin_cos_degrees

PAD, CROP, ROTATE, SCALE = 0, 1, 2, 3

# Columns of the geometry table (int64[ops, GEO_COLUMNS]).
KIND, OP, IN_W, IN_H, OUT_W, OUT_H, SHIFT, COLS_AT, ROWS_AT, MASKED, GEO_COLUMNS = range(11)
# Entries of the integer head: sizes, and the op indices of flip and erase (-1: absent).
SIZE, CHANNELS, PADDED, LEADING, PLAIN, CONTIGUOUS, BACKGROUND, FLIP_OP, ERASE_OP, MAX_CANVAS, HEAD_LENGTH = range(11)
# Entries of the float head.
FLIP_P, ERASE_P, AREA_LOW, AREA_SPAN, RATIO_LOW, RATIO_LOG, REAL_LENGTH = range(7)

ONE = 65536
HALF = 32768
ATTEMPTS = 10
AUGMENTATION = 1 << 24


@njit(cache=True, inline="always")
def _words(k0, k1, block, op, sample, epoch):  # type: ignore[no-untyped-def]
    return philox_numba(k0, k1, np.uint32(block), np.uint32(AUGMENTATION | op), np.uint32(sample), epoch)


@njit(cache=True, inline="always")
def _unit(word):  # type: ignore[no-untyped-def]  # uint32 -> float64 in [0, 1)
    return np.float64(word >> np.uint32(8)) * 5.9604644775390625e-08


@njit(cache=True, inline="always")
def _fixed(value):  # type: ignore[no-untyped-def]  # float64 pixels -> int64 in 1/65536 pixel, half up
    return np.int64(np.floor(value * 65536.0 + 0.5))


@njit(cache=True)
def _leading_maps(geo, pad_maps, offsets, count, width, height, cols, rows, spare):  # type: ignore[no-untyped-def]
    """Fill ``cols``/``rows`` (int32): source column/row behind each base column/row, or -(op + 1) for op's fill."""
    for x in range(width):
        cols[x] = x
    for y in range(height):
        rows[y] = y
    for g in range(count):
        for axis in range(2):
            line = cols if axis == 0 else rows
            n_in = geo[g, IN_W + axis]
            n_out = geo[g, OUT_W + axis]
            if geo[g, KIND] == PAD:
                at = geo[g, COLS_AT + axis]
                spare[:n_in] = line[:n_in]
                for x in range(n_out):
                    inner = pad_maps[at + x]
                    line[x] = spare[inner] if inner >= 0 else -(g + 1)
            else:
                shift = offsets[g, axis] - geo[g, SHIFT]
                spare[:n_in] = line[:n_in]
                for x in range(n_out):
                    inner = x + shift
                    line[x] = spare[inner] if 0 <= inner < n_in else -(g + 1)


@njit(cache=True)
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
            r0, _, _, _ = _words(k0, k1, 0, geo[g, OP], sample, epoch)
            sine, cosine = sin_cos_degrees(geo_real[g, 0] + _unit(r0) * geo_real[g, 1])
            x, y = tx - cx, ty - cy
            a, c = cosine * a - sine * c, sine * a + cosine * c
            b, d = cosine * b - sine * d, sine * b + cosine * d
            tx, ty = cosine * x - sine * y + cx, sine * x + cosine * y + cy
        elif kind == SCALE:
            r0, r1, _, _ = _words(k0, k1, 0, geo[g, OP], sample, epoch)
            rx = geo_real[g, 0] + _unit(r0) * geo_real[g, 1]
            ry = geo_real[g, 0] + _unit(r1) * geo_real[g, 1]
            a, b, tx = a / rx, b / rx, (tx - cx) / rx + cx
            c, d, ty = c / ry, d / ry, (ty - cy) / ry + cy
        else:
            tx += np.float64(offsets[g, 0] - geo[g, SHIFT])
            ty += np.float64(offsets[g, 1] - geo[g, SHIFT])
        maps[g, 0], maps[g, 1], maps[g, 2] = _fixed(a), _fixed(b), _fixed(tx)
        maps[g, 3], maps[g, 4], maps[g, 5] = _fixed(c), _fixed(d), _fixed(ty)


@njit(cache=True, inline="always")
def _clip(start, step, inverse, low, high, begin, end):  # type: ignore[no-untyped-def]
    """The columns c of [begin, end) with low <= start + c * step < high, as [first, last)."""
    if step == 0:
        return (begin, end) if low <= start < high else (begin, begin)
    if step < 0:
        start, step, inverse, low, high = -start, -step, -inverse, 1 - high, 1 - low
    first = min(max(np.int64(np.float64(low - start) * inverse), begin), end)
    while first > begin and start + (first - 1) * step >= low:
        first -= 1
    while first < end and start + first * step < low:
        first += 1
    last = min(max(np.int64(np.float64(high - start) * inverse), first), end)
    while last > first and start + (last - 1) * step >= high:
        last -= 1
    while last < end and start + last * step < high:
        last += 1
    return first, last


@njit(cache=True)
def _content_box(image, x0, x1, y0, y1, background, seen):  # type: ignore[no-untyped-def]
    """Smallest box of source pixels in [x0, x1) x [y0, y1) that holds every pixel unlike ``background``."""
    channels = image.shape[2]
    n = (x1 - x0) * channels
    seen[:n] = 0
    flat = image.reshape(image.shape[0], image.shape[1] * channels)
    top, bottom = y1, y0
    for y in range(y0, y1):
        line = flat[y, x0 * channels : x1 * channels]
        any_bits = np.uint8(0)
        for i in range(n):
            bits = np.uint8(line[i] ^ background)
            seen[i] |= bits
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


@njit(cache=True)
def _pack(image, channel, cols, rows, box, direct, fills, border, plane, quads):  # type: ignore[no-untyped-def]
    """Fill ``quads`` (uint32[(h+1) * (w+1)]) with the four neighbours of each cell of the base box and its border."""
    x0, x1, y0, y1 = box
    w, h = x1 - x0, y1 - y0
    stride = w + 2
    plane[: stride * (h + 2)] = border
    for y in range(h):
        target = plane[(y + 1) * stride + 1 : (y + 1) * stride + 1 + w]
        row = rows[y0 + y]
        if direct:
            line = image[row, :, channel]
            source = cols[x0]
            for x in range(w):
                target[x] = line[source + x]
        else:
            for x in range(w):
                col = cols[x0 + x]
                code = min(row, col)
                target[x] = image[row, col, channel] if code >= 0 else fills[-code - 1, channel]
    for y in range(h + 1):
        upper = plane[y * stride : (y + 1) * stride]
        lower = plane[(y + 1) * stride : (y + 2) * stride]
        cells = quads[y * (w + 1) : (y + 1) * (w + 1)]
        for x in range(w + 1):
            cells[x] = np.uint32(
                np.uint32(upper[x])
                | np.uint32(np.uint32(upper[x + 1]) << np.uint32(8))
                | np.uint32(np.uint32(lower[x]) << np.uint32(16))
                | np.uint32(np.uint32(lower[x + 1]) << np.uint32(24))
            )


@njit(cache=True)
def _sample_line(quads, stride, x, y, dx, dy, target):  # type: ignore[no-untyped-def]
    """Bilinear values of consecutive pixels: coordinates 16.16 relative to the cell grid, weights of 8 bits."""
    mask = np.uint32(0x00FF00FF)
    low8 = np.uint32(0xFF)
    for i in range(target.size):
        xi = np.uint32(x + np.uint32(np.uint32(i) * dx))
        yi = np.uint32(y + np.uint32(np.uint32(i) * dy))
        cell = quads[np.uint32(np.uint32(yi >> np.uint32(16)) * stride + np.uint32(xi >> np.uint32(16)))]
        fx = np.uint32(np.uint32(xi >> np.uint32(8)) & low8)
        fy = np.uint32(np.uint32(yi >> np.uint32(8)) & low8)
        gx = np.uint32(np.uint32(256) - fx)
        gy = np.uint32(np.uint32(256) - fy)
        left = np.uint32(np.uint32(cell & mask) * gx)
        right = np.uint32(np.uint32(np.uint32(cell >> np.uint32(8)) & mask) * fx)
        both = np.uint32(left + right)
        top = np.uint32(np.uint32(both & np.uint32(0xFFFF)) * gy)
        bottom = np.uint32(np.uint32(both >> np.uint32(16)) * fy)
        target[i] = np.uint8(np.uint32(np.uint32(top + bottom) + np.uint32(32768)) >> np.uint32(16))


@njit(cache=True, inline="always")
def _write_line(line, begin, end, outside, table, out, at, step):  # type: ignore[no-untyped-def]
    """Table values of one channel's line into the output; columns outside [begin, end) are known to be ``outside``."""
    edge = table[outside]
    for x in range(begin):
        out[at + x * step] = edge
    for x in range(begin, end):
        out[at + x * step] = table[line[x]]
    for x in range(end, line.size):
        out[at + x * step] = edge


@njit(cache=True)
def _erase(out, size, padded, op, real, k0, k1, sample, epoch):  # type: ignore[no-untyped-def]
    """RandomErasing on a finished row: zero one rectangle, in the coordinates of the flipped picture."""
    r0, _, _, _ = _words(k0, k1, 0, op, sample, epoch)
    if not _unit(r0) < real[ERASE_P]:
        return
    for attempt in range(1, ATTEMPTS + 1):
        r0, r1, r2, r3 = _words(k0, k1, attempt, op, sample, epoch)
        area = (real[AREA_LOW] + _unit(r0) * real[AREA_SPAN]) * np.float64(size * size)
        ratio = real[RATIO_LOW] * exp2(_unit(r1) * real[RATIO_LOG])
        h = np.int64(np.floor(np.sqrt(area * ratio) + 0.5))
        w = np.int64(np.floor(np.sqrt(area / ratio) + 0.5))
        if 0 < h < size and 0 < w < size:
            top = bounded(r2, size - h + 1)
            left = bounded(r3, size - w + 1)
            for y in range(top, top + h):
                out[(y * size + left) * padded : (y * size + left + w) * padded] = 0
            return


@njit(cache=True)
def _copy_only(image, cols, rows, direct, fills, head, table, flip, out):  # type: ignore[no-untyped-def]
    """Chains without resampling: every output pixel is one source pixel or a fill."""
    size, channels, padded = head[SIZE], head[CHANNELS], head[PADDED]
    for y in range(size):
        row = rows[y]
        for c in range(channels):
            at = (y * size + (size - 1 if flip else 0)) * padded + c
            step = -padded if flip else padded
            values = table[c]
            if direct:
                line = image[row, :, c]
                source = cols[0]
                for x in range(size):
                    out[at + x * step] = values[line[source + x]]
            else:
                for x in range(size):
                    code = min(row, cols[x])
                    pixel = image[row, cols[x], c] if code >= 0 else fills[-code - 1, c]
                    out[at + x * step] = values[pixel]


@njit(cache=True)
def _resample(image, cols, rows, first, geo, fills, maps, head, table, flip, scratch, quads, out):  # type: ignore[no-untyped-def]
    """Chains with a rotation or scale: one bilinear sample per output pixel, masked by every canvas on the way."""
    size, channels, padded = head[SIZE], head[CHANNELS], head[PADDED]
    n_ops = geo.shape[0]
    base_w, base_h = geo[first, IN_W], geo[first, IN_H]
    x0, x1, y0, y1 = 0, base_w, 0, base_h
    direct = head[CONTIGUOUS] != 0
    if direct:  # the part of the base that shows source pixels, then the part of it unlike the background
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
            background = np.uint8(head[BACKGROUND])
            x0, x1, y0, y1 = _content_box(image, x0 + sx, x1 + sx, y0 + sy, y1 + sy, background, scratch)
            x0, x1, y0, y1 = x0 - sx, x1 - sx, y0 - sy, y1 - sy
    stride = x1 - x0 + 1
    low_x, high_x = (x0 - 1) * ONE, x1 * ONE
    low_y, high_y = (y0 - 1) * ONE, y1 * ONE
    if x1 <= x0 or y1 <= y0:
        high_x = low_x  # nothing but background: no column is inside
    inverse = np.empty((n_ops, 2), np.float64)
    for g in range(first, n_ops):
        for axis in range(2):
            step = maps[g, 3 * axis]
            inverse[g, axis] = 1.0 / np.float64(step) if step != 0 else 0.0
    line = np.empty(size, np.uint8)
    for c in range(channels):
        border = fills[first, c]
        if high_x > low_x:
            _pack(image, c, cols, rows, (x0, x1, y0, y1), direct, fills, border, scratch, quads)
        for y in range(size):
            begin, end = 0, size
            for g in range(n_ops - 1, first, -1):
                if geo[g, MASKED] == 0:
                    continue
                b0, e0 = begin, end
                qx = maps[g, 1] * y + maps[g, 2]
                begin, end = _clip(qx, maps[g, 0], inverse[g, 0], -HALF, geo[g, IN_W] * ONE - HALF, begin, end)
                qy = maps[g, 4] * y + maps[g, 5]
                begin, end = _clip(qy, maps[g, 3], inverse[g, 1], -HALF, geo[g, IN_H] * ONE - HALF, begin, end)
                line[b0:begin] = fills[g, c]
                line[end:e0] = fills[g, c]
            b0, e0 = begin, end
            qx = maps[first, 1] * y + maps[first, 2] + 128
            begin, end = _clip(qx, maps[first, 0], inverse[first, 0], low_x, high_x, begin, end)
            qy = maps[first, 4] * y + maps[first, 5] + 128
            begin, end = _clip(qy, maps[first, 3], inverse[first, 1], low_y, high_y, begin, end)
            line[b0:begin] = border
            line[end:e0] = border
            if end > begin:
                _sample_line(
                    quads,
                    np.uint32(stride),
                    np.uint32(qx + begin * maps[first, 0] - low_x),
                    np.uint32(qy + begin * maps[first, 3] - low_y),
                    np.uint32(maps[first, 0]),
                    np.uint32(maps[first, 3]),
                    line[begin:end],
                )
            if head[PLAIN] == 0:
                begin, end = 0, size
            if flip:
                _write_line(line, begin, end, border, table[c], out, (y * size + size - 1) * padded + c, -padded)
            else:
                _write_line(line, begin, end, border, table[c], out, y * size * padded + c, padded)


@njit(cache=True)
def _one_sample(image, head, real, geo, geo_real, fills, pad_maps, table, k0, k1, sample, epoch, work, quads, out):  # type: ignore[no-untyped-def]
    n_ops = geo.shape[0]
    cols, rows, spare, scratch, offsets, maps = work
    for g in range(n_ops):
        if geo[g, KIND] == CROP:
            r0, r1, _, _ = _words(k0, k1, 0, geo[g, OP], sample, epoch)
            offsets[g, 0] = bounded(r0, geo[g, IN_W] + 2 * geo[g, SHIFT] - geo[g, OUT_W] + 1)
            offsets[g, 1] = bounded(r1, geo[g, IN_H] + 2 * geo[g, SHIFT] - geo[g, OUT_H] + 1)
    flip = False
    if head[FLIP_OP] >= 0:
        r0, _, _, _ = _words(k0, k1, 0, head[FLIP_OP], sample, epoch)
        flip = _unit(r0) < real[FLIP_P]
    if head[PADDED] > head[CHANNELS]:
        out[:] = 0
    leading = head[LEADING]
    _leading_maps(geo, pad_maps, offsets, leading, image.shape[1], image.shape[0], cols, rows, spare)
    if leading == n_ops:
        _copy_only(image, cols, rows, n_ops == 0, fills, head, table, flip, out)
    else:
        _compose(geo, geo_real, offsets, leading, k0, k1, sample, epoch, maps)
        _resample(image, cols, rows, leading, geo, fills, maps, head, table, flip, scratch, quads, out)
    if head[ERASE_OP] >= 0:
        _erase(out, head[SIZE], head[PADDED], head[ERASE_OP], real, k0, k1, sample, epoch)


@njit(cache=True, nogil=True)
def process_rows(images, ids, rows_at, out, hashes, table, head, real, geo, geo_real, fills, pad_maps, k0, k1, epoch):  # type: ignore[no-untyped-def]
    """Make the samples ``ids`` into the rows ``rows_at`` of ``out`` and hash them.

    images uint8[N,H,W,C]; ids, rows_at int64[k] (id -1: a zero row); out uint8[B,row_bytes]; hashes uint64[B];
    table: bit patterns [C,256] of the output type; the other tables come from ``compile.CompiledRecipe``.
    Returns -1, or the first position of ``ids`` whose id or row is out of range (nothing is written then).
    """
    for i in range(ids.size):
        if ids[i] < -1 or ids[i] >= images.shape[0] or rows_at[i] < 0 or rows_at[i] >= out.shape[0]:
            return i
    n = head[MAX_CANVAS]
    n_ops = geo.shape[0]
    work = (
        np.empty(n, np.int32),
        np.empty(n, np.int32),
        np.empty(n, np.int32),
        np.empty((n + 2) * (n + 2) * images.shape[3], np.uint8),
        np.zeros((n_ops, 2), np.int64),
        np.empty((n_ops, 6), np.int64),
    )
    quads = np.empty((n + 1) * (n + 1), np.uint32)
    for i in range(ids.size):
        row = out[rows_at[i]]
        if ids[i] < 0:
            row[:] = 0
        else:
            _one_sample(
                images[ids[i]],
                head,
                real,
                geo,
                geo_real,
                fills,
                pad_maps,
                table,
                k0,
                k1,
                ids[i],
                epoch,
                work,
                quads,
                row.view(table.dtype),
            )
        hashes[rows_at[i]] = xxh64(row)
    return -1
