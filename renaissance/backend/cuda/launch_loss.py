"""The loss and its metrics: labels, softmax cross-entropy forward, backward and for validation, sums over an epoch.

Kernels: ``loss.cu`` and ``scalars.cu``. A label that is no class makes its row's loss NaN: a call on a GPU cannot fail,
but the flag of that step skips it as a whole, and a validation loss shows it. The dataserver checks labels as well.
"""

from __future__ import annotations

from collections.abc import Sequence

from renaissance.backend.checks import expect, of_size
from renaissance.backend.cuda.calls import (
    BLOCK,
    ONE_THREAD,
    WARP,
    Arguments,
    CopyCall,
    CudaCall,
    CudaContext,
    Dim,
    KernelCall,
    grid_for,
    i32,
    suffix,
)
from renaissance.backend.cuda.checks import same_float
from renaissance.backend.registry import OpRegistry, label
from renaissance.core.dtype import DType
from renaissance.core.errors import ShapeError
from renaissance.graph.computation_graph import Node
from renaissance.graph.ops import named_inputs, named_outputs

MODULE = "loss"
HELD = 4
"""Logits that a thread holds (loss.cu)."""
FEW_LANES, WHOLE_BLOCK = 4, BLOCK[0]
"""Threads that work on one row; or a warp does."""
LARGEST_BLOCK = 1024
ONE_BLOCK_THREADS = 2 * LARGEST_BLOCK
"""Rows times lanes up to which one block does all rows and their mean: two turns cost less than a second launch."""


def lanes_for(classes: int) -> int:
    """Threads that work on one row of so many classes: as few as hold it in registers, a power of two."""
    if classes <= FEW_LANES * HELD:
        return FEW_LANES
    return WARP if classes <= WARP * HELD else WHOLE_BLOCK


