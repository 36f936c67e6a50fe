"""The whole MNIST job with our daemon and trainer; a round is the median epoch of a short run, in seconds.

An epoch holds what it holds for the peers: training on every sample, then validation. The first epoch of a run is left
out, as the peers' first epoch is.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import renaissance
from bench.rounds import serve_rounds
from renaissance import (
    GLOBAL_SETTING,
    PREPROCESSOR_SETTING,
    AdamW,
    BluePrint,
    CosineAnnealingLR,
    CrossEntropyLoss,
    DeepLearningTask,
    NormMode,
    fc,
    relu,
    seq,
)

EPOCHS = 6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--fp32", action="store_true")
    parser.add_argument("--gpu", action="store_true", help="train on GPU 0")
    parser.add_argument("--folder", type=Path, default=Path("data/mnist"))
    options = parser.parse_args()

    def run_round() -> float:
        seconds = train(options)
        return statistics.median(seconds[1:])

    serve_rounds(run_round, {"renaissance": renaissance.__version__})


def train(options: argparse.Namespace) -> list[float]:
    """Seconds of each epoch of one short run of the example."""
    from bench.ours.example import BATCH, train_recipe

    with GLOBAL_SETTING.scoped(), PREPROCESSOR_SETTING.scoped():
        device = GLOBAL_SETTING.use_gpu("0") if options.gpu else GLOBAL_SETTING.use_cpu()
        device.amp(not options.fp32).manual_seed(123).global_batch_size(BATCH).input_resolution(28)
        PREPROCESSOR_SETTING.dataset("mnist", options.folder).preprocess_workers(options.workers).normalization(
            NormMode.MNIST
        ).train_transforms(*train_recipe().transforms).commit()
        mlp = BluePrint(seq(fc(1024), relu(), fc(512), relu(), fc(256), relu(), fc(10)))
        task = DeepLearningTask().model(mlp).loss(CrossEntropyLoss().label_smoothing(0.1)).total_epochs(EPOCHS)
        task.optimizer(AdamW().weight_decay(1e-4)).scheduler(CosineAnnealingLR().base_lr(1e-3).warmup(1)).quiet()
        if options.threads:
            task.compute_threads(options.threads)
        task.compile()
        return list(task.run().epoch_seconds)


if __name__ == "__main__":
    main()
