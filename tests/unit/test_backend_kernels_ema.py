"""The moving average of the weights: E = d E + (1 - d) W over whole spans, guarded by the flag (law 5)."""

from __future__ import annotations

import numpy as np
import pytest
from backend_kernels_harness import Bench, node

from renaissance.core.dtype import DType
from renaissance.core.errors import ShapeError
from renaissance.core.region import Region
from renaissance.graph.computation_graph import Node

SIZES = (1, 7, 1025, 70_001)


def setup(n: int, threads: int = 1, flag: int = 0) -> tuple[Bench, Node]:
    rng, bench = np.random.default_rng(n), Bench(threads)
    scalars = bench.add("ema_decay", [0.999]), bench.add("has_nan", [flag], DType.INT32)
    w, e = (rng.normal(size=n).astype(np.float32) for _ in range(2))
    w[n // 2 :][:3], e[n // 2 :][:3] = 0.0, 0.0  # padding between two tensors
    spans = bench.add_span(Region.W_FC_WEIGHT, w), bench.add_span(Region.E_FC_WEIGHT, e)
    return bench, node("RANGE_EMA_UPDATE", scalars, (), spans[:1], spans[1:])


def test_average_is_the_formula_and_every_team_gives_its_bits() -> None:
    for n in SIZES:
        bench, update = setup(n)
        w, e = (bench.span_array(s, DType.FP32).astype(np.float64) for s in (*update.spans_in, *update.spans_out))
        d = float(np.float32(0.999))
        bench.run(update)
        got = bench.span_array(update.spans_out[0], DType.FP32)
        np.testing.assert_allclose(got, d * e + (1 - d) * w, rtol=3e-7, atol=1e-9)
        assert not got[n // 2 :][:3].any()
        for threads in (2, 3):
            other, same = setup(n, threads)
            other.run(same)
            assert other.all_bytes() == bench.all_bytes()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_flagged_step_leaves_no_trace(backend: str) -> None:
    bench, update = setup(40_000, threads=2, flag=1)
    bench.span_array(update.spans_in[0], DType.FP32)[5] = np.nan
    before = bench.all_bytes()
    bench.run(update, backend)
    assert bench.all_bytes() == before


def test_decay_is_read_at_every_replay_and_one_keeps_every_bit() -> None:
    bench, update = setup(1000)
    program = bench.capture(update)
    before = bench.span_array(update.spans_out[0], DType.FP32).copy()
    bench.get("ema_decay")[0] = 1.0
    program.launch()
    np.testing.assert_array_equal(bench.span_array(update.spans_out[0], DType.FP32), before)
    bench.get("ema_decay")[0] = 0.0
    program.launch()
    weights = bench.span_array(update.spans_in[0], DType.FP32)
    np.testing.assert_array_equal(bench.span_array(update.spans_out[0], DType.FP32), weights)


def test_spans_of_different_size_are_refused_by_name() -> None:
    bench, update = setup(10)
    longer = bench.add_span(Region.E_DEEP_CONV, np.zeros(11, np.float32))
    with pytest.raises(ShapeError, match="RANGE_EMA_UPDATE #7: span W_FC_WEIGHT has 40 bytes but E_DEEP_CONV has 44"):
        bench.capture(node(update.op, update.inputs, (), update.spans_in, (longer,)))
    with pytest.raises(ShapeError, match="RANGE_EMA_UPDATE #7: 1 scalars"):
        bench.capture(node(update.op, update.inputs[:1], (), update.spans_in, update.spans_out))
