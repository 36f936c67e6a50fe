"""Vector code that LLVM does not find by itself, written as LLVM instructions: a matrix microkernel and the transforms
of Winograd's convolution. Everything works on addresses (int64) and vectors of 16 float32.

The bfloat16 forms need AVX512_BF16: ``has_half_products`` says whether this machine has it; without it they are
compiled to nothing and must not be called. Roundings to bfloat16 are to nearest even, NaN stays NaN.
"""
# Numba-compiled functions are untyped on purpose; the comment after each gives the types it is compiled for.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
"""float32 per vector."""
TILE_ROWS, TILE_VECTORS = 8, 2
TILE_COLUMNS = LANES * TILE_VECTORS
"""A microkernel call computes TILE_ROWS x TILE_COLUMNS results: 16 accumulators hide the latency of the multiplier and
leave registers for the operands."""

_I16, _I32, _I64 = (ir.IntType(n) for n in (16, 32, 64))
_FLOAT = ir.FloatType()
_F32 = ir.VectorType(_FLOAT, LANES)
_U32 = ir.VectorType(_I32, LANES)
_U16 = ir.VectorType(_I16, LANES)
_ZERO = ir.Constant(_F32, None)
_HALF = ir.Constant(_F32, [ir.Constant(_FLOAT, 0.5)] * LANES)


def has_vectors() -> bool:
    """Whether this machine has vectors of 16 float32 (AVX-512)."""
    return bool(binding.get_host_cpu_features().get("avx512f"))


def has_half_products() -> bool:
    """Whether this machine multiplies pairs of bfloat16 (AVX512_BF16)."""
    return has_vectors() and bool(binding.get_host_cpu_features().get("avx512bf16"))


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


class _Code:
    """What the code generators below are written with."""

    def __init__(self, builder: Any, half: bool) -> None:
        self.b, self.half = builder, half
        self.size = 2 if half else 4

    def address(self, base: Any, *terms: tuple[Any, int] | int) -> Any:
        """base + sum of (value, factor) and constants."""
        for term in terms:
            value, factor = (None, term) if isinstance(term, int) else term
            if value is None:
                base = base if factor == 0 else self.b.add(base, _I64(factor))
            else:
                base = self.b.add(base, value if factor == 1 else self.b.mul(value, _I64(factor)))
        return base

    def load(self, address: Any, kind: Any = _F32, align: int = 4) -> Any:
        value = self.b.load(self.b.inttoptr(address, kind.as_pointer()))
        value.align = align
        return value

    def store(self, value: Any, address: Any, align: int = 4) -> None:
        self.b.store(value, self.b.inttoptr(address, value.type.as_pointer())).align = align

    def read(self, address: Any) -> Any:
        """16 elements as float32."""
        if not self.half:
            return self.load(address)
        wide = self.b.zext(self.load(address, _U16, 2), _U32)
        return self.b.bitcast(self.b.shl(wide, ir.Constant(_U32, [16] * LANES)), _F32)

    def rounded(self, value: Any) -> Any:
        """float32 -> bfloat16 patterns (16 bit)."""
        kind = ir.FunctionType(ir.VectorType(_BFloat(), LANES), [_F32])
        return self.b.bitcast(self.b.call(self.function("llvm.x86.avx512bf16.cvtneps2bf16.512", kind), [value]), _U16)

    def function(self, name: str, kind: Any) -> Any:
        """An instruction that LLVM has a function for."""
        known = self.b.module.globals.get(name)
        return known if known is not None else ir.Function(self.b.module, kind, name)

    def write(self, value: Any, address: Any) -> None:
        """16 elements, rounded when they are bfloat16."""
        if self.half:
            self.store(self.rounded(value), address, 2)
        else:
            self.store(value, address)

    def write_pairs(self, low: Any, high: Any, address: Any) -> None:
        """16 pairs of bfloat16: element i of ``low``, element i of ``high``."""
        first, second = (self.b.zext(self.rounded(v), _U32) for v in (low, high))
        shifted = self.b.shl(second, ir.Constant(_U32, [16] * LANES))
        self.store(self.b.or_(first, shifted), address)

    def broadcast(self, scalar: Any) -> Any:
        kind = ir.VectorType(scalar.type, LANES)
        lane = self.b.insert_element(ir.Constant(kind, ir.Undefined), scalar, _I32(0))
        return self.b.shuffle_vector(lane, ir.Constant(kind, ir.Undefined), ir.Constant(_U32, [0] * LANES))

    def loop(self, count: Any, step: int, body: Callable[[Any], None]) -> None:
        """``body(i)`` for i = 0, step, ... below ``count``."""
        before = self.b.block
        head, inside, after = (self.b.append_basic_block(n) for n in ("head", "inside", "after"))
        self.b.branch(head)
        self.b.position_at_end(head)
        at = self.b.phi(_I64)
        at.add_incoming(_I64(0), before)
        self.b.cbranch(self.b.icmp_signed("<", at, count), inside, after)
        self.b.position_at_end(inside)
        body(at)
        at.add_incoming(self.b.add(at, _I64(step)), self.b.block)
        self.b.branch(head)
        self.b.position_at_end(after)


