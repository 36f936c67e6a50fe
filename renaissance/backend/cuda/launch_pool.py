"""Pooling on CUDA: one launch for every op (kernels/pool.cu). The large picture is x or dx, the small one y or dy."""

from __future__ import annotations

from collections.abc import Sequence

from renaissance.backend.checks import expect, window_of
from renaissance.backend.cuda.calls import BLOCK, Arguments, CudaCall, CudaContext, KernelCall, i32
from renaissance.backend.cuda.channel_tiles import MOST_CHUNKS, WARP_OF_PACKS, ChannelTiles
from renaissance.backend.cuda.checks import same_float
from renaissance.backend.registry import OpRegistry, label
from renaissance.core.dtype import DType
from renaissance.graph.computation_graph import Node
from renaissance.graph.op_types_image import ONE_BYTE_KERNEL
from renaissance.tensor.dtensor import DTensor

BLOCKS = 32768
"""Blocks of one pixel per thread, at most; beyond it threads have several."""


def _pictures(node: Node, ctx: CudaContext) -> tuple[DTensor, DTensor]:
    """The large and the small picture, of one type. Raises DTypeError."""
    source, out = ctx.tensor(node.inputs[0]), ctx.tensor(node.outputs[0])
    same_float(node, ctx, source.id, out.id)
    return (out, source) if node.op.endswith("_BWD") else (source, out)


def _windowed(
    node: Node, kernel: str, tiles: ChannelTiles, large: DTensor, small: DTensor, args: Arguments
) -> Sequence[CudaCall]:
    """A kernel that has one thread for each pixel and pack of what it writes; ``args`` come first."""
    kernel_size, _, stride, pad = window_of(node, large, small)
    picture = (large.shape.h, large.shape.w, kernel_size, stride, pad, small.shape.h, small.shape.w)
    chunk = tiles.chunk(1, BLOCKS)
    sizes = map(i32, (*picture, tiles.channels, tiles.columns, tiles.pixels, chunk))
    function = f"{kernel}_{tiles.suffix}"
    return [KernelCall("pool", function, tiles.grid(chunk), BLOCK, (*args, *sizes), label(node))]


def launch_max(node: Node, ctx: CudaContext) -> Sequence[CudaCall]:
    """MAXPOOL_FWD: input x; outputs y, index. MAXPOOL_INF: without index. MAXPOOL_BWD: inputs dy, index; output dx."""
    backward = node.op.endswith("_BWD")
    large, small = _pictures(node, ctx)
    kernel, *_ = window_of(node, large, small)
    wide = kernel > ONE_BYTE_KERNEL
    written = large if backward else small
    tiles = ChannelTiles.of(written, single=wide)
    first, out = ctx.buffer(node.inputs[0]), ctx.buffer(node.outputs[0])
    ids = (*node.inputs[1:], *node.outputs[1:])
    index = out.part(0, 0)  # of an inference: never touched
    if ids:
        tensor = expect(node, ctx.tensor(ids[0]), DType.INT8, small.shape.numel * (2 if wide else 1))
        index = ctx.buffer(tensor.id)
    args: Arguments = (first, index, out) if backward else (first, out, index, i32(len(ids)))
    name = ("max_backward" if backward else "max_forward") + ("_wide" if wide else "")
    return _windowed(node, name, tiles, large, small, args)


def launch_average(node: Node, ctx: CudaContext) -> Sequence[CudaCall]:
    """AVGPOOL_FWD: x to y. AVGPOOL_BWD: dy to dx."""
    backward = node.op.endswith("_BWD")
    large, small = _pictures(node, ctx)
    tiles = ChannelTiles.of(large if backward else small)
    padded = i32(bool(node.attrs["count_include_pad"]))
    args = (ctx.buffer(node.inputs[0]), ctx.buffer(node.outputs[0]), padded)
    return _windowed(node, "average_backward" if backward else "average_forward", tiles, large, small, args)


def launch_global(node: Node, ctx: CudaContext) -> Sequence[CudaCall]:
    """GAP_FWD: x to y [N,1,1,C]. GAP_BWD: dy to dx. A block has some channels of one image."""
    large, small = _pictures(node, ctx)
    window_of(node, large, small)
    n, h, w, c = large.shape.dims
    tiles = ChannelTiles.of(large, widest=WARP_OF_PACKS)
    sizes = map(i32, (c, tiles.columns, n, h * w))
    args: Arguments = (ctx.buffer(node.inputs[0]), ctx.buffer(node.outputs[0]), *sizes)
    direction = "backward" if node.op.endswith("_BWD") else "forward"
    grid = (tiles.tiles, min(n, MOST_CHUNKS), 1)
    return [KernelCall("pool", f"global_{direction}_{tiles.suffix}", grid, BLOCK, args, label(node))]


def register(registry: OpRegistry) -> None:
    """Add the launchers of this module to ``registry``."""
    for op in ("MAXPOOL_FWD", "MAXPOOL_INF", "MAXPOOL_BWD"):
        registry.register(op, "cuda", launch_max)
    for op in ("AVGPOOL_FWD", "AVGPOOL_BWD"):
        registry.register(op, "cuda", launch_average)
    for op in ("GAP_FWD", "GAP_BWD"):
        registry.register(op, "cuda", launch_global)
