"""Trains a four-layer MLP on MNIST from a dataserver: ``python examples/mlp_mnist.py --epochs 5 --output runs/mnist``.

Without ``--dataserver`` a private daemon is started and stopped with the run. Needs ``data/mnist`` (the published
files, or ``renaissance pack``).
"""

import argparse
import sys
from pathlib import Path

import renaissance.cli.quiet_start  # noqa: F401  # Ctrl-C during the imports below shows no traceback
from renaissance import (
    GLOBAL_SETTING,
    PREPROCESSOR_SETTING,
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
from renaissance.cli.errors import run_command

DATA = Path(__file__).resolve().parent.parent / "data" / "mnist"


def main() -> None:
    options = parse_options()
    # fmt: off
    GLOBAL_SETTING.use_gpu(options.gpu) if options.gpu is not None else GLOBAL_SETTING.use_cpu()
    GLOBAL_SETTING.amp(not options.fp32).manual_seed(options.seed).global_batch_size(200).input_resolution(28)
    PREPROCESSOR_SETTING.dataset("mnist", options.data).preprocess_workers(options.workers) \
        .normalization(NormMode.MNIST) \
        .train_transforms(Pad(2), RandomCrop(28), RandomRotation(20), RandomScale(0.8, 1.2), RandomErasing(0.5)) \
        .commit()

    mlp = BluePrint(seq(fc(1024), relu(), fc(512), relu(), fc(256), relu(), fc(10)))
    task = DeepLearningTask()
    task.model(mlp).loss(CrossEntropyLoss().label_smoothing(0.1)).total_epochs(options.epochs) \
        .optimizer(AdamW().weight_decay(1e-4)) \
        .scheduler(CosineAnnealingLR().base_lr(1e-3).warmup(min(5, options.epochs // 5)).step_by_batch())
    # fmt: on
    configure(task, options)
    task.compile()
    result = task.run()

    print(f"top-1           {result.best_top1:.2%} (epoch {result.best_epoch} of {result.epochs})")
    print(f"samples/s       {result.samples_per_s:,.0f} (waiting for data {result.wait_share:.1%})")
    print(f"time per epoch  {sum(result.epoch_seconds) / result.epochs:.2f} s")
    print(f"data digest     {result.data_digest}")
    print(f"weight digest   {result.weight_digest}")


def configure(task: DeepLearningTask, options: argparse.Namespace) -> None:
    """What the command line may change about where the run gets its data and leaves its results."""
    if options.dataserver is not None:
        task.dataserver(options.dataserver)
    if options.output is not None:
        task.output(options.output)
    if options.threads is not None:
        task.compute_threads(options.threads)
    if options.resume:
        task.resume(True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--output", type=Path, help="folder for result.json, log.jsonl and checkpoints")
    parser.add_argument(
        "--dataserver", metavar="ADDRESS", help="unix:PATH of a running daemon (default: a private one)"
    )
    parser.add_argument("--data", type=Path, help="folder of the MNIST files (default: data/mnist of this repository)")
    parser.add_argument("--workers", type=int, help="preprocessing workers of the private daemon (default: 2)")
    parser.add_argument("--threads", type=int, help="compute threads (default: chosen from the cores)")
    parser.add_argument("--seed", type=int, default=123)
    parser.add_argument("--fp32", action="store_true", help="compute in fp32 instead of bf16 (on a GPU: fp16)")
    parser.add_argument("--gpu", metavar="LIST", help='train on these GPUs, such as "0" or "0-3", instead of the CPU')
    parser.add_argument("--resume", action="store_true", help="go on from the latest checkpoint in --output")
    options = parser.parse_args()
    if options.workers is not None and options.dataserver is not None:
        parser.error("--workers is for a private daemon; the one at --dataserver has its own")
    if options.data is not None and options.dataserver is not None:
        parser.error("--data is for a private daemon; the one at --dataserver has its own")
    options.workers = 2 if options.workers is None else options.workers
    options.data = DATA if options.data is None else options.data
    return options


if __name__ == "__main__":
    sys.exit(run_command(main))
