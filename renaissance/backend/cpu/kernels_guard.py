"""The scalar kernels of a step: NaN check and clipping, loss scaling, Adam's step count, metric sums.

The one flag ``has_nan`` is raised here and read by everything that persists (law 5): a flagged step leaves no trace
except the loss scale.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from renaissance.backend.checks import expect
from renaissance.backend.cpu.intrinsics import ARGS, f32, i32, my_range, u32, words
from renaissance.backend.cpu.kernels_common import BLOCK, Kernel, team_for
from renaissance.backend.cpu.kernels_memory import clear_bytes
from renaissance.backend.cpu.queue import kernel_call
from renaissance.backend.registry import Call, CaptureContext, OpRegistry, label
from renaissance.core.dtype import DType
from renaissance.core.errors import ShapeError, ValueRejected
from renaissance.graph.computation_graph import Node

TO_INF = 0x80000000 - 0x7F800000
"""What is missing to bit 31 from the exponent bits of NaN and Inf ..."""
TO_LIMIT = 0x80000000 - 0x5F000000
"""... and from those of 2**63 (``graph.ops.GRADIENT_LIMIT``)."""
GROWTH = 2.0
"""Factor of the loss scale after ``growth_interval`` clean steps in a row."""
ROUNDING = 2.0**-24
"""Largest relative error of rounding to float32."""
LARGEST_SCALE = 2.0**31
"""The scale stays a power of two far from overflow, so that 1 / scale is exact."""


@Kernel
def check_nan(address):  # type: ignore[no-untyped-def]  # words: values, elements, has_nan, scaling, clip (float64 bits), watched
    """Raise the flag for NaN, Inf and (when nothing is clamped) GRADIENT_LIMIT; clamp to +-clip * scaling, clip > 0.

    What is only watched (losses, BN statistics) raises it for NaN and Inf alone and is never changed."""
    ctx = words(address)
    start, stop = my_range(ctx, ctx[ARGS + 1], BLOCK)
    clip = np.int64(ctx[ARGS + 4]).view(np.float64)
    limit = np.float32(0)
    carry = np.uint32(TO_LIMIT)
    if ctx[ARGS + 5] != 0 or clip > 0.0:
        carry = np.uint32(TO_INF)
    if clip > 0.0:
        limit = np.float32(clip) * f32(ctx[ARGS + 3], 1)[0]
    found = np.uint32(0)
    for at in range(start, stop, BLOCK):
        n = min(BLOCK, stop - at)
        bits = u32(ctx[ARGS] + 4 * at, n)
        for i in range(n):  # the addition carries into bit 31 exactly from the exponent on that is to be found
            carried = np.uint32(np.uint32(bits[i] & np.uint32(0x7F800000)) + carry)
            found = np.uint32(found | carried)  # without the casts Numba computes in 64 bits: half the lanes
        if clip > 0.0:
            grad = f32(ctx[ARGS] + 4 * at, n)
            for i in range(n):
                grad[i] = min(max(grad[i], -limit), limit)
    if (found >> np.uint32(31)) != 0:
        i32(ctx[ARGS + 2], 1)[0] = 1


@Kernel
def scale_loss(address):  # type: ignore[no-untyped-def]  # words: has_nan, scaling, good steps, interval, backoff, floor (float64 bits)
    ctx = words(address)
    scaling, good = f32(ctx[ARGS + 1], 1), i32(ctx[ARGS + 2], 1)
    if i32(ctx[ARGS], 1)[0] != 0:
        backoff, floor = np.int64(ctx[ARGS + 4]).view(np.float64), np.int64(ctx[ARGS + 5]).view(np.float64)
        scaling[0] = np.float32(max(floor, scaling[0] * backoff))
        good[0] = 0
        return
    good[0] += 1
    if good[0] >= ctx[ARGS + 3]:
        scaling[0] = np.float32(min(np.float64(LARGEST_SCALE), scaling[0] * GROWTH))
        good[0] = 0


@Kernel
def adam_step(address):  # type: ignore[no-untyped-def]  # words: has_nan, step, beta1, beta2, new step, correction 1, correction 2
    """t <- t + 1 and 1 / (1 - beta**t), in float64 with exact-by-order squaring; nothing when the flag is raised."""
    ctx = words(address)
    if i32(ctx[ARGS], 1)[0] != 0:
        return
    step = i32(ctx[ARGS + 1], 1)[0] + 1
    i32(ctx[ARGS + 4], 1)[0] = step
    for k in range(2):
        base = np.float64(f32(ctx[ARGS + 2 + k], 1)[0])
        power, left = 1.0, step
        while left > 0:
            if left & 1:
                power *= base
            base *= base
            left >>= 1
        f32(ctx[ARGS + 5 + k], 1)[0] = np.float32(1.0 / (1.0 - power))


@Kernel
def accumulate_metrics(address):  # type: ignore[no-untyped-def]  # words: valid, has_nan or 0, count, count is int, pairs, (value, sum)...
    """sum += valid * value, rounded once; a product within float32's rounding of a whole number is that number. So the
    sums of rates (hits / valid) are the whole numbers of hits they stand for, up to 2**24."""
    ctx = words(address)
    if ctx[ARGS + 1] != 0 and i32(ctx[ARGS + 1], 1)[0] != 0:
        return
    valid = i32(ctx[ARGS], 1)[0]
    if ctx[ARGS + 3] != 0:
        i32(ctx[ARGS + 2], 1)[0] += valid
    else:
        f32(ctx[ARGS + 2], 1)[0] += np.float32(valid)
    for pair in range(ctx[ARGS + 4]):
        at = ARGS + 5 + 2 * pair
        value = np.float64(valid) * np.float64(f32(ctx[at], 1)[0])
        whole = np.floor(value + 0.5)
        if abs(value - whole) <= abs(value) * ROUNDING:
            value = whole
        total = f32(ctx[at + 1], 1)
        total[0] = np.float32(np.float64(total[0]) + value)


@Kernel
def or_flags(address):  # type: ignore[no-untyped-def]  # words: flags a, b and either (int32)
    ctx = words(address)
    either = i32(ctx[ARGS], 1)[0] | i32(ctx[ARGS + 1], 1)[0]
    i32(ctx[ARGS + 2], 1)[0] = 1 if either != 0 else 0


def float_word(value: float) -> int:
    """A float64 constant as the int64 word with the same bits."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def launch_check_nan(node: Node, ctx: CaptureContext) -> Sequence[Call]:
    """Clear the flag (serial), then let the team look; any thread may raise it, all write the same 1."""
    flag = expect(node, ctx.tensor(node.outputs[0]), DType.INT32, 1)
    scaling = expect(node, ctx.tensor(node.inputs[0]), DType.FP32, 1)
    clip = float(node.attrs.get("clip", 0.0))
    if clip > 0 and not 1e-30 < clip < 1e30:
        raise ValueRejected(f"{label(node)}: clip is {clip}; expected 1e-30 to 1e30, or <= 0 for none")
    calls: list[Call] = [kernel_call(clear_bytes, (ctx.ptr(flag.id), 4), f"{label(node)} clear")]
    for position, span in enumerate(node.spans_in):  # the gradients, then what is only watched
        address, nbytes = ctx.span_ptr(span)
        watched = int(position > 0)
        limit = float_word(0.0 if watched else clip)
        arguments = (address, nbytes // 4, ctx.ptr(flag.id), ctx.ptr(scaling.id), limit, watched)
        if nbytes:
            threads = team_for(ctx, nbytes // 4)
            calls.append(kernel_call(check_nan, arguments, label(node), threads=threads))
    return calls


def launch_grad_scaling(node: Node, ctx: CaptureContext) -> Sequence[Call]:
    has_nan, scaling, good_steps = (ctx.ptr(i) for i in node.inputs[:3])
    interval, backoff, floor = loss_scale_rule(node)
    arguments = (has_nan, scaling, good_steps, interval, float_word(backoff), float_word(floor))
    return [kernel_call(scale_loss, arguments, label(node))]


def loss_scale_rule(node: Node) -> tuple[int, float, float]:
    """(growth interval, backoff, floor) of a GRAD_SCALING node; ValueRejected outside the allowed ranges."""
    interval = int(node.attrs.get("growth_interval", 2000))
    backoff, floor = float(node.attrs.get("backoff", 0.5)), float(node.attrs.get("floor", 1.0))
    if interval < 1 or not 0 < backoff < 1 or floor <= 0:
        raise ValueRejected(
            f"{label(node)}: growth_interval {interval}, backoff {backoff}, floor {floor}; "
            "expected an interval of at least 1, 0 < backoff < 1, floor > 0"
        )
    return interval, backoff, floor


def launch_flag_or(node: Node, ctx: CaptureContext) -> Sequence[Call]:
    flags = [expect(node, ctx.tensor(i), DType.INT32, 1) for i in (*node.inputs[:2], node.outputs[0])]
    return [kernel_call(or_flags, [ctx.ptr(flag.id) for flag in flags], label(node))]


def launch_adam_step(node: Node, ctx: CaptureContext) -> Sequence[Call]:
    return [kernel_call(adam_step, [ctx.ptr(i) for i in (*node.inputs[:4], *node.outputs[:3])], label(node))]


def launch_accumulate(node: Node, ctx: CaptureContext) -> Sequence[Call]:
    """ACCUM_METRICS: inputs (batch_valid, loss, top1, top5[, has_nan]), outputs (their sums, count)."""
    valid, values, guard, sums, count = metric_operands(node)
    counter = ctx.tensor(count)
    if counter.dtype not in (DType.FP32, DType.INT32):
        raise ShapeError(f"{label(node)}: count {counter.name!r} is {counter.dtype.name}; expected FP32 or INT32")
    arguments = [
        ctx.ptr(valid),
        0 if guard is None else ctx.ptr(guard),
        ctx.ptr(count),
        int(counter.dtype is DType.INT32),
        len(values),
    ]
    for value, total in zip(values, sums, strict=True):
        arguments += [ctx.ptr(value), ctx.ptr(total)]
    return [kernel_call(accumulate_metrics, arguments, label(node))]


def metric_operands(node: Node) -> tuple[int, tuple[int, ...], int | None, tuple[int, ...], int]:
    """(batch_valid, values, has_nan or None, sums, count) of an ACCUM_METRICS node."""
    *sums, count = node.outputs
    valid, *values = node.inputs
    guard = values.pop() if len(values) == len(sums) + 1 else None
    if not sums or len(values) != len(sums):
        raise ShapeError(
            f"{label(node)}: {len(node.inputs)} inputs and {len(node.outputs)} outputs; expected "
            "(batch_valid, values..., [has_nan]) and (one sum per value..., count)"
        )
    return valid, tuple(values), guard, tuple(sums), count


def register(registry: OpRegistry) -> None:
    """Add the launchers of this module to ``registry``."""
    registry.register("RANGE_CHECK_NAN", "cpu", launch_check_nan)
    registry.register("GRAD_SCALING", "cpu", launch_grad_scaling)
    registry.register("FLAG_OR", "cpu", launch_flag_or)
    registry.register("ADAM_STEP", "cpu", launch_adam_step)
    registry.register("ACCUM_METRICS", "cpu", launch_accumulate)
