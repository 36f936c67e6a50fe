"""What PyTorch users write: torchvision in a DataLoader, whole-batch indexing for CIFAR, simplejpeg with OpenCV."""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import simplejpeg
import torch
import torchvision
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from bench.peers.pictures import CIFAR_MEAN, CIFAR_STD, IMAGENET_MEAN, IMAGENET_STD, load_cifar, photo_files
from bench.rounds import samples_per_second, serve_rounds


class Cifar(Dataset):
    def __init__(self, folder: Path) -> None:
        self.images, self.labels = load_cifar(folder)
        self.recipe = transforms.Compose(
            [
                transforms.RandomCrop(32, padding=4),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(CIFAR_MEAN, CIFAR_STD),
            ]
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.recipe(Image.fromarray(self.images[index])), int(self.labels[index])


class Photos(Dataset):
    def __init__(self, folder: Path, decode: Callable[[Path], torch.Tensor]) -> None:
        self.files, self.decode = photo_files(folder), decode

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.files[index]
        return self.decode(path), label


def with_pillow() -> Callable[[Path], torch.Tensor]:
    recipe = transforms.Compose(
        [
            transforms.RandomResizedCrop(224),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
        ]
    )
    return lambda path: recipe(Image.open(path).convert("RGB"))


def with_tensors() -> Callable[[Path], torch.Tensor]:
    from torchvision.transforms import v2

    recipe = v2.Compose(
        [
            v2.RandomResizedCrop(224, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(IMAGENET_MEAN, IMAGENET_STD),
        ]
    )
    mode = torchvision.io.ImageReadMode.RGB
    return lambda path: recipe(torchvision.io.decode_jpeg(torchvision.io.read_file(str(path)), mode=mode))


def with_opencv() -> Callable[[Path], torch.Tensor]:
    """simplejpeg decodes, cv2.resize (bilinear) scales the crop, NumPy normalises."""
    cv2.setNumThreads(1)
    scale = (1 / (255 * np.array(IMAGENET_STD))).astype(np.float32)
    shift = (np.array(IMAGENET_MEAN) / np.array(IMAGENET_STD)).astype(np.float32)

    def decode(path: Path) -> torch.Tensor:
        picture = simplejpeg.decode_jpeg(path.read_bytes())
        height, width = picture.shape[:2]
        for _ in range(10):
            area = height * width * random.uniform(0.08, 1.0)
            ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                break
        else:
            w = h = min(width, height)
        x, y = random.randint(0, width - w), random.randint(0, height - h)
        crop = cv2.resize(picture[y : y + h, x : x + w], (224, 224), interpolation=cv2.INTER_LINEAR)
        if random.random() < 0.5:
            crop = crop[:, ::-1]
        return torch.from_numpy(crop * scale - shift)

    return decode


def whole_batches(folder: Path, batch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The way of speed-run scripts: CIFAR padded once, then crop, flip and normalise of a batch by indexing."""
    images, labels = load_cifar(folder)
    padded = torch.nn.functional.pad(torch.from_numpy(images), (0, 0, 4, 4, 4, 4))
    targets = torch.from_numpy(labels)
    mean, std = torch.tensor(CIFAR_MEAN), torch.tensor(CIFAR_STD)
    line = torch.arange(32)
    while True:
        for index in torch.randperm(len(targets)).split(batch):
            n = len(index)
            x, y = torch.randint(0, 9, (n, 1)), torch.randint(0, 9, (n, 1))
            columns = torch.where(torch.rand(n, 1) < 0.5, x + line, x + 31 - line)
            crop = padded[index[:, None, None], (y + line)[:, :, None], columns[:, None, :]]
            yield (crop.float() / 255 - mean) / std, targets[index]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--style", choices=("cifar", "batched", "pillow", "tensors", "opencv"), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)

    def endless() -> Iterator[Any]:
        if options.style == "batched":
            yield from whole_batches(options.folder, options.batch)
        recipes = {"pillow": with_pillow, "tensors": with_tensors, "opencv": with_opencv}
        style = options.style
        data = Cifar(options.folder) if style == "cifar" else Photos(options.folder, recipes[style]())
        keep = options.workers > 0
        loader = DataLoader(
            data, options.batch, shuffle=True, num_workers=options.workers, persistent_workers=keep, drop_last=True
        )
        while True:
            yield from loader

    stream = endless()

    def run_round() -> float:
        return samples_per_second(lambda: len(next(stream)[1]), options.samples)

    run_round()
    versions = {"torch": torch.__version__, "torchvision": torchvision.__version__, "opencv": cv2.__version__}
    serve_rounds(run_round, {**versions, "simplejpeg": simplejpeg.__version__})


if __name__ == "__main__":
    main()
