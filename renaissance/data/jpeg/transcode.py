"""The entropy-coded data of a sequential JPEG, cut and written again without decoding a coefficient.

`transcode` walks over the blocks of a scan. It adds up the DC differences, skips the AC symbols, and copies the blocks
of a rectangle of MCUs, bit for bit, into a new scan with the same AC tables. Only a DC difference whose predecessor is
another block than before is written anew (or all of them, with other DC tables, when theirs lack a code).

The state of a walk is one row of numbers, `Walk`, and one word of bits that are not yet written.
"""

from __future__ import annotations

from enum import IntEnum

import numba
import numpy as np

from renaissance.data.jpeg.bits import copy_bits, finish, load64, put
from renaissance.data.jpeg.huffman import END, LOOK, STEP

PAD = 512
"""Readable bytes wanted after the entropy-coded data: a block has at most 64 symbols of 31 bits."""


class Plan(IntEnum):
    """Places in the row of numbers that tells `transcode` what to do."""

    COLUMNS = 0
    """MCUs per row of the source."""
    INTERVAL = 1
    """MCUs per restart segment of the source; 0: none."""
    LEFT = 2
    TOP = 3
    RIGHT = 4
    BOTTOM = 5
    """The rectangle of MCUs to be copied, the right column and the bottom row excluded."""
    NEW_INTERVAL = 6
    """MCUs per restart segment of the copy; 0: none."""
    RECODE = 7
    """1: every DC difference is written anew; 0: only those that change."""
    MCUS = 8
    """Of the whole source."""
    COUNT = 9


class Outcome(IntEnum):
    """Second result of `transcode`."""

    DONE = 0
    DAMAGED = 1
    """An impossible code, a missing restart segment, or the data end too early."""
    NO_CODE = 2
    """A DC difference is needed for which the table has no code."""
    NO_ROOM = 3


class Walk(IntEnum):
    """Places in the state of a walk."""

    MCU = 0
    POS = 1
    """Bit of the source at which this MCU begins."""
    MARK = 2
    """Bit from which on the source is still to be copied; -1: nothing is."""
    AT = 3
    """Byte of the output."""
    FILL = 4
    """Bits waiting in the word."""
    PREDICTED = 5
    """Four DC values of the source, then four of the copy, then four flags: 1 = the next difference is written anew."""
    WRITTEN = 9
    FRESH = 13
    COUNT = 17


_COLUMNS, _INTERVAL, _LEFT, _TOP, _RIGHT, _BOTTOM, _EVERY, _RECODE, _MCUS = range(9)
_MCU, _POS, _MARK, _AT, _FILL, _PREDICTED, _WRITTEN, _FRESH = 0, 1, 2, 3, 4, 5, 9, 13


@numba.njit(cache=True, error_model="numpy", nogil=True)
def _long_symbol(word, t, tables):  # type: ignore[no-untyped-def]
    """Symbol << STEP | code length for a code of table `t` at the top of `word`; -1 when there is none."""
    for length in range(1, 17):
        code = np.int64(word >> np.uint64(64 - length))
        if code <= tables.max_code[t, length]:
            return np.int64(tables.symbols[t, tables.offset[t, length] + code]) << STEP | length
    return np.int64(-1)


@numba.njit(cache=True, error_model="numpy", nogil=True)
def _long_ac(word, k, t, tables):  # type: ignore[no-untyped-def]
    """(bits, coefficients) of one AC symbol where the look-up table has no answer; bits -1 when it is impossible."""
    entry = _long_symbol(word, t, tables)
    run, size = entry >> (STEP + 4), (entry >> STEP) & 15
    advance = run + 1 if size > 0 or run == 15 else np.int64(END)
    if entry < 0 or 64 < k + advance <= END:
        return np.int64(-1), advance
    return (entry & 63) + size, advance


@numba.njit(cache=True, error_model="numpy", nogil=True)
def _enter(segment, pos, starts, segments, state):  # type: ignore[no-untyped-def]
    """Bit at which restart segment `segment` begins, where the one before has ended at `pos`; -1 when they do not meet.

    An ended segment may leave seven bits, as libjpeg demands; more would be data that nobody has decoded.
    """
    if segment >= segments or not 0 <= starts[segment] * 8 - pos < 8:
        return np.int64(-1)
    state[_PREDICTED : _PREDICTED + 4] = 0
    return starts[segment] * 8


