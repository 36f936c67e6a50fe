"""Activations that no other op took in, and sums of two feature maps or gradients.

The formulas are float32 (``activations``), whatever the stored type; a result is rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from renaissance.backend.checks import of_size
from renaissance.backend.cpu.activations import KINDS, backward, forward
from renaissance.backend.cpu.intrinsics import ARGS, my_range, words
from renaissance.backend.cpu.kernels_common import BLOCK, Kernel, same_type, team_for
from renaissance.backend.cpu.kernels_guard import float_word
from renaissance.backend.cpu.queue import kernel_call
from renaissance.backend.cpu.streams import BF16, FP32, compiled, load, store_light
from renaissance.backend.registry import Call, CaptureContext, OpRegistry, label
from renaissance.graph.computation_graph import Node

LEAST = {"none": math.nan, "relu": 0.0}
"""What a sum is raised to; nothing is less than NaN."""


@Kernel
def activation_forward(address):  # type: ignore[no-untyped-def]  # words: x, y, elements, bf16?, kind
    ctx = words(address)
    x, y, half, kind = ctx[ARGS], ctx[ARGS + 1], ctx[ARGS + 3], ctx[ARGS + 4]
    start, stop = my_range(ctx, ctx[ARGS + 2], BLOCK)
    if half != 0:
        forward(BF16, kind, x + 2 * start, y + 2 * start, stop - start)
    else:
        forward(FP32, kind, x + 4 * start, y + 4 * start, stop - start)


@Kernel
def activation_backward(address):  # type: ignore[no-untyped-def]  # words: dy, x or y, dx, elements, bf16?, kind
    ctx = words(address)
    dy, saved, dx, half, kind = ctx[ARGS], ctx[ARGS + 1], ctx[ARGS + 2], ctx[ARGS + 4], ctx[ARGS + 5]
    start, stop = my_range(ctx, ctx[ARGS + 3], BLOCK)
    if half != 0:
        backward(BF16, kind, dy + 2 * start, saved + 2 * start, dx + 2 * start, stop - start)
    else:
        backward(FP32, kind, dy + 4 * start, saved + 4 * start, dx + 4 * start, stop - start)


@compiled
def add_block(kind, a, b, y, n, low):  # type: ignore[no-untyped-def]  # FP32 or BF16; int64 addresses; int64; float32
    for i in range(n):
        v = load(kind, a, i) + load(kind, b, i)
        store_light(kind, y, i, low if v < low else v)


@Kernel
def add(address):  # type: ignore[no-untyped-def]  # words: a, b, y, elements, bf16?, least (float64 bits)
    ctx = words(address)
    a, b, y, half = ctx[ARGS], ctx[ARGS + 1], ctx[ARGS + 2], ctx[ARGS + 4]
    low = np.float32(np.int64(ctx[ARGS + 5]).view(np.float64))
    start, stop = my_range(ctx, ctx[ARGS + 3], BLOCK)
    if half != 0:
        add_block(BF16, a + 2 * start, b + 2 * start, y + 2 * start, stop - start, low)
    else:
        add_block(FP32, a + 4 * start, b + 4 * start, y + 4 * start, stop - start, low)


def _operands(node: Node, ctx: CaptureContext) -> tuple[list[int], int, int]:
    """(addresses of all inputs and outputs, elements, 1 for bfloat16)."""
    ids = (*node.inputs, *node.outputs)
    half = same_type(node, ctx, *ids)
    n = ctx.tensor(ids[0]).shape.numel
    return [ctx.ptr(of_size(node, ctx.tensor(i), n).id) for i in ids], n, half


def launch_activation(node: Node, ctx: CaptureContext) -> Sequence[Call]:
    """ACT_FWD: x -> y; ACT_BWD: dy, saved -> dx."""
    addresses, n, half = _operands(node, ctx)
    kind = KINDS.index(str(node.attrs["kind"]))
    kernel = activation_forward if len(node.inputs) == 1 else activation_backward
    return [kernel_call(kernel, (*addresses, n, half, kind), label(node), threads=team_for(ctx, n))]


def launch_add(node: Node, ctx: CaptureContext) -> Sequence[Call]:
    """ADD_FWD and GRAD_SUM: two tensors -> their sum (and its ReLU)."""
    addresses, n, half = _operands(node, ctx)
    low = float_word(LEAST[str(node.attrs.get("activation", "none"))])
    return [kernel_call(add, (*addresses, n, half, low), label(node), threads=team_for(ctx, n))]


def register(registry: OpRegistry) -> None:
    """Add the launchers of this module to ``registry``."""
    registry.register("ACT_FWD", "cpu", launch_activation)
    registry.register("ACT_BWD", "cpu", launch_activation)
    registry.register("ADD_FWD", "cpu", launch_add)
    registry.register("GRAD_SUM", "cpu", launch_add)
