"""Our training step on a GPU, batches in page-locked host memory that are copied for every step; images per second.

A round launches all its steps and then waits for the last one. Beside the rate it says, on stderr, what the host spends
to launch a step.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

import renaissance
from bench.gpu.options import gpu_step_parser
from bench.ours.models import blueprint, classes
from bench.rounds import serve_rounds
from renaissance.backend.cuda.device import DeviceContext, open_device
from renaissance.backend.cuda.executor import CudaExecutor
from renaissance.backend.cuda.host_memory import HostMemory
from renaissance.backend.cuda.pinned import PinnedBlock
from renaissance.backend.cuda.tuning import PlanChoices
from renaissance.backend.initial import initialize
from renaissance.core.dtype import DType, bf16_from_fp32
from renaissance.core.enums import OptimizerKind
from renaissance.graph import BluePrint, CompiledModel, CompileRequest, compile_model, fc, relu, seq

BATCHES = 4
HALVES = {"fp32": None, "fp16": DType.FP16, "bf16": DType.BF16}


def compiled(model: str, batch: int, size: int, channels: int, dtype: str) -> CompiledModel:
    """The network with the optimizer that the peers use: SGD with momentum, AdamW for the MLP."""
    mlp = model == "mlp"
    request = CompileRequest(
        height=size,
        width=size,
        channels=channels,
        num_classes=10 if mlp else classes(model),
        train_batch=batch,
        val_batch=batch,
        half=HALVES[dtype],
        optimizer=OptimizerKind.ADAMW if mlp else OptimizerKind.SGD_MOMENTUM,
        weight_decay=1e-4 if mlp else 5e-4,
        external_inputs=False,
    )
    layers = seq(fc(1024), relu(), fc(512), relu(), fc(256), relu(), fc(10))
    return compile_model(BluePrint(layers) if mlp else blueprint(model), request)


def started(device: DeviceContext, model: CompiledModel, lr: float) -> CudaExecutor:
    """An executor with first weights and random batches in ``BATCHES`` page-locked slots."""
    numbers, memory, slots, request = np.random.default_rng(123), HostMemory(device.runtime), [], model.request
    for _ in range(BATCHES):
        shape = (request.train_batch, request.height, request.width, request.channels)
        images = numbers.standard_normal(shape, np.float32)
        values = bf16_from_fp32(images) if request.half is DType.BF16 else images.astype(_numpy(request.half))
        labels = numbers.integers(0, request.num_classes, request.train_batch, np.int32)
        slots.append((_locked(device, memory, values), _locked(device, memory, labels)))
    executor = CudaExecutor(model, device=device, memory=memory, train_slots=slots, val_slots=[])
    initialize(executor, model, seed=1)
    executor.write_scalar("lr", lr)
    return executor


def _numpy(half: DType | None) -> np.dtype[np.generic]:
    return (half or DType.FP32).numpy


def _locked(device: DeviceContext, memory: HostMemory, values: np.ndarray) -> np.ndarray:
    block = PinnedBlock(device.runtime, values.nbytes)
    memory.adopt(block.buffer.ptr, values.nbytes)
    out = block.view(0, values.size, values.dtype)
    out[:] = values.reshape(-1)
    return out


def main() -> None:
    parser = gpu_step_parser()
    parser.add_argument(
        "--tune", type=Path, metavar="FILE", help="measure plans that FILE does not hold, and keep them"
    )
    options = parser.parse_args()
    choices = PlanChoices(options.tune) if options.tune else None
    start = time.perf_counter()
    model = compiled(options.model, options.batch, options.size, options.channels, options.dtype)
    device = open_device(0, choices=choices)
    executor = started(device, model, 1e-3 if options.model == "mlp" else 0.01)
    tuned = f"; {choices.text()}" if choices else ""
    print(f"{options.model} {options.dtype}: ready in {time.perf_counter() - start:.1f} s{tuned}", file=sys.stderr)

    def run_round() -> float:
        start = time.perf_counter()
        for i in range(options.steps):
            executor.run_train_step(i % BATCHES, valid=options.batch)
        executor.device.synchronize()
        return float(options.steps * options.batch / (time.perf_counter() - start))

    run_round()
    serve_rounds(run_round, {"renaissance": renaissance.__version__, **executor.versions()})
    executor.close()
    device.close()


if __name__ == "__main__":
    main()
