"""A compiled MLP on the reference backend: its gradient, its steps, and the same program with the CPU kernels in it.

The kernels are captured from the compiler's own nodes, so the operand order of every op is checked as well.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from backend_kernels_harness import REGISTRY, aligned

from renaissance.backend.cpu.queue import NativeQueue
from renaissance.backend.registry import NativeCall, PythonCall
from renaissance.core.dtype import DType, bf16_from_fp32, fp32_from_bf16
from renaissance.core.enums import OptimizerKind
from renaissance.core.region import Span
from renaissance.graph import BluePrint, CompileRequest, Variant, fc, relu, seq, train_program, val_program
from renaissance.graph.compiler import compile_model
from renaissance.graph.ids import GraphId
from renaissance.graph.request import UPDATE_OPS
from renaissance.tensor.dtensor import DTensor

MODEL = BluePrint(seq(fc(40), relu(), fc(30), relu(), fc(7)))
BATCH, TAIL = 12, 9
SMOOTHING, DECAY, LR = 0.1, 1e-2, 1e-2


class Program:
    """One variant of a compiled model in one block of memory; a ``CaptureContext`` bound to input slot A."""

    def __init__(
        self, backend: str, half: DType | None = None, optimizer: OptimizerKind = OptimizerKind.ADAMW, clip: float = 0.0
    ) -> None:
        request = CompileRequest(
            height=6,
            width=5,
            channels=1,
            num_classes=7,
            train_batch=BATCH,
            val_batch=BATCH,
            half=half,
            optimizer=optimizer,
            weight_decay=DECAY,
            label_smoothing=SMOOTHING,
            grad_clip=clip,
        )
        self.model = compile_model(MODEL, request)
        self.plan, self.half, self.threads, self._backend = self.model.plans[Variant.TRAIN_BASE], half, 2, backend
        self._memory = aligned(self.model.arena_bytes)
        self._external = {r: aligned(max(self.plan.external_bytes(r), 256)) for r in self.plan.external}
        self._private: list[npt.NDArray[np.uint8]] = []
        for name, value in self.model.scalar_init.items():
            self.array(self.model.scalar(name)).reshape(-1)[0] = value
        rng = np.random.default_rng(1)
        for p in self.model.parameters:
            self.array(p.weight)[...] = rng.normal(size=p.shape.dims) * 0.2
        self.images = rng.normal(size=(BATCH, 6, 5, 1)).astype(np.float32)
        self.labels = rng.integers(0, 7, BATCH).astype(np.int32)
        self.labels[TAIL:] = -1
        self.set("lr", LR)
        self.set("batch_valid", TAIL)
        self.feed()
        self.run((GraphId.CAST_MAIN_FP32_TO_FP16, GraphId.CLEAR_METRICS), train=True)

    def feed(self) -> None:
        slot = self.model.inputs[0]
        self.array(slot.data)[...] = bf16_from_fp32(self.images) if self.half else self.images
        self.array(slot.label).reshape(-1)[:] = self.labels

    def set(self, name: str, value: float) -> None:
        self.array(self.model.scalar(name)).reshape(-1)[0] = value

    def get(self, name: str) -> float:
        return float(self.array(self.model.scalar(name)).reshape(-1)[0])

    def run(self, graphs: tuple[GraphId, ...], *, train: bool) -> None:
        """Each op on the backend asked for; the products, which are another module's, always on the reference."""
        graph = self.model.training if train else self.model.inference
        for n in graph.program(graphs):
            backend = self._backend if (n.op, self._backend) in REGISTRY._launchers else "reference"
            for call in REGISTRY.launcher(n.op, backend)(n, self):
                if isinstance(call, PythonCall):
                    call.fn()
                else:
                    assert isinstance(call, NativeCall)
                    NativeQueue([call]).launch()

    def step(self) -> None:
        self.run(train_program(0), train=True)

    def weights(self) -> dict[str, npt.NDArray[np.float32]]:
        return {p.name: self.array(p.weight).copy() for p in self.model.parameters}

    def state(self) -> bytes:
        ids = [i for p in self.model.parameters for i in (p.weight, p.half, p.m, p.v) if i is not None]
        scalars = ("step", "bias_corr1", "bias_corr2", "accum_loss", "accum_count")
        ids += [self.model.scalar(s) for s in scalars if s in self.model.scalars]
        return b"".join(self.array(i).tobytes() for i in ids)

    # CaptureContext

    def tensor(self, tensor_id: int) -> DTensor:
        return self.plan.tensor(tensor_id)

    def _bytes(self, tensor_id: int) -> npt.NDArray[np.uint8]:
        t = self.tensor(tensor_id)
        block = self._external[t.region] if self.plan.is_external(tensor_id) else self._memory
        return block[t.offset : t.offset + t.nbytes]

    def ptr(self, tensor_id: int) -> int:
        return int(self._bytes(tensor_id).ctypes.data)

    def array(self, tensor_id: int) -> npt.NDArray[Any]:
        t = self.tensor(tensor_id)
        return self._bytes(tensor_id).view(t.dtype.numpy).reshape(t.shape.dims)

    def span_ptr(self, span: Span) -> tuple[int, int]:
        offset, nbytes = self.plan.resolve_span(span)
        return int(self._memory.ctypes.data) + offset, nbytes

    def span_array(self, span: Span, dtype: DType) -> npt.NDArray[Any]:
        offset, nbytes = self.plan.resolve_span(span)
        return self._memory[offset : offset + nbytes].view(dtype.numpy)

    def scratch(self, nbytes: int) -> int:
        return self.private(nbytes)

    def private(self, nbytes: int) -> int:
        self._private.append(aligned(nbytes))
        return int(self._private[-1].ctypes.data)


