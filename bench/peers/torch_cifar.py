"""PyTorch's side of bench/cifar_curves.py: prints the history of its run as JSON on stdout.

The batches come from our dataserver. Decay is decoupled and spares biases and batch norm, as ours does; the rest is
``torch.optim.SGD`` with Nesterov's momentum, which has our formula.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from bench.peers.zoo_models import Parameters, build
from renaissance.data.adapters.pytorch import DataServerDataset
from renaissance.data.private_daemon import start_private_daemon
from renaissance.data.recipe import Recipe

CLASSES, SIDE = 10, 32


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("--model", required=True)
    for name, kind in (("threads", int), ("batch", int), ("seed", int)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    for name in ("smoothing", "momentum", "decay"):
        parser.add_argument(f"--{name}", type=float, required=True)
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    facts = json.loads((options.work / "facts.json").read_text())
    model = build(options.model, CLASSES, SIDE)
    with np.load(options.work / "weights.npz") as weights:
        Parameters(model).load([weights[name] for name in weights.files])
    model = model.to(memory_format=torch.channels_last)
    common = {"dataset": "cifar10", "seed": options.seed, "batch_size": options.batch}
    recipes = [Recipe.from_json(facts[name]) for name in ("train_recipe", "val_recipe")]
    with (
        start_private_daemon({"cifar10": options.work / "data"}, workers=2, nice=5) as daemon,
        DataServerDataset(daemon.address, split="train", recipe=recipes[0], **common) as train,
        DataServerDataset(daemon.address, split="val", recipe=recipes[1], shuffle=False, **common) as val,
    ):
        print(json.dumps(run(model, train, val, facts["rates"], options)))


def run(model: nn.Module, train: Any, val: Any, rates: list[list[float]], options: argparse.Namespace) -> list[dict]:
    decayed = [p for p in model.parameters() if p.ndim > 1]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=options.momentum, nesterov=True)
    history = []
    for epoch, of_steps in enumerate(rates):
        start = time.perf_counter()
        model.train()
        losses = 0.0
        count = 0
        for (images, labels), rate in zip(train, of_steps, strict=True):
            loss = loss_of(model, images, labels, options)[0]
            optimizer.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter in decayed:
                    parameter.mul_(1.0 - rate * options.decay)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            losses, count = losses + loss.item() * len(labels), count + len(labels)
        seconds = time.perf_counter() - start
        record = {
            "epoch": epoch + 1,
            "train_loss": losses / count,
            "train_seconds": seconds,
            **validate(model, val, options),
        }
        print(f"PyTorch {record}", file=sys.stderr, flush=True)
        history.append(record)
    return history


def loss_of(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, options: argparse.Namespace
) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.autocast("cpu", torch.bfloat16, enabled=options.bf16):
        logits = model(images)
    return cross_entropy(logits.float(), labels, label_smoothing=options.smoothing), logits


@torch.no_grad()
def validate(model: nn.Module, val: Any, options: argparse.Namespace) -> dict[str, float]:
    model.eval()
    losses, right, count = 0.0, 0, 0
    for images, labels in val:
        loss, logits = loss_of(model, images, labels, options)
        losses, count = losses + loss.item() * len(labels), count + len(labels)
        right += int((logits.argmax(1) == labels).sum())
    return {"val_loss": losses / count, "top1": right / count}


if __name__ == "__main__":
    main()
