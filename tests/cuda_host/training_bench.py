"""Whole training steps on the stand-in for CUDA: three small models, their executors, and what they hold afterwards."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from cuda_standin import FakeCuda, device
from cuda_standin.nccl import StandInCollectives, World

from renaissance.backend.cuda.executor import CudaExecutor
from renaissance.backend.cuda.host_memory import HostMemory
from renaissance.backend.executor import GraphExecutor
from renaissance.backend.slots import InputArrays
from renaissance.core.dtype import DType, bf16_from_fp32
from renaissance.core.enums import TTA, OptimizerKind
from renaissance.graph import (
    BlockStyle,
    BluePrint,
    CompiledModel,
    CompileRequest,
    Variant,
    add2,
    avgpool,
    block,
    bn,
    cbr,
    channel_padding,
    compile_model,
    conv,
    conv_dw,
    dropout,
    fc,
    flatten,
    gap,
    group_conv,
    identity,
    maxpool,
    relu,
    relu6,
    seq,
    silu,
)
from renaissance.tensor import fill_parameter

SEED = 3
HALVES = {"fp32": None, "fp16": DType.FP16, "bf16": DType.BF16}
MLP = BluePrint(seq(fc(24), relu(), dropout(0.3), fc(16), silu(), fc(5)))
CBR = BluePrint(
    seq(
        cbr(6, 3, 1, 1),
        maxpool(2),
        bn(),
        channel_padding(),
        conv_dw(3, 1, 1),
        bn(),
        relu6(),
        add2(identity(), group_conv(8, 4, 3, 1, 1, bias=True)),
        relu(),
        avgpool(2),
        add2(identity(), conv(8, 1)),
        flatten(),
        bn(),
        fc(5),
    )
)
RESIDUAL = BluePrint(
    seq(
        cbr(8, 3, 1, 1),
        block(8, BlockStyle.RESNET_3_3),
        block(16, BlockStyle.RESNET_3_3_DS),
        gap(),
        fc(5),
    )
)
BASE: dict[str, Any] = {
    "height": 8, "width": 8, "channels": 3, "num_classes": 5, "train_batch": 6, "train_last": 4, "val_batch": 6,
    "weight_decay": 1e-2,
}  # fmt: skip
SGD, MOMENTUM, NESTEROV = OptimizerKind.SGD, OptimizerKind.SGD_MOMENTUM, OptimizerKind.SGD_NESTEROV
MODELS: dict[str, tuple[BluePrint, dict[str, Any]]] = {
    "mlp": (MLP, {"height": 4, "width": 4, "grad_clip": 1.0}),
    "cbr": (CBR, {"freeze_first_layer": True, "tta": TTA.LR}),
    "residual": (RESIDUAL, {"ema": True, "label_smoothing": 0.1, "val_last": 4}),
}
OPTIMIZERS = {
    "mlp": {"fp32": OptimizerKind.ADAMW, "fp16": OptimizerKind.ADAMW, "bf16": OptimizerKind.ADAM},
    "cbr": {"fp32": SGD, "fp16": NESTEROV, "bf16": MOMENTUM},
    "residual": {"fp32": OptimizerKind.LARS, "fp16": OptimizerKind.LARS, "bf16": OptimizerKind.LARS_NESTEROV},
}


@cache
def compiled(name: str, half: str = "fp32", cuda: bool = True, **changes: Any) -> CompiledModel:
    """One of the models; ``cuda``: its inputs lie on the device."""
    blueprint, own = MODELS[name]
    request = {
        **BASE,
        **own,
        "half": HALVES[half],
        "optimizer": OPTIMIZERS[name][half],
        "external_inputs": not cuda,
        **changes,
    }
    return compile_model(blueprint, CompileRequest(**request))


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a run. ``option``: frozen in training, EMA in validation; ``missing``: rows that are not valid."""

    slot: int
    variant: Variant = Variant.TRAIN_BASE
    option: bool = False
    missing: int = 0


STEPS: dict[str, tuple[Step, ...]] = {
    "mlp": (Step(0), Step(1, missing=2), Step(0, Variant.TRAIN_LAST), Step(1), Step(0, Variant.VAL_BASE), Step(1)),
    "cbr": (Step(0), Step(1, option=True), Step(0, Variant.TRAIN_LAST, missing=1), Step(0, Variant.VAL_BASE), Step(1)),
    "residual": (
        *(Step(0), Step(1), Step(0, Variant.TRAIN_LAST), Step(0, Variant.VAL_BASE)),
        *(Step(1, Variant.VAL_LAST, option=True, missing=1), Step(1)),
    ),
}


