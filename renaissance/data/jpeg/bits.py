"""Eight bytes at a time, big-endian and unaligned, inside compiled code; and a writer of entropy-coded bits.

JPEG's entropy-coded data is read from its most significant bit on. A byte 0xFF in it is followed by a stuffed 0x00, so
that markers can be found without decoding; `put` and `finish` stuff while they write.
"""

from __future__ import annotations

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_WORD = ir.IntType(64)
ONES = np.uint64(0x0101010101010101)
TOPS = np.uint64(0x8080808080808080)


def _swapped(builder, value):  # type: ignore[no-untyped-def]
    """The LLVM value u64 with its bytes reversed."""
    kind = ir.FunctionType(_WORD, [_WORD])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.bswap.i64"), [value])


@intrinsic
def load64(typing_context, array, index):  # type: ignore[no-untyped-def]
    """Big-endian u64 at byte `index` of u8[n] `array`; the caller has checked index + 8 <= n."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        place = builder.bitcast(builder.gep(data, [arguments[1]]), _WORD.as_pointer())
        return _swapped(builder, builder.load(place, align=1))  # type: ignore[no-untyped-call]

    return types.uint64(array, types.int64), generate


@intrinsic
def store64(typing_context, array, index, value):  # type: ignore[no-untyped-def]
    """Store u64 `value` big-endian at byte `index` of u8[n] `array`; the caller has checked index + 8 <= n."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        place = builder.bitcast(builder.gep(data, [arguments[1]]), _WORD.as_pointer())
        builder.store(_swapped(builder, arguments[2]), place, align=1)  # type: ignore[no-untyped-call]
        return context.get_dummy_value()

    return types.void(array, types.int64, types.uint64), generate


@numba.njit(cache=True, error_model="numpy", nogil=True)
def copy_bytes(source, start, count, out, at):  # type: ignore[no-untyped-def]
    """Copy bytes between u8 arrays; the caller has checked both. (A slice assignment compiles for seconds.)"""
    for i in range(count):
        out[at + i] = source[start + i]


@numba.njit(cache=True, error_model="numpy", nogil=True, inline="always")
def has_ff(word):  # type: ignore[no-untyped-def]
    """Whether one of the eight bytes of u64 `word` is 0xFF (the zero-byte test on its complement)."""
    return ((~word - ONES) & word & TOPS) != np.uint64(0)


@numba.njit(cache=True, error_model="numpy", nogil=True)
def _stuffed(out, at, word, count):  # type: ignore[no-untyped-def]
    """Write the first `count` bytes of u64 `word` at `at` of u8[n] `out`, a zero after each 0xFF; the new position."""
    for i in range(count):
        byte = np.uint8((word >> np.uint64(56 - 8 * i)) & np.uint64(255))
        out[at] = byte
        at += 1
        if byte == 255:
            out[at] = 0
            at += 1
    return at


@numba.njit(cache=True, error_model="numpy", nogil=True)
def _spill(out, at, word):  # type: ignore[no-untyped-def]
    """Write the eight bytes of `word` at `at` of u8[n] `out`, stuffed; the new position (at most at + 16)."""
    if not has_ff(word):
        store64(out, at, word)
        return at + 8
    return _stuffed(out, at, word, 8)


@numba.njit(cache=True, error_model="numpy", nogil=True, inline="always")
def put(out, at, word, fill, value, count):  # type: ignore[no-untyped-def]
    """Append the low `count` (1..57) bits of u64 `value`; `word` holds `fill` (0..63) bits at its top.

    Returns the new (at, word, fill). The caller has checked that 16 bytes fit at `at`.
    """
    total = fill + count
    if total < 64:
        return at, word | (value << np.uint64(64 - total)), total
    rest = total - 64
    at = _spill(out, at, word | (value >> np.uint64(rest)))
    return at, (value << np.uint64(64 - rest) if rest > 0 else np.uint64(0)), rest


@numba.njit(cache=True, error_model="numpy", nogil=True)
def copy_bits(source, start, stop, out, at, word, fill):  # type: ignore[no-untyped-def]
    """Append bits start..stop of u8[n] `source` (9 readable bytes beyond them); returns (at, word, fill).

    The caller has checked that 2 * bytes + 16 fit at `at`.
    """
    pos = start
    while fill > 0 and stop - pos >= 64:  # fill the word that has been begun
        count = min(64 - fill, 56)
        value = (load64(source, pos >> 3) << np.uint64(pos & 7)) >> np.uint64(64 - count)
        at, word, fill = put(out, at, word, fill, value, count)
        pos += count
    shift = np.uint64(pos & 7)
    while stop - pos >= 64:  # here fill is 0
        byte = pos >> 3
        word = load64(source, byte) << shift | np.uint64(source[byte + 8]) >> (np.uint64(8) - shift)
        at = _spill(out, at, word)
        word = np.uint64(0)
        pos += 64
    while pos < stop:
        count = min(stop - pos, 56)
        value = (load64(source, pos >> 3) << np.uint64(pos & 7)) >> np.uint64(64 - count)
        at, word, fill = put(out, at, word, fill, value, count)
        pos += count
    return at, word, fill


@numba.njit(cache=True, error_model="numpy", nogil=True)
def finish(out, at, word, fill):  # type: ignore[no-untyped-def]
    """Fill the last byte with ones and write what is left; the new position, at most at + 16."""
    if fill & 7:
        pad = 8 - (fill & 7)
        word |= np.uint64((1 << pad) - 1) << np.uint64(64 - fill - pad)
        fill += pad
    return _stuffed(out, at, word, fill >> 3)


@numba.njit(cache=True, error_model="numpy", nogil=True)
def unstuff(data, start, out, starts):  # type: ignore[no-untyped-def]
    """Copy the entropy-coded data of a scan without stuffing and markers.

    data u8[n] stored JPEG, `start` of the scan's data; out u8[>= n - start + 8]; starts int64[k] gets the byte in `out`
    at which each restart segment begins, in order, and then the number of bytes.
    Returns (segments, offset in data of the marker that ends the scan); segments is -1 when the scan does not end with
    a marker, or restart markers are out of order or more than k - 2.
    """
    size = len(data)
    at = start
    to = 0
    starts[0] = 0
    segments = 1
    while at < size:
        if at + 8 <= size:
            word = load64(data, at)
            store64(out, to, word)
            if not has_ff(word):
                at += 8
                to += 8
                continue
        while at < size and data[at] != 255:
            out[to] = data[at]
            at += 1
            to += 1
        if at + 1 >= size:
            break
        code = data[at + 1]
        if code == 0:
            out[to] = 255
            to += 1
            at += 2
        elif 0xD0 <= code <= 0xD7:
            if segments + 1 >= len(starts) or code != 0xD0 + ((segments - 1) & 7):
                break
            starts[segments] = to
            segments += 1
            at += 2
        elif code == 255:
            at += 1
        else:
            starts[segments] = to
            return segments, at
    return -1, at
