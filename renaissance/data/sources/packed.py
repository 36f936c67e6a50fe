"""Packed pictures (ImageNet DTS, levels 0 to 3 and RAW): the index from the block headers, and reading by offset.

A file has no table of contents; each block has its own. Opening reads only those: 4 or 16 KiB of every 16 MiB. In
memory a sample costs 16 bytes: label i32, size u32 and file offset u64; a block costs 8.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np

from renaissance.core.errors import CorruptSample, FormatError
from renaissance.core.files import opened_regular
from renaissance.data.formats.dts import OFFSETS, DtsHeader
from renaissance.data.formats.imagenet import (
    RAW_PICTURE_BYTES,
    BlockTable,
    PictureLayout,
    imagenet_file_name,
    parse_block,
    picture_level,
    read_imagenet_header,
)
from renaissance.data.sources.reading import (
    Container,
    check_body,
    check_header,
    check_room,
    inside,
    read_fully,
    stamp_of,
)
from renaissance.data.sources.spec import Arrays, Encoding, FileStamp, SourceSpec, printable, sections_of


def open_packed(
    folder: str, split: str, level: int | str, name: str = "imagenet", verify: bool = False
) -> tuple[SourceSpec, Arrays]:
    """Index one packed file. ``verify`` reads all of it and compares the CRC-32 of its body.

    Memory grows with what the block headers really hold, never with what a count announces. Raises MissingFileError,
    FormatError naming file, offset, expected and found, and DigestMismatch.
    """
    path = os.path.join(folder, imagenet_file_name(split, level))
    return read_packed(inside(folder, path), split, level, name, verify)


def read_packed(
    path: str, split: str | None, level: int | str | None, name: str = "imagenet", verify: bool = False
) -> tuple[SourceSpec, Arrays]:
    """As ``open_packed``, from a path; ``split`` and ``level`` None accept what the file says."""
    header, problems = read_imagenet_header(Path(path), split, level)
    if problems:
        raise FormatError(f"{path}: {problems[0]}")
    layout = PictureLayout.of(header)
    with opened_regular(Path(path)) as (file, _):
        stamp = stamp_of(file.fileno())
        check_header(path, file.fileno(), header.pack())
        if verify:
            check_body(path, file.fileno(), header.header_bytes, header.body_crc32, OFFSETS["body_crc32"])
        tables = _tables(path, file.fileno(), layout, header)
        if stamp_of(file.fileno()) != stamp:
            raise FormatError(f"{path}: was written to while being opened; open it again when it is complete")
    return _indexed(path, header, layout, tables, stamp, name)


def _tables(path: str, descriptor: int, layout: PictureLayout, header: DtsHeader) -> list[BlockTable]:
    # The kernel would read ahead 128 KiB for each block header otherwise, ten times what is looked at.
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    region = bytearray(layout.block_header_bytes)
    tables, total = [], 0
    for block in range(header.blocks):
        start = layout.block_offset(block)
        done = read_fully(descriptor, memoryview(region), start)
        tables.append(parse_block(memoryview(region)[:done], layout, block, header.num_classes, path))
        total += tables[-1].sizes.size
        if total > header.num_samples:
            break
    if total != header.num_samples:
        more = "more" if total > header.num_samples else str(total)
        raise FormatError(
            f"{path}: offset {OFFSETS['num_samples']}: number of samples is {header.num_samples}, but the blocks hold "
            f"{more}. The file is damaged; pack or fetch it again"
        )
    return tables


def _indexed(
    path: str, header: DtsHeader, layout: PictureLayout, tables: list[BlockTable], stamp: FileStamp, name: str
) -> tuple[SourceSpec, Arrays]:
    counts = np.array([table.sizes.size for table in tables], np.int64)
    starts = np.zeros(counts.size + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    block_offsets = layout.header_bytes + np.arange(counts.size, dtype=np.uint64) * np.uint64(layout.block_bytes)
    sizes = np.concatenate([table.sizes for table in tables])
    arrays: Arrays = {
        "labels": np.concatenate([table.labels for table in tables]),
        "sizes": sizes,
        "offsets": np.concatenate([table.offsets for table in tables]) + np.repeat(block_offsets, counts),
        "block_starts": starts,
    }
    sections, index_bytes = sections_of(arrays)
    raw = layout.level.raw
    spec = SourceSpec(
        name=name,
        split="train" if header.is_train else "val",
        format="dts",
        level=layout.level.name,
        encoding=Encoding.RAW if raw else Encoding.PICTURES,
        num_classes=header.num_classes,
        samples=header.num_samples,
        height=0,
        width=0,
        channels=3,
        files=(path,),
        tree=False,
        source=printable(os.fsencode(path)),
        stored_bytes=int(sizes.sum(dtype=np.uint64)),
        largest=int(sizes.max()),
        index_bytes=index_bytes,
        sections=sections,
        stamps=(stamp,),
    )
    return spec, arrays


class PackedReader:
    """Reads pictures of a packed file by their offsets."""

    def __init__(self, spec: SourceSpec, arrays: Arrays) -> None:
        self._offsets, self._sizes, self._starts = arrays["offsets"], arrays["sizes"], arrays["block_starts"]
        self._raw = spec.encoding is Encoding.RAW
        self._shown = spec.source
        self._container = Container(spec.files[0], spec.stamps[0])

    def read(self, sample: int, out: memoryview) -> int:
        """Stored bytes of a picture; returns their count."""
        size, offset = int(self._sizes[sample]), int(self._offsets[sample])
        if out.nbytes < size:
            check_room(out, size, self.describe(sample))
        into = out[:size]
        self._container.read(into, offset, self.describe, sample)
        if self._raw:
            self._check_raw(sample, into)
        return size

    def _check_raw(self, sample: int, stored: memoryview) -> None:
        width, height = struct.unpack_from("<2I", stored) if stored.nbytes >= RAW_PICTURE_BYTES else (0, 0)
        expected = RAW_PICTURE_BYTES + 3 * width * height
        if not (width and height) or expected != stored.nbytes:
            raise CorruptSample(
                f"{self.describe(sample)}: is {stored.nbytes} bytes and says {width} x {height} pixels, which make "
                f"{expected}. The file is damaged; pack or fetch it again"
            )

    def describe(self, sample: int) -> str:
        """File, number of the picture, block and offset."""
        block = int(np.searchsorted(self._starts, sample, side="right")) - 1
        return f"{self._shown}, picture {sample} (block {block}, offset {int(self._offsets[sample])})"

    def close(self) -> None:
        """Close the file."""
        self._container.close()


def packed_levels(folder: str, split: str) -> list[int | str]:
    """The levels of which ``folder`` has a packed file of this split."""
    levels: tuple[int | str, ...] = (0, 1, 2, 3, "RAW")
    return [
        picture_level(level).name
        for level in levels
        if os.path.lexists(os.path.join(folder, imagenet_file_name(split, level)))
    ]
