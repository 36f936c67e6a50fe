"""Channel padding, shifted and mirrored views, and the mean of logits: exactly what the reference gives."""

from __future__ import annotations

import numpy as np
import pytest
from backend_kernels_harness import Bench, node

from renaissance.core.dtype import DType, bf16_from_fp32, fp32_from_bf16
from renaissance.core.errors import ShapeError
from renaissance.core.region import Region
from renaissance.core.shape import Shape
from renaissance.tensor.dtensor import DTensor

DTYPES = (DType.FP32, DType.BF16)


def image(
    bench: Bench, name: str, dims: tuple[int, ...], dtype: DType, fill: float | None = None, seed: int = 0
) -> int:
    """Random values, or one value everywhere."""
    tensor = DTensor.make(len(bench.names), name, Shape(*dims), dtype, Region.T_TEMP_FP32)
    rng = np.random.default_rng(seed)
    values = rng.normal(size=dims).astype(np.float32) if fill is None else np.full(dims, fill, np.float32)
    bench.array(bench.adopt(tensor))[...] = bf16_from_fp32(values) if dtype is DType.BF16 else values
    return tensor.id


def outcome(
    backend: str, threads: int, dims: tuple[tuple[int, ...], tuple[int, ...]], dtype: DType, op: str, **attrs: int
) -> bytes:
    """Bytes of y after ``op`` from random x to y full of sevens."""
    bench = Bench(threads)
    x, y = image(bench, "x", dims[0], dtype), image(bench, "y", dims[1], dtype, 7.0)
    bench.run(node(op, (x,), (y,), **attrs), backend)
    return bench.get("y").tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_new_channels_are_zero_and_are_dropped_again(dtype: DType) -> None:
    for c in (1, 3, 5, 8, 9, 17):
        for n, h, w in ((1, 1, 1), (2, 3, 5), (3, 40, 41)):
            few, many = (n, h, w, c), (n, h, w, -(-c // 8) * 8)
            for op, dims in (("CHANNEL_PADDING_FWD", (few, many)), ("CHANNEL_PADDING_BWD", (many, few))):
                want = outcome("reference", 1, dims, dtype, op)
                assert {outcome("cpu", threads, dims, dtype, op) for threads in (1, 2, 3)} == {want}, (op, dims)


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_shift_mirror_and_repeat_the_edge(dtype: DType) -> None:
    for dims in ((1, 1, 1, 1), (2, 3, 4, 3), (3, 28, 30, 17)):
        for flip in (False, True):
            for dy, dx in ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1), (2, -3), (-9, 9)):
                attrs = {"flip": flip, "dy": dy, "dx": dx}
                want = outcome("reference", 1, (dims, dims), dtype, "INPUT_VIEW", **attrs)
                got = {outcome("cpu", threads, (dims, dims), dtype, "INPUT_VIEW", **attrs) for threads in (1, 2, 3)}
                assert got == {want}, (dims, attrs)


def test_a_view_is_what_its_formula_says() -> None:
    bench = Bench()
    x, y = image(bench, "x", (1, 2, 3, 1), DType.FP32), image(bench, "y", (1, 2, 3, 1), DType.FP32)
    bench.get("x")[:] = [1, 2, 3, 4, 5, 6]
    for attrs, expected in (
        ({"flip": True, "dy": 0, "dx": 0}, [3, 2, 1, 6, 5, 4]),
        ({"flip": False, "dy": 1, "dx": 0}, [4, 5, 6, 4, 5, 6]),
        ({"flip": False, "dy": 0, "dx": -1}, [1, 1, 2, 4, 4, 5]),
        ({"flip": True, "dy": 0, "dx": 1}, [3, 3, 2, 6, 6, 5]),
    ):
        bench.run(node("INPUT_VIEW", (x,), (y,), **attrs))
        np.testing.assert_array_equal(bench.get("y"), expected, err_msg=str(attrs))


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_averaged_and_keep_nan(dtype: DType) -> None:
    for count in range(1, 6):
        results = []
        for backend in ("cpu", "reference"):
            bench = Bench()
            logits = tuple(image(bench, f"l{i}", (7, 1, 1, 10), dtype, seed=i) for i in range(count))
            y = image(bench, "y", (7, 1, 1, 10), dtype, 7.0)
            bench.get(f"l{count - 1}")[23] = 0x7FC0 if dtype is DType.BF16 else np.nan
            bench.run(node("MEAN_LOGITS", logits, (y,)), backend)
            raw = bench.get("y")
            results.append(fp32_from_bf16(raw) if dtype is DType.BF16 else raw)
        got, want = results
        assert np.flatnonzero(np.isnan(got)).tolist() == [23]
        np.testing.assert_allclose(got, want, rtol=2.0**-7 if dtype is DType.BF16 else 1e-6, atol=1e-7)


def test_tensors_that_do_not_fit_are_refused_by_name() -> None:
    bench = Bench()
    x, y = image(bench, "x", (1, 2, 2, 3), DType.FP32), image(bench, "y", (1, 2, 2, 4), DType.FP32)
    with pytest.raises(ShapeError, match=r"CHANNEL_PADDING_FWD #7: 'x' is \[1,2,2,3\] and 'y' is \[1,2,2,4\]"):
        bench.capture(node("CHANNEL_PADDING_FWD", (x,), (y,)))
    with pytest.raises(ShapeError, match=r"INPUT_VIEW #7: 'y' is \[1,2,2,4\]; expected \[1,2,2,3\]"):
        bench.capture(node("INPUT_VIEW", (x,), (y,), flip=False, dy=0, dx=0))
    with pytest.raises(ShapeError, match="MEAN_LOGITS #7: 6 sets of logits; expected 1 to 5"):
        bench.capture(node("MEAN_LOGITS", (x,) * 6, (x,)))
