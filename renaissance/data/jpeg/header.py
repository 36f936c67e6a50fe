"""What a stored picture says of itself, read and bounded before anything is allocated.

A picture is a JPEG, or a PNG (ImageNet holds one under a .JPEG name). Whatever else is refused by name. All reading is
of untrusted bytes: the only error is CorruptSample, whose text names the offset but not the file (the caller knows it).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from renaissance.core.errors import CorruptSample, ValueRejected
from renaissance.data.jpeg.parse import Fault, Field, count_scans, parse_jpeg

MAX_PIXELS = 89_478_485
"""Width times height that is decoded at most: 256 MiB of RGB, the count above which Pillow warns of a decompression
bomb. The largest picture of ImageNet has 31,667,328 pixels."""
MAX_SIDE = 65_500
"""libjpeg's limit for either side of a JPEG."""
MAX_SCANS = 200
"""Scans of a progressive JPEG (usual: 10). Each is a pass over the whole picture, so a small file could cost hours."""
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
OTHER_KINDS = ((b"GIF8", "GIF"), (b"BM", "BMP"), (b"RIFF", "WebP"), (b"II*\0", "TIFF"), (b"MM\0*", "TIFF"))

_FAULTS = {
    Fault.CUT: "the stream ends inside its header",
    Fault.NO_MARKER: "a JPEG marker is expected and something else stands there",
    Fault.BAD_LENGTH: "a marker segment has an impossible length",
    Fault.NO_FRAME: "the first scan (SOS) comes before any frame header (SOF)",
    Fault.TWO_FRAMES: "there are two frame headers (SOF)",
    Fault.NO_SCAN: "the picture ends (EOI) before its first scan",
    Fault.BAD_FRAME: "the frame header (SOF) has an impossible length, component count or sampling factor",
    Fault.BAD_SCAN: "the scan header (SOS) has an impossible length or component count",
}
_SEQUENTIAL, _PROGRESSIVE = (0xC0, 0xC1, 0xC9), (0xC2, 0xCA)


