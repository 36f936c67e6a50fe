"""Copies, clears, casts, flatten and ReLU."""

from __future__ import annotations

import numpy as np
import pytest
from backend_kernels_harness import REGISTRY, Bench, node

from renaissance.core.dtype import DType, bf16_from_fp32, fp32_from_bf16
from renaissance.core.errors import DTypeError, MissingKernelError, ShapeError
from renaissance.core.region import Region
from renaissance.core.shape import Shape
from renaissance.graph.ops import OPS
from renaissance.tensor.dtensor import DTensor

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
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("n", SIZES)
def test_relu_cuts_negatives_in_both_directions_and_passes_nan(backend: str, half: bool, n: int) -> None:
    dtype = DType.BF16 if half else DType.FP32
    x, dy = numbers(n), np.random.default_rng(1).normal(size=n).astype(np.float32)
    if half:
        x, dy = fp32_from_bf16(bf16_from_fp32(x)), fp32_from_bf16(bf16_from_fp32(dy))
    with np.errstate(invalid="ignore"):  # signalling NaN
        denormal = (x != 0) & (np.abs(x) < 1.2e-38)
    store = (lambda v: bf16_from_fp32(v)) if half else (lambda v: v)
    load = (lambda v: fp32_from_bf16(v)) if half else (lambda v: v)
    bench = Bench(threads=2)
    ids = {k: bench.add(k, store(v), dtype) for k, v in {"x": x, "y": 0 * dy, "dy": dy, "dx": 0 * dy}.items()}
    bench.run(node("RELU_FWD", (ids["x"],), (ids["y"],)), backend)
    bench.run(node("RELU_BWD", (ids["dy"], ids["y"]), (ids["dx"],)), backend)
    y, dx = load(bench.get("y")), load(bench.get("dx"))
    keep = ~denormal & ~np.isnan(x)  # the queue flushes denormals, NumPy does not
    np.testing.assert_array_equal(y[keep], np.where(x <= 0, 0, x)[keep])
    np.testing.assert_array_equal(dx[keep], np.where(x <= 0, 0, dy)[keep])
    assert np.isnan(y[np.isnan(x)]).all()


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
    with pytest.raises(DTypeError, match=r"RELU_FWD #7.*a FP32, b BF16"):
        bench.capture(node("RELU_FWD", (a,), (b,)))
    c = bench.add("c", np.ones(5))
    with pytest.raises(ShapeError, match=r"RELU_FWD #7.*'c'"):
        bench.capture(node("RELU_FWD", (a,), (c,)))
    spans = (bench.add_span(Region.W_FC_WEIGHT, np.ones(4)), bench.add_span(Region.E_FC_WEIGHT, np.ones(8)))
    with pytest.raises(ShapeError, match="RANGE_COPY #7"):
        bench.capture(node("RANGE_COPY", spans_in=spans[:1], spans_out=spans[1:]))


def test_fp16_cast_is_refused_by_name_at_capture() -> None:
    bench = Bench(half=DType.FP16)
    spans = (bench.add_span(Region.W_FC_WEIGHT, np.ones(4)), bench.add_span(Region.A_FC_WEIGHT, np.ones(4, np.uint16)))
    with pytest.raises(MissingKernelError, match=r"RANGE_CAST_FP32_TO_HALF #7.*fp16"):
        bench.capture(node("RANGE_CAST_FP32_TO_HALF", spans_in=spans[:1], spans_out=spans[1:]))


def test_every_op_of_the_table_has_a_kernel_or_belongs_to_the_products() -> None:
    products = {"FC_FWD", "FC_BWD_WEIGHT", "FC_BWD_DATA"}
    elsewhere = {"RANGE_MEAN_ALLREDUCE"}
    assert set(OPS) - elsewhere == set(REGISTRY.ops("cpu")) | products
    assert set(OPS) - elsewhere == set(REGISTRY.ops("reference"))


def test_flatten_drops_channel_padding_and_brings_it_back_as_zeros() -> None:
    """The padded layout of spec/framework 2.3: 5 channels in rows of 8."""
    bench = Bench()
    shape = Shape(2, 3, 3, 5)
    padded = DTensor.make(0, "padded", shape, DType.BF16, Region.F_FEATURE_FP16, backend="cuda")
    assert padded.padded_c == 8
    x = bench.adopt(padded)
    y = bench.add("y", np.zeros((2, 45)), DType.BF16)
    raw = bench.raw(x)[: padded.padded_bytes].view(np.uint16).reshape(2, 3, 3, 8)
    raw[...] = np.arange(raw.size).reshape(raw.shape)
    values = raw[..., :5].copy()
    bench.run(node("FLATTEN_FWD", (x,), (y,)))
    np.testing.assert_array_equal(bench.get("y"), values.reshape(-1))
    bench.run(node("FLATTEN_BWD", (y,), (x,)))
    np.testing.assert_array_equal(raw[..., :5], values)
    assert not raw[..., 5:].any()
    with pytest.raises(ShapeError, match=r"RELU_FWD #7.*'padded' has padded channels"):
        bench.capture(node("RELU_FWD", (x,), (y,)))
