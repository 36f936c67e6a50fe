"""The FC products of the CPU backend against float64, for awkward sizes, in fp32 and bf16."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from backend_kernels_harness import Bench, node

from renaissance.backend.cpu import products
from renaissance.backend.cpu.intrinsics import FLUSH_DENORMALS, keep_denormals, restore_denormals
from renaissance.backend.cpu.onednn import onednn
from renaissance.backend.cpu.queue import NativeQueue
from renaissance.backend.cpu.threads import configure
from renaissance.backend.registry import NativeCall, OpRegistry
from renaissance.core.dtype import DType, bf16_from_fp32, fp32_from_bf16
from renaissance.core.errors import DTypeError, MissingKernelError, ShapeError
from renaissance.core.shape import Shape
from renaissance.graph import Node

REGISTRY = OpRegistry()
products.register(REGISTRY)

SIZES = [(1, 1, 1), (1, 5, 3), (3, 1, 7), (2, 7, 1), (5, 33, 17), (13, 129, 65), (200, 256, 10), (64, 300, 260)]
"""(batch, inputs, outputs)"""
HALF_EPS, FLOAT_EPS = 2.0**-8, 2.0**-23
Array = npt.NDArray[Any]


def store(values: Array, dtype: DType) -> Array:
    return bf16_from_fp32(values) if dtype is DType.BF16 else values


def load(stored: Array, dtype: DType) -> npt.NDArray[np.float64]:
    return (fp32_from_bf16(stored) if dtype is DType.BF16 else stored).astype(np.float64)


class Fc:
    """One layer's operands in a bench, with their exact values as float64."""

    def __init__(self, n: int, i: int, o: int, dtype: DType, threads: int = 2) -> None:
        configure(threads)
        rng = np.random.default_rng((n, i, o))
        self.bench, self.dtype, self.size = Bench(threads=threads), dtype, (n, i, o)
        self.ids: dict[str, int] = {}
        self.exact: dict[str, npt.NDArray[np.float64]] = {}
        shapes = {"x": (n, i), "w": (o, i), "dy": (n, o), "y_prev": (n, i)}
        for name, shape in shapes.items():
            self._add(name, rng.standard_normal(shape).astype(np.float32), dtype)
        self._add("b", rng.standard_normal(o).astype(np.float32), DType.FP32, Shape.of(o))
        for name, shape in {"y": (n, o), "dx": (n, i)}.items():
            self._add(name, np.full(shape, 3e30, np.float32), dtype)
        self._add("dw", np.full((o, i), 3e30, np.float32), DType.FP32)
        self._add("db", np.full(o, 3e30, np.float32), DType.FP32, Shape.of(o))

    def _add(self, name: str, values: Array, dtype: DType, shape: Shape | None = None) -> None:
        stored = store(values, dtype)
        self.ids[name] = self.bench.add(name, stored, dtype, shape)
        self.exact[name] = load(stored, dtype)

    def node(self, op: str, inputs: str, outputs: str, **attrs: str) -> Node:
        return node(op, *(tuple(self.ids[k] for k in names.split()) for names in (inputs, outputs)), **attrs)

    def run(self, op: str, inputs: str, outputs: str, **attrs: str) -> NativeQueue:
        calls = REGISTRY.launcher(op, "cpu")(self.node(op, inputs, outputs, **attrs), self.bench)
        queue = NativeQueue([c for c in calls if isinstance(c, NativeCall)])
        queue.launch()
        return queue

    def get(self, name: str, dtype: DType | None = None) -> npt.NDArray[np.float64]:
        dtype = self.dtype if dtype is None else dtype
        flat = load(self.bench.get(name), dtype)
        return flat.reshape(self.exact[name].shape)


