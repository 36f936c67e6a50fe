"""Small CIFAR files and picture trees, whole and damaged, for tests with real daemons."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from renaissance.core.enums import NormMode
from renaissance.data.formats.imagenet import PictureLayout, picture_level
from renaissance.data.formats.imagenet_pack import PackOptions, pack_imagenet
from renaissance.data.recipe import Recipe
from renaissance.data.station import TransferStation
from renaissance.data.transforms import RandomCrop, RandomHorizontalFlip, RandomResizedCrop, Resize

SEED = 21
COMPILE_SECONDS = 120.0
"""Where nothing is cached yet, the first session of a kind compiles its kernels."""

CIFAR_SAMPLES = 205
PICTURES = {"train": 60, "val": 22}
CLASSES = 4

CIFAR_RECIPE = Recipe.build([RandomCrop(32), RandomHorizontalFlip()], NormMode.CIFAR, resolution=32, color_channels=3)
CIFAR_PLAIN = Recipe.build([], NormMode.NO_NORM, resolution=32, color_channels=3)
PICTURE_RECIPE = Recipe.build(
    [RandomResizedCrop(32), RandomHorizontalFlip()], NormMode.IMAGENET, resolution=32, color_channels=3
)
VAL_RECIPE = Recipe.build([Resize(32)], NormMode.IMAGENET, resolution=32, color_channels=3, validation=True)


def make_cifar(folder: Path) -> None:
    """The published binary form, with fewer records; no two images are alike."""
    rng = np.random.default_rng(8)
    for name in [*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]:
        records = rng.integers(0, 256, (CIFAR_SAMPLES // 5, 3073), np.uint8)
        records[:, 0] %= 10
        (folder / name).write_bytes(records.tobytes())


def make_tree(root: Path) -> None:
    """ROOT/{train,val}/n<class>/*.JPEG of 64x48 and similar; the names sort as the classes do."""
    for split, count in PICTURES.items():
        for number in range(count):
            label = number * CLASSES // count
            folder = root / split / f"n{label}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"n{label}_{number:03}.JPEG").write_bytes(jpeg(64 - number % 5, 48 + number % 7, number))


def jpeg(width: int, height: int, seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (4, 4, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(coarse).resize((width, height)).save(stream, "JPEG", quality=90)
    return stream.getvalue()


def pack_tree(root: Path, folder: Path, level: int | str = 0) -> None:
    """Both splits in the order of the tree, so that sample ids agree; several small blocks."""
    layout = PictureLayout(picture_level(level), 16384, 32768, 1024)
    for split in PICTURES:
        pack_imagenet(root, folder, split, PackOptions(level=level, order="file", layout=layout))


def damage(root: Path) -> dict[int, str]:
    """Plant three damaged pictures in the training set; returns their names by sample id."""
    files = sorted((root / "train").glob("*/*"), key=lambda path: (path.parent.name, path.name))
    found = {}
    for sample, content in ((4, b""), (23, b"\x00" * 300), (41, None)):
        whole = files[sample].read_bytes()
        files[sample].write_bytes(whole[: len(whole) * 2 // 3] if content is None else content)
        found[sample] = files[sample].name
    return found


def open_cifar(address: str, **changes: Any) -> TransferStation:
    given: dict[str, Any] = {
        "dataset": "cifar10",
        "split": "train",
        "recipe": CIFAR_RECIPE,
        "seed": SEED,
        "batch_size": 32,
    }
    given["timeout"] = COMPILE_SECONDS
    return TransferStation(address, **(given | changes))


def open_pictures(address: str, **changes: Any) -> TransferStation:
    given: dict[str, Any] = {
        "dataset": "imagenet",
        "split": "train",
        "recipe": PICTURE_RECIPE,
        "seed": SEED,
        "batch_size": 16,
    }
    given["timeout"] = COMPILE_SECONDS
    return TransferStation(address, **(given | changes))


def epoch_digests(station: TransferStation, epochs: int = 2) -> list[str]:
    """Reads whole epochs, with the digests computed again on this side, and closes the station."""
    with station:
        for epoch in range(epochs):
            for _ in station.epoch(epoch):
                pass
        return [station.epoch_digest(epoch) for epoch in range(epochs)]
