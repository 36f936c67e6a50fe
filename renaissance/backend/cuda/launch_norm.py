"""Batch normalisation on CUDA: three launches forward, three backward, one with running statistics (kernels/norm.cu).

The first of three leaves two floats per channel and chunk of rows in scratch memory, the second makes factors per
channel of them, the third computes the tensor. A tensor with few rows takes one launch each way. Chunks follow from the
shape (law 2); ``batch_valid`` is read on the device (law 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from renaissance.backend.checks import expect, of_size
from renaissance.backend.cuda.calls import (
    BLOCK,
    Arguments,
    Buffer,
    CudaCall,
    CudaContext,
    Dim,
    KernelCall,
    f32,
    grid_for,
    i32,
)
from renaissance.backend.cuda.channel_tiles import ChannelTiles
from renaissance.backend.cuda.checks import fused_activation, same_float
from renaissance.backend.registry import OpRegistry, label
from renaissance.core.dtype import DType
from renaissance.core.region import align
from renaissance.graph.computation_graph import Node
from renaissance.tensor.dtensor import DTensor

SUMMING_BLOCKS, WRITING_BLOCKS = 1024, 2048
"""Blocks of a first and of a third pass, at most: a few times what runs at once on the largest devices, so that none
idles at the end; each block of a first pass also leaves partial results for the second one to read."""
PACKS_AT_ONCE, SINGLES_AT_ONCE = 4, 8
"""A thread's rows of a chunk are a multiple of this: what it loads at once."""
FINISHED = 8
"""Channels of a block of a second pass (kernels/norm.cuh)."""
STRIPS = (4, 16, 32, 64, 128)
"""Threads that share the chunks of a channel there; the block has FINISHED times as many."""
CHUNKS_OF_A_STRIP = 8
STORES_NOTHING, STORES_G, STORES_GATES = range(3)
"""What the first pass of a gradient leaves for the third (kernels/norm_backward.cu)."""