def rows_geometry(rows: int, classes: int) -> tuple[Dim, Dim, int]:
    """(grid, block, lanes) of the forward kernels; a grid of one block takes the mean over the rows as well."""
    lanes = lanes_for(classes)
    if lanes <= WARP and rows * lanes <= ONE_BLOCK_THREADS:
        threads = min(-(-rows * lanes // WARP) * WARP, LARGEST_BLOCK)
        return (1, 1, 1), (threads, 1, 1), lanes
    return grid_for(rows, WHOLE_BLOCK // lanes), BLOCK, lanes


def matrix_size(node: Node, ctx: CudaContext, tensor_id: int) -> tuple[int, int]:
    """(rows, classes) of a [N,1,1,K] tensor; ShapeError otherwise."""
    shape = ctx.tensor(tensor_id).shape
    if shape.h != 1 or shape.w != 1:
        name = ctx.tensor(tensor_id).name
        raise ShapeError(f"{label(node)}: tensor {name!r} is {shape}; expected [N,1,1,classes]")
    return shape.n, shape.c


def launch_label_copy(node: Node, ctx: CudaContext) -> Sequence[CudaCall]:
    """LABEL_COPY: label -> label_smce, INT32 [N,1,1,1]."""
    source = expect(node, ctx.tensor(node.inputs[0]), DType.INT32)
    target = expect(node, ctx.tensor(node.outputs[0]), DType.INT32, source.shape.numel)
    return [CopyCall(ctx.buffer(target.id), ctx.buffer(source.id), label(node))]


def _check_rows(node: Node, ctx: CudaContext) -> tuple[int, int]:
    """(rows, classes) of a forward node whose operands all fit."""
    inputs, outputs = named_inputs(node), named_outputs(node)
    rows, classes = matrix_size(node, ctx, inputs["logits"])
    expect(node, ctx.tensor(inputs["label"]), DType.INT32, rows)
    expect(node, ctx.tensor(inputs["label_smoothing"]), DType.FP32, 1)
    expect(node, ctx.tensor(inputs["batch_valid"]), DType.INT32, 1)
    sizes = {"probs": rows * classes, "loss_partials": rows, "loss": 1, "top1": 1, "top5": 1}
    for role, tensor_id in outputs.items():
        if role != "predicted":
            expect(node, ctx.tensor(tensor_id), DType.FP32, sizes[role])
    return rows, classes


def launch_forward(node: Node, ctx: CudaContext) -> Sequence[CudaCall]:
    """SOFTMAX_CE_FWD: (logits, label, label_smoothing, batch_valid) -> (probs, loss_partials, loss)."""
    rows, classes = _check_rows(node, ctx)
    logits, *others = (ctx.buffer(i) for i in node.inputs)
    valid = others[-1]
    probs, losses, loss = (ctx.buffer(i) for i in node.outputs)
    grid, block, lanes = rows_geometry(rows, classes)
    kernel = f"softmax_{suffix(same_float(node, ctx, node.inputs[0]))}"
    arguments: Arguments = (logits, *others, probs, losses, loss, i32(rows), i32(classes), i32(lanes))
    calls = [KernelCall(MODULE, kernel, grid, block, arguments, label(node))]
    if grid[0] > 1:
        mean: Arguments = (losses, valid, loss, i32(rows))
        calls.append(KernelCall(MODULE, "mean_loss", (1, 1, 1), BLOCK, mean, f"{label(node)} mean"))
    return calls


def launch_validation(node: Node, ctx: CudaContext) -> Sequence[CudaCall]:
    """SOFTMAX_CE_INF: the same inputs -> (predicted, probs, loss_partials, loss, top1, top5)."""
    rows, classes = _check_rows(node, ctx)
    expect(node, ctx.tensor(node.outputs[0]), DType.INT32, rows)
    logits, *others = (ctx.buffer(i) for i in node.inputs)
    valid = others[-1]
    predicted, probs, losses, loss, top1, top5 = (ctx.buffer(i) for i in node.outputs)
    hits = ctx.scratch(4 * rows)
    grid, block, lanes = rows_geometry(rows, classes)
    kernel = f"softmax_ranked_{suffix(same_float(node, ctx, node.inputs[0]))}"
    sizes = (i32(rows), i32(classes), i32(lanes))
    arguments: Arguments = (logits, *others, predicted, hits, probs, losses, loss, top1, top5, *sizes)
    calls = [KernelCall(MODULE, kernel, grid, block, arguments, label(node))]
    if grid[0] > 1:
        mean: Arguments = (losses, hits, valid, loss, top1, top5, i32(rows))
        calls.append(KernelCall(MODULE, "mean_loss_and_rates", (1, 1, 1), BLOCK, mean, f"{label(node)} mean"))
    return calls


def launch_backward(node: Node, ctx: CudaContext) -> Sequence[CudaCall]:
    """SOFTMAX_CE_BWD: (probs, label, label_smoothing, batch_valid, scaling) -> dlogits, of any floating type."""
    probs, labels, smoothing, valid, scaling = (ctx.tensor(i) for i in node.inputs)
    rows, classes = matrix_size(node, ctx, probs.id)
    expect(node, probs, DType.FP32)
    expect(node, labels, DType.INT32, rows)
    expect(node, smoothing, DType.FP32, 1)
    expect(node, valid, DType.INT32, 1)
    expect(node, scaling, DType.FP32, 1)
    out = of_size(node, ctx.tensor(node.outputs[0]), rows * classes)
    lanes = lanes_for(classes)
    kernel = f"softmax_gradient_{suffix(same_float(node, ctx, out.id))}"
    buffers = (ctx.buffer(i) for i in (*node.inputs, out.id))
    grid = grid_for(rows, WHOLE_BLOCK // lanes)
    return [KernelCall(MODULE, kernel, grid, BLOCK, (*buffers, i32(rows), i32(classes), i32(lanes)), label(node))]


def launch_accumulate(node: Node, ctx: CudaContext) -> Sequence[CudaCall]:
    """ACCUM_METRICS: (batch_valid, loss, top1, top5[, has_nan]) -> (their sums, count), FP32, in place."""
    inputs, outputs = named_inputs(node), named_outputs(node)
    if len(inputs) < 4 or len(node.inputs) != len(inputs) or len(outputs) != 4 or len(node.outputs) != 4:
        raise ShapeError(
            f"{label(node)}: {len(node.inputs)} inputs and {len(node.outputs)} outputs; expected "
            "(batch_valid, loss, top1, top5, [has_nan]) and (accum_loss, accum_top1, accum_top5, accum_count)"
        )
    for role, tensor_id in (*inputs.items(), *outputs.items()):
        dtype = DType.INT32 if role in ("batch_valid", "has_nan") else DType.FP32
        expect(node, ctx.tensor(tensor_id), dtype, 1)
    kernel = "accumulate_metrics_unless" if "has_nan" in inputs else "accumulate_metrics"
    buffers = tuple(ctx.buffer(i) for i in (*node.inputs, *node.outputs))
    return [KernelCall("scalars", kernel, *ONE_THREAD, buffers, label(node))]


def register(registry: OpRegistry) -> None:
    """Add the launchers of this module to ``registry``."""
    registry.register("LABEL_COPY", "cuda", launch_label_copy)
    registry.register("SOFTMAX_CE_FWD", "cuda", launch_forward)
    registry.register("SOFTMAX_CE_INF", "cuda", launch_validation)
    registry.register("SOFTMAX_CE_BWD", "cuda", launch_backward)
    registry.register("ACCUM_METRICS", "cuda", launch_accumulate)
