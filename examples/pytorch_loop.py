"""A PyTorch training loop fed by the dataserver, with its speed beside the same loop fed by a DataLoader.

    renaissance pack mnist --input data/mnist --output data/mnist
    python examples/pytorch_loop.py                             # MNIST, which the repository has
    python examples/pytorch_loop.py --data cifar10 --folder cifar   # after `renaissance fetch cifar10 --output cifar`

Needs torch; the comparison needs torchvision. The loop knows nothing of the dataserver: it gets (images, labels).
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from renaissance.core.enums import NormMode
from renaissance.data.adapters.pytorch import DataServerDataset
from renaissance.data.formats import open_dataset
from renaissance.data.private_daemon import start_private_daemon
from renaissance.data.recipe import Recipe
from renaissance.data.transforms import Pad, RandomCrop, RandomHorizontalFlip

SIZES = {"mnist": (28, 1, NormMode.MNIST), "cifar10": (32, 3, NormMode.CIFAR)}


def recipe(data: str, train: bool) -> Recipe:
    """Pad 4, random crop, and for CIFAR a flip; nothing random for validation."""
    size, channels, normalization = SIZES[data]
    chain = [Pad(4), RandomCrop(size)] + ([RandomHorizontalFlip()] if data == "cifar10" else [])
    return Recipe.build(chain if train else [], normalization, resolution=size, color_channels=channels)


def small_network(channels: int) -> nn.Module:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]

    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(*block(channels, 16), *block(16, 32), *block(32, 64), *head)


def train_epoch(model: nn.Module, batches: Iterable, optimizer: torch.optim.Optimizer) -> tuple[float, int]:
    """(mean loss, samples) of one pass."""
    model.train()
    total, count = 0.0, 0
    for images, labels in batches:
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total, count = total + loss.item() * len(labels), count + len(labels)
    return total / count, count


@torch.no_grad()
def accuracy(model: nn.Module, batches: Iterable) -> float:
    model.eval()
    right = count = 0
    for images, labels in batches:
        right, count = right + int((model(images).argmax(1) == labels).sum()), count + len(labels)
    return right / count


def run(title: str, data: str, train: Iterable, val: Iterable, epochs: int, seed: int) -> float:
    """Train a fresh network; returns samples/s over all epochs but the first, which warms up, if there are several."""
    torch.manual_seed(seed)
    model = small_network(SIZES[data][1]).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    speeds = []
    for epoch in range(epochs):
        start = time.perf_counter()
        loss, samples = train_epoch(model, train, optimizer)
        speeds.append(samples / (time.perf_counter() - start))
        print(f"{title}: epoch {epoch}  loss {loss:.4f}  top-1 {accuracy(model, val):.4f}  {speeds[-1]:.0f} samples/s")
    measured = speeds[1:] or speeds
    return sum(measured) / len(measured)


def loader_of(data: str, folder: Path, split: str, batch: int, workers: int) -> Iterable:
    """The usual way: torchvision transforms in a DataLoader."""
    from PIL import Image
    from torch.utils.data import DataLoader, Dataset
    from torchvision import transforms

    stored = open_dataset(data, folder, split)
    size, _, _ = SIZES[data]
    normalization = recipe(data, False).normalization
    augment = [transforms.RandomCrop(size, padding=4)] if split == "train" else []
    augment += [transforms.RandomHorizontalFlip()] if split == "train" and data == "cifar10" else []
    chain = transforms.Compose(
        [*augment, transforms.ToTensor(), transforms.Normalize(normalization.mean, normalization.std)]
    )

    class Images(Dataset):
        def __len__(self) -> int:
            return len(stored)

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            image = stored.images[index]
            return chain(Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)), int(stored.labels[index])

    return DataLoader(Images(), batch, shuffle=split == "train", num_workers=workers, persistent_workers=workers > 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=tuple(SIZES), default="mnist")
    parser.add_argument("--folder", type=Path, default=Path("data/mnist"))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--feed", choices=("dataserver", "dataloader", "both"), default="both")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {options.workers} workers")
    speeds = {}
    if options.feed != "dataloader":
        common = {"dataset": options.data, "seed": options.seed, "batch_size": options.batch}
        with (
            start_private_daemon({options.data: options.folder}, workers=options.workers) as daemon,
            DataServerDataset(daemon.address, split="train", recipe=recipe(options.data, True), **common) as train,
            DataServerDataset(daemon.address, split="val", recipe=recipe(options.data, False), **common) as val,
        ):
            speeds["dataserver"] = run("dataserver", options.data, train, val, options.epochs, options.seed)
    if options.feed != "dataserver":
        train, val = (
            loader_of(options.data, options.folder, split, options.batch, options.workers) for split in ("train", "val")
        )
        speeds["dataloader"] = run("dataloader", options.data, train, val, options.epochs, options.seed)
    if len(speeds) == 2:
        ratio = speeds["dataserver"] / speeds["dataloader"]
        print(f"the loop runs {ratio:.2f} times as fast with the dataserver as with the DataLoader")


if __name__ == "__main__":
    main()
