"""LARS, one tensor per node: the formulas of spec/framework 4.2, its clamps, laws 2, 4 and 5."""

from __future__ import annotations

import math

import numpy as np
import pytest
from backend_kernels_harness import Bench, node

from renaissance.backend.cpu.kernels_lars import SCALARS
from renaissance.core.dtype import DType, bf16_from_fp32
from renaissance.core.errors import DTypeError, MissingKernelError, ShapeError
from renaissance.graph.computation_graph import Node

VALUES = {"lr": 0.5, "wd": 0.05, "beta": 0.9, "trust": 0.02, "eps": 1e-8, "scaling": 1.0, "has_nan": 0}
SIZES = (1, 7, 1023, 1025, 70_001)


def setup(
    n: int, *, threads: int = 1, nesterov: bool = False, half: bool = True, large: float = 1.0, **scalars: float
) -> tuple[Bench, Node]:
    """``large`` is the size of the weights; gradients are of size 1 times the loss scale."""
    rng, bench, values = np.random.default_rng(n), Bench(threads), VALUES | scalars
    inputs = [bench.add(name, [values[name]], DType.INT32 if name == "has_nan" else DType.FP32) for name in SCALARS]
    inputs.append(bench.add("grad", rng.normal(size=n) * values["scaling"]))
    outputs = [
        bench.add("weight", rng.normal(size=n) * large),
        bench.add("m", rng.normal(size=n)),
        bench.add("ratio", [7]),
    ]
    if half:
        outputs.append(bench.add("half", np.zeros(n), DType.BF16))
    return bench, node("LARS_UPDATE", tuple(inputs), tuple(outputs), nesterov=nesterov)


@pytest.mark.parametrize("nesterov", [False, True])
def test_update_is_the_formula_and_every_team_gives_its_bits(nesterov: bool) -> None:
    """Written out from the specification, independently of the reference backend, which is compared as well."""
    for n in SIZES:
        ours, update = setup(n, nesterov=nesterov, scaling=1024.0)
        w, m, g = (ours.get(k).astype(np.float64) for k in ("weight", "m", "grad"))
        lr, wd, beta, trust, eps = (float(ours.get(k)[0]) for k in SCALARS[:5])
        g /= 1024.0
        ratio = trust * math.sqrt((w**2).sum()) / (math.sqrt((g**2).sum()) + wd * math.sqrt((w**2).sum()) + eps)
        step = lr * ratio * (g + wd * w)
        m = beta * m + step
        w -= step + beta * m if nesterov else m
        golden, _ = setup(n, nesterov=nesterov, scaling=1024.0)
        ours.run(update)
        golden.run(update, "reference")
        for bench in (ours, golden):
            assert bench.get("ratio")[0] == pytest.approx(ratio, rel=1e-6)
            np.testing.assert_allclose(bench.get("weight"), w, rtol=2e-6, atol=5e-7)
            np.testing.assert_allclose(bench.get("m"), m, rtol=2e-6, atol=5e-7)
        np.testing.assert_array_equal(ours.get("half"), bf16_from_fp32(ours.get("weight")))
        for threads in (2, 3):
            other, same = setup(n, threads=threads, nesterov=nesterov, scaling=1024.0)
            other.run(same)
            assert other.all_bytes() == ours.all_bytes()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_ratio_is_one_for_a_zero_norm_and_at_most_a_hundred(backend: str) -> None:
    for large, scaling, factor, expected in (
        (0.0, 8.0, 1.0, 1.0),  # weights of zero, e.g. a zero-initialised tensor
        (1.0, 8.0, 0.0, 1.0),  # gradient of zero
        (1e-14, 8.0, 1.0, 1.0),  # both norms below 1e-12, not exactly zero
        (1.0, 8.0, 1e-9, 100.0),
    ):
        bench, update = setup(50, large=large, scaling=scaling, wd=0.0, trust=1.0)
        bench.get("grad")[:] *= factor * (1e-14 if large == 1e-14 else 1.0)
        bench.run(update, backend)
        assert bench.get("ratio")[0] == expected
        assert np.isfinite(bench.get("weight")).all()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_flagged_step_leaves_no_trace(backend: str) -> None:
    for n in (5, 40_000):
        bench, update = setup(n, threads=2, has_nan=1)
        bench.get("grad")[3] = np.nan
        before = bench.all_bytes()
        bench.run(update, backend)
        assert bench.all_bytes() == before


def test_scalars_are_read_at_every_replay_and_large_tensors_keep_their_norm() -> None:
    """The sum of 300,000 squares of 1 + 1e-3 is off by more than 1e-4 when it is kept in float32."""
    bench, update = setup(300_000, threads=2, half=False, wd=0.0, eps=0.0)
    bench.get("weight")[:], bench.get("grad")[:], bench.get("m")[:] = 1.001, 1.0, 0.0
    program = bench.capture(update)
    program.launch()
    assert bench.get("ratio")[0] == pytest.approx(0.02 * float(np.float32(1.001)), rel=2e-7)
    for name in ("lr", "beta"):
        bench.get(name)[0] = 0.0
    before = bench.get("weight").copy()
    program.launch()
    np.testing.assert_array_equal(bench.get("weight"), before)


def test_operands_that_do_not_fit_are_refused_by_name() -> None:
    bench, update = setup(10)
    ids, outputs = update.inputs, update.outputs
    with pytest.raises(ShapeError, match=r"LARS_UPDATE #7: 7 inputs and 4 outputs; expected \(lr, wd, beta"):
        bench.capture(node("LARS_UPDATE", ids[:7], outputs, nesterov=False))
    with pytest.raises(DTypeError, match=r"LARS_UPDATE #7: tensor 'has_nan' is INT32; expected FP32"):
        bench.capture(node("LARS_UPDATE", (ids[6], *ids[1:]), outputs, nesterov=False))
    fp16 = bench.add("fp16", np.zeros(10), DType.FP16)
    with pytest.raises(MissingKernelError, match=r"LARS_UPDATE #7: tensor 'fp16' is fp16"):
        bench.capture(node("LARS_UPDATE", ids, (*outputs[:3], fp16), nesterov=False))
    short = bench.add("short", np.zeros(9))
    with pytest.raises(ShapeError, match=r"LARS_UPDATE #7: tensor 'short' is \[9,1,1,1\]; expected 10 elements"):
        bench.capture(node("LARS_UPDATE", (*ids[:7], short), outputs, nesterov=False))
