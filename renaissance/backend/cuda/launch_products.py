"""Fully connected layers: FC_FWD, FC_BWD_WEIGHT and FC_BWD_DATA as matrix products of cuBLASLt.

A product is fixed by its sizes and types and planned when a program is captured. What a product cannot do is a pass of
ours over its result: bias and activation from FP32 sums, so that a half result is rounded once; the mask of the layer
below; and the bias gradient, whose sum has one order on every GPU.
"""

from __future__ import annotations

from renaissance.backend.checks import expect
from renaissance.backend.cuda.calls import CudaCall, CudaContext
from renaissance.backend.cuda.checks import fused_activation, same_float
from renaissance.backend.cuda.dense import Finish, library_call, mask_relu, pieces, weight_gradient
from renaissance.backend.cuda.libraries import ProductSpec
from renaissance.backend.registry import OpRegistry, label
from renaissance.core.dtype import DType
from renaissance.core.errors import ShapeError
from renaissance.graph.computation_graph import Node
from renaissance.tensor.dtensor import DTensor


def register(registry: OpRegistry) -> None:
    """Add the launchers of the products to ``registry``."""
    registry.register("FC_FWD", "cuda", launch_fc_fwd)
    registry.register("FC_BWD_WEIGHT", "cuda", launch_fc_bwd_weight)
    registry.register("FC_BWD_DATA", "cuda", launch_fc_bwd_data)


def launch_fc_fwd(node: Node, ctx: CudaContext) -> list[CudaCall]:
    """y[N,out] = act(x[N,in] w[out,in]^T + b[out]); x, w, y of one float type, b FP32."""
    x, w, y = ctx.tensor(node.inputs[0]), ctx.tensor(node.inputs[1]), ctx.tensor(node.outputs[0])
    dtype = same_float(node, ctx, x.id, w.id, y.id)
    rows, features, out = x.shape.n, _features(x), w.shape.n
    _check(node, w, out, features)
    _check(node, y, rows, out)
    bias = ctx.buffer(expect(node, ctx.tensor(node.inputs[2]), DType.FP32, out).id) if len(node.inputs) > 2 else None
    activation = fused_activation(node)
    finishes = bias is not None or activation > 0
    result = DType.FP32 if finishes else dtype
    plan = ctx.products.plan(ProductSpec(rows, out, features, False, True, dtype, result))
    target = ctx.buffer(y.id)
    apart = result is not dtype
    sums, workspace = pieces(ctx, 4 * rows * out if apart else 0, plan.workspace)
    into = sums if apart else target
    calls: list[CudaCall] = [
        library_call(plan, (ctx.buffer(x.id), ctx.buffer(w.id), into), workspace, label(node)),
    ]
    if finishes:
        finish = Finish(into, target, rows, out, dtype, bias, activation=activation)
        calls.append(finish.call(label(node)))
    return calls


def launch_fc_bwd_weight(node: Node, ctx: CudaContext) -> list[CudaCall]:
    """dw[out,in] = dy[N,out]^T x[N,in] and db[out] = column sums of dy; FP32, overwritten."""
    dy, x, dw = ctx.tensor(node.inputs[0]), ctx.tensor(node.inputs[1]), ctx.tensor(node.outputs[0])
    dtype = same_float(node, ctx, dy.id, x.id)
    rows, out, features = dy.shape.n, _features(dy), _features(x)
    _check(node, x, rows, features)
    expect(node, dw, DType.FP32, out * features)
    plan = ctx.products.plan(ProductSpec(out, features, rows, True, False, dtype, DType.FP32))
    operands = (ctx.buffer(dy.id), ctx.buffer(x.id), ctx.buffer(dw.id))
    return weight_gradient(node, ctx, plan, DType.FP32, operands, rows)


def launch_fc_bwd_data(node: Node, ctx: CudaContext) -> list[CudaCall]:
    """dx[N,in] = dy[N,out] w[out,in], zeroed where y_prev <= 0 with mask "relu"."""
    dy, w, dx = ctx.tensor(node.inputs[0]), ctx.tensor(node.inputs[1]), ctx.tensor(node.outputs[0])
    dtype = same_float(node, ctx, dy.id, w.id, dx.id)
    rows, out, features = dy.shape.n, _features(dy), _features(w)
    _check(node, w, out, features)
    _check(node, dx, rows, features)
    plan = ctx.products.plan(ProductSpec(rows, features, out, False, False, dtype, dtype))
    operands = (ctx.buffer(dy.id), ctx.buffer(w.id), ctx.buffer(dx.id))
    (workspace,) = pieces(ctx, plan.workspace)
    calls: list[CudaCall] = [library_call(plan, operands, workspace, label(node))]
    if node.attrs["mask"] == "relu":
        y = ctx.tensor(node.inputs[2])
        same_float(node, ctx, dx.id, y.id)
        _check(node, y, rows, features)
        calls.append(mask_relu(ctx.buffer(y.id), ctx.buffer(dx.id), rows * features, dtype, label(node)))
    return calls


def _features(t: DTensor) -> int:
    """Values per sample."""
    return t.shape.numel // t.shape.n


def _check(node: Node, t: DTensor, rows: int, features: int) -> None:
    if (t.shape.n, _features(t)) != (rows, features):
        raise ShapeError(f"{label(node)}: tensor {t.name!r} is {t.shape}; expected [{rows},1,1,{features}]")
