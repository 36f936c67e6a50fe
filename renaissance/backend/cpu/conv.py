"""Convolutions of the CPU backend: CONV_FWD, CONV_BWD_WEIGHT, CONV_BWD_DATA and CONV_INF.

A launcher reads the sizes from the node's tensors, asks ``conv_choice`` for an algorithm and binds it. In training the
weights are packed by the node itself, in every step, into scratch memory. In validation the folded weights
(w * eq_scale, rounded once) and the folded bias (eq_bias + b * eq_scale) are made and packed by ``ctx.prepare`` calls,
which run when weights have changed: a validation step packs nothing, and all nodes that want the same layout of the
same weights share one copy.
"""

from __future__ import annotations

from renaissance.backend.checks import convolution_of, expect, of_size
from renaissance.backend.convolution import Direction
from renaissance.backend.cpu.conv_algorithms import BackwardData, Forward, Job, finish_call
from renaissance.backend.cpu.conv_choice import backward_data, backward_weight, forward
from renaissance.backend.cpu.conv_kernels import FINISH_RELU6, fold_bias, fold_weights
from renaissance.backend.cpu.kernels_common import is_half
from renaissance.backend.cpu.onednn_primitives import ConvShape
from renaissance.backend.cpu.queue import kernel_call
from renaissance.backend.registry import Call, CaptureContext, OpRegistry, label
from renaissance.core.dtype import DType
from renaissance.core.errors import DTypeError, ValueRejected
from renaissance.core.region import align
from renaissance.graph.computation_graph import Node
from renaissance.tensor.dtensor import DTensor

ACTIVATIONS = ("none", "relu", "relu6")


def register(registry: OpRegistry) -> None:
    """Add the launchers of the convolutions to ``registry``."""
    registry.register("CONV_FWD", "cpu", launch_conv_fwd)
    registry.register("CONV_BWD_WEIGHT", "cpu", launch_conv_bwd_weight)
    registry.register("CONV_BWD_DATA", "cpu", launch_conv_bwd_data)
    registry.register("CONV_INF", "cpu", launch_conv_inf)


def launch_conv_fwd(node: Node, ctx: CaptureContext) -> list[Call]:
    """y = act(conv(x, w) + b); x, w, y of one float type, b FP32."""
    x, w, y = ctx.tensor(node.inputs[0]), ctx.tensor(node.inputs[1]), ctx.tensor(node.outputs[0])
    shape = conv_shape(node, x, w, y)
    b = _vector(node, ctx, node.inputs[2], shape.k) if len(node.inputs) > 2 else 0
    activation = _activation(node)
    job = _job(Direction.FORWARD, node, ctx, shape, x, w, y, bias=bool(b), relu=activation == "relu")
    algorithm = forward(job)
    calls, weights, free = _packed_before(ctx, w, algorithm) if ctx.validating else _packed(ctx, w, algorithm)
    calls += algorithm.run(ctx.ptr(x.id), weights, b, 0, ctx.ptr(y.id), free)
    if activation == "relu6":
        calls.append(finish_call(job, ctx.ptr(y.id), 0, FINISH_RELU6))
    return calls


def _packed(ctx: CaptureContext, w: DTensor, algorithm: Forward | BackwardData) -> tuple[list[Call], int, int]:
    """(calls that pack the weights in the step, address of the packed weights, address of free scratch)."""
    packed_bytes = align(algorithm.packed_bytes)
    packed = ctx.scratch(packed_bytes + algorithm.scratch_bytes)
    if not packed_bytes:
        return [], ctx.ptr(w.id), packed
    free = packed + packed_bytes
    return algorithm.pack(ctx.ptr(w.id), packed, free), packed, free


def _packed_before(ctx: CaptureContext, w: DTensor, algorithm: Forward) -> tuple[list[Call], int, int]:
    """The same in validation: weights are packed before the step, once for all nodes that want this layout of them."""
    free = ctx.scratch(algorithm.scratch_bytes)
    if not algorithm.packed_bytes:
        return [], ctx.ptr(w.id), free
    key = ("CONV_FWD weights", w.id, algorithm.layout)
    packed = ctx.shared(key, algorithm.packed_bytes)
    ctx.prepare(key, algorithm.pack(ctx.ptr(w.id), packed, free))
    return [], packed, free


def launch_conv_bwd_data(node: Node, ctx: CaptureContext) -> list[Call]:
    """dx from dy and w; dy, w, dx of one float type."""
    dy, w, dx = ctx.tensor(node.inputs[0]), ctx.tensor(node.inputs[1]), ctx.tensor(node.outputs[0])
    shape = conv_shape(node, dx, w, dy)
    algorithm = backward_data(_job(Direction.DATA, node, ctx, shape, dy, w, dx))
    calls, weights, free = _packed(ctx, w, algorithm)
    return [*calls, *algorithm.run(ctx.ptr(dy.id), weights, ctx.ptr(dx.id), free)]


