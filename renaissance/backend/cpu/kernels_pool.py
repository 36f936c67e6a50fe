"""Max, average and global average pooling, NHWC: every inner loop runs over the channels of one pixel.

A task is one row of pixels, so no sum depends on the number of threads. A maximum is a selection and loses nothing;
averages are summed in float64 and gradients in float32, in the order of the windows, and rounded once. NaN wins over
every number and survives an average, so that the NaN check sees it (law 5). Padding never wins.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit

from renaissance.backend.cpu.intrinsics import ARGS, f32, f64, my_range, team_rank, u8, u16, words
from renaissance.backend.cpu.kernels_common import Kernel, compact, narrow, same_type, team_for, widen
from renaissance.backend.cpu.queue import kernel_call
from renaissance.backend.registry import Call, CaptureContext, OpRegistry, label
from renaissance.core.dtype import DType
from renaissance.core.errors import DTypeError, ShapeError
from renaissance.core.region import align
from renaissance.graph.computation_graph import Node
from renaissance.tensor.dtensor import DTensor

BYTE_KERNEL = 15
"""Largest kernel whose cells (up to 15 * 15) have a number that fits into one byte of the index."""

# Words of all kernels: the large image [IMAGES,H,W,C], the window, the small image [IMAGES,HO,WO,C], 1 for bfloat16,
# the addresses of large image, small image and index, bytes of an index (1 or 2), the first thread's sums and the
# bytes from one thread's sums to the next one's, 1 when padding counts.
IMAGES, H, W, C, KH, KW, STRIDE, PAD, HO, WO, HALF, LARGE, SMALL, INDEX, INDEX_BYTES, SUMS, PITCH, PADDED = range(
    ARGS, ARGS + 18
)


@njit(cache=True)
def first_cells(x, y, index, n, cell):  # type: ignore[no-untyped-def]  # f32[n] x2 or u16[n] x2, u8[n] or u16[n], int, same
    """The first cell of a window is the maximum so far."""
    for i in range(n):
        y[i] = x[i]
    for i in range(n):
        index[i] = cell


@njit(cache=True)
def larger_cells(x, y, index, n, cell):  # type: ignore[no-untyped-def]  # f32[n] x2, u8[n] or u16[n], int, same as index
    """A cell replaces the maximum so far when it is larger or the first NaN."""
    for i in range(n):
        new, old = x[i], y[i]
        take = (not new <= old) and old == old
        y[i] = new if take else old
        index[i] = cell if take else index[i]


@njit(cache=True)
def larger_half_cells(x, y, index, n, cell):  # type: ignore[no-untyped-def]  # u16[n] x2, u8[n] or u16[n], int, same as index
    """The same for patterns of bfloat16."""
    for i in range(n):
        new, old = widen(x[i]), widen(y[i])
        take = (not new <= old) and old == old
        y[i] = x[i] if take else y[i]
        index[i] = cell if take else index[i]


@njit(cache=True)
def max_window(ctx, x, y, index, first, cell):  # type: ignore[no-untyped-def]  # int64[:], addresses x2, u8[n] or u16[n], bool, its type
    """Enter one cell of a window into the maxima of its channels."""
    n = ctx[C]
    if ctx[HALF] != 0:
        if first:
            first_cells(u16(x, n), u16(y, n), index, n, cell)
        else:
            larger_half_cells(u16(x, n), u16(y, n), index, n, cell)
    elif first:
        first_cells(f32(x, n), f32(y, n), index, n, cell)
    else:
        larger_cells(f32(x, n), f32(y, n), index, n, cell)


@Kernel
def max_forward(address):  # type: ignore[no-untyped-def]  # words: see above
    ctx = words(address)
    size = 2 if ctx[HALF] != 0 else 4
    n = ctx[C]
    start, stop = my_range(ctx, ctx[IMAGES] * ctx[HO], 1)
    for row in range(start, stop):
        image, top = row // ctx[HO], row % ctx[HO] * ctx[STRIDE] - ctx[PAD]
        for col in range(ctx[WO]):
            left = col * ctx[STRIDE] - ctx[PAD]
            out = (row * ctx[WO] + col) * n
            first = True
            for a in range(max(0, -top), min(ctx[KH], ctx[H] - top)):
                for b in range(max(0, -left), min(ctx[KW], ctx[W] - left)):
                    x = ctx[LARGE] + ((image * ctx[H] + top + a) * ctx[W] + left + b) * n * size
                    y = ctx[SMALL] + out * size
                    cell = a * ctx[KW] + b
                    if ctx[INDEX_BYTES] == 1:
                        max_window(ctx, x, y, u8(ctx[INDEX] + out, n), first, np.uint8(cell))
                    else:
                        max_window(ctx, x, y, u16(ctx[INDEX] + 2 * out, n), first, np.uint16(cell))
                    first = False


@njit(cache=True)
def add_where(total, dy, index, n, cell):  # type: ignore[no-untyped-def]  # f32[n], f32[n] or u16[n], u8[n] or u16[n], int, same as index
    for i in range(n):
        total[i] += dy[i] if index[i] == cell else np.float32(0)


@njit(cache=True)
def add_half_where(total, dy, index, n, cell):  # type: ignore[no-untyped-def]  # the same for patterns of bfloat16
    for i in range(n):
        total[i] += widen(dy[i]) if index[i] == cell else np.float32(0)


@njit(cache=True)
def windows_of(at, kernel, stride, pad, count):  # type: ignore[no-untyped-def]  # int64 x5 -> int64 x2
    """First window that covers pixel ``at`` of a row or column, and the one after the last."""
    first = max(0, (at + pad - kernel + stride) // stride)
    return first, min(count, (at + pad) // stride + 1)


@njit(cache=True)
def store_sums(ctx, total, out):  # type: ignore[no-untyped-def]  # int64[:], f32[n], address
    n = ctx[C]
    if ctx[HALF] != 0:
        yh = u16(out, n)
        for i in range(n):
            yh[i] = narrow(total[i])
    else:
        y = f32(out, n)
        for i in range(n):
            y[i] = total[i]


@Kernel
def max_backward(address):  # type: ignore[no-untyped-def]  # words: see above
    """Each pixel collects from the windows that cover it: no two threads ever write to one place."""
    ctx = words(address)
    size = 2 if ctx[HALF] != 0 else 4
    n = ctx[C]
    total = f32(ctx[SUMS] + team_rank(ctx) * ctx[PITCH], n)
    start, stop = my_range(ctx, ctx[IMAGES] * ctx[H], 1)
    for row in range(start, stop):
        image, at = row // ctx[H], row % ctx[H]
        top, bottom = windows_of(at, ctx[KH], ctx[STRIDE], ctx[PAD], ctx[HO])
        for col in range(ctx[W]):
            left, right = windows_of(col, ctx[KW], ctx[STRIDE], ctx[PAD], ctx[WO])
            for i in range(n):
                total[i] = np.float32(0)
            for oh in range(top, bottom):
                for ow in range(left, right):
                    cell = (at + ctx[PAD] - oh * ctx[STRIDE]) * ctx[KW] + col + ctx[PAD] - ow * ctx[STRIDE]
                    place = ((image * ctx[HO] + oh) * ctx[WO] + ow) * n
                    dy = ctx[SMALL] + place * size
                    if ctx[INDEX_BYTES] == 1:
                        index, cell8 = u8(ctx[INDEX] + place, n), np.uint8(cell)
                        if size == 2:
                            add_half_where(total, u16(dy, n), index, n, cell8)
                        else:
                            add_where(total, f32(dy, n), index, n, cell8)
                    else:
                        index16, cell16 = u16(ctx[INDEX] + 2 * place, n), np.uint16(cell)
                        if size == 2:
                            add_half_where(total, u16(dy, n), index16, n, cell16)
                        else:
                            add_where(total, f32(dy, n), index16, n, cell16)
            store_sums(ctx, total, ctx[LARGE] + (row * ctx[W] + col) * n * size)


@Kernel
def average_forward(address):  # type: ignore[no-untyped-def]  # words: see above; float64 sums
    ctx = words(address)
    n = ctx[C]
    total = f64(ctx[SUMS] + team_rank(ctx) * ctx[PITCH], n)
    start, stop = my_range(ctx, ctx[IMAGES] * ctx[HO], 1)
    for row in range(start, stop):
        image, top = row // ctx[HO], row % ctx[HO] * ctx[STRIDE] - ctx[PAD]
        first, last = max(0, -top), min(ctx[KH], ctx[H] - top)
        for col in range(ctx[WO]):
            left = col * ctx[STRIDE] - ctx[PAD]
            begin, end = max(0, -left), min(ctx[KW], ctx[W] - left)
            for i in range(n):
                total[i] = 0.0
            for a in range(first, last):
                for b in range(begin, end):
                    place = ((image * ctx[H] + top + a) * ctx[W] + left + b) * n
                    if ctx[HALF] != 0:
                        xh = u16(ctx[LARGE] + 2 * place, n)
                        for i in range(n):
                            total[i] += widen(xh[i])
                    else:
                        x = f32(ctx[LARGE] + 4 * place, n)
                        for i in range(n):
                            total[i] += x[i]
            cells = np.float64((last - first) * (end - begin))
            if ctx[PADDED] != 0:
                cells = np.float64(ctx[KH] * ctx[KW])
            out = (row * ctx[WO] + col) * n
            if ctx[HALF] != 0:
                yh = u16(ctx[SMALL] + 2 * out, n)
                for i in range(n):
                    yh[i] = narrow(total[i] / cells)
            else:
                y = f32(ctx[SMALL] + 4 * out, n)
                for i in range(n):
                    y[i] = np.float32(total[i] / cells)


@njit(cache=True)
def cells_of(window, kernel, stride, pad, length):  # type: ignore[no-untyped-def]  # int64 x5 -> int64
    """Valid cells of a window along one axis."""
    begin = window * stride - pad
    return min(begin + kernel, length) - max(begin, 0)


@Kernel
def average_backward(address):  # type: ignore[no-untyped-def]  # words: see above; float32 sums
    ctx = words(address)
    n = ctx[C]
    total = f32(ctx[SUMS] + team_rank(ctx) * ctx[PITCH], n)
    start, stop = my_range(ctx, ctx[IMAGES] * ctx[H], 1)
    for row in range(start, stop):
        image, at = row // ctx[H], row % ctx[H]
        top, bottom = windows_of(at, ctx[KH], ctx[STRIDE], ctx[PAD], ctx[HO])
        for col in range(ctx[W]):
            left, right = windows_of(col, ctx[KW], ctx[STRIDE], ctx[PAD], ctx[WO])
            for i in range(n):
                total[i] = np.float32(0)
            for oh in range(top, bottom):
                high = cells_of(oh, ctx[KH], ctx[STRIDE], ctx[PAD], ctx[H])
                for ow in range(left, right):
                    cells = np.float32(high * cells_of(ow, ctx[KW], ctx[STRIDE], ctx[PAD], ctx[W]))
                    if ctx[PADDED] != 0:
                        cells = np.float32(ctx[KH] * ctx[KW])
                    place = ((image * ctx[HO] + oh) * ctx[WO] + ow) * n
                    if ctx[HALF] != 0:
                        dyh = u16(ctx[SMALL] + 2 * place, n)
                        for i in range(n):
                            total[i] += widen(dyh[i]) / cells
                    else:
                        dy = f32(ctx[SMALL] + 4 * place, n)
                        for i in range(n):
                            total[i] += dy[i] / cells
            out = (row * ctx[W] + col) * n
            store_sums(ctx, total, ctx[LARGE] + out * (2 if ctx[HALF] != 0 else 4))


def window_of(node: Node, large: DTensor, small: DTensor) -> tuple[int, int, int, int]:
    """(kernel height, kernel width, stride, padding) of a pooling node; GAP is one window over the image.

    Raises ShapeError when the window does not fit, a window could lie in the padding alone, or the small image is not
    floor((size + 2 pad - kernel) / stride) + 1.
    """
    if node.op.startswith("GAP"):
        kh, kw, stride, pad = large.shape.h, large.shape.w, 1, 0
    else:
        kh = kw = int(node.attrs["kernel"])
        stride, pad = int(node.attrs["stride"]), int(node.attrs["pad"])
    if kh < 1 or stride < 1 or not 0 <= pad < kh or large.shape.h + 2 * pad < kh or large.shape.w + 2 * pad < kw:
        raise ShapeError(
            f"{label(node)}: kernel {kh}, stride {stride}, pad {pad} on {large.name!r} {large.shape}; "
            "expected kernel and stride of at least 1, 0 <= pad < kernel, and a window that fits the padded image"
        )
    high = (large.shape.h + 2 * pad - kh) // stride + 1
    wide = (large.shape.w + 2 * pad - kw) // stride + 1
    expected = (large.shape.n, high, wide, large.shape.c)
    if small.shape.dims != expected:
        raise ShapeError(f"{label(node)}: {small.name!r} is {small.shape}; expected {list(expected)}")
    return kh, kw, stride, pad


def index_bytes(node: Node, index: DTensor, small: DTensor, kernel: int) -> int:
    """Bytes per element of a max pool's index: 1 up to ``BYTE_KERNEL``, else 2; checks the tensor."""
    nbytes = 1 if kernel <= BYTE_KERNEL else 2
    if index.dtype is not DType.INT8:
        raise DTypeError(f"{label(node)}: index {index.name!r} is {index.dtype.name}; expected INT8")
    compact(node, index, small.shape.numel * nbytes)
    return nbytes


