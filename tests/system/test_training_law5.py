"""Law 5 on a convolutional network: a step with NaN or Inf anywhere leaves no trace but a smaller loss scale.

Everything that persists is switched on (momentum, batch norm, dropout, moving averages, loss scaling), a value is
planted in one place at a time, and training goes on afterwards as if the step had never been.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from renaissance.core.dtype import DType, bf16_from_fp32
from renaissance.core.enums import OptimizerKind
from renaissance.core.machine import CorePlan
from renaissance.data.station import SlotView
from renaissance.graph import (
    BluePrint,
    CompileRequest,
    add2,
    bn,
    compile_model,
    conv,
    dropout,
    fc,
    gap,
    identity,
    relu,
    seq,
)
from renaissance.task.engine import Engine

BATCH, SIDE, CLASSES = 16, 10, 5
SCALE, BIG = 1024.0, 3e38
BF16_INF = 0x7F80

LAYERS = seq(
    conv(8, 3, p=1), bn(), relu(),
    add2(identity(), seq(conv(8, 3, p=1), bn())), relu(), dropout(0.25),
    conv(16, 3, 2), bn(), relu(), gap(), fc(CLASSES),
)  # fmt: skip


def make(optimizer: OptimizerKind) -> tuple[Engine, list[SlotView]]:
    request = CompileRequest(
        height=SIDE,
        width=SIDE,
        channels=1,
        num_classes=CLASSES,
        train_batch=BATCH,
        val_batch=BATCH,
        half=DType.BF16,
        optimizer=optimizer,
        label_smoothing=0.0,
        weight_decay=1e-2,
        loss_scale=SCALE,
        ema=True,
        grad_clip=1.0,
    )
    rng = np.random.default_rng(5)
    slots = []
    for _ in range(2):
        images = bf16_from_fp32(rng.standard_normal((BATCH, SIDE, SIDE, 1)).astype(np.float32))
        slots.append(SlotView(images, rng.integers(0, CLASSES, BATCH).astype(np.int32)))
    engine = Engine(compile_model(BluePrint(LAYERS), request), "cpu", CorePlan.choose(workers=1), slots, ())
    engine.initialize(seed=9)
    return engine, slots


def persistent(engine: Engine) -> dict[str, bytes]:
    """All state but the loss scale and what counts towards its growth."""
    compiled = engine.compiled
    tensors = [compiled.tensor(i) for i in compiled.state]
    return {t.name: engine.read(t.id).tobytes() for t in tensors if t.name not in ("scaling", "good_steps")}


Plant = Callable[[Engine, SlotView], Callable[[], object]]
"""Plants a value; returns what takes it away again."""


def in_the_input(engine: Engine, slot: SlotView) -> Callable[[], object]:
    kept = slot.images[3, 4, 5, 0]
    slot.images[3, 4, 5, 0] = BF16_INF
    return lambda: slot.images.__setitem__((3, 4, 5, 0), kept)


def in_an_activation(engine: Engine, slot: SlotView) -> Callable[[], object]:
    """By the half copy of a weight in the middle: what it multiplies is finite, and so is everything that persists."""
    half = parameter(engine, "conv3.weight").half
    assert half is not None
    engine.read(half)[2, 1, 1, 3] = BF16_INF
    return engine.weights_written


def in_a_gradient(engine: Engine, slot: SlotView) -> Callable[[], object]:
    """By a loss scale that gradients do not bear behind a large weight; the loss, which is not scaled, stays finite."""
    half = parameter(engine, "fc1.weight").half
    assert half is not None
    engine.read(half)[...] = bf16_from_fp32(np.linspace(-1e25, 1e25, CLASSES * 16, dtype=np.float32)).reshape(
        5, 1, 1, 16
    )
    engine.executor.write_scalar("scaling", 2.0**60)

    def undo() -> None:
        assert np.isfinite(engine.executor.read_scalar("loss"))
        engine.executor.write_scalar("scaling", SCALE / 2)
        engine.weights_written()

    return undo


def in_the_loss_alone(engine: Engine, slot: SlotView) -> Callable[[], object]:
    """By logits so far apart that a label's probability is 0 and its logarithm -inf; every gradient is finite."""
    bias = engine.read(parameter(engine, "fc1.bias").weight).reshape(-1)
    kept, labels = bias.copy(), slot.labels.copy()
    bias[:] = [BIG, -BIG, 0, 0, 0]
    slot.labels[:] = 1

    def undo() -> None:
        assert engine.executor.read_scalar("loss") == np.inf
        gradients = [engine.read(p.grad) for p in engine.compiled.parameters]
        assert all(np.isfinite(g).all() for g in gradients)
        bias[:] = kept
        slot.labels[:] = labels

    return undo


def parameter(engine: Engine, name: str) -> Any:
    return next(p for p in engine.compiled.parameters if p.name == name)


@pytest.mark.parametrize("optimizer", [OptimizerKind.ADAMW, OptimizerKind.LARS_NESTEROV])
def test_a_step_with_an_inf_leaves_no_trace_but_half_the_loss_scale(optimizer: OptimizerKind) -> None:
    engine, slots = make(optimizer)
    straight, _ = make(optimizer)
    before = persistent(straight)
    train(engine, 3)
    train(straight, 3)
    moved = persistent(straight)
    still = {name for name, value in moved.items() if value == before[name]}
    assert still == {"accum_top1", "accum_top5"}, "all that is guarded here is at work"
    for plant in (in_the_input, in_an_activation, in_a_gradient, in_the_loss_alone):
        undo = plant(engine, slots[1])
        kept, scale = persistent(engine), engine.executor.read_scalar("scaling")
        train(engine, 1, slot=1)
        after = persistent(engine)
        assert engine.executor.read_scalar("has_nan") == 1, plant.__name__
        assert [name for name in kept if kept[name] != after[name]] == [], plant.__name__
        assert engine.executor.read_scalar("scaling") == scale / 2, plant.__name__
        undo()
        straight.executor.write_scalar("scaling", engine.executor.read_scalar("scaling"))
        train(engine, 2)
        train(straight, 2)
        assert engine.executor.read_scalar("has_nan") == 0, plant.__name__
        assert persistent(engine) == persistent(straight), plant.__name__
    sums = engine.metrics()
    assert sums.count == (3 + 4 * 2) * BATCH, "skipped steps are not counted"
    assert np.isfinite(sums.loss)


def train(engine: Engine, steps: int, slot: int = 0) -> None:
    for step in range(steps):
        engine.train_step((slot + step) % 2, BATCH, 0.01, last=False)
