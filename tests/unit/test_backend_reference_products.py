"""The reference's products against plain loops, and its gradients against finite differences."""

from __future__ import annotations

import numpy as np
import pytest
from backend_kernels_harness import Bench, node

from renaissance.core.dtype import DType, bf16_from_fp32, fp32_from_bf16
from renaissance.core.shape import Shape

RNG = np.random.default_rng(11)
N, IN, OUT = 5, 12, 4
X, W, B = RNG.normal(size=(N, IN)), RNG.normal(size=(OUT, IN)), RNG.normal(size=OUT)


def test_forward_is_the_sum_of_products_plus_bias() -> None:
    bench = Bench()
    x = bench.add("x", X.reshape(N, 2, 3, 2).astype(np.float32), shape=Shape(N, 2, 3, 2))
    w, b, y = bench.add("w", W), bench.add("b", B), bench.add("y", np.zeros((N, OUT)))
    for activation in ("none", "relu"):
        bench.run(node("FC_FWD", (x, w, b), (y,), activation=activation), "reference")
        for i in range(N):
            for j in range(OUT):
                value = sum(float(np.float32(X[i, k])) * float(np.float32(W[j, k])) for k in range(IN)) + B[j]
                value = max(value, 0.0) if activation == "relu" else value
                assert bench.array(y)[i, 0, 0, j] == pytest.approx(value, rel=1e-6, abs=1e-6)
    bench.run(node("FC_FWD", (x, w), (y,), activation="none"), "reference")
    np.testing.assert_allclose(bench.array(y).reshape(N, OUT), X @ W.T, rtol=1e-5, atol=1e-6)


def test_backward_is_the_derivative_of_forward() -> None:
    """d(sum(dy * fc(x))) by central differences in every weight, bias and input."""
    dy = RNG.normal(size=(N, OUT))
    bench = Bench()
    ids = {k: bench.add(k, v) for k, v in {"x": X, "w": W, "dy": dy}.items()}
    outs = {k: bench.add(k, np.zeros(s)) for k, s in {"dw": (OUT, IN), "db": OUT, "dx": (N, IN)}.items()}
    bench.run(node("FC_BWD_WEIGHT", (ids["dy"], ids["x"]), (outs["dw"], outs["db"])), "reference")
    bench.run(node("FC_BWD_DATA", (ids["dy"], ids["w"]), (outs["dx"],), mask="none"), "reference")

    def loss(x: np.ndarray, w: np.ndarray, b: np.ndarray) -> float:
        return float((dy * (x @ w.T + b)).sum())

    for name, base in (("dx", (X, W, B)), ("dw", (X, W, B)), ("db", (X, W, B))):
        which = ("dx", "dw", "db").index(name)
        got = bench.get(name)
        for flat in range(base[which].size):
            moved = []
            for sign in (1e-4, -1e-4):
                arrays = [a.copy() for a in base]
                arrays[which].reshape(-1)[flat] += sign
                moved.append(loss(*arrays))
            assert got[flat] == pytest.approx((moved[0] - moved[1]) / 2e-4, rel=1e-5, abs=1e-5)


def test_masked_backward_zeroes_what_relu_cut_off() -> None:
    dy, y = RNG.normal(size=(N, OUT)), RNG.normal(size=(N, IN))
    bench = Bench()
    ids = [bench.add(k, v) for k, v in {"dy": dy, "w": W, "y": y}.items()]
    dx = bench.add("dx", np.ones((N, IN)))
    bench.run(node("FC_BWD_DATA", tuple(ids), (dx,), mask="relu"), "reference")
    np.testing.assert_allclose(bench.array(dx).reshape(N, IN), np.where(y > 0, dy @ W, 0), rtol=1e-5, atol=1e-6)


def test_half_storage_is_rounded_once() -> None:
    bench = Bench()
    x, w = bench.add("x", bf16_from_fp32(X), DType.BF16), bench.add("w", bf16_from_fp32(W), DType.BF16)
    y = bench.add("y", np.zeros((N, OUT)), DType.BF16)
    bench.run(node("FC_FWD", (x, w), (y,), activation="none"), "reference")
    exact = (
        fp32_from_bf16(bf16_from_fp32(X)).astype(np.float64) @ fp32_from_bf16(bf16_from_fp32(W)).astype(np.float64).T
    )
    np.testing.assert_array_equal(bench.array(y).reshape(N, OUT), bf16_from_fp32(exact.astype(np.float32)))
