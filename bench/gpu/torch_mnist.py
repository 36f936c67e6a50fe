"""The whole MNIST job in PyTorch on a GPU: DataLoader, training, validation; a round is one epoch, in seconds.

Batches are pinned and copied without waiting; the step is autocast to bf16 with a fused optimizer.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader

from bench.gpu.torch_step import build
from bench.peers.torchvision_data import MEAN, STD, Mnist, read_idx
from bench.rounds import serve_rounds

BATCH = 200


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("data/mnist"))
    options = parser.parse_args()
    torch.manual_seed(123)
    model, optimizer = build("mlp")
    loss_function = nn.CrossEntropyLoss(label_smoothing=0.1)

    def forward(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return loss_function(model(images).float(), labels)

    if options.compile:
        forward = torch.compile(forward, mode="reduce-overhead", dynamic=False)

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = forward(images, labels)
        loss.backward()
        optimizer.step()
        return loss.detach().clone()

    loader = DataLoader(
        Mnist(options.folder, "pil"),
        batch_size=BATCH,
        shuffle=True,
        num_workers=options.workers,
        persistent_workers=True,
        prefetch_factor=4,
        pin_memory=True,
    )
    images, labels = read_idx(options.folder, "t10k")
    val_images = ((torch.from_numpy(images.copy()).float() / 255 - MEAN[0]) / STD[0]).reshape(-1, 1, 28, 28).cuda()
    val_labels = torch.from_numpy(labels).cuda()

    def validate() -> float:
        with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
            return float((model(val_images).argmax(1) == val_labels).float().mean())

    def run_round() -> float:
        start = time.perf_counter()
        total = torch.zeros((), device="cuda")
        for batch, target in loader:
            total += step(batch.cuda(non_blocking=True), target.cuda(non_blocking=True))
        validate()
        float(total)
        return time.perf_counter() - start

    serve_rounds(run_round, {"torch": torch.__version__, "torchvision": torchvision.__version__})


if __name__ == "__main__":
    main()
