"""Element by element: activations, sums, dropout; and the ops that only move elements: flatten, channel padding, views.

Kernels: ``elementwise.cu``, ``dropout.cu`` and ``shape.cu``.
"""

from __future__ import annotations

from collections.abc import Sequence

from renaissance.backend.checks import expect, of_size
from renaissance.backend.cuda.calls import (
    BLOCK,
    Arguments,
    Buffer,
    CopyCall,
    CudaCall,
    CudaContext,
    KernelCall,
    f32,
    grid_for,
    i32,
    i64,
    packs_grid,
    suffix,
    u32,
)
from renaissance.backend.cuda.checks import fused_activation, same_float
from renaissance.backend.registry import OpRegistry, label
from renaissance.core.dtype import DType
from renaissance.core.errors import ShapeError, ValueRejected
from renaissance.core.philox import Domain, dropout_threshold, purpose
from renaissance.graph.computation_graph import Node
from renaissance.graph.op_types_image import PADDED_CHANNELS

KINDS = ("relu", "relu6", "leaky_relu", "hardswish", "tanh", "sigmoid", "silu", "elu")
"""The index is the number of a kind in elementwise.cu."""
DROPOUT_LAYERS = 1 << 24
"""Dropout layers that the purpose word can tell apart."""
PIXELS = 256
"""Pixels that a block of shape.cu takes at a time."""
MOST_LOGITS = 5
"""Sets of logits that MEAN_LOGITS takes."""


def register(registry: OpRegistry) -> None:
    """Add the launchers of this module to ``registry``."""
    registry.register("ACT_FWD", "cuda", launch_activation)
    registry.register("ACT_BWD", "cuda", launch_activation)
    registry.register("ADD_FWD", "cuda", launch_add)
    registry.register("GRAD_SUM", "cuda", launch_add)
    registry.register("DROPOUT_FWD", "cuda", launch_dropout)
    registry.register("DROPOUT_BWD", "cuda", launch_dropout)
    registry.register("FLATTEN_FWD", "cuda", launch_flatten)
    registry.register("FLATTEN_BWD", "cuda", launch_flatten)
    registry.register("CHANNEL_PADDING_FWD", "cuda", launch_channel_padding)
    registry.register("CHANNEL_PADDING_BWD", "cuda", launch_channel_padding)
    registry.register("INPUT_VIEW", "cuda", launch_input_view)
    registry.register("MEAN_LOGITS", "cuda", launch_mean_logits)


def _alike(node: Node, ctx: CudaContext) -> tuple[list[Buffer], DType, int]:
    """(buffers of all inputs and outputs, their type, their elements): tensors of one type and size."""
    ids = (*node.inputs, *node.outputs)
    dtype = same_float(node, ctx, *ids)
    n = ctx.tensor(ids[0]).shape.numel
    for i in ids:
        of_size(node, ctx.tensor(i), n)
    return [ctx.buffer(i) for i in ids], dtype, n


def launch_activation(node: Node, ctx: CudaContext) -> Sequence[CudaCall]:
    """ACT_FWD: x -> y; ACT_BWD: dy, saved -> dx."""
    buffers, dtype, n = _alike(node, ctx)
    kind = node.attrs["kind"]
    if kind not in KINDS:
        raise ValueRejected(f"{label(node)}: kind {kind!r}; expected one of: {', '.join(KINDS)}")
    kernel = "act_forward" if len(node.inputs) == 1 else "act_backward"
    arguments: Arguments = (*buffers, i64(n), i32(KINDS.index(str(kind))))
    grid = packs_grid(n, dtype)
    return [KernelCall("elementwise", f"{kernel}_{suffix(dtype)}", grid, BLOCK, arguments, label(node))]


def launch_add(node: Node, ctx: CudaContext) -> Sequence[CudaCall]:
    """ADD_FWD and GRAD_SUM: two tensors -> their sum (and its activation)."""
    buffers, dtype, n = _alike(node, ctx)
    arguments: Arguments = (*buffers, i64(n), i32(fused_activation(node)))
    return [
        KernelCall("elementwise", f"add_{suffix(dtype)}", packs_grid(n, dtype), BLOCK, arguments, label(node)),
    ]


