"""Optimizer kernels: the formulas of spec/framework 4.2, law 5 (a flag leaves no trace), law 2 (threads drop out)."""

from __future__ import annotations

import numpy as np
import pytest
from backend_kernels_harness import Bench, node

from renaissance.backend.cpu.kernels_update import SCALARS, STATES
from renaissance.core.dtype import DType, bf16_from_fp32
from renaissance.core.errors import MissingKernelError, ShapeError
from renaissance.core.region import Region
from renaissance.graph.computation_graph import Node

KINDS = tuple(SCALARS)
VALUES = {"lr": 1e-3, "wd": 0.1, "beta": 0.9, "beta2": 0.999, "eps": 1e-8, "bias_corr1": 5.3, "bias_corr2": 501.0}
REGIONS = (Region.G_FC_WEIGHT, Region.M_FC_WEIGHT, Region.V_FC_WEIGHT)


def setup(
    kind: str, n: int, *, threads: int = 1, half: bool = True, decay: bool = True, scaling: float = 1.0, flag: int = 0
) -> tuple[Bench, Node]:
    rng = np.random.default_rng(n)
    bench = Bench(threads)
    scalars = [
        bench.add(name, [flag], DType.INT32) if name == "has_nan" else bench.add(name, [VALUES.get(name, scaling)])
        for name in SCALARS[kind]
    ]
    w = rng.normal(size=n).astype(np.float32)
    spans = [bench.add_span(REGIONS[0], (rng.normal(size=n) * scaling).astype(np.float32))]
    spans += [
        bench.add_span(region, np.abs(rng.normal(size=n)).astype(np.float32))
        for region in REGIONS[1 : 1 + STATES.get(kind, 2)]
    ]
    out = [bench.add_span(Region.W_FC_WEIGHT, w)]
    if half:
        out.append(bench.add_span(Region.A_FC_WEIGHT, np.zeros(n, np.uint16)))
    return bench, node(kind, tuple(scalars), (), tuple(spans), tuple(out), decay=decay)


def weights(bench: Bench, update: Node) -> np.ndarray:
    return bench.span_array(update.spans_out[0], DType.FP32)


@pytest.mark.parametrize("n", [1, 7, 4095, 4097, 100_000])
@pytest.mark.parametrize("kind", KINDS)
def test_update_equals_the_reference(kind: str, n: int) -> None:
    for half, decay in ((True, True), (False, False)):
        ours, update = setup(kind, n, threads=2, half=half, decay=decay, scaling=1024.0)
        golden, _ = setup(kind, n, half=half, decay=decay, scaling=1024.0)
        ours.run(update)
        golden.run(update, "reference")
        for span in (update.spans_out[0], *update.spans_in):
            got, want = (b.span_array(span, DType.FP32) for b in (ours, golden))
            np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-7)
        if half:
            copy = ours.span_array(update.spans_out[1], DType.BF16)
            np.testing.assert_array_equal(copy, bf16_from_fp32(weights(ours, update)))


@pytest.mark.parametrize("kind", KINDS)
def test_update_is_the_formula_of_the_specification(kind: str) -> None:
    """Written out from the table of section 4.2, independently of the reference backend."""
    bench, update = setup(kind, 500, scaling=8.0)
    w, g = (a.astype(np.float64) for a in (weights(bench, update), bench.span_array(update.spans_in[0], DType.FP32)))
    state = [bench.span_array(s, DType.FP32).astype(np.float64) for s in update.spans_in[1:]]
    lr, wd, b1, b2, eps, c1, c2 = (float(np.float32(VALUES[k])) for k in VALUES)
    g /= 8.0
    bench.run(update)
    if kind == "RANGE_UPDATE_SGD":
        expected = w * (1 - lr * wd) - lr * g
    elif kind == "RANGE_UPDATE_MOMENTUM":
        expected = w * (1 - lr * wd) - lr * (b1 * state[0] + g)
    elif kind == "RANGE_UPDATE_NESTEROV":
        expected = w * (1 - lr * wd) - lr * (b1 * (b1 * state[0] + g) + g)
    else:
        if kind == "RANGE_UPDATE_ADAM":
            g = g + wd * w
        else:
            w = w * (1 - lr * wd)
        m, v = b1 * state[0] + (1 - b1) * g, b2 * state[1] + (1 - b2) * g * g
        expected = w - lr * (m * c1) / (np.sqrt(v * c2) + eps)
    np.testing.assert_allclose(weights(bench, update), expected, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_update_gives_the_same_bytes_for_every_thread_count(kind: str) -> None:
    results = set()
    for threads in (1, 2, 3):
        bench, update = setup(kind, 70_001, threads=threads)
        bench.run(update)
        results.add(bench.all_bytes())
    assert len(results) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_flagged_step_leaves_no_trace(kind: str, backend: str) -> None:
    bench, update = setup(kind, 40_000, threads=2, flag=1)
    bench.span_array(update.spans_in[0], DType.FP32)[123] = np.nan
    before = bench.all_bytes()
    bench.run(update, backend)
    assert bench.all_bytes() == before


def test_scalars_are_read_at_every_replay() -> None:
    bench, update = setup("RANGE_UPDATE_ADAMW", 1000)
    program = bench.capture(update)
    bench.get("lr")[0] = 0.0
    before = weights(bench, update).copy()
    program.launch()
    np.testing.assert_array_equal(weights(bench, update), before)
    bench.get("lr")[0] = 1e-2
    program.launch()
    assert (weights(bench, update) != before).all()


def test_denormal_moments_are_flushed_and_zero_padding_stays_zero() -> None:
    bench, update = setup("RANGE_UPDATE_ADAMW", 4096)
    for span in (*update.spans_in, update.spans_out[0]):
        bench.span_array(span, DType.FP32)[:2048] = 0.0
    bench.span_array(update.spans_in[0], DType.FP32)[2048:] = 0.0
    bench.span_array(update.spans_in[1], DType.FP32)[2048:] = 1e-40
    bench.run(update)
    for span in (*update.spans_in, update.spans_out[0]):
        assert not bench.span_array(span, DType.FP32)[:2048].view(np.uint32).any()
    assert not bench.span_array(update.spans_in[1], DType.FP32)[2048:].any()


def test_half_copy_rounds_to_nearest_even_and_keeps_nan() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F800000, 0xFF800000, 0x7F800001, 0x80000000], np.uint32)
    bench, update = setup("RANGE_UPDATE_SGD", 7)
    bench.get("lr")[0] = 0.0
    weights(bench, update)[:] = bits.view(np.float32)
    bench.span_array(update.spans_in[0], DType.FP32)[:] = 0.0
    bench.run(update)
    copy = bench.span_array(update.spans_out[1], DType.BF16)
    np.testing.assert_array_equal(copy, [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0xFF80, 0x7FC0, 0x8000])


def test_fp16_copy_is_refused_by_name_at_capture() -> None:
    bench, update = setup("RANGE_UPDATE_ADAMW", 64)
    bench.half = DType.FP16
    with pytest.raises(MissingKernelError, match=r"RANGE_UPDATE_ADAMW #7.*fp16"):
        bench.capture(update)


def test_spans_of_different_size_are_refused_by_name() -> None:
    bench, update = setup("RANGE_UPDATE_ADAMW", 64)
    bench.add_span(Region.M_FC_WEIGHT, np.zeros(32, np.float32))
    with pytest.raises(ShapeError, match="M_FC_WEIGHT has 128 bytes but W_FC_WEIGHT has 256"):
        bench.capture(update)
