"""A small JPEG that holds a rectangle of MCUs of a larger one, made without decoding a pixel.

Two ways. Where restart markers tile the picture, whole restart segments are copied, byte for byte. Otherwise
`transcode` walks over the Huffman codes and copies the blocks. In both the coefficients are those of the source, so a
decoder gives the same pixels (the margin that chroma upsampling looks at is the caller's care).
"""

from __future__ import annotations

import struct
from enum import IntEnum

import numba
import numpy as np
import numpy.typing as npt

from renaissance.data.jpeg.bits import copy_bytes, has_ff, load64, unstuff
from renaissance.data.jpeg.header import PictureHeader, frozen
from renaissance.data.jpeg.huffman import new_tables, read_tables
from renaissance.data.jpeg.transcode import PAD, Outcome, transcode
from renaissance.data.jpeg.window import Window

Bytes = npt.NDArray[np.uint8]
Cut = tuple[Bytes, int, int]
"""A small JPEG, its width and height in pixels."""
STANDARD_DC = bytes([0, 1, 5, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, *range(12)])
"""Counts and symbols of T.81's table K.3: a DC table with a code for every difference of 8-bit pictures."""
_STANDARD_DC = np.frombuffer(STANDARD_DC, np.uint8)
_STANDARD_DHT = np.frombuffer(b"".join(bytes([t]) + STANDARD_DC for t in range(4)), np.uint8)
UNUSUAL = 4
"""Beside `Outcome`: a scan that is legal and that we do not cut."""


class Job(IntEnum):
    """Places in the row of numbers that says what to cut."""

    SCAN_OFFSET = 0
    FRAME_OFFSET = 1
    SCAN_START = 2
    COLUMNS = 3
    ROWS = 4
    INTERVAL = 5
    """MCU columns and rows of the source, MCUs per restart segment (0: none)."""
    LEFT = 6
    TOP = 7
    RIGHT = 8
    BOTTOM = 9
    """The rectangle of MCUs, right and bottom excluded."""
    WIDTH = 10
    HEIGHT = 11
    """Pixels of the rectangle."""
    NEW_INTERVAL = 12
    RECODE = 13
    """1: DC differences are written with the tables of `STANDARD_DC`."""
    COUNT = 14


(
    _SCAN_OFFSET, _FRAME_OFFSET, _SCAN_START, _COLUMNS, _ROWS, _INTERVAL,
    _LEFT, _TOP, _RIGHT, _BOTTOM, _WIDTH, _HEIGHT, _NEW_INTERVAL, _RECODE,
) = range(Job.COUNT)  # fmt: skip


@numba.njit(cache=True, error_model="numpy", nogil=True)
def _component(data, scan_offset, frame_offset, component):  # type: ignore[no-untyped-def]
    """Fill int64[10, 3] `component` (see `transcode`) from SOF and SOS; blocks per MCU, 0 when the scan is unusual.

    `parse_jpeg` has checked that both segments are there in full and that all components are in the scan.
    """
    count = np.int64(data[scan_offset + 4])
    spectral = scan_offset + 5 + 2 * count
    if data[spectral] != 0 or data[spectral + 1] != 63 or data[spectral + 2] != 0:
        return 0
    blocks = 0
    for c in range(count):
        frame = frame_offset + 10 + 3 * c
        scan = scan_offset + 5 + 2 * c
        if data[frame] != data[scan]:
            return 0
        dc, ac = np.int64(data[scan + 1]) >> 4, np.int64(data[scan + 1]) & 15
        if dc > 3 or ac > 3:
            return 0
        factors = np.int64(data[frame + 1])
        many = (factors >> 4) * (factors & 15) if count > 1 else 1
        for _ in range(many):
            if blocks >= 10:
                return 0
            component[blocks, 0] = c
            component[blocks, 1] = dc
            component[blocks, 2] = ac + 4
            blocks += 1
    return blocks