def launch_pool(node: Node, ctx: CaptureContext) -> Sequence[Call]:
    """All pooling ops: the large image is x or dx, the small one y or dy."""
    backward = node.op.endswith("_BWD")
    source, out = ctx.tensor(node.inputs[0]), ctx.tensor(node.outputs[0])
    large, small = (out, source) if backward else (source, out)
    half = same_type(node, ctx, large.id, small.id)
    compact(node, large)
    compact(node, small)
    window = window_of(node, large, small)
    is_max = node.op.startswith("MAX")
    threads = team_for(ctx, large.shape.numel)
    pitch = align(large.shape.c * (8 if not is_max and not backward else 4), 64)
    index, nbytes = 0, 1
    if node.op in ("MAXPOOL_FWD", "MAXPOOL_BWD"):
        tensor = ctx.tensor(node.inputs[1] if backward else node.outputs[1])
        index, nbytes = ctx.ptr(tensor.id), index_bytes(node, tensor, small, window[0])
    elif is_max:  # nobody reads the index of an inference
        nbytes = 1 if window[0] <= BYTE_KERNEL else 2
        index = ctx.scratch(small.shape.numel * nbytes)
    n, h, w, c = large.shape.dims
    arguments = (
        *(n, h, w, c, *window, small.shape.h, small.shape.w, half, ctx.ptr(large.id), ctx.ptr(small.id)),
        *(index, nbytes, ctx.scratch(threads * pitch) if backward or not is_max else 0, pitch),
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
