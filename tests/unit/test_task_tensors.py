"""TaskBase: tensors in and out of a compiled task, on the reference backend and without a daemon."""

from __future__ import annotations

import numpy as np

from renaissance import BluePrint, Tensor, fc, relu, seq
from renaissance.core.dtype import DType, bf16_from_fp32
from renaissance.core.machine import CorePlan
from renaissance.data.station import SlotView
from renaissance.graph import CompiledModel, CompileRequest
from renaissance.task.base import TaskBase
from renaissance.task.engine import Engine

BATCH, CLASSES = 4, 3


class BareTask(TaskBase):
    """A task on slots of zeros."""

    def close(self) -> None:
        pass

    def _prepare(self) -> tuple[BluePrint, CompileRequest]:
        request = CompileRequest(
            height=2, width=2, channels=1, num_classes=CLASSES, train_batch=BATCH, val_batch=BATCH, half=DType.BF16
        )
        return BluePrint(seq(fc(5), relu(), fc(CLASSES))), request

    def _capture(self, compiled: CompiledModel) -> Engine:
        slots = [SlotView(np.zeros((BATCH, 2, 2, 1), np.uint16), np.zeros(BATCH, np.int32)) for _ in range(2)]
        return Engine(compiled, "reference", CorePlan.choose(), slots, slots)

    def _ready(self) -> None:
        pass

    def _seed(self) -> int:
        return 1

    def _show(self, text: str) -> None:
        pass


def test_half_copies_follow_a_transferred_weight() -> None:
    task = BareTask().compile()
    weight = Tensor.randn(task.fetch("fc1.weight").shape, seed=7)
    task.transfer(weight, "fc1.weight")
    half = task.fetch("fc1.weight.half")
    assert np.array_equal(half.numpy(), bf16_from_fp32(weight.numpy()))


def test_a_half_copy_can_be_written_alone() -> None:
    task = BareTask().compile()
    half = Tensor.full(task.fetch("fc1.weight.half").shape, 2.0, DType.BF16)
    task.transfer(half, "fc1.weight.half")
    task.transfer(Tensor.zeros(task.fetch("lr").shape), "lr")
    assert np.array_equal(task.fetch("fc1.weight.half").numpy(), half.numpy())