def launch_conv_bwd_weight(node: Node, ctx: CaptureContext) -> list[Call]:
    """dw and db from dy and x; FP32, overwritten."""
    dy, x, dw = ctx.tensor(node.inputs[0]), ctx.tensor(node.inputs[1]), ctx.tensor(node.outputs[0])
    shape = conv_shape(node, x, dw, dy)
    expect(node, dw, DType.FP32)
    db = _vector(node, ctx, node.outputs[1], shape.k) if len(node.outputs) > 1 else 0
    algorithm = backward_weight(_job(Direction.WEIGHT, node, ctx, shape, x, dy, bias=bool(db)))
    scratch = ctx.scratch(algorithm.scratch_bytes)
    return algorithm.run(ctx.ptr(x.id), ctx.ptr(dy.id), ctx.ptr(dw.id), db, scratch)


def launch_conv_inf(node: Node, ctx: CaptureContext) -> list[Call]:
    """y = act((conv(x, w) + b) * eq_scale + eq_bias + residual); per-channel vectors FP32."""
    x, w, y = ctx.tensor(node.inputs[0]), ctx.tensor(node.inputs[1]), ctx.tensor(node.outputs[0])
    shape = conv_shape(node, x, w, y)
    rest = list(node.inputs[4:])
    vectors = list(node.inputs[2:4]) + ([rest.pop(0)] if node.attrs["bias"] else [])
    scale, eq_bias, *b = (_vector(node, ctx, i, shape.k) for i in vectors)
    residual = 0
    operands = [x, w, y]
    if node.attrs["residual"]:
        tensor = of_size(node, ctx.tensor(rest.pop(0)), shape.outputs)
        residual = ctx.ptr(tensor.id)
        operands.append(tensor)
    activation = _activation(node)
    job = _job(
        Direction.FORWARD, node, ctx, shape, *operands,
        bias=True, residual=bool(node.attrs["residual"]), relu=activation == "relu", training=False,
    )  # fmt: skip
    algorithm = forward(job)
    plain_bytes = align(shape.weights * job.dtype.itemsize)
    packed_bytes = algorithm.packed_bytes or plain_bytes
    free = ctx.scratch(plain_bytes + algorithm.scratch_bytes)
    source = (w.id, *vectors)
    packed = ctx.shared(("CONV_INF weights", source, algorithm.layout), packed_bytes)
    bias = ctx.shared(("CONV_INF bias", source), 4 * shape.k)
    folded = free if algorithm.packed_bytes else packed
    name = f"{label(node)} fold"
    per = shape.weights // shape.k
    fold: list[Call] = [
        kernel_call(
            fold_weights, (ctx.ptr(w.id), scale, folded, shape.k, per, int(job.half)), name,
            threads=job.team(shape.weights),
        ),
        kernel_call(fold_bias, (eq_bias, b[0] if b else 0, scale, bias, shape.k), name),
    ]  # fmt: skip
    if algorithm.packed_bytes:
        fold += algorithm.pack(folded, packed, free + plain_bytes)
    ctx.prepare(("CONV_INF", source, algorithm.layout), fold)
    calls = algorithm.run(ctx.ptr(x.id), packed, bias, residual, ctx.ptr(y.id), free)
    if activation == "relu6":
        calls.append(finish_call(job, ctx.ptr(y.id), 0, FINISH_RELU6))
    return calls


def conv_shape(node: Node, x: DTensor, w: DTensor, y: DTensor) -> ConvShape:
    """The sizes of a convolution from its tensors (or their gradients). Raises ShapeError when they do not fit."""
    stride, pad, groups = convolution_of(node, x, w, y)
    n, h, width, c = x.shape.dims
    k, r, s, _ = w.shape.dims
    _, ho, wo, _ = y.shape.dims
    return ConvShape(n, h, width, c, k, r, s, stride, pad, groups, ho, wo)


def _job(
    direction: Direction,
    node: Node,
    ctx: CaptureContext,
    shape: ConvShape,
    *tensors: DTensor,
    bias: bool = False,
    residual: bool = False,
    relu: bool = False,
    training: bool = True,
) -> Job:
    for tensor in tensors:
        is_half(node, tensor)
        if tensor.dtype is not tensors[0].dtype:
            raise DTypeError(
                f"{label(node)}: tensor {tensor.name!r} is {tensor.dtype.name}; expected {tensors[0].dtype.name} "
                f"as {tensors[0].name!r}"
            )
    return Job(direction, shape, tensors[0].dtype, ctx.threads, label(node), bias, residual, relu, training)


def _vector(node: Node, ctx: CaptureContext, tensor_id: int, channels: int) -> int:
    """Address of an FP32 vector of one number per channel."""
    return ctx.ptr(expect(node, ctx.tensor(tensor_id), DType.FP32, channels).id)


def _activation(node: Node) -> str:
    value = node.attrs["activation"]
    if value not in ACTIVATIONS:
        raise ValueRejected(f"{label(node)}: activation {value!r}; expected one of: {', '.join(ACTIVATIONS)}")
    return str(value)
