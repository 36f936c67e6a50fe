"""Kernels stay inside the memory they are given: no bounds are checked in compiled code, least of all in vectors.

Sources and rows lie against pages that may not be touched, as the last picture of a mapped file does; one byte too many
ends the process, which therefore is not this one.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import struct
import subprocess
import sys

import numpy as np
import numpy.typing as npt

from renaissance.core.dtype import DType
from renaissance.core.enums import NormMode
from renaissance.data.compile import compile_recipe
from renaissance.data.pictures import compile_pictures
from renaissance.data.recipe import Recipe
from renaissance.data.sources.spec import Encoding
from renaissance.data.transforms import (
    CenterCrop,
    GaussianBlur,
    Pad,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    Resize,
    Transform,
)

PAGE = mmap.PAGESIZE
NO_ACCESS = 0
SIDES = (1, 2, 5, 6, 16, 17, 21, 22, 33, 70, 200)
SIZES = (1, 2, 5, 7, 16, 17, 33)


class Walls:
    """Memory between two pages without access, at its begin or at its end."""

    def __init__(self) -> None:
        self._kept: list[mmap.mmap] = []

    def bytes(self, size: int, at_end: bool) -> npt.NDArray[np.uint8]:
        inner = -(-size // PAGE) * PAGE
        memory = mmap.mmap(-1, inner + 2 * PAGE)
        self._kept.append(memory)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for wall in (address, address + PAGE + inner):
            if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(wall), PAGE, NO_ACCESS):
                raise OSError(ctypes.get_errno(), "mprotect")
        begin = PAGE + (inner - size if at_end else 0)
        return np.frombuffer(memory, np.uint8)[begin : begin + size]


def one_round(rng: random.Random) -> None:
    size, walls = rng.choice(SIZES), Walls()
    sizing: list[Transform] = [
        *(Resize(size), CenterCrop(size), RandomCrop(size)),
        RandomResizedCrop(size, (0.01, 1.0), (0.05, 20.0)),
    ]
    between: list[Transform] = [Pad(3), RandomRotation(40), GaussianBlur(0.1, 20.0), Resize(rng.choice(SIZES))]
    chain = [rng.choice(sizing), *rng.sample(between, rng.randrange(3)), rng.choice(sizing)]
    if rng.random() < 0.7:
        chain.append(RandomHorizontalFlip(1.0))
    dtype, padded = rng.choice((DType.UINT8, DType.FP32, DType.BF16)), rng.choice((3, 3, 4, 7))
    recipe = Recipe.build(chain, NormMode.NO_NORM, size, 3)
    height, width = rng.choice(SIDES), rng.choice(SIDES)
    stored = walls.bytes(8 + height * width * 3, True)
    stored[8:] = rng.randrange(256)
    stored[:8] = np.frombuffer(struct.pack("<II", width, height), np.uint8)
    pictures = compile_pictures(recipe, dtype, padded)
    for at_end in (False, True):
        row = walls.bytes(pictures.row_bytes, at_end)
        pictures.make(stored, Encoding.RAW, rng.randrange(100), 1, 0, False, row)
    fixed = compile_recipe(recipe, height, width, 3, dtype, padded)
    images = walls.bytes(2 * height * width * 3, True).reshape(2, height, width, 3)
    for at_end in (False, True):
        out = walls.bytes(2 * fixed.row_bytes, at_end).reshape(2, -1)
        fixed.process(images, np.arange(2), np.arange(2), 1, 0, False, out, np.arange(2), np.zeros(2, np.uint64))


def test_no_byte_outside_the_sources_and_the_rows_is_touched() -> None:
    done = subprocess.run([sys.executable, "-X", "faulthandler", __file__], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_wall_ends_the_process_that_touches_it() -> None:
    touch = "import test_recipe_memory as t, ctypes; ctypes.string_at(t.Walls().bytes(10, True).ctypes.data, 11)"
    done = subprocess.run([sys.executable, "-c", touch], cwd=__file__.rpartition("/")[0])
    assert done.returncode < 0


if __name__ == "__main__":
    generator = random.Random(11)
    for _ in range(300):
        one_round(generator)
