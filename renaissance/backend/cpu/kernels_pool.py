"""Max, average and global average pooling, NHWC: every inner loop runs over the channels of one pixel.

A task is one row of pixels, so no sum depends on the number of threads. A maximum is a selection and loses nothing;
averages are summed in float64 and gradients in float32, in the order of the windows, and rounded once. NaN wins over
every number and survives an average, so that the NaN check sees it (law 5). Padding never wins.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from renaissance.backend.checks import of_size, window_of
from renaissance.backend.cpu.intrinsics import ARGS, f64, my_range, team_rank, u8, u16, words
from renaissance.backend.cpu.kernels_common import Kernel, same_type, team_for
from renaissance.backend.cpu.queue import kernel_call
from renaissance.backend.cpu.streams import BF16, FP32, compiled, load, set_tile, store, store_exact, tile
from renaissance.backend.registry import Call, CaptureContext, OpRegistry, label
from renaissance.core.dtype import DType
from renaissance.core.errors import DTypeError
from renaissance.core.region import align
from renaissance.graph.computation_graph import Node
from renaissance.graph.op_types_image import ONE_BYTE_KERNEL
from renaissance.tensor.dtensor import DTensor

# Words of all kernels: the large image [IMAGES,H,W,C], the window, the small image [IMAGES,HO,WO,C], 1 for bfloat16,
# the addresses of large image, small image and index (0: none), bytes of an index (1 or 2), the first thread's sums
# and the bytes from one thread's sums to the next one's, a pixel of zeros, 1 when padding counts.
IMAGES, H, W, C, KH, KW, STRIDE, PAD, HO, WO, HALF, LARGE, SMALL, INDEX, INDEX_BYTES, SUMS, PITCH, ZEROS, PADDED = (
    range(ARGS, ARGS + 19)
)


@compiled
def larger(best, place, value, number):  # type: ignore[no-untyped-def]  # float32, uint8, float32, uint8 -> float32, uint8
    """A cell replaces the maximum so far when it is larger, or NaN where that is none."""
    take = (not value <= best) and best == best
    return (value if take else best), (number if take else place)


@compiled
def larger_cells(kind, x0, x1, x2, y, index, n, c0, c1, c2):  # type: ignore[no-untyped-def]  # FP32 or BF16, addresses x4, u8[n], int64, uint8 x3
    """Up to three cells of one row of a window; a cell that is given twice never replaces itself."""
    for i in range(n):
        v, c = load(kind, y, i), index[i]
        v, c = larger(v, c, load(kind, x0, i), c0)
        v, c = larger(v, c, load(kind, x1, i), c1)
        v, c = larger(v, c, load(kind, x2, i), c2)
        store_exact(kind, y, i, v)
        index[i] = c


@compiled
def first_cells(kind, x0, x1, x2, x3, y, index, n, c0, c1, c2, c3):  # type: ignore[no-untyped-def]  # as above, one cell more
    """The first cells of a window in scan order: all four of 2 x 2, else up to three of its first row."""
    for i in range(n):
        v, c = larger(load(kind, x0, i), c0, load(kind, x1, i), c1)
        v, c = larger(v, c, load(kind, x2, i), c2)
        v, c = larger(v, c, load(kind, x3, i), c3)
        store_exact(kind, y, i, v)
        index[i] = c


@compiled
def max_wide_window(ctx, line, top, left, y, index):  # type: ignore[no-untyped-def]  # int64[:], int64 x4, u16[n]
    """The same for the rare kernels with numbers of two bytes: one body, quick to compile instead of quick to run."""
    n, half = ctx[C], ctx[HALF] != 0
    size = 2 if half else 4
    begin, end = max(0, -left), min(ctx[KW], ctx[W] - left)
    first, stop = max(0, -top), min(ctx[KH], ctx[H] - top)
    for i in range(n):
        v, c = np.float32(-np.inf), np.int32(first * ctx[KW] + begin)
        for a in range(first, stop):
            for b in range(begin, end):
                x = line + ((a * ctx[W] + b) * n + i) * size
                value = load(BF16, x, 0) if half else load(FP32, x, 0)
                v, c = larger(v, c, value, np.int32(a * ctx[KW] + b))
        index[i] = c
        if half:
            store(BF16, y, i, v)
        else:
            store(FP32, y, i, v)


@Kernel
def max_forward(address):  # type: ignore[no-untyped-def]  # words: see above
    ctx = words(address)
    n, high, wide, k, half = ctx[C], ctx[H], ctx[W], ctx[KH], ctx[HALF] != 0
    size = 2 if half else 4
    pixel = n * size
    unread = (
        ctx[SUMS] + team_rank(ctx) * ctx[PITCH]
    )  # an inference has no index: each pixel's overwrites the last one's
    start, stop = my_range(ctx, ctx[IMAGES] * ctx[HO], 1)
    for row in range(start, stop):
        top = row % ctx[HO] * ctx[STRIDE] - ctx[PAD]
        first, below = max(0, -top), min(k, high - top)
        for col in range(ctx[WO]):
            left = col * ctx[STRIDE] - ctx[PAD]
            begin, last = max(0, -left), min(k, wide - left) - 1
            out = (row * ctx[WO] + col) * n
            line = ctx[LARGE] + ((row // ctx[HO] * high + top) * wide + left) * pixel
            y = ctx[SMALL] + out * size
            place = ctx[INDEX] + out * ctx[INDEX_BYTES] if ctx[INDEX] != 0 else unread
            if ctx[INDEX_BYTES] != 1:
                max_wide_window(ctx, line, top, left, y, u16(place, n))
                continue
            index = u8(place, n)
            b1, b2 = min(begin + 1, last), min(begin + 2, last)
            c0, c1, c2 = np.uint8(first * k + begin), np.uint8(first * k + b1), np.uint8(first * k + b2)
            c3 = c0
            x0, x1 = line + (first * wide + begin) * pixel, line + (first * wide + b1) * pixel
            x2, x3 = line + (first * wide + b2) * pixel, x0
            if k == 2:
                step = below - 1 - first  # 0 when the other row is padding
                x2, x3 = x0 + step * wide * pixel, x1 + step * wide * pixel
                c2, c3 = np.uint8(c0 + step * k), np.uint8(c1 + step * k)
            if half:
                first_cells(BF16, x0, x1, x2, x3, y, index, n, c0, c1, c2, c3)
            else:
                first_cells(FP32, x0, x1, x2, x3, y, index, n, c0, c1, c2, c3)
            if k == 2:
                continue
            for a in range(first, below):
                x = line + a * wide * pixel
                for b in range(begin if a > first else begin + 3, last + 1, 3):
                    b1, b2 = min(b + 1, last), min(b + 2, last)
                    x0, x1, x2 = x + b * pixel, x + b1 * pixel, x + b2 * pixel
                    c0, c1, c2 = np.uint8(a * k + b), np.uint8(a * k + b1), np.uint8(a * k + b2)
                    if half:
                        larger_cells(BF16, x0, x1, x2, y, index, n, c0, c1, c2)
                    else:
                        larger_cells(FP32, x0, x1, x2, y, index, n, c0, c1, c2)


@compiled
def windows_of(at, kernel, stride, pad, count):  # type: ignore[no-untyped-def]  # int64 x5 -> int64 x2
    """First window that covers pixel ``at`` of a row or column, and the one after the last."""
    first = max(0, (at + pad - kernel + stride) // stride)
    return first, min(count, (at + pad) // stride + 1)


@compiled
def clear(total, n):  # type: ignore[no-untyped-def]  # tile, int64
    for i in range(n):
        set_tile(total, i, np.float32(0))


@compiled
def put(kind, total, target, n):  # type: ignore[no-untyped-def]  # FP32 or BF16, tile, address, int64
    for i in range(n):
        store(kind, target, i, tile(total, i))


@compiled
def put_won(kind, dy, index, number, target, n):  # type: ignore[no-untyped-def]  # FP32 or BF16, address, u8[n], uint8, address, int64
    """The gradient of a pixel that only one window covers."""
    for i in range(n):
        store_exact(kind, target, i, load(kind, dy, i) if index[i] == number else np.float32(0))


@compiled
def add_won(kind, dy, index, number, total, n):  # type: ignore[no-untyped-def]  # FP32 or BF16, address, u8[n], uint8, tile, int64
    """Add the gradient of a window in the channels where this pixel was its maximum."""
    for i in range(n):
        set_tile(total, i, tile(total, i) + (load(kind, dy, i) if index[i] == number else np.float32(0)))


@compiled
def add_won_wide(half, dy, index, number, total, n):  # type: ignore[no-untyped-def]  # bool, address, u16[n], uint16, tile, int64
    """The same for numbers of two bytes, see ``max_wide_window``."""
    for i in range(n):
        if index[i] == number:
            set_tile(total, i, tile(total, i) + (load(BF16, dy, i) if half else load(FP32, dy, i)))


@Kernel
def max_backward(address):  # type: ignore[no-untyped-def]  # words: see above
    """Each pixel collects from the windows that cover it: no two threads ever write to one place."""
    ctx = words(address)
    n, half, stride, pad = ctx[C], ctx[HALF] != 0, ctx[STRIDE], ctx[PAD]
    size = 2 if half else 4
    total = ctx[SUMS] + team_rank(ctx) * ctx[PITCH]
    start, stop = my_range(ctx, ctx[IMAGES] * ctx[H], 1)
    for row in range(start, stop):
        image, at = row // ctx[H], row % ctx[H]
        top, bottom = windows_of(at, ctx[KH], stride, pad, ctx[HO])
        for col in range(ctx[W]):
            left, right = windows_of(col, ctx[KW], stride, pad, ctx[WO])
            dx = ctx[LARGE] + (row * ctx[W] + col) * n * size
            if bottom - top == 1 and right - left == 1 and ctx[INDEX_BYTES] == 1:
                place = ((image * ctx[HO] + top) * ctx[WO] + left) * n
                index, dy = u8(ctx[INDEX] + place, n), ctx[SMALL] + place * size
                number = np.uint8((at + pad - top * stride) * ctx[KW] + col + pad - left * stride)
                if half:
                    put_won(BF16, dy, index, number, dx, n)
                else:
                    put_won(FP32, dy, index, number, dx, n)
                continue
            clear(total, n)
            for oh in range(top, bottom):
                for ow in range(left, right):
                    cell = (at + pad - oh * stride) * ctx[KW] + col + pad - ow * stride
                    place = ((image * ctx[HO] + oh) * ctx[WO] + ow) * n
                    dy = ctx[SMALL] + place * size
                    if ctx[INDEX_BYTES] != 1:
                        add_won_wide(half, dy, u16(ctx[INDEX] + 2 * place, n), np.uint16(cell), total, n)
                    elif half:
                        add_won(BF16, dy, u8(ctx[INDEX] + place, n), np.uint8(cell), total, n)
                    else:
                        add_won(FP32, dy, u8(ctx[INDEX] + place, n), np.uint8(cell), total, n)
            if half:
                put(BF16, total, dx, n)
            else:
                put(FP32, total, dx, n)


@compiled
def add_cells(kind, x0, x1, x2, total, n):  # type: ignore[no-untyped-def]  # FP32 or BF16, addresses x3, float64[n], int64
    for i in range(n):
        total[i] = (
            total[i] + np.float64(load(kind, x0, i)) + np.float64(load(kind, x1, i)) + np.float64(load(kind, x2, i))
        )


@compiled
def put_mean(kind, total, cells, target, n):  # type: ignore[no-untyped-def]  # FP32 or BF16, float64[n], float64, address, int64
    for i in range(n):
        store(kind, target, i, np.float32(total[i] / cells))


@Kernel
def average_forward(address):  # type: ignore[no-untyped-def]  # words: see above; float64 sums
    ctx = words(address)
    n, high, wide, half = ctx[C], ctx[H], ctx[W], ctx[HALF] != 0
    pixel = n * (2 if half else 4)
    total = f64(ctx[SUMS] + team_rank(ctx) * ctx[PITCH], n)
    start, stop = my_range(ctx, ctx[IMAGES] * ctx[HO], 1)
    for row in range(start, stop):
        top = row % ctx[HO] * ctx[STRIDE] - ctx[PAD]
        first, below = max(0, -top), min(ctx[KH], high - top)
        for col in range(ctx[WO]):
            left = col * ctx[STRIDE] - ctx[PAD]
            begin, end = max(0, -left), min(ctx[KW], wide - left)
            line = ctx[LARGE] + ((row // ctx[HO] * high + top) * wide + left) * pixel
            for i in range(n):
                total[i] = 0.0
            for a in range(first, below):
                for b in range(begin, end, 3):
                    x0 = line + (a * wide + b) * pixel
                    x1 = x0 + pixel if b + 1 < end else ctx[ZEROS]
                    x2 = x0 + 2 * pixel if b + 2 < end else ctx[ZEROS]
                    if half:
                        add_cells(BF16, x0, x1, x2, total, n)
                    else:
                        add_cells(FP32, x0, x1, x2, total, n)
            cells = (below - first) * (end - begin)
            if ctx[PADDED] != 0:
                cells = ctx[KH] * ctx[KW]
            y = ctx[SMALL] + (row * ctx[WO] + col) * pixel
            if half:
                put_mean(BF16, total, np.float64(cells), y, n)
            else:
                put_mean(FP32, total, np.float64(cells), y, n)


@compiled
def cells_of(window, kernel, stride, pad, length):  # type: ignore[no-untyped-def]  # int64 x5 -> int64
    """Valid cells of a window along one axis."""
    begin = window * stride - pad
    return min(begin + kernel, length) - max(begin, 0)


@compiled
def add_share(kind, dy, cells, total, n):  # type: ignore[no-untyped-def]  # FP32 or BF16, address, float32, tile, int64
    for i in range(n):
        set_tile(total, i, tile(total, i) + load(kind, dy, i) / cells)


@Kernel
def average_backward(address):  # type: ignore[no-untyped-def]  # words: see above
    ctx = words(address)
    n, half, stride, pad = ctx[C], ctx[HALF] != 0, ctx[STRIDE], ctx[PAD]
    size = 2 if half else 4
    total = ctx[SUMS] + team_rank(ctx) * ctx[PITCH]
    start, stop = my_range(ctx, ctx[IMAGES] * ctx[H], 1)
    for row in range(start, stop):
        image, at = row // ctx[H], row % ctx[H]
        top, bottom = windows_of(at, ctx[KH], stride, pad, ctx[HO])
        for col in range(ctx[W]):
            left, right = windows_of(col, ctx[KW], stride, pad, ctx[WO])
            clear(total, n)
            for oh in range(top, bottom):
                for ow in range(left, right):
                    cells = ctx[KH] * ctx[KW]
                    if ctx[PADDED] == 0:
                        cells = cells_of(oh, ctx[KH], stride, pad, ctx[H]) * cells_of(ow, ctx[KW], stride, pad, ctx[W])
                    dy = ctx[SMALL] + ((image * ctx[HO] + oh) * ctx[WO] + ow) * n * size
                    if half:
                        add_share(BF16, dy, np.float32(cells), total, n)
                    else:
                        add_share(FP32, dy, np.float32(cells), total, n)
            if half:
                put(BF16, total, ctx[LARGE] + (row * ctx[W] + col) * n * size, n)
            else:
                put(FP32, total, ctx[LARGE] + (row * ctx[W] + col) * n * size, n)


def index_bytes(node: Node, index: DTensor, small: DTensor, kernel: int) -> int:
    """Bytes per element of a max pool's index: 1 up to ``ONE_BYTE_KERNEL``, else 2; checks the tensor."""
    nbytes = 1 if kernel <= ONE_BYTE_KERNEL else 2
    if index.dtype is not DType.INT8:
        raise DTypeError(f"{label(node)}: index {index.name!r} is {index.dtype.name}; expected INT8")
    of_size(node, index, small.shape.numel * nbytes)
    return nbytes