@numba.njit(cache=True, error_model="numpy", nogil=True)
def _head(data, job, component, standard, out):  # type: ignore[no-untyped-def]
    """Write the markers that a decoder needs, with another size and restart interval; bytes written, 0 if no room.

    Everything else (Exif, colour profiles, comments) is left out. `parse_jpeg` has been through these markers.
    With RECODE the DC tables are replaced by `standard`, `STANDARD_DC` as u8[28].
    """
    scan_start, width, height, interval = job[_SCAN_START], job[_WIDTH], job[_HEIGHT], job[_NEW_INTERVAL]
    out[0], out[1] = 255, 0xD8
    to = np.int64(2)
    at = np.int64(2)
    while at < scan_start:
        marker = data[at + 1]
        if marker == 255:
            at += 1
            continue
        size = 2 + (np.int64(data[at + 2]) << 8 | np.int64(data[at + 3]))
        keep = marker == 0xDB or marker == 0xDA or 0xC0 <= marker <= 0xC1 or marker == 0xE0 or marker == 0xEE
        if keep or marker == 0xC4:
            if to + size + 256 > len(out):
                return 0
            if marker == 0xDA and job[_RECODE]:
                for b in range(len(component)):
                    if b == 0 or component[b, 1] != component[b - 1, 1]:
                        out[to], out[to + 1], out[to + 2], out[to + 3] = 255, 0xC4, 0, 31
                        out[to + 4] = component[b, 1]
                        copy_bytes(standard, 0, 28, out, to + 5)
                        to += 33
            if marker == 0xDA and interval > 0:
                out[to], out[to + 1], out[to + 2], out[to + 3] = 255, 0xDD, 0, 4
                out[to + 4], out[to + 5] = interval >> 8, interval & 255
                to += 6
            copy_bytes(data, at, size, out, to)
            if marker == 0xC0 or marker == 0xC1:
                out[to + 5], out[to + 6], out[to + 7], out[to + 8] = height >> 8, height & 255, width >> 8, width & 255
            to += size
        at += size
    return to


@numba.njit(cache=True, error_model="numpy", nogil=True)
def _tables(data, scan_offset, component, tables):  # type: ignore[no-untyped-def]
    """Build the Huffman tables of the markers before `scan_offset`; whether all that `component` names are there."""
    tables.present[:] = 0
    at = np.int64(2)
    while at < scan_offset:
        marker = data[at + 1]
        if marker == 255:
            at += 1
            continue
        size = 2 + (np.int64(data[at + 2]) << 8 | np.int64(data[at + 3]))
        if marker == 0xC4 and not read_tables(data, at + 4, at + size, tables):
            return False
        at += size
    for b in range(len(component)):
        if tables.present[component[b, 1]] == 0 or tables.present[component[b, 2]] == 0:
            return False
    return True


@numba.njit(cache=True, error_model="numpy", nogil=True)
def rewrite_scan(data, job, bits, starts, tables, writers, component, out, at):  # type: ignore[no-untyped-def]
    """Write the entropy-coded data of a rectangle of MCUs at `at` of u8 `out`; other arguments as `cut_blocks`.

    `component` is int64[10, 3] scratch. Returns (end of what was written, an `Outcome` or UNUSUAL, offset in `data` of
    the marker that ends the scan).
    """
    component = component[: _component(data, job[_SCAN_OFFSET], job[_FRAME_OFFSET], component)]
    if len(component) == 0 or not _tables(data, job[_SCAN_OFFSET], component, tables):
        return at, 4, 0
    segments, scan_end = unstuff(data, job[_SCAN_START], bits, starts)
    if segments < 0:
        return at, 1, 0
    plan = np.empty(9, np.int64)
    plan[0], plan[1] = job[_COLUMNS], job[_INTERVAL]
    plan[2], plan[3], plan[4], plan[5] = job[_LEFT], job[_TOP], job[_RIGHT], job[_BOTTOM]
    plan[6], plan[7], plan[8] = job[_NEW_INTERVAL], job[_RECODE], job[_COLUMNS] * job[_ROWS]
    used = writers if job[_RECODE] else tables
    end, outcome = transcode(bits, starts, segments, plan, component, tables, used, out, at)
    return end, outcome, scan_end


