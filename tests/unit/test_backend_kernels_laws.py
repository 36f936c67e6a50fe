"""The end of a training step as one program: law 3 (nothing is allocated) and law 5 (one flag guards all state)."""

from __future__ import annotations

import ctypes
import tracemalloc

import numpy as np
import pytest
from backend_kernels_harness import REGISTRY, Bench, node
from numba import njit
from numba.core.runtime import _nrt_python, rtsys
from test_backend_kernels_dropout import Dropped
from test_backend_kernels_ema import setup as ema
from test_backend_kernels_lars import setup as lars
from test_backend_kernels_pool import Pool

from renaissance.backend.cpu.queue import NativeQueue
from renaissance.backend.registry import NativeCall, PythonCall
from renaissance.core.dtype import DType
from renaissance.core.region import Region, Span
from renaissance.graph.computation_graph import Node

N = 50_000
SCALARS = {
    "lr": 1e-3,
    "wd": 0.1,
    "beta": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "c1": 0.0,
    "c2": 0.0,
    "scaling": 2.0,
    "loss": 2.5,
    "top1": 0.5,
    "top5": 0.75,
}
STATE = ("step", "c1", "c2", "sum_loss", "sum_top1", "sum_top5", "count")


class StepEnd:
    """CHECK_NAN, ADAM_STEP, RANGE_UPDATE_ADAMW with a half copy, ACCUM_METRICS."""

    def __init__(self, threads: int = 2) -> None:
        rng = np.random.default_rng(0)
        self.bench = bench = Bench(threads)
        i = {name: bench.add(name, [value]) for name, value in SCALARS.items()}
        i |= {name: bench.add(name, [v], DType.INT32) for name, v in {"has_nan": 0, "step": 0, "valid": 8}.items()}
        i |= {name: bench.add(name, [0.0]) for name in STATE[3:]}
        normal = lambda: rng.normal(size=N).astype(np.float32)  # noqa: E731
        self.grad = bench.add_span(Region.G_FC_WEIGHT, normal())
        m, v = bench.add_span(Region.M_FC_WEIGHT, normal()), bench.add_span(Region.V_FC_WEIGHT, np.abs(normal()))
        w, half = (
            bench.add_span(Region.W_FC_WEIGHT, normal()),
            bench.add_span(Region.A_FC_WEIGHT, np.zeros(N, np.uint16)),
        )
        self.state: tuple[Span, ...] = (m, v, w, half)
        adam = ("lr", "wd", "beta", "beta2", "eps", "c1", "c2", "scaling", "has_nan")
        metrics = ("valid", "loss", "top1", "top5", "has_nan")
        self.nodes: tuple[Node, ...] = (
            node("RANGE_CHECK_NAN", (i["scaling"],), (i["has_nan"],), (self.grad,), clip=0.0),
            node("ADAM_STEP", tuple(i[k] for k in ("has_nan", "step", "beta", "beta2")), (i["step"], i["c1"], i["c2"])),
            node("RANGE_UPDATE_ADAMW", tuple(i[k] for k in adam), (), (self.grad, m, v), (w, half), decay=True),
            node("ACCUM_METRICS", tuple(i[k] for k in metrics), tuple(i[k] for k in STATE[3:])),
        )

    def calls(self) -> list[NativeCall]:
        calls = [c for n in self.nodes for c in REGISTRY.launcher(n.op, "cpu")(n, self.bench)]
        return [c for c in calls if isinstance(c, NativeCall)]

    def queue(self) -> NativeQueue:
        return NativeQueue(self.calls())

    def launch(self, backend: str) -> None:
        if backend == "cpu":
            self.queue().launch()
            return
        for n in self.nodes:
            for call in REGISTRY.launcher(n.op, backend)(n, self.bench):
                assert isinstance(call, PythonCall)
                call.fn()

    def persistent(self) -> list[bytes]:
        spans = [self.bench.span_array(s, DType.UINT8).tobytes() for s in self.state]
        return spans + [self.bench.get(name).tobytes() for name in STATE]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("place", [0, 12_345, N - 1])
