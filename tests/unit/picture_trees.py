"""Small picture trees made with NumPy and Pillow, and a parser of packed files written from the tables alone."""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from source_builders import BLOCK_MAGIC, HEADER, LEVEL_NUMBER, grow_tree

from renaissance.data.formats.imagenet import PictureLayout, picture_level

FIELDS = (  # noqa: SIM905
    "magic v0 v1 v2 v3 type is_train level preprocessed classes layout width height channels color samples volumes "
    "volume total_blocks blocks total_bytes header_bytes body_bytes block_bytes block_header alignment area most ratio "
    "m0 m1 m2 s0 s1 s2 crc"
).split()


def picture(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Smooth colours with some noise, so that it compresses and no two are alike."""
    rng = np.random.default_rng([seed, width, height])
    x, y = np.meshgrid(np.linspace(0, 3, width), np.linspace(0, 3, height))
    channels = [127 + 90 * np.sin(x * rng.uniform(1, 3) + y * rng.uniform(1, 3)) for _ in range(3)]
    noisy = np.stack(channels, axis=2) + rng.integers(-8, 9, (height, width, 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).convert(mode)


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def small_layout(level: int | str, block_bytes: int = 16384, block_header: int = 256) -> PictureLayout:
    """Blocks in which a handful of the pictures of ``grow_pictures`` have room."""
    return PictureLayout(picture_level(level), 16384, block_bytes, block_header)


def grow_pictures(root: Path, classes: int = 3, each: int = 8, split: str = "train") -> dict[str, bytes]:
    """A tree of small JPEG files; returns them by "class/name" in the tree's order."""
    tree: dict[str | bytes, dict[str | bytes, bytes]] = {}
    for c in range(classes):
        names = [f"n{c:02d}_{number}.JPEG" for number in range(each)]
        tree[f"n{c:02d}"] = {
            name: encoded(picture(24 + 9 * c + number, 40 - number, seed=100 * c + number), quality=90)
            for number, name in enumerate(names)
        }
    grow_tree(root, split, tree)
    return {f"{c}/{name}": data for c, files in sorted(tree.items()) for name, data in sorted(files.items())}  # type: ignore[str-bytes-safe]


@dataclass
class Parsed:
    """A packed file taken apart by hand."""

    header: dict[str, Any]
    blocks: list[list[tuple[bytes, int]]]
    region: bytes
    body: bytes

    @property
    def pictures(self) -> list[tuple[bytes, int]]:
        return [entry for block in self.blocks for entry in block]


def parsed(path: Path, level: int | str) -> Parsed:
    """Take a file apart, checking on the way everything that the tables fix."""
    data = path.read_bytes()
    header = dict(zip(FIELDS, struct.unpack(HEADER, data[:144]), strict=True))
    size, per, start = header["header_bytes"], header["block_bytes"], header["block_header"]
    body = data[size:]
    assert [header[f"v{i}"] for i in range(4)] == [3, 0, 0, 0]
    assert (header["magic"], header["type"], header["layout"], header["color"]) == (
        b".DTS",
        b"IMAGENET",
        b"NHWC",
        b" RGB",
    )
    assert header["level"] == LEVEL_NUMBER[level]
    assert (header["width"], header["height"], header["channels"], header["alignment"]) == (0, 0, 3, 64)
    assert (header["volumes"], header["volume"], header["preprocessed"]) == (1, 0, 0)
    assert header["blocks"] == header["total_blocks"]
    assert len(body) == header["body_bytes"] == header["blocks"] * per
    assert header["total_bytes"] == len(data)
    assert header["crc"] == zlib.crc32(body)
    assert [header[k] for k in ("m0", "m1", "m2", "s0", "s1", "s2")] == [0.0] * 6
    blocks = []
    for number in range(header["blocks"]):
        block = body[number * per : (number + 1) * per]
        magic, stated, count = struct.unpack_from("<4sII", block)
        assert (magic, stated) == (BLOCK_MAGIC[level], number)
        offsets, sizes, labels = (struct.unpack_from(f"<{count}I", block, 12 + 4 * count * k) for k in range(3))
        assert not any(block[12 + 12 * count : start])
        entries, at = [], start
        for offset, length, label in zip(offsets, sizes, labels, strict=True):
            assert offset == at
            entries.append((block[at : at + length], label))
            end = at + length
            at = -(-end // 64) * 64
            assert not any(block[end:at])
        assert not any(block[at:])
        blocks.append(entries)
    assert header["samples"] == sum(map(len, blocks))
    return Parsed(header, blocks, data[:size], body)