@numba.njit(cache=True, error_model="numpy", nogil=True)
def cut_blocks(data, job, bits, starts, tables, writers, standard, out):  # type: ignore[no-untyped-def]
    """Cut a rectangle of MCUs by walking over the Huffman codes.

    data u8[n] stored JPEG; job int64[Job.COUNT]; bits u8[>= n + PAD] and starts int64[k] are scratch (see `unstuff`);
    tables and writers `Tables`, the latter with `STANDARD_DC` as DC tables; out u8: the small JPEG.
    Returns (bytes written, an `Outcome` or UNUSUAL).
    """
    component = np.empty((10, 3), np.int64)
    at = _head(
        data, job, component[: _component(data, job[_SCAN_OFFSET], job[_FRAME_OFFSET], component)], standard, out
    )
    if at == 0:
        return at, 3
    end, outcome, _ = rewrite_scan(data, job, bits, starts, tables, writers, component, out, at)
    if outcome == 0:
        out[end], out[end + 1] = 255, 0xD9
    return end + 2, outcome


@numba.njit(cache=True, error_model="numpy", nogil=True)
def _segment_end(data, start):  # type: ignore[no-untyped-def]
    """Offset of the marker (its 0xFF) that ends the restart segment at `start` of u8[n] `data`; n if there is none."""
    at = start
    size = len(data)
    while at < size:
        if at + 8 <= size and not has_ff(load64(data, at)):
            at += 8
            continue
        while at < size and data[at] != 255:
            at += 1
        if at + 1 >= size:
            return size
        if data[at + 1] == 0:
            at += 2
        elif data[at + 1] == 255:
            at += 1
        else:
            return at
    return size


