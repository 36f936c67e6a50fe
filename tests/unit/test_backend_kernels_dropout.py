"""Dropout draws its mask again instead of storing it: exactly the elements that docs/random-numbers.md names."""

from __future__ import annotations

import numpy as np
import pytest
from backend_kernels_harness import Bench, node

from renaissance.core.dtype import DType, bf16_from_fp32, fp32_from_bf16
from renaissance.core.errors import DTypeError, ShapeError, ValueRejected
from renaissance.core.philox import Domain, dropout_threshold, philox

SEED = 0xFEDCBA9876543210
SIZES = (1, 2, 3, 4, 5, 63, 1023, 1025, 40_001)


class Dropped:
    """x -> y and dy -> dx of one layer; ``values`` are stored in the dtype of the tensors."""

    def __init__(self, n: int, p: float, dtype: DType, *, threads: int = 1, layer: int = 3, step: int = 9) -> None:
        self.bench = bench = Bench(threads)
        rng = np.random.default_rng(n)
        store = bf16_from_fp32 if dtype is DType.BF16 else np.float32
        x, dy = (store(np.asarray(rng.normal(size=n), np.float32)) for _ in range(2))
        i = {name: bench.add(name, v, dtype) for name, v in {"x": x, "y": 0 * x, "dy": dy, "dx": 0 * dy}.items()}
        words = {"low": SEED & 0xFFFFFFFF, "high": SEED >> 32, "step": step}
        seeds = tuple(bench.add(k, np.array([v], np.uint32).view(np.int32), DType.INT32) for k, v in words.items())
        attrs = {"p": p, "layer": layer}
        self.forward = node("DROPOUT_FWD", (i["x"], *seeds), (i["y"],), **attrs)
        self.backward = node("DROPOUT_BWD", (i["dy"], *seeds), (i["dx"],), **attrs)

    def run(self, backend: str = "cpu") -> bytes:
        for op in (self.forward, self.backward):
            with np.errstate(invalid="ignore"):
                self.bench.run(op, backend)
        return self.bench.get("y").tobytes() + self.bench.get("dx").tobytes()

    def values(self, name: str) -> np.ndarray:
        raw = self.bench.get(name)
        return fp32_from_bf16(raw) if raw.dtype == np.uint16 else raw.copy()


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
def test_dropout_equals_the_reference_and_every_team_gives_its_bits(dtype: DType) -> None:
    for n in SIZES:
        for p in (0.0, 0.1, 0.5, 0.875):
            golden, ours = Dropped(n, p, dtype), Dropped(n, p, dtype)
            golden.run("reference")
            once = ours.run()
            for name in ("y", "dx"):
                got, want = ours.values(name), golden.values(name)
                np.testing.assert_array_equal(got == 0, want == 0)
                np.testing.assert_allclose(got, want, rtol=2.0**-7 if dtype is DType.BF16 else 2e-7)
            assert {Dropped(n, p, dtype, threads=threads).run() for threads in (2, 3)} == {once}


def test_kept_elements_are_those_of_the_documented_words() -> None:
    """Written out from the page, element by element: forward and backward keep the same ones."""
    dropped = Dropped(101, 0.3, DType.FP32)
    dropped.run()
    x, dy = dropped.values("x"), dropped.values("dy")
    for e in range(101):
        word = philox(SEED, e // 4, (Domain.DROPOUT << 24) | 3, 9, 0)[e % 4]
        factor = 1 / (1 - 0.3) if word >= 0.3 * 2**32 else 0
        assert dropped.values("y")[e] == pytest.approx(x[e] * factor, rel=1e-6)
        assert dropped.values("dx")[e] == pytest.approx(dy[e] * factor, rel=1e-6)


def test_threshold_is_the_least_kept_word_and_always_one_word() -> None:
    assert [dropout_threshold(p) for p in (0.0, 2.0**-40, 0.5, 0.1)] == [0, 1, 1 << 31, 429496730]
    assert dropout_threshold(1 - 2.0**-53) == 0xFFFFFFFF
    for p in (1.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match="expected 0 <= p < 1"):
            dropout_threshold(p)


def test_zero_probability_keeps_every_bit_and_masks_differ_between_steps_and_layers() -> None:
    nothing = Dropped(40_001, 0.0, DType.BF16)
    nothing.run()
    assert nothing.bench.get("y").tobytes() == nothing.bench.get("x").tobytes()
    masks = set()
    for layer, step in ((0, 0), (0, 1), (1, 0), (1, 1), (0, -1)):
        dropped = Dropped(40_001, 0.5, DType.FP32, layer=layer, step=step & 0xFFFFFFFF)
        dropped.run()
        kept = dropped.values("y") != 0
        assert abs(kept.mean() - 0.5) < 0.0125  # five standard deviations
        masks.add(kept.tobytes())
    assert len(masks) == 5


def test_step_is_read_at_every_replay() -> None:
    dropped = Dropped(5000, 0.5, DType.FP32)
    program = dropped.bench.capture(dropped.forward)
    seen = set()
    for _ in range(4):
        program.launch()
        seen.add(dropped.bench.get("y").tobytes())
        dropped.bench.get("step")[0] += 1
    assert len(seen) == 4


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
def test_nan_survives_whether_it_is_kept_or_dropped(backend: str, dtype: DType) -> None:
    dropped = Dropped(400, 0.5, dtype)
    x = dropped.bench.get("x")
    x[::2] = bf16_from_fp32(np.float32([np.nan]))[0] if dtype is DType.BF16 else np.nan
    dropped.run(backend)
    y = dropped.values("y")
    assert np.isnan(y[::2]).all()
    assert not np.isnan(y[1::2]).any()
    assert (y[1::2] == 0).any()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_dropout_step_counts_only_steps_that_are_not_skipped(backend: str) -> None:
    bench = Bench()
    flag, step = bench.add("has_nan", [0], DType.INT32), bench.add("step", [41], DType.INT32)
    advance = node("DROPOUT_ADVANCE", (flag, step), (step,))
    for raised, expected in ((0, 42), (1, 42), (1, 42), (0, 43)):
        bench.get("has_nan")[0] = raised
        bench.run(advance, backend)
        assert bench.get("step")[0] == expected


def test_operands_that_do_not_fit_are_refused_by_name() -> None:
    dropped = Dropped(10, 0.5, DType.FP32)
    bench, (x, low, high, step), (y,) = dropped.bench, dropped.forward.inputs, dropped.forward.outputs
    with pytest.raises(ValueRejected, match=r"DROPOUT_FWD #7: p is 1.0; expected 0 <= p < 1"):
        bench.capture(node("DROPOUT_FWD", (x, low, high, step), (y,), p=1.0, layer=0))
    with pytest.raises(ValueRejected, match=r"DROPOUT_FWD #7: layer is 16777216"):
        bench.capture(node("DROPOUT_FWD", (x, low, high, step), (y,), p=0.1, layer=1 << 24))
    with pytest.raises(DTypeError, match=r"DROPOUT_FWD #7: tensor 'x' is FP32; expected INT32"):
        bench.capture(node("DROPOUT_FWD", (x, x, high, step), (y,), p=0.1, layer=0))
    short = bench.add("short", np.ones(9))
    with pytest.raises(ShapeError, match=r"DROPOUT_FWD #7.*'short'"):
        bench.capture(node("DROPOUT_FWD", (x, low, high, step), (short,), p=0.1, layer=0))