def test_one_bad_gradient_leaves_every_persistent_byte(backend: str, bad: float, place: int) -> None:
    step = StepEnd()
    gradient = step.bench.span_array(step.grad, DType.FP32)
    good, gradient[place] = gradient[place], bad
    before = step.persistent()
    step.launch(backend)
    assert step.bench.get("has_nan")[0] == 1
    assert step.persistent() == before
    gradient[place] = good
    step.launch(backend)
    assert step.bench.get("has_nan")[0] == 0
    assert all(new != old for new, old in zip(step.persistent(), before, strict=True))
    assert step.bench.get("step")[0] == 1


def test_ten_steps_give_the_same_bytes_for_every_thread_count() -> None:
    results = set()
    for threads in (1, 2, 3):
        step = StepEnd(threads)
        queue = step.queue()
        for _ in range(10):
            queue.launch()
        results.add(b"".join(step.persistent()))
    assert len(results) == 1


def test_two_backends_agree_over_ten_steps() -> None:
    ours, golden = StepEnd(), StepEnd()
    for _ in range(10):
        ours.launch("cpu")
        golden.launch("reference")
    for span in ours.state[:3]:
        a, b = (s.bench.span_array(span, DType.FP32) for s in (ours, golden))
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert ours.bench.get("step")[0] == golden.bench.get("step")[0] == 10


def numba_allocations() -> int:
    """Blocks that compiled code has taken from Numba's run-time so far."""
    _nrt_python.memsys_enable_stats()
    return int(rtsys.get_allocation_stats().alloc)


def test_kernels_allocate_nothing() -> None:
    """Every kernel of the step is called as the queue calls it, but without the queue around it."""
    step = StepEnd(threads=1)
    run = ctypes.CFUNCTYPE(None, ctypes.c_int64)
    calls = [(run(c.fn), c.args[0]) for c in step.calls()]
    blocks = numba_allocations()
    for _ in range(10):
        for kernel, context in calls:
            kernel(context)
    assert numba_allocations() == blocks
    assert step.bench.get("step")[0] == 10


def test_kernels_of_layers_allocate_nothing() -> None:
    """Every pool, dropout, LARS and EMA, called like those above."""
    pool, dropped = Pool((2, 7, 9, 17), (3, 2, 1), DType.BF16), Dropped(3000, 0.5, DType.FP32)
    programs = [(pool.bench, op) for op, _ in pool.nodes()]
    programs += [(dropped.bench, dropped.forward), (dropped.bench, dropped.backward), lars(3000), ema(3000)]
    run = ctypes.CFUNCTYPE(None, ctypes.c_int64)
    calls = [c for bench, op in programs for c in REGISTRY.launcher(op.op, "cpu")(op, bench)]
    kernels = [(run(c.fn), c.args[0]) for c in calls if isinstance(c, NativeCall)]
    assert len(kernels) == len(programs) + 1  # LARS is two calls
    blocks = numba_allocations()
    for kernel, context in kernels:
        kernel(context)
    assert numba_allocations() == blocks
    assert pool.get("y").any()


def test_replay_grows_no_heap() -> None:
    step = StepEnd()  # owns the memory that the queue works on
    queue = step.queue()
    queue.launch()
    tracemalloc.start()
    queue.launch()
    heap = tracemalloc.get_traced_memory()[0]
    for _ in range(100):
        queue.launch()
    grown = tracemalloc.get_traced_memory()[0] - heap
    tracemalloc.stop()
    assert grown < 1024


def test_the_allocation_counter_sees_a_planted_allocation() -> None:
    blocks = numba_allocations()
    planted(4)
    assert numba_allocations() > blocks


@njit
def planted(n):  # type: ignore[no-untyped-def]  # int64 -> float64
    return np.zeros(n).sum()
