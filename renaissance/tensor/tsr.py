"""TSR files, version 4.20: tensors with shapes and checksums in one little-endian file. docs/tsr.md is the format.

``save_tsr`` writes beside the target, syncs and renames, so a file under its final name is complete. ``load_tsr``
verifies every byte: all fields, both kinds of CRC, zero gaps and the exact end of the file. Whatever is in the file,
the only error is FormatError, naming file and offset, and memory use is bounded by the file's size.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from renaissance.core.dtype import DType
from renaissance.core.errors import DTypeError, FormatError, MissingFileError, ShapeError, ValueRejected
from renaissance.core.files import written_when_complete
from renaissance.core.region import align
from renaissance.core.shape import Shape
from renaissance.tensor.tensor import Tensor

MAGIC = b"TSR4"
MAJOR, MINOR = 4, 20
HEADER_BYTES = 128
ENTRY_BYTES = 64
RAW, ZLIB = 0, 1
CRC_AT = 0x28
ZLIB_LEVEL = 6
MAX_ZLIB_BLOCK = 2**32
"""Bytes of one tensor in zlib mode."""

ZLIB_MAX_RATIO = 1032
"""Deflate cannot expand further; a directory that claims more is refused before anything is allocated."""

ZLIB_SLACK = 64
MAX_TENSORS = (2**31 - HEADER_BYTES) // ENTRY_BYTES

_HEADER = struct.Struct("<4s2H4I2Q2I80s")
_ENTRY = struct.Struct("<B3s4i5QI")
assert (_HEADER.size, _ENTRY.size) == (HEADER_BYTES, ENTRY_BYTES)


@dataclass(frozen=True, slots=True)
class _Entry:
    """One directory entry: the tensor it describes and where its payload lies (bytes from the start of the file)."""

    shape: Shape
    dtype: DType
    nbytes: int
    offset: int
    stored: int
    crc: int


def save_tsr(path: str | os.PathLike[str], tensors: Tensor | Sequence[Tensor], compress: bool = False) -> None:
    """Write one or more tensors. The file has no names; the order is kept.

    Raises DTypeError for anything but Tensors, ValueRejected for none, for a mapping (its names would be lost) and for
    a block too large for zlib mode, RenaissanceError when the system refuses. A failure leaves neither the target
    changed nor a temporary file.
    """
    target = Path(path)
    if isinstance(tensors, Mapping):
        raise ValueRejected(f"{target}: TSR files hold no names; give the tensors as a list and keep their names aside")
    items = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if not 1 <= len(items) <= MAX_TENSORS:
        raise ValueRejected(f"{target}: {len(items)} tensors to save; expected 1 to {MAX_TENSORS}")
    strange = next((item for item in items if not isinstance(item, Tensor)), None)
    if strange is not None:
        raise DTypeError(f"{target}: a {type(strange).__name__} to save; expected Tensors (see Tensor.from_numpy)")
    parts = _encode(target, items, compress)
    with written_when_complete(target) as file:
        for part in parts:
            file.write(part)


def load_tsr(path: str | os.PathLike[str]) -> list[Tensor]:
    """All tensors of a file, in order, verified. Raises MissingFileError or FormatError."""
    file = Path(path)
    try:
        data = memoryview(file.read_bytes())
    except FileNotFoundError:
        raise MissingFileError(f"{file}: no such TSR file") from None
    except IsADirectoryError:
        raise FormatError(f"{file}: is a folder; expected a TSR file") from None
    mode, count, data_offset = _read_header(file, data)
    entries = [_read_entry(file, data, i, mode) for i in range(count)]
    _check_layout(file, data, entries, mode, data_offset)
    return [_read_tensor(file, data, i, entry, mode) for i, entry in enumerate(entries)]


def load_first_tsr(path: str | os.PathLike[str]) -> Tensor:
    """The first tensor of a file; the whole file is verified."""
    return load_tsr(path)[0]


def load_one_tsr(path: str | os.PathLike[str]) -> Tensor:
    """The tensor of a file that must hold exactly one. Raises ValueRejected otherwise."""
    tensors = load_tsr(path)
    if len(tensors) != 1:
        raise ValueRejected(f"{Path(path)}: holds {len(tensors)} tensors; expected exactly one (load_tsr reads all)")
    return tensors[0]


# -- writing ----------------------------------------------------------------------------------------------------


def _encode(target: Path, tensors: Sequence[Tensor], compress: bool) -> list[bytes | memoryview]:
    """Header, directory, and gaps and payloads in file order."""
    directory_end = HEADER_BYTES + ENTRY_BYTES * len(tensors)
    position = data_offset = directory_end if compress else align(directory_end)
    entries: list[bytes] = []
    body: list[bytes | memoryview] = [bytes(data_offset - directory_end)]
    for index, tensor in enumerate(tensors):
        raw = tensor.numpy().reshape(-1).view(np.uint8).data
        if compress and raw.nbytes > MAX_ZLIB_BLOCK:
            raise ValueRejected(
                f"{target}: tensor {index} has {raw.nbytes} bytes; zlib mode takes at most {MAX_ZLIB_BLOCK}, so save "
                "it raw"
            )
        payload = memoryview(zlib.compress(raw, ZLIB_LEVEL)) if compress else raw
        start = position if compress else align(position)
        body += [bytes(start - position), payload]
        entries.append(_encode_entry(tensor, start, payload.nbytes, zlib.crc32(raw)))
        position = start + payload.nbytes
    return [_encode_header(len(tensors), ZLIB if compress else RAW, data_offset), *entries, *body]


def _encode_header(count: int, mode: int, data_offset: int) -> bytes:
    def packed(crc: int) -> bytes:
        return _HEADER.pack(
            MAGIC, MAJOR, MINOR, HEADER_BYTES, mode, count, ENTRY_BYTES, HEADER_BYTES, data_offset, crc, 0, bytes(80)
        )

    return packed(zlib.crc32(packed(0)))


def _encode_entry(tensor: Tensor, offset: int, stored: int, crc: int) -> bytes:
    return _ENTRY.pack(
        int(tensor.dtype),
        bytes(3),
        *tensor.shape.dims,
        tensor.numel,
        tensor.row_stride,
        tensor.nbytes,
        offset,
        stored,
        crc,
    )


# -- reading ----------------------------------------------------------------------------------------------------


def _expect(file: Path, offset: int, what: str, found: object, expected: object) -> None:
    if found != expected:
        raise FormatError(f"{file}: offset {offset:#x}: {what} is {found!r}; expected {expected!r}")


def _read_header(file: Path, data: memoryview) -> tuple[int, int, int]:
    """(mode, tensor count, data offset) of a verified header."""
    if len(data) < HEADER_BYTES:
        raise FormatError(f"{file}: {len(data)} bytes; a TSR file starts with a header of {HEADER_BYTES} bytes")
    fields = _HEADER.unpack_from(data)
    magic, major, minor, header, mode, count, entry, directory, data_offset, crc, reserved, zeros = fields
    _expect(file, 0x00, "magic", magic, MAGIC)
    _expect(file, 0x04, "version", (major, minor), (MAJOR, MINOR))
    blank = bytearray(data[:HEADER_BYTES])
    blank[CRC_AT : CRC_AT + 4] = bytes(4)
    _expect(file, CRC_AT, "header CRC-32", f"{crc:08x}", f"{zlib.crc32(blank):08x}")
    _expect(file, 0x08, "header size", header, HEADER_BYTES)
    if mode not in (RAW, ZLIB):
        raise FormatError(f"{file}: offset 0xc: mode is {mode}; expected 0 (raw) or 1 (zlib)")
    _expect(file, 0x14, "directory entry size", entry, ENTRY_BYTES)
    _expect(file, 0x18, "directory offset", directory, HEADER_BYTES)
    _expect(file, 0x2C, "reserved word", reserved, 0)
    _expect(file, 0x30, "reserved bytes", zeros, bytes(80))
    room = (len(data) - HEADER_BYTES) // ENTRY_BYTES
    if not 1 <= count <= room:
        raise FormatError(f"{file}: offset 0x10: tensor count is {count}; the file has room for 1 to {room}")
    return mode, count, data_offset


def _read_entry(file: Path, data: memoryview, index: int, mode: int) -> _Entry:
    at = HEADER_BYTES + ENTRY_BYTES * index
    code, zeros, n, h, w, c, numel, stride, nbytes, offset, stored, crc = _ENTRY.unpack_from(data, at)
    name = f"tensor {index}"
    try:
        dtype, shape = DType(code), Shape(n, h, w, c)
    except ShapeError as error:
        raise FormatError(f"{file}: offset {at + 4:#x}: {name}: {error}") from None
    except ValueError:
        allowed = ", ".join(f"{int(d)} {d.name}" for d in DType)
        raise FormatError(f"{file}: offset {at:#x}: {name}: dtype is {code}; expected one of: {allowed}") from None
    _expect(file, at + 0x01, f"{name}: reserved bytes", zeros, bytes(3))
    _expect(file, at + 0x14, f"{name}: element count", numel, shape.numel)
    _expect(file, at + 0x1C, f"{name}: row stride", stride, w * c * dtype.itemsize)
    _expect(file, at + 0x24, f"{name}: bytes", nbytes, numel * dtype.itemsize)
    if mode == RAW:
        _expect(file, at + 0x34, f"{name}: stored bytes", stored, nbytes)
    elif not nbytes <= min(MAX_ZLIB_BLOCK, stored * ZLIB_MAX_RATIO + ZLIB_SLACK):
        raise FormatError(f"{file}: offset {at + 0x24:#x}: {name}: {stored} zlib bytes cannot hold {nbytes} bytes")
    return _Entry(shape, dtype, nbytes, offset, stored, crc)


def _check_layout(file: Path, data: memoryview, entries: Sequence[_Entry], mode: int, data_offset: int) -> None:
    """Payloads in order, gaps zero, the last payload ends the file."""
    position = HEADER_BYTES + ENTRY_BYTES * len(entries)
    if mode == RAW:
        _expect(file, 0x20, "data offset", data_offset, align(position))
    elif data_offset not in (position, align(position)):
        raise FormatError(f"{file}: offset 0x20: data offset is {data_offset}; expected {position} (packed)")
    for index, entry in enumerate(entries):
        start = data_offset if index == 0 else position if mode == ZLIB else align(position)
        at = HEADER_BYTES + ENTRY_BYTES * index + 0x2C
        _expect(file, at, f"tensor {index}: payload offset", entry.offset, start)
        if start + entry.stored > len(data):
            raise FormatError(
                f"{file}: offset {start:#x}: tensor {index} ends at byte {start + entry.stored}, but the file has "
                f"{len(data)} bytes; it is truncated"
            )
        if any(data[position:start]):
            raise FormatError(f"{file}: offset {position:#x}: bytes before tensor {index} are not zero")
        position = start + entry.stored
    if position != len(data):
        raise FormatError(f"{file}: offset {position:#x}: {len(data) - position} bytes follow the last tensor")


def _read_tensor(file: Path, data: memoryview, index: int, entry: _Entry, mode: int) -> Tensor:
    payload: memoryview | bytes = data[entry.offset : entry.offset + entry.stored]
    if mode == ZLIB:
        payload = _inflate(file, payload, index, entry)
    actual = zlib.crc32(payload)
    if actual != entry.crc:
        raise FormatError(
            f"{file}: offset {entry.offset:#x}: tensor {index}: data CRC-32 is {actual:08x}; expected {entry.crc:08x}, "
            "the file is damaged"
        )
    array = np.frombuffer(payload, dtype=entry.dtype.numpy.newbyteorder("<")).astype(entry.dtype.numpy, copy=False)
    return Tensor.from_numpy(array.reshape(entry.shape.dims), entry.dtype)


def _inflate(file: Path, payload: memoryview | bytes, index: int, entry: _Entry) -> bytes:
    """Inflate exactly one complete zlib stream of ``entry.nbytes`` bytes."""
    inflater = zlib.decompressobj()
    where = f"{file}: offset {entry.offset:#x}: tensor {index}"
    try:
        raw = inflater.decompress(payload, entry.nbytes)
        rest = inflater.decompress(inflater.unconsumed_tail, 1) if not inflater.eof else b""
    except zlib.error as error:
        raise FormatError(f"{where}: zlib data is damaged ({error})") from None
    if len(raw) != entry.nbytes or rest or not inflater.eof or inflater.unused_data or inflater.unconsumed_tail:
        raise FormatError(f"{where}: zlib data does not hold exactly {entry.nbytes} bytes")
    return raw


__all__ = ["load_first_tsr", "load_one_tsr", "load_tsr", "save_tsr"]
