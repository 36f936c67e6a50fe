"""Activations and sums against the float64 reference; the formulas to the last places over the whole float32 range."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from backend_kernels_harness import Bench, node

from renaissance.backend.cpu.activations import KINDS, SAVES_INPUT
from renaissance.core.dtype import DType, bf16_from_fp32, fp32_from_bf16
from renaissance.core.shape import Shape

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
SIZES = (1, 7, 1025, 70_000)
FLUSHED = 2.4e-38


SIGMOID_ENDS = -87.0
"""Below it sigmoid is no normal number, and flushed; so is silu."""


def sigmoid(x: F64) -> F64:
    return np.where(x < SIGMOID_ENDS, 0.0, 1 / (1 + np.exp(-np.maximum(x, -100))))


GOLDEN: dict[str, Callable[[F64], F64]] = {
    "relu": lambda x: np.where(x <= 0, 0, x),
    "relu6": lambda x: np.where(x <= 0, 0, np.where(x >= 6, 6, x)),
    "leaky_relu": lambda x: np.where(x > 0, x, np.float64(np.float32(0.01)) * x),
    "hardswish": lambda x: np.where(x <= -3, 0, np.where(x >= 3, x, x * (x + 3) / 6)),
    "tanh": np.tanh,
    "sigmoid": sigmoid,
    "silu": lambda x: np.where(x < SIGMOID_ENDS, 0, np.maximum(x, SIGMOID_ENDS) * sigmoid(x)),
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
}


def dense() -> F32:
    """Every 2**14-th pattern of a normal float32, both signs, a fine grid around 0, and what is special."""
    bits = np.arange(0x00800000, 0x7F800001, 1 << 14, dtype=np.uint32)
    values = bits.view(np.float32)
    near = np.linspace(-20, 20, 50_001, dtype=np.float32)
    special = np.float32([0.0, -0.0, np.inf, -np.inf, np.nan, 3, -3, 6, -6, 127.9, 128.1, 86.9, 87.1, 88.0, 88.8, 89.0])
    return np.concatenate([values, -values, near, special, -special])


def run(op: str, values: list[F32], dtype: DType, backend: str, threads: int = 2, **attrs: str) -> F32:
    bench = Bench(threads)
    store = bf16_from_fp32 if dtype is DType.BF16 else (lambda v: v)
    ids = [bench.add(f"in{k}", store(v), dtype, Shape(v.size)) for k, v in enumerate(values)]
    out = bench.add("out", store(values[0]), dtype, Shape(values[0].size))
    bench.run(node(op, tuple(ids), (out,), **attrs), backend)
    got = bench.get("out")
    return fp32_from_bf16(got) if dtype is DType.BF16 else got.copy()


def exact(v: F32, dtype: DType) -> F32:
    return fp32_from_bf16(bf16_from_fp32(v)) if dtype is DType.BF16 else v


def places(got: F32, golden: F64) -> F64:
    """Distance in units of the last place of ``golden``; numbers that a program flushes count as 0."""
    with np.errstate(invalid="ignore"):
        size = np.where(np.isfinite(golden), np.abs(golden), 1.0)
        unit = np.exp2(np.floor(np.log2(np.maximum(size, FLUSHED))) - 23)
        same = (got == golden) | (np.isnan(got) & np.isnan(golden)) | ((size < FLUSHED) & (np.abs(got) < FLUSHED))
        return np.where(same, 0.0, np.abs(got - golden) / unit)


def test_activations_are_within_a_few_units_of_the_last_place_from_end_to_end() -> None:
    x = dense()
    for kind in KINDS:
        with np.errstate(invalid="ignore"):
            golden = GOLDEN[kind](x.astype(np.float64))
        got = run("ACT_FWD", [x], DType.FP32, "cpu", kind=kind)
        off = places(got, golden)
        assert off.max() <= 2.5, f"{kind}({x[off.argmax()]}) is {got[off.argmax()]}, not {golden[off.argmax()]}"


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
def test_every_op_agrees_with_float64_for_all_sizes_and_teams(dtype: DType) -> None:
    rng = np.random.default_rng(3)
    tolerance = 2.0**-7 if dtype is DType.BF16 else 1e-6
    forms = [("ACT_FWD", {"kind": k}) for k in KINDS] + [("ACT_BWD", {"kind": k}) for k in KINDS]
    forms += [("ADD_FWD", {"activation": a}) for a in ("none", "relu")] + [("GRAD_SUM", {})]
    for (op, attrs), n in itertools.product(forms, SIZES):
        values = [exact(rng.normal(0, 3, n).astype(np.float32), dtype) for _ in range(2)]
        values[0][n // 2] = np.nan
        if op == "ACT_BWD" and attrs["kind"] not in SAVES_INPUT:
            values[1] = run("ACT_FWD", values[1:], dtype, "reference", **attrs)
        inputs = values[:1] if op == "ACT_FWD" else values
        got = [run(op, inputs, dtype, "cpu", threads, **attrs) for threads in (1, 2, 3)]
        golden = run(op, inputs, dtype, "reference", **attrs)
        np.testing.assert_allclose(got[0], golden, rtol=tolerance, atol=tolerance, err_msg=f"{op} {attrs} {n}")
        assert got[0].tobytes() == got[1].tobytes() == got[2].tobytes(), f"{op} {attrs} {n}"


def test_sums_are_rounded_once_to_nearest_even() -> None:
    rng = np.random.default_rng(4)
    a, b = (
        exact((rng.normal(0, 1, 50_000) * 2.0 ** rng.integers(-12, 12, 50_000)).astype(np.float32), DType.BF16)
        for _ in range(2)
    )
    got = run("GRAD_SUM", [a, b], DType.BF16, "cpu")
    np.testing.assert_array_equal(got, exact(a + b, DType.BF16))
    got = run("ADD_FWD", [a, b], DType.BF16, "cpu", activation="relu")
    np.testing.assert_array_equal(got, exact(np.maximum(a + b, 0), DType.BF16))


def test_the_far_ends_of_the_derivatives_are_finite() -> None:
    x = np.float32([-np.inf, -1e30, -200, 200, 1e30, np.inf])
    ones = np.ones_like(x)
    for kind in SAVES_INPUT:
        np.testing.assert_array_equal(run("ACT_BWD", [ones, x], DType.FP32, "cpu", kind=kind), [0, 0, 0, 1, 1, 1])
