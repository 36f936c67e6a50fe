"""Convolutions of this backend: CONV_FWD, CONV_BWD_WEIGHT, CONV_BWD_DATA and CONV_INF through cuDNN.

cuDNN writes a result in the type of its operands. Bias, residual and activation are one pass of ours over it, in place;
a weight gradient in a half type is widened.

In validation the folded weights (w * eq_scale, rounded once) and the folded bias (eq_bias + b * eq_scale) are made by
``ctx.prepare`` calls, which run when weights have changed: a validation step is a convolution and one pass.
"""

from __future__ import annotations

from renaissance.backend.checks import convolution_of, expect, of_size
from renaissance.backend.convolution import Direction
from renaissance.backend.cuda.calls import (
    BLOCK,
    Arguments,
    Buffer,
    CudaCall,
    CudaContext,
    KernelCall,
    grid_for,
    i32,
    suffix,
)
from renaissance.backend.cuda.checks import fused_activation, same_float
from renaissance.backend.cuda.dense import Finish, library_call, pieces, weight_gradient
from renaissance.backend.cuda.libraries import ConvolutionSpec
from renaissance.backend.registry import OpRegistry, label
from renaissance.core.dtype import DType
from renaissance.graph.computation_graph import Node
from renaissance.tensor.dtensor import DTensor


def register(registry: OpRegistry) -> None:
    """Add the launchers of the convolutions to ``registry``."""
    registry.register("CONV_FWD", "cuda", launch_conv_fwd)
    registry.register("CONV_BWD_WEIGHT", "cuda", launch_conv_bwd_weight)
    registry.register("CONV_BWD_DATA", "cuda", launch_conv_bwd_data)
    registry.register("CONV_INF", "cuda", launch_conv_inf)


def launch_conv_fwd(node: Node, ctx: CudaContext) -> list[CudaCall]:
    """y = act(conv(x, w) + b); x, w, y of one float type, b FP32."""
    x, w, y = ctx.tensor(node.inputs[0]), ctx.tensor(node.inputs[1]), ctx.tensor(node.outputs[0])
    dtype = same_float(node, ctx, x.id, w.id, y.id)
    spec = convolution_spec(node, Direction.FORWARD, x, w, y, dtype)
    b = _vector(node, ctx, node.inputs[2], spec.k) if len(node.inputs) > 2 else None
    return _forward(node, ctx, spec, (ctx.buffer(x.id), ctx.buffer(w.id), ctx.buffer(y.id)), b, None)


def launch_conv_bwd_data(node: Node, ctx: CudaContext) -> list[CudaCall]:
    """dx from dy and w; dy, w, dx of one float type."""
    dy, w, dx = ctx.tensor(node.inputs[0]), ctx.tensor(node.inputs[1]), ctx.tensor(node.outputs[0])
    dtype = same_float(node, ctx, dy.id, w.id, dx.id)
    plan = ctx.convolutions.plan(convolution_spec(node, Direction.DATA, dx, w, dy, dtype))
    (workspace,) = pieces(ctx, plan.workspace)
    return [library_call(plan, (ctx.buffer(dy.id), ctx.buffer(w.id), ctx.buffer(dx.id)), workspace, label(node))]


def launch_conv_bwd_weight(node: Node, ctx: CudaContext) -> list[CudaCall]:
    """dw and db from dy and x; FP32, overwritten."""
    dy, x, dw = ctx.tensor(node.inputs[0]), ctx.tensor(node.inputs[1]), ctx.tensor(node.outputs[0])
    dtype = same_float(node, ctx, dy.id, x.id)
    expect(node, dw, DType.FP32)
    spec = convolution_spec(node, Direction.WEIGHT, x, dw, dy, dtype)
    plan = ctx.convolutions.plan(spec)
    operands = (ctx.buffer(dy.id), ctx.buffer(x.id), ctx.buffer(dw.id))
    return weight_gradient(node, ctx, plan, spec.dtype, operands, spec.n * spec.out_h * spec.out_w)


def launch_conv_inf(node: Node, ctx: CudaContext) -> list[CudaCall]:
    """y = act((conv(x, w) + b) * eq_scale + eq_bias + residual); per-channel vectors FP32."""
    x, w, y = ctx.tensor(node.inputs[0]), ctx.tensor(node.inputs[1]), ctx.tensor(node.outputs[0])
    dtype = same_float(node, ctx, x.id, w.id, y.id)
    spec = convolution_spec(node, Direction.FORWARD, x, w, y, dtype)
    rest = list(node.inputs[4:])
    vectors = list(node.inputs[2:4]) + ([rest.pop(0)] if node.attrs["bias"] else [])
    scale, eq_bias, *b = (_vector(node, ctx, i, spec.k) for i in vectors)
    residual = None
    if node.attrs["residual"]:
        same_float(node, ctx, y.id, rest[0])
        residual = ctx.buffer(of_size(node, ctx.tensor(rest[0]), y.shape.numel).id)
    source = (w.id, *vectors)
    weights = ctx.shared(("CONV_INF weights", source), w.nbytes)
    bias = ctx.shared(("CONV_INF bias", source), 4 * spec.k)
    fold_w: Arguments = (ctx.buffer(w.id), scale, weights, i32(w.shape.numel // spec.k))
    fold_b: Arguments = (eq_bias, b[0] if b else eq_bias, scale, bias, i32(spec.k), i32(len(b)))
    name = f"{label(node)} fold"
    ctx.prepare(
        ("CONV_INF", source),
        [
            KernelCall("dense", f"fold_weights_{suffix(dtype)}", (spec.k, 1, 1), BLOCK, fold_w, name),
            KernelCall("dense", "fold_bias", grid_for(spec.k), BLOCK, fold_b, name),
        ],
    )
    return _forward(node, ctx, spec, (ctx.buffer(x.id), weights, ctx.buffer(y.id)), bias, residual)


def _forward(
    node: Node,
    ctx: CudaContext,
    spec: ConvolutionSpec,
    operands: tuple[Buffer, Buffer, Buffer],
    bias: Buffer | None,
    residual: Buffer | None,
) -> list[CudaCall]:
    """y = act(conv(x, w) + bias + residual)."""
    plan = ctx.convolutions.plan(spec)
    (workspace,) = pieces(ctx, plan.workspace)
    calls: list[CudaCall] = [library_call(plan, operands, workspace, label(node))]
    activation = fused_activation(node)
    if bias is not None or residual is not None or activation:
        y, rows = operands[2], spec.n * spec.out_h * spec.out_w
        finish = Finish(y, y, rows, spec.k, spec.dtype, bias, residual, activation)
        calls.append(finish.call(label(node)))
    return calls


def convolution_spec(
    node: Node, direction: Direction, x: DTensor, w: DTensor, y: DTensor, dtype: DType
) -> ConvolutionSpec:
    """The spec of a convolution from its tensors (or their gradients). Raises ShapeError when they do not fit."""
    stride, pad, groups = convolution_of(node, x, w, y)
    n, h, width, c = x.shape.dims
    k, r, s, _ = w.shape.dims
    return ConvolutionSpec(direction, n, h, width, c, k, r, s, stride, pad, groups, dtype)


def _vector(node: Node, ctx: CudaContext, tensor_id: int, channels: int) -> Buffer:
    """An FP32 vector of one number per channel."""
    return ctx.buffer(expect(node, ctx.tensor(tensor_id), DType.FP32, channels).id)