class Ring:
    """Batches in a mapping of whole pages, as the dataserver's: what ``train_slots`` takes."""

    def __init__(self, model: CompiledModel, depth: int = 4) -> None:
        data, label = (model.tensor(i) for i in (model.inputs[0].data, model.inputs[0].label))
        slot = -(-(data.nbytes + label.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, slot * depth)
        whole = np.frombuffer(self._map, np.uint8)
        self.memory = int(whole.ctypes.data), whole.nbytes
        self.slots: list[InputArrays] = []
        for start in range(0, slot * depth, slot):
            images = whole[start : start + data.nbytes].view(data.dtype.numpy).reshape(data.shape.dims)
            labels = whole[start + data.nbytes : start + data.nbytes + label.nbytes].view(np.int32)
            self.slots.append(InputArrays(images, labels))

    @property
    def pairs(self) -> list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        return [(s.images, s.labels) for s in self.slots]


class Run:
    """An executor on a FakeCuda of its own, with parameters, averages and inputs that follow from ``SEED``."""

    def __init__(
        self,
        model: CompiledModel,
        fake: FakeCuda | int = 0,
        *,
        world: World | None = None,
        rank: int = 0,
        depth: int = 0,
        poison: bool = False,
    ) -> None:
        """``fake`` or its seed; ``depth``: training slots in a ring beside the executor's own memory."""
        self.fake = FakeCuda(fake) if isinstance(fake, int) else fake
        collectives = StandInCollectives(self.fake, world, rank) if world else None
        self.device = device(self.fake, collectives=collectives)
        self.ring = Ring(model, depth) if depth else None
        memory = HostMemory(self.fake)
        if self.ring:
            memory.cover(*self.ring.memory)
        slots = self.ring.pairs if self.ring else None
        self.executor = CudaExecutor(model, device=self.device, memory=memory, train_slots=slots, poison=poison)
        self.model = model
        own = [*self.executor.own_train_slots, *self.executor.own_train_end_slots]
        start(self.executor, self.ring.slots if self.ring else own)

    def step(self, step: Step, captured: bool = True) -> None:
        """Launch one step, captured or call by call."""
        rows = self.model.request.batch(step.variant) - step.missing
        if captured:
            run_step(self.executor, step)
        else:
            self.executor.write_scalar("lr", LR)
            self.executor.write_scalar("batch_valid", rows)
            self.executor.run_uncaptured(step.variant, step.slot, option=step.option)

    def bits(self) -> dict[str, bytes]:
        """Everything that lasts, after every step so far."""
        self.device.synchronize()
        tensors = [self.model.tensor(i) for i in sorted({*self.model.state, *self.model.scalars.values()})]
        base = self.executor.arena.base
        return {t.name: ctypes.string_at(base + t.offset, t.nbytes) for t in tensors}

    def close(self) -> None:
        """Give everything back. Raises if memory was written beside its allocations."""
        self.executor.close()
        self.device.close()
        self.fake.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:
            self.close()


def run_step(executor: CudaExecutor | GraphExecutor, step: Step) -> None:
    """One step as a task runs it."""
    rows = executor.model.request.batch(step.variant) - step.missing
    if step.variant.is_training:
        executor.run_train_step(step.slot, step.variant, lr=LR, valid=rows, frozen=step.option)
    else:
        executor.run_val_step(step.slot, step.variant, valid=rows, ema=step.option)


LR = 0.05


def start(executor: CudaExecutor | GraphExecutor, train_slots: Sequence[InputArrays], seed: int = SEED) -> None:
    """Parameters of both signs, their averages, running variances of one, and random batches in all slots."""
    model = executor.model
    rng = np.random.default_rng(seed)
    for p in model.parameters:
        values = fill_parameter(p.init, p.shape, seed, p.ordinal)
        if not p.decay:
            values = values + rng.normal(0, 0.2, values.shape).astype(np.float32)
        for tensor in (p.weight, p.ema):
            if tensor is not None:
                executor.write(tensor, values)
    for norm in model.batch_norms:
        executor.write(norm.prev_var, np.float32(1.0))
    for name, value in model.scalar_init.items():
        executor.write_scalar(name, value)
    executor.write_scalar("seed_low", seed)
    executor.cast_weights()
    for slot in (*train_slots, *executor.own_val_slots):
        fill(slot, model, rng)


def fill(slot: InputArrays, model: CompiledModel, rng: np.random.Generator) -> None:
    values = rng.standard_normal(slot.images.shape).astype(np.float32)
    slot.images[...] = bf16_from_fp32(values) if model.request.half is DType.BF16 else values
    slot.labels[:] = rng.integers(0, model.request.num_classes, slot.labels.shape)
