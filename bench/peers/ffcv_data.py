"""FFCV: CIFAR from a raw .beton, and photographs from a JPEG (quality 90) or a raw one; files in the page cache."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from ffcv.fields import IntField, RGBImageField
from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder, SimpleRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, RandomTranslate, ToTensor
from ffcv.writer import DatasetWriter
from PIL import Image

from bench.peers.pictures import CIFAR_MEAN, CIFAR_STD, IMAGENET_MEAN, IMAGENET_STD, load_cifar, photo_files
from bench.rounds import samples_per_second, serve_rounds


class Photos:
    def __init__(self, folder: Path) -> None:
        self.files = photo_files(folder)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        path, label = self.files[index]
        return Image.open(path).convert("RGB"), label


class Cifar:
    def __init__(self, folder: Path) -> None:
        self.images, self.labels = load_cifar(folder)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.images[index], int(self.labels[index])


def write(data: Photos | Cifar, path: Path, mode: str) -> None:
    if not path.exists():
        part = path.with_suffix(".part")
        image = RGBImageField(write_mode=mode, jpeg_quality=90)
        DatasetWriter(str(part), {"image": image, "label": IntField()}, num_workers=1).from_indexed_dataset(data)
        part.rename(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=("cifar", "jpg", "raw"), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = options.folder / f"ffcv_{options.kind}.beton"
    if options.kind == "cifar":
        write(Cifar(options.folder), path, "raw")
        mean, std = np.array(CIFAR_MEAN) * 255, np.array(CIFAR_STD) * 255
        pixels = [SimpleRGBImageDecoder(), RandomHorizontalFlip(), RandomTranslate(padding=4)]
    else:
        write(Photos(options.folder), path, options.kind)
        mean, std = np.array(IMAGENET_MEAN) * 255, np.array(IMAGENET_STD) * 255
        pixels = [RandomResizedCropRGBImageDecoder((224, 224)), RandomHorizontalFlip()]
    loader = Loader(
        str(path),
        batch_size=options.batch,
        num_workers=options.workers,
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=True,
        pipelines={
            "image": [*pixels, NormalizeImage(mean, std, np.float32), ToTensor()],
            "label": [IntDecoder(), ToTensor()],
        },
    )

    def endless() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield from loader

    stream = endless()

    def run_round() -> float:
        return samples_per_second(lambda: len(next(stream)[0]), options.samples)

    run_round()
    serve_rounds(run_round, {"ffcv": version("ffcv"), "torch": torch.__version__})
    sys.stdout.flush()
    os._exit(0)  # the loader leaves a thread that would keep the process alive


if __name__ == "__main__":
    main()