def oracle(program: Program) -> tuple[float, list[npt.NDArray[np.float64]]]:
    """(loss, gradient of every parameter) by plain back-propagation in float64, nothing shared with the project."""
    arrays = [program.array(p.half if p.half is not None else p.weight) for p in program.model.parameters]
    values = [(fp32_from_bf16(a) if a.dtype == np.uint16 else a).astype(np.float64) for a in arrays]
    ws = [v.reshape(v.shape[0], -1) for v in values if v.shape[0] > 1]
    bs = [v.reshape(-1) for v in values if v.shape[0] == 1]
    x = program.images if program.half is None else fp32_from_bf16(bf16_from_fp32(program.images))
    acts = [x.reshape(BATCH, -1).astype(np.float64)]
    for i, (w, b) in enumerate(zip(ws, bs, strict=True)):
        y = acts[-1] @ w.T + b
        acts.append(np.maximum(y, 0) if i < len(ws) - 1 else y)
    z = acts.pop()
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    target = np.full_like(p, SMOOTHING / 7)
    target[np.arange(TAIL), program.labels[:TAIL]] += 1 - SMOOTHING
    loss = -(target * np.log(p)).sum(1)[:TAIL].sum() / TAIL
    d = (p - target) / TAIL
    d[TAIL:] = 0
    grads: list[npt.NDArray[np.float64]] = []
    for i in reversed(range(len(ws))):
        grads[:0] = [d.T @ acts[i], d.sum(0)]
        d = (d @ ws[i]) * (acts[i] > 0)
    return loss, grads


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(("half", "tolerance"), [(None, 1e-5), (DType.BF16, 2e-2)])
def test_gradient_of_the_compiled_model_equals_float64(backend: str, half: DType | None, tolerance: float) -> None:
    program = Program(backend, half)
    loss, expected = oracle(program)
    program.run(train_program(0)[:9], train=True)  # everything before the NaN check
    assert program.get("loss") == pytest.approx(loss, rel=tolerance)
    got = {p.name: program.array(p.grad) for p in program.model.parameters}
    assert len(got) == len(expected)
    for (name, grad), want in zip(got.items(), expected, strict=True):
        error = np.linalg.norm(grad.reshape(-1) - want.reshape(-1)) / np.linalg.norm(want)
        assert error < tolerance, name


@pytest.mark.parametrize("optimizer", list(UPDATE_OPS))
@pytest.mark.parametrize("half", [None, DType.BF16])
def test_kernels_and_reference_train_alike(optimizer: OptimizerKind, half: DType | None) -> None:
    ours, golden = (Program(b, half, optimizer, clip=0.05) for b in ("cpu", "reference"))
    before = ours.weights()
    for _ in range(3):
        ours.step()
        golden.step()
    tolerance = 1e-4 if half is None else 2e-2
    for name, w in ours.weights().items():
        moved = np.linalg.norm(golden.weights()[name] - before[name])
        assert moved > 0
        assert np.linalg.norm(w - golden.weights()[name]) < tolerance * moved, name
    for name in ("loss", "accum_loss", "accum_count"):
        assert ours.get(name) == pytest.approx(golden.get(name), rel=tolerance)
    assert ours.get("accum_count") == 3 * TAIL


@pytest.mark.parametrize("half", [None, DType.BF16])
def test_validation_counts_only_valid_rows(half: DType | None) -> None:
    ours, golden = Program("cpu", half), Program("reference", half)
    for program in (ours, golden):
        for _ in range(2):
            program.run(val_program(0), train=False)
    for name in ("accum_top1", "accum_top5", "accum_count"):
        assert ours.get(name) == golden.get(name)
        assert ours.get(name) == int(ours.get(name))
    assert ours.get("accum_count") == 2 * TAIL
    assert 0 <= ours.get("accum_top1") <= ours.get("accum_top5") <= 2 * TAIL
    assert ours.get("accum_loss") == pytest.approx(golden.get("accum_loss"), rel=1e-5)
    predicted = (p.array(p.model.predicted).reshape(-1) for p in (ours, golden))
    np.testing.assert_array_equal(*predicted)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("half", [None, DType.BF16])
def test_nan_in_the_batch_leaves_no_trace(backend: str, half: DType | None) -> None:
    program = Program(backend, half)
    program.step()
    before = program.state()
    good, program.images[3, 2, 1, 0] = program.images[3, 2, 1, 0], np.nan
    program.feed()
    program.step()
    assert program.get("has_nan") == 1
    assert program.state() == before
    program.images[3, 2, 1, 0] = good
    program.feed()
    program.step()
    assert program.get("has_nan") == 0
    assert program.get("step") == 2


def test_training_lowers_the_loss() -> None:
    program = Program("reference")
    program.step()
    first = program.get("loss")
    for _ in range(20):
        program.step()
    assert program.get("loss") < 0.6 * first
