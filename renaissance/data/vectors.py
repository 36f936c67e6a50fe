"""Weighted sums of neighbouring bytes by byte shuffles and 8-bit dot products, from inside compiled code.

A resize gathers, for each output value, a few bytes that lie a pixel apart and multiplies them by 22-bit weights.
Compilers find no vector form for that; AVX-512 has one: one shuffle (VBMI) brings four taps of sixteen values together,
three dot products (VNNI) multiply them by the weights, cut in three signed bytes. All of it is integer arithmetic that
cannot overflow, so the plain loops used on other processors give the same bytes.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
"""Output values of one group."""
TAPS = 4
"""Taps that one step of a group adds to each of its values."""
STEP_WORDS = 64
"""uint32 words of one step in a plan: shuffle indices, then the high, middle and low bytes of the weights."""
WINDOW = 64
"""Source bytes one step can see."""
ROWS = 4
"""Source rows that share the loads of a step."""
PRECISION = 22
"""Fraction bits of the weights."""


def _supported(context) -> bool:  # type: ignore[no-untyped-def]
    features = context.codegen().magic_tuple()[2].split(",")  # those the code is generated for, not the machine's
    return all(f"+{name}" in features for name in ("avx512bw", "avx512vbmi", "avx512vnni"))


@intrinsic
def has_byte_dot_products(typing_context):  # type: ignore[no-untyped-def]
    """Whether the code is being compiled for a processor with AVX-512 VBMI and VNNI; a constant when compiled."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return context.get_constant(types.boolean, _supported(context))

    return types.boolean(), generate


@intrinsic
def weigh_group(typing_context, source, at, bases, plan, first, last, target, to):  # type: ignore[no-untyped-def]
    """Sums of steps ``first`` to ``last`` of ``plan`` for sixteen values of four rows, rounded to bytes and stored.

    source, target uint8[:]; at, to: four int64 places each, of the rows' beginnings in ``source`` and of the sixteen
    bytes in ``target``; bases int64[steps]: where a step's window begins in a row; plan uint32[steps * STEP_WORDS].
    """
    if not (isinstance(at, types.UniTuple) and at.count == ROWS and isinstance(to, types.UniTuple)):
        return None
    signature = types.void(source, at, bases, plan, types.int64, types.int64, target, to)

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        if not _supported(context):
            return context.get_dummy_value()

        def data(number):  # type: ignore[no-untyped-def]
            return context.make_array(signature.args[number])(context, builder, arguments[number]).data

        byte, word, wide = (ir.IntType(bits) for bits in (8, 32, 64))
        bytes64, words16, bytes16 = ir.VectorType(byte, WINDOW), ir.VectorType(word, LANES), ir.VectorType(byte, LANES)
        shuffle = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(bytes64, [bytes64, bytes64]), "llvm.x86.avx512.permvar.qi.512"
        )
        dot = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(words16, [words16] * 3), "llvm.x86.avx512.vpdpbusd.512"
        )
        source, bases, plan, target = (data(number) for number in (0, 2, 3, 6))
        first, last = arguments[4], arguments[5]
        starts = cgutils.unpack_tuple(builder, arguments[1])
        ends = cgutils.unpack_tuple(builder, arguments[7])
        zero = ir.Constant(words16, None)
        sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(3)] for _ in range(ROWS)]
        with cgutils.for_range_slice(builder, first, last, ir.Constant(wide, 1), intp=wide) as (step, _):
            base = builder.load(builder.gep(bases, [step]))
            place = builder.mul(step, ir.Constant(wide, STEP_WORDS))
            tables = []
            for part in range(4):
                at = builder.gep(plan, [builder.add(place, ir.Constant(wide, part * LANES))])
                tables.append(builder.load(builder.bitcast(at, words16.as_pointer()), align=4))
            indices = builder.bitcast(tables[0], bytes64)
            for row in range(ROWS):
                at = builder.gep(source, [builder.add(starts[row], base)])
                window = builder.load(builder.bitcast(at, bytes64.as_pointer()), align=1)
                taps = builder.bitcast(builder.call(shuffle, [window, indices]), words16)
                for part in range(3):
                    total = builder.call(dot, [builder.load(sums[row][part]), taps, tables[part + 1]])
                    builder.store(total, sums[row][part])

        def splat(number):  # type: ignore[no-untyped-def]
            return ir.Constant(words16, [number] * LANES)

        for row in range(ROWS):
            high, middle, low = (builder.load(total) for total in sums[row])
            total = builder.add(builder.shl(high, splat(16)), builder.shl(middle, splat(8)))
            total = builder.add(builder.add(total, low), splat(1 << (PRECISION - 1)))
            rounded = builder.trunc(builder.lshr(total, splat(PRECISION)), bytes16)
            at = builder.bitcast(builder.gep(target, [ends[row]]), bytes16.as_pointer())
            builder.store(rounded, at, align=1)
        return context.get_dummy_value()

    return signature, generate