def launch_dropout(node: Node, ctx: CudaContext) -> Sequence[CudaCall]:
    """DROPOUT_FWD (x -> y) and DROPOUT_BWD (dy -> dx): the same factors applied to another tensor."""
    x, *state = node.inputs
    (y,) = node.outputs
    dtype = same_float(node, ctx, x, y)
    n = ctx.tensor(x).shape.numel
    of_size(node, ctx.tensor(y), n)
    words = [ctx.buffer(expect(node, ctx.tensor(i), DType.INT32, 1).id) for i in state]
    p, layer = float(node.attrs["p"]), int(node.attrs["layer"])
    if not 0.0 <= p < 1.0:
        raise ValueRejected(f"{label(node)}: p is {p}; expected 0 <= p < 1")
    if not 0 <= layer < DROPOUT_LAYERS:
        raise ValueRejected(f"{label(node)}: layer is {layer}; expected 0 to {DROPOUT_LAYERS - 1}")
    scalars = (i64(n), u32(purpose(Domain.DROPOUT, layer)), u32(dropout_threshold(p)), f32(1.0 / (1.0 - p)))
    arguments: Arguments = (ctx.buffer(x), ctx.buffer(y), *words, *scalars)
    name = f"dropout_{suffix(dtype)}"
    return [KernelCall("dropout", name, packs_grid(n, dtype), BLOCK, arguments, label(node))]


def launch_flatten(node: Node, ctx: CudaContext) -> Sequence[CudaCall]:
    """FLATTEN_FWD and FLATTEN_BWD: the same elements in the same order, since tensors are compact."""
    (source, target), _, _ = _alike(node, ctx)
    return [CopyCall(target, source, label(node))]


def launch_channel_padding(node: Node, ctx: CudaContext) -> Sequence[CudaCall]:
    """CHANNEL_PADDING_FWD fills the new channels with zeros, CHANNEL_PADDING_BWD drops them."""
    source, out = ctx.tensor(node.inputs[0]), ctx.tensor(node.outputs[0])
    dtype = same_float(node, ctx, source.id, out.id)
    pads = node.op.endswith("_FWD")
    narrow, wide = (source, out) if pads else (out, source)
    few, many = narrow.shape.dims, wide.shape.dims
    if few[:3] != many[:3] or many[3] != -(-few[3] // PADDED_CHANNELS) * PADDED_CHANNELS:
        raise ShapeError(
            f"{label(node)}: {source.name!r} is {source.shape} and {out.name!r} is {out.shape}; expected the same "
            f"pixels, and the channels of {narrow.name!r} rounded up to a multiple of {PADDED_CHANNELS}"
        )
    pixels = few[0] * few[1] * few[2]
    channels = (i32(source.shape.c), i32(out.shape.c))
    arguments: Arguments = (ctx.buffer(source.id), ctx.buffer(out.id), i64(pixels), *channels)
    name = f"{'pad' if pads else 'drop'}_channels_{8 * dtype.itemsize}"
    return [KernelCall("shape", name, grid_for(pixels, PIXELS), BLOCK, arguments, label(node))]


def launch_input_view(node: Node, ctx: CudaContext) -> Sequence[CudaCall]:
    """y[n,h,w] = x[n,h+dy,w'+dx], w' mirrored with ``flip``; pixels of the edge are repeated outside the picture."""
    x, y = ctx.tensor(node.inputs[0]), ctx.tensor(node.outputs[0])
    buffers, dtype, _ = _alike(node, ctx)
    if y.shape != x.shape:
        raise ShapeError(f"{label(node)}: {y.name!r} is {y.shape}; expected {x.shape} like {x.name!r}")
    n, height, width, channels = x.shape.dims
    shift = (i32(int(bool(node.attrs["flip"]))), i32(int(node.attrs["dy"])), i32(int(node.attrs["dx"])))
    arguments: Arguments = (*buffers, i64(n * height), i32(height), i32(width), i32(channels), *shift)
    name = f"input_view_{8 * dtype.itemsize}"
    return [KernelCall("shape", name, grid_for(n * height, 1), BLOCK, arguments, label(node))]


def launch_mean_logits(node: Node, ctx: CudaContext) -> Sequence[CudaCall]:
    """The mean of one to five sets of logits, added up in their order."""
    count = len(node.inputs)
    if not 1 <= count <= MOST_LOGITS:
        raise ShapeError(f"{label(node)}: {count} sets of logits; expected 1 to {MOST_LOGITS}")
    (*logits, y), dtype, n = _alike(node, ctx)
    sets = (logits + [logits[0]] * MOST_LOGITS)[:MOST_LOGITS]
    arguments: Arguments = (*sets, y, i64(n), i32(count))
    return [KernelCall("shape", f"mean_logits_{suffix(dtype)}", grid_for(n), BLOCK, arguments, label(node))]