def check(got: Array, want: Array, magnitude: Array, terms: int, rounding: float) -> None:
    """``got`` within the error of fp32 accumulation of ``terms`` terms, plus one rounding of the result."""
    allowed = (terms + 4) * FLOAT_EPS * magnitude + rounding * np.abs(want) + 1e-37
    worst = np.max(np.abs(got - want) / allowed)
    assert worst <= 1, f"error is {worst:.2f} of what is allowed"


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("activation", ["none", "relu"])
def test_forward_equals_float64(size: tuple[int, int, int], dtype: DType, activation: str) -> None:
    fc = Fc(*size, dtype)
    fc.run("FC_FWD", "x w b", "y", activation=activation)
    x, w, b = (fc.exact[k] for k in "xwb")
    want = x @ w.T + b
    if activation == "relu":
        want = np.maximum(want, 0)
    rounding = HALF_EPS if dtype is DType.BF16 else FLOAT_EPS
    check(fc.get("y"), want, np.abs(x) @ np.abs(w).T + np.abs(b), size[1], rounding)


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
@pytest.mark.parametrize("size", SIZES)
def test_weight_gradient_equals_float64_and_is_fp32(size: tuple[int, int, int], dtype: DType) -> None:
    fc = Fc(*size, dtype)
    fc.run("FC_BWD_WEIGHT", "dy x", "dw db")
    dy, x = fc.exact["dy"], fc.exact["x"]
    check(fc.get("dw", DType.FP32), dy.T @ x, np.abs(dy).T @ np.abs(x), size[0], FLOAT_EPS)
    check(fc.get("db", DType.FP32), dy.sum(0), np.abs(dy).sum(0), size[0], FLOAT_EPS)


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mask", ["none", "relu"])
def test_input_gradient_equals_float64(size: tuple[int, int, int], dtype: DType, mask: str) -> None:
    fc = Fc(*size, dtype)
    fc.run("FC_BWD_DATA", "dy w y_prev" if mask == "relu" else "dy w", "dx", mask=mask)
    dy, w = fc.exact["dy"], fc.exact["w"]
    keep = np.where(fc.exact["y_prev"] > 0, 1.0, 0.0) if mask == "relu" else np.ones_like(fc.exact["y_prev"])
    rounding = HALF_EPS if dtype is DType.BF16 else FLOAT_EPS
    check(fc.get("dx"), (dy @ w) * keep, np.abs(dy) @ np.abs(w), size[2], rounding)
    assert not fc.get("dx")[keep == 0].any()


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
def test_the_mask_cuts_zeros_of_both_signs_and_passes_the_smallest_number_and_nan(dtype: DType) -> None:
    fc = Fc(2, 4, 3, dtype)
    values = np.array([0.0, -0.0, np.finfo(np.float32).tiny, -1.0, np.inf, -np.inf, 1.0, np.nan], np.float32)
    fc.bench.get("y_prev")[:] = store(values, dtype)
    fc.run("FC_BWD_DATA", "dy w y_prev", "dx", mask="relu")
    assert (fc.get("dx").reshape(-1) != 0).tolist() == [False, False, True, False, True, False, True, True]


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
@pytest.mark.parametrize("flushing", [False, True])
@pytest.mark.parametrize("size", [(2, 5, 3), (17, 40, 70)])
def test_fused_relu_lets_nan_through(size: tuple[int, int, int], dtype: DType, flushing: bool) -> None:
    """Law 5: a NaN that the ReLU turned into 0 would never reach the NaN check. Also when the capturing thread flushes
    denormals, as after torch.set_flush_denormal(True)."""
    fc = Fc(*size, dtype)
    w = fc.bench.array(fc.ids["w"]).reshape(size[2], size[1])
    w[0, 0] = store(np.full(1, np.nan, np.float32), dtype)[0]
    w[1, 0] = store(np.full(1, np.inf, np.float32), dtype)[0]
    control = keep_denormals()
    restore_denormals(control | FLUSH_DENORMALS if flushing else control)
    try:
        fc.run("FC_FWD", "x w b", "y", activation="relu")
    finally:
        restore_denormals(control)
    y = fc.get("y")
    assert np.isnan(y[:, 0]).all()
    positive = fc.exact["x"][:, 0] > 0
    assert (y[positive, 1] == np.inf).all()
    assert np.isnan(y[~positive, 1]).all(), "-Inf must be seen too"
    x, rest, b = fc.exact["x"], fc.exact["w"][2:], fc.exact["b"][2:]
    assert (y[:, 2:][x @ rest.T + b < -1e-2] == 0).all()


def test_forward_without_bias_and_with_image_input() -> None:
    fc = Fc(4, 12, 5, DType.FP32)
    image = fc.bench.add("image", fc.exact["x"].reshape(4, 2, 3, 2), shape=Shape(4, 2, 3, 2))
    fc.ids["image"] = image
    fc.run("FC_FWD", "image w", "y", activation="none")
    np.testing.assert_allclose(fc.get("y"), fc.exact["x"] @ fc.exact["w"].T, rtol=1e-5, atol=1e-5)