@numba.njit(cache=True, error_model="numpy", nogil=True)
def _flush(bits, pos, out, word, state):  # type: ignore[no-untyped-def]
    """Copy what is waiting, up to bit `pos`; false when there is no room for it and a little more."""
    mark, at = state[_MARK], state[_AT]
    length = pos - mark if mark >= 0 else 0
    if at + (length >> 2) + 64 > len(out):  # twice the bytes, should each be stuffed
        return False
    if length > 0:
        state[_AT], word[0], state[_FILL] = copy_bits(bits, mark, pos, out, at, word[0], state[_FILL])
    state[_MARK] = -1
    return True


@numba.njit(cache=True, error_model="numpy", nogil=True)
def _put_dc(t, c, writers, out, word, state):  # type: ignore[no-untyped-def]
    """Write the DC difference of component `c` anew with table `t` of `writers`; false when it lacks the code."""
    value = state[_PREDICTED + c] - state[_WRITTEN + c]
    category = 0
    rest = abs(value)
    while rest > 0:
        category += 1
        rest >>= 1
    length = writers.lengths[t, category] if category < 16 else 0
    if length == 0:
        return False
    extra = value if value >= 0 else value + (1 << category) - 1
    code = np.uint64(writers.codes[t, category] << category | extra)
    state[_AT], word[0], state[_FILL] = put(out, state[_AT], word[0], state[_FILL], code, length + category)
    return True


@numba.njit(cache=True, error_model="numpy", nogil=True)
def _restart(index, out, word, state):  # type: ignore[no-untyped-def]
    """End a segment of the copy and write restart marker number `index`; `_flush` has made room."""
    at = finish(out, state[_AT], word[0], state[_FILL])
    out[at] = 255
    out[at + 1] = 0xD0 + (index & 7)
    state[_AT], word[0], state[_FILL] = at + 2, 0, 0
    state[_WRITTEN : _WRITTEN + 4] = 0
    state[_FRESH : _FRESH + 4] = 1


