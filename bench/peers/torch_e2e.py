"""The whole MNIST job in PyTorch: DataLoader, training, validation; a round is one epoch, in seconds."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torchvision
from torch.utils.data import DataLoader

from bench.peers.mlp import build, training_step
from bench.peers.torchvision_data import MEAN, STD, Mnist, read_idx
from bench.rounds import serve_rounds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--threads", type=int, default=0, help="0 leaves PyTorch's default")
    parser.add_argument("--style", choices=("pil", "tensor"), default="pil")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--defaults", action="store_true", help="AdamW as it comes, denormals not flushed")
    parser.add_argument("--folder", type=Path, default=Path("data/mnist"))
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    if not options.defaults:
        torch.set_flush_denormal(True)
    torch.manual_seed(123)
    model, optimizer, loss_function = build(fused=not options.defaults)
    step = training_step(model, loss_function, optimizer, options.bf16, options.compile)
    loader = DataLoader(
        Mnist(options.folder, options.style),
        batch_size=200,
        shuffle=True,
        num_workers=options.workers,
        persistent_workers=options.workers > 0,
        prefetch_factor=4 if options.workers else None,
    )
    # A careful user prepares the validation set once and keeps it in memory.
    images, labels = read_idx(options.folder, "t10k")
    val_images = ((torch.from_numpy(images.copy()).float() / 255 - MEAN[0]) / STD[0]).reshape(-1, 784)
    val_labels = torch.from_numpy(labels)

    def validate() -> float:
        correct = 0
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=options.bf16):
            for at in range(0, len(val_labels), 200):
                correct += int((model(val_images[at : at + 200]).argmax(1) == val_labels[at : at + 200]).sum())
        return correct / len(val_labels)

    def run_round() -> float:
        start = time.perf_counter()
        total = torch.zeros(())
        for batch, target in loader:
            total += step(batch.reshape(-1, 784), target)
        validate()
        float(total)
        return time.perf_counter() - start

    if options.compile:  # compile before the first timed epoch
        step(torch.randn(200, 784), torch.randint(0, 10, (200,)))
    serve_rounds(run_round, {"torch": torch.__version__, "torchvision": torchvision.__version__})


if __name__ == "__main__":
    main()