@numba.njit(cache=True, error_model="numpy", nogil=True)
def cut_segments(data, job, standard, out):  # type: ignore[no-untyped-def]
    """Cut a rectangle of MCUs that whole restart segments tile, by copying their bytes; arguments as `cut_blocks`.

    job: INTERVAL divides LEFT, RIGHT and COLUMNS.
    """
    at = _head(data, job, np.empty((0, 3), np.int64), standard, out)
    if at == 0:
        return 0, 3
    columns, interval = job[_COLUMNS], job[_INTERVAL]
    total = -(-columns * job[_ROWS] // interval)
    last = ((job[_BOTTOM] - 1) * columns + job[_RIGHT] - 1) // interval
    begin = job[_SCAN_START]
    written = 0
    for segment in range(last + 1):
        end = _segment_end(data, begin)
        is_restart = end < len(data) and 0xD0 <= data[end + 1] <= 0xD7
        if end >= len(data) or is_restart != (segment + 1 < total):
            return 0, 1
        if is_restart and data[end + 1] != 0xD0 + (segment & 7):
            return 0, 1
        row, column = (segment * interval) // columns, (segment * interval) % columns
        if job[_TOP] <= row and job[_LEFT] <= column < job[_RIGHT]:
            if at + 2 + end - begin + 2 > len(out):
                return 0, 3
            if written > 0:
                out[at], out[at + 1] = 255, 0xD0 + ((written - 1) & 7)
                at += 2
            copy_bytes(data, begin, end - begin, out, at)
            at += end - begin
            written += 1
        begin = end + 2
    out[at], out[at + 1] = 255, 0xD9
    return at + 2, 0


class Cutter:
    """Cuts small JPEGs out of larger ones. Owns scratch memory that grows to the largest stored picture."""

    def __init__(self) -> None:
        self._tables, self._writers = new_tables(), new_tables()
        if not read_tables(_STANDARD_DHT, 0, len(_STANDARD_DHT), self._writers):
            raise AssertionError("the standard DC table is a table")
        self._bits = self._out = np.empty(0, np.uint8)
        self._starts = np.empty(0, np.int64)
        self._job = np.zeros(Job.COUNT, np.int64)

    def cut(self, stored: Bytes, header: PictureHeader, box: Window, tiled: bool) -> Cut | None:
        """A small JPEG with the MCUs left..right, top..bottom of `box` (both excluded ends) of a `baseline` JPEG.

        `tiled`: the box consists of whole restart segments (`tiled_box`), which are copied as they are. None when it
        cannot be made: the scan is unusual, or damaged, which a full decode will say better. The result is a view of
        scratch, valid until the next call.
        """
        stored = frozen(stored)
        job = self._prepare(stored, header, box)
        if tiled:
            job[Job.NEW_INTERVAL] = header.restart_interval
            size, outcome = cut_segments(stored, job, _STANDARD_DC, self._out)
        else:
            size, outcome = self._cut_blocks(stored, job)
            if outcome == Outcome.NO_CODE:  # optimised tables may lack the long categories
                job[Job.RECODE] = 1
                size, outcome = self._cut_blocks(stored, job)
        if outcome:
            return None
        return self._out[:size], int(job[Job.WIDTH]), int(job[Job.HEIGHT])

    def with_restarts(self, stored: Bytes, header: PictureHeader, interval: int) -> bytes | int:
        """The whole `baseline` JPEG with a restart marker every `interval` MCUs; an `Outcome` or UNUSUAL if impossible.

        All markers are kept; DRI is added, and standard DC tables where the picture's lack a code.
        """
        stored = frozen(stored)
        job = self._prepare(stored, header, (0, 0, header.mcu_columns, header.mcu_rows))
        job[Job.NEW_INTERVAL] = interval
        component = np.zeros((10, 3), np.int64)
        added = b"\xff\xdd\0\4" + struct.pack(">H", interval)
        for recode in (0, 1):
            job[Job.RECODE] = recode
            end, outcome, scan_end = rewrite_scan(
                stored, job, self._bits, self._starts, self._tables, self._writers, component, self._out, 0
            )
            if outcome != Outcome.NO_CODE:
                break
            tables = b"".join(bytes([table]) + STANDARD_DC for table in set(component[:, 1].tolist()))
            added += b"\xff\xc4" + struct.pack(">H", 2 + len(tables)) + tables
        if outcome:
            return int(outcome)
        at, start = header.scan_offset, header.scan_start
        parts = stored[:at], added, stored[at:start], self._out[:end], stored[scan_end:]
        return b"".join(part if isinstance(part, bytes) else part.tobytes() for part in parts)

    def _cut_blocks(self, stored: Bytes, job: npt.NDArray[np.int64]) -> tuple[int, int]:
        size, outcome = cut_blocks(
            stored, job, self._bits, self._starts, self._tables, self._writers, _STANDARD_DC, self._out
        )
        return size, outcome

    def _prepare(self, stored: Bytes, header: PictureHeader, box: tuple[int, int, int, int]) -> npt.NDArray[np.int64]:
        """The job for `box`, without new restart intervals; scratch is large enough afterwards."""
        size, columns, rows = stored.size, header.mcu_columns, header.mcu_rows
        if self._bits.size < size + PAD:
            self._bits = np.empty(size + size // 4 + PAD, np.uint8)
            self._out = np.empty(2 * self._bits.size + 4096, np.uint8)
        segments = -(-columns * rows // header.restart_interval) if header.restart_interval else 1
        if self._starts.size < segments + 2:
            self._starts = np.empty(segments + 2, np.int64)
        left, top, right, bottom = box
        self._job[:] = (
            header.scan_offset, header.frame_offset, header.scan_start, columns, rows, header.restart_interval,
            left, top, right, bottom,
            min(right * header.mcu_width, header.width) - left * header.mcu_width,
            min(bottom * header.mcu_height, header.height) - top * header.mcu_height,
            0, 0,
        )  # fmt: skip
        return self._job
