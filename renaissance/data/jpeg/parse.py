"""Compiled reading of a JPEG's marker segments, up to the first scan.

One pass of bounded steps over untrusted bytes: every read is preceded by a check against the length, every loop
advances. Nothing is allocated. The layout is ITU-T T.81 (ISO/IEC 10918-1) Annex B; Adobe's and Exif's segments as
libjpeg and Exif 2.3 read them.
"""

from __future__ import annotations

from enum import IntEnum

import numba
import numpy as np


class Field(IntEnum):
    """Places in the row of numbers that `parse_jpeg` fills."""

    WIDTH = 0
    HEIGHT = 1
    COMPONENTS = 2
    PRECISION = 3
    FRAME_TYPE = 4
    """The second byte of the SOF marker, 0xC0 to 0xCF."""
    FRAME_OFFSET = 5
    """Of the 0xFF of SOF."""
    SCAN_OFFSET = 6
    """Of the 0xFF of the first SOS."""
    SCAN_START = 7
    """Of the first byte of entropy-coded data."""
    SCAN_COMPONENTS = 8
    RESTART_INTERVAL = 9
    ADOBE_TRANSFORM = 10
    """-1 without an Adobe segment."""
    JFIF = 11
    ORIENTATION = 12
    """Exif orientation 1 to 8; 1 without one."""
    FAULT_AT = 13
    IDS = 16
    """Four component identifiers, then four sampling factors h << 4 | v, then four quantisation table numbers."""
    SAMPLING = 20
    TABLES = 24
    COUNT = 28


class Fault(IntEnum):
    """What `parse_jpeg` found; the texts are in `header`."""

    NONE = 0
    CUT = 1
    NO_MARKER = 2
    BAD_LENGTH = 3
    NO_FRAME = 4
    TWO_FRAMES = 5
    NO_SCAN = 6
    BAD_FRAME = 7
    BAD_SCAN = 8


_WIDTH, _HEIGHT, _COMPONENTS, _PRECISION = int(Field.WIDTH), int(Field.HEIGHT), int(Field.COMPONENTS), 3
_TYPE, _FRAME, _SCAN, _START, _IN_SCAN = 4, 5, 6, 7, 8
_INTERVAL, _ADOBE, _JFIF, _ORIENTATION, _AT = 9, 10, 11, 12, 13
_IDS, _SAMPLING, _TABLES = 16, 20, 24
EXIF_ENTRIES = 512
"""So many entries of the first Exif directory are looked at; real ones have about twenty."""


@numba.njit(cache=True, error_model="numpy", nogil=True, inline="always")
def _u16(data, at):  # type: ignore[no-untyped-def]
    """Big-endian u16 at `at` of u8[n]; the caller has checked the bounds."""
    return (np.int64(data[at]) << 8) | np.int64(data[at + 1])


@numba.njit(cache=True, error_model="numpy", nogil=True)
def _tiff(data, at, size, little):  # type: ignore[no-untyped-def]
    """Unsigned integer of `size` bytes at `at` in the TIFF byte order given; the caller has checked the bounds."""
    value = np.int64(0)
    for i in range(size):
        value = (value << 8) | np.int64(data[at + (size - 1 - i if little else i)])
    return value


@numba.njit(cache=True, error_model="numpy", nogil=True)
def _orientation(data, at, end):  # type: ignore[no-untyped-def]
    """Exif orientation of the APP1 payload data[at:end], 1 when there is none or it is not understood."""
    if end - at < 14 or _tiff(data, at, 6, False) != 0x457869660000:  # "Exif\0\0"
        return 1
    base = at + 6
    order = _u16(data, base)
    little = order == 0x4949
    if not little and order != 0x4D4D:
        return 1
    directory = base + _tiff(data, base + 4, 4, little)
    if directory + 2 > end:
        return 1
    entries = min(_tiff(data, directory, 2, little), EXIF_ENTRIES)
    for i in range(entries):
        entry = directory + 2 + 12 * i
        if entry + 12 > end:
            return 1
        if _tiff(data, entry, 2, little) == 0x0112:
            value = _tiff(data, entry + 8, 2, little)
            return value if 1 <= value <= 8 else 1
    return 1


