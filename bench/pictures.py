"""The data of the data benches, prepared once in bench/.cache: CIFAR's binary files and a folder tree of photographs.

CIFAR's pixels are random: nothing in that recipe depends on them. BENCH_PHOTOS names a folder with one folder of JPEG
files per class; without it pictures are made of noise with the spectrum of natural scenes, 500 x 375, quality 90,
4:2:0, about 68 KB each.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

CACHE = Path(__file__).resolve().parent / ".cache"
PHOTOS, CLASSES = 600, 10
CIFAR_BATCH = 10_000


def cifar_folder() -> Path:
    """A folder with cifar-10-batches-bin/the published files' names and sizes."""
    folder = CACHE / "cifar"
    if not folder.is_dir():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        binary = part / "cifar-10-batches-bin"
        binary.mkdir(parents=True)
        random = np.random.default_rng(0)
        names = [f"data_batch_{number}.bin" for number in range(1, 6)]
        for name, count in [*((name, CIFAR_BATCH) for name in names), ("test_batch.bin", CIFAR_BATCH)]:
            records = random.integers(0, 256, (count, 3073), np.uint8)
            records[:, 0] %= 10
            records.tofile(binary / name)
        part.rename(folder)
    return folder


def photos_folder() -> Path:
    """A folder with train/CLASS/*.JPEG, at least PHOTOS files (given ones are repeated under other names)."""
    given = os.environ.get("BENCH_PHOTOS")
    folder = CACHE / ("photos-given" if given else "photos-made")
    if not folder.is_dir():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        if given:
            _copy(Path(given), part / "train")
        else:
            print(f"making {PHOTOS} pictures in {folder} (once) ...", file=sys.stderr)
            for number in range(PHOTOS):
                path = part / "train" / f"class{number % CLASSES}" / f"picture{number:04}.JPEG"
                path.parent.mkdir(parents=True, exist_ok=True)
                scene(number).save(path, quality=90)
        part.rename(folder)
    return folder


def packed_photos(level: str, *options: str) -> Path:
    """The folder of ``photos_folder`` packed at one level (0 to 3 or RAW); further ``options`` of the command."""
    source = photos_folder()
    folder = source.parent / "-".join([source.name, level, *(option.strip("-") for option in options)])
    if not folder.is_dir():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        command = ["pack", "imagenet", "--input", source, "--output", part, "--level", level, "--split", "train"]
        subprocess.run(
            [sys.executable, "-m", "renaissance.cli.main", *command, *options], check=True, stdout=sys.stderr
        )
        part.rename(folder)
    return folder


def scene(number: int, width: int = 500, height: int = 375) -> Image.Image:
    """Noise whose amplitude falls as 1/frequency, with mostly grey colour, as in photographs."""
    random = np.random.default_rng(number)
    y, x = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None, :]
    falling = 1 / np.maximum(np.hypot(y, x), 1 / width) ** 1.35
    layers = []
    for _ in range(3):
        spectrum = falling * np.exp(2j * np.pi * random.random(falling.shape))
        plane = np.fft.irfft2(spectrum, (height, width))
        layers.append(plane / plane.std())
    grey, red, blue = layers
    picture = np.stack([grey + 0.3 * red, grey - 0.1 * red - 0.1 * blue, grey + 0.3 * blue], axis=2)
    grain = random.normal(0, 2.0, (height, width, 1))
    return Image.fromarray(np.clip(120 + 45 * picture + grain, 0, 255).astype(np.uint8))


def _copy(source: Path, target: Path) -> None:
    files = sorted(path for path in source.glob("*/*") if path.suffix.lower() in (".jpg", ".jpeg"))
    if not files:
        raise SystemExit(f"BENCH_PHOTOS={source}: expected folders with .JPEG files")
    for turn in range(-(-PHOTOS // len(files))):
        for path in files:
            copy = target / path.parent.name / f"{path.stem}_{turn}.JPEG"
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