def test_weight_gradient_without_bias_gradient() -> None:
    fc = Fc(4, 12, 5, DType.FP32)
    fc.run("FC_BWD_WEIGHT", "dy x", "dw")
    np.testing.assert_allclose(fc.get("dw"), fc.exact["dy"].T @ fc.exact["x"], rtol=1e-5, atol=1e-5)
    assert (fc.get("db") == np.float32(3e30)).all(), "nothing else is written"


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
@pytest.mark.parametrize("threads", [1, 2])
def test_products_are_repeatable_bit_for_bit(dtype: DType, threads: int) -> None:
    results = []
    for _ in range(2):
        fc = Fc(64, 300, 260, dtype, threads)
        fc.run("FC_FWD", "x w b", "y", activation="relu")
        fc.run("FC_BWD_WEIGHT", "dy x", "dw db")
        fc.run("FC_BWD_DATA", "dy w y_prev", "dx", mask="relu")
        results.append([fc.bench.get(k).tobytes() for k in ("y", "dw", "db", "dx")])
    assert results[0] == results[1]


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
def test_bias_gradient_and_mask_do_not_depend_on_the_team(dtype: DType) -> None:
    results = []
    for threads in (1, 2, 3):
        fc = Fc(260, 130, 300, dtype, threads)
        fc.run("FC_BWD_WEIGHT", "dy x", "dw db")
        results.append(fc.bench.get("db").tobytes())
    assert results[0] == results[1] == results[2]


def test_wrong_operands_are_named() -> None:
    fc = Fc(4, 12, 5, DType.FP32)
    with pytest.raises(ShapeError, match=r"FC_FWD #7.*'w' is \[5,1,1,12\]; expected \[5,1,1,5\]"):
        fc.run("FC_FWD", "y w", "y", activation="none")
    with pytest.raises(ShapeError, match=r"FC_BWD_DATA #7.*'y_prev'|FC_BWD_DATA #7.*'dy'"):
        fc.run("FC_BWD_DATA", "dy w dy", "dx", mask="relu")
    fc.ids["label"] = fc.bench.add("label", np.zeros((4, 12)), DType.INT32)
    with pytest.raises(DTypeError, match="FC_FWD #7: tensor 'label' is INT32"):
        fc.run("FC_FWD", "label w", "y", activation="none")
    fc.ids["h"] = fc.bench.add("h", np.zeros((4, 12)), DType.FP16)
    with pytest.raises(MissingKernelError, match="fp16"):
        fc.run("FC_FWD", "h w", "y", activation="none")


@pytest.mark.parametrize("size", SIZES)
def test_bf16_runs_on_a_cpu_without_bf16_products(size: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands are widened to fp32, which is exact, and the result is rounded once."""
    want = run_all(Fc(*size, DType.BF16))
    monkeypatch.setattr(products, "half_products", lambda dnn: False)
    got = run_all(Fc(*size, DType.BF16))
    for name in ("y", "dx", "dw", "db"):
        np.testing.assert_allclose(got[name], want[name], rtol=2 * HALF_EPS, atol=1e-3, err_msg=name)
    assert (got["db"] == want["db"]).all()


def run_all(fc: Fc) -> dict[str, npt.NDArray[np.float64]]:
    fc.run("FC_FWD", "x w b", "y", activation="relu")
    fc.run("FC_BWD_WEIGHT", "dy x", "dw db")
    fc.run("FC_BWD_DATA", "dy w y_prev", "dx", mask="relu")
    return {k: fc.get(k, DType.FP32 if k in ("dw", "db") else None) for k in ("y", "dw", "db", "dx")}


def test_large_products_never_run_on_the_slow_fallback() -> None:
    """oneDNN answers some layouts with a scalar loop a thousand times slower; none of ours may be one."""
    dnn = onednn()
    for dtype in (DType.FP32, DType.BF16) if products.half_products(dnn) else (DType.FP32,):
        for n, i, o in ((200, 784, 1024), (200, 1024, 512), (200, 256, 10), (37, 101, 53)):
            x, y = dnn.desc((n, i), dtype), dnn.desc((n, o), dtype)
            made = [
                dnn.matmul(x, dnn.desc((i, o), dtype, (1, i)), dnn.desc((1, o), DType.FP32), y, relu=True),
                dnn.matmul(dnn.desc((o, n), dtype, (1, o)), x, None, dnn.desc((o, i), DType.FP32)),
                dnn.matmul(y, dnn.desc((o, i), dtype), None, x),
            ]
            assert not [p.implementation for p in made if p.implementation.startswith("ref")]
