"""Vectors of sixteen values inside compiled code, where loops would stay scalar or too wide for short lines.

Every function works on exactly sixteen values (or bytes); a caller with 16 or more that do not divide by 16 does the
last sixteen again, overlapping. All but ``weigh_group`` are plain vector code for any processor.

A resize gathers, for each output value, a few bytes that lie a pixel apart and multiplies them by 22-bit weights.
Compilers find no vector form for that; AVX-512 has one: one shuffle (VBMI) brings four taps of sixteen values together,
three dot products (VNNI) multiply them by the weights, cut in three signed bytes. All of it is integer arithmetic that
cannot overflow, so the plain loops used on other processors give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def _supported(context: Any) -> bool:
    features = context.codegen().magic_tuple()[2].split(",")  # those the code is generated for, not the machine's
    return all(f"+{name}" in features for name in ("avx512bw", "avx512vbmi", "avx512vnni"))


@intrinsic
def has_byte_dot_products(typing_context):  # type: ignore[no-untyped-def]
    """Whether the code is being compiled for a processor with AVX-512 VBMI and VNNI; a constant when compiled."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return context.get_constant(types.boolean, _supported(context))

    return types.boolean(), generate


def _vector(kind: Any, count: int = LANES) -> Any:
    return ir.VectorType(kind, count)


_BYTE, _HALF, _WORD, _LONG, _FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_BYTES, _WORDS, _FLOATS = _vector(_BYTE), _vector(_WORD), _vector(_FLOAT)


def _splat(number: float, kind: Any = _WORDS) -> Any:
    return ir.Constant(kind, [number] * kind.count)


def _data(context: Any, builder: Any, signature: Any, arguments: Any, number: int) -> Any:
    """Pointer to the first element of an array argument."""
    return context.make_array(signature.args[number])(context, builder, arguments[number]).data


def _load(builder: Any, data: Any, place: Any, kind: Any) -> Any:
    at = builder.bitcast(builder.gep(data, [place]), kind.as_pointer())
    return builder.load(at, align=1)


def _store(builder: Any, values: Any, data: Any, place: Any) -> None:
    at = builder.bitcast(builder.gep(data, [place]), values.type.as_pointer())
    builder.store(values, at, align=1)


