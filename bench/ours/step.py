"""Our training step of the example on data in memory; a round gives milliseconds per step."""

from __future__ import annotations

import argparse
import time

import numpy as np

import renaissance
from bench.ours.example import BATCH, compiled_mlp
from bench.rounds import serve_rounds
from renaissance.core.dtype import bf16_from_fp32
from renaissance.core.machine import CorePlan, WaitPolicy
from renaissance.data.station import SlotView
from renaissance.task.engine import Engine

BATCHES, STEPS = 64, 100


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--wait", choices=("passive", "active"), default="active")
    options = parser.parse_args()
    numbers = np.random.default_rng(123)
    slots = []
    for _ in range(BATCHES):
        images = numbers.standard_normal((BATCH, 28, 28, 1), np.float32)
        labels = numbers.integers(0, 10, BATCH, np.int32)
        slots.append(SlotView(bf16_from_fp32(images) if options.bf16 else images, labels))
    cores = CorePlan.choose(compute_threads=options.threads, wait_policy=WaitPolicy(options.wait))
    engine = Engine(compiled_mlp(options.bf16), "cpu", cores, slots, [])
    engine.initialize(123)

    def run_round() -> float:
        start = time.perf_counter()
        for i in range(STEPS):
            engine.train_step(i % BATCHES, BATCH, 1e-3, False)
        return (time.perf_counter() - start) * 1e3 / STEPS

    run_round()
    serve_rounds(run_round, {"renaissance": renaissance.__version__, **engine.versions()})


if __name__ == "__main__":
    main()
