"""DTS files of pictures of any size (ImageNet): header, blocks and the optional extension, as bytes.

A file is a header region and K blocks of one size; a block is a table (offsets, sizes, labels) and the pictures it
names, each on a multiple of 64. Building and parsing are pairs of functions on bytes (``pack_block`` and
``parse_block``, ``pack_extension`` and ``parse_extension``), so that they cannot disagree; files are the business of
the callers. All integers are little-endian. docs/dts.md is the format, of which level RAW and the extension are ours.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from renaissance.core.errors import CorruptSample, FormatError, ValueRejected
from renaissance.core.files import opened_regular
from renaissance.data.catalogue import check_split
from renaissance.data.formats.dts import (
    MAGIC,
    RECORD_BYTES,
    VERSION,
    DtsHeader,
    field_problem,
    show,
)

DATASET_TYPE = b"IMAGENET"
BLOCK_BYTES = 16 << 20
"""Bytes of a block, and of the header region, of every file that other tools read; tests use smaller ones."""
HEADER_REGION_BYTES = BLOCK_BYTES
ALIGNMENT = 64
"""Pictures start on multiples of this many bytes, counted from the start of the block."""
PAGE = 4096
"""Header region and blocks are multiples of this."""
BLOCK_FIXED_BYTES = 12
"""Block magic, block id and number of pictures; the three tables follow, 12 bytes a picture."""
TABLE_ENTRY_BYTES = 12
MAX_COUNT = 2**31 - 1
"""Sample ids and labels are signed 32-bit integers in memory."""
MAX_CLASSES = 1 << 24
"""Far above any set of pictures; what makes a table by class must not fill the memory for a damaged count."""

MAX_HEADER_BYTES, MAX_BLOCK_HEADER_BYTES, MAX_PICTURE_BYTES = 64 << 20, 16 << 20, 256 << 20
"""What a reader holds in memory at once: of a header region, of the table of a block, of one stored picture. A file can
say more and, being sparse, even be that long. The largest pictures that are decoded fit (``jpeg.MAX_PIXELS``)."""

EXTENSION_OFFSET = 4096
EXTENSION_MAGIC = b"DTSX"
EXTENSION_FIXED_BYTES = 12
"""Magic, length and CRC-32 of the JSON that follows."""

RAW_PICTURE_BYTES = 8
"""Level RAW: width and height of a picture, each u32, before its pixels u8[h,w,3]."""

U32 = npt.NDArray[np.uint32]
I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PictureLevel:
    """One way to store pictures: its name in options, its number in headers, the magic and the limits of its blocks."""

    name: int | str
    code: int
    magic: bytes
    block_header_bytes: int
    picture_cap: int
    """Most pictures our writer puts into a block: other readers of levels 1 to 3 refuse more than 1000."""

    @property
    def raw(self) -> bool:
        """Whether pictures are stored as pixels instead of as encoded streams."""
        return self.magic == b"RAWB"

    @property
    def stem(self) -> str:
        """The level's part of a file name: lv0 ... lv3, raw."""
        return "raw" if self.raw else f"lv{self.code}"


LEVELS: dict[int | str, PictureLevel] = {
    level.name: level
    for level in (
        PictureLevel(0, 0, b"LV0B", 4096, 340),
        PictureLevel(1, 1, b"LV1B", 16384, 1000),
        PictureLevel(2, 2, b"LV2B", 16384, 1000),
        PictureLevel(3, 3, b"LV3B", 16384, 1000),
        # Ours. No other reader knows this number or this block magic, so none takes pixels for JPEG.
        PictureLevel("RAW", 100, b"RAWB", 16384, 1000),
    )
}
_LEVEL_BY_CODE = {level.code: level for level in LEVELS.values()}


def picture_level(level: int | str) -> PictureLevel:
    """The level of that name: 0 to 3 (also as text) or "RAW" in any case. Raises ValueRejected."""
    key: int | str = int(level) if str(level) in {"0", "1", "2", "3"} else str(level).upper()
    if isinstance(level, bool) or key not in LEVELS:
        raise ValueRejected(f"unknown compress level {level!r}; expected one of: {', '.join(map(str, LEVELS))}")
    return LEVELS[key]


def imagenet_file_name(split: str, level: int | str) -> str:
    """Name of the packed file of one split ("train" or "val") and level."""
    return f"imagenet_{check_split(split)}_{picture_level(level).stem}.dts"


