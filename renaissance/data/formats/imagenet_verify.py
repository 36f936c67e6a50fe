"""Reading packed pictures and folder trees in full, to find what a run would trip over before it does.

A packed file is compared with its CRC-32, and every block table is checked; of every picture, packed or not, the header
is read, or with ``decode`` all of it is decoded, by several processes if asked. What is wrong with a picture is
collected: one bad picture does not hide the next.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from renaissance.core.errors import CorruptSample, FormatError
from renaissance.core.files import opened_regular
from renaissance.data.catalogue import SPLITS
from renaissance.data.formats.dts import RECORD_BYTES, DtsHeader, field_problem
from renaissance.data.formats.imagenet import (
    EXTENSION_FIXED_BYTES,
    EXTENSION_OFFSET,
    parse_raw_picture,
    read_extension,
    read_imagenet_header,
)
from renaissance.data.formats.processes import check_jobs, in_order
from renaissance.data.jpeg import Decoder, read_header
from renaissance.data.sources import Encoding, Source, SourceSpec
from renaissance.data.sources.packed import read_packed
from renaissance.data.sources.spec import Arrays
from renaissance.data.sources.tree import open_tree

Progress = Callable[[int, int], None]
"""Called with the pictures done and their total."""
CHUNK = 64
"""Pictures that are looked at between two calls of progress."""


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
    jobs: int = 1,
) -> Verified:
    """Check all of a packed file: header, header region, body CRC-32, block tables, every picture.

    Raises MissingFileError, FormatError and DigestMismatch when the file as such is damaged.
    """
    header, problems = read_imagenet_header(path, split, level)
    if problems:
        raise FormatError(f"{path}: {problems[0]}")
    extension = read_extension(path, header)
    _check_region(path, header)
    spec, arrays = read_packed(str(path), split, level, verify=True)
    bad, largest = _check_pictures(spec, arrays, decode, progress, jobs)
    if extension is not None:
        expected = _expected_fields(header, extension)
        if not bad:
            expected |= {"most_pictures": int(np.diff(arrays["block_starts"]).max()), "largest_area": largest}
        for name, value in expected.items():
            if (stated := getattr(header, name)) != value:
                raise FormatError(
                    f"{path}: " + field_problem(name, stated, value, "the header is damaged; pack or fetch it again")
                )
    return Verified(header.num_samples, header.num_classes, header.body_crc32, bad)


def _expected_fields(header: DtsHeader, extension: dict[str, Any]) -> dict[str, Any]:
    """Header fields that no checksum covers, as the extension of our writer (which has one) makes them.

    Other writers fill them as they like: the last block is not counted, the area is a constant, the flag is an option.
    """
    expected: dict[str, Any] = {"val_preprocessed": 0}
    if extension.get("split") in SPLITS:
        expected["is_train"] = int(extension["split"] == SPLITS[0])
    classes, source = extension.get("classes"), extension.get("source")
    if isinstance(classes, list):
        expected["num_classes"] = len(classes)
    size = source.get("bytes") if isinstance(source, dict) else None
    if isinstance(size, int) and size > 0 and not extension.get("left_out"):
        expected["compression_ratio"] = float(np.float32(header.total_bytes / size))
    return expected


def verify_tree(
    root: Path, split: str, decode: bool = False, progress: Progress | None = None, jobs: int = 1
) -> Verified:
    """Check one split of a folder tree. Raises MissingFileError and FormatError when it is not a tree."""
    spec, arrays = open_tree(str(root), split)
    bad, _ = _check_pictures(spec, arrays, decode, progress, jobs)
    return Verified(spec.samples, spec.num_classes, None, bad)


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


def _check_pictures(
    spec: SourceSpec, arrays: Arrays, decode: bool, progress: Progress | None, jobs: int
) -> tuple[tuple[str, ...], int]:
    """Messages about bad pictures, and the largest area of the others in pixels."""
    bad: list[str] = []
    largest, total = 0, spec.samples
    ranges = ((begin, min(begin + CHUNK, total)) for begin in range(0, total, CHUNK))
    if check_jobs(jobs) == 1:
        checked: Iterator[tuple[int, list[str], int]] = map(_Checker(spec, arrays, decode).check, ranges)
    else:
        checked = in_order(_check_here, ranges, jobs, _prepare, (spec, arrays, decode))
    done = 0
    for count, messages, area in checked:
        bad.extend(messages)
        largest = max(largest, area)
        done += count
        if progress is not None:
            progress(done, total)
    return tuple(bad), largest


class _Checker:
    """Reads and looks at pictures, in this process or another."""

    def __init__(self, spec: SourceSpec, arrays: Arrays, decode: bool) -> None:
        self._source, self._decoder = Source(spec, arrays), Decoder() if decode else None
        self._room = np.empty(max(1, spec.largest), np.uint8)

    def check(self, samples: tuple[int, int]) -> tuple[int, list[str], int]:
        """Number of samples from the first to before the last, what is wrong with them, the largest area in pixels."""
        bad, largest = [], 0
        for sample in range(*samples):
            try:
                size = self._source.read_into(sample, self._room.data)
            except CorruptSample as error:
                bad.append(str(error))
                continue
            try:
                largest = max(largest, self._area(self._room[:size]))
            except CorruptSample as error:
                bad.append(f"{self._source.describe(sample)}: {error}")
        return samples[1] - samples[0], bad, largest

    def _area(self, stored: npt.NDArray[np.uint8]) -> int:
        if self._source.spec.encoding is Encoding.RAW:
            return parse_raw_picture(stored).size // 3
        header = read_header(stored)
        if self._decoder is not None:
            self._decoder.decode(stored, header)
        return header.pixels


_here: list[_Checker] = []
"""The checker of a working process."""


def _prepare(spec: SourceSpec, arrays: Arrays, decode: bool) -> None:
    _here.append(_Checker(spec, arrays, decode))


def _check_here(samples: tuple[int, int]) -> tuple[int, list[str], int]:
    return _here[0].check(samples)
