"""Batch normalisation against the float64 reference, over sizes, types, fused parts and team sizes."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from backend_kernels_harness import REGISTRY, Bench, node
from numba.core.runtime import _nrt_python, rtsys

from renaissance.backend.registry import NativeCall
from renaissance.core.dtype import DType, bf16_from_fp32, fp32_from_bf16
from renaissance.core.errors import DTypeError, ShapeError
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
    for k, (dims, activation, residual) in enumerate(itertools.product(SIZES, ACTIVATIONS, (False, True))):
        for dys in (1, 2):
            valid = max(dims[0] - 2, 1) if k % 2 == dys - 1 else dims[0]
            ours, golden = (Norm(dims, dtype, activation, residual, dys, valid, threads=2) for _ in range(2))
            golden.bench.run(golden.forward(), "reference")
            ours.bench.run(ours.forward())
            agree(ours, golden, FORWARD)
            for name in ("y", "mean", "inv_std"):  # a value that rounds to the other side of 0 is no error of dx
                golden.bench.get(name)[:] = ours.bench.get(name)
            golden.bench.run(golden.backward(), "reference")
            ours.bench.run(ours.backward())
            agree(ours, golden, BACKWARD if residual else BACKWARD[:-1])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_inference_folds_the_running_statistics(backend: str) -> None:
    rng = np.random.default_rng(2)
    dims = (3, 4, 5, 7)
    for dtype, activation, residual in itertools.product(TOLERANCE, ACTIVATIONS, (False, True)):
        bench, vector = Bench(2), Shape(1, 1, 1, dims[3])
        x, other = (rng.normal(0, 3, dims).astype(np.float32) for _ in range(2))
        ids = [bench.add(k, stored(v, dtype), dtype, Shape(*dims)) for k, v in {"x": x, "other": other, "y": x}.items()]
        gamma, beta, mean, var = (rng.uniform(0.1, 2, dims[3]).astype(np.float32) for _ in range(4))
        given = [bench.add(f"p{k}", v, shape=vector) for k, v in enumerate((gamma, beta, mean, var))]
        scale, bias = (bench.add(k, beta, shape=vector) for k in ("scale", "bias"))
        bench.run(node("BN_UPDATE_EQ_PARAMS", tuple(given), (scale, bias), eps=EPS), backend)
        inputs = (ids[0], scale, bias, *ids[1 : 1 + residual])
        bench.run(node("BN_INF", inputs, (ids[2],), activation=activation), backend)
        golden = (loaded(stored(x, dtype), dtype) - mean) / np.sqrt(var.astype(np.float64) + EPS) * gamma + beta
        golden += loaded(stored(other, dtype), dtype) if residual else 0.0
        if activation != "none":
            golden = np.clip(golden, 0, 6 if activation == "relu6" else None)
        got = loaded(bench.get("y"), dtype).reshape(dims)
        np.testing.assert_allclose(got, golden, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize(("mean", "odd"), [(1000.0, 0.0), (0.0, 50.0)])
def test_variance_keeps_its_digits_far_from_zero_and_after_odd_first_samples(mean: float, odd: float) -> None:
    """Sums of squares would lose six of seven digits; so would a shift by a first row that is no typical one."""
    ours = Norm((4, 32, 32, 24), mean=mean)
    x = ours.bench.get("x")
    x[: 8 * 24] += np.float32(odd)
    ours.bench.run(ours.forward())
    rows = x.reshape(-1, 24).astype(np.float64)
    np.testing.assert_allclose(ours.result("mean"), rows.mean(axis=0), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(ours.result("inv_std"), 1 / np.sqrt(rows.var(axis=0) + EPS), rtol=2e-6)
    running = (1 - MOMENTUM) * ours.result("prev_var") + MOMENTUM * rows.var(axis=0, ddof=1)
    np.testing.assert_allclose(ours.result("next_var"), running, rtol=2e-6)


def test_a_constant_channel_has_no_variance() -> None:
    ours = Norm((3, 20, 20, 6))
    ours.bench.get("x")[:] = 1000.1
    ours.bench.run(ours.forward())
    np.testing.assert_allclose(ours.result("inv_std"), 1 / np.sqrt(EPS), rtol=1e-6)
    np.testing.assert_allclose(ours.result("y").reshape(-1, 6), np.tile(ours.result("beta"), (1200, 1)), atol=1e-6)


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
def test_every_team_gives_the_same_bits(dtype: DType) -> None:
    """Law 2. Chunks are cut by size; the second shape has so many channels that a team adds up its partial results."""
    for dims, valid in (((15, 24, 25, 19), 14), ((12, 3, 3, 1031), 12)):
        bits = set()
        for threads in (1, 2, 3, 2, 3):
            ours = Norm(dims, dtype, "relu", residual=True, dys=2, valid=valid, threads=threads)
            ours.run()
            bits.add(ours.bench.all_bytes())
        assert len(bits) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
def test_a_bad_number_reaches_the_running_statistics_of_its_channel_only(dtype: DType, bad: float) -> None:
    """Law 5: the NaN check sees it there, and nothing else that persists is touched."""
    clean, ours = (Norm((4, 3, 3, 8), dtype, "relu6", valid=3) for _ in range(2))
    ours.bench.get("x")[9 * 8 + 5] = stored(np.float32([bad]), dtype)[0]
    kept = [ours.result(k).copy() for k in ("prev_mean", "prev_var", "gamma", "beta")]
    for norm in (clean, ours):
        norm.bench.run(norm.forward())
    for name in FORWARD:
        got, golden = (n.result(name).reshape(-1, 8) for n in (ours, clean))
        rows = 27 if name == "y" else 1  # the last sample does not count
        assert np.isnan(got[:rows, 5]).all(), name
        others = np.delete(got, 5, axis=1)
        np.testing.assert_array_equal(others, np.delete(golden, 5, axis=1))
    for name, before in zip(("prev_mean", "prev_var", "gamma", "beta"), kept, strict=True):
        np.testing.assert_array_equal(ours.result(name), before)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_without_a_valid_sample_the_statistics_stay_and_all_rows_are_zero(backend: str) -> None:
    ours = Norm((2, 3, 3, 5), activation="relu", residual=True, valid=0)
    ours.run(backend)
    for name in ("y", "dx", "dresidual", "dgamma", "dbeta"):
        assert not ours.result(name).any(), name
    for name in ("mean", "var"):
        np.testing.assert_array_equal(ours.result(f"next_{name}"), ours.result(f"prev_{name}"))


def test_a_step_allocates_nothing() -> None:
    """Law 3: the kernels are called as the queue calls them, but without the queue around them."""
    ours = Norm((5, 24, 25, 19), DType.BF16, "relu", residual=True)
    run = ctypes.CFUNCTYPE(None, ctypes.c_int64)
    nodes = (ours.forward(), ours.backward())
    calls = [c for n in nodes for c in REGISTRY.launcher(n.op, "cpu")(n, ours.bench) if isinstance(c, NativeCall)]
    kernels = [(run(c.fn), c.args[0]) for c in calls]
    _nrt_python.memsys_enable_stats()
    blocks = int(rtsys.get_allocation_stats().alloc)
    for kernel, context in kernels * 3:
        kernel(context)
    assert int(rtsys.get_allocation_stats().alloc) == blocks


def test_operands_that_do_not_fit_are_refused_by_name() -> None:
    ours = Norm((2, 3, 3, 4))
    odd = ours.bench.add("odd", np.ones(5))
    half = ours.bench.add("half", np.zeros(72), DType.BF16, Shape(2, 3, 3, 4))
    forward = ours.forward()
    with pytest.raises(ShapeError, match=r"BN_FWD #7.*'odd'"):
        ours.bench.capture(replace(forward, inputs=(forward.inputs[0], odd, *forward.inputs[2:])))
    with pytest.raises(DTypeError, match=r"BN_FWD #7.*half BF16"):
        ours.bench.capture(replace(forward, outputs=(half, *forward.outputs[1:])))
    backward = ours.backward()
    with pytest.raises(ShapeError, match=r"BN_BWD #7.*'odd'"):
        ours.bench.capture(replace(backward, outputs=(odd, *backward.outputs[1:])))