def align(size: int, alignment: int = ALIGNMENT) -> int:
    """``size`` rounded up to a multiple of ``alignment``."""
    return -(-size // alignment) * alignment


@dataclass(frozen=True, slots=True)
class PictureLayout:
    """Where things are in one file, in bytes. ``standard`` is what other tools read; a header may say otherwise."""

    level: PictureLevel
    header_bytes: int = HEADER_REGION_BYTES
    block_bytes: int = BLOCK_BYTES
    block_header_bytes: int = 0

    @classmethod
    def standard(cls, level: int | str) -> PictureLayout:
        """The layout of published files of a level."""
        found = picture_level(level)
        return cls(found, block_header_bytes=found.block_header_bytes)

    @classmethod
    def of(cls, header: DtsHeader) -> PictureLayout:
        """The layout that a header without problems describes."""
        return cls(
            _LEVEL_BY_CODE[header.compress_level], header.header_bytes, header.block_bytes, header.block_header_bytes
        )

    @property
    def capacity(self) -> int:
        """Bytes of a block that pictures can use."""
        return self.block_bytes - self.block_header_bytes

    @property
    def table_capacity(self) -> int:
        """Most pictures that the table of a block has room for."""
        return (self.block_header_bytes - BLOCK_FIXED_BYTES) // TABLE_ENTRY_BYTES

    @property
    def picture_cap(self) -> int:
        """Most pictures that our writer puts into a block."""
        return min(self.level.picture_cap, self.table_capacity)

    def block_offset(self, block: int) -> int:
        """File offset of a block."""
        return self.header_bytes + block * self.block_bytes


def imagenet_header(
    layout: PictureLayout,
    split: str,
    *,
    num_classes: int,
    num_samples: int,
    blocks: int,
    largest_area: int,
    most_pictures: int,
    compression_ratio: float,
    body_crc32: int,
) -> DtsHeader:
    """The header of a complete file; areas are pixels, the ratio is bytes of the file to bytes of the originals."""
    return DtsHeader(
        magic=MAGIC,
        version=VERSION,
        dataset_type=DATASET_TYPE,
        is_train=int(check_split(split) == "train"),
        compress_level=layout.level.code,
        val_preprocessed=0,
        num_classes=num_classes,
        layout=b"NHWC",
        width=0,
        height=0,
        channels=3,
        color=b" RGB",
        num_samples=num_samples,
        num_volumes=1,
        volume_id=0,
        total_blocks=blocks,
        blocks=blocks,
        total_bytes=layout.header_bytes + blocks * layout.block_bytes,
        header_bytes=layout.header_bytes,
        body_bytes=blocks * layout.block_bytes,
        block_bytes=layout.block_bytes,
        block_header_bytes=layout.block_header_bytes,
        alignment=ALIGNMENT,
        largest_area=largest_area,
        most_pictures=most_pictures,
        compression_ratio=compression_ratio,
        mean=(0.0, 0.0, 0.0),
        std=(0.0, 0.0, 0.0),
        body_crc32=body_crc32,
    )


def imagenet_header_problems(
    header: DtsHeader, split: str | None = None, level: int | str | None = None, file_bytes: int | None = None
) -> Iterator[str]:
    """One message per field that no good file of this split and level has; empty for a good header.

    ``split`` and ``level`` None accept any; ``file_bytes`` is the size of the file, where it is known. Counts of
    pictures and classes, the largest area and the ratio are free within what the format can hold.
    """
    if header.magic != MAGIC:
        yield field_problem("magic", header.magic, MAGIC, "this is not a DTS file")
        return
    if header.version != VERSION:
        yield field_problem("version", header.version, VERSION, "it was written by an unknown version of the format")
    if header.dataset_type != DATASET_TYPE:
        yield field_problem("dataset_type", header.dataset_type, DATASET_TYPE, "open it as the data set it holds")
        return
    yield from _kind_problems(header, split, level)
    sizes = list(_size_problems(header))
    yield from sizes
    if not sizes:
        yield from _count_problems(header, file_bytes)


def _kind_problems(header: DtsHeader, split: str | None, level: int | str | None) -> Iterator[str]:
    trains = (0, 1) if split is None else (int(check_split(split) == "train"),)
    if header.is_train not in trains:
        yield field_problem("is_train", header.is_train, _one_of(trains), "this is the other split")
    codes = tuple(_LEVEL_BY_CODE) if level is None else (picture_level(level).code,)
    if header.compress_level not in codes:
        yield field_problem(
            "compress_level",
            header.compress_level,
            _one_of(codes),
            "its name is wrong, or it is damaged; pack it again",
        )
    if header.val_preprocessed not in (0, 1):
        yield field_problem("val_preprocessed", header.val_preprocessed, "0 or 1", "pack it again")
    fixed: dict[str, Any] = {
        "layout": b"NHWC",
        "width": 0,
        "height": 0,
        "channels": 3,
        "color": b" RGB",
        "num_volumes": 1,
        "volume_id": 0,
        "alignment": ALIGNMENT,
        "mean": (0.0, 0.0, 0.0),
        "std": (0.0, 0.0, 0.0),
    }
    for name, expected in fixed.items():
        if show(getattr(header, name)) != show(expected):  # as text: -0.0 equals 0.0, but nobody writes it
            advice = (
                "files of several volumes are not defined" if name.endswith(("volumes", "_id")) else "pack it again"
            )
            yield field_problem(name, getattr(header, name), expected, advice)
    if not (math.isfinite(header.compression_ratio) and header.compression_ratio >= 0):
        yield field_problem("compression_ratio", header.compression_ratio, "a positive number", "pack it again")


def _size_problems(header: DtsHeader) -> Iterator[str]:
    if not PAGE <= header.header_bytes <= MAX_HEADER_BYTES or header.header_bytes % PAGE:
        expected = f"a multiple of {PAGE} up to {MAX_HEADER_BYTES}"
        yield field_problem("header_bytes", header.header_bytes, expected, "pack it again")
    if header.block_bytes < PAGE or header.block_bytes % PAGE:
        yield field_problem("block_bytes", header.block_bytes, f"a multiple of {PAGE}", "pack it again")
    elif (
        not ALIGNMENT <= header.block_header_bytes <= MAX_BLOCK_HEADER_BYTES
        or header.block_header_bytes % ALIGNMENT
        or header.block_header_bytes >= header.block_bytes
    ):
        most = min(header.block_bytes - 1, MAX_BLOCK_HEADER_BYTES)
        expected = f"a multiple of {ALIGNMENT} from {ALIGNMENT} to {most}"
        yield field_problem("block_header_bytes", header.block_header_bytes, expected, "pack it again")


def _count_problems(header: DtsHeader, file_bytes: int | None) -> Iterator[str]:
    per_block = (header.block_header_bytes - BLOCK_FIXED_BYTES) // TABLE_ENTRY_BYTES
    most_blocks = (1 << 62) // header.block_bytes
    if not 1 <= header.blocks <= most_blocks:
        yield field_problem("blocks", header.blocks, f"1 to {most_blocks}", "pack it again")
        return
    limit = min(MAX_COUNT, header.blocks * per_block)
    checks: list[tuple[str, bool, object]] = [
        ("total_blocks", header.total_blocks == header.blocks, header.blocks),
        ("body_bytes", header.body_bytes == header.blocks * header.block_bytes, header.blocks * header.block_bytes),
        (
            "total_bytes",
            header.total_bytes == header.header_bytes + header.blocks * header.block_bytes,
            header.header_bytes + header.blocks * header.block_bytes,
        ),
        ("num_samples", 1 <= header.num_samples <= limit, f"1 to {limit} ({header.blocks} blocks)"),
        ("num_classes", 1 <= header.num_classes <= MAX_CLASSES, f"1 to {MAX_CLASSES}"),
        ("most_pictures", header.most_pictures <= per_block, f"0 to {per_block}"),
    ]
    for name, good, expected in checks:
        if not good:
            yield field_problem(name, getattr(header, name), expected, "pack it again")
    right = header.header_bytes + header.blocks * header.block_bytes
    if file_bytes is not None and file_bytes != right:
        what = "truncated" if file_bytes < right else "followed by bytes that do not belong to it"
        yield (
            f"is {file_bytes} bytes long; a header of {header.header_bytes} and {header.blocks} blocks of "
            f"{header.block_bytes} make {right}. The file is {what}, or its count is wrong; pack or fetch it again"
        )


def _one_of(values: Sequence[int]) -> str:
    return " or ".join(str(value) for value in values)


def read_imagenet_header(
    path: Path, split: str | None = None, level: int | str | None = None
) -> tuple[DtsHeader, list[str]]:
    """The header of a file and what is wrong with it; reads 144 bytes and the size of the file.

    Raises MissingFileError, and FormatError when the file is too short to have a header or is not a DTS file.
    """
    with opened_regular(path) as (file, size):
        record = file.read(RECORD_BYTES)
    if record[:4] != MAGIC:
        raise FormatError(f"{path}: offset 0: magic is {show(record[:4])}; expected {show(MAGIC)}; not a DTS file")
    if len(record) < RECORD_BYTES:
        raise FormatError(
            f"{path}: is {size} bytes long; a DTS header needs {RECORD_BYTES}. The file is truncated; pack or fetch "
            f"it again"
        )
    header = DtsHeader.unpack(record)
    return header, list(imagenet_header_problems(header, split, level, size))


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """The table of one block: for each of its p pictures where it starts in the block, its bytes and its label."""

    block: int
    offsets: U32
    sizes: U32
    labels: I32


def pack_block(layout: PictureLayout, block: int, pictures: Sequence[bytes], labels: Sequence[int]) -> bytearray:
    """The bytes of block number ``block`` (exactly ``layout.block_bytes``) with these stored pictures and labels.

    Raises ValueRejected when they do not fit.
    """
    count = len(pictures)
    used = sum(align(len(picture)) for picture in pictures)
    if count != len(labels) or count > layout.table_capacity or used > layout.capacity:
        raise ValueRejected(
            f"block {block}: {count} pictures of {used} bytes and {len(labels)} labels; a block holds "
            f"{layout.table_capacity} pictures of {layout.capacity} bytes together"
        )
    data = bytearray(layout.block_bytes)
    struct.pack_into("<4sII", data, 0, layout.level.magic, block, count)
    offsets, at = [], layout.block_header_bytes
    for picture in pictures:
        offsets.append(at)
        data[at : at + len(picture)] = picture
        at += align(len(picture))
    table = (*offsets, *(len(picture) for picture in pictures), *labels)
    struct.pack_into(f"<{3 * count}I", data, BLOCK_FIXED_BYTES, *table)
    return data


def parse_block(
    data: bytes | bytearray | memoryview, layout: PictureLayout, block: int, num_classes: int, where: object
) -> BlockTable:
    """The table of a block from its first ``layout.block_header_bytes`` bytes (more may follow).

    Every entry is checked: magic of the level, number of the block, count, pictures one after the other inside the
    block, labels of the file's classes, zeros after the table. Raises FormatError naming ``where`` (the file) and
    the offset in the file.
    """
    start = layout.block_offset(block)
    if len(data) < layout.block_header_bytes:
        raise FormatError(
            f"{where}: offset {start}: block {block} has {len(data)} bytes; its header needs "
            f"{layout.block_header_bytes}. The file is truncated; pack or fetch it again"
        )
    magic, number, count = struct.unpack_from("<4sII", data)

    def refuse(at: int, what: str, found: object, expected: object) -> FormatError:
        return FormatError(
            f"{where}: offset {start + at}: block {block}: {what} is {show(found)}; expected {show(expected)}. "
            f"The file is damaged; pack or fetch it again"
        )

    if magic != layout.level.magic:
        raise refuse(0, "magic", magic, layout.level.magic)
    if number != block:
        raise refuse(4, "block id", number, block)
    if count > layout.table_capacity:
        raise refuse(8, "number of pictures", count, f"0 to {layout.table_capacity}")
    words = np.frombuffer(data, dtype="<u4", count=(layout.block_header_bytes - BLOCK_FIXED_BYTES) // 4, offset=12)
    offsets, sizes, labels = (words[k * count : (k + 1) * count].astype(np.uint32) for k in range(3))
    ends = layout.block_header_bytes + np.cumsum((sizes.astype(np.int64) + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT)
    starts = np.concatenate(([layout.block_header_bytes], ends))
    if (wrong := _first(offsets != starts[:-1])) is not None:
        raise refuse(12 + 4 * wrong, f"start of picture {wrong}", int(offsets[wrong]), int(starts[wrong]))
    most = np.minimum(layout.block_bytes - starts[:-1], MAX_PICTURE_BYTES)
    if (wrong := _first((sizes == 0) | (sizes > most))) is not None:
        expected = f"1 to {most[wrong]}"
        raise refuse(12 + 4 * (count + wrong), f"size of picture {wrong}", int(sizes[wrong]), expected)
    if (wrong := _first(labels >= num_classes)) is not None:
        at = 12 + 4 * (2 * count + wrong)
        raise refuse(at, f"label of picture {wrong}", int(labels[wrong]), f"0 to {num_classes - 1}")
    if (wrong := _first(words[3 * count :] != 0)) is not None:
        raise refuse(12 + 4 * (3 * count + wrong), "reserved word", int(words[3 * count + wrong]), 0)
    return BlockTable(block, offsets, sizes, labels.astype(np.int32))


def _first(wrong: npt.NDArray[np.bool_]) -> int | None:
    return int(wrong.argmax()) if wrong.any() else None


def pack_raw_picture(pixels: npt.NDArray[np.uint8]) -> bytes:
    """A picture u8[h,w,3] as level RAW stores it. Raises ValueRejected for another shape or type."""
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.size == 0:
        raise ValueRejected(f"picture is {pixels.dtype} {list(pixels.shape)}; level RAW stores uint8 [h, w, 3]")
    return struct.pack("<II", pixels.shape[1], pixels.shape[0]) + pixels.tobytes()


def parse_raw_picture(stored: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The pixels u8[h,w,3] of a picture of level RAW, a view of ``stored``. Raises CorruptSample (without the file)."""
    width, height = struct.unpack_from("<II", stored.data) if stored.size >= RAW_PICTURE_BYTES else (0, 0)
    expected = RAW_PICTURE_BYTES + 3 * width * height
    if not width or not height or stored.size != expected:
        raise CorruptSample(
            f"picture of level RAW says {width} x {height} pixels and has {stored.size} bytes; expected "
            f"{RAW_PICTURE_BYTES} + 3 x width x height with sides of at least 1"
        )
    return stored[RAW_PICTURE_BYTES:].reshape(height, width, 3)


def pack_extension(content: dict[str, Any], header_bytes: int) -> bytes:
    """The extension as bytes to write at ``EXTENSION_OFFSET``. Raises ValueRejected when the region has no room."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":")).encode()
    if EXTENSION_OFFSET + EXTENSION_FIXED_BYTES + len(text) > header_bytes:
        raise ValueRejected(f"DTS extension: {len(text)} bytes do not fit into a header region of {header_bytes} bytes")
    return struct.pack("<4sII", EXTENSION_MAGIC, len(text), zlib.crc32(text)) + text


def parse_extension(region: bytes | memoryview, header_bytes: int, where: object) -> dict[str, Any] | None:
    """The extension from the bytes that begin at ``EXTENSION_OFFSET``; None when there is none.

    Raises FormatError when there is one and it is damaged: nothing that reads pictures needs it, so only those who
    want its content call this.
    """
    if len(region) < EXTENSION_FIXED_BYTES or bytes(region[:4]) != EXTENSION_MAGIC:
        return None
    _, length, crc = struct.unpack_from("<4sII", region)
    room = header_bytes - EXTENSION_OFFSET - EXTENSION_FIXED_BYTES
    place = f"{where}: offset {EXTENSION_OFFSET}: extension"
    if length > room or EXTENSION_FIXED_BYTES + length > len(region):
        raise FormatError(f"{place}: length is {length}; expected at most {room}. The header region is damaged")
    text = bytes(region[EXTENSION_FIXED_BYTES : EXTENSION_FIXED_BYTES + length])
    if (found := zlib.crc32(text)) != crc:
        raise FormatError(f"{place}: CRC-32 is {found:08x}; expected {crc:08x}. The header region is damaged")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{place}: is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise FormatError(f"{place}: is {type(content).__name__}; expected a JSON object")
    return content


def read_extension(path: Path, header: DtsHeader) -> dict[str, Any] | None:
    """The extension of a file whose header has no problems; None when it has none. Raises FormatError when damaged."""
    with opened_regular(path) as (file, _):
        file.seek(EXTENSION_OFFSET)
        start = file.read(max(0, min(EXTENSION_FIXED_BYTES, header.header_bytes - EXTENSION_OFFSET)))
        if len(start) < EXTENSION_FIXED_BYTES or start[:4] != EXTENSION_MAGIC:
            return None
        length = min(struct.unpack_from("<I", start, 4)[0], header.header_bytes)
        return parse_extension(start + file.read(length), header.header_bytes, path)
