"""A compiled model's gradient is the derivative, and a replay is the eager step, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from renaissance import BluePrint, fc, relu, seq
from renaissance.algo.loss import reference_cross_entropy
from renaissance.core.dtype import DType, bf16_from_fp32, fp32_from_bf16
from renaissance.core.enums import OptimizerKind
from renaissance.core.machine import CorePlan
from renaissance.data.station import SlotView
from renaissance.graph import (
    CompileRequest,
    Variant,
    add2,
    avgpool,
    bn,
    compile_model,
    conv,
    conv_dw,
    dropout,
    gap_fc,
    group_conv,
    identity,
    maxpool,
    silu,
)
from renaissance.task.engine import Engine

F64 = npt.NDArray[np.float64]
BATCH, SMOOTHING = 200, 0.1
WIDTHS = (1024, 512, 256, 10)


def make(half: DType | None, cores: CorePlan | None = None) -> tuple[Engine, F64, npt.NDArray[np.int32]]:
    """The example's MLP on one random batch in both slots: (engine, samples as float64 [B,784], labels)."""
    layers = [layer for width in WIDTHS for layer in (fc(width), relu())][:-1]
    request = CompileRequest(
        height=28,
        width=28,
        channels=1,
        num_classes=10,
        train_batch=BATCH,
        val_batch=BATCH,
        half=half,
        optimizer=OptimizerKind.ADAMW,
        label_smoothing=SMOOTHING,
        weight_decay=1e-4,
        beta=0.9,
    )
    rng = np.random.default_rng(5)
    samples = rng.standard_normal((BATCH, 28, 28, 1)).astype(np.float32)
    labels = rng.integers(0, 10, BATCH).astype(np.int32)
    images = samples if half is None else bf16_from_fp32(samples)
    exact = samples if half is None else fp32_from_bf16(images)
    slots = [SlotView(images.copy(), labels.copy()) for _ in range(2)]
    engine = Engine(
        compile_model(BluePrint(seq(*layers)), request), "cpu", cores or CorePlan.choose(workers=1), slots, slots
    )
    engine.initialize(seed=9)
    return engine, exact.reshape(BATCH, -1).astype(np.float64), labels


def parameters(engine: Engine, kind: str) -> list[npt.NDArray[np.float32]]:
    """Weights and biases (or what belongs to them) in model order, as [out, in] and [out]."""
    found = []
    for parameter in engine.compiled.parameters:
        array = np.array(engine.read(getattr(parameter, kind)))
        found.append(array.reshape(array.shape[0], -1) if parameter.decay else array.reshape(-1))
    return found


def reference_gradient(
    x: F64, labels: npt.NDArray[np.int32], values: list[npt.NDArray[np.float32]], half: DType | None
) -> list[F64]:
    """float64 gradient of every weight and bias, in the order of ``values``.

    bf16: at the weights that the steps compute with (rounded), and with the ReLUs active that are active in the bf16
    forward pass. A unit whose sum is within rounding of 0 may fall on either side, where the derivative is another one
    but no less right; counting such units as errors would test the data, not the kernels.
    """
    rounded = as_bf16 if half is not None else np.asarray
    weights = [rounded(v).astype(np.float64) for v in values if v.ndim == 2]
    biases = [v.astype(np.float64) for v in values if v.ndim == 1]
    layers = list(zip(weights, biases, strict=True))
    active, h = [], x
    for w, b in layers[:-1]:
        active.append(h @ w.T + b > 0)
        h = rounded(np.maximum(h @ w.T + b, 0.0)).astype(np.float64)
    inputs = [x]
    for (w, b), mask in zip(layers, [*active, 1.0], strict=True):
        inputs.append((inputs[-1] @ w.T + b) * mask)
    _, grad = reference_cross_entropy(inputs.pop(), labels, SMOOTHING)
    gradients: dict[int, list[F64]] = {2: [], 1: []}
    for i in reversed(range(len(layers))):
        gradients[2].insert(0, grad.T @ inputs[i])
        gradients[1].insert(0, grad.sum(axis=0))
        if i:
            grad = (grad @ weights[i]) * active[i - 1]
    return [gradients[v.ndim].pop(0) for v in values]