@dataclass(frozen=True, slots=True)
class PictureHeader:
    """Facts about one stored picture; offsets count from its first byte. Zero where a PNG has no such thing."""

    kind: str
    """"jpeg" or "png"."""
    width: int
    height: int
    components: int
    color: str
    """"gray", "ycc", "rgb", "cmyk", "ycck"; of a PNG: "gray", "rgb", "palette", "gray+alpha", "rgb+alpha"."""
    bits: int
    """Per stored value; 8 for every JPEG that is accepted."""
    progressive: bool
    arithmetic: bool
    baseline: bool
    """Sequential Huffman JPEG whose one scan holds all components: what can be cut at restart markers."""
    sampling: tuple[tuple[int, int], ...]
    """(horizontal, vertical) factor per component."""
    mcu_width: int
    mcu_height: int
    """Pixels of one minimum coded unit of an interleaved scan."""
    restart_interval: int
    """MCUs between restart markers; 0 = none."""
    orientation: int
    """Exif orientation, 1 to 8. It is NOT applied, as in torchvision's ImageFolder and in upstream."""
    frame_offset: int
    scan_offset: int
    scan_start: int

    @property
    def pixels(self) -> int:
        return self.width * self.height

    @property
    def mcu_columns(self) -> int:
        return -(-self.width // self.mcu_width)

    @property
    def mcu_rows(self) -> int:
        return -(-self.height // self.mcu_height)


def read_header(stored: npt.NDArray[np.uint8], max_pixels: int = MAX_PIXELS) -> PictureHeader:
    """Read the header of one stored picture, `stored` uint8[n]; a few microseconds for a JPEG, allocates nothing large.

    Raises CorruptSample when the bytes are not an acceptable picture or it has more than `max_pixels` pixels.
    """
    if not 1 <= max_pixels <= MAX_PIXELS:
        raise ValueRejected(f"max_pixels {max_pixels} is outside 1..{MAX_PIXELS}; it can only be made tighter")
    if stored.size > 2 and stored[0] == 0xFF and stored[1] == 0xD8:
        return _jpeg(frozen(stored), max_pixels)
    start = stored[:33].tobytes()
    if start[:8] == PNG_MAGIC:
        return _png(start, max_pixels)
    for magic, name in OTHER_KINDS:
        if start.startswith(magic):
            raise CorruptSample(f"the picture is a {name} file; expected JPEG or PNG; convert it, or leave it out")
    raise CorruptSample(
        f"not a picture: it begins with {start[:8].hex(' ') or 'nothing'}; expected JPEG (ff d8) or PNG"
    )


def frozen(stored: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """A read-only view: Numba compiles for read-only and for writable arrays apart, and one of the two is enough."""
    view = stored.view()
    view.flags.writeable = False
    return view


def _bounded(width: int, height: int, max_pixels: int) -> None:
    if width < 1 or height < 1:
        hint = "; a height given after the first scan (DNL) is not supported" if width > 0 else ""
        raise CorruptSample(f"the picture says it has {width} x {height} pixels; expected at least 1 x 1{hint}")
    if width * height > max_pixels:
        raise CorruptSample(f"the picture says it has {width} x {height} pixels, more than the limit of {max_pixels}")


def _jpeg(stored: npt.NDArray[np.uint8], max_pixels: int) -> PictureHeader:
    facts = np.empty(Field.COUNT, np.int64)
    fault = parse_jpeg(stored, facts)
    f: list[int] = facts.tolist()
    if fault:
        raise CorruptSample(f"{_FAULTS[Fault(fault)]} (offset {f[Field.FAULT_AT]} of {stored.size})")
    frame, width, height, count = f[Field.FRAME_TYPE], f[Field.WIDTH], f[Field.HEIGHT], f[Field.COMPONENTS]
    _bounded(width, height, max_pixels)
    if frame not in _SEQUENTIAL and frame not in _PROGRESSIVE:
        _refuse_frame(frame)
    if f[Field.PRECISION] != 8:
        raise CorruptSample(f"a JPEG of {f[Field.PRECISION]} bits per value; only 8 are supported; convert it")
    if max(width, height) > MAX_SIDE:
        raise CorruptSample(f"the JPEG has {width} x {height} pixels; sides up to {MAX_SIDE} can be decoded")
    sampling = tuple((v >> 4, v & 15) for v in f[Field.SAMPLING : Field.SAMPLING + count])
    # the single component of a grey JPEG is never interleaved: its unit is one block whatever its factors say
    across, down = (1, 1) if count == 1 else (max(h for h, _ in sampling), max(v for _, v in sampling))
    progressive = frame in _PROGRESSIVE
    scan = f[Field.SCAN_START]
    if progressive and count_scans(stored, f[Field.SCAN_OFFSET], MAX_SCANS) > MAX_SCANS:
        raise CorruptSample(f"a progressive JPEG of more than {MAX_SCANS} scans, which would take very long to decode")
    baseline = frame in (0xC0, 0xC1) and f[Field.SCAN_COMPONENTS] == count
    header = PictureHeader(
        "jpeg", width, height, count, _color(f), 8, progressive, frame >= 0xC9, baseline, sampling,
        8 * across, 8 * down, f[Field.RESTART_INTERVAL], f[Field.ORIENTATION],
        f[Field.FRAME_OFFSET], f[Field.SCAN_OFFSET], scan,
    )  # fmt: skip
    if baseline:
        _long_enough(header, stored.size)
    return header


def _long_enough(header: PictureHeader, size: int) -> None:
    """A block takes two bits at least (one DC and one AC code): a tiny file that claims millions is not decoded."""
    blocks = sum(h * v for h, v in header.sampling) if header.components > 1 else 1
    needed = header.mcu_columns * header.mcu_rows * blocks * 2 // 8
    if size - header.scan_start < needed:
        raise CorruptSample(
            f"the stream is cut: {header.width} x {header.height} pixels need at least {needed} bytes after offset "
            f"{header.scan_start}, and {size - header.scan_start} are there"
        )


def _refuse_frame(frame: int) -> NoReturn:
    kind = "lossless" if frame in (0xC3, 0xCB) else "hierarchical"
    raise CorruptSample(
        f"a {kind} JPEG (frame type 0x{frame:02x}); sequential and progressive are supported; convert it"
    )


def _color(facts: list[int]) -> str:
    """The colour space that libjpeg assumes (its default_decompress_parms), so that both of our decoders agree."""
    count, adobe = facts[Field.COMPONENTS], facts[Field.ADOBE_TRANSFORM]
    if count == 1:
        return "gray"
    if count == 3:
        if facts[Field.JFIF]:
            return "ycc"
        if adobe >= 0:
            return "rgb" if adobe == 0 else "ycc"
        return "rgb" if facts[Field.IDS : Field.IDS + 3] == [0x52, 0x47, 0x42] else "ycc"
    if count == 4:
        return "cmyk" if adobe in (-1, 0) else "ycck"
    raise CorruptSample("a JPEG of two components; 1 (grey), 3 (colour) and 4 (CMYK) have a meaning")


_PNG_COLORS = {0: ("gray", 1), 2: ("rgb", 3), 3: ("palette", 1), 4: ("gray+alpha", 2), 6: ("rgb+alpha", 4)}


def _png(start: bytes, max_pixels: int) -> PictureHeader:
    if len(start) < 33 or start[8:16] != b"\0\0\0\x0dIHDR":
        raise CorruptSample("a PNG without its IHDR chunk at offset 8")
    width, height, bits, color = struct.unpack_from(">IIBB", start, 16)
    _bounded(width, height, max_pixels)
    if color not in _PNG_COLORS or bits not in (1, 2, 4, 8, 16):
        raise CorruptSample(f"a PNG of colour type {color} with {bits} bits, which the PNG standard does not know")
    name, components = _PNG_COLORS[color]
    return PictureHeader("png", width, height, components, name, bits, False, False, False, (), 1, 1, 0, 1, 0, 0, 0)
