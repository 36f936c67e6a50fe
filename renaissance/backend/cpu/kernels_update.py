"""Optimizer updates (spec/framework 4.2) as one pass over memory: read w, g and moments, write w, moments, half copy.

The half copy of the new weights is made block by block while the block is in cache, so no separate cast runs.
No number is frozen: rates, betas, corrections, loss scale and the NaN flag are read from the arena at every replay
(law 4), and a raised flag makes the whole kernel do nothing (law 5). Elements are independent and every operation is
a correctly rounded float32 one, so neither the vector width nor the thread count changes a bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numba import njit

from renaissance.backend.cpu.intrinsics import ARGS, f32, i32, my_range, u16, u32, words
from renaissance.backend.cpu.kernels_common import BLOCK, Kernel, bf16_bits, team_for
from renaissance.backend.cpu.queue import kernel_call
from renaissance.backend.registry import Call, CaptureContext, OpRegistry, label
from renaissance.core.dtype import DType
from renaissance.core.errors import MissingKernelError, ShapeError
from renaissance.graph.computation_graph import Node

SCALARS = {
    "RANGE_UPDATE_SGD": ("lr", "wd", "scaling", "has_nan"),
    "RANGE_UPDATE_MOMENTUM": ("lr", "wd", "beta", "scaling", "has_nan"),
    "RANGE_UPDATE_NESTEROV": ("lr", "wd", "beta", "scaling", "has_nan"),
    "RANGE_UPDATE_ADAM": ("lr", "wd", "beta", "beta2", "eps", "bias_corr1", "bias_corr2", "scaling", "has_nan"),
    "RANGE_UPDATE_ADAMW": ("lr", "wd", "beta", "beta2", "eps", "bias_corr1", "bias_corr2", "scaling", "has_nan"),
}
"""Scalar inputs of each update op, in order."""
STATES = {"RANGE_UPDATE_SGD": 0, "RANGE_UPDATE_MOMENTUM": 1, "RANGE_UPDATE_NESTEROV": 1}
"""Optimizer state spans (M, V) after the gradient span; the Adam kinds have two."""

# Words of both kernels: elements, then the spans, then flags, then the scalars' addresses.
N, W, G, M, V, HALF, DECAY, VARIANT, SCALAR = range(ARGS, ARGS + 9)
IS_SGD, IS_MOMENTUM, IS_NESTEROV = 0, 1, 2
IS_ADAM, IS_ADAMW = 0, 1


@njit(cache=True)
def half_copy(bits, half, n):  # type: ignore[no-untyped-def]  # uint32[n] patterns of float32 -> uint16[n] bfloat16
    for i in range(n):
        half[i] = bf16_bits(bits[i])


@njit(cache=True, error_model="numpy")
def adam_block(w, g, m, v, n, lr, beta1, beta2, eps, c1, c2, unscale, keep, l2):  # type: ignore[no-untyped-def]  # float32[n] x4, float32...
    """Adam and AdamW in one body: ``keep`` is 1 - lr * decay (AdamW) and ``l2`` the decay added to the gradient (Adam);
    the one that does not apply is 1 or 0."""
    new1 = np.float32(1.0) - beta1
    new2 = np.float32(1.0) - beta2
    for i in range(n):
        grad = g[i] * unscale + l2 * w[i]
        first = beta1 * m[i] + new1 * grad
        second = beta2 * v[i] + new2 * (grad * grad)
        m[i] = first
        v[i] = second
        w[i] = w[i] * keep - lr * (first * c1) / (np.float32(math.sqrt(second * c2)) + eps)


@njit(cache=True, error_model="numpy")
def sgd_block(w, g, n, lr, unscale, keep):  # type: ignore[no-untyped-def]  # float32[n] x2, float32 scalars
    for i in range(n):
        w[i] = w[i] * keep - lr * (g[i] * unscale)


@njit(cache=True, error_model="numpy")
def momentum_block(w, g, m, n, lr, beta, unscale, keep):  # type: ignore[no-untyped-def]  # float32[n] x3, float32 scalars
    for i in range(n):
        first = beta * m[i] + g[i] * unscale
        m[i] = first
        w[i] = w[i] * keep - lr * first


@njit(cache=True, error_model="numpy")
def nesterov_block(w, g, m, n, lr, beta, unscale, keep):  # type: ignore[no-untyped-def]  # float32[n] x3, float32 scalars
    for i in range(n):
        grad = g[i] * unscale
        first = beta * m[i] + grad
        m[i] = first
        w[i] = w[i] * keep - lr * (beta * first + grad)


@Kernel
def update_adam(address):  # type: ignore[no-untyped-def]  # words: see above; scalars in the order of SCALARS
    ctx = words(address)
    if i32(ctx[SCALAR + 8], 1)[0] != 0:
        return
    lr, wd = f32(ctx[SCALAR], 1)[0], f32(ctx[SCALAR + 1], 1)[0]
    beta1, beta2, eps = f32(ctx[SCALAR + 2], 1)[0], f32(ctx[SCALAR + 3], 1)[0], f32(ctx[SCALAR + 4], 1)[0]
    c1, c2 = f32(ctx[SCALAR + 5], 1)[0], f32(ctx[SCALAR + 6], 1)[0]
    unscale = np.float32(1.0) / f32(ctx[SCALAR + 7], 1)[0]
    keep, l2 = np.float32(1.0), np.float32(0.0)
    if ctx[DECAY] != 0:
        if ctx[VARIANT] == IS_ADAMW:
            keep = np.float32(1.0) - lr * wd
        else:
            l2 = wd
    start, stop = my_range(ctx, ctx[N], BLOCK)
    for at in range(start, stop, BLOCK):
        n = min(BLOCK, stop - at)
        w, g = f32(ctx[W] + 4 * at, n), f32(ctx[G] + 4 * at, n)
        m, v = f32(ctx[M] + 4 * at, n), f32(ctx[V] + 4 * at, n)
        adam_block(w, g, m, v, n, lr, beta1, beta2, eps, c1, c2, unscale, keep, l2)
        if ctx[HALF] != 0:
            half_copy(u32(ctx[W] + 4 * at, n), u16(ctx[HALF] + 2 * at, n), n)


@Kernel
def update_sgd(address):  # type: ignore[no-untyped-def]  # words: see above; scalars lr, wd, beta, scaling, has_nan
    ctx = words(address)
    if i32(ctx[SCALAR + 4], 1)[0] != 0:
        return
    lr, wd = f32(ctx[SCALAR], 1)[0], f32(ctx[SCALAR + 1], 1)[0]
    unscale = np.float32(1.0) / f32(ctx[SCALAR + 3], 1)[0]
    keep = np.float32(1.0)
    if ctx[DECAY] != 0:
        keep = np.float32(1.0) - lr * wd
    start, stop = my_range(ctx, ctx[N], BLOCK)
    for at in range(start, stop, BLOCK):
        n = min(BLOCK, stop - at)
        w, g = f32(ctx[W] + 4 * at, n), f32(ctx[G] + 4 * at, n)
        if ctx[VARIANT] == IS_SGD:
            sgd_block(w, g, n, lr, unscale, keep)
        else:
            beta = f32(ctx[SCALAR + 2], 1)[0]
            m = f32(ctx[M] + 4 * at, n)
            if ctx[VARIANT] == IS_MOMENTUM:
                momentum_block(w, g, m, n, lr, beta, unscale, keep)
            else:
                nesterov_block(w, g, m, n, lr, beta, unscale, keep)
        if ctx[HALF] != 0:
            half_copy(u32(ctx[W] + 4 * at, n), u16(ctx[HALF] + 2 * at, n), n)


@Kernel
def update_ema(address):  # type: ignore[no-untyped-def]  # words: averages, weights, elements, ema_decay, has_nan
    """E = d * E + (1 - d) * W; the padding of a span is zero and stays zero."""
    ctx = words(address)
    if i32(ctx[ARGS + 4], 1)[0] != 0:
        return
    decay = f32(ctx[ARGS + 3], 1)[0]
    rest = np.float32(1.0) - decay
    start, stop = my_range(ctx, ctx[ARGS + 2], BLOCK)
    n = stop - start
    average, w = f32(ctx[ARGS] + 4 * start, n), f32(ctx[ARGS + 1] + 4 * start, n)
    for i in range(n):
        average[i] = decay * average[i] + rest * w[i]


def launch_ema(node: Node, ctx: CaptureContext) -> Sequence[Call]:
    """RANGE_EMA_UPDATE: pairs of spans of equal layout, weights read, averages read and written."""
    if len(node.inputs) != 2 or len(node.spans_in) != len(node.spans_out):
        raise ShapeError(
            f"{label(node)}: {len(node.inputs)} scalars, {len(node.spans_in)} input and {len(node.spans_out)} output "
            "spans; expected ema_decay, has_nan, and one span of weights per span of averages"
        )
    decay, has_nan = (ctx.ptr(i) for i in node.inputs)
    calls = []
    for source, target in zip(node.spans_in, node.spans_out, strict=True):
        (w, nbytes), (average, size) = ctx.span_ptr(source), ctx.span_ptr(target)
        if size != nbytes:
            raise ShapeError(f"{label(node)}: span {source} has {nbytes} bytes but {target} has {size}")
        if nbytes:
            n = nbytes // 4
            words_ = (average, w, n, decay, has_nan)
            calls.append(kernel_call(update_ema, words_, label(node), threads=team_for(ctx, n)))
    return calls


def launch_update(node: Node, ctx: CaptureContext) -> Sequence[Call]:
    """All update ops: spans_in (G[, M[, V]]), spans_out (W[, half W, ...]); see ``update_spans``."""
    n, w, g, states, half = update_spans(node, ctx)
    if not n:
        return []
    names = SCALARS[node.op]
    if len(node.inputs) != len(names):
        raise ShapeError(f"{label(node)}: {len(node.inputs)} scalar inputs; expected {len(names)}: {', '.join(names)}")
    scalars = [ctx.ptr(i) for i in node.inputs]
    m, v = (*states, 0, 0)[:2]
    kernel, variant = update_adam, IS_ADAMW if node.op == "RANGE_UPDATE_ADAMW" else IS_ADAM
    if node.op in STATES:
        kernel = update_sgd
        variant = {"RANGE_UPDATE_SGD": IS_SGD, "RANGE_UPDATE_MOMENTUM": IS_MOMENTUM}.get(node.op, IS_NESTEROV)
        if variant == IS_SGD:
            scalars.insert(2, 0)  # no beta
    arguments = (n, w, g, m, v, half, int(bool(node.attrs["decay"])), variant, *scalars)
    return [kernel_call(kernel, arguments, label(node), threads=team_for(ctx, n))]


def update_spans(node: Node, ctx: CaptureContext) -> tuple[int, int, int, tuple[int, ...], int]:
    """(elements, address of W, of G, of the states, of the half copy or 0) of an update node.

    All FP32 spans have equal layouts (spec/framework 2.3), the half copy has half their bytes; ShapeError otherwise.
    The moments are read and written, so they may be listed among the outputs as well.
    """
    states = STATES.get(node.op, 2)
    if len(node.spans_in) < 1 + states or not node.spans_out:
        raise ShapeError(f"{label(node)}: {len(node.spans_in)} input spans; expected the gradient and {states} states")
    w, nbytes = ctx.span_ptr(node.spans_out[0])
    addresses = []
    for span in node.spans_in[: 1 + states]:
        address, size = ctx.span_ptr(span)
        if size != nbytes:
            raise ShapeError(f"{label(node)}: span {span} has {size} bytes but {node.spans_out[0]} has {nbytes}")
        addresses.append(address)
    half = 0
    for span in node.spans_out[1:]:
        if span.first.dtype(ctx.half).is_half:
            half, size = ctx.span_ptr(span)
            if ctx.half is not DType.BF16:
                raise MissingKernelError(f"{label(node)}: half copy {span} is fp16; the CPU kernels know bf16 only")
            if 2 * size != nbytes:
                raise ShapeError(f"{label(node)}: half span {span} has {size} bytes; expected {nbytes // 2}")
    return nbytes // 4, w, addresses[0], tuple(addresses[1:]), half


def register(registry: OpRegistry) -> None:
    """Add the launchers of this module to ``registry``."""
    for op in SCALARS:
        registry.register(op, "cpu", launch_update)
    registry.register("RANGE_EMA_UPDATE", "cpu", launch_ema)