def as_bf16(values: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
    return fp32_from_bf16(bf16_from_fp32(np.asarray(values, dtype=np.float32)))


def relative_errors(got: list[npt.NDArray[np.float32]], want: list[F64]) -> list[float]:
    return [float(np.linalg.norm(g - w) / np.linalg.norm(w)) for g, w in zip(got, want, strict=True)]


@pytest.mark.parametrize(("half", "limit"), [(None, 1e-5), (DType.BF16, 2e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("slot", [0, 1])
def test_gradient_of_the_compiled_mlp_equals_float64(half: DType | None, limit: float, slot: int) -> None:
    engine, x, labels = make(half)
    expected = reference_gradient(x, labels, parameters(engine, "weight"), half)
    engine.train_step(slot, BATCH, 0.0, last=False)
    errors = relative_errors(parameters(engine, "grad"), expected)
    assert max(errors) < limit, errors


def state(engine: Engine) -> Mapping[str, bytes]:
    compiled = engine.compiled
    return {compiled.tensor(i).name: engine.read(i).tobytes() for i in compiled.state}


@pytest.mark.parametrize("half", [None, DType.BF16], ids=["fp32", "bf16"])
def test_ten_replays_equal_ten_eager_steps_bitwise(half: DType | None) -> None:
    replayed, _, _ = make(half)
    eager, _, _ = make(half)
    for step in range(10):
        replayed.train_step(step % 2, BATCH, 1e-3, last=False)
        eager.executor.write_scalar("batch_valid", BATCH)
        eager.executor.write_scalar("lr", 1e-3)
        eager.executor.run_uncaptured(Variant.TRAIN_BASE, step % 2)
    assert state(replayed) == state(eager)


IMAGE, IMAGES, VALID = 12, 8, 7
"""The residual network's batch: pixels, rows, and rows that count."""


def residual_network(smooth: bool) -> BluePrint:
    """Every kind of convolution, both kinds of shortcut, a pool, dropout; 32 channels, as fast algorithms want them.

    ``smooth``: without ReLU and max, whose derivatives jump where a value is within rounding of 0 or of another one.
    """
    act, pool = (silu(), avgpool(3, 2, 1)) if smooth else (relu(), maxpool(3, 2, 1))
    same = seq(conv(32, 3, 1, 1), bn(), act, conv(32, 3, 1, 1), bn())
    halving = seq(conv(64, 3, 2, 1), bn(), act, conv(64, 3, 1, 1), bn())
    return BluePrint(
        seq(
            seq(conv(32, 3, 1, 1, bias=True), bn(), act, add2(identity(), same), act, pool),
            seq(add2(seq(conv(64, 1, 2), bn()), halving), act),
            seq(conv_dw(3, 1, 1), bn(), act, group_conv(64, 4, 3, 1, 1), bn(), act),
            seq(dropout(0.2), gap_fc(10)),
        )
    )


def residual_engine(half: DType | None, backend: str, smooth: bool = False) -> Engine:
    request = CompileRequest(
        height=IMAGE,
        width=IMAGE,
        channels=3,
        num_classes=10,
        train_batch=IMAGES,
        val_batch=IMAGES,
        half=half,
        label_smoothing=SMOOTHING,
    )
    rng = np.random.default_rng(6)
    samples = rng.standard_normal((IMAGES, IMAGE, IMAGE, 3)).astype(np.float32)
    labels = rng.integers(0, 10, IMAGES).astype(np.int32)
    samples[VALID:], labels[VALID:] = 0, -1
    images = samples if half is None else bf16_from_fp32(samples)
    slots = [SlotView(images.copy(), labels.copy()) for _ in range(2)]
    cores = CorePlan.choose(workers=1)
    engine = Engine(compile_model(residual_network(smooth), request), backend, cores, slots, slots)
    engine.initialize(seed=3)
    return engine


@pytest.mark.parametrize(
    ("half", "smooth", "limit"),
    [(None, False, 1e-4), (None, True, 1e-4), (DType.BF16, True, 5e-2)],
    ids=["fp32", "fp32-smooth", "bf16-smooth"],
)
def test_gradient_of_a_residual_network_is_the_references(half: DType | None, smooth: bool, limit: float) -> None:
    found = []
    for backend in ("cpu", "reference"):
        engine = residual_engine(half, backend, smooth)
        engine.train_step(0, VALID, 0.0, last=False)
        compiled = engine.compiled
        ids = {p.name: p.grad for p in compiled.parameters if p.name != "conv1.bias"}  # a bias before BN: 0
        ids |= {f"{n.name}.mean": n.prev_mean for n in compiled.batch_norms}
        ids |= {f"{n.name}.var": n.prev_var for n in compiled.batch_norms} | {"loss": compiled.scalar("loss")}
        found.append({name: np.array(engine.read(i), np.float64) for name, i in ids.items()})
        engine.close()
    got, want = found
    errors = {name: float(np.linalg.norm(got[name] - want[name]) / np.linalg.norm(want[name])) for name in want}
    assert max(errors.values()) < limit, errors


@pytest.mark.parametrize("half", [None, DType.BF16], ids=["fp32", "bf16"])
def test_replays_of_a_residual_network_equal_eager_steps_bitwise(half: DType | None) -> None:
    replayed, eager = residual_engine(half, "cpu"), residual_engine(half, "cpu")
    for step in range(4):
        replayed.train_step(step % 2, VALID, 1e-2, last=False)
        eager.executor.write_scalar("batch_valid", VALID)
        eager.executor.write_scalar("lr", 1e-2)
        eager.executor.run_uncaptured(Variant.TRAIN_BASE, step % 2)
    assert state(replayed) == state(eager)


def test_compute_threads_stay_on_their_cpus_until_the_engine_is_closed() -> None:
    before = os.sched_getaffinity(0)
    chosen = min(before)
    cores = replace(CorePlan.choose(workers=1, compute_threads=1), compute_cpus=(chosen,))
    engine, _, _ = make(None, cores=cores)
    assert os.sched_getaffinity(0) == {chosen}
    engine.close()
    engine.close()
    assert os.sched_getaffinity(0) == before
