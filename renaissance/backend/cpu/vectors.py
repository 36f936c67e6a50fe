"""Code of 16 lanes at a time, written as LLVM instructions: what the compiler's own vectoriser would not find.

``Emitter`` gives the vector operations that the kernels of this project are made of; ``product16`` and ``tile_pairs``
are the innermost loops of every matrix product here. In fp32 the instructions are generic LLVM (a fused multiply-add of
16 floats), so they run on every CPU with the same bits, but only one with AVX-512 has the registers for them. Products
of bfloat16 need AVX512-BF16 (``multiplies_bf16``); elsewhere they are compiled to nothing and must not be called.
"""
# Numba intrinsics are untyped on purpose; the comment after each gives the types it is compiled for.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from renaissance.backend.cpu.streams import BFloat, code_has

LANES = 16
"""FP32 numbers in a vector."""
LINE = 4 * LANES
"""Bytes of a vector of FP32."""
_I64, _I32, _I16, _F32 = ir.IntType(64), ir.IntType(32), ir.IntType(16), ir.FloatType()
FLOATS, INTS, _SHORTS = (ir.VectorType(t, LANES) for t in (_F32, _I32, _I16))
PAIR_ROWS, PAIR_VECTORS = 8, 2
PAIR_COLUMNS = LANES * PAIR_VECTORS
"""``tile_pairs`` computes PAIR_ROWS x PAIR_COLUMNS results: 16 sums hide the latency of the multiplier, and leave
registers for the operands."""


def multiplies_bf16() -> bool:
    """Whether the CPU that code is generated for multiplies pairs of bfloat16 (AVX512-BF16)."""
    return code_has("avx512f") and code_has("avx512bf16")


