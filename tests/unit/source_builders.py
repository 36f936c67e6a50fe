"""Stored sets built from the tables of the formats with ``struct`` alone: no writer of ours checks a reader of ours."""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HEADER = "<4s4B8s4I4s3I4s5IQIQ5If3f3fI"
"""The 36 fields of 144 bytes (spec/data 1.2)."""
assert struct.calcsize(HEADER) == 144

AT = {
    "magic": 0, "version": 4, "type": 8, "is_train": 16, "level": 20, "preprocessed": 24, "classes": 28, "layout": 32,
    "width": 36, "height": 40, "channels": 44, "color": 48, "samples": 52, "volumes": 56, "volume": 60,
    "total_blocks": 64, "blocks": 68, "total_bytes": 72, "header_bytes": 80, "body_bytes": 84, "block_bytes": 92,
    "block_header": 96, "alignment": 100, "area": 104, "most": 108, "ratio": 112, "mean": 116, "std": 128, "crc": 140,
}  # fmt: skip
"""Offset of each field."""

LEVEL_NUMBER = {0: 0, 1: 1, 2: 2, 3: 3, "RAW": 100}
BLOCK_MAGIC = {0: b"LV0B", 1: b"LV1B", 2: b"LV2B", 3: b"LV3B", "RAW": b"RAWB"}


@dataclass
class Packed:
    """What a packed file holds, block by block: pictures and their labels."""

    blocks: list[list[tuple[bytes, int]]]
    classes: int = 5
    split: str = "train"
    level: int | str = 0
    header_bytes: int = 4096
    block_bytes: int = 8192
    block_header: int = 256

    @property
    def pictures(self) -> list[bytes]:
        return [picture for block in self.blocks for picture, _ in block]

    @property
    def labels(self) -> list[int]:
        return [label for block in self.blocks for _, label in block]

    def body(self) -> bytes:
        body = b""
        for number, pictures in enumerate(self.blocks):
            offsets, data = [], b""
            for picture, _ in pictures:
                offsets.append(self.block_header + len(data))
                data += picture + bytes(-len(picture) % 64)
            table = struct.pack("<4sII", BLOCK_MAGIC[self.level], number, len(pictures))
            for column in (offsets, [len(p) for p, _ in pictures], [label for _, label in pictures]):
                table += struct.pack(f"<{len(column)}I", *column)
            assert len(table) <= self.block_header
            block = table.ljust(self.block_header, b"\0") + data
            assert len(block) <= self.block_bytes
            body += block.ljust(self.block_bytes, b"\0")
        return body

    def bytes(self) -> bytes:
        body, k = self.body(), len(self.blocks)
        record = struct.pack(
            HEADER, b".DTS", 3, 0, 0, 0, b"IMAGENET", int(self.split == "train"), LEVEL_NUMBER[self.level], 0,
            self.classes, b"NHWC", 0, 0, 3, b" RGB", len(self.pictures), 1, 0, k, k, self.header_bytes + len(body),
            self.header_bytes, len(body), self.block_bytes, self.block_header, 64, 12, max(map(len, self.blocks)), 1.0,
            *[0.0] * 6, zlib.crc32(body),
        )  # fmt: skip
        return record.ljust(self.header_bytes, b"\0") + body

    def write(self, folder: Path) -> Path:
        stem = "raw" if self.level == "RAW" else f"lv{self.level}"
        path = folder / f"imagenet_{self.split}_{stem}.dts"
        path.write_bytes(self.bytes())
        return path


def packed(level: int | str = 0, split: str = "train", **options: Any) -> Packed:
    """Three blocks of 3, 1 and 4 small pictures of lengths around the alignment."""
    rng = np.random.default_rng(7)
    blocks = []
    for sizes in ([1, 64, 65], [2000], [63, 128, 129, 7]):
        pictures = [raw_picture(rng, s) if level == "RAW" else rng.bytes(s) for s in sizes]
        blocks.append([(picture, int(rng.integers(5))) for picture in pictures])
    return Packed(blocks, split=split, level=level, **options)


def raw_picture(rng: np.random.Generator, pixels: int) -> bytes:
    """Level RAW: u32 width, u32 height, RGB."""
    width = next(w for w in (9, 8, 7, 4, 3, 2, 1) if pixels % w == 0)
    return struct.pack("<2I", width, pixels // width) + rng.bytes(3 * pixels)


def put(path: Path, offset: int, data: bytes) -> None:
    """Overwrite bytes of a file and leave its time of change as it was."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def grow_tree(root: Path, split: str, classes: dict[str | bytes, dict[str | bytes, bytes]]) -> None:
    """Class folders with files, ``{class: {name: bytes}}``."""
    for class_name, files in classes.items():
        folder = os.path.join(os.fsencode(root), os.fsencode(split), os.fsencode(class_name))
        os.makedirs(folder)
        for name, data in files.items():
            with open(os.path.join(folder, os.fsencode(name)), "wb") as file:
                file.write(data)


SMALL = {
    "mnist": (b"   MNIST", b"GRAY", 10),
    "cifar10": (b" CIFAR10", b" RGB", 10),
    "cifar100": (b"CIFAR100", b" RGB", 100),
}
"""Data set type, colour type and classes in the headers of small images."""


def small_dts(name: str, labels: list[int], images: np.ndarray, split: str = "train") -> bytes:
    """A packed MNIST or CIFAR file (spec/data 1.2 and 1.4)."""
    n, height, width, channels = images.shape
    kind, color, classes = SMALL[name]
    body = bytes(labels) + images.tobytes()
    record = struct.pack(
        HEADER, b".DTS", 3, 0, 0, 0, kind, int(split == "train"), 0, 0, classes, b"NHWC", width, height, channels,
        color, n, 1, 0, 1, 1, 256 + len(body), 256, len(body), len(body), 0, 0, height * width, n, 1.0, *[0.0] * 6,
        zlib.crc32(body),
    )  # fmt: skip
    return record.ljust(256, b"\0") + body


def idx_images(images: np.ndarray) -> bytes:
    """Images as MNIST's files have them (spec/data 2.1); images u8[N,28,28,1]."""
    return struct.pack(">4I", 2051, len(images), 28, 28) + images.tobytes()


def idx_labels(labels: list[int]) -> bytes:
    return struct.pack(">2I", 2049, len(labels)) + bytes(labels)


def cifar_records(labels: list[tuple[int, ...]], images: np.ndarray) -> bytes:
    """Records of label bytes and planes (spec/data 2.2); images u8[N,32,32,3]."""
    return b"".join(
        bytes(label) + b"".join(image[:, :, c].tobytes() for c in range(3))
        for label, image in zip(labels, images, strict=True)
    )
