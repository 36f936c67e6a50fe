"""Small training runs for the system tests: a cut of the real MNIST, a small model, one configuration per call."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from renaissance import (
    GLOBAL_SETTING,
    LARS,
    PREPROCESSOR_SETTING,
    TTA,
    AdamW,
    BluePrint,
    CosineAnnealingLR,
    CrossEntropyLoss,
    DeepLearningTask,
    NormMode,
    Pad,
    RandomCrop,
    RandomErasing,
    RandomRotation,
    RandomScale,
    fc,
    relu,
    seq,
)
from renaissance.graph import add2, bn, conv, dropout, gap, identity, maxpool

ROOT = Path(__file__).resolve().parents[2]
MNIST = ROOT / "data" / "mnist"
EXAMPLE = ROOT / "examples" / "mlp_mnist.py"
TRAIN, VAL, BATCH = 1100, 250, 200
"""Both sets end with a short batch."""
COLD_START = 240.0
"""Seconds a command may take, when all kernels have to be compiled first on a busy machine."""
FILES = {
    "train-images-idx3-ubyte": (TRAIN, 16, 784),
    "train-labels-idx1-ubyte": (TRAIN, 8, 1),
    "t10k-images-idx3-ubyte": (VAL, 16, 784),
    "t10k-labels-idx1-ubyte": (VAL, 8, 1),
}


def cut_mnist(folder: Path) -> Path:
    """The first samples of the published files, as idx.gz files in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (count, header, size) in FILES.items():
        with gzip.open(MNIST / f"{name}.gz") as file:
            data = bytearray(file.read(header + count * size))
        data[4:8] = count.to_bytes(4, "big")
        (folder / f"{name}.gz").write_bytes(gzip.compress(bytes(data), 1))
    return folder


@contextmanager
def settings(
    data: Path,
    *,
    seed: int = 123,
    amp: bool = True,
    batch: int = BATCH,
    workers: int = 2,
    progressive: tuple[tuple[int, int], tuple[int, int]] | None = None,
) -> Iterator[None]:
    """The example's settings on ``data``, undone at the end; ``progressive``: (0, first size), (epochs, 28)."""
    with GLOBAL_SETTING.scoped(), PREPROCESSOR_SETTING.scoped():
        GLOBAL_SETTING.use_cpu().amp(amp).manual_seed(seed).global_batch_size(batch)
        if progressive is None:
            GLOBAL_SETTING.input_resolution(28)
        else:
            GLOBAL_SETTING.train_resolution(*progressive).val_resolution(28)
        PREPROCESSOR_SETTING.dataset("mnist", data).preprocess_workers(workers).normalization(
            NormMode.MNIST
        ).train_transforms(
            Pad(2), RandomCrop(28), RandomRotation(20), RandomScale(0.8, 1.2), RandomErasing(0.5)
        ).commit()
        yield


def small_task(epochs: int = 2, hidden: int = 64, classes: int = 10) -> DeepLearningTask:
    """A quiet task with a small MLP, inside ``settings``; without curves, which take longer to draw than it trains."""
    task = DeepLearningTask().quiet().learning_curves(False)
    return (
        task.model(BluePrint(seq(fc(hidden), relu(), fc(32), relu(), fc(classes))))
        .loss(CrossEntropyLoss().label_smoothing(0.1))
        .total_epochs(epochs)
        .optimizer(AdamW().weight_decay(1e-4))
        .scheduler(CosineAnnealingLR().base_lr(1e-3).warmup(1))
    )


EVERYTHING_EPOCHS = 4
GROWS = ((0, 20), (2, 28))
"""Progressive resolution of ``everything_task``."""


def everything_task(choices: Path) -> DeepLearningTask:
    """A small residual network with every option that the weights depend on, inside ``settings(progressive=GROWS)``.

    ``choices``: the file for ``tune``.
    """
    network = seq(
        conv(8, 3, p=1), bn(), relu(), maxpool(2),
        add2(identity(), seq(conv(8, 3, p=1), bn())), relu(), dropout(0.2),
        conv(16, 3, 2), bn(), relu(), gap(), fc(10),
    )  # fmt: skip
    return (
        small_task(EVERYTHING_EPOCHS)
        .model(BluePrint(network))
        .optimizer(LARS().nesterov().trust_coefficient(0.02).weight_decay(1e-3))
        .scheduler(CosineAnnealingLR().base_lr(1.0).warmup(1).step_by_batch())
        .use_sema()
        .sema_decay(0.95)
        .grad_clip(0.05)
        .loss_scale(1024.0)
        .freeze_first_layer_after(3)
        .tta(TTA.SHIFT_1PX)
        .tune(choices)
    )


@contextmanager
def start_example(data: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """examples/mlp_mnist.py as a process of its own; killed when the block is left."""
    with _start(str(EXAMPLE), "--data", str(data), *options) as process:
        yield process


@contextmanager
def start_child(
    data: Path, output: Path, epochs: int, checkpoint_steps: int, *options: str
) -> Iterator[subprocess.Popen[str]]:
    """training_child.py as a process of its own; killed when the block is left."""
    child = Path(__file__).with_name("training_child.py")
    with _start(str(child), str(data), str(output), str(epochs), str(checkpoint_steps), *options) as process:
        yield process


@contextmanager
def _start(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    watchdog = threading.Timer(COLD_START, process.kill)  # a test that reads its output must not wait for ever
    watchdog.start()
    try:
        yield process
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()


def children(pid: int) -> list[int]:
    """All living descendants of a process."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it ended while we looked
                continue
            if int(fields[1]) == pid and fields[0] != "Z":
                found += [int(entry.name), *children(int(entry.name))]
    return found


def is_alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, what: str, seconds: float = 5.0) -> None:  # type: ignore[no-untyped-def]
    """Poll ``condition`` with a deadline; fails the test naming ``what``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.01)


def ring_mappings(pid: int | str = "self") -> int:
    """Shared rings mapped by a process."""
    return sum("memfd:" in line for line in (Path("/proc") / str(pid) / "maps").read_text().splitlines())


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def daemon_folders() -> set[str]:
    """Private folders of daemons (their sockets live there)."""
    return {entry for entry in os.listdir(tempfile.gettempdir()) if entry.startswith("renaissance-")}
