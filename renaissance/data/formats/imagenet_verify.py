"""Reading packed pictures and folder trees in full, to find what a run would trip over before it does.

A packed file is compared with its CRC-32, and every block table is checked; of every picture, packed or not, the header
is read, or with ``decode`` all of it is decoded. What is wrong with a picture is collected: one bad picture does not
hide the next.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from renaissance.core.errors import CorruptSample, FormatError
from renaissance.core.files import opened_regular
from renaissance.data.formats.dts import OFFSETS, RECORD_BYTES, DtsHeader
from renaissance.data.formats.imagenet import (
    EXTENSION_FIXED_BYTES,
    EXTENSION_OFFSET,
    parse_raw_picture,
    read_extension,
    read_imagenet_header,
)
from renaissance.data.jpeg import Decoder, read_header
from renaissance.data.sources import Encoding, Source
from renaissance.data.sources.packed import read_packed
from renaissance.data.sources.tree import open_tree

Progress = Callable[[int, int], None]
"""Called with the pictures done and their total."""


@dataclass(frozen=True, slots=True)
class Verified:
    """What was read. ``bad`` has one message per picture that cannot be used, naming it."""

    samples: int
    classes: int
    body_crc32: int | None
    """Of a packed file."""
    bad: tuple[str, ...]


def verify_packed(
    path: Path,
    split: str | None = None,
    level: int | str | None = None,
    decode: bool = False,
    progress: Progress | None = None,
) -> Verified:
    """Check all of a packed file: header, header region, body CRC-32, block tables, every picture.

    Raises MissingFileError, FormatError and DigestMismatch when the file as such is damaged.
    """
    header, problems = read_imagenet_header(path, split, level)
    if problems:
        raise FormatError(f"{path}: {problems[0]}")
    ours = read_extension(path, header) is not None
    _check_region(path, header)
    with Source(*read_packed(str(path), split, level, verify=True)) as source:
        bad, largest = _check_pictures(source, decode, progress)
        assert source.block_starts is not None
        most = int(np.diff(source.block_starts).max())
    # Existing writers measure neither of the two as we do: the last block is not counted, the area may be a constant.
    for name, found in (("most_pictures", most), ("largest_area", largest)):
        stated = getattr(header, name)
        if ours and not bad and stated != found:
            raise FormatError(f"{path}: offset {OFFSETS[name]}: {name} is {stated}; the pictures make {found}")
    return Verified(header.num_samples, header.num_classes, header.body_crc32, bad)


def verify_tree(root: Path, split: str, decode: bool = False, progress: Progress | None = None) -> Verified:
    """Check one split of a folder tree. Raises MissingFileError and FormatError when it is not a tree."""
    with Source(*open_tree(str(root), split)) as source:
        bad, _ = _check_pictures(source, decode, progress)
        return Verified(source.spec.samples, source.spec.num_classes, None, bad)


def _check_region(path: Path, header: DtsHeader) -> None:
    """Nothing but the record and the extension may stand in the header region: it is covered by no checksum."""
    with opened_regular(path) as (file, _):
        region = np.frombuffer(file.read(header.header_bytes), np.uint8).copy()
    region[:RECORD_BYTES] = 0
    extension = region[EXTENSION_OFFSET : EXTENSION_OFFSET + EXTENSION_FIXED_BYTES].tobytes()
    if extension[:4] == b"DTSX":
        (length,) = struct.unpack_from("<I", extension, 4)
        region[EXTENSION_OFFSET : EXTENSION_OFFSET + EXTENSION_FIXED_BYTES + length] = 0
    if region.any():
        at = int((region != 0).argmax())
        raise FormatError(f"{path}: offset {at}: reserved byte is {region[at]}; expected 0; pack or fetch it again")


def _check_pictures(source: Source, decode: bool, progress: Progress | None) -> tuple[tuple[str, ...], int]:
    """Messages about bad pictures, and the largest area of the others in pixels."""
    room = np.empty(max(1, source.spec.largest), np.uint8)
    check = _RawCheck() if source.spec.encoding is Encoding.RAW else _PictureCheck(decode)
    bad, largest, total = [], 0, source.spec.samples
    for sample in range(total):
        try:
            size = source.read_into(sample, room.data)
        except CorruptSample as error:
            bad.append(str(error))
        else:
            try:
                largest = max(largest, check.area(room[:size]))
            except CorruptSample as error:
                bad.append(f"{source.describe(sample)}: {error}")
        if progress is not None:
            progress(sample + 1, total)
    return tuple(bad), largest


class _PictureCheck:
    """Looks at an encoded picture."""

    def __init__(self, decode: bool) -> None:
        self._decoder = Decoder() if decode else None

    def area(self, stored: npt.NDArray[np.uint8]) -> int:
        header = read_header(stored)
        if self._decoder is not None:
            self._decoder.decode(stored, header)
        return header.pixels


class _RawCheck(_PictureCheck):
    """Looks at a picture of level RAW: there is nothing to decode."""

    def __init__(self) -> None:
        super().__init__(decode=False)

    def area(self, stored: npt.NDArray[np.uint8]) -> int:
        return parse_raw_picture(stored).size // 3
