"""What a step costs the host, and whether the copy of the next batch runs beside it; prints one JSON line.

``launch_us``: median microseconds of ``run_train_step`` with the GPU idle, for a step that is shorter than its launch.
``copy_ms``, ``step_ms``: both alone. ``together_ms``: a step when the next batch is copied beside it. With overlap that
is the longer of the two, without it their sum.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

from bench.gpu.options import WORK
from bench.gpu.our_step import BATCHES, compiled, started
from renaissance.backend.cuda.device import open_device
from renaissance.backend.cuda.executor import CudaExecutor
from renaissance.backend.programs import Side
from renaissance.graph import Variant

REPEATS = 50


def milliseconds(executor: CudaExecutor, action: Callable[[int], None]) -> float:
    """Of one ``action`` in a row of them, with the device drained at both ends."""
    executor.device.synchronize()
    start = time.perf_counter()
    for i in range(REPEATS):
        action(i)
    executor.device.synchronize()
    return 1e3 * (time.perf_counter() - start) / REPEATS


def launch_microseconds(executor: CudaExecutor, batch: int) -> float:
    times = []
    for i in range(REPEATS):
        executor.device.synchronize()
        start = time.perf_counter()
        executor.run_train_step(i % BATCHES, valid=batch)
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "resnet18"
    work = WORK[name]
    model = compiled(work.model, work.batch, work.size, work.channels, "fp16")
    with open_device(0) as device:
        executor = started(device, model, 0.01)
        program = executor.program(Variant.TRAIN_BASE, 0)
        launch = launch_microseconds(executor, work.batch)
        copy = milliseconds(executor, lambda i: executor.transfers.send(Side.TRAIN, i % BATCHES, 0.01, work.batch))
        step = milliseconds(executor, lambda _: program.launch())
        together = milliseconds(executor, lambda i: executor.run_train_step(i % BATCHES, valid=work.batch))
        result = {
            "name": f"gpu_host_{name}",
            "launch_us": round(launch, 1),
            "copy_ms": round(copy, 4),
            "step_ms": round(step, 4),
            "together_ms": round(together, 4),
            "own_nodes": program.own_nodes,
            "library_calls": program.library_calls,
            "events": program.waits,
            "arena_mib": executor.arena.total_bytes >> 20,
        }
        executor.close()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
