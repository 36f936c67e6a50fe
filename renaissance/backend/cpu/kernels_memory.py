"""Kernels that move or convert bytes: copies, clears, casts and flatten."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from renaissance.backend.checks import expect, of_size
from renaissance.backend.cpu.intrinsics import ARGS, i32, my_range, u8, u16, u32, words
from renaissance.backend.cpu.kernels_common import BLOCK, Kernel, bf16_bits, same_type, team_for
from renaissance.backend.cpu.queue import kernel_call
from renaissance.backend.registry import Call, CaptureContext, OpRegistry, label
from renaissance.core.dtype import DType
from renaissance.core.errors import DTypeError, MissingKernelError, ShapeError
from renaissance.graph.computation_graph import Node

BYTES_BLOCK = 4 * BLOCK


@Kernel
def clear_bytes(address):  # type: ignore[no-untyped-def]  # words: destination, bytes
    ctx = words(address)
    start, stop = my_range(ctx, ctx[ARGS + 1], BYTES_BLOCK)
    out = u8(ctx[ARGS] + start, stop - start)
    for i in range(stop - start):
        out[i] = 0


@Kernel
def copy_bytes(address):  # type: ignore[no-untyped-def]  # words: source, destination, bytes (no overlap), has_nan or 0
    """Copies nothing when there is a flag and it is raised (law 5)."""
    ctx = words(address)
    if ctx[ARGS + 3] != 0 and i32(ctx[ARGS + 3], 1)[0] != 0:
        return
    start, stop = my_range(ctx, ctx[ARGS + 2], BYTES_BLOCK)
    source, out = u8(ctx[ARGS] + start, stop - start), u8(ctx[ARGS + 1] + start, stop - start)
    for i in range(stop - start):
        out[i] = source[i]


@Kernel
def cast_fp32_to_bf16(address):  # type: ignore[no-untyped-def]  # words: float32 source, bfloat16 destination, elements
    ctx = words(address)
    start, stop = my_range(ctx, ctx[ARGS + 2], BLOCK)
    n = stop - start
    source, out = u32(ctx[ARGS] + 4 * start, n), u16(ctx[ARGS + 1] + 2 * start, n)
    for i in range(n):
        out[i] = bf16_bits(source[i])


@Kernel
def cast_bf16_to_fp32(address):  # type: ignore[no-untyped-def]  # words: bfloat16 source, float32 destination, elements
    ctx = words(address)
    start, stop = my_range(ctx, ctx[ARGS + 2], BLOCK)
    n = stop - start
    source, out = u16(ctx[ARGS] + 2 * start, n), u32(ctx[ARGS + 1] + 4 * start, n)
    for i in range(n):
        out[i] = np.uint32(source[i]) << np.uint32(16)


def launch_label_copy(node: Node, ctx: CaptureContext) -> Sequence[Call]:
    source, out = ctx.tensor(node.inputs[0]), ctx.tensor(node.outputs[0])
    for tensor in (source, out):
        if tensor.dtype is not DType.INT32:
            raise DTypeError(f"{label(node)}: tensor {tensor.name!r} is {tensor.dtype.name}; expected INT32")
    of_size(node, out, source.shape.numel)
    return [kernel_call(copy_bytes, (ctx.ptr(source.id), ctx.ptr(out.id), source.nbytes, 0), label(node))]


def launch_flatten(node: Node, ctx: CaptureContext) -> Sequence[Call]:
    """FLATTEN_FWD and FLATTEN_BWD: the same elements in another shape."""
    source, out = ctx.tensor(node.inputs[0]), ctx.tensor(node.outputs[0])
    same_type(node, ctx, source.id, out.id)
    if source.shape.numel != out.shape.numel:
        raise ShapeError(f"{label(node)}: {source.name!r} is {source.shape} but {out.name!r} is {out.shape}")
    threads = team_for(ctx, out.shape.numel)
    arguments = (ctx.ptr(source.id), ctx.ptr(out.id), source.nbytes, 0)
    return [kernel_call(copy_bytes, arguments, label(node), threads=threads)]


def launch_range_clear(node: Node, ctx: CaptureContext) -> Sequence[Call]:
    calls = []
    for span in node.spans_out:
        address, nbytes = ctx.span_ptr(span)
        if nbytes:
            calls.append(kernel_call(clear_bytes, (address, nbytes), label(node), threads=team_for(ctx, nbytes // 4)))
    return calls


def launch_range_copy(node: Node, ctx: CaptureContext) -> Sequence[Call]:
    (source, from_bytes), (out, to_bytes) = ctx.span_ptr(node.spans_in[0]), ctx.span_ptr(node.spans_out[0])
    if from_bytes != to_bytes:
        raise ShapeError(
            f"{label(node)}: span {node.spans_in[0]} has {from_bytes} bytes but {node.spans_out[0]} has {to_bytes}"
        )
    if not from_bytes:
        return []
    guard = ctx.ptr(expect(node, ctx.tensor(node.inputs[0]), DType.INT32, 1).id) if node.inputs else 0
    threads = team_for(ctx, from_bytes // 4)
    return [kernel_call(copy_bytes, (source, out, from_bytes, guard), label(node), threads=threads)]


def launch_cast_to_half(node: Node, ctx: CaptureContext) -> Sequence[Call]:
    (source, from_bytes), (out, to_bytes) = ctx.span_ptr(node.spans_in[0]), ctx.span_ptr(node.spans_out[0])
    n = _cast_elements(node, ctx, from_bytes // 4, to_bytes // 2)
    threads = team_for(ctx, n)
    return [kernel_call(cast_fp32_to_bf16, (source, out, n), label(node), threads=threads)] if n else []


def launch_cast_to_fp32(node: Node, ctx: CaptureContext) -> Sequence[Call]:
    (source, from_bytes), (out, to_bytes) = ctx.span_ptr(node.spans_in[0]), ctx.span_ptr(node.spans_out[0])
    n = _cast_elements(node, ctx, to_bytes // 4, from_bytes // 2)
    threads = team_for(ctx, n)
    return [kernel_call(cast_bf16_to_fp32, (source, out, n), label(node), threads=threads)] if n else []


def _cast_elements(node: Node, ctx: CaptureContext, full: int, half: int) -> int:
    if ctx.half is not DType.BF16:
        name = ctx.half.name.lower() if ctx.half is not None else "no half type"
        raise MissingKernelError(f"{label(node)}: the CPU kernels cast fp32 and bf16 only; the graph uses {name}")
    return min(full, half)


def register(registry: OpRegistry) -> None:
    """Add the launchers of this module to ``registry``."""
    registry.register("LABEL_COPY", "cpu", launch_label_copy)
    registry.register("FLATTEN_FWD", "cpu", launch_flatten)
    registry.register("FLATTEN_BWD", "cpu", launch_flatten)
    registry.register("RANGE_CLEAR", "cpu", launch_range_clear)
    registry.register("RANGE_COPY", "cpu", launch_range_copy)
    registry.register("RANGE_CAST_FP32_TO_HALF", "cpu", launch_cast_to_half)
    registry.register("RANGE_CAST_HALF_TO_FP32", "cpu", launch_cast_to_fp32)
