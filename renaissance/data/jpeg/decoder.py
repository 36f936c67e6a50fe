"""Stored pictures to RGB pixels.

simplejpeg (libjpeg-turbo) decodes Huffman-coded grey, YCbCr and RGB JPEG; Pillow decodes the rest. The result of either
is what Pillow's ``Image.open(...).convert("RGB")`` gives: grey is replicated, CMYK and YCCK are converted by Pillow's
rule (Adobe's inversion included), alpha is dropped, palettes are looked up. One exception: 16-bit grey keeps its high
byte, where Pillow clips at 255. Exif orientation is not applied.

A damaged picture raises CorruptSample; nothing of it, and nothing of an earlier picture, is handed out.
"""

from __future__ import annotations

import io
import struct
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import PIL
import simplejpeg
from PIL import Image, features

from renaissance.core.errors import CorruptSample, ValueRejected
from renaissance.data.jpeg.cut import Cutter
from renaissance.data.jpeg.header import PictureHeader
from renaissance.data.jpeg.window import Window, way_to_cut

DENOMINATORS: Final = (1, 2, 4, 8)
SCRATCH_KEPT = 32 << 20
"""Bytes of pixels: a decoder's scratch grows up to this; a larger picture gets memory of its own, freed after use."""
SIDE_OF_TINY = 8
"""Pictures smaller than a block in both directions are decoded as one block when scaled (see `_scaled_tiny`)."""
TURBO_SAMPLINGS = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4))
"""Factors of the luminance, beside (1, 1) for both chroma components, that the TurboJPEG interface accepts."""
TURBOJPEG_OF = {"1.9.0": "3.1.2", "1.8.2": "3.1.0"}
"""libjpeg-turbo inside simplejpeg's wheels by simplejpeg's version, which does not tell it itself."""

Bytes = npt.NDArray[np.uint8]

_silence = threading.Lock()
"""Filters of warnings belong to the process: two threads that change them at once would leave them changed."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """Pixels of a picture or of a part of it."""

    pixels: Bytes
    """uint8[h, w, 3], RGB. Valid until the decoder's next call: it may be a view of its scratch."""
    x0: int
    y0: int
    """Where `pixels` begins in the full picture at the same scale."""


def decoder_identity() -> str:
    """Names and versions of the decoders, which are part of what makes the bytes; printed beside a digest."""
    version = simplejpeg.__version__
    turbo = f" (libjpeg-turbo {TURBOJPEG_OF[version]})" if version in TURBOJPEG_OF else ""
    within = features.version("libjpeg_turbo")
    return f"simplejpeg {version}{turbo}, Pillow {PIL.__version__}" + (f" (libjpeg-turbo {within})" if within else "")


