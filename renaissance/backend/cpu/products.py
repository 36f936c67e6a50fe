"""Matrix products of the CPU backend: FC forward, weight gradient and input gradient as oneDNN matmul primitives.

Every product is a matmul on the plain layouts of the arena; transposition is a matter of strides, so no operand is
copied by us. This is a fixed rule and not a timing at capture, so that the same machine always runs the same code
(law 2). Measured with bench/products.py on the products of the MNIST example (batch 200; AVX-512 with bf16, one thread,
of a peak of about 233 GFLOP/s):

    product            matmul   inner product, plain   inner product, library's own layout
    FC_FWD                225                    214                                   232
    FC_BWD_WEIGHT         221                    222                                   210
    FC_BWD_DATA           226                    218                                   228

The library's own layouts would need a reorder of the weights after each update, which costs more than the 3 % it gains.
A matmul has no bias gradient: ``db`` is a column sum of ours, and so is the ReLU mask of the input gradient, because
oneDNN 3.2 has no post-op that zeroes by the sign of another tensor. Both give the same bits for every team size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from renaissance.backend.checks import expect
from renaissance.backend.cpu.intrinsics import ARGS, f32, my_range, u16, words
from renaissance.backend.cpu.kernels_common import Kernel, is_half, team_for, widen
from renaissance.backend.cpu.kernels_memory import cast_bf16_to_fp32, cast_fp32_to_bf16
from renaissance.backend.cpu.onednn import Arg, MemoryDesc, OneDnn, onednn
from renaissance.backend.cpu.queue import kernel_call
from renaissance.backend.registry import Call, CaptureContext, OpRegistry, label
from renaissance.core.dtype import DType
from renaissance.core.errors import DeviceError, ShapeError
from renaissance.core.region import align
from renaissance.graph.computation_graph import Node
from renaissance.tensor.dtensor import DTensor

COLUMNS = 128
"""Columns per chunk of a column sum: one thread adds all rows of a chunk, in order."""
MASK_CHUNK = 4096
"""Elements per chunk of the ReLU mask."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """One operand of a product: ``rows`` x ``columns`` elements at an address, stored row-major, or column-major when
    ``transposed``."""

    address: int
    rows: int
    columns: int
    dtype: DType
    transposed: bool = False

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    def desc(self, dnn: OneDnn) -> MemoryDesc:
        strides = (1, self.rows) if self.transposed else (self.columns, 1)
        return dnn.desc((self.rows, self.columns), self.dtype, strides)


def register(registry: OpRegistry) -> None:
    """Add the launchers of the products to ``registry``."""
    registry.register("FC_FWD", "cpu", launch_fc_fwd)
    registry.register("FC_BWD_WEIGHT", "cpu", launch_fc_bwd_weight)
    registry.register("FC_BWD_DATA", "cpu", launch_fc_bwd_data)


def launch_fc_fwd(node: Node, ctx: CaptureContext) -> list[Call]:
    """y[N,out] = act(x[N,in] w[out,in]^T + b[out]); x, w, y of one float type, b FP32."""
    x, w, y = ctx.tensor(node.inputs[0]), ctx.tensor(node.inputs[1]), ctx.tensor(node.outputs[0])
    rows, features, out = _rows(node, x), _features(node, x), w.shape.n
    _check(node, w, out, features)
    _check(node, y, rows, out)
    bias = None
    if len(node.inputs) > 2:
        bias = ctx.ptr(expect(node, ctx.tensor(node.inputs[2]), DType.FP32, out).id)
    return _product(
        node,
        ctx,
        Matrix(ctx.ptr(x.id), rows, features, x.dtype),
        Matrix(ctx.ptr(w.id), features, out, w.dtype, transposed=True),
        Matrix(ctx.ptr(y.id), rows, out, y.dtype),
        bias=bias,
        relu=node.attrs["activation"] == "relu",
    )


def launch_fc_bwd_weight(node: Node, ctx: CaptureContext) -> list[Call]:
    """dw[out,in] = dy[N,out]^T x[N,in] and db[out] = column sums of dy; FP32, overwritten."""
    dy, x, dw = ctx.tensor(node.inputs[0]), ctx.tensor(node.inputs[1]), ctx.tensor(node.outputs[0])
    rows, out, features = _rows(node, dy), _features(node, dy), _features(node, x)
    _check(node, x, rows, features)
    expect(node, dw, DType.FP32, out * features)
    calls = _product(
        node,
        ctx,
        Matrix(ctx.ptr(dy.id), out, rows, dy.dtype, transposed=True),
        Matrix(ctx.ptr(x.id), rows, features, x.dtype),
        Matrix(ctx.ptr(dw.id), out, features, DType.FP32),
    )
    if len(node.outputs) > 1:
        db = expect(node, ctx.tensor(node.outputs[1]), DType.FP32, out)
        kernel = column_sum_half if is_half(node, dy) else column_sum
        arguments = (ctx.ptr(dy.id), ctx.ptr(db.id), rows, out)
        calls.append(kernel_call(kernel, arguments, label(node), threads=team_for(ctx, rows * out)))
    return calls


def launch_fc_bwd_data(node: Node, ctx: CaptureContext) -> list[Call]:
    """dx[N,in] = dy[N,out] w[out,in], zeroed where y_prev <= 0 with mask "relu"."""
    dy, w, dx = ctx.tensor(node.inputs[0]), ctx.tensor(node.inputs[1]), ctx.tensor(node.outputs[0])
    rows, out, features = _rows(node, dy), _features(node, dy), _features(node, w)
    _check(node, w, out, features)
    _check(node, dx, rows, features)
    calls = _product(
        node,
        ctx,
        Matrix(ctx.ptr(dy.id), rows, out, dy.dtype),
        Matrix(ctx.ptr(w.id), out, features, w.dtype),
        Matrix(ctx.ptr(dx.id), rows, features, dx.dtype),
    )
    if node.attrs["mask"] == "relu":
        y = ctx.tensor(node.inputs[2])
        _check(node, y, rows, features)
        kernel = mask_half if is_half(node, dx) else mask
        arguments = (ctx.ptr(dx.id), ctx.ptr(y.id), rows * features)
        calls.append(kernel_call(kernel, arguments, label(node), threads=team_for(ctx, rows * features)))
    return calls


@Kernel
def mask(address):  # type: ignore[no-untyped-def]  # context: dx fp32, y fp32, elements
    """dx := 0 where y <= 0 (NaN is not)."""
    ctx = words(address)
    count = ctx[ARGS + 2]
    start, stop = my_range(ctx, count, MASK_CHUNK)
    dx = f32(ctx[ARGS], count)[start:stop]
    y = f32(ctx[ARGS + 1], count)[start:stop]
    for i in range(dx.size):
        dx[i] = np.float32(0) if y[i] <= np.float32(0) else dx[i]


@Kernel
def mask_half(address):  # type: ignore[no-untyped-def]  # context: dx bf16, y bf16, elements
    """dx := 0 where y <= 0 (NaN is not)."""
    ctx = words(address)
    count = ctx[ARGS + 2]
    start, stop = my_range(ctx, count, MASK_CHUNK)
    dx = u16(ctx[ARGS], count)[start:stop]
    y = u16(ctx[ARGS + 1], count)[start:stop]
    for i in range(dx.size):
        dx[i] = np.uint16(0) if widen(y[i]) <= np.float32(0) else dx[i]


@Kernel
def column_sum(address):  # type: ignore[no-untyped-def]  # context: matrix fp32 [rows, columns], sums fp32 [columns], rows, columns
    """sums := sum of the rows, added from the first to the last."""
    ctx = words(address)
    rows, columns = ctx[ARGS + 2], ctx[ARGS + 3]
    start, stop = my_range(ctx, columns, COLUMNS)
    matrix = f32(ctx[ARGS], rows * columns)
    for first in range(start, stop, COLUMNS):
        width = min(COLUMNS, stop - first)
        sums = f32(ctx[ARGS + 1], columns)[first : first + width]
        sums[:] = 0
        for r in range(rows):
            row = matrix[r * columns + first : r * columns + first + width]
            for i in range(sums.size):
                sums[i] += row[i]


@Kernel
def column_sum_half(address):  # type: ignore[no-untyped-def]  # context: matrix bf16 [rows, columns], sums fp32 [columns], rows, columns
    """sums := sum of the rows in fp32, added from the first to the last."""
    ctx = words(address)
    rows, columns = ctx[ARGS + 2], ctx[ARGS + 3]
    start, stop = my_range(ctx, columns, COLUMNS)
    matrix = u16(ctx[ARGS], rows * columns)
    for first in range(start, stop, COLUMNS):
        width = min(COLUMNS, stop - first)
        sums = f32(ctx[ARGS + 1], columns)[first : first + width]
        sums[:] = 0
        for r in range(rows):
            row = matrix[r * columns + first : r * columns + first + width]
            for i in range(sums.size):
                sums[i] += widen(row[i])


def half_products(dnn: OneDnn) -> bool:
    """Whether the library multiplies bf16 matrices on this CPU (oneDNN 3.2: from AVX-512 on)."""
    probe = dnn.desc((16, 16), DType.BF16)
    try:
        dnn.matmul(probe, probe, None, probe)
    except DeviceError:
        return False
    return True


def _product(
    node: Node,
    ctx: CaptureContext,
    src: Matrix,
    weights: Matrix,
    dst: Matrix,
    *,
    bias: int | None = None,
    relu: bool = False,
) -> list[Call]:
    """dst = act(src x weights + bias). Without bf16 products the operands are widened to fp32 in scratch memory and
    the result is rounded once: bf16 models run on every CPU, at the speed of fp32."""
    dnn = onednn()
    matrices = (src, weights, dst)
    staged = src.dtype.is_half and not half_products(dnn)
    used = [replace(m, dtype=DType.FP32) for m in matrices] if staged else list(matrices)
    descs = [m.desc(dnn) for m in used]
    bias_desc = None if bias is None else dnn.desc((1, dst.columns), DType.FP32)
    product = dnn.matmul(descs[0], descs[1], bias_desc, descs[2], relu=relu)
    sizes = [0 if m.dtype is u.dtype else align(4 * m.numel) for m, u in zip(matrices, used, strict=True)]
    free = ctx.scratch(sum(sizes) + product.scratchpad)
    before: list[Call] = []
    after: list[Call] = []
    for i, (matrix, size) in enumerate(zip(matrices, sizes, strict=True)):
        if size:
            used[i] = replace(used[i], address=free)
            free += size
            if matrix is dst:
                after.append(_cast(node, ctx, cast_fp32_to_bf16, used[i], matrix))
            else:
                before.append(_cast(node, ctx, cast_bf16_to_fp32, matrix, used[i]))
    operands = {a: (d, m.address) for a, d, m in zip((Arg.SRC, Arg.WEIGHTS, Arg.DST), descs, used, strict=True)}
    if bias is not None and bias_desc is not None:
        operands[Arg.BIAS] = (bias_desc, bias)
    return [*before, product.bind(operands, free, label(node)), *after]


def _cast(node: Node, ctx: CaptureContext, kernel: Kernel, source: Matrix, target: Matrix) -> Call:
    arguments = (source.address, target.address, source.numel)
    return kernel_call(kernel, arguments, label(node), threads=team_for(ctx, source.numel))


def _rows(node: Node, t: DTensor) -> int:
    is_half(node, t)
    return t.shape.n


def _features(node: Node, t: DTensor) -> int:
    return t.shape.numel // t.shape.n


def _check(node: Node, t: DTensor, rows: int, features: int) -> None:
    if (t.shape.n, _features(node, t)) != (rows, features):
        raise ShapeError(f"{label(node)}: tensor {t.name!r} is {t.shape}; expected [{rows},1,1,{features}]")
    is_half(node, t)