@numba.njit(cache=True, error_model="numpy", nogil=True)
def _border(bits, starts, segments, plan, copied, out, word, state):  # type: ignore[no-untyped-def]
    """Before an MCU: begin a segment of the source (`copied` -1: nothing is copied) or of the copy. An `Outcome`."""
    interval, every = plan[_INTERVAL], plan[_EVERY]
    if interval > 0 and state[_MCU] % interval == 0:  # its bits do not follow those of the MCU before
        if copied >= 0 and not _flush(bits, state[_POS], out, word, state):
            return 3
        state[_POS] = _enter(state[_MCU] // interval, state[_POS], starts, segments, state)
        if state[_POS] < 0:
            return 1
        state[_FRESH : _FRESH + 4] = 1
    if copied > 0 and every > 0 and copied % every == 0:
        if not _flush(bits, state[_POS], out, word, state):
            return 3
        _restart(copied // every - 1, out, word, state)
    return 0


@numba.njit(cache=True, error_model="numpy", nogil=True)
def _new_dc(bits, begun, after, t, c, writers, out, word, state):  # type: ignore[no-untyped-def]
    """Write the DC difference of component `c` anew; in the source it took the bits begun..after. An `Outcome`."""
    if not _flush(bits, begun, out, word, state):
        return 3
    if not _put_dc(t, c, writers, out, word, state):
        return 2
    state[_FRESH + c] = 0
    state[_MARK] = after
    return 0


@numba.njit(cache=True, error_model="numpy", nogil=True)
def _advance(bits, starts, segments, plan, target, copied, component, tables, writers, out, word, state):  # type: ignore[no-untyped-def]
    """Go on to MCU `target`; `copied`: -1 to skip, else copy, and so many MCUs were copied before. An `Outcome`.

    The inner loop is where the time goes, and it is the latency of one look-up after the other. So it is one function
    (an inlined call would count references to the tables for every block), indices are unsigned, two looks are written
    out, and refilling the reader (F. Giesen, "Reading bits in far too many ways", variant 4) is off the critical path:
    `byte` is the next byte to read, `ahead` has the next bits at its top, `count` says how many of them count.
    """
    look = tables.look
    interval, has_borders = plan[_INTERVAL], plan[_INTERVAL] > 0 or plan[_EVERY] > 0
    copying, recode = copied >= 0, plan[_RECODE]
    byte, ahead, count = np.int64(0), np.uint64(0), np.int64(-1)
    while state[_MCU] < target:
        if has_borders or count < 0:
            outcome = _border(bits, starts, segments, plan, copied, out, word, state)
            if outcome:
                return outcome
            pos = state[_POS]
            byte, ahead, count = (pos >> 3) + 7, load64(bits, pos >> 3) << np.uint64(pos & 7), 56 - (pos & 7)
            limit = starts[state[_MCU] // interval + 1 if interval > 0 else 1] * 8
        for b in range(len(component)):
            c, t = component[b, 0], component[b, 1]
            begun = byte * 8 - count
            ahead |= load64(bits, byte) >> np.uint64(count)
            byte += (63 - count) >> 3
            count |= 56
            entry = np.int64(look[np.uint64(t << LOOK) + (ahead >> np.uint64(64 - LOOK))])
            if entry == 0:
                entry = _long_symbol(ahead, t, tables)
                if entry < 0:
                    return 1
            category = entry >> STEP  # the difference is T.81 F.2.2.1, without a jump on its sign, which is random
            ahead <<= np.uint64(entry & 63)
            difference = np.int64((ahead >> np.uint64(1)) >> np.uint64(63 - category))
            difference -= np.int64(np.uint64(1) ^ (ahead >> np.uint64(63))) * ((1 << category) - 1)
            ahead <<= np.uint64(category)
            count -= (entry & 63) + category
            state[_PREDICTED + c] += difference
            if copying:
                if recode or state[_FRESH + c]:
                    outcome = _new_dc(bits, begun, byte * 8 - count, t, c, writers, out, word, state)
                    if outcome:
                        return outcome
                state[_WRITTEN + c] = state[_PREDICTED + c]
            t = component[b, 2]
            first = np.uint64(t << LOOK)
            k = np.int64(1)
            while k < 64:
                ahead |= load64(bits, byte) >> np.uint64(count)
                byte += (63 - count) >> 3
                count |= 56
                entry = np.int64(look[first + (ahead >> np.uint64(64 - LOOK))])
                step, advance = entry & 63, entry >> STEP
                if entry == 0 or (k + advance > 64 and (k + advance <= END or k + advance >= END + 64)):
                    step, advance = _long_ac(ahead, k, t, tables)  # a long code, or symbols of the next block
                    if step < 0:
                        return 1
                ahead <<= np.uint64(step & 63)
                count -= step
                k += advance
                if k >= 64:
                    break
                entry = np.int64(look[first + (ahead >> np.uint64(64 - LOOK))])
                step, advance = entry & 63, entry >> STEP
                if entry == 0 or (k + advance > 64 and (k + advance <= END or k + advance >= END + 64)):
                    step, advance = _long_ac(ahead, k, t, tables)
                    if step < 0:
                        return 1
                ahead <<= np.uint64(step & 63)
                count -= step
                k += advance
            if byte * 8 - count > limit:
                return 1
        state[_MCU] += 1
        state[_POS] = byte * 8 - count
        if copying:
            copied += 1
    if copying and not _flush(bits, state[_POS], out, word, state):
        return 3
    return 0


@numba.njit(cache=True, error_model="numpy", nogil=True)
def transcode(bits, starts, segments, plan, component, tables, writers, out, at):  # type: ignore[no-untyped-def]
    """Copy a rectangle of MCUs of a scan into a new scan.

    bits u8[>= size + PAD]: the source without stuffing, of `size` bytes; starts int64[> segments]: where its restart
    segments begin, then `size`; plan int64[Plan.COUNT]; component int64[blocks, 3]: component, DC table and AC table
    (4-7) of every block of an MCU; tables, writers: `Tables` to read and to write with; out u8: written from `at` on.
    Returns (end of what was written, an `Outcome`).
    """
    state = np.zeros(17, np.int64)
    word = np.zeros(1, np.uint64)
    state[_AT] = at
    state[_MARK] = -1
    columns, interval = plan[_COLUMNS], plan[_INTERVAL]
    for row in range(plan[_TOP], plan[_BOTTOM]):
        begin = row * columns + plan[_LEFT]
        if interval > 0 and begin // interval * interval > state[_MCU]:
            segment = begin // interval
            if segment >= segments:
                return at, 1
            state[_MCU], state[_POS] = segment * interval, starts[segment] * 8
        copied = (row - plan[_TOP]) * (plan[_RIGHT] - plan[_LEFT])
        end = row * columns + plan[_RIGHT]
        for target, done in ((begin, np.int64(-1)), (end, copied)):
            state[_FRESH : _FRESH + 4] = 1
            outcome = _advance(
                bits, starts, segments, plan, target, done, component, tables, writers, out, word, state
            )  # fmt: skip
            if outcome:
                return at, outcome
    if state[_MCU] == plan[_MCUS] and starts[segments] * 8 - state[_POS] >= 8:  # data after the last block
        return at, 1
    return finish(out, state[_AT], word[0], state[_FILL]), 0