class Emitter:
    """Appends vector instructions to a function that is being compiled. Addresses are 64-bit integers."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
        self._fma = cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32")

    def at(self, address: Any, offset: int | Any = 0) -> Any:
        """``address + offset``."""
        if isinstance(offset, int):
            if offset == 0:
                return address
            offset = ir.Constant(_I64, offset)
        return self.builder.add(address, offset)

    def times(self, number: Any, factor: int) -> Any:
        """``number * factor`` for addresses."""
        return self.builder.mul(number, ir.Constant(_I64, factor))

    def constant(self, value: float) -> Any:
        """The same number in all lanes (rounded to FP32)."""
        return ir.Constant(FLOATS, [ir.Constant(_F32, value)] * LANES)

    def zero(self) -> Any:
        return self.constant(0.0)

    def load(self, address: Any, *, aligned: bool = False) -> Any:
        """16 floats at an address."""
        pointer = self.builder.inttoptr(address, FLOATS.as_pointer())
        return self.builder.load(pointer, align=LINE if aligned else 4)

    def load_half(self, address: Any) -> Any:
        """16 bfloat16 at an address, widened."""
        pointer = self.builder.inttoptr(address, _SHORTS.as_pointer())
        wide = self.builder.zext(self.builder.load(pointer, align=2), INTS)
        return self.builder.bitcast(self.builder.shl(wide, self._int(16)), FLOATS)

    def spread(self, address: Any) -> Any:
        """The float at an address in all lanes."""
        number = self.builder.load(self.builder.inttoptr(address, _F32.as_pointer()), align=4)
        undefined = ir.Constant(FLOATS, ir.Undefined)
        first = self.builder.insert_element(undefined, number, ir.Constant(_I32, 0))
        return self.builder.shuffle_vector(first, undefined, self._int(0))

    def store(self, value: Any, address: Any, *, aligned: bool = False) -> None:
        pointer = self.builder.inttoptr(address, FLOATS.as_pointer())
        self.builder.store(value, pointer, align=LINE if aligned else 4)

    def rounded(self, value: Any) -> Any:
        """The 16 bfloat16 nearest to a vector, as integers of 16 bits; NaN stays NaN (quiet)."""
        b = self.builder
        if multiplies_bf16():
            kind = ir.FunctionType(ir.VectorType(BFloat(), LANES), [FLOATS])
            return b.bitcast(b.call(self.function("llvm.x86.avx512bf16.cvtneps2bf16.512", kind), [value]), _SHORTS)
        bits = b.bitcast(value, INTS)
        last = b.and_(b.lshr(bits, self._int(16)), self._int(1))
        nearest = b.add(b.add(bits, self._int(0x7FFF)), last)
        is_nan = b.fcmp_unordered("uno", value, value)
        kept = b.select(is_nan, b.or_(bits, self._int(0x400000)), nearest)
        return b.trunc(b.lshr(kept, self._int(16)), _SHORTS)

    def store_half(self, value: Any, address: Any) -> None:
        """Store as bfloat16."""
        self.builder.store(self.rounded(value), self.builder.inttoptr(address, _SHORTS.as_pointer()), align=2)

    def store_pairs(self, low: Any, high: Any, address: Any) -> None:
        """Store 16 pairs of bfloat16: lane i of ``low``, then lane i of ``high``. Only where ``multiplies_bf16``."""
        kind = ir.FunctionType(ir.VectorType(BFloat(), 2 * LANES), [FLOATS, FLOATS])
        name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        shorts = ir.VectorType(_I16, 2 * LANES)
        rounded = self.builder.bitcast(self.builder.call(self.function(name, kind), [high, low]), shorts)  # low first
        order = ir.Constant(ir.VectorType(_I32, 2 * LANES), [i // 2 + LANES * (i % 2) for i in range(2 * LANES)])
        pairs = self.builder.shuffle_vector(rounded, ir.Constant(shorts, ir.Undefined), order)
        self.builder.store(pairs, self.builder.inttoptr(address, shorts.as_pointer()), align=4)

    def store_interleaved(self, first: Any, second: Any, address: Any) -> None:
        """Store the 16 bfloat16 at ``first`` and at ``second`` (addresses) as pairs."""
        b = self.builder
        lines = [b.load(b.inttoptr(a, _SHORTS.as_pointer()), align=2) for a in (first, second)]
        order = ir.Constant(ir.VectorType(_I32, 2 * LANES), [i // 2 + LANES * (i % 2) for i in range(2 * LANES)])
        pairs = b.shuffle_vector(*lines, order)
        b.store(pairs, b.inttoptr(address, pairs.type.as_pointer()), align=4)

    def function(self, name: str, kind: Any) -> Any:
        """An instruction that LLVM has a function for."""
        known = self.builder.module.globals.get(name)
        return known if known is not None else ir.Function(self.builder.module, kind, name)

    def loop(self, count: Any, carried: Sequence[Any], body: Callable[[Any, list[Any]], list[Any]]) -> None:
        """``body(i, values)`` for i = 0, 1, ... below ``count``; it returns the values of the next turn."""
        b, before = self.builder, self.builder.block
        head, inside, after = (b.append_basic_block(name) for name in ("head", "inside", "after"))
        b.branch(head)
        b.position_at_end(head)
        at, values = b.phi(_I64), [b.phi(v.type) for v in carried]
        for phi, value in zip((at, *values), (ir.Constant(_I64, 0), *carried), strict=True):
            phi.add_incoming(value, before)
        b.cbranch(b.icmp_signed("<", at, count), inside, after)
        b.position_at_end(inside)
        following = body(at, list(values))
        for phi, value in zip((at, *values), (self.at(at, 1), *following), strict=True):
            phi.add_incoming(value, b.block)
        b.branch(head)
        b.position_at_end(after)

    def add(self, a: Any, b: Any) -> Any:
        return self.builder.fadd(a, b)

    def sub(self, a: Any, b: Any) -> Any:
        return self.builder.fsub(a, b)

    def scale(self, factor: float, a: Any) -> Any:
        """``factor * a``."""
        return self.builder.fmul(self.constant(factor), a)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """``a * b + c``, rounded once."""
        return self.builder.call(self._fma, [a, b, c])

    def axpy(self, factor: float, a: Any, c: Any) -> Any:
        """``factor * a + c``, rounded once."""
        return self.fma(self.constant(factor), a, c)

    def relu(self, a: Any) -> Any:
        """0 where a <= 0; NaN stays NaN."""
        zero = self.zero()
        return self.builder.select(self.builder.fcmp_ordered("<=", a, zero), zero, a)

    def choose(self, condition: Any, a: Any, b: Any) -> Any:
        """``a`` if the truth value (i1) holds, else ``b``."""
        return self.builder.select(condition, a, b)

    def _int(self, value: int) -> Any:
        return ir.Constant(INTS, [value] * LANES)


def product16(a_step: int, a_row: int, b_step: int, c_row: int) -> Any:
    """Intrinsic: C[16, lanes] = sum over k of A(i, k) * B(k, lane), plus C itself with ``add``. In a block of 16 k,
    A(i, k) lies at a + i * a_row + k * a_step and B(k) at b + k * b_step; row i of C at c + i * c_row. The next block
    of 16 k is ``a_stride`` and ``b_stride`` bytes on. Every B(k) and row of C is a line of 64 bytes."""

    @intrinsic
    def product(typingctx, a, b, c, blocks, a_stride, b_stride, add):  # type: ignore[no-untyped-def]  # int64 x 7 -> None
        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            a, b, c, blocks, a_stride, b_stride, add = args
            emit = Emitter(builder)
            fresh = builder.block
            old, loop, after = (builder.append_basic_block(name) for name in ("old", "blocks", "done"))
            builder.cbranch(builder.icmp_signed("!=", add, ir.Constant(_I64, 0)), old, loop)
            builder.position_at_end(old)
            before = [emit.load(emit.at(c, c_row * i), aligned=True) for i in range(LANES)]
            builder.branch(loop)
            builder.position_at_end(loop)
            count, at_a, at_b = (builder.phi(_I64) for _ in range(3))
            sums = [builder.phi(FLOATS) for _ in range(LANES)]
            for phi, value in zip((count, at_a, at_b), (ir.Constant(_I64, 0), a, b), strict=True):
                phi.add_incoming(value, fresh)
                phi.add_incoming(value, old)
            for phi, value in zip(sums, before, strict=True):
                phi.add_incoming(emit.zero(), fresh)
                phi.add_incoming(value, old)
            now = list(sums)
            for k in range(LANES):
                line = emit.load(emit.at(at_b, b_step * k), aligned=True)
                for i in range(LANES):
                    now[i] = emit.fma(emit.spread(emit.at(at_a, i * a_row + k * a_step)), line, now[i])
            following = (emit.at(count, 1), emit.at(at_a, a_stride), emit.at(at_b, b_stride), *now)
            for phi, value in zip((count, at_a, at_b, *sums), following, strict=True):
                phi.add_incoming(value, loop)
            builder.cbranch(builder.icmp_signed("<", following[0], blocks), loop, after)
            builder.position_at_end(after)
            for i, value in enumerate(now):
                emit.store(value, emit.at(c, c_row * i), aligned=True)
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 7), codegen

    return product


@intrinsic
def tile_pairs(typingctx, a, b, c, steps, a_row, a_step, b_step, b_half, c_row, add):  # type: ignore[no-untyped-def]  # int64 x 10 -> None
    """c[8, 32] = a[8, steps] b[steps, 32], plus c itself with ``add``: pairs of bfloat16 (4 bytes), sums in fp32.
    Strides in bytes; the two lines of a row of b are ``b_half`` apart, those of c side by side."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        if multiplies_bf16():
            _tile_pairs(Emitter(builder), *args)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 10), codegen


