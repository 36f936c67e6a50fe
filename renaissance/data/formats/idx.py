"""idx files (the published form of MNIST), plain or gzip-compressed: big-endian header, then unsigned bytes.

A file says its size twice, in the header and by its length, and both must agree. Compressed files are unpacked no
further than their own header announces, so a small file cannot make the reader fill the memory.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from renaissance.core.errors import DigestMismatch, FormatError, MissingFileError
from renaissance.core.files import opened_regular
from renaissance.data.catalogue import DatasetInfo, PublishedFile, check_split, dataset_info
from renaissance.data.formats.archive import DEFLATE_LIMIT
from renaissance.data.formats.arrays import Bytes, check_labels

LABEL_MAGIC = 2049
"""0x00000801: unsigned bytes, one axis."""
IMAGE_MAGIC = 2051
"""0x00000803: unsigned bytes, three axes (count, rows, columns)."""
GZIP_MAGIC = b"\x1f\x8b"

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class RawSplit:
    """File names of one split, without ``.gz``."""

    images: str
    labels: str


MNIST_FILES = {
    "train": RawSplit("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "val": RawSplit("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


@dataclass(frozen=True, slots=True)
class IdxHeader:
    """Magic and sizes of an idx file of unsigned bytes: ``(count,)`` or ``(count, rows, columns)``."""

    magic: int
    shape: tuple[int, ...]

    @property
    def header_bytes(self) -> int:
        """Bytes before the data."""
        return 4 + 4 * len(self.shape)

    @property
    def file_bytes(self) -> int:
        """Bytes of the complete (unpacked) file."""
        size = self.header_bytes
        data = 1
        for axis in self.shape:
            data *= axis
        return size + data

    def pack(self) -> bytes:
        """The header as bytes."""
        return struct.pack(f">{1 + len(self.shape)}I", self.magic, *self.shape)


def read_idx_header(path: Path) -> tuple[IdxHeader, bool]:
    """The header of a file and whether the file is compressed. Raises FormatError when it is not an idx file."""
    with opened_regular(path) as (file, _):
        compressed = _is_compressed(file)
        with _unpacked(path, file, compressed) as stream:
            return _read_header(path, stream), compressed


def read_idx(path: Path) -> tuple[IdxHeader, Bytes]:
    """Read a whole idx file, uint8 of the shape its header gives; the gzip checksum is compared too.

    Raises MissingFileError, or FormatError for a wrong magic, a wrong length or damaged compression.
    """
    with opened_regular(path) as (file, size):
        compressed = _is_compressed(file)
        with _unpacked(path, file, compressed) as stream:
            header = _read_header(path, stream)
            expected = header.file_bytes
            if not compressed and size != expected:
                raise FormatError(f"{path}: is {size} bytes long; its header {_text(header)} makes {expected}")
            if compressed and expected > DEFLATE_LIMIT * size:
                raise FormatError(
                    f"{path}: its header {_text(header)} announces {expected} bytes, more than {size} compressed "
                    f"bytes can hold; the file is damaged"
                )
            data = _read_up_to(path, stream, expected - header.header_bytes + 1)
    found = header.header_bytes + len(data)
    if found != expected:
        found_text = "more" if found > expected else str(found)
        raise FormatError(f"{path}: holds {found_text} bytes; its header {_text(header)} makes {expected}")
    return header, np.frombuffer(data, dtype=np.uint8).reshape(header.shape)


def read_idx_images(path: Path, info: DatasetInfo) -> Bytes:
    """Images of an idx file, uint8 [N,H,W,1]. Raises FormatError unless they have the size the data set has."""
    header, data = read_idx(path)
    _expect_magic(path, header, IMAGE_MAGIC, "images")
    if header.shape[1:] != (info.height, info.width):
        raise FormatError(
            f"{path}: offset 8: images of {header.shape[1]} x {header.shape[2]} pixels; "
            f"expected {info.height} x {info.width} for {info.name}"
        )
    return data.reshape(*header.shape, 1)


def read_idx_labels(path: Path, info: DatasetInfo) -> Bytes:
    """Labels of an idx file, uint8 [N]. Raises FormatError naming the first record that is not a class."""
    header, data = read_idx(path)
    _expect_magic(path, header, LABEL_MAGIC, "labels")
    check_labels(data, info, path, header.header_bytes)
    return data


def find_raw(folder: Path, name: str) -> Path | None:
    """The file ``name`` in ``folder``: the extracted one, else the one with ``.gz``, else None."""
    for candidate in (folder / name, folder / f"{name}.gz"):
        if candidate.is_file():
            return candidate
    return None


def read_raw_mnist(folder: Path, split: str) -> tuple[Bytes, Bytes, str]:
    """Labels uint8 [N], images uint8 [N,28,28,1] and the names of the two files of one split.

    Raises MissingFileError with the names that are looked for, or FormatError.
    """
    info, names = dataset_info("mnist"), MNIST_FILES[check_split(split)]
    image_path, label_path = find_raw(folder, names.images), find_raw(folder, names.labels)
    if image_path is None or label_path is None:
        missing = [n for n, path in ((names.images, image_path), (names.labels, label_path)) if path is None]
        raise MissingFileError(
            f"{folder}: no {' and no '.join(missing)} (with or without .gz); expected the published MNIST files there"
        )
    labels, images = read_idx_labels(label_path, info), read_idx_images(image_path, info)
    if len(labels) != len(images):
        raise FormatError(
            f"{image_path}: {len(images)} images but {len(labels)} labels in {label_path}; expected equal counts "
            f"(offset 4 of both files)"
        )
    if not len(labels):
        raise FormatError(f"{image_path}: holds no images (offset 4: count is 0)")
    return labels, images, f"{image_path}, {label_path}"


def check_published(path: Path, published: PublishedFile) -> None:
    """Raise DigestMismatch unless a file has the CRC-32 (of the whole file) under which it was published."""
    crc = 0
    with opened_regular(path) as (file, _):
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    if crc != published.crc32:
        raise DigestMismatch(
            f"{path}: CRC-32 is {crc:08x}; published as {published.crc32:08x}. It is not the published file; "
            f"fetch it again"
        )


def _is_compressed(file: IO[bytes]) -> bool:
    compressed = file.read(2) == GZIP_MAGIC
    file.seek(0)
    return compressed


class _unpacked:  # noqa: N801  # reads as a verb in a with statement
    """The bytes of an idx file whether or not it is compressed; errors of the compression name the file."""

    def __init__(self, path: Path, file: IO[bytes], compressed: bool) -> None:
        self._path = path
        self._stream: IO[bytes] = gzip.GzipFile(fileobj=file, mode="rb") if compressed else file  # type: ignore[assignment]

    def __enter__(self) -> IO[bytes]:
        return self._stream

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # gzip reports damage in four ways: header and checksum, early end, and broken deflate data.
        if isinstance(error, (gzip.BadGzipFile, EOFError, zlib.error)):
            raise FormatError(
                f"{self._path}: compressed data are damaged ({str(error).rstrip('.')}); fetch the file again"
            ) from error


def _read_header(path: Path, stream: IO[bytes]) -> IdxHeader:
    start = _read_up_to(path, stream, 4)
    magic = int.from_bytes(start, "big")
    axes = {LABEL_MAGIC: 1, IMAGE_MAGIC: 3}.get(magic)
    if len(start) < 4 or axes is None:
        raise FormatError(
            f"{path}: offset 0: idx magic is {magic} (bytes {start.hex(' ') or 'none'}); "
            f"expected {LABEL_MAGIC} (labels) or {IMAGE_MAGIC} (images)"
        )
    sizes = _read_up_to(path, stream, 4 * axes)
    if len(sizes) < 4 * axes:
        raise FormatError(f"{path}: ended at offset {4 + len(sizes)}; an idx header needs {4 + 4 * axes} bytes")
    return IdxHeader(magic, struct.unpack(f">{axes}I", sizes))


def _read_up_to(path: Path, stream: IO[bytes], count: int) -> bytearray:
    # In chunks: the memory used follows what the file really holds, not what its header announces.
    data = bytearray()
    while len(data) < count and (chunk := stream.read(min(_CHUNK, count - len(data)))):
        data += chunk
    return data


def _expect_magic(path: Path, header: IdxHeader, magic: int, what: str) -> None:
    if header.magic != magic:
        raise FormatError(f"{path}: offset 0: idx magic is {header.magic}; expected {magic} ({what})")


def _text(header: IdxHeader) -> str:
    return f"({' x '.join(str(axis) for axis in header.shape)})"