def _routine(half: bool, generate: Callable[[_Code, Sequence[Any]], None]) -> Any:
    """An intrinsic made by ``generate``; its one argument is a tuple of integers, it has no result."""

    @intrinsic
    def routine(typingctx, words):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            if has_vectors() and (has_half_products() or not half):
                values = cgutils.unpack_tuple(builder, args[0])
                kinds = signature.args[0].types
                integers = [context.cast(builder, v, k, types.int64) for v, k in zip(values, kinds, strict=True)]
                generate(_Code(builder, half), integers)
            return context.get_dummy_value()

        return types.void(words), codegen

    return routine


# -- products ---------------------------------------------------------------------------------------------------------


def _tile(code: _Code, args: Sequence[Any]) -> None:
    """Words: a, b, c, steps, a's stride of a row, a's stride of a step, b's stride of a step, c's stride of a row, and
    whether c is added to. All strides in bytes; a step is one element (float32) or one pair (bfloat16)."""
    a, b, c, steps, row_a, step_a, step_b, row_c, add = args
    builder = code.b
    kind, element = (_U32, _I32) if code.half else (_F32, _FLOAT)
    name = "llvm.x86.avx512bf16.dpbf16ps.512" if code.half else "llvm.fma.v16f32"
    fma = code.function(name, ir.FunctionType(_F32, [_F32, kind, kind]))
    places = [(r, j) for r in range(TILE_ROWS) for j in range(TILE_VECTORS)]
    targets = [code.address(c, (row_c, r), 64 * j) for r, j in places]
    entry = builder.block
    old, head, body, end = (builder.append_basic_block(n) for n in ("old", "head", "body", "end"))
    builder.cbranch(builder.icmp_signed("!=", add, _I64(0)), old, head)
    builder.position_at_end(old)
    loaded = [code.load(t, _F32, 64) for t in targets]
    builder.branch(head)
    builder.position_at_end(head)
    sums = [builder.phi(_F32) for _ in places]
    left, at_a, at_b = (builder.phi(_I64) for _ in range(3))
    for value, was in zip(sums, loaded, strict=True):
        value.add_incoming(_ZERO, entry)
        value.add_incoming(was, old)
    for block in (entry, old):
        for phi, start in ((left, steps), (at_a, a), (at_b, b)):
            phi.add_incoming(start, block)
    builder.cbranch(builder.icmp_signed(">", left, _I64(0)), body, end)
    builder.position_at_end(body)
    columns = [code.load(code.address(at_b, 64 * j), kind, 64) for j in range(TILE_VECTORS)]
    news = []
    for r in range(TILE_ROWS):
        row = code.broadcast(code.load(code.address(at_a, (row_a, r)), element))
        for j in range(TILE_VECTORS):
            total = sums[r * TILE_VECTORS + j]
            news.append(builder.call(fma, [total, row, columns[j]] if code.half else [row, columns[j], total]))
    moved = ((left, builder.sub(left, _I64(1))), (at_a, builder.add(at_a, step_a)), (at_b, builder.add(at_b, step_b)))
    for phi, value in (*zip(sums, news, strict=True), *moved):
        phi.add_incoming(value, builder.block)
    builder.branch(head)
    builder.position_at_end(end)
    for value, target in zip(sums, targets, strict=True):
        code.store(value, target, 64)


tile_fp32 = _routine(False, _tile)
"""c[8, 32] (+)= a[8, steps] b[steps, 32] in float32; see ``_tile`` for the words. Rows of b and c start at multiples
of 64 bytes."""
tile_bf16 = _routine(True, _tile)
"""The same with a and b of bfloat16, two per step (element 2s and 2s + 1 of a row side by side)."""


# -- Winograd's F(2x2, 3x3) -------------------------------------------------------------------------------------------


def _combine_input(b: Any, d: Sequence[Any]) -> list[Any]:
    """One dimension of B^T d."""
    return [b.fsub(d[0], d[2]), b.fadd(d[1], d[2]), b.fsub(d[2], d[1]), b.fsub(d[1], d[3])]


def _combine_output(b: Any, m: Sequence[Any]) -> list[Any]:
    """One dimension of A^T m."""
    return [b.fadd(b.fadd(m[0], m[1]), m[2]), b.fsub(b.fsub(m[1], m[2]), m[3])]


def _combine_gradient(b: Any, d: Sequence[Any]) -> list[Any]:
    """One dimension of A d."""
    return [d[0], b.fadd(d[0], d[1]), b.fsub(d[0], d[1]), b.fsub(_ZERO, d[1])]


def _combine_weights(b: Any, g: Sequence[Any]) -> list[Any]:
    """One dimension of G g."""
    outer = b.fmul(b.fadd(g[0], g[2]), _HALF)
    inner = b.fmul(g[1], _HALF)
    return [g[0], b.fadd(outer, inner), b.fsub(outer, inner), g[2]]