def _tile_pairs(
    e: Emitter,
    a: Any,
    b: Any,
    c: Any,
    steps: Any,
    a_row: Any,
    a_step: Any,
    b_step: Any,
    b_half: Any,
    c_row: Any,
    add: Any,
) -> None:
    builder = e.builder
    multiply = e.function("llvm.x86.avx512bf16.dpbf16ps.512", ir.FunctionType(FLOATS, [FLOATS, INTS, INTS]))
    places = [(row, j) for row in range(PAIR_ROWS) for j in range(PAIR_VECTORS)]
    targets = [e.at(e.at(c, e.times(c_row, row)), LINE * j) for row, j in places]
    fresh = builder.block
    old, start = builder.append_basic_block("old"), builder.append_basic_block("start")
    builder.cbranch(builder.icmp_signed("!=", add, ir.Constant(_I64, 0)), old, start)
    builder.position_at_end(old)
    loaded = [e.load(t, aligned=True) for t in targets]
    builder.branch(start)
    builder.position_at_end(start)
    sums = [builder.phi(FLOATS) for _ in places]
    for phi, value in zip(sums, loaded, strict=True):
        phi.add_incoming(e.zero(), fresh)
        phi.add_incoming(value, old)
    results: list[Any] = []

    def step(_: Any, values: list[Any]) -> list[Any]:
        at_a, at_b, *now = values
        results[:] = now
        lines = [
            e.builder.bitcast(e.load(e.at(at_b, e.times(b_half, j)), aligned=True), INTS) for j in range(PAIR_VECTORS)
        ]
        following = []
        for row in range(PAIR_ROWS):
            pair = e.builder.bitcast(e.spread(e.at(at_a, e.times(a_row, row))), INTS)
            following += [
                builder.call(multiply, [now[row * PAIR_VECTORS + j], pair, lines[j]]) for j in range(PAIR_VECTORS)
            ]
        return [e.at(at_a, a_step), e.at(at_b, b_step), *following]

    e.loop(steps, [a, b, *sums], step)
    for value, target in zip(results, targets, strict=True):
        e.store(value, target, aligned=True)


@intrinsic
def pair_lines(typingctx, first, second, target, block_bytes, channels):  # type: ignore[no-untyped-def]  # int64 x 5 -> None
    """Two pixels of bfloat16 as pairs: block of 16 channels by block, ``block_bytes`` apart."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        first, second, target, block_bytes, channels = args
        e = Emitter(builder)

        def block(number: Any, values: list[Any]) -> list[Any]:
            offset = e.times(number, 2 * LANES)
            e.store_interleaved(e.at(first, offset), e.at(second, offset), values[0])
            return [e.at(values[0], block_bytes)]

        e.loop(builder.sdiv(channels, ir.Constant(_I64, LANES)), [target], block)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 5), codegen
