"""What a stored set is, as one frozen value, and how its index lies in memory.

A ``SourceSpec`` is made once, when a set is opened, and then crosses process boundaries together with a mapping of the
index; whoever has both can read every sample without looking at the folder again. The index is a list of plain arrays,
each on a multiple of 64 bytes; the spec says which, so writing and attaching cannot disagree.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from renaissance.core.errors import ValueRejected

SECTION_ALIGNMENT = 64
"""Bytes; a cache line, so that workers on different cores never share one that is still being written."""
MAX_SAMPLES = 2**31 - 1
"""Sample ids are signed 32-bit integers."""

Arrays = dict[str, npt.NDArray[Any]]


class Encoding(StrEnum):
    """What the stored bytes of a sample are."""

    PIXELS = "pixels"
    """u8[H,W,C] of one size for the whole set (MNIST, CIFAR)."""
    PICTURES = "pictures"
    """An encoded picture: JPEG, or another kind under a JPEG's name."""
    RAW = "raw"
    """u32 width, u32 height, u8[height,width,3] RGB, little-endian (packed level RAW)."""


@dataclass(frozen=True, slots=True)
class Section:
    """One array of an index: its name, NumPy dtype, number of elements and offset in bytes."""

    name: str
    dtype: str
    count: int
    offset: int


@dataclass(frozen=True, slots=True)
class FileStamp:
    """Size in bytes and time of the last change (ns) of a container file when its index was read."""

    size: int
    changed: int


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """A stored set. Frozen and picklable: everything but the index arrays that reading a sample needs."""

    name: str
    split: str  # "train" or "val"
    format: str  # "dts" or "raw"
    level: int | str | None  # packed pictures: 0 to 3 or "RAW"
    encoding: Encoding
    num_classes: int
    samples: int
    height: int  # pixels; 0 = varies
    width: int
    channels: int
    files: tuple[str, ...]  # absolute container files in the order of the samples; the one root folder of a tree
    tree: bool
    source: str  # for messages
    stored_bytes: int  # of all samples together; 0 when a tree was opened without measuring its files
    largest: int  # bytes of the largest stored sample; 0 as above
    index_bytes: int  # page aligned
    sections: tuple[Section, ...]
    stamps: tuple[FileStamp, ...] = ()  # one per container file; empty for a tree
    first_byte: int = 0  # PIXELS: offset of the first record in each file
    record_bytes: int = 0  # PIXELS: bytes from one record to the next
    pixel_offset: int = 0  # PIXELS: where the pixels begin in a record
    planar: bool = False  # PIXELS: stored as [C,H,W] (CIFAR as published)

    @property
    def pixel_bytes(self) -> int:
        """Bytes of one sample of fixed size; 0 when the size varies."""
        return self.height * self.width * self.channels


def sections_of(arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[tuple[Section, ...], int]:
    """Where each array goes, in the order given, and the page-aligned bytes of all together."""
    sections, at = [], 0
    for name, array in arrays.items():
        sections.append(Section(name, array.dtype.str, array.size, at))
        at += -(-array.nbytes // SECTION_ALIGNMENT) * SECTION_ALIGNMENT
    return tuple(sections), max(1, -(-at // mmap.PAGESIZE)) * mmap.PAGESIZE


def write_sections(spec: SourceSpec, arrays: Arrays, buffer: memoryview) -> None:
    """Copy an index into ``buffer``. Raises ValueRejected when the buffer is smaller than ``spec.index_bytes``."""
    _check_buffer(spec, buffer)
    for section in spec.sections:
        np.frombuffer(buffer, section.dtype, section.count, section.offset)[:] = arrays[section.name]


def view_sections(spec: SourceSpec, buffer: memoryview) -> Arrays:
    """The arrays of an index inside ``buffer``, without a copy. Raises ValueRejected when it is too small."""
    _check_buffer(spec, buffer)
    return {s.name: np.frombuffer(buffer, s.dtype, s.count, s.offset) for s in spec.sections}


def _check_buffer(spec: SourceSpec, buffer: memoryview) -> None:
    if buffer.nbytes < spec.index_bytes:
        raise ValueRejected(
            f"index of {spec.source}: the buffer has {buffer.nbytes} bytes; expected at least {spec.index_bytes}"
        )


def printable(name: bytes) -> str:
    """A file name for messages, whatever bytes it has: what cannot be printed is written as an escape."""
    text = name.decode("utf-8", errors="backslashreplace")
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