def launch_pool(node: Node, ctx: CaptureContext) -> Sequence[Call]:
    """All pooling ops: the large image is x or dx, the small one y or dy."""
    backward = node.op.endswith("_BWD")
    source, out = ctx.tensor(node.inputs[0]), ctx.tensor(node.outputs[0])
    large, small = (out, source) if backward else (source, out)
    half = same_type(node, ctx, large.id, small.id)
    window = window_of(node, large, small)
    is_max = node.op.startswith("MAX")
    threads = team_for(ctx, large.shape.numel)
    pitch = align(large.shape.c * (8 if not is_max and not backward else 4), 64)
    index, nbytes = 0, 1
    if node.op in ("MAXPOOL_FWD", "MAXPOOL_BWD"):
        tensor = ctx.tensor(node.inputs[1] if backward else node.outputs[1])
        index, nbytes = ctx.ptr(tensor.id), index_bytes(node, tensor, small, window[0])
    elif is_max:
        nbytes = 1 if window[0] <= ONE_BYTE_KERNEL else 2
    n, h, w, c = large.shape.dims
    arguments = (
        *(n, h, w, c, *window, small.shape.h, small.shape.w, half, ctx.ptr(large.id), ctx.ptr(small.id)),
        *(index, nbytes, ctx.scratch(threads * pitch), pitch),
        ctx.private(4 * c) if not is_max and not backward else 0,
        int(bool(node.attrs.get("count_include_pad", False))),
    )
    kernel = {
        (True, False): max_forward,
        (True, True): max_backward,
        (False, False): average_forward,
        (False, True): average_backward,
    }[is_max, backward]
    return [kernel_call(kernel, arguments, label(node), threads=threads)]


OPS = ("MAXPOOL_FWD", "MAXPOOL_INF", "MAXPOOL_BWD", "AVGPOOL_FWD", "AVGPOOL_BWD", "GAP_FWD", "GAP_BWD")


def register(registry: OpRegistry) -> None:
    """Add the launchers of this module to ``registry``."""
    for op in OPS:
        registry.register(op, "cpu", launch_pool)
