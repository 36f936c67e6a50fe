"""Our training step of a convolutional network on data in memory; a round gives images per second."""

from __future__ import annotations

import sys
import time

import numpy as np

import renaissance
from bench.model_options import step_parser
from bench.ours.models import blueprint, classes
from bench.rounds import serve_rounds
from renaissance.algo import SGD
from renaissance.core.dtype import DType, bf16_from_fp32
from renaissance.core.machine import CorePlan, WaitPolicy
from renaissance.data.station import SlotView
from renaissance.graph import CompileRequest, compile_model
from renaissance.task.engine import Engine


def main() -> None:
    parser = step_parser()
    parser.add_argument("--wait", choices=("passive", "active"), default="active")
    options = parser.parse_args()
    optimizer = SGD().momentum(0.9).weight_decay(5e-4).config()
    request = CompileRequest(
        height=options.size,
        width=options.size,
        channels=options.channels,
        num_classes=classes(options.model),
        train_batch=options.batch,
        val_batch=options.batch,
        half=DType.BF16 if options.bf16 else None,
        optimizer=optimizer.kind,
        weight_decay=optimizer.weight_decay,
        beta=optimizer.beta1,
    )
    numbers = np.random.default_rng(123)
    slots = []
    for _ in range(options.batches):
        shape = (options.batch, options.size, options.size, options.channels)
        images = numbers.standard_normal(shape, np.float32)
        labels = numbers.integers(0, classes(options.model), options.batch, np.int32)
        slots.append(SlotView(bf16_from_fp32(images) if options.bf16 else images, labels))
    start = time.perf_counter()
    compiled = compile_model(blueprint(options.model), request)
    planned = time.perf_counter()
    cores = CorePlan.choose(compute_threads=options.threads, wait_policy=WaitPolicy(options.wait))
    engine = Engine(compiled, "cpu", cores, slots, [])
    captured = time.perf_counter()
    engine.initialize(123)
    print(
        f"{options.model}: compiled in {planned - start:.2f} s, captured in {captured - planned:.2f} s, arena "
        f"{compiled.arena_bytes >> 20} MiB, all working memory {engine.executor.arena.total_bytes >> 20} MiB",
        file=sys.stderr,
    )

    def run_round() -> float:
        start = time.perf_counter()
        for i in range(options.steps):
            engine.train_step(i % options.batches, options.batch, 0.1, False)
        return options.steps * options.batch / (time.perf_counter() - start)

    run_round()
    serve_rounds(run_round, {"renaissance": renaissance.__version__, **engine.versions()})


if __name__ == "__main__":
    main()
