"""Softmax cross-entropy kernels: loss, gradient, predictions and rates, masked rows, ties, NaN."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from backend_kernels_harness import Bench, node, ulps

from renaissance.backend.cpu.kernels_softmax import exp_f32
from renaissance.core.dtype import DType, bf16_from_fp32, fp32_from_bf16
from renaissance.core.errors import DeviceError, MissingKernelError, ShapeError
from renaissance.graph.computation_graph import Node

BACKENDS = ("cpu", "reference")


def setup(
    logits: npt.ArrayLike,
    labels: npt.ArrayLike,
    *,
    smoothing: float = 0.1,
    half: bool = False,
    threads: int = 1,
    scaling: float = 1.0,
) -> tuple[Bench, dict[str, Node]]:
    z, y = np.asarray(logits, np.float32), np.asarray(labels, np.int32)
    bench = Bench(threads)
    stored, dtype = (bf16_from_fp32(z), DType.BF16) if half else (z, DType.FP32)
    inputs = (
        bench.add("logits", stored, dtype),
        bench.add("label", y, DType.INT32),
        bench.add("smoothing", [smoothing]),
        bench.add("valid", [(y >= 0).sum()], DType.INT32),
    )
    predicted = bench.add("predicted", np.full(len(y), 77), DType.INT32)
    probs, losses = bench.add("probs", np.full_like(z, 7)), bench.add("losses", np.full(len(y), 7.0))
    loss, top1, top5 = (bench.add(k, [7.0]) for k in ("loss", "top1", "top5"))
    scale = bench.add("scaling", [scaling])
    dlogits = bench.add("dlogits", np.zeros(z.shape, dtype.numpy), dtype)
    return bench, {
        "fwd": node("SOFTMAX_CE_FWD", inputs, (probs, losses, loss)),
        "inf": node("SOFTMAX_CE_INF", inputs, (predicted, probs, losses, loss, top1, top5)),
        "bwd": node("SOFTMAX_CE_BWD", (probs, *inputs[1:], scale), (dlogits,)),
    }


def oracle(z: npt.NDArray[np.float64], y: npt.NDArray[np.int32], eps: float) -> tuple[np.ndarray, float, np.ndarray]:
    """(probabilities, mean loss, gradient of the mean loss) over the rows with a label, all in float64."""
    p = np.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    target = np.full_like(z, eps / z.shape[1])
    rows = np.flatnonzero(y >= 0)
    target[rows, y[rows]] += 1 - eps
    losses = -(target * np.log(p)).sum(axis=1)
    grad = (p - target) / len(rows)
    grad[y < 0] = 0
    return p, losses[rows].mean(), grad


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("classes", [2, 10, 1000])
@pytest.mark.parametrize("half", [False, True])
def test_loss_and_gradient_equal_float64(backend: str, classes: int, half: bool) -> None:
    rng = np.random.default_rng(classes)
    z, y = rng.normal(size=(41, classes)).astype(np.float32) * 4, rng.integers(0, classes, 41)
    y[-3:] = -1
    for eps in (0.0, 0.1):
        bench, ops = setup(z, y, smoothing=eps, half=half, scaling=16.0, threads=2)
        bench.run(ops["fwd"], backend)
        bench.run(ops["bwd"], backend)
        exact = fp32_from_bf16(bf16_from_fp32(z)) if half else z
        p, loss, grad = oracle(exact.astype(np.float64), y, float(np.float32(eps)))
        assert bench.get("loss")[0] == pytest.approx(loss, rel=1e-6)
        np.testing.assert_allclose(bench.get("probs").reshape(z.shape)[:-3], p[:-3], rtol=5e-7, atol=1e-30)
        got = bench.get("dlogits").reshape(z.shape)
        got = fp32_from_bf16(got) if half else got
        np.testing.assert_allclose(got, grad * 16, rtol=5e-3 if half else 1e-5, atol=3e-8)


@pytest.mark.parametrize("backend", BACKENDS)
def test_masked_rows_give_no_loss_and_no_gradient(backend: str) -> None:
    z = np.full((4, 3), 1e30, np.float32)  # what a masked row holds must not matter
    z[0] = [0.5, 1.0, -2.0]
    bench, ops = setup(z, [1, -1, -1, -1])
    for kind in ("inf", "bwd"):
        bench.run(ops[kind], backend)
    alone, single = setup(z[:1], [1])
    for kind in ("inf", "bwd"):
        alone.run(single[kind], backend)
    for name in ("loss", "top1", "top5"):
        assert bench.get(name)[0] == alone.get(name)[0]
    np.testing.assert_array_equal(bench.get("dlogits")[:3], alone.get("dlogits"))
    assert not bench.get("dlogits")[3:].any()
    assert not bench.get("losses")[1:].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_without_valid_rows_is_zero(backend: str) -> None:
    bench, ops = setup(np.ones((3, 4)), [-1, -1, -1])
    for kind in ("inf", "bwd"):
        bench.run(ops[kind], backend)
    assert bench.get("loss")[0] == bench.get("top1")[0] == bench.get("top5")[0] == 0
    assert not bench.get("dlogits").any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rates_rank_the_label_and_ties_go_to_the_lower_class(backend: str) -> None:
    z = np.zeros((6, 8), np.float32)
    z[3] = [7, 6, 5, 4, 3, 2, 1, 0]
    z[4] = [7, 6, 5, 4, 3, 2, 1, 0]
    z[5] = [0, 0, 9, 0, 9, 0, 0, 0]
    bench, ops = setup(z, [0, 4, 5, 4, 5, 4])
    bench.run(ops["inf"], backend)
    np.testing.assert_array_equal(bench.get("predicted"), [0, 0, 0, 0, 0, 2])
    assert bench.get("top1")[0] == pytest.approx(1 / 6)
    assert bench.get("top5")[0] == pytest.approx(4 / 6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_top5_is_top1_below_five_classes(backend: str) -> None:
    bench, ops = setup([[1, 2, 3, 0], [4, 2, 3, 0]], [2, 1])
    bench.run(ops["inf"], backend)
    assert bench.get("top1")[0] == bench.get("top5")[0] == 0.5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_logit_is_never_correct_and_makes_the_loss_nan(backend: str, bad: float) -> None:
    z = np.zeros((3, 6), np.float32)
    z[1, 2] = bad
    bench, ops = setup(z, [0, 2, 1])
    for kind in ("inf", "bwd"):
        bench.run(ops[kind], backend)
    assert np.isnan(bench.get("loss")[0])
    assert np.isnan(bench.get("dlogits").reshape(z.shape)[1]).all()
    assert np.isfinite(bench.get("dlogits").reshape(z.shape)[[0, 2]]).all()
    if np.isnan(bad):
        assert bench.get("predicted")[1] == -1
        assert bench.get("top1")[0] == pytest.approx(1 / 3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_far_logits_neither_overflow_nor_vanish(backend: str) -> None:
    bench, ops = setup([[1e30, -1e30, 0.0], [-300.0, -200.0, -100.0]], [0, 0], smoothing=0.0)
    bench.run(ops["fwd"], backend)
    np.testing.assert_allclose(bench.get("losses"), [0.0, 200.0], rtol=1e-6)
    np.testing.assert_allclose(bench.get("probs"), [1, 0, 0, 0, 0, 1], atol=1e-30)


def test_same_bytes_for_every_thread_count() -> None:
    rng = np.random.default_rng(5)
    z, y = rng.normal(size=(301, 128)).astype(np.float32), rng.integers(-1, 128, 301)
    results = set()
    for threads in (1, 2, 3):
        bench, ops = setup(z, y, threads=threads, half=True)
        for kind in ("fwd", "inf", "bwd"):
            bench.run(ops[kind])
        results.add(bench.all_bytes())
    assert len(results) == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("label", [10, -2])
def test_label_out_of_range_stops_the_step_by_name(backend: str, label: int) -> None:
    bench, ops = setup(np.zeros((5, 10)), [0, 1, 2, label, 3])
    with pytest.raises(DeviceError, match="SOFTMAX_CE_FWD #7"):
        bench.run(ops["fwd"], backend)


def test_fp16_logits_are_refused_by_name_at_capture() -> None:
    bench, ops = setup(np.zeros((2, 4)), [0, 1])
    logits = bench.add("half_logits", np.zeros((2, 4)), DType.FP16)
    forward = ops["fwd"]
    with pytest.raises(MissingKernelError, match=r"SOFTMAX_CE_FWD #7.*half_logits.*fp16"):
        bench.capture(node(forward.op, (logits, *forward.inputs[1:]), forward.outputs))


def test_labels_of_another_batch_size_are_refused_by_name() -> None:
    bench, ops = setup(np.zeros((2, 4)), [0, 1])
    labels = bench.add("other_labels", [1, 2, 3], DType.INT32)
    forward = ops["fwd"]
    inputs = (forward.inputs[0], labels, *forward.inputs[2:])
    with pytest.raises(ShapeError, match=r"SOFTMAX_CE_FWD #7.*other_labels"):
        bench.capture(node(forward.op, inputs, forward.outputs))


def test_exponential_is_correctly_rounded_to_one_unit() -> None:
    x = -np.linspace(0, 100, 3001)
    got = np.array([exp_f32(v) for v in x], np.float32)
    want = np.where(x < -87, 0, np.exp(x)).astype(np.float32)
    assert ulps(got, want) <= 1
    assert (got != want).mean() < 1e-3
