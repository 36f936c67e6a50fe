"""Ops that change what a pixel or an image holds and compute next to nothing: channel padding, shifted and mirrored
views of the input for test-time augmentation, and the mean of several sets of logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from renaissance.backend.checks import of_size
from renaissance.backend.cpu.intrinsics import ARGS, f32, my_range, u8, u16, u32, words
from renaissance.backend.cpu.kernels_common import BLOCK, Kernel, narrow, same_type, team_for, widen
from renaissance.backend.cpu.queue import kernel_call
from renaissance.backend.registry import Call, CaptureContext, OpRegistry, label
from renaissance.core.errors import ShapeError
from renaissance.graph.computation_graph import Node
from renaissance.graph.op_types_image import PADDED_CHANNELS

MOST_LOGITS = 5
"""Sets of logits that MEAN_LOGITS takes."""


@Kernel
def copy_pixels(address):  # type: ignore[no-untyped-def]  # words: source, its pixel bytes, destination, its pixel bytes, pixels
    """Copy channel rows between two channel paddings; padding bytes of the destination become zero."""
    ctx = words(address)
    from_bytes, to_bytes = ctx[ARGS + 1], ctx[ARGS + 3]
    used = min(from_bytes, to_bytes)
    start, stop = my_range(ctx, ctx[ARGS + 4], 1024)
    for pixel in range(start, stop):
        source = u8(ctx[ARGS] + pixel * from_bytes, used)
        out = u8(ctx[ARGS + 2] + pixel * to_bytes, to_bytes)
        for i in range(used):
            out[i] = source[i]
        for i in range(to_bytes - used):
            out[used + i] = 0


@Kernel
def pad_few_channels(address):  # type: ignore[no-untyped-def]  # words: x, y, pixels, 1 for bfloat16: 3 channels to 8
    """Colour images: three strided streams and constants, instead of two loops of a few rounds per pixel."""
    ctx = words(address)
    start, stop = my_range(ctx, ctx[ARGS + 2], BLOCK)
    n = stop - start
    if ctx[ARGS + 3] != 0:
        xh, yh = u16(ctx[ARGS] + 6 * start, 3 * n), u16(ctx[ARGS + 1] + 16 * start, 8 * n)
        for i in range(n):
            yh[8 * i], yh[8 * i + 1], yh[8 * i + 2] = xh[3 * i], xh[3 * i + 1], xh[3 * i + 2]
            for k in range(3, 8):
                yh[8 * i + k] = np.uint16(0)
    else:
        x, y = u32(ctx[ARGS] + 12 * start, 3 * n), u32(ctx[ARGS + 1] + 32 * start, 8 * n)
        for i in range(n):
            y[8 * i], y[8 * i + 1], y[8 * i + 2] = x[3 * i], x[3 * i + 1], x[3 * i + 2]
            for k in range(3, 8):
                y[8 * i + k] = np.uint32(0)


@Kernel
def view_input(address):  # type: ignore[no-untyped-def]  # words: x, y, N, H, W, C, 1 for bfloat16, flip, dy, dx
    """y[n,h,w] = x[n,h+dy,w'+dx], w' = W-1-w when flipped; coordinates outside the image take the nearest edge."""
    ctx = words(address)
    high, wide, n = ctx[ARGS + 3], ctx[ARGS + 4], ctx[ARGS + 5]
    start, stop = my_range(ctx, ctx[ARGS + 2] * high, 1)
    for row in range(start, stop):
        image, h = row // high, row % high
        source = image * high + min(max(h + ctx[ARGS + 8], 0), high - 1)
        for w in range(wide):
            column = wide - 1 - w if ctx[ARGS + 7] != 0 else w
            place = (source * wide + min(max(column + ctx[ARGS + 9], 0), wide - 1)) * n
            out = (row * wide + w) * n
            if ctx[ARGS + 6] != 0:
                xh, yh = u16(ctx[ARGS] + 2 * place, n), u16(ctx[ARGS + 1] + 2 * out, n)
                for i in range(n):
                    yh[i] = xh[i]
            else:
                x, y = u32(ctx[ARGS] + 4 * place, n), u32(ctx[ARGS + 1] + 4 * out, n)
                for i in range(n):
                    y[i] = x[i]


@Kernel
def mean_logits(address):  # type: ignore[no-untyped-def]  # words: y, elements, 1 for bfloat16, number of inputs, inputs...
    """Sums in float32 in the order of the inputs, divided and rounded once."""
    ctx = words(address)
    n, count = ctx[ARGS + 1], ctx[ARGS + 3]
    for i in range(n):
        total = np.float32(0)
        for k in range(count):
            if ctx[ARGS + 2] != 0:
                total += widen(u16(ctx[ARGS + 4 + k], n)[i])
            else:
                total += f32(ctx[ARGS + 4 + k], n)[i]
        mean = total / np.float32(count)
        if ctx[ARGS + 2] != 0:
            u16(ctx[ARGS], n)[i] = narrow(mean)
        else:
            f32(ctx[ARGS], n)[i] = mean


def launch_channel_padding(node: Node, ctx: CaptureContext) -> Sequence[Call]:
    """CHANNEL_PADDING_FWD fills the new channels with zeros, CHANNEL_PADDING_BWD drops them."""
    source, out = ctx.tensor(node.inputs[0]), ctx.tensor(node.outputs[0])
    half = same_type(node, ctx, source.id, out.id)
    narrow_side, wide_side = (source, out) if node.op.endswith("_FWD") else (out, source)
    few, many = narrow_side.shape.dims, wide_side.shape.dims
    if few[:3] != many[:3] or many[3] != -(-few[3] // PADDED_CHANNELS) * PADDED_CHANNELS:
        raise ShapeError(
            f"{label(node)}: {source.name!r} is {source.shape} and {out.name!r} is {out.shape}; expected the same "
            f"pixels, and the channels of {narrow_side.name!r} rounded up to a multiple of {PADDED_CHANNELS}"
        )
    pixels, threads = few[0] * few[1] * few[2], team_for(ctx, wide_side.shape.numel)
    if few[3] == 3 and source is narrow_side:
        words_ = (ctx.ptr(source.id), ctx.ptr(out.id), pixels, half)
        return [kernel_call(pad_few_channels, words_, label(node), threads=threads)]
    size = source.dtype.itemsize
    arguments = (ctx.ptr(source.id), source.shape.c * size, ctx.ptr(out.id), out.shape.c * size, pixels)
    return [kernel_call(copy_pixels, arguments, label(node), threads=threads)]


def launch_input_view(node: Node, ctx: CaptureContext) -> Sequence[Call]:
    x, y = ctx.tensor(node.inputs[0]), ctx.tensor(node.outputs[0])
    half = same_type(node, ctx, x.id, y.id)
    if y.shape != x.shape:
        raise ShapeError(f"{label(node)}: {y.name!r} is {y.shape}; expected {x.shape} like {x.name!r}")
    shift = (int(bool(node.attrs["flip"])), int(node.attrs["dy"]), int(node.attrs["dx"]))
    arguments = (ctx.ptr(x.id), ctx.ptr(y.id), *x.shape.dims, half, *shift)
    return [kernel_call(view_input, arguments, label(node), threads=team_for(ctx, x.shape.numel))]


def launch_mean_logits(node: Node, ctx: CaptureContext) -> Sequence[Call]:
    y = ctx.tensor(node.outputs[0])
    half = same_type(node, ctx, y.id, *node.inputs)
    if not 1 <= len(node.inputs) <= MOST_LOGITS:
        raise ShapeError(f"{label(node)}: {len(node.inputs)} sets of logits; expected 1 to {MOST_LOGITS}")
    n = y.shape.numel
    inputs = [ctx.ptr(of_size(node, ctx.tensor(i), n).id) for i in node.inputs]
    return [kernel_call(mean_logits, (ctx.ptr(y.id), n, half, len(inputs), *inputs), label(node))]


def register(registry: OpRegistry) -> None:
    """Add the launchers of this module to ``registry``."""
    registry.register("CHANNEL_PADDING_FWD", "cpu", launch_channel_padding)
    registry.register("CHANNEL_PADDING_BWD", "cpu", launch_channel_padding)
    registry.register("INPUT_VIEW", "cpu", launch_input_view)
    registry.register("MEAN_LOGITS", "cpu", launch_mean_logits)