class Decoder:
    """Decodes stored pictures one after the other. Owns scratch memory; one per thread."""

    def __init__(self) -> None:
        self._scratch: Bytes = np.empty(1 << 20, np.uint8)
        self._cutter = Cutter()

    @property
    def scratch_bytes(self) -> int:
        """Memory kept between calls, at most `SCRATCH_KEPT` plus a little."""
        return self._scratch.nbytes

    def decode(
        self,
        stored: Bytes,
        header: PictureHeader,
        window: Window | None = None,
        denominator: int = 1,
        fast: bool = False,
    ) -> Decoded:
        """Decode `stored`, uint8[n], whose `read_header` is `header`.

        `window` (x0, y0, x1, y1) in full-size pixels: at least this part is delivered, scaled from floor(x0 / d) to
        ceil(x1 / d), and its pixels equal those of a full decode at the same scale and mode. `denominator` 1, 2, 4 or
        8: the picture is decoded at that fraction, ceil(width / d) x ceil(height / d). `fast`: the fast integer DCT and
        plain chroma upsampling. Raises CorruptSample, ValueRejected.
        """
        if denominator not in DENOMINATORS:
            raise ValueRejected(f"denominator {denominator} is not one of 1, 2, 4, 8")
        if window is not None:
            x0, y0, x1, y1 = window
            if not (0 <= x0 < x1 <= header.width and 0 <= y0 < y1 <= header.height):
                raise ValueRejected(
                    f"window {window} is empty or reaches outside the picture of {header.width} x {header.height}"
                )
        if not uses_turbo(header):
            return Decoded(_with_pillow(stored, header, denominator), 0, 0)
        if window is not None and header.baseline:
            part = self._part(stored, header, window, denominator, fast)
            if part is not None:
                return part
        return Decoded(self._turbo(stored, header.width, header.height, header, denominator, fast), 0, 0)

    def _part(
        self, stored: Bytes, header: PictureHeader, window: Window, denominator: int, fast: bool
    ) -> Decoded | None:
        """The window and what is decoded with it, from a small JPEG; None when a full decode is quicker, or must judge.

        A stream without its end (EOI) is always decoded in full, so that a truncated picture is found whatever the
        window. Other damage outside the window goes unnoticed where restart markers let it be skipped.
        """
        way = way_to_cut(header, window, denominator)
        if way is None or stored[-2] != 0xFF or stored[-1] != 0xD9:
            return None
        cut = self._cutter.cut(stored, header, *way)
        if cut is None:
            return None
        small, width, height = cut
        left, top = way[0][:2]
        try:
            pixels = self._turbo(small, width, height, header, denominator, fast)
        except CorruptSample:
            return None
        return Decoded(pixels, left * header.mcu_width // denominator, top * header.mcu_height // denominator)

    def _room(self, size: int) -> Bytes:
        """`size` bytes to decode into: the scratch, or memory of its own when it is large."""
        if size > SCRATCH_KEPT:
            return np.empty(size, np.uint8)
        if size > self._scratch.size:
            self._scratch = np.empty(min(size + size // 4, SCRATCH_KEPT), np.uint8)
        return self._scratch

    def _turbo(
        self, stored: Bytes, width: int, height: int, header: PictureHeader, denominator: int, fast: bool
    ) -> Bytes:
        """uint8[ceil(height / d), ceil(width / d), 3]: all of the JPEG `stored`, which has width x height pixels."""
        if denominator > 1 and width < SIDE_OF_TINY and height < SIDE_OF_TINY:
            return self._scaled_tiny(stored, header, denominator, fast)
        tall, wide = -(-height // denominator), -(-width // denominator)
        room = self._room(tall * wide * 3)
        try:
            pixels: Bytes = simplejpeg.decode_jpeg(stored, "RGB", fast, fast, tall, wide, 1, room, True)
        except ValueError as error:
            raise CorruptSample(f"the JPEG is damaged: {error}") from None
        if pixels.shape != (tall, wide, 3):
            raise CorruptSample(
                f"the JPEG decodes to {pixels.shape[1]} x {pixels.shape[0]} pixels, its header says {wide} x {tall}"
            )
        return pixels

    def _scaled_tiny(self, stored: Bytes, header: PictureHeader, denominator: int, fast: bool) -> Bytes:
        """A picture within one block, scaled. simplejpeg is told a scale by the size that it gives, which is ambiguous
        below 8 x 8 (3 pixels become 2 at 1/2 and at 3/8), so the header is told that the block is filled."""
        whole = stored.copy()
        at = header.frame_offset + 5
        whole[at : at + 4] = np.frombuffer(struct.pack(">HH", SIDE_OF_TINY, SIDE_OF_TINY), np.uint8)
        pixels = self._turbo(whole, SIDE_OF_TINY, SIDE_OF_TINY, header, denominator, fast)
        return pixels[: -(-header.height // denominator), : -(-header.width // denominator)]


def uses_turbo(header: PictureHeader) -> bool:
    """Whether simplejpeg decodes this picture; Pillow otherwise."""
    if header.kind != "jpeg" or header.arithmetic:
        return False
    return header.components == 1 or (
        header.components == 3
        and header.sampling[0] in TURBO_SAMPLINGS
        and header.sampling[1] == header.sampling[2] == (1, 1)
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Pillow's remarks on metadata, which are not used, are not shown (nor raised, where warnings are errors)."""
    with _silence, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _with_pillow(stored: Bytes, header: PictureHeader, denominator: int) -> Bytes:
    """uint8[ceil(h / d), ceil(w / d), 3]. CMYK and arithmetic JPEG are scaled while decoding, a PNG by box averages."""
    try:
        with quiet(), Image.open(io.BytesIO(stored.tobytes()), formats=(header.kind.upper(),)) as picture:
            if picture.size != (header.width, header.height):
                raise CorruptSample(
                    f"Pillow reads {picture.size} pixels where the header says {header.width} x {header.height}"
                )
            if header.kind == "jpeg" and 1 < denominator <= min(picture.size):  # draft() divides by the size asked for
                picture.draft(None, (header.width // denominator, header.height // denominator))
            picture.load()
            scaled = -(-header.width // denominator), -(-header.height // denominator)
            rgb = _to_rgb(picture)
            if rgb.size != scaled:
                rgb = rgb.reduce(denominator)
            return np.asarray(rgb)
    except (OSError, ValueError, SyntaxError, EOFError, struct.error, Image.DecompressionBombError) as error:
        # what Pillow's two plugins raise for damaged files; UnidentifiedImageError is an OSError
        if isinstance(error, CorruptSample):
            raise
        raise CorruptSample(f"the {header.kind.upper()} is damaged: {error}") from None


def _to_rgb(picture: Image.Image) -> Image.Image:
    if picture.mode.startswith("I"):  # 16-bit grey; Pillow's own conversion would clip at 255
        high = (np.asarray(picture) >> 8).astype(np.uint8)
        return Image.fromarray(np.repeat(high[:, :, None], 3, axis=2))
    picture.info.pop("transparency", None)  # alpha is dropped; this key would only cost a warning
    return picture.convert("RGB")
