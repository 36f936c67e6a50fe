"""Copies, clears, casts and flatten."""

from __future__ import annotations

import numpy as np
import pytest
from backend_kernels_harness import Bench, node

from renaissance.backend.registry import default_registry
from renaissance.core.dtype import DType, bf16_from_fp32, fp32_from_bf16
from renaissance.core.errors import DTypeError, MissingKernelError, ShapeError
from renaissance.core.region import Region
from renaissance.core.shape import Shape
from renaissance.graph.ops import OPS

BACKENDS = ("cpu", "reference")
SIZES = (1, 7, 4095, 4097, 100_000)
NAN_PATTERNS = np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000], np.uint32).view(np.float32)
"""Rounding as if they were numbers would turn the first into infinity and the next two into zeros."""
SPECIAL = np.r_[NAN_PATTERNS, np.float32([0.0, -0.0, 1e-40, -1e-40, 1.0, -1.0, np.inf, -np.inf, 3.4e38])]


def numbers(n: int) -> np.ndarray:
    values = np.random.default_rng(n).normal(size=n).astype(np.float32)
    values[: min(n, SPECIAL.size)] = SPECIAL[:n]
    return values  # assignments copy the NaN patterns bit by bit


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", SIZES)
def test_copy_and_clear_touch_every_byte(backend: str, n: int) -> None:
    values = numbers(n)
    bench = Bench(threads=2)
    source = bench.add_span(Region.W_FC_WEIGHT, values)
    target = bench.add_span(Region.E_FC_WEIGHT, np.full(n, 5, np.float32))
    bench.run(node("RANGE_COPY", spans_in=(source,), spans_out=(target,)), backend)
    assert bench.span_array(target, DType.UINT8).tobytes() == values.tobytes()
    bench.run(node("RANGE_CLEAR", spans_out=(target,)), backend)
    assert not bench.span_array(target, DType.UINT8).any()
    assert bench.span_array(source, DType.UINT8).tobytes() == values.tobytes()


@pytest.mark.parametrize("backend", BACKENDS)
def test_guarded_copy_is_made_only_by_a_step_that_counts(backend: str) -> None:
    """BN statistics go from NEXT to PREV only when the step is not skipped (law 5)."""
    for n in (5, 70_001):
        bench = Bench(threads=2)
        flag = bench.add("has_nan", [1], DType.INT32)
        source = bench.add_span(Region.B_NEXT_MEAN, numbers(n))
        target = bench.add_span(Region.B_PREV_MEAN, np.full(n, 5, np.float32))
        copy = node("RANGE_COPY", (flag,), (), (source,), (target,))
        before = bench.all_bytes()
        bench.run(copy, backend)
        assert bench.all_bytes() == before
        bench.get("has_nan")[0] = 0
        bench.run(copy, backend)
        assert bench.span_array(target, DType.UINT8).tobytes() == numbers(n).tobytes()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", SIZES)
def test_casts_round_to_nearest_even_and_stop_at_the_shorter_span(backend: str, n: int) -> None:
    values = numbers(n)
    bench = Bench(threads=2)
    full = bench.add_span(Region.W_FC_WEIGHT, values)
    half = bench.add_span(Region.A_FC_WEIGHT, np.full(n + 3, 9, np.uint16))
    bench.run(node("RANGE_CAST_FP32_TO_HALF", spans_in=(full,), spans_out=(half,)), backend)
    got = bench.span_array(half, DType.BF16)
    keep = ~np.isnan(values)
    expected = bf16_from_fp32(values)
    np.testing.assert_array_equal(got[:n][keep], expected[keep])
    assert np.isnan(fp32_from_bf16(got[:n][~keep])).all()
    assert (got[n:] == 9).all()
    bench.span_array(full, DType.FP32)[:] = 5
    bench.run(node("RANGE_CAST_HALF_TO_FP32", spans_in=(half,), spans_out=(full,)), backend)
    back = bench.span_array(full, DType.FP32)
    np.testing.assert_array_equal(back[keep], fp32_from_bf16(expected)[keep])


@pytest.mark.parametrize("backend", BACKENDS)
def test_label_copy(backend: str) -> None:
    bench = Bench()
    a, b = bench.add("a", [3, -1, 9], DType.INT32), bench.add("b", [0, 0, 0], DType.INT32)
    bench.run(node("LABEL_COPY", (a,), (b,)), backend)
    np.testing.assert_array_equal(bench.get("b"), [3, -1, 9])


@pytest.mark.parametrize("backend", BACKENDS)
def test_flatten_of_a_compact_tensor_and_back(backend: str) -> None:
    values = np.arange(2 * 3 * 3 * 5, dtype=np.float32)
    bench = Bench()
    x = bench.add("x", values, shape=Shape(2, 3, 3, 5))
    y = bench.add("y", 0 * values, shape=Shape(2, 1, 1, 45))
    bench.run(node("FLATTEN_FWD", (x,), (y,)), backend)
    np.testing.assert_array_equal(bench.get("y"), values)
    bench.get("x")[:] = 0
    bench.run(node("FLATTEN_BWD", (y,), (x,)), backend)
    np.testing.assert_array_equal(bench.get("x"), values)


def test_mixed_types_and_sizes_are_refused_by_name() -> None:
    bench = Bench()
    a, b = bench.add("a", np.ones(4)), bench.add("b", np.ones(4), DType.BF16)
    with pytest.raises(DTypeError, match=r"FLATTEN_FWD #7.*a FP32, b BF16"):
        bench.capture(node("FLATTEN_FWD", (a,), (b,)))
    c = bench.add("c", np.ones(5))
    with pytest.raises(ShapeError, match=r"FLATTEN_FWD #7.*'c'"):
        bench.capture(node("FLATTEN_FWD", (a,), (c,)))
    spans = (bench.add_span(Region.W_FC_WEIGHT, np.ones(4)), bench.add_span(Region.E_FC_WEIGHT, np.ones(8)))
    with pytest.raises(ShapeError, match="RANGE_COPY #7"):
        bench.capture(node("RANGE_COPY", spans_in=spans[:1], spans_out=spans[1:]))


def test_fp16_cast_is_refused_by_name_at_capture() -> None:
    bench = Bench(half=DType.FP16)
    spans = (bench.add_span(Region.W_FC_WEIGHT, np.ones(4)), bench.add_span(Region.A_FC_WEIGHT, np.ones(4, np.uint16)))
    with pytest.raises(MissingKernelError, match=r"RANGE_CAST_FP32_TO_HALF #7.*fp16"):
        bench.capture(node("RANGE_CAST_FP32_TO_HALF", spans_in=spans[:1], spans_out=spans[1:]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_op_of_the_table_has_a_kernel_and_every_kernel_an_op(backend: str) -> None:
    elsewhere = {"RANGE_MEAN_ALLREDUCE"}  # several ranks
    assert set(default_registry(backend).ops(backend)) == set(OPS) - elsewhere
