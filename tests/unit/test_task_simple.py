"""SimpleTask: a hand-built training step on both backends, and what is refused by name."""

from __future__ import annotations

import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from renaissance import Initializer, Shape, Tensor
from renaissance.core.dtype import DType
from renaissance.core.enums import InitKind, OptimizerKind, Phase
from renaissance.core.errors import (
    GraphError,
    MemoryPlanError,
    MissingKernelError,
    PhaseError,
    ShapeError,
    ValueRejected,
)
from renaissance.core.region import Region, Span
from renaissance.task.simple import SimpleTask, op
from renaissance.tensor import InitConfig

ROWS, INPUTS, OUTPUTS = 6, 5, 4
LR, DECAY, BETA = 0.1, 0.01, 0.9


@dataclass
class Step:
    """relu(x w + b), its gradients from dy, and an update with momentum, as one graph beside two small ones."""

    task: SimpleTask
    x: int
    w: int
    b: int
    y: int
    dy: int
    m: int
    lr: int
    nan: int
    other: int
    copy: int


def task_on(backend: str, **options: Any) -> SimpleTask:
    """On a backend of the CPU, or GPU 0 for "cuda" (tests/cuda_host)."""
    return SimpleTask(gpu=0, **options) if backend == "cuda" else SimpleTask(backend=backend, **options)


def build(backend: str) -> Step:
    task = task_on(backend, optimizer=OptimizerKind.SGD_MOMENTUM)

    def fp32(region: Region, *sizes: int, init: InitConfig | None = None) -> int:
        return task.alloc(Shape.of(*sizes), DType.FP32, region, name=region.name.lower(), init=init)

    x = fp32(Region.I_A_DATA, ROWS, 1, 1, INPUTS)
    w, b = fp32(Region.W_FC_WEIGHT, OUTPUTS, 1, 1, INPUTS), fp32(Region.W_FC_BIAS, OUTPUTS)
    dw, db = fp32(Region.G_FC_WEIGHT, OUTPUTS, 1, 1, INPUTS), fp32(Region.G_FC_BIAS, OUTPUTS)
    m = fp32(Region.M_FC_WEIGHT, OUTPUTS, 1, 1, INPUTS)
    fp32(Region.M_FC_BIAS, OUTPUTS)
    y, dy = fp32(Region.F_FEATURE_FP32, ROWS, 1, 1, OUTPUTS), fp32(Region.F_GRAD_SLOT_FP32, ROWS, 1, 1, OUTPUTS)
    masked = task.alloc(Shape(ROWS, 1, 1, OUTPUTS), DType.FP32, Region.F_GRAD_SLOT_FP32)
    lr, decay, beta, scaling = (task.alloc_scalar(name=name) for name in ("lr", "decay", "beta", "scaling"))
    nan = task.alloc_scalar(DType.INT32, name="nan")
    other, copy = (task.alloc(Shape.of(3), DType.FP32, Region.T_TEMP_FP32) for _ in range(2))
    task.finalize_memory()

    def update(kind: str, weight_decay: bool) -> object:
        spans = [Span(Region[f"{series}_{kind}"], Region[f"{series}_{kind}"]) for series in "GMW"]
        scalars = (lr, decay, beta, scaling, nan)
        return op("RANGE_UPDATE_MOMENTUM", scalars, spans_in=spans[:2], spans_out=spans[2:], decay=weight_decay)

    steps = [
        op("FC_FWD", (x, w, b), (y,), activation="relu"),
        op("ACT_BWD", (dy, y), (masked,), kind="relu"),
        op("FC_BWD_WEIGHT", (masked, x), (dw, db)),
        update("FC_WEIGHT", True),
        update("FC_BIAS", False),
    ]
    task.add_graph("step", steps)  # type: ignore[arg-type]
    task.add_graph("forward", steps[:1])  # type: ignore[arg-type]
    task.add_graph("tanh", [op("ACT_FWD", (other,), (copy,), kind="tanh")])
    task.initializer(Initializer().fc(InitKind.XAVIER_UNIFORM))
    task.compile(seed=3)
    for scalar, value in ((lr, LR), (decay, DECAY), (beta, BETA), (scaling, 1.0)):
        task.fill(scalar, value)
    return Step(task, x, w, b, y, dy, m, lr, nan, other, copy)


