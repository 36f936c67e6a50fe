"""Models for the device tests, with first weights and batches that follow from a seed; and steps of them anywhere."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from renaissance.backend import GraphExecutor
from renaissance.backend.cuda.device import DeviceContext
from renaissance.backend.cuda.executor import CudaExecutor
from renaissance.backend.initial import initialize
from renaissance.core.dtype import DType, bf16_from_fp32
from renaissance.core.enums import OptimizerKind
from renaissance.graph import BluePrint, CompiledModel, CompileRequest, Variant, compile_model, dropout, fc, relu, seq
from renaissance.zoo import model as zoo_model

CPU_LOSSES = Path(__file__).with_name("cpu_losses.json")
"""What the CPU backend computes in fp32, so that a machine with a GPU needs no oneDNN; made by running this file."""
STEPS, CHECKED = 12, 4
Batch = tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]
BATCH, CLASSES = 32, 10


def blueprint(name: str) -> tuple[BluePrint, tuple[int, int, int]]:
    """A model and the (height, width, channels) of its input."""
    if name == "mlp":
        return BluePrint(seq(fc(256), relu(), dropout(0.1), fc(128), relu(), fc(CLASSES))), (28, 28, 1)
    return zoo_model("resnet18_cifar", num_classes=CLASSES), (32, 32, 3)


def compiled(name: str, half: DType | None, *, host: bool = False, **options: Any) -> CompiledModel:
    layers, (height, width, channels) = blueprint(name)
    kind = OptimizerKind.ADAMW if name == "mlp" else OptimizerKind.SGD_NESTEROV
    facts: dict[str, Any] = {"optimizer": kind, "weight_decay": 1e-4, "ema": True, "label_smoothing": 0.1, **options}
    return compile_model(
        layers,
        CompileRequest(
            height=height,
            width=width,
            channels=channels,
            num_classes=CLASSES,
            train_batch=BATCH,
            val_batch=BATCH,
            half=half,
            external_inputs=host,
            **facts,
        ),
    )


def batches(model: CompiledModel, count: int) -> list[Batch]:
    """Classes that can be told apart: a pattern for each, and noise."""
    draw, request = np.random.default_rng(7), model.request
    shape = (request.height, request.width, request.channels)
    patterns = draw.standard_normal((CLASSES, *shape)).astype(np.float32)
    result = []
    for _ in range(count):
        labels = draw.integers(0, CLASSES, BATCH).astype(np.int32)
        result.append((patterns[labels] + draw.standard_normal((BATCH, *shape)).astype(np.float32), labels))
    return result


def on_device(device: DeviceContext, model: CompiledModel, lr: float = 1e-3) -> CudaExecutor:
    executor = CudaExecutor(model, device=device)
    initialize(executor, model, seed=1)
    executor.write_scalar("lr", lr)
    return executor


def on_host(model: CompiledModel, backend: str, lr: float = 1e-3) -> GraphExecutor:
    executor = GraphExecutor(model, backend=backend, threads=1)
    initialize(executor, model, seed=1)
    executor.write_scalar("lr", lr)
    return executor


def losses(executor: Any, data: list[Batch], *, captured: bool = True) -> list[float]:
    """Train one step on each batch; the losses."""
    result = []
    for index, (images, labels) in enumerate(data):
        slot = executor.own_train_slots[index % 2]
        put(slot.images, images, executor.model.request.half)
        slot.labels.reshape(-1)[:] = labels
        if captured:
            executor.run_train_step(index % 2, valid=BATCH)
        else:
            executor.write_scalar("batch_valid", BATCH)
            executor.run_uncaptured(Variant.TRAIN_BASE, index % 2)
        result.append(float(executor.read_scalar("loss")))
    return result


def validated(executor: Any, data: list[Batch], *, ema: bool = False) -> tuple[float, float]:
    """(mean loss, top-1 rate) over the batches."""
    executor.clear_metrics()
    for index, (images, labels) in enumerate(data):
        slot = executor.own_val_slots[index % 2]
        put(slot.images, images, executor.model.request.half)
        slot.labels.reshape(-1)[:] = labels
        executor.run_val_step(index % 2, valid=BATCH, ema=ema)
    sums = executor.scalars()
    return sums["accum_loss"] / sums["accum_count"], sums["accum_top1"] / sums["accum_count"]


def cpu_losses(name: str) -> dict[str, list[float]]:
    """On the CPU backend in fp32: losses of STEPS steps; then mean loss and top-1 rate of CHECKED batches, with the
    main and the averaged weights."""
    model = compiled(name, None, host=True)
    data = batches(model, STEPS)
    host = on_host(model, "cpu")
    return {
        "train": losses(host, data),
        "val": list(validated(host, data[:CHECKED])),
        "ema": list(validated(host, data[:CHECKED], ema=True)),
    }


def put(target: npt.NDArray[Any], images: npt.NDArray[np.float32], half: DType | None) -> None:
    target[...] = bf16_from_fp32(images) if half is DType.BF16 else images.astype(target.dtype)


def state_digest(executor: Any) -> str:
    """Of everything that a checkpoint holds."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in executor.model.state:
        digest.update(executor.read(tensor).tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    CPU_LOSSES.write_text(json.dumps({name: cpu_losses(name) for name in ("mlp", "resnet18")}, indent=1) + "\n")
