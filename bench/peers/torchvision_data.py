"""The example's recipe in torchvision, as a data set for a DataLoader and as a bench of the pipeline alone."""

from __future__ import annotations

import argparse
import gzip
import time
from pathlib import Path

import numpy as np
import torch
import torchvision
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from torchvision.transforms import v2

from bench.rounds import serve_rounds

MEAN, STD = (0.1307,), (0.3081,)


def read_idx(folder: Path, stem: str) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [N,28,28] and labels int64 [N] of one published MNIST set."""
    images = np.frombuffer(gzip.decompress((folder / f"{stem}-images-idx3-ubyte.gz").read_bytes()), np.uint8, offset=16)
    labels = np.frombuffer(gzip.decompress((folder / f"{stem}-labels-idx1-ubyte.gz").read_bytes()), np.uint8, offset=8)
    return images.reshape(-1, 28, 28), labels.astype(np.int64)


def pil_recipe() -> transforms.Compose:
    return transforms.Compose(
        [
            transforms.Pad(2),
            transforms.RandomCrop(28),
            transforms.RandomRotation(20),
            transforms.RandomAffine(0, scale=(0.8, 1.2)),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
            transforms.RandomErasing(0.5),
        ]
    )


def tensor_recipe() -> v2.Compose:
    return v2.Compose(
        [
            v2.Pad(2),
            v2.RandomCrop(28),
            v2.RandomRotation(20),
            v2.RandomAffine(0, scale=(0.8, 1.2)),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
            v2.RandomErasing(0.5),
        ]
    )


class Mnist(Dataset):
    """MNIST in memory; ``style`` "pil" makes a PIL image per sample, "tensor" a uint8 tensor."""

    def __init__(self, folder: Path, style: str) -> None:
        self.images, self.labels = read_idx(folder, "train")
        self.style = style
        self.recipe = pil_recipe() if style == "pil" else tensor_recipe()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self.images[index]
        source = Image.fromarray(image) if self.style == "pil" else torch.from_numpy(image.copy())[None]
        return self.recipe(source), int(self.labels[index])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--style", choices=("pil", "tensor"), required=True)
    parser.add_argument("--folder", type=Path, default=Path("data/mnist"))
    parser.add_argument("--batches", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    loader = DataLoader(Mnist(options.folder, options.style), batch_size=200, shuffle=True, num_workers=0)
    batches = iter(loader)

    def run_round() -> float:
        nonlocal batches
        count = 0
        start = time.perf_counter()
        for _ in range(options.batches):
            batch = next(batches, None)
            if batch is None:
                batches = iter(loader)
                batch = next(batches)
            count += len(batch[1])
        return count / (time.perf_counter() - start)

    run_round()
    serve_rounds(run_round, {"torch": torch.__version__, "torchvision": torchvision.__version__})


if __name__ == "__main__":
    main()
