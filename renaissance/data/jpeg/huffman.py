"""Huffman tables of a sequential JPEG, in the forms in which symbols are skipped and written again.

A symbol is followed by as many extra bits as its low four bits say; to find where a block ends, their values do not
matter. So one look at the next LOOK bits skips as many AC symbols as have their codes inside these bits.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

LOOK = 11
"""Bits of one look-up."""
STEP = 6
"""Low bits of an entry that count bits; six, because that is what a shift instruction looks at."""
END = 128
"""Added to the advance of an entry whose last symbol ends the block (EOB)."""
AC = 4
"""Tables 0-3 are the DC tables, 4-7 the AC tables."""


class Tables(NamedTuple):
    """The eight tables that a JPEG may have; one row each."""

    present: npt.NDArray[np.uint8]
    """[8]"""
    max_code: npt.NDArray[np.int64]
    """[8, 18]: largest code of each length, -1 where there is none."""
    offset: npt.NDArray[np.int64]
    """[8, 18]: index in `symbols` minus the first code of that length."""
    symbols: npt.NDArray[np.uint8]
    """[8, 256]"""
    codes: npt.NDArray[np.int64]
    """[8, 16]: of the symbols 0 to 15 (all that a DC table has)."""
    lengths: npt.NDArray[np.int64]
    """[8, 16]: 0 where the table lacks the symbol."""
    look: npt.NDArray[np.uint16]
    """[8 << LOOK], flat: an unsigned index into one dimension is half the address arithmetic of the walk. DC: category
    << STEP | code length. AC: coefficients << STEP | bits. 0: no code that short."""


def new_tables() -> Tables:
    """Memory for the tables of one JPEG; nothing in it is present."""
    return Tables(
        np.zeros(8, np.uint8), np.full((8, 18), -1, np.int64), np.zeros((8, 18), np.int64),
        np.zeros((8, 256), np.uint8), np.zeros((8, 16), np.int64), np.zeros((8, 16), np.int64),
        np.zeros(8 << LOOK, np.uint16),
    )  # fmt: skip


@numba.njit(cache=True, error_model="numpy", nogil=True)
def _codes(data, at, t, tables):  # type: ignore[no-untyped-def]
    """Canonical codes (T.81 Annex C) of table `t` from 16 counts and the symbols at `at`; false when impossible.

    The caller has checked that all the bytes are there. The tests are libjpeg's.
    """
    code = 0
    index = 0
    tables.lengths[t, :] = 0
    for length in range(1, 17):
        count = np.int64(data[at + length - 1])
        tables.offset[t, length] = index - code
        for _ in range(count):
            symbol = np.int64(data[at + 16 + index])
            tables.symbols[t, index] = symbol
            if symbol < 16:
                tables.codes[t, symbol] = code
                tables.lengths[t, symbol] = length
            elif t < AC:
                return False
            code += 1
            index += 1
        tables.max_code[t, length] = code - 1 if count > 0 else -1
        if count > 0 and code >= 1 << length:
            return False
        code <<= 1
    return True


@numba.njit(cache=True, error_model="numpy", nogil=True)
def _look_at_one(t, tables, lengths):  # type: ignore[no-untyped-def]
    """Fill `look` of table `t` with one symbol per entry, and `lengths` u8[1 << LOOK] with the code lengths."""
    look = tables.look[t << LOOK : (t + 1) << LOOK]
    look[:] = 0
    lengths[:] = 0
    index = 0
    for length in range(1, LOOK + 1):
        last = tables.offset[t, length] + tables.max_code[t, length] if tables.max_code[t, length] >= 0 else -1
        while index <= last:
            symbol = np.int64(tables.symbols[t, index])
            entry = symbol << STEP | length
            if t >= AC:
                run, size = symbol >> 4, symbol & 15
                advance = run + 1 if size > 0 or run == 15 else END
                entry = advance << STEP | (length + size)
            begin = (index - tables.offset[t, length]) << (LOOK - length)
            stop = begin + (1 << (LOOK - length))
            look[begin:stop] = entry
            lengths[begin:stop] = length
            index += 1


@numba.njit(cache=True, error_model="numpy", nogil=True)
def _look_at_many(t, tables, lengths, single):  # type: ignore[no-untyped-def]
    """Join entries of AC table `t` whose codes follow each other within LOOK bits; `single` is scratch."""
    look = tables.look[t << LOOK : (t + 1) << LOOK]
    for i in range(1 << LOOK):
        single[i] = look[i]
    for i in range(1 << LOOK):
        entry = np.int64(single[i])
        bits, advance = entry & 63, entry >> STEP
        while entry > 0 and advance < 64 and bits < LOOK:
            follow = (i << bits) & ((1 << LOOK) - 1)
            after = np.int64(single[follow])
            if after == 0 or lengths[follow] > LOOK - bits:
                break
            advance += after >> STEP
            bits += after & 63
        look[i] = advance << STEP | bits


@numba.njit(cache=True, error_model="numpy", nogil=True)
def read_tables(data, start, end, tables):  # type: ignore[no-untyped-def]
    """Build the tables of the DHT payload data[start:end]; false when one is impossible. A later one replaces."""
    lengths = np.empty(1 << LOOK, np.uint8)
    single = np.empty(1 << LOOK, np.uint16)
    at = start
    while at < end:
        if at + 17 > end:
            return False
        kind = np.int64(data[at])
        if (kind & 15) > 3 or kind >> 4 > 1:
            return False
        count = np.int64(0)
        for i in range(16):
            count += np.int64(data[at + 1 + i])
        if count > 256 or at + 17 + count > end:
            return False
        t = (kind & 15) + AC * (kind >> 4)
        tables.present[t] = 0
        if not _codes(data, at + 1, t, tables):
            return False
        _look_at_one(t, tables, lengths)
        if t >= AC:
            _look_at_many(t, tables, lengths, single)
        tables.present[t] = 1
        at += 17 + count
    return True