def given(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_hand_built_step_trains_as_the_formulas_say(backend: str) -> None:
    s = build(backend)
    task, x, dy = s.task, given(ROWS, 1, 1, INPUTS), given(ROWS, 1, 1, OUTPUTS)
    task.transfer(Tensor.from_numpy(x), s.x)
    task.transfer(Tensor.from_numpy(dy), s.dy)
    w, b = (task.fetch(i).numpy().astype(np.float64) for i in (s.w, s.b))
    assert np.abs(w).max() > 0
    assert np.array_equal(b, np.zeros((1, 1, 1, OUTPUTS)))
    start = {i: task.fetch(i) for i in (s.w, s.b, s.m)}

    task.run_iter("step", times=3)
    m, mb = np.zeros_like(w), np.zeros_like(b)
    for _ in range(3):
        y = np.maximum(x.reshape(ROWS, -1) @ w.reshape(OUTPUTS, -1).T + b.ravel(), 0)
        g = dy.reshape(ROWS, -1) * (y > 0)
        m = BETA * m + (g.T @ x.reshape(ROWS, -1)).reshape(w.shape)
        mb = BETA * mb + g.sum(0).reshape(b.shape)
        w, b = w * (1 - LR * DECAY) - LR * m, b - LR * mb
    np.testing.assert_allclose(task.fetch(s.y).numpy().reshape(ROWS, -1), y, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(task.fetch(s.w).numpy(), w, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(task.fetch(s.b).numpy(), b, rtol=1e-5, atol=1e-6)

    after = {i: task.fetch(i).numpy() for i in start}
    for i, tensor in start.items():
        task.transfer(tensor, i)
    task.fill(s.m, 0.0)
    task.init(s.b)
    for name in ("m_fc_bias", "g_fc_bias"):
        task.fill(next(t.id for t in task._plan.tensors if t.name == name), 0.0)
    for _ in range(3):
        task.run_uncaptured("step")
    for i, values in after.items():
        assert np.array_equal(task.fetch(i).numpy(), values)  # captured or not: the same bits

    before = task.fetch(s.w).numpy().copy()
    task.fill(s.nan, 1)  # a number of the step is read when the graph runs (law 4)
    task.run("step")
    assert np.array_equal(task.fetch(s.w).numpy(), before)

    task.transfer(Tensor.from_numpy(np.array([-1, 0, 2], np.float32)), s.other)
    task.run("forward", "tanh")
    np.testing.assert_allclose(task.fetch(s.copy).numpy().ravel(), np.tanh([-1, 0, 2]), rtol=1e-6)


def test_two_graphs_that_share_bytes_do_not_run_together() -> None:
    s = build("reference")
    for pair in (("step", "forward"), ("forward", "step"), ("tanh", "tanh")):
        with pytest.raises(
            GraphError, match=rf"run\('{pair[0]}', '{pair[1]}'\): they .*, and one writes; run them one af"
        ):
            s.task.run(*pair)
    assert "RANGE_UPDATE_MOMENTUM" in s.task.graph_text("step")
    assert "W_FC_WEIGHT" in s.task.memory_text()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_what_validation_prepares_once_is_made_in_every_run(backend: str) -> None:
    task = task_on(backend)
    x = task.alloc(Shape(2, 5, 5, 8), DType.FP32, Region.I_A_DATA)
    w = task.alloc(Shape(8, 1, 1, 8), DType.FP32, Region.W_FIRST_CONV)
    scale, bias = (task.alloc(Shape.of(8), DType.FP32, Region.T_TEMP_FP32) for _ in range(2))
    y = task.alloc(Shape(2, 5, 5, 8), DType.FP32, Region.F_FEATURE_FP32)
    task.finalize_memory()
    attrs: dict[str, Any] = {"stride": 1, "pad": 0, "groups": 1, "activation": "none", "bias": False, "residual": False}
    task.add_graph("folded", [op("CONV_INF", (x, w, scale, bias), (y,), **attrs)]).compile()
    images, identity = given(2, 5, 5, 8), np.eye(8, dtype=np.float32).reshape(8, 1, 1, 8)
    task.transfer(Tensor.from_numpy(images), x)
    task.fill(bias, 0.5)
    for factor in (1.0, 3.0):
        task.transfer(Tensor.from_numpy(identity * factor), w)
        task.fill(scale, 2.0)
        task.run("folded")
        np.testing.assert_allclose(task.fetch(y).numpy(), images * factor * 2 + 0.5, rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_named() -> None:
    task = SimpleTask(backend="reference")
    x = task.alloc(Shape(2, 1, 1, 5), DType.FP32, Region.I_A_DATA, name="x")
    w = task.alloc(Shape(3, 1, 1, 4), DType.FP32, Region.W_FC_WEIGHT, name="w")
    y = task.alloc(Shape(2, 1, 1, 3), DType.FP32, Region.F_FEATURE_FP32, name="y")
    flag = task.alloc_scalar(DType.INT32, name="flag")
    with pytest.raises(ValueRejected, match="there is a tensor 'y' already"):
        task.alloc(Shape(), DType.FP32, Region.T_TEMP_FP32, name="y")
    with pytest.raises(MemoryPlanError, match="region F_FEATURE_FP16 is closed"):
        task.alloc(Shape(), DType.BF16, Region.F_FEATURE_FP16)
    with pytest.raises(MemoryPlanError, match="is FP32; region S_SCALAR_INT32 holds INT32"):
        task.alloc(Shape(), DType.FP32, Region.S_SCALAR_INT32)
    with pytest.raises(ValueRejected, match="expected one of: FP32, INT32, INT8"):
        task.alloc_scalar(DType.BF16)
    with pytest.raises(PhaseError, match="add_graph needs phase MEMORY_LOCKED, but the task is in PLANNING"):
        task.add_graph("a", [])
    with pytest.raises(PhaseError, match="run needs phase COMPILED, but the task is in PLANNING"):
        task.run("a")
    task.finalize_memory()
    assert task.phase is Phase.MEMORY_LOCKED
    with pytest.raises(PhaseError, match="alloc needs phase PLANNING"):
        task.alloc(Shape(), DType.FP32, Region.T_TEMP_FP32)
    with pytest.raises(GraphError, match="there are no graphs"):
        task.compile()
    refused: list[tuple[list[object], type[Exception], str]] = [
        ([op("FC_FWD", (x, w), (y,), activation="relu")], ShapeError, "5 values per sample, the weight reads 4"),
        ([op("FC_FWD", (x,), (y,), activation="relu")], GraphError, r"FC_FWD #0 .*: 1 inputs; expected x, w, b\?"),
        ([op("FC_FWD", (x, w), (y,))], GraphError, r"attributes \[\]; expected \['activation'\]"),
        ([op("FC_FWD", (x, w), (y,), activation="elu")], GraphError, "attribute activation is 'elu'"),
        ([op("FC_FWD", (x, 99), (y,), activation="relu")], ValueRejected, "unknown tensor: simple task: no tensor #99"),
        ([op("ACT_FWD", (y,), (y,), kind="relu")], GraphError, "reads y before it is defined"),
        ([op("FLAG_OR", (flag, x), (flag,))], GraphError, "where a step scalar is expected"),
        (["FC_FWD"], ValueRejected, r"add_graph 'a': item 0 is 'FC_FWD' \(str\); expected an op"),
    ]  # fmt: skip
    for ops, kind, message in refused:
        with pytest.raises(kind, match=message):
            task.add_graph("a", ops)  # type: ignore[arg-type]
    with pytest.raises(MissingKernelError, match="op FC is not in the op table"):
        op("FC")
    task.add_graph("or", [op("FLAG_OR", (flag, flag), (flag,))])
    with pytest.raises(ValueRejected, match="there is a graph 'or' already"):
        task.add_graph("or", [])
    task.compile()
    with pytest.raises(PhaseError, match="initializer needs phase MEMORY_LOCKED"):
        task.initializer(Initializer())
    with pytest.raises(ValueRejected, match="unknown graph 'and'; this task has: or"):
        task.run("and")
    with pytest.raises(ValueRejected, match=r"transfer to 'x': expected \[2,1,1,5\] FP32, given \[1,1,1,5\] FP32"):
        task.transfer(Tensor.zeros(Shape.of(5)), x)
    with pytest.raises(ValueRejected, match=r"fill 'flag': 0\.5; expected a whole number"):
        task.fill(flag, 0.5)
    with pytest.raises(ValueRejected, match="unknown tensor"):
        task.fetch(-1)
    with pytest.raises(ValueRejected, match="half is"):
        SimpleTask(half=DType.FP32)
    pairs = SimpleTask(backend="reference")
    pairs.alloc(Shape(3, 1, 1, 4), DType.FP32, Region.G_FC_WEIGHT)
    with pytest.raises(MemoryPlanError, match="G_FC_WEIGHT has 1 tensors, W_FC_WEIGHT 0"):
        pairs.finalize_memory()


def test_the_example_learns(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "simple_task.py"))["main"]()
    losses = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.15
