"""Pooling of CUDA on the emulator: against float64, in any order of threads, free of races."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from cuda_bench import FLOATS, check, measured, needs_compiler, run_case
from op_cases import Case, In, Out, exact
from op_sweep import Draw, max_index, out_size, pools

from renaissance.backend.cuda import launch_pool
from renaissance.core.dtype import DType
from renaissance.core.errors import DTypeError, ShapeError

pytestmark = needs_compiler

F64 = npt.NDArray[np.float64]


def windowed(image: tuple[int, ...], window: tuple[int, int, int], x: F64, dy: F64 | None = None) -> Iterator[Case]:
    """Max and average pooling of x, forward and backward, and inference."""
    n, h, w, c = image
    kernel, stride, pad = window
    small = (n, *(out_size(size, kernel, stride, pad) for size in (h, w)), c)
    dy = Draw(40, c, kernel)(*small) if dy is None else dy
    attrs = {"kernel": kernel, "stride": stride, "pad": pad}
    title, overlap = f"{image}, {window}", -(-kernel // stride)
    index, dx = max_index(x, kernel, stride, pad), Out("dx", image, terms=overlap**2)
    yield Case("MAXPOOL_FWD", title, (In("x", x),), (Out("y", small), Out("index", index.shape, "mask")), attrs)
    yield Case("MAXPOOL_INF", title, (In("x", x),), (Out("y", small),), attrs)
    yield Case("MAXPOOL_BWD", title, (In("dy", dy), In("index", index, "mask")), (dx,), attrs, linear=True)
    attrs = {**attrs, "count_include_pad": False}
    yield Case("AVGPOOL_FWD", title, (In("x", x),), (Out("y", small, terms=kernel**2),), attrs, linear=True)
    yield Case("AVGPOOL_BWD", title, (In("dy", dy),), (dx,), attrs, linear=True)


def global_average(image: tuple[int, ...], x: F64) -> Iterator[Case]:
    mean = (image[0], 1, 1, image[3])
    y = Out("y", mean, terms=image[1] * image[2])
    yield Case("GAP_FWD", str(image), (In("x", x),), (y,), linear=True)
    yield Case("GAP_BWD", str(image), (In("dy", Draw(41)(*mean)),), (Out("dx", image, terms=2),), linear=True)


def with_ties(image: tuple[int, ...]) -> F64:
    """Few different values, so that the order of the scan decides."""
    return np.round(Draw(42, *image)(*image) * 2) / 2


def test_every_pool_agrees_with_float64() -> None:
    check(pools())


def test_packs_and_tiles_of_all_widths_agree_with_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns that leave threads over, several tiles, several pixels of a thread; a place that takes two bytes."""
    monkeypatch.setattr(launch_pool, "BLOCKS", 2)
    for image, window in (
        ((3, 9, 7, 24), (3, 2, 1)),
        ((2, 6, 5, 8), (2, 2, 0)),
        ((1, 3, 4, 2056), (3, 1, 1)),
        ((2, 9, 9, 40), (4, 3, 3)),
        ((1, 17, 16, 16), (15, 2, 7)),
        ((1, 17, 18, 8), (16, 3, 8)),
    ):
        cases = (*windowed(image, window, with_ties(image)), *global_average(image, Draw(43)(*image)))
        check(cases, orders=(0, 5))


def test_nan_and_infinity_survive_every_pool() -> None:
    """The first NaN of a window wins, also over what came before it; a window of -Inf is not taken for padding."""
    for image, window in (((2, 7, 7, 24), (3, 2, 1)), ((2, 6, 6, 19), (2, 2, 1)), ((2, 17, 18, 19), (16, 3, 8))):
        x = with_ties(image)
        x[0, 2, 3, 5] = x[0, 2, 4, 5] = x[1, 0, 0, 0] = x[1, -1, -1, 18] = np.nan
        x[0, :, :, 7], x[1, 4, 4, 3] = -np.inf, np.inf
        for case in (*windowed(image, window, x), *global_average(image, x)):
            if case.op.endswith("_BWD"):
                continue
            for f in FLOATS:
                got = measured(case, f)
                with np.errstate(invalid="ignore"):
                    want = exact(case, f)
                assert np.isnan(got["y"]).any()
                if case.op.startswith("MAX"):
                    for name in got:  # the index too
                        np.testing.assert_array_equal(got[name], want[name], err_msg=f"{case.op} {name} {window}")
                else:
                    for kind in (np.isnan, np.isposinf, np.isneginf):
                        np.testing.assert_array_equal(kind(got["y"]), kind(want["y"]), err_msg=f"{case.op} {window}")


def test_a_nan_gradient_goes_to_the_winner_only() -> None:
    """A zero share of NaN would poison the whole window."""
    image, window = (1, 6, 6, 8), (3, 2, 1)
    x = Draw(44)(*image)
    dy = Draw(45)(1, 3, 3, 8)
    dy[0, 1, 1, 2], dy[0, 2, 2, 3] = np.nan, np.inf
    case = next(c for c in windowed(image, window, x, dy) if c.op == "MAXPOOL_BWD")
    for f in FLOATS:
        got = measured(case, f)["dx"]
        assert np.isnan(got).sum() == 1
        assert np.isinf(got).sum() == 1


def test_global_average_of_many_pixels_is_rounded_once() -> None:
    """Float32 sums of thousands of pixels near 1000 would be off by many units in the last place."""
    image = (1, 112, 56, 8)
    x = (1000 + Draw(46)(*image)).astype(np.float32).astype(np.float64)
    got = measured(next(global_average(image, x)), DType.FP32)["y"]
    want = x.mean(axis=(1, 2), keepdims=True)
    assert np.abs(got - want).max() <= 0.75 * np.spacing(np.float32(1000))


def test_windows_and_tensors_that_do_not_fit_are_refused_by_name() -> None:
    image = (1, 6, 6, 4)
    x = In("x", with_ties(image))
    good = {"kernel": 2, "stride": 2, "pad": 0}
    for change in ({"pad": 2}, {"kernel": 9, "pad": 1}, {"stride": 0}):
        case = Case("MAXPOOL_INF", "bad window", (x,), (Out("y", (1, 3, 3, 4)),), good | change)
        with pytest.raises(ShapeError, match=r"MAXPOOL_INF #7: kernel \d, stride \d, pad \d on 'x'"):
            run_case(case, DType.FP32)
    with pytest.raises(ShapeError, match=r"MAXPOOL_INF #7: 'y' is \[1,6,6,4\]; expected \[1, 3, 3, 4\]"):
        run_case(Case("MAXPOOL_INF", "large y", (x,), (Out("y", image),), good), DType.FP32)
    outs = (Out("y", (1, 3, 3, 4)), Out("index", (1, 3, 3, 4)))
    with pytest.raises(DTypeError, match=r"MAXPOOL_FWD #7: tensor 'index' is FP32; expected INT8"):
        run_case(Case("MAXPOOL_FWD", "index of floats", (x,), outs, good), DType.FP32)
    with pytest.raises(ShapeError, match=r"GAP_FWD #7: 'y' is \[1,3,3,4\]"):
        run_case(Case("GAP_FWD", "not one pixel", (x,), (Out("y", (1, 3, 3, 4)),)), DType.FP32)
