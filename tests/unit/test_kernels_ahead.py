"""Kernels are compiled before a session exists: no worker meets one that is missing, and the log says who waits."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from dataserver import service
from renaissance.data.recipe import Recipe
from renaissance.data.transforms import RandomResizedCrop

SCRIPT = """
import io
import numpy as np
from numba.core.dispatcher import Dispatcher
from PIL import Image
from renaissance.core.dtype import DType
from renaissance.data.jpeg import bits, cut, huffman, parse, transcode
from renaissance.data.pictures import compile_pictures
from renaissance.data.recipe import Recipe
from renaissance.data.sources import Encoding
from renaissance.data.transforms import RandomResizedCrop

def compiled():
    modules = (bits, cut, huffman, parse, transcode)
    kernels = {id(v): v for m in modules for v in vars(m).values() if isinstance(v, Dispatcher)}
    return {(k.__module__, k.__name__): len(k.signatures) for k in kernels.values() if k.signatures}

pictures = compile_pictures(Recipe.build([RandomResizedCrop(8)], resolution=8), DType.UINT8)
before = compiled()
assert ("renaissance.data.jpeg.cut", "cut_segments") in before, before
row = np.zeros(pictures.row_bytes, np.uint8)
noise = np.random.default_rng(0).integers(0, 256, (90, 120, 3), np.uint8)
for options in ({}, {"restart_marker_rows": 1}, {"restart_marker_blocks": 4}, {"subsampling": 0}, {"optimize": True}):
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "JPEG", quality=90, **options)
    stored = np.frombuffer(file.getvalue(), np.uint8)
    for sample in range(40):
        pictures.make(stored, Encoding.PICTURES, sample, 1, 0, False, row)
assert compiled() == before, set(compiled().items()) - set(before.items())
"""


def test_pictures_of_every_kind_meet_no_kernel_that_is_not_compiled() -> None:
    """In a process of its own: here other tests have compiled them."""
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_recipe_that_has_to_be_compiled_is_said_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    said, lines = threading.Event(), []

    def note(text: str, *values: object) -> None:
        lines.append(text % values)
        said.set()

    monkeypatch.setattr(service, "COMPILING_SECONDS", 0.0)
    monkeypatch.setattr(service._log, "info", note)
    recipe = Recipe.build([RandomResizedCrop(8)], resolution=8)
    with service._compiling_is_said(recipe):
        assert said.wait(20)
    assert lines == [
        f"compiling kernels (once per installation) of recipe {recipe.fingerprint()[:16]}: RandomResizedCrop"
    ]
