"""Pictures for the JPEG tests, made here: nothing outside the repository is read."""

from __future__ import annotations

import io
import struct
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image

Bytes = npt.NDArray[np.uint8]
SAMPLINGS = ("4:4:4", "4:2:2", "4:2:0", "4:4:0", "4:1:1", "gray")


@lru_cache(maxsize=64)
def scene(width: int, height: int, seed: int = 0) -> Bytes:
    """uint8[height, width, 3]: waves with edges and some noise, so that all sorts of coefficients occur."""
    draw = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / a + y / b + c) for a, b, c in draw.uniform(2, 30, (3, 3))]
    edges = ((x // 13 + y // 9) % 3 == 0) * 60.0
    noise = draw.normal(0, 12, (height, width, 3))
    return np.clip(110 + 70 * np.stack(waves, 2) + edges[:, :, None] + noise, 0, 255).astype(np.uint8)


def encoded(pixels: npt.NDArray[Any], kind: str = "JPEG", mode: str | None = None, **options: Any) -> Bytes:
    """`pixels` converted to `mode` and encoded by Pillow, uint8[n]."""
    picture = Image.fromarray(pixels)
    with io.BytesIO() as file:
        (picture.convert(mode) if mode else picture).save(file, kind, **options)
        return np.frombuffer(file.getvalue(), np.uint8)


def jpeg(width: int, height: int, sampling: str = "4:2:0", seed: int = 0, **options: Any) -> Bytes:
    """A scene as JPEG with one of SAMPLINGS."""
    pixels = scene(width, height, seed)
    if sampling == "gray":
        return encoded(pixels[:, :, 0].copy(), **options)
    if sampling in ("4:4:0", "4:1:1"):  # Pillow has no name for them, and the other encoder no options
        return np.frombuffer(simplejpeg.encode_jpeg(pixels, colorsubsampling=sampling.replace(":", "")), np.uint8)
    return encoded(pixels, subsampling=sampling, **options)


def cmyk(width: int, height: int, transform: int) -> Bytes:
    """A CMYK JPEG with Adobe's marker; transform 2 makes a decoder take it for YCCK."""
    pixels = np.concatenate([scene(width, height, 1), scene(width, height, 2)[:, :, :1]], 2)
    with io.BytesIO() as file:
        Image.fromarray(pixels, "CMYK").save(file, "JPEG")
        data = np.frombuffer(file.getvalue(), np.uint8).copy()
    data[data.tobytes().index(b"Adobe") + 11] = transform
    return data


def by_pillow(stored: Bytes) -> Bytes:
    """What everybody else gets: uint8[h, w, 3]."""
    with Image.open(io.BytesIO(stored.tobytes())) as picture:
        return np.asarray(picture.convert("RGB"))


def frame_offset(stored: Bytes) -> int:
    """Offset of the 0xFF of SOF0, SOF1 or SOF2."""
    data = stored.tobytes()
    at = 2
    while data[at + 1] not in (0xC0, 0xC1, 0xC2):
        at += 2 + struct.unpack_from(">H", data, at + 2)[0]
    return at


def patched(stored: Bytes, offset: int, new: bytes) -> Bytes:
    """A copy with other bytes at `offset`."""
    copy = stored.copy()
    copy[offset : offset + len(new)] = np.frombuffer(new, np.uint8)
    return copy


def inserted(stored: Bytes, offset: int, new: bytes) -> Bytes:
    """A copy with bytes put in at `offset`."""
    return np.concatenate([stored[:offset], np.frombuffer(new, np.uint8), stored[offset:]])