@intrinsic
def copy16(typing_context, source, at, target, to):  # type: ignore[no-untyped-def]
    """Copy sixteen bytes from ``source[at:]`` to ``target[to:]``; both uint8[:]."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        source, target = (_data(context, builder, signature, arguments, number) for number in (0, 2))
        _store(builder, _load(builder, source, arguments[1], _BYTES), target, arguments[3])
        return context.get_dummy_value()

    return types.void(source, types.int64, target, types.int64), generate


@intrinsic
def mirror5(typing_context, source, at, target, to):  # type: ignore[no-untyped-def]
    """Five pixels of three bytes from ``source[at:]``, in reverse, to ``target[to:]``; the byte before is overwritten.

    Reads one byte more than the five pixels.
    """

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        source, target = (_data(context, builder, signature, arguments, number) for number in (0, 2))
        pixels = _load(builder, source, arguments[1], _BYTES)
        order = [15] + [3 * pixel + channel for pixel in range(4, -1, -1) for channel in range(3)]
        mask = ir.Constant(_vector(_WORD), order)
        before = builder.sub(arguments[3], ir.Constant(_LONG, 1))
        _store(builder, builder.shuffle_vector(pixels, pixels, mask), target, before)
        return context.get_dummy_value()

    return types.void(source, types.int64, target, types.int64), generate


def _affine(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """float32[16]: the arithmetic of ``finish``; arguments (line, at, constants, stride, place, ...)."""
    line, constants = (_data(context, builder, signature, arguments, number) for number in (0, 2))
    pixels = builder.uitofp(_load(builder, line, arguments[1], _BYTES), _FLOATS)
    numbers = []
    place = arguments[4]
    for _ in range(4):
        numbers.append(_load(builder, constants, place, _FLOATS))
        place = builder.add(place, arguments[3])
    exact = builder.fadd(builder.fmul(pixels, numbers[0]), numbers[1])
    rest = builder.fadd(builder.fmul(pixels, numbers[2]), numbers[3])
    return builder.fadd(exact, rest)


def _to_bf16(builder: Any, values: Any) -> Any:
    bits = builder.bitcast(values, _WORDS)
    odd = builder.and_(builder.lshr(bits, _splat(16)), _splat(1))
    rounded = builder.add(builder.add(bits, odd), _splat(0x7FFF))
    return builder.trunc(builder.lshr(rounded, _splat(16)), _vector(_HALF))


def _to_fp16(builder: Any, values: Any) -> Any:
    """To nearest even, for values that do not overflow; in integers, as not every processor converts."""
    bits = builder.bitcast(values, _WORDS)
    size = builder.and_(bits, _splat(0x7FFFFFFF))
    odd = builder.and_(builder.lshr(size, _splat(13)), _splat(1))
    normal = builder.lshr(builder.sub(builder.add(size, odd), _splat(0x38000000 - 0xFFF)), _splat(13))
    shifted = builder.fadd(builder.bitcast(size, _FLOATS), _splat(0.5, _FLOATS))  # rounds at fp16's smallest step
    small = builder.sub(builder.bitcast(shifted, _WORDS), _splat(0x3F000000))
    magnitude = builder.select(builder.icmp_unsigned("<", size, _splat(0x38800000)), small, normal)
    sign = builder.and_(builder.lshr(bits, _splat(16)), _splat(0x8000))
    return builder.trunc(builder.or_(sign, magnitude), _vector(_HALF))


def _writer(convert: Callable[[Any, Any], Any], bits: int) -> Any:
    """An intrinsic that writes sixteen values of a type of ``bits`` bits."""

    def write(typing_context, line, at, constants, stride, place, values, to):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            if signature.args[5].dtype.bitwidth == bits:  # never called for other types, but compiled beside them
                values = _data(context, builder, signature, arguments, 5)
                result = convert(builder, _affine(context, builder, signature, arguments))
                _store(builder, result, values, arguments[6])
            return context.get_dummy_value()

        i64 = types.int64
        return types.void(line, i64, constants, i64, i64, values, i64), generate

    return intrinsic(write)


write16_fp32 = _writer(lambda builder, values: builder.bitcast(values, _WORDS), 32)
"""``line[at:]`` (uint8) as float32 bits to ``values[to:]`` (uint32), with the constants at ``place + k * stride``."""
write16_bf16 = _writer(_to_bf16, 16)
"""The same as bfloat16 bits to uint16."""
write16_fp16 = _writer(_to_fp16, 16)
"""The same as float16 bits to uint16."""


@intrinsic
def blend16(typing_context, lines, at, weights, target, to):  # type: ignore[no-untyped-def]
    """Sixteen bytes of four lines, weighed and rounded; ``at``: four int64 places in uint8 ``lines``, four weights."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        lines, target = (_data(context, builder, signature, arguments, number) for number in (0, 3))
        places = cgutils.unpack_tuple(builder, arguments[1])
        weights = cgutils.unpack_tuple(builder, arguments[2])
        total = _splat(1 << (PRECISION - 1))
        for place, weight in zip(places, weights, strict=True):
            one = builder.insert_element(ir.Constant(_WORDS, ir.Undefined), weight, ir.Constant(_WORD, 0))
            each = builder.shuffle_vector(one, one, _splat(0))
            pixels = builder.zext(_load(builder, lines, place, _BYTES), _WORDS)
            total = builder.add(total, builder.mul(pixels, each))
        _store(builder, builder.trunc(builder.lshr(total, _splat(PRECISION)), _BYTES), target, arguments[4])
        return context.get_dummy_value()

    return types.void(lines, at, weights, target, types.int64), generate


