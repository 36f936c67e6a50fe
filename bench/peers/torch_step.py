"""PyTorch's training step of the example on data in memory; a round gives milliseconds per step."""

from __future__ import annotations

import argparse
import time

import torch

from bench.peers.mlp import build, training_step
from bench.rounds import serve_rounds

BATCHES, BATCH, STEPS = 64, 200, 100


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--half-inputs", action="store_true", help="keep the images in memory as bf16")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--default-adamw", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(123)
    model, optimizer, loss_function = build(fused=not options.default_adamw)
    step = training_step(model, loss_function, optimizer, options.bf16, options.compile)
    images = torch.randn(BATCHES, BATCH, 784)
    if options.half_inputs:
        images = images.bfloat16()
    labels = torch.randint(0, 10, (BATCHES, BATCH))

    def run_round() -> float:
        start = time.perf_counter()
        for i in range(STEPS):
            step(images[i % BATCHES], labels[i % BATCHES])
        return (time.perf_counter() - start) * 1e3 / STEPS

    run_round()
    serve_rounds(run_round, {"torch": torch.__version__})


if __name__ == "__main__":
    main()
