"""DTS files of small images (MNIST, CIFAR): a 256-byte header region, then all labels, then all images.

``HEADER_FIELDS`` is the format's table (spec/data 1.2): reading, writing, checking and printing go through it, so
they cannot disagree. Every byte of a file is covered: the header field by field, the rest of the header region by
being zero, the body by its CRC-32. All integers are little-endian.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from renaissance.core.errors import DigestMismatch, FormatError, ValueRejected
from renaissance.core.files import opened_regular, written_when_complete
from renaissance.data.catalogue import DatasetInfo, check_split, dataset_info
from renaissance.data.formats.arrays import Bytes, check_labels

MAGIC = b".DTS"
VERSION = (3, 0, 0, 0)
RECORD_BYTES = 144
REGION_BYTES = 256
"""Size of the header region of small-image files; the record comes first, the rest is zero."""

UPSTREAM_MNIST_PIXELS = 3 * 784
"""Existing MNIST files count three bytes a pixel in their size fields (spec/data-golden); exactly that is accepted."""


@dataclass(frozen=True, slots=True)
class Field:
    """One row of the table: attribute of ``DtsHeader``, ``struct`` code, what it is called in messages."""

    name: str
    code: str
    title: str


HEADER_FIELDS = (
    Field("magic", "4s", "magic"),
    Field("version", "4B", "version"),
    Field("dataset_type", "8s", "data set"),
    Field("is_train", "I", "is training set"),
    Field("compress_level", "I", "compress level"),
    Field("val_preprocessed", "I", "validation set preprocessed"),
    Field("num_classes", "I", "number of classes"),
    Field("layout", "4s", "tensor layout"),
    Field("width", "I", "image width"),
    Field("height", "I", "image height"),
    Field("channels", "I", "channels"),
    Field("color", "4s", "colour type"),
    Field("num_samples", "I", "number of samples"),
    Field("num_volumes", "I", "number of volumes"),
    Field("volume_id", "I", "volume id"),
    Field("total_blocks", "I", "blocks over all volumes"),
    Field("blocks", "I", "blocks in this file"),
    Field("total_bytes", "Q", "total bytes"),
    Field("header_bytes", "I", "header bytes"),
    Field("body_bytes", "Q", "body bytes"),
    Field("block_bytes", "I", "bytes per block"),
    Field("block_header_bytes", "I", "block header bytes"),
    Field("alignment", "I", "picture alignment"),
    Field("largest_area", "I", "largest picture area"),
    Field("most_pictures", "I", "most pictures in one block"),
    Field("compression_ratio", "f", "compression ratio"),
    Field("mean", "3f", "normalisation mean"),
    Field("std", "3f", "normalisation std"),
    Field("body_crc32", "I", "CRC-32 of the body"),
)


def _offsets() -> dict[str, int]:
    offsets, at = {}, 0
    for field in HEADER_FIELDS:
        offsets[field.name] = at
        at += struct.calcsize("<" + field.code)
    return offsets


OFFSETS = _offsets()
"""Offset in bytes of each field."""


def _packed(field: Field, value: Any) -> bytes:
    return struct.pack("<" + field.code, *(value if isinstance(value, tuple) else (value,)))


@dataclass(frozen=True, slots=True)
class DtsHeader:
    """The 144-byte record, one attribute per row of ``HEADER_FIELDS``; byte strings keep their padding spaces."""

    magic: bytes
    version: tuple[int, int, int, int]
    dataset_type: bytes
    is_train: int
    compress_level: int
    val_preprocessed: int
    num_classes: int
    layout: bytes
    width: int
    height: int
    channels: int
    color: bytes
    num_samples: int
    num_volumes: int
    volume_id: int
    total_blocks: int
    blocks: int
    total_bytes: int
    header_bytes: int
    body_bytes: int
    block_bytes: int
    block_header_bytes: int
    alignment: int
    largest_area: int
    most_pictures: int
    compression_ratio: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    body_crc32: int

    def pack(self) -> bytes:
        """The record as 144 bytes."""
        return b"".join(_packed(field, getattr(self, field.name)) for field in HEADER_FIELDS)

    @classmethod
    def unpack(cls, record: bytes) -> DtsHeader:
        """Read the first 144 bytes of ``record`` without judging them. Raises FormatError when there are fewer."""
        if len(record) < RECORD_BYTES:
            raise FormatError(f"DTS header: {len(record)} bytes; expected at least {RECORD_BYTES}")
        values: dict[str, Any] = {}
        for field in HEADER_FIELDS:
            found = struct.unpack_from("<" + field.code, record, OFFSETS[field.name])
            values[field.name] = found[0] if len(found) == 1 else found
        return cls(**values)


@dataclass(frozen=True, slots=True)
class SmallImageLayout:
    """What the header of a small-image data set says beyond the catalogue: its code words and file name."""

    info: DatasetInfo
    dataset_type: bytes
    color: bytes
    stem: str

    @property
    def record_bytes(self) -> int:
        """Body bytes of one sample: a label and its pixels."""
        return 1 + self.info.pixels

    def file_name(self, split: str) -> str:
        """Name of the file of one split (the validation set is called test)."""
        return f"{self.stem}_{'train' if split == 'train' else 'test'}.dts"

    def header(self, split: str, num_samples: int, body_crc32: int) -> DtsHeader:
        """The header of a complete file."""
        info, body = self.info, num_samples * self.record_bytes
        return DtsHeader(
            magic=MAGIC,
            version=VERSION,
            dataset_type=self.dataset_type,
            is_train=int(split == "train"),
            compress_level=0,
            val_preprocessed=0,
            num_classes=info.num_classes,
            layout=b"NHWC",
            width=info.width,
            height=info.height,
            channels=info.channels,
            color=self.color,
            num_samples=num_samples,
            num_volumes=1,
            volume_id=0,
            total_blocks=1,
            blocks=1,
            total_bytes=REGION_BYTES + body,
            header_bytes=REGION_BYTES,
            body_bytes=body,
            block_bytes=body,
            block_header_bytes=0,
            alignment=0,
            largest_area=info.height * info.width,
            most_pictures=num_samples,
            compression_ratio=1.0,
            mean=(0.0, 0.0, 0.0),
            std=(0.0, 0.0, 0.0),
            body_crc32=body_crc32,
        )


LAYOUTS = {
    layout.info.name: layout
    for layout in (
        SmallImageLayout(dataset_info("mnist"), b"   MNIST", b"GRAY", "mnist"),
        SmallImageLayout(dataset_info("cifar10"), b" CIFAR10", b" RGB", "cifar10"),
        SmallImageLayout(dataset_info("cifar100"), b"CIFAR100", b" RGB", "cifar100"),
    )
}
_LAYOUT_BY_CODE = {layout.dataset_type: layout for layout in LAYOUTS.values()}
_CODES = ", ".join(repr(code.decode()) for code in _LAYOUT_BY_CODE)
MAX_SAMPLES = {name: (2**32 - 1) // layout.record_bytes for name, layout in LAYOUTS.items()}
"""The body of a small-image file is one block, whose size is a 32-bit field."""


def layout_of(name: str) -> SmallImageLayout:
    """The layout of a data set by name or alias. Raises ValueRejected for a set that has no small-image file."""
    info = dataset_info(name)
    if info.name not in LAYOUTS:
        raise ValueRejected(
            f"data set {info.name!r} is known, but its DTS files cannot be read or written by this version; "
            f"it reads: {', '.join(LAYOUTS)}"
        )
    return LAYOUTS[info.name]


def header_problems(header: DtsHeader, split: str | None = None, name: str | None = None) -> Iterator[str]:
    """One message per field that is not what a file of this set and split says; empty for a good header.

    ``split`` and ``name`` None accept either split and any small-image set.
    """
    if header.magic != MAGIC:
        yield field_problem("magic", header.magic, MAGIC, "this is not a DTS file")
        return
    if header.version != VERSION:
        yield field_problem("version", header.version, VERSION, "it was written by an unknown version of the format")
    layout = _LAYOUT_BY_CODE.get(header.dataset_type)
    if layout is None or (name is not None and layout.info.name != name):
        expected = repr(LAYOUTS[name].dataset_type.decode()) if name else f"one of {_CODES}"
        yield field_problem("dataset_type", header.dataset_type, expected, "open it as the data set it holds")
        return
    if not 1 <= header.num_samples <= MAX_SAMPLES[layout.info.name]:
        yield field_problem("num_samples", header.num_samples, f"1 to {MAX_SAMPLES[layout.info.name]}", "pack it again")
        return
    right = layout.header(split or ("train" if header.is_train else "val"), header.num_samples, header.body_crc32)
    allowed = {"compress_level": (0, 1, 2, 3), "val_preprocessed": (0, 1)}  # no meaning here, but writers let them in
    if layout.info.name == "mnist":
        allowed |= _upstream_sizes(header, right)
    for field in HEADER_FIELDS:
        found, expected = getattr(header, field.name), getattr(right, field.name)
        # Compared as bytes: a flipped sign bit makes -0.0, which equals 0.0.
        if _packed(field, found) != _packed(field, expected) and found not in allowed.get(field.name, ()):
            advice = "this is the other split" if field.name == "is_train" and found in (0, 1) else "pack it again"
            yield field_problem(field.name, found, expected, advice)


def _upstream_sizes(header: DtsHeader, right: DtsHeader) -> dict[str, tuple[int, ...]]:
    # All three size fields are wrong together or none is: a mixture was not written by anybody.
    body = header.num_samples * (UPSTREAM_MNIST_PIXELS + 1)
    wrong = {"total_bytes": REGION_BYTES + body, "body_bytes": body, "block_bytes": body}
    if all(getattr(header, name) == value for name, value in wrong.items()):
        return {name: (value,) for name, value in wrong.items()}
    return {}


def field_problem(name: str, found: object, expected: object, advice: str) -> str:
    """The message about one header field: its offset and title, what it is, what it should be, what to do."""
    title = next(field.title for field in HEADER_FIELDS if field.name == name)
    return f"offset {OFFSETS[name]}: {title} is {show(found)}; expected {show(expected)}; {advice}"


def show(value: object) -> str:
    """A header value as text: byte strings quoted with their spaces, version and floats by their parts."""
    if isinstance(value, bytes):
        return repr(value.decode("ascii", errors="backslashreplace"))
    if isinstance(value, tuple):
        return " ".join(str(part) for part in value)
    return str(value)


def read_dts_header(path: Path) -> tuple[DtsHeader, list[str]]:
    """The header of a file and what is wrong with it (fields, reserved bytes, size of the file).

    Raises FormatError when the file is too short to have one.
    """
    with opened_regular(path) as (file, size):
        return _read_region(path, file, size, None, None)


def _read_region(
    path: Path, file: BinaryIO, size: int, split: str | None, name: str | None
) -> tuple[DtsHeader, list[str]]:
    region = file.read(REGION_BYTES)
    if region[:4] != MAGIC[: len(region)] or not region:
        raise FormatError(f"{path}: offset 0: magic is {show(region[:4])}; expected {show(MAGIC)}; not a DTS file")
    if len(region) < REGION_BYTES:
        raise FormatError(
            f"{path}: is {len(region)} bytes long; a DTS header needs {REGION_BYTES}. The file is truncated; "
            f"pack or fetch it again"
        )
    header = DtsHeader.unpack(region)
    problems = list(header_problems(header, split, name))
    reserved = next((at for at in range(RECORD_BYTES, REGION_BYTES) if region[at]), None)
    if reserved is not None:
        problems.append(f"offset {reserved}: reserved byte is {region[reserved]}; expected 0; pack it again")
    layout = _LAYOUT_BY_CODE.get(header.dataset_type)
    if layout is not None and (expected := REGION_BYTES + header.num_samples * layout.record_bytes) != size:
        what = "truncated" if size < expected else "followed by bytes that do not belong to it"
        problems.insert(
            0,
            f"is {size} bytes long; {header.num_samples} samples (offset {OFFSETS['num_samples']}) make {expected}. "
            f"The file is {what}, or its count is wrong; pack or fetch it again",
        )
    return header, problems


def read_dts(
    path: Path, name: str | None = None, split: str | None = None, verify: bool = True
) -> tuple[DtsHeader, Bytes, Bytes]:
    """Read a whole file: its header, labels uint8 [N], images uint8 [N,H,W,C] (both views of one buffer).

    ``name`` and ``split``, when given, must be what the file holds. ``verify`` compares the body with its CRC-32.
    Memory is allocated only after the header agrees with the size of the file. Raises MissingFileError, FormatError
    (any field, size, label) and DigestMismatch (CRC), each naming file and offset.
    """
    if name is not None:
        name = layout_of(name).info.name
    if split is not None:
        check_split(split)
    with opened_regular(path) as (file, size):
        header, problems = _read_region(path, file, size, split, name)
        if problems:
            raise FormatError(f"{path}: {problems[0]}")
        info = _LAYOUT_BY_CODE[header.dataset_type].info
        body = np.empty(size - REGION_BYTES, dtype=np.uint8)
        got = file.readinto(body.data)  # type: ignore[attr-defined]  # BinaryIO lacks readinto
    if got != body.size:
        raise FormatError(f"{path}: ended at offset {REGION_BYTES + got} while being read; expected {size} bytes")
    if verify and (crc := zlib.crc32(body.data)) != header.body_crc32:
        raise DigestMismatch(
            f"{path}: CRC-32 of the body (offset {REGION_BYTES} to the end) is {crc:08x}; "
            f"expected {header.body_crc32:08x} (offset {OFFSETS['body_crc32']}). The file is damaged; pack it again"
        )
    n = header.num_samples
    labels, images = body[:n], body[n:].reshape(n, info.height, info.width, info.channels)
    check_labels(labels, info, path, REGION_BYTES)
    return header, labels, images


def body_crc32(labels: Bytes, images: Bytes) -> int:
    """CRC-32 of the body that a file of these labels and images has."""
    return zlib.crc32(np.ascontiguousarray(images).data, zlib.crc32(np.ascontiguousarray(labels).data))


def write_dts(path: Path, name: str, split: str, labels: Bytes, images: Bytes) -> DtsHeader:
    """Write a file of labels uint8 [N] and images uint8 [N,H,W,C]; it replaces ``path`` only when complete.

    Returns the header. Raises ValueRejected when the arrays are not what the data set holds, FormatError for a
    label out of range, and RenaissanceError when the disk refuses.
    """
    layout = layout_of(name)
    info, n = layout.info, int(labels.size)
    check_split(split)
    expected = (n, info.height, info.width, info.channels)
    if labels.dtype != np.uint8 or images.dtype != np.uint8 or labels.ndim != 1 or images.shape != expected:
        raise ValueRejected(
            f"{path}: labels are {labels.dtype} {list(labels.shape)} and images {images.dtype} {list(images.shape)}; "
            f"{info.name} needs uint8 [{n}] and uint8 {list(expected)}"
        )
    if not 1 <= n <= MAX_SAMPLES[info.name]:
        raise ValueRejected(f"{path}: {n} samples; a {info.name} file holds 1 to {MAX_SAMPLES[info.name]}")
    check_labels(labels, info, path, REGION_BYTES)
    labels, images = np.ascontiguousarray(labels), np.ascontiguousarray(images)
    header = layout.header(split, n, body_crc32(labels, images))
    with written_when_complete(path) as file:
        file.write(header.pack().ljust(REGION_BYTES, b"\0"))
        file.write(labels.data)
        file.write(images.data)
    return header