@intrinsic
def weigh_pixel(typing_context, source, at, weights, first, number, target, to):  # type: ignore[no-untyped-def]
    """One pixel of three bytes: ``number`` neighbours from ``source[at:]``, weighed by int32 ``weights[first:]``.

    Reads one byte more than the neighbours, and writes a fourth byte, 0.
    """
    i64 = types.int64
    signature = types.void(source, i64, weights, i64, i64, target, i64)

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        source, weights, target = (_data(context, builder, signature, arguments, number) for number in (0, 2, 5))
        bytes4, words4 = _vector(_BYTE, 4), _vector(_WORD, 4)
        rounded = ir.Constant(words4, [1 << (PRECISION - 1)] * 3 + [0])
        total = cgutils.alloca_once_value(builder, rounded)
        colours = ir.Constant(words4, [1, 1, 1, 0])
        with cgutils.for_range(builder, arguments[4], intp=_LONG) as loop:
            place = builder.add(arguments[1], builder.mul(loop.index, ir.Constant(_LONG, 3)))
            pixel = builder.mul(builder.zext(_load(builder, source, place, bytes4), words4), colours)
            weight = builder.load(builder.gep(weights, [builder.add(arguments[3], loop.index)]))
            one = builder.insert_element(ir.Constant(words4, ir.Undefined), weight, ir.Constant(_WORD, 0))
            each = builder.shuffle_vector(one, one, _splat(0, words4))
            builder.store(builder.add(builder.load(total), builder.mul(pixel, each)), total)
        values = builder.lshr(builder.load(total), _splat(PRECISION, words4))
        _store(builder, builder.trunc(values, bytes4), target, arguments[6])
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def is_aligned64(typing_context, array):  # type: ignore[no-untyped-def]
    """Whether an array's memory begins on a cache line."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        address = builder.ptrtoint(_data(context, builder, signature, arguments, 0), _LONG)
        rest = builder.and_(address, ir.Constant(_LONG, 63))
        return builder.icmp_unsigned("==", rest, ir.Constant(_LONG, 0))

    return types.boolean(array), generate


@intrinsic
def stream64(typing_context, source, at, target, to):  # type: ignore[no-untyped-def]
    """Copy sixty-four bytes to memory past the caches; ``target[to:]`` (uint8) must begin on a cache line."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        source, target = (_data(context, builder, signature, arguments, number) for number in (0, 2))
        values = _load(builder, source, arguments[1], _WORDS)
        place = builder.bitcast(builder.gep(target, [arguments[3]]), _WORDS.as_pointer())
        store = builder.store(values, place, align=64)
        one = builder.module.add_metadata([ir.Constant(_WORD, 1)])
        store.set_metadata("nontemporal", one)
        return context.get_dummy_value()

    return types.void(source, types.int64, target, types.int64), generate


@intrinsic
def end_stream(typing_context):  # type: ignore[no-untyped-def]
    """What was streamed is visible to other processors before anything stored later is."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        if context.codegen().magic_tuple()[0].startswith(("x86_64", "i686")):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse.sfence"), [])
        else:
            builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


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

        bytes64 = _vector(_BYTE, WINDOW)
        shuffle = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(bytes64, [bytes64, bytes64]), "llvm.x86.avx512.permvar.qi.512"
        )
        dot = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_WORDS, [_WORDS] * 3), "llvm.x86.avx512.vpdpbusd.512"
        )
        source, bases, plan, target = (_data(context, builder, signature, arguments, number) for number in (0, 2, 3, 6))
        first, last = arguments[4], arguments[5]
        starts = cgutils.unpack_tuple(builder, arguments[1])
        ends = cgutils.unpack_tuple(builder, arguments[7])
        zero = ir.Constant(_WORDS, None)
        sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(3)] for _ in range(ROWS)]
        with cgutils.for_range_slice(builder, first, last, ir.Constant(_LONG, 1), intp=_LONG) as (step, _):
            base = builder.load(builder.gep(bases, [step]))
            place = builder.mul(step, ir.Constant(_LONG, STEP_WORDS))
            tables = []
            for part in range(4):
                at = builder.gep(plan, [builder.add(place, ir.Constant(_LONG, part * LANES))])
                tables.append(builder.load(builder.bitcast(at, _WORDS.as_pointer()), align=4))
            indices = builder.bitcast(tables[0], bytes64)
            for row in range(ROWS):
                at = builder.gep(source, [builder.add(starts[row], base)])
                window = builder.load(builder.bitcast(at, bytes64.as_pointer()), align=1)
                taps = builder.bitcast(builder.call(shuffle, [window, indices]), _WORDS)
                for part in range(3):
                    total = builder.call(dot, [builder.load(sums[row][part]), taps, tables[part + 1]])
                    builder.store(total, sums[row][part])

        for row in range(ROWS):
            high, middle, low = (builder.load(total) for total in sums[row])
            total = builder.add(builder.shl(high, _splat(16)), builder.shl(middle, _splat(8)))
            total = builder.add(builder.add(total, low), _splat(1 << (PRECISION - 1)))
            rounded = builder.trunc(builder.lshr(total, _splat(PRECISION)), _BYTES)
            at = builder.bitcast(builder.gep(target, [ends[row]]), _BYTES.as_pointer())
            builder.store(rounded, at, align=1)
        return context.get_dummy_value()

    return signature, generate
