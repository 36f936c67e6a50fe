"""What the launchers of products and of convolutions share: calls of a library's plans and the kernels of ``dense.cu``.

Sizes of grids and the order of sums follow from the sizes of tensors alone (law 2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from renaissance.backend.checks import expect
from renaissance.backend.cuda.calls import (
    BLOCK,
    MAX_GRID,
    PACK_BYTES,
    Arguments,
    Buffer,
    CudaCall,
    CudaContext,
    Dim,
    KernelCall,
    LibraryCall,
    i32,
    i64,
    packs_grid,
    suffix,
)
from renaissance.backend.cuda.libraries import Plan
from renaissance.backend.registry import label
from renaissance.core.dtype import DType
from renaissance.core.region import align
from renaissance.graph.computation_graph import Node

THREADS = BLOCK[0]
FULL_GRID = 1024
"""Blocks that keep every GPU busy: up to here a thread gets one step, beyond it up to STEPS."""
STEPS = 4
WHOLE_ROWS = 1024
"""Up to so many rows a block adds up all of a column, and no second kernel is needed."""
CHUNK_ROWS = 256
"""Least rows of one chunk of a longer matrix."""
NARROW_LANES, WIDE_LANES = 8, 32
"""Most packs side by side in a block of a column sum, in a short and in a long matrix: a short one has few blocks, and
a narrow block puts more of its rows side by side."""
COMBINED = 8
"""Columns of a block of ``combine_sums``."""


def pieces(ctx: CudaContext, *sizes: int) -> list[Buffer]:
    """Working memory of a node, cut into pieces of these sizes in bytes that start at multiples of 256."""
    whole = ctx.scratch(sum(align(size) for size in sizes))
    offsets = [sum(align(size) for size in sizes[:i]) for i in range(len(sizes))]
    return [whole.part(offset, size) for offset, size in zip(offsets, sizes, strict=True)]


def library_call(plan: Plan, operands: Sequence[Buffer], workspace: Buffer, title: str) -> LibraryCall:
    """The execution of ``plan`` on its three operands."""
    first, second, out = operands
    return LibraryCall(lambda stream: plan.execute(stream, first, second, out, workspace), f"{title}: {plan.name}")


def _width(columns: int, dtype: DType) -> int:
    """Elements that a thread takes at once from rows of ``columns``."""
    pack = PACK_BYTES // dtype.itemsize
    return pack if columns % pack == 0 else 1


def finish_grid(n: int, columns: int, dtype: DType) -> Dim:
    """Grid of ``finish``: one step for each thread, or several, each a multiple of a row long."""
    width = _width(columns, dtype)
    once = -(-(n // width) // THREADS)
    row = columns // width
    unit = row // math.gcd(row, THREADS)
    wanted = min(max(FULL_GRID, -(-once // STEPS)), MAX_GRID)
    return (min(once, -(-wanted // unit) * unit), 1, 1)


@dataclass(frozen=True, slots=True)
class Finish:
    """What is left to do to [rows, columns] elements of ``dtype`` after a product: y = act(x + bias + residual).

    ``x`` is y itself, or FP32 sums. The activation is its number in dialect.cuh.
    """

    x: Buffer
    y: Buffer
    rows: int
    columns: int
    dtype: DType
    bias: Buffer | None = None
    residual: Buffer | None = None
    activation: int = 0

    def call(self, title: str) -> KernelCall:
        """One pass over the elements."""
        n = self.rows * self.columns
        wide = self.x.ptr != self.y.ptr and self.dtype.is_half
        name = f"finish_{'wide_' if wide else ''}{suffix(self.dtype)}"
        arguments: Arguments = (
            *(self.x, self.bias or self.y, self.residual or self.y, self.y, i64(n), i32(self.columns)),
            *(i32(self.bias is not None), i32(self.residual is not None), i32(self.activation)),
        )
        return KernelCall("dense", name, finish_grid(n, self.columns, self.dtype), BLOCK, arguments, title)


def mask_relu(y: Buffer, dx: Buffer, n: int, dtype: DType, title: str) -> KernelCall:
    """dx := 0 where the ReLU with output y cut off."""
    name = f"mask_relu_{suffix(dtype)}"
    return KernelCall("dense", name, packs_grid(n, dtype), BLOCK, (y, dx, i64(n)), title)


@dataclass(frozen=True, slots=True)
class ColumnSums:
    """Sums over the rows of a matrix [rows, columns] of ``dtype``, in FP32; partial sums of chunks of rows lie in
    ``scratch_bytes`` of working memory."""

    rows: int
    columns: int
    dtype: DType

    @property
    def _tiles(self) -> tuple[int, int]:
        """(blocks side by side, packs of each)."""
        packs = self.columns // _width(self.columns, self.dtype)
        tiles = -(-packs // (NARROW_LANES if self.rows <= WHOLE_ROWS else WIDE_LANES))
        return tiles, -(-packs // tiles)

    @property
    def _chunks(self) -> tuple[int, int]:
        """(chunks, rows of each)."""
        if self.rows <= WHOLE_ROWS:
            return 1, self.rows
        chunks = min(-(-self.rows // CHUNK_ROWS), max(1, FULL_GRID // self._tiles[0]))
        each = -(-self.rows // chunks)
        return -(-self.rows // each), each

    @property
    def scratch_bytes(self) -> int:
        chunks, _ = self._chunks
        return 4 * chunks * self.columns if chunks > 1 else 0

    def calls(self, x: Buffer, sums: Buffer, scratch: Buffer, title: str) -> list[CudaCall]:
        """sums[column] := sum of x over the rows."""
        (tiles, lanes), (chunks, each) = self._tiles, self._chunks
        out = scratch if chunks > 1 else sums
        name, grid = f"column_sums_{suffix(self.dtype)}", (tiles, chunks, 1)
        arguments: Arguments = (x, out, i64(self.rows), i32(self.columns), i32(each), i32(lanes))
        calls: list[CudaCall] = [KernelCall("dense", name, grid, BLOCK, arguments, title)]
        if chunks > 1:
            combined: Arguments = (scratch, sums, i32(chunks), i32(self.columns))
            width = (-(-self.columns // COMBINED), 1, 1)
            calls.append(KernelCall("dense", "combine_sums", width, BLOCK, combined, title))
        return calls


def widen(x: Buffer, y: Buffer, n: int, dtype: DType, title: str) -> KernelCall:
    """y := x in FP32; ``dtype`` is the half type of x."""
    return KernelCall("dense", f"widen_{suffix(dtype)}", packs_grid(n, dtype), BLOCK, (x, y, i64(n)), title)


def weight_gradient(
    node: Node, ctx: CudaContext, plan: Plan, result: DType, operands: tuple[Buffer, Buffer, Buffer], rows: int
) -> list[CudaCall]:
    """dw by ``plan`` from dy [rows, columns] and x, and db, if the node has it, as the sums of dy's columns.

    ``result`` is the type that the plan writes: a half dw goes through working memory and is widened.
    """
    dy, x, dw = operands
    tensor, (weight, *db) = ctx.tensor(node.inputs[0]), node.outputs
    numel, columns = ctx.tensor(weight).shape.numel, tensor.shape.numel // rows
    sums = ColumnSums(rows, columns, tensor.dtype)
    # One after the other on one stream: what the plan worked with is free again when the sums are formed.
    sizes = (result.itemsize * numel if result.is_half else 0, max(plan.workspace, sums.scratch_bytes if db else 0))
    narrow, work = pieces(ctx, *sizes)
    into = narrow if result.is_half else dw
    calls: list[CudaCall] = [library_call(plan, (dy, x, into), work.part(0, plan.workspace), label(node))]
    if result.is_half:
        calls.append(widen(narrow, dw, numel, result, label(node)))
    if db:
        bias = ctx.buffer(expect(node, ctx.tensor(db[0]), DType.FP32, columns).id)
        calls += sums.calls(dy, bias, work.part(0, sums.scratch_bytes), f"{label(node)} bias")
    return calls
