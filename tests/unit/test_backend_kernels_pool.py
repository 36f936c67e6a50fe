"""Pooling against the float64 reference over a sweep of shapes; same bits for every team size; NaN survives."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest
from backend_kernels_harness import Bench, node

from renaissance.core.dtype import DType, bf16_from_fp32, fp32_from_bf16
from renaissance.core.errors import DTypeError, ShapeError
from renaissance.core.region import Region
from renaissance.core.shape import Shape
from renaissance.graph.computation_graph import Node
from renaissance.tensor.dtensor import DTensor

DTYPES = (DType.FP32, DType.BF16)
WINDOWS = ((2, 2, 0), (3, 2, 1), (3, 1, 1), (3, 3, 0), (2, 3, 0), (3, 2, 0), (5, 1, 2), (1, 1, 0), (1, 2, 0), (4, 3, 3))
"""(kernel, stride, pad): kernel larger than the stride, equal, smaller; pad up to kernel - 1."""
IMAGES = ((1, 5, 5, 1), (2, 7, 9, 3), (3, 8, 6, 17), (1, 11, 5, 64), (2, 4, 4, 130))
BYTE_AND_WORD = ((15, 2, 7), (16, 3, 8))
"""The largest kernel whose index fits into bytes, and the smallest that takes two."""
CASES = (
    *itertools.product(IMAGES, WINDOWS),
    *itertools.product(((2, 17, 19, 5),), BYTE_AND_WORD),
    ((4, 33, 35, 16), (3, 2, 1)),  # large enough for a team
)


class Pool:
    """x -> y with all tensors of the four kinds of pooling, and the nodes on them."""

    def __init__(self, image: tuple[int, ...], window: tuple[int, int, int], dtype: DType, threads: int = 1) -> None:
        kernel, stride, pad = window
        n, h, w, c = image
        small = (n, (h + 2 * pad - kernel) // stride + 1, (w + 2 * pad - kernel) // stride + 1, c)
        self.bench, self.dtype = Bench(threads), dtype
        self.ids = {
            name: self._add(name, dims, dtype)
            for name, dims in {"x": image, "y": small, "dy": small, "dx": image, "mean": (n, 1, 1, c)}.items()
        }
        wide = (*small[:3], c * (1 if kernel <= 15 else 2))
        self.ids["index"] = self._add("index", wide, DType.INT8)
        rng = np.random.default_rng(sum(image) + kernel)
        # Whole numbers from a small set: many equal maxima, so that the order of the scan decides.
        self.put("x", rng.integers(-3, 4, image).astype(np.float32) + (0 if c % 2 else rng.normal(size=image)))
        for name in ("dy", "mean"):
            self.put(name, rng.normal(size=self.bench.array(self.ids[name]).shape))
        self.attrs = {"kernel": kernel, "stride": stride, "pad": pad}

    def _add(self, name: str, dims: tuple[int, ...], dtype: DType) -> int:
        bench = self.bench
        return bench.adopt(DTensor.make(len(bench.names), name, Shape(*dims), dtype, Region.T_TEMP_FP32))

    def put(self, name: str, values: npt.NDArray[np.float64]) -> None:
        full = values.astype(np.float32)
        self.bench.array(self.ids[name])[...] = bf16_from_fp32(full) if self.dtype is DType.BF16 else full

    def get(self, name: str) -> npt.NDArray[np.float32]:
        raw = self.bench.array(self.ids[name])
        return fp32_from_bf16(raw) if raw.dtype == np.uint16 else raw.copy()

    def nodes(self) -> list[tuple[Node, tuple[str, ...]]]:
        """Every node with the names of its outputs."""
        i = self.ids
        out: list[tuple[Node, tuple[str, ...]]] = [
            (node("MAXPOOL_FWD", (i["x"],), (i["y"], i["index"]), **self.attrs), ("y", "index")),
            (node("MAXPOOL_INF", (i["x"],), (i["y"],), **self.attrs), ("y",)),
            (node("MAXPOOL_BWD", (i["dy"], i["index"]), (i["dx"],), **self.attrs), ("dx",)),
        ]
        for padded in (True, False):
            attrs = {**self.attrs, "count_include_pad": padded}
            out.append((node("AVGPOOL_FWD", (i["x"],), (i["y"],), **attrs), ("y",)))
            out.append((node("AVGPOOL_BWD", (i["dy"],), (i["dx"],), **attrs), ("dx",)))
        out.append((node("GAP_BWD", (i["mean"],), (i["dx"],)), ("dx",)))
        return [*out, (node("GAP_FWD", (i["x"],), (i["mean"],)), ("mean",))]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pool_equals_the_float64_reference_and_every_team_gives_its_bits(dtype: DType) -> None:
    """Maxima and indices exactly; averages and gradients rounded once (bf16), or to a few units (fp32 sums)."""
    for image, window in CASES:
        if min(image[1:3]) + 2 * window[2] < window[0]:
            continue
        golden = Pool(image, window, dtype)
        teams = [Pool(image, window, dtype, threads) for threads in (1, 2, 3)]
        for position, (op, outputs) in enumerate(golden.nodes()):
            golden.bench.run(op, "reference")
            for team in teams:
                team.bench.run(team.nodes()[position][0])
            for name in outputs:
                got, want = teams[0].get(name), golden.get(name)
                exact = op.op.startswith("MAXPOOL") and name != "dx"
                rtol = 0 if exact else 2.0**-7 if dtype is DType.BF16 else 1e-6  # bf16: a sum next to a tie
                text = f"{op.op} {name} {image} {window}"
                np.testing.assert_allclose(got, want, rtol=rtol, atol=0 if exact else 1e-6, err_msg=text)
                for team in teams[1:]:
                    assert team.bench.get(name).tobytes() == teams[0].bench.get(name).tobytes(), text


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_survive_every_pool(dtype: DType) -> None:
    """The first NaN of a window wins, also over what came before it; a window of -Inf is not taken for padding."""
    for image, window in (((2, 7, 7, 19), (3, 2, 1)), ((2, 6, 6, 19), (2, 2, 1)), ((2, 17, 18, 19), (16, 3, 8))):
        pools = [Pool(image, window, dtype), Pool(image, window, dtype)]
        for pool in pools:
            x = pool.get("x")
            x[0, 2, 3, 5] = x[0, 2, 4, 5] = x[1, 0, 0, 0] = x[1, -1, -1, 18] = np.nan
            x[0, :, :, 7], x[1, 4, 4, 3] = -np.inf, np.inf
            pool.put("x", x)
        ours, golden = pools
        for (op, outputs), (want, _) in zip(ours.nodes(), golden.nodes(), strict=True):
            ours.bench.run(op)
            with np.errstate(invalid="ignore"):
                golden.bench.run(want, "reference")
            for name in outputs:
                text = f"{op.op} {name} {window}"
                np.testing.assert_array_equal(np.isnan(ours.get(name)), np.isnan(golden.get(name)), err_msg=text)
                if op.op in ("MAXPOOL_FWD", "MAXPOOL_INF"):
                    np.testing.assert_array_equal(ours.get(name), golden.get(name), err_msg=text)
            assert op.op.endswith("BWD") or np.isnan(ours.get(outputs[0])).any()


def test_global_average_of_many_pixels_is_rounded_once() -> None:
    """Float32 sums of 12,544 pixels near 1000 would be off by hundreds of units in the last place."""
    pool = Pool((1, 112, 112, 5), (1, 1, 0), DType.FP32, threads=2)
    x = 1000 + np.random.default_rng(0).normal(size=(1, 112, 112, 5))
    pool.put("x", x)
    pool.bench.run(node("GAP_FWD", (pool.ids["x"],), (pool.ids["mean"],)))
    exact = pool.get("x").astype(np.float64).mean(axis=(1, 2))
    np.testing.assert_array_equal(pool.get("mean").reshape(1, 5), exact.astype(np.float32))


def test_windows_and_tensors_that_do_not_fit_are_refused_by_name() -> None:
    pool = Pool((1, 6, 6, 4), (2, 2, 0), DType.FP32)
    i = pool.ids
    for attrs in (
        {"kernel": 2, "stride": 2, "pad": 2},
        {"kernel": 9, "stride": 1, "pad": 1},
        {"kernel": 2, "stride": 0, "pad": 0},
    ):
        with pytest.raises(ShapeError, match=r"MAXPOOL_INF #7: kernel \d, stride \d, pad \d on 'x'"):
            pool.bench.capture(node("MAXPOOL_INF", (i["x"],), (i["y"],), **attrs))
    with pytest.raises(ShapeError, match=r"MAXPOOL_INF #7: 'dx' is \[1,6,6,4\]; expected \[1, 3, 3, 4\]"):
        pool.bench.capture(node("MAXPOOL_INF", (i["x"],), (i["dx"],), **pool.attrs))
    with pytest.raises(DTypeError, match=r"MAXPOOL_FWD #7: index 'dy' is FP32; expected INT8"):
        pool.bench.capture(node("MAXPOOL_FWD", (i["x"],), (i["y"], i["dy"]), **pool.attrs))
