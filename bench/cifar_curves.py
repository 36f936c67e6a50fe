"""Learning curves of ResNet-18 on CIFAR-10, or on a sample of it: ours beside PyTorch's.

    python -m bench.cifar_curves FOLDER [--epochs N] [--fp32] [--threads N] [--write]

Both train the same network (the CIFAR form of ResNet-18) by the recipe of examples/cifar_resnet.py, without its moving
average, from the same initial weights; both get their batches from a dataserver of ours, with one recipe and seed: the
same pictures, cropped and mirrored alike, in the same order. What differs is the arithmetic. They run one after the
other, each with all threads. FOLDER holds the published files, or a sample of them: any of ``data_batch_1.bin`` to 5
and ``test_batch*.bin``, also with ``.xz``. The bench runs the peer in its own environment (bench/peers.txt).
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import ROOT, TORCH_ENV, cpu_name, peers_python
from examples.cifar_resnet import BASE_LR, BATCH, WEIGHT_DECAY, initializer
from renaissance import (
    GLOBAL_SETTING,
    PREPROCESSOR_SETTING,
    SGD,
    CosineAnnealingLR,
    CrossEntropyLoss,
    DeepLearningTask,
    NormMode,
    RandomCrop,
    zoo,
)
from renaissance.data.formats import open_dataset
from renaissance.data.formats.cifar import CIFAR_LAYOUTS, read_cifar_file
from renaissance.data.formats.dts import layout_of, write_dts
from renaissance.data.transforms import Pad, RandomHorizontalFlip

RESULTS = ROOT / "docs" / "results"
MODEL, SEED, SMOOTHING, MOMENTUM = "resnet18_cifar", 1, 0.1, 0.9


@dataclass(frozen=True, slots=True)
class Options:
    """One comparison."""

    folder: Path
    epochs: int
    bf16: bool
    threads: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--fp32", action="store_true", help="both in fp32 instead of bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--write", action="store_true", help=f"write picture and numbers to {RESULTS.relative_to(ROOT)}"
    )
    given = parser.parse_args()
    options = Options(given.folder, given.epochs, not given.fp32, given.threads)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        sizes = pack(options.folder, work / "data")
        ours = train_ours(options, work)
        theirs = train_theirs(options, work)
    numbers = {
        "cpu": cpu_name(),
        "threads": options.threads,
        "dtype": "bf16" if options.bf16 else "fp32",
        "samples": sizes,
        "model": MODEL,
        "recipe": f"batch {BATCH}, SGD {BASE_LR}, Nesterov {MOMENTUM}, decay {WEIGHT_DECAY:g}, cosine,"
        f" smoothing {SMOOTHING}",
        "ours": ours,
        "pytorch": theirs,
    }
    print_table(numbers)
    if given.write:
        (RESULTS / "cifar-sample.json").write_text(json.dumps(numbers, indent=1) + "\n")
        draw(numbers, RESULTS / "cifar-sample.png")


def pack(source: Path, target: Path) -> dict[str, int]:
    """Put what is in ``source`` into packed files; returns the number of samples of each split."""
    target.mkdir()
    sizes = {}
    for split, pattern in (("train", "data_batch_*.bin*"), ("val", "test_batch*.bin*")):
        files = sorted(source.rglob(pattern))
        if not files:
            raise SystemExit(f"{source}: no {pattern} in it; expected CIFAR-10's binary files, or a sample of them")
        parts = [read_records(path) for path in files]
        labels, images = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        write_dts(target / layout_of("cifar10").file_name(split), "cifar10", split, labels, images)
        sizes[split] = len(labels)
    return sizes


def read_records(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """(labels, images) of one published file, which may be compressed."""
    layout = CIFAR_LAYOUTS["cifar10"]
    if path.suffix != ".xz":
        return read_cifar_file(path, layout)
    with tempfile.NamedTemporaryFile(suffix=".bin") as plain:
        plain.write(lzma.decompress(path.read_bytes()))
        plain.flush()
        return read_cifar_file(Path(plain.name), layout)


def train_ours(options: Options, work: Path) -> list[dict[str, Any]]:
    """Our run; leaves what the peer needs in ``work``: first weights, learning rates, recipes."""
    with GLOBAL_SETTING.scoped(), PREPROCESSOR_SETTING.scoped():
        GLOBAL_SETTING.use_cpu().amp(options.bf16).manual_seed(SEED).global_batch_size(BATCH).input_resolution(32)
        data = PREPROCESSOR_SETTING.dataset("cifar10", work / "data").normalization(NormMode.CIFAR)
        data.train_transforms(Pad(4), RandomCrop(32), RandomHorizontalFlip(0.5)).commit()
        schedule = CosineAnnealingLR().base_lr(BASE_LR).warmup(min(3, max(1, options.epochs // 3))).step_by_batch()
        task = DeepLearningTask().model(zoo.model(MODEL, 10)).total_epochs(options.epochs)
        task.initializer(initializer())
        task.loss(CrossEntropyLoss().label_smoothing(SMOOTHING)).scheduler(schedule).compute_threads(options.threads)
        task.optimizer(SGD().momentum(MOMENTUM).nesterov().weight_decay(WEIGHT_DECAY))
        with task:
            task.compile()
            weights = [np.array(task.engine.read(p.weight)) for p in task.compiled.parameters]
            np.savez(work / "weights.npz", *weights)
            config = PREPROCESSOR_SETTING.config
            steps = -(-len(open_dataset("cifar10", work / "data", "train")) // BATCH)
            rates = schedule.prepare(options.epochs, steps)
            facts = {
                "train_recipe": config.train_recipe.to_json(),
                "val_recipe": config.val_recipe.to_json(),
                "rates": [rates.epoch_rates(epoch) for epoch in range(options.epochs)],
            }
            (work / "facts.json").write_text(json.dumps(facts))
            result = task.run()
    keys = ("epoch", "train_loss", "val_loss", "top1", "train_seconds", "data_digest")
    return [{key: getattr(record, key) for key in keys} for record in result.history]


def train_theirs(options: Options, work: Path) -> list[dict[str, Any]]:
    """PyTorch's run, in its environment."""
    command = [str(peers_python()), "-m", "bench.peers.torch_cifar", str(work), "--threads", str(options.threads)]
    command += ["--batch", str(BATCH), "--seed", str(SEED), "--smoothing", str(SMOOTHING), "--model", MODEL]
    command += ["--momentum", str(MOMENTUM), "--decay", str(WEIGHT_DECAY)] + ["--bf16"] * options.bf16
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    environment = {**os.environ, **TORCH_ENV, "PYTHONPATH": f"{ROOT}{os.pathsep}{packages}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    history: list[dict[str, Any]] = json.loads(done.stdout)
    return history


def print_table(numbers: dict[str, Any]) -> None:
    print("epoch   ours: loss  val loss   top-1   seconds   torch: loss  val loss   top-1   seconds")
    for a, b in zip(numbers["ours"], numbers["pytorch"], strict=True):
        parts = [
            f"{r['train_loss']:.4f}    {r['val_loss']:.4f}  {r['top1']:6.2%} {r['train_seconds']:9.1f}" for r in (a, b)
        ]
        print(f"{a['epoch']:5}       {parts[0]}        {parts[1]}")


def draw(numbers: dict[str, Any], path: Path) -> None:
    """Losses and top-1 over the epochs, and top-1 over the seconds of training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.0, 4.0), dpi=100, layout="constrained")
    losses, accuracies, times = figure.subplots(1, 3)
    for name, title, color in (("ours", "renaissance", "C0"), ("pytorch", "PyTorch", "C1")):
        history = numbers[name]
        epochs = [r["epoch"] for r in history]
        losses.plot(epochs, [r["train_loss"] for r in history], color=color, label=f"{title}, training", marker=".")
        losses.plot(epochs, [r["val_loss"] for r in history], color=color, label=f"{title}, validation", linestyle="--")
        top1 = [100 * r["top1"] for r in history]
        accuracies.plot(epochs, top1, color=color, label=title, marker=".")
        seconds = np.cumsum([r["train_seconds"] for r in history])
        times.plot(seconds, top1, color=color, label=title, marker=".")
    for axes, x, y in (
        (losses, "epoch", "loss"),
        (accuracies, "epoch", "top-1 %"),
        (times, "s of training", "top-1 %"),
    ):
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.grid(alpha=0.3)
        axes.legend()
    samples = numbers["samples"]
    figure.suptitle(
        f"ResNet-18 on {samples['train']:,} + {samples['val']:,} images of CIFAR-10, {numbers['dtype']},"
        f" {numbers['threads']} threads; same batches and first weights"
    )
    figure.savefig(path, metadata={"Software": None})


if __name__ == "__main__":
    main()