def _combine_back(b: Any, p: Sequence[Any]) -> list[Any]:
    """One dimension of G^T p."""
    total, difference = b.fmul(b.fadd(p[1], p[2]), _HALF), b.fmul(b.fsub(p[1], p[2]), _HALF)
    return [b.fadd(p[0], total), difference, b.fadd(total, p[3])]


Combine = Callable[[Any, Sequence[Any]], list[Any]]


def _both_ways(b: Any, combine: Combine, values: Sequence[Any], side: int) -> list[Any]:
    """``combine`` along the columns, then along the rows, of a square of ``side`` x ``side`` vectors."""
    columns = [combine(b, [values[side * i + j] for i in range(side)]) for j in range(side)]
    return [v for i in range(len(columns[0])) for v in combine(b, [columns[j][i] for j in range(side)])]


def _pixels(code: _Code, table: Any, count: int) -> list[Any]:
    """The addresses in a table of int64."""
    return [code.load(code.address(table, 8 * i), _I64, 8) for i in range(count)]


def _transform(combine: Combine, side: int) -> Callable[[_Code, Sequence[Any]], None]:
    def generate(code: _Code, args: Sequence[Any]) -> None:
        """Words: table of side^2 addresses, target, stride of the 16 results in bytes, channels (multiple of 16)."""
        table, target, stride, channels = args
        sources = _pixels(code, table, side * side)

        def body(at: Any) -> None:
            values = [code.read(code.address(s, (at, code.size))) for s in sources]
            for i, value in enumerate(_both_ways(code.b, combine, values, side)):
                code.write(value, code.address(target, (at, code.size), (stride, i)))

        code.loop(channels, LANES, body)

    return generate


def _pair_transform(combine: Combine, side: int) -> Callable[[_Code, Sequence[Any]], None]:
    def generate(code: _Code, args: Sequence[Any]) -> None:
        """As ``_transform`` for two tables; the results are pairs, 4 bytes a channel."""
        first, second, target, stride, channels = args
        tables = [_pixels(code, t, side * side) for t in (first, second)]

        def body(at: Any) -> None:
            low, high = (
                _both_ways(code.b, combine, [code.read(code.address(s, (at, code.size))) for s in sources], side)
                for sources in tables
            )
            for i, pair in enumerate(zip(low, high, strict=True)):
                code.write_pairs(*pair, code.address(target, (at, 4), (stride, i)))

        code.loop(channels, LANES, body)

    return generate


def _output(code: _Code, args: Sequence[Any]) -> None:
    """Words: m, stride of its 16 parts in bytes, table of 4 target addresses, channels, bias, limits (low, high)."""
    m, stride, table, channels, bias, limits = args
    targets = _pixels(code, table, 4)
    floor, ceiling = (code.broadcast(code.load(code.address(limits, 4 * i), _FLOAT)) for i in range(2))

    def body(at: Any) -> None:
        values = [code.load(code.address(m, (at, 4), (stride, i))) for i in range(16)]
        shift = code.load(code.address(bias, (at, 4)))
        for value, target in zip(_both_ways(code.b, _combine_output, values, 4), targets, strict=True):
            total = code.b.fadd(value, shift)
            total = code.b.select(code.b.fcmp_unordered(">", total, floor), total, floor)  # NaN stays NaN
            total = code.b.select(code.b.fcmp_unordered("<", total, ceiling), total, ceiling)
            code.write(total, code.address(target, (at, code.size)))

    code.loop(channels, LANES, body)


def _weight_gradient(code: _Code, args: Sequence[Any]) -> None:
    """Words: p, stride of its 16 parts in bytes, target, stride of its 9 parts in bytes, channels; all float32."""
    p, stride, target, step, channels = args

    def body(at: Any) -> None:
        values = [code.load(code.address(p, (at, 4), (stride, i))) for i in range(16)]
        for i, value in enumerate(_both_ways(code.b, _combine_back, values, 4)):
            code.store(value, code.address(target, (at, 4), (step, i)))

    code.loop(channels, LANES, body)


input_fp32, input_bf16 = (_routine(half, _transform(_combine_input, 4)) for half in (False, True))
"""V = B^T d B of a 4 x 4 patch."""
gradient_fp32 = _routine(False, _transform(_combine_gradient, 2))
"""Z = A d A^T of a 2 x 2 patch."""
weights_fp32, weights_bf16 = (_routine(half, _transform(_combine_weights, 3)) for half in (False, True))
"""U = G g G^T of a 3 x 3 filter."""
input_pairs, gradient_pairs, weight_pairs = (
    _routine(True, _pair_transform(combine, side))
    for combine, side in ((_combine_input, 4), (_combine_gradient, 2), (_combine_weights, 3))
)
"""The three for two patches at once, as pairs of bfloat16."""
output_fp32, output_bf16 = (_routine(half, _output) for half in (False, True))
"""act(A^T m A + bias), act(v) = min(max(v, low), high)."""
weight_gradient = _routine(False, _weight_gradient)
"""G^T p G."""
