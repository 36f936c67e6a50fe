"""A small data set for whole tasks on the stand-in: of MNIST's form, one stripe for each class, packed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from renaissance.data.formats.dts import layout_of, write_dts

CLASSES = 10


def write_stripes(folder: Path, *, train: int, val: int) -> Path:
    """Both files, with so many samples each; returns ``folder``."""
    for split, count in (("train", train), ("val", val)):
        rng = np.random.default_rng(count)
        labels = rng.integers(0, CLASSES, count, np.uint8)
        images = rng.integers(0, 80, (count, 28, 28, 1), np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[9 + label : 11 + label] += 150
        write_dts(folder / layout_of("mnist").file_name(split), "mnist", split, labels, images)
    return folder
