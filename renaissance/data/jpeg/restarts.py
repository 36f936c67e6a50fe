"""Restart markers for a JPEG that has none, without loss: every coefficient stays as it is.

A decoder can begin at a restart marker, so a picture that is tiled by restart segments can be cut without a look at the
rest of it (`cut`). The packer adds them once; afterwards a crop saves the entropy decoding of what it leaves out.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from renaissance.core.errors import CorruptSample, ValueRejected
from renaissance.data.jpeg.cut import Cutter
from renaissance.data.jpeg.decoder import Decoder, uses_turbo
from renaissance.data.jpeg.header import PictureHeader, read_header
from renaissance.data.jpeg.transcode import Outcome

MOST_GROWTH = 0.05
"""A picture that would grow by more than this share gets one segment per row, or none at all."""


def restart_interval(columns: int, mcu_width: int, target: int) -> int:
    """MCUs per restart segment: the divisor of the MCUs per row whose width in pixels is nearest to `target`.

    Narrower than half of `target` does not count (the marker and the new DC values cost about five bytes per segment),
    so a prime number of columns gives whole rows.
    """
    divisors = [d for d in range(1, columns + 1) if columns % d == 0 and (2 * d * mcu_width >= target or d == columns)]
    return min(divisors, key=lambda d: max(d * mcu_width / target, target / (d * mcu_width)))


def add_restarts(stored: bytes | npt.NDArray[np.uint8], target: int = 128) -> bytes:
    """`stored` with restart markers about every `target` pixels, so that its segments tile the picture.

    Sequential Huffman JPEG in one scan, grey or of three components, without restart markers of its own; anything else,
    and a picture that would grow by more than MOST_GROWTH, is returned as it is. Decodes to the same pixels.
    Raises CorruptSample when the picture is damaged.
    """
    if target < 1:
        raise ValueRejected(f"target {target} is not a number of pixels; expected at least 1 (usual: 128)")
    data = np.frombuffer(stored, np.uint8) if isinstance(stored, bytes) else stored
    header = read_header(data)
    if not (header.baseline and uses_turbo(header)) or header.restart_interval:
        return data.tobytes()
    columns = header.mcu_columns
    cutter = Cutter()
    for interval in sorted({restart_interval(columns, header.mcu_width, target), columns}):
        marked = cutter.with_restarts(data, header, interval)
        if isinstance(marked, int):
            return _judged(data, header, marked)
        if len(marked) <= data.size * (1 + MOST_GROWTH):
            return marked
    return data.tobytes()


def _judged(data: npt.NDArray[np.uint8], header: PictureHeader, outcome: int) -> bytes:
    """The picture as it is, when the decoder does not mind what `transcode` has stumbled over."""
    Decoder().decode(data, header)
    if outcome == Outcome.NO_ROOM:
        raise CorruptSample("the entropy-coded data would more than double with restart markers")
    return data.tobytes()
