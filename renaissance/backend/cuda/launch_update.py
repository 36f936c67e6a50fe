"""What ends a step: the NaN check, optimizers, moving averages, loss scale, counters, and what moves whole spans.

Kernels: ``guard.cu``, ``update.cu``, ``lars.cu``, ``range.cu`` and ``scalars.cu``. Law 5: every kernel that changes
what persists reads the flag from device memory and leaves everything as it was when it is set.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from renaissance.backend.checks import expect, of_size
from renaissance.backend.cuda.calls import (
    BLOCK,
    ONE_THREAD,
    PACK_BYTES,
    WARP,
    Arguments,
    Buffer,
    CopyCall,
    CudaCall,
    CudaContext,
    Dim,
    FillCall,
    KernelCall,
    f32,
    i32,
    i64,
    suffix,
    u32,
)
from renaissance.backend.registry import OpRegistry, label
from renaissance.core.dtype import DType
from renaissance.core.errors import DTypeError, ShapeError, ValueRejected
from renaissance.core.region import Span
from renaissance.graph.computation_graph import Node
from renaissance.graph.ops import GRADIENT_LIMIT

QUAD = 4
"""Elements that a thread takes at once (quads.cuh)."""
MOST_BLOCKS = 4096
"""Of a kernel over a span: enough for any GPU, and few enough that reading the step's scalars once per thread costs
nothing beside a large span. A property of the algorithm, not of the device: sums of squares depend on it (law 2)."""
LIMIT_BITS = struct.unpack("<I", struct.pack("<f", GRADIENT_LIMIT))[0]
"""Of the smallest gradient that raises the flag."""
LEAST_CLIP, LARGEST_CLIP = 1e-30, 1e30
WATCHED = 2
"""Spans that the NaN check takes beside the gradients."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How the kernel of an update op is called. ``scalars``: inputs before scaling and has_nan; ``decay``: what the
    kernel makes of attribute ``decay`` (1: decoupled, 2: added to the gradient)."""

    kernel: str
    scalars: tuple[str, ...]
    states: int
    decay: int = 1

    @property
    def inputs(self) -> tuple[str, ...]:
        return (*self.scalars, "scaling", "has_nan")


_MOMENTUM = ("lr", "wd", "beta")
_ADAM = ("lr", "wd", "beta", "beta2", "eps", "bias_corr1", "bias_corr2")
RULES = {
    "RANGE_UPDATE_SGD": Rule("sgd", ("lr", "wd"), 0),
    "RANGE_UPDATE_MOMENTUM": Rule("momentum", _MOMENTUM, 1),
    "RANGE_UPDATE_NESTEROV": Rule("nesterov", _MOMENTUM, 1),
    "RANGE_UPDATE_ADAM": Rule("adam", _ADAM, 2, decay=2),
    "RANGE_UPDATE_ADAMW": Rule("adam", _ADAM, 2),
}
LARS_SCALARS = ("lr", "wd", "beta", "trust", "eps", "scaling", "has_nan")
LARS_LARGEST_BLOCK = 1024
LARS_ALONE = 16384
"""Elements up to which one block does a whole tensor: four turns of a block cost less than a second launch."""
LARS_NORMS_BLOCK: Dim = (512, 1, 1)
LARS_PARTIALS = 256
"""Most pairs of partial sums, which every block of the update adds up: one for each of its threads."""
PAIR_BYTES = 16


def span_grid(items: int) -> Dim:
    """Grid for ``items`` pieces, one for each thread, up to MOST_BLOCKS blocks that walk in strides."""
    return (max(1, min(-(-items // BLOCK[0]), MOST_BLOCKS)), 1, 1)


def _scalars(node: Node, ctx: CudaContext, names: Sequence[str]) -> tuple[Buffer, ...]:
    """Buffers of the first inputs, one number each: has_nan and counters INT32, the others FP32."""
    if len(node.inputs) < len(names):
        raise ShapeError(f"{label(node)}: {len(node.inputs)} inputs; expected {len(names)}: {', '.join(names)}")
    for tensor_id, name in zip(node.inputs, names, strict=False):
        expect(node, ctx.tensor(tensor_id), DType.INT32 if name in _INTEGERS else DType.FP32, 1)
    return tuple(ctx.buffer(i) for i, _ in zip(node.inputs, names, strict=False))


def _results(node: Node, ctx: CudaContext, names: Sequence[str]) -> tuple[Buffer, ...]:
    """Buffers of the outputs, one number each."""
    for tensor_id, name in zip(node.outputs, names, strict=True):
        expect(node, ctx.tensor(tensor_id), DType.INT32 if name in _INTEGERS else DType.FP32, 1)
    return tuple(ctx.buffer(i) for i in node.outputs)


_INTEGERS = frozenset({"has_nan", "step", "dropout_step", "a", "b", "either", "good_steps"})


def _same_bytes(node: Node, ctx: CudaContext, span: Span, other: Span) -> tuple[Buffer, Buffer]:
    """Both spans; ShapeError unless they have one size."""
    first, second = ctx.span(span), ctx.span(other)
    if first.nbytes != second.nbytes:
        raise ShapeError(f"{label(node)}: span {span} has {first.nbytes} bytes but {other} has {second.nbytes}")
    return first, second


def launch_adam_step(node: Node, ctx: CudaContext) -> Sequence[CudaCall]:
    """ADAM_STEP: (has_nan, step, beta, beta2) -> (step, bias_corr1, bias_corr2)."""
    buffers = _scalars(node, ctx, ("has_nan", "step", "beta", "beta2"))
    buffers += _results(node, ctx, ("step", "bias_corr1", "bias_corr2"))
    return [KernelCall("scalars", "adam_step", *ONE_THREAD, buffers, label(node))]


def launch_dropout_advance(node: Node, ctx: CudaContext) -> Sequence[CudaCall]:
    """DROPOUT_ADVANCE: (has_nan, dropout_step) -> dropout_step."""
    buffers = _scalars(node, ctx, ("has_nan", "dropout_step")) + _results(node, ctx, ("dropout_step",))
    return [KernelCall("scalars", "dropout_advance", *ONE_THREAD, buffers, label(node))]


def launch_flag_or(node: Node, ctx: CudaContext) -> Sequence[CudaCall]:
    """FLAG_OR: (a, b) -> either."""
    buffers = _scalars(node, ctx, ("a", "b")) + _results(node, ctx, ("either",))
    return [KernelCall("scalars", "flag_or", *ONE_THREAD, buffers, label(node))]


def launch_grad_scaling(node: Node, ctx: CudaContext) -> Sequence[CudaCall]:
    """GRAD_SCALING: (has_nan, scaling, good_steps) -> (scaling, good_steps). Raises ValueRejected for a rule that
    cannot work."""
    interval = int(node.attrs.get("growth_interval", 2000))
    backoff, floor = float(node.attrs.get("backoff", 0.5)), float(node.attrs.get("floor", 1.0))
    if interval < 1 or not 0 < backoff < 1 or floor <= 0:
        raise ValueRejected(
            f"{label(node)}: growth_interval {interval}, backoff {backoff}, floor {floor}; "
            "expected an interval of at least 1, 0 < backoff < 1, floor > 0"
        )
    buffers = _scalars(node, ctx, ("has_nan", "scaling", "good_steps"))
    buffers += _results(node, ctx, ("scaling", "good_steps"))
    arguments: Arguments = (*buffers, i32(interval), f32(backoff), f32(floor))
    return [KernelCall("scalars", "grad_scaling", *ONE_THREAD, arguments, label(node))]


def launch_check_nan(node: Node, ctx: CudaContext) -> Sequence[CudaCall]:
    """RANGE_CHECK_NAN: scaling, spans (grad, watched...) -> has_nan. The flag is cleared, then one kernel looks at all
    spans; with ``clip`` > 0 it limits the gradients as well."""
    clip = float(node.attrs.get("clip", 0.0))
    if clip > 0 and not LEAST_CLIP < clip < LARGEST_CLIP:
        raise ValueRejected(f"{label(node)}: clip is {clip}; expected 1e-30 to 1e30, or <= 0 for none")
    (scaling,) = _scalars(node, ctx, ("scaling",))
    (flag,) = _results(node, ctx, ("has_nan",))
    grad, *watched = (ctx.span(span) for span in node.spans_in)
    watched = [w for w in watched if w.nbytes]
    if len(watched) > WATCHED:
        raise ShapeError(f"{label(node)}: {len(watched)} spans beside the gradients; expected at most {WATCHED}")
    watched += [grad.part(0, 0)] * (WATCHED - len(watched))
    sizes = [b.nbytes // 4 for b in (grad, *watched)]
    grid = span_grid(-(-max(sizes) // QUAD))
    if clip > 0:
        kernel, head, tail = "check_nan_and_clip", (grad, *watched, flag, scaling), f32(clip)
    else:
        kernel, head, tail = "check_nan", (grad, *watched, flag), u32(LIMIT_BITS)
    arguments: Arguments = (*head, *(i64(n) for n in sizes), tail)
    return [
        FillCall(flag, f"{label(node)} clear"),
        KernelCall("guard", kernel, grid, BLOCK, arguments, label(node)),
    ]


def launch_clear(node: Node, ctx: CudaContext) -> Sequence[CudaCall]:
    """RANGE_CLEAR: every byte of the spans becomes 0."""
    spans = [ctx.span(span) for span in node.spans_out]
    return [FillCall(span, label(node)) for span in spans if span.nbytes]


def launch_copy(node: Node, ctx: CudaContext) -> Sequence[CudaCall]:
    """RANGE_COPY: one span to another; with has_nan among the inputs only while it is 0."""
    source, target = _same_bytes(node, ctx, node.spans_in[0], node.spans_out[0])
    if not source.nbytes:
        return []
    if not node.inputs:
        return [CopyCall(target, source, label(node))]
    (has_nan,) = _scalars(node, ctx, ("has_nan",))
    arguments: Arguments = (target, source, has_nan, i64(source.nbytes))
    grid = span_grid(-(-source.nbytes // PACK_BYTES))
    return [KernelCall("range", "copy_unless", grid, BLOCK, arguments, label(node))]


def launch_cast(node: Node, ctx: CudaContext) -> Sequence[CudaCall]:
    """RANGE_CAST_FP32_TO_HALF and RANGE_CAST_HALF_TO_FP32: as many elements as the smaller span has."""
    from_span, to_span = node.spans_in[0], node.spans_out[0]
    narrow = node.op == "RANGE_CAST_FP32_TO_HALF"
    half = (to_span if narrow else from_span).first.dtype(ctx.half)
    full = (from_span if narrow else to_span).first.dtype(ctx.half)
    if full is not DType.FP32 or not half.is_half or half is not ctx.half:
        raise DTypeError(
            f"{label(node)}: spans {from_span} and {to_span} are {full.name} and {half.name}; "
            f"expected FP32 and the profile's half type ({ctx.half.name if ctx.half is not None else 'none'})"
        )
    source, target = ctx.span(from_span), ctx.span(to_span)
    n = min(source.nbytes // (4 if narrow else 2), target.nbytes // (2 if narrow else 4))
    kernel = f"cast_{'to' if narrow else 'from'}_{suffix(half)}"
    grid = span_grid(-(-n // QUAD))
    return [KernelCall("range", kernel, grid, BLOCK, (target, source, i64(n)), label(node))] if n else []


def launch_ema(node: Node, ctx: CudaContext) -> Sequence[CudaCall]:
    """RANGE_EMA_UPDATE: (ema_decay, has_nan), a span of weights -> a span of averages of the same layout."""
    if len(node.inputs) != 2 or len(node.spans_in) != 1 or len(node.spans_out) != 1:
        raise ShapeError(
            f"{label(node)}: {len(node.inputs)} scalars, {len(node.spans_in)} input and {len(node.spans_out)} output "
            "spans; expected ema_decay, has_nan, a span of weights and a span of averages"
        )
    scalars = _scalars(node, ctx, ("ema_decay", "has_nan"))
    weight, average = _same_bytes(node, ctx, node.spans_in[0], node.spans_out[0])
    n = weight.nbytes // 4
    arguments: Arguments = (average, weight, *scalars, i64(n))
    return [KernelCall("range", "ema", span_grid(-(-n // QUAD)), BLOCK, arguments, label(node))] if n else []


def launch_update(node: Node, ctx: CudaContext) -> Sequence[CudaCall]:
    """RANGE_UPDATE_*: spans (grad, moments...) -> (weight, half copy?), all FP32 spans of one layout.

    Raises ShapeError for spans or scalars that do not fit.
    """
    rule = RULES[node.op]
    if len(node.spans_in) < 1 + rule.states or not node.spans_out or len(node.inputs) != len(rule.inputs):
        raise ShapeError(
            f"{label(node)}: {len(node.inputs)} scalars ({', '.join(rule.inputs)} expected), {len(node.spans_in)} "
            f"input spans (the gradient and {rule.states} moments expected), {len(node.spans_out)} output spans"
        )
    weight_span = node.spans_out[0]
    weight = ctx.span(weight_span)
    states = [_same_bytes(node, ctx, span, weight_span)[0] for span in node.spans_in[: 1 + rule.states]]
    n = weight.nbytes // 4
    if not n:
        return []
    copy, dtype = weight.part(0, 0), DType.FP32
    for span in node.spans_out[1:]:
        if span.first.dtype(ctx.half).is_half:
            copy, dtype = ctx.span(span), span.first.dtype(ctx.half)
            if 2 * copy.nbytes != weight.nbytes:
                raise ShapeError(f"{label(node)}: span {span} has {copy.nbytes} bytes; expected {weight.nbytes // 2}")
    decay = rule.decay if node.attrs["decay"] else 0
    arguments: Arguments = (weight, *states, copy, *_scalars(node, ctx, rule.inputs), i32(decay), i64(n))
    kernel = f"{rule.kernel}_{suffix(dtype)}"
    return [KernelCall("update", kernel, span_grid(-(-n // QUAD)), BLOCK, arguments, label(node))]


def launch_lars(node: Node, ctx: CudaContext) -> Sequence[CudaCall]:
    """LARS_UPDATE: (scalars, grad) -> (weight, m, ratio[, half copy of the weight])."""
    if len(node.inputs) != len(LARS_SCALARS) + 1 or len(node.outputs) not in (3, 4):
        raise ShapeError(
            f"{label(node)}: {len(node.inputs)} inputs and {len(node.outputs)} outputs; expected "
            f"({', '.join(LARS_SCALARS)}, grad) and (weight, m, ratio, [half])"
        )
    *numbers, has_nan = _scalars(node, ctx, LARS_SCALARS)
    weight, m, ratio, *half = (ctx.tensor(i) for i in node.outputs)
    n = expect(node, weight, DType.FP32).shape.numel
    for tensor in (ctx.tensor(node.inputs[-1]), m):
        expect(node, tensor, DType.FP32, n)
    expect(node, ratio, DType.FP32, 1)
    w, g = ctx.buffer(weight.id), ctx.buffer(node.inputs[-1])
    copy, dtype = w.part(0, 0), DType.FP32
    for tensor in half:
        if not tensor.dtype.is_half:
            raise DTypeError(f"{label(node)}: tensor {tensor.name!r} is {tensor.dtype.name}; expected FP16 or BF16")
        copy, dtype = ctx.buffer(of_size(node, tensor, n).id), tensor.dtype

    operands = (w, ctx.buffer(m.id), ctx.buffer(ratio.id), copy, g)
    tail = (i32(int(bool(node.attrs["nesterov"]))), i64(n))
    kernel = f"lars_update_{suffix(dtype)}"
    if n <= LARS_ALONE:
        arguments: Arguments = (*operands, g.part(0, 0), *numbers, has_nan, i32(0), *tail)
        threads = min(-(-n // (QUAD * WARP)) * WARP, LARS_LARGEST_BLOCK)
        return [KernelCall("lars", kernel, (1, 1, 1), (threads, 1, 1), arguments, label(node))]
    blocks = min(-(-n // (QUAD * LARS_NORMS_BLOCK[0])), LARS_PARTIALS)
    partials = ctx.scratch(PAIR_BYTES * blocks)
    norms: Arguments = (w, g, has_nan, partials, i64(n))
    arguments = (*operands, partials, *numbers, has_nan, i32(blocks), *tail)
    return [
        KernelCall("lars", "lars_norms", (blocks, 1, 1), LARS_NORMS_BLOCK, norms, f"{label(node)} norms"),
        KernelCall("lars", kernel, span_grid(-(-n // QUAD)), BLOCK, arguments, label(node)),
    ]


def register(registry: OpRegistry) -> None:
    """Add the launchers of this module to ``registry``."""
    registry.register("ADAM_STEP", "cuda", launch_adam_step)
    registry.register("DROPOUT_ADVANCE", "cuda", launch_dropout_advance)
    registry.register("FLAG_OR", "cuda", launch_flag_or)
    registry.register("GRAD_SCALING", "cuda", launch_grad_scaling)
    registry.register("RANGE_CHECK_NAN", "cuda", launch_check_nan)
    registry.register("RANGE_CLEAR", "cuda", launch_clear)
    registry.register("RANGE_COPY", "cuda", launch_copy)
    registry.register("RANGE_CAST_FP32_TO_HALF", "cuda", launch_cast)
    registry.register("RANGE_CAST_HALF_TO_FP32", "cuda", launch_cast)
    registry.register("RANGE_EMA_UPDATE", "cuda", launch_ema)
    for op in RULES:
        registry.register(op, "cuda", launch_update)
    registry.register("LARS_UPDATE", "cuda", launch_lars)