@numba.njit(cache=True, error_model="numpy", nogil=True)
def _frame(data, at, size, out):  # type: ignore[no-untyped-def]
    """Read the SOF payload data[at:at+size] into `out`; whether it is consistent."""
    if size < 6:
        return False
    count = np.int64(data[at + 5])
    if size != 6 + 3 * count or count < 1 or count > 4:
        return False
    out[_PRECISION] = data[at]
    out[_HEIGHT] = _u16(data, at + 1)
    out[_WIDTH] = _u16(data, at + 3)
    out[_COMPONENTS] = count
    for i in range(count):
        out[_IDS + i] = data[at + 6 + 3 * i]
        factors = np.int64(data[at + 7 + 3 * i])
        out[_SAMPLING + i] = factors
        out[_TABLES + i] = data[at + 8 + 3 * i]
        if not (1 <= factors >> 4 <= 4 and 1 <= factors & 15 <= 4):
            return False
    return True


@numba.njit(cache=True, error_model="numpy", nogil=True)
def parse_jpeg(data, out):  # type: ignore[no-untyped-def]
    """Read the markers of u8[n] `data` up to the first SOS into int64[Field.COUNT] `out`; a `Fault`, 0 if none.

    `out[FAULT_AT]` is the offset where it went wrong.
    """
    out[:] = 0
    out[_ADOBE] = -1
    out[_ORIENTATION] = 1
    end = len(data)
    at = 2
    while True:
        out[_AT] = at
        if at + 4 > end:
            return 1
        if data[at] != 0xFF:
            return 2
        marker = np.int64(data[at + 1])
        if marker == 0xFF:  # any number of fill bytes may stand before a marker
            at += 1
            continue
        if marker == 0xD9:
            return 6
        if marker == 0 or marker == 1 or 0xD0 <= marker <= 0xD8:
            return 2
        size = _u16(data, at + 2) - 2
        if size < 0:
            return 3
        body = at + 4
        if body + size > end:
            return 1
        if 0xC0 <= marker <= 0xCF and marker != 0xC4 and marker != 0xC8 and marker != 0xCC:
            if out[_TYPE]:
                return 5
            out[_TYPE] = marker
            out[_FRAME] = at
            if not _frame(data, body, size, out):
                return 7
        elif marker == 0xDA:
            if out[_TYPE] == 0:
                return 4
            count = np.int64(data[body]) if size > 0 else 0
            if count < 1 or count > out[_COMPONENTS] or size != 4 + 2 * count:
                return 8
            out[_SCAN] = at
            out[_START] = body + size
            out[_IN_SCAN] = count
            return 0
        elif marker == 0xDD:
            if size != 2:
                return 3
            out[_INTERVAL] = _u16(data, body)
        elif marker == 0xE0 and size >= 14 and _tiff(data, body, 5, False) == 0x4A46494600:  # "JFIF\0"
            out[_JFIF] = 1
        elif marker == 0xEE and size >= 12 and _tiff(data, body, 5, False) == 0x41646F6265:  # "Adobe"
            out[_ADOBE] = data[body + 11]
        elif marker == 0xE1 and out[_ORIENTATION] == 1:
            out[_ORIENTATION] = _orientation(data, body, body + size)
        at = body + size


@numba.njit(cache=True, error_model="numpy", nogil=True)
def count_scans(data, start, most):  # type: ignore[no-untyped-def]
    """Number of SOS markers in u8[n] `data` from `start` on, at most `most` + 1 (it stops there)."""
    scans = 0
    end = len(data) - 1
    at = start
    while at < end:
        if data[at] == 0xFF and data[at + 1] == 0xDA:
            scans += 1
            if scans > most:
                break
        at += 1
    return scans
