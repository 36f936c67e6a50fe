"""Batch normalisation against the float64 reference, over sizes, types, fused parts and team sizes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from backend_kernels_harness import Bench, node

from renaissance.core.dtype import DType, bf16_from_fp32, fp32_from_bf16
from renaissance.core.shape import Shape

F32 = npt.NDArray[np.float32]
SIZES = (
    (1, 1, 1, 1),
    (3, 1, 1, 5),
    (2, 5, 3, 1),
    (4, 3, 5, 3),
    (5, 2, 2, 8),
    (7, 9, 5, 24),
    (3, 2, 1, 1031),
    (5, 24, 25, 19),
)
ACTIVATIONS = ("none", "relu", "relu6")
MOMENTUM, EPS = 0.1, 1e-5
TOLERANCE = {DType.FP32: 3e-6, DType.BF16: 2.0**-7}
"""Of the largest value: float32 arithmetic, or one unit in bfloat16's last place."""


def stored(values: F32, dtype: DType) -> npt.NDArray[Any]:
    return bf16_from_fp32(values) if dtype is DType.BF16 else values


def loaded(values: npt.NDArray[Any], dtype: DType) -> npt.NDArray[np.float64]:
    return (fp32_from_bf16(values) if dtype is DType.BF16 else values).astype(np.float64)


FEATURES = ("x", "residual", "dy", "dy2", "y", "dx", "dresidual")


@dataclass
class Norm:
    """One BN_FWD and the BN_BWD of it, with everything around them."""

    dims: tuple[int, int, int, int]
    dtype: DType = DType.FP32
    activation: str = "none"
    residual: bool = False
    dys: int = 1
    valid: int = -1
    threads: int = 1
    mean: float = 0.5
    bench: Bench = field(init=False)

    def __post_init__(self) -> None:
        self.bench = bench = Bench(self.threads)
        rng = np.random.default_rng(sum(self.dims))
        shape, vector = Shape(*self.dims), Shape(1, 1, 1, self.dims[3])
        normal = lambda s, centre=0.0: rng.normal(centre, 1, s).astype(np.float32)  # noqa: E731
        for name in FEATURES:
            values = normal(self.dims, self.mean if name == "x" else 0.0)
            bench.add(name, stored(values, self.dtype), self.dtype, shape)
        for name in (
            "gamma",
            "beta",
            "prev_mean",
            "prev_var",
            "mean",
            "inv_std",
            "next_mean",
            "next_var",
            "dgamma",
            "dbeta",
        ):
            bench.add(name, np.abs(normal(self.dims[3])) + 0.1, shape=vector)
        bench.add("valid", [self.dims[0] if self.valid < 0 else self.valid], DType.INT32)

    def forward(self) -> Any:
        n = self.bench.names
        inputs = ["x", "gamma", "beta", "prev_mean", "prev_var", "valid", *(["residual"] if self.residual else [])]
        outputs = ["y", "mean", "inv_std", "next_mean", "next_var"]
        return node(
            "BN_FWD",
            tuple(n[k] for k in inputs),
            tuple(n[k] for k in outputs),
            momentum=MOMENTUM,
            eps=EPS,
            activation=self.activation,
        )

    def backward(self) -> Any:
        n = self.bench.names
        inputs = ["dy", "x", "gamma", "mean", "inv_std", "valid"]
        inputs += ["y"] if self.activation != "none" else []
        inputs += ["dy2"] if self.dys == 2 else []
        outputs = ["dx", "dgamma", "dbeta", *(["dresidual"] if self.residual else [])]
        return node(
            "BN_BWD",
            tuple(n[k] for k in inputs),
            tuple(n[k] for k in outputs),
            activation=self.activation,
            dys=self.dys,
            residual=self.residual,
        )

    def run(self, backend: str = "cpu") -> None:
        self.bench.run(self.forward(), backend)
        self.bench.run(self.backward(), backend)

    def result(self, name: str) -> npt.NDArray[np.float64]:
        return loaded(self.bench.get(name), self.dtype if name in FEATURES else DType.FP32)


FORWARD, BACKWARD = ("y", "mean", "inv_std", "next_mean", "next_var"), ("dx", "dgamma", "dbeta", "dresidual")


def agree(ours: Norm, golden: Norm, names: tuple[str, ...]) -> None:
    for name in names:
        a, b = ours.result(name), golden.result(name)
        size = max(np.abs(b).max(), 1.0)
        if name == "dx":  # gradients of one size cancel
            largest = np.abs(ours.result("dy")).max() + (ours.dys - 1) * np.abs(ours.result("dy2")).max()
            size = max(size, np.abs(ours.result("gamma") * ours.result("inv_std")).max() * largest)
        if name in ("dgamma", "dbeta"):  # sums over as many elements
            size *= np.sqrt(np.prod(ours.dims[:3]))
        if name == "inv_std":
            size = np.abs(b)
        tolerance = TOLERANCE[ours.dtype if name in FEATURES else DType.FP32]
        assert (np.abs(a - b) <= tolerance * size).all(), f"{name} of {ours}"


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
def test_every_form_agrees_with_float64(dtype: DType) -> None:
    for dims, activation, residual, dys in itertools.product(SIZES, ACTIVATIONS, (False, True), (1, 2)):
        for valid in {dims[0], max(dims[0] - 2, 1)}:
            ours, golden = (Norm(dims, dtype, activation, residual, dys, valid, threads=2) for _ in range(2))
            golden.bench.run(golden.forward(), "reference")
            ours.bench.run(ours.forward())
            agree(ours, golden, FORWARD)
            for name in ("y", "mean", "inv_std"):  # a value that rounds to the other side of 0 is no error of dx
                golden.bench.get(name)[:] = ours.bench.get(name)
            golden.bench.run(golden.backward(), "reference")
            ours.bench.run(ours.backward())
            agree(ours, golden, BACKWARD if residual else BACKWARD[:-1])
