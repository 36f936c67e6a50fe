"""Compiling the kernels that cut a part out of a JPEG, before pictures are waited for.

Which of them a picture needs depends on its restart markers and on the window, so the first pictures of a session would
meet them one by one, in every worker at once.
"""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from renaissance.data.jpeg.cut import Cutter
from renaissance.data.jpeg.header import read_header

SIDE = 64
BOX = 0, 0, 2, 2
"""MCUs; two restart segments of the picture with markers."""


def load_kernels() -> None:
    """Compile them, or load them from the cache: one picture cut along Huffman codes, one along restart segments."""
    cutter = Cutter()
    for options in ({}, {"restart_marker_blocks": 2}):
        file = io.BytesIO()
        Image.new("RGB", (SIDE, SIDE)).save(file, "JPEG", **options)
        stored = np.frombuffer(file.getvalue(), np.uint8)
        if cutter.cut(stored, read_header(stored), BOX, tiled=bool(options)) is None:
            raise AssertionError("a picture without damage can be cut")