@dataclass(frozen=True, slots=True)
class Passes:
    """Sizes of the passes over one tensor, and their scratch memory."""

    samples: int
    per_sample: int
    tiles: ChannelTiles
    summed: int
    """Rows of a chunk of the first pass."""
    written: int
    """Rows of a chunk of the third pass."""
    parts: Buffer
    """float32 [chunks][2][C], from the first pass to the second."""
    vectors: tuple[Buffer, Buffer, Buffer]
    """float32 [C] each."""
    gates: Buffer
    """A byte for each pack of the tensor: from the first to the third pass; or empty."""

    @classmethod
    def make(cls, tensor: DTensor, ctx: CudaContext, gates: bool = False) -> Passes:
        """For x or dx; takes the node's scratch memory."""
        shape, tiles = tensor.shape, ChannelTiles.of(tensor)
        summed, written = (_chunk(tiles, blocks) for blocks in (SUMMING_BLOCKS, WRITING_BLOCKS))
        size, vector = align(8 * tiles.grid(summed)[1] * shape.c), align(4 * shape.c)
        packs = shape.numel // tiles.pack if gates else 0
        scratch = ctx.scratch(size + 3 * vector + packs)
        a, b, c = (scratch.part(size + k * vector, 4 * shape.c) for k in range(3))
        open_ = scratch.part(size + 3 * vector, packs)
        return cls(shape.n, shape.h * shape.w, tiles, summed, written, scratch.part(0, size), (a, b, c), open_)

    def sizes(self, chunk: int) -> Arguments:
        """The last arguments of a pass over the tensor."""
        return tuple(map(i32, (self.samples, self.per_sample, self.tiles.channels, self.tiles.columns, chunk)))

    def over_rows(self, module: str, kernel: str, chunk: int, args: Arguments, name: str) -> KernelCall:
        """A first or third pass."""
        function = f"{kernel}_{self.tiles.suffix}"
        return KernelCall(module, function, self.tiles.grid(chunk), BLOCK, (*args, *self.sizes(chunk)), name)

    def finish(self) -> tuple[Dim, Dim]:
        """Grid and block of a second pass."""
        chunks = self.tiles.grid(self.summed)[1]
        strips = next((s for s in STRIPS if s * CHUNKS_OF_A_STRIP >= chunks), STRIPS[-1])
        return (-(-self.tiles.channels // FINISHED), 1, 1), (FINISHED * strips, 1, 1)

    def finish_sizes(self) -> Arguments:
        """Sizes that a second pass takes."""
        return tuple(map(i32, (self.samples, self.per_sample, self.tiles.channels, self.summed)))


def _chunk(tiles: ChannelTiles, most_blocks: int) -> int:
    return tiles.chunk(PACKS_AT_ONCE if tiles.pack > 1 else SINGLES_AT_ONCE, most_blocks)


def _vectors(node: Node, ctx: CudaContext, channels: int, *ids: int) -> list[Buffer]:
    """Buffers of float32 vectors of ``channels`` elements."""
    return [ctx.buffer(expect(node, ctx.tensor(i), DType.FP32, channels).id) for i in ids]


def _feature_maps(node: Node, ctx: CudaContext, *ids: int) -> DTensor:
    """The first of these tensors; all have its type and size. Raises DTypeError or ShapeError by name."""
    same_float(node, ctx, *ids)
    first = ctx.tensor(ids[0])
    for i in ids:
        of_size(node, ctx.tensor(i), first.shape.numel)
    return first


def launch_forward(node: Node, ctx: CudaContext) -> Sequence[CudaCall]:
    """BN_FWD: inputs x, gamma, beta, prev_mean, prev_var, batch_valid[, residual]; outputs y, saved_mean,
    saved_inv_std, next_mean, next_var."""
    x, gamma, beta, prev_mean, prev_var, batch_valid, *residual = node.inputs
    y, *statistics = node.outputs
    tensor = _feature_maps(node, ctx, x, y, *residual)
    vectors = _vectors(node, ctx, tensor.shape.c, gamma, beta, prev_mean, prev_var, *statistics)
    valid = ctx.buffer(expect(node, ctx.tensor(batch_valid), DType.INT32, 1).id)
    source, target = ctx.buffer(x), ctx.buffer(y)
    other = ctx.buffer(residual[0]) if residual else source
    adds, activation = i32(len(residual)), i32(fused_activation(node))
    numbers = (f32(float(node.attrs["momentum"])), f32(float(node.attrs["eps"])))
    few = ChannelTiles.of(tensor).few_rows()
    if few is not None:
        args = (source, other, target, valid, *vectors, adds, activation, *_few_sizes(tensor, few[0]), *numbers)
        return [_few_rows(node, "norm", "norm_forward", few, args)]
    passes = Passes.make(tensor, ctx)
    scale, shift, origin = passes.vectors
    first = (source, valid, passes.parts, origin)
    finish = (passes.parts, origin, valid, *vectors, scale, shift, *passes.finish_sizes(), *numbers)
    saved_mean = ctx.buffer(statistics[0])
    last = (source, other, target, saved_mean, scale, shift, valid, adds, i32(0), activation)
    return [
        passes.over_rows("norm", "norm_statistics", passes.summed, first, f"{label(node)} statistics"),
        KernelCall("norm", "norm_finish", *passes.finish(), finish, f"{label(node)} finish"),
        passes.over_rows("norm", "normalise", passes.written, last, label(node)),
    ]


def launch_inference(node: Node, ctx: CudaContext) -> Sequence[CudaCall]:
    """BN_INF: inputs x, eq_scale, eq_bias[, residual]; output y."""
    x, scale, bias, *residual = node.inputs
    (y,) = node.outputs
    tensor = _feature_maps(node, ctx, x, y, *residual)
    factors = _vectors(node, ctx, tensor.shape.c, scale, bias)
    source, target = ctx.buffer(x), ctx.buffer(y)
    other = ctx.buffer(residual[0]) if residual else source
    tiles = ChannelTiles.of(tensor)
    chunk = _chunk(tiles, WRITING_BLOCKS)
    flags = (i32(len(residual)), i32(1), i32(fused_activation(node)))
    sizes = map(i32, (tensor.shape.n, tensor.shape.h * tensor.shape.w, tiles.channels, tiles.columns, chunk))
    no_mean, all_valid = factors[0], factors[0]  # never read
    args: Arguments = (source, other, target, no_mean, *factors, all_valid, *flags, *sizes)
    return [KernelCall("norm", f"normalise_{tiles.suffix}", tiles.grid(chunk), BLOCK, args, label(node))]


def launch_equivalent(node: Node, ctx: CudaContext) -> Sequence[CudaCall]:
    """BN_UPDATE_EQ_PARAMS: inputs gamma, beta, mean, var; outputs eq_scale, eq_bias."""
    channels = ctx.tensor(node.inputs[0]).shape.numel
    vectors = _vectors(node, ctx, channels, *node.inputs, *node.outputs)
    args: Arguments = (*vectors, i32(channels), f32(float(node.attrs["eps"])))
    return [KernelCall("norm", "norm_fold", grid_for(channels), BLOCK, args, label(node))]


def launch_backward(node: Node, ctx: CudaContext) -> Sequence[CudaCall]:
    """BN_BWD: inputs dy, x, gamma, saved_mean, saved_inv_std, batch_valid[, y][, dy2]; outputs dx, dgamma, dbeta
    [, dresidual]."""
    dy, x, gamma, mean, inv_std, batch_valid, *rest = node.inputs
    dx, dgamma, dbeta, *residual = node.outputs
    gated, two = node.attrs["activation"] != "none", node.attrs["dys"] == 2
    y, dy2 = rest[0] if gated else dy, rest[-1] if two else dy
    tensor = _feature_maps(node, ctx, x, dy, y, dy2, dx, *residual)
    scales, means, deviations, *sums = _vectors(node, ctx, tensor.shape.c, gamma, mean, inv_std, dgamma, dbeta)
    valid = ctx.buffer(expect(node, ctx.tensor(batch_valid), DType.INT32, 1).id)
    source, target = ctx.buffer(x), ctx.buffer(dx)
    operands = (ctx.buffer(dy), ctx.buffer(dy2), ctx.buffer(y), source)
    stored = ctx.buffer(residual[0]) if residual else target
    choices = (i32(two), i32(fused_activation(node)))
    adds = i32(len(residual))
    few = ChannelTiles.of(tensor).few_rows()
    if few is not None:
        vectors = (scales, means, deviations, valid, *sums)
        args = (*operands, target, stored, *vectors, *choices, adds, *_few_sizes(tensor, few[0]))
        return [_few_rows(node, "norm_backward", "norm_backward", few, args)]
    by_gates = gated and not two and not residual and ChannelTiles.of(tensor).pack > 1
    passes = Passes.make(tensor, ctx, gates=by_gates)
    stores = STORES_GATES if by_gates else STORES_G if residual or two or gated else STORES_NOTHING
    first = (*operands, means, valid, stored, passes.gates, passes.parts, *choices, i32(stores))
    finish = (passes.parts, valid, scales, deviations, *sums, *passes.vectors, *passes.finish_sizes())
    g = stored if stores == STORES_G else operands[0]
    last = (g, passes.gates, source, target, stored, means, *passes.vectors, valid, i32(by_gates), adds)
    return [
        passes.over_rows("norm_backward", "norm_gradients", passes.summed, first, f"{label(node)} sums"),
        KernelCall("norm_backward", "norm_gradients_finish", *passes.finish(), finish, f"{label(node)} finish"),
        passes.over_rows("norm_backward", "norm_input_gradient", passes.written, last, label(node)),
    ]


def _few_sizes(tensor: DTensor, tiles: ChannelTiles) -> Arguments:
    shape = tensor.shape
    return tuple(map(i32, (shape.n, shape.h * shape.w, shape.c, tiles.columns)))


def _few_rows(node: Node, module: str, kernel: str, few: tuple[ChannelTiles, Dim], args: Arguments) -> KernelCall:
    """The only launch for a tensor of few rows: blocks side by side, each with all rows of its channels."""
    tiles, block = few
    return KernelCall(module, f"{kernel}_{tiles.suffix}", (tiles.tiles, 1, 1), block, args, label(node))


def register(registry: OpRegistry) -> None:
    """Add the launchers of batch normalisation, forward and backward, to ``registry``."""
    registry.register("BN_FWD", "cuda", launch_forward)
    registry.register("BN_BWD", "cuda", launch_backward)
    registry.register("BN_INF", "cuda", launch_inference)
    registry.register("BN_UPDATE_EQ_PARAMS", "cuda", launch_equivalent)
