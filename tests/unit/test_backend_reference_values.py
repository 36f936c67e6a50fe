"""Values written down by hand for what differences cannot tell: which divisor, which of equals, whose statistics."""

from __future__ import annotations

import numpy as np
import pytest
from backend_kernels_harness import Bench, node
from op_cases import Case, In, Out, exact, measured, scalar
from op_sweep import max_index

from renaissance.core.dtype import DType
from renaissance.core.philox import Domain, philox, purpose
from renaissance.core.region import Region

F = DType.FP32
BACKENDS = pytest.mark.parametrize("backend", ["reference", "cpu"])


def grid(*rows: str) -> np.ndarray:
    """[1,H,W,1] from rows of numbers."""
    values = np.array([[float(v) for v in row.split()] for row in rows])
    return values.reshape(1, *values.shape, 1)


@BACKENDS
@pytest.mark.parametrize(("whole", "corner", "edge"), [(True, 4 / 9, 6 / 9), (False, 1.0, 1.0)])
def test_average_pool_divides_by_all_cells_or_by_those_in_the_picture(
    backend: str, whole: bool, corner: float, edge: float
) -> None:
    attrs = {"kernel": 3, "stride": 1, "pad": 1, "count_include_pad": whole}
    case = Case("AVGPOOL_FWD", "", (In("x", np.ones((1, 3, 3, 1))),), (Out("y", (1, 3, 3, 1)),), attrs)
    y = measured(case, backend, F)["y"][0, :, :, 0]
    np.testing.assert_allclose(y, [[corner, edge, corner], [edge, 1, edge], [corner, edge, corner]], rtol=1e-6)


@BACKENDS
@pytest.mark.parametrize(
    ("picture", "y", "place"),
    [
        (grid("1 1", "1 1"), 1, 4),  # the first of equals in scan order; 0 to 3 are padding
        (grid("-inf -inf", "-inf -inf"), -np.inf, 4),  # padding never wins
        (grid("-5 -3", "-4 -9"), -3, 5),
        (grid("7 nan", "inf nan"), np.nan, 5),  # NaN wins over everything, the first one of several
    ],
)
def test_max_pool_winner(backend: str, picture: np.ndarray, y: float, place: int) -> None:
    attrs = {"kernel": 3, "stride": 3, "pad": 1}
    outputs = (Out("y", (1, 1, 1, 1)), Out("index", (1, 1, 1, 1), "mask"))
    got = measured(Case("MAXPOOL_FWD", "", (In("x", picture),), outputs, attrs), backend, F)
    np.testing.assert_equal(got["y"].item(), y)
    assert got["index"].item() == place
    np.testing.assert_equal(
        measured(Case("MAXPOOL_INF", "", (In("x", picture),), outputs[:1], attrs), backend, F)["y"].item(), y
    )


def test_max_pool_index_equals_a_plain_loop() -> None:
    x = np.round(np.random.default_rng(3).standard_normal((2, 19, 18, 3)) * 2)
    for kernel, stride, pad in ((3, 2, 1), (15, 1, 0), (16, 1, 2), (17, 2, 8)):
        index = max_index(x, kernel, stride, pad)
        outputs = (Out("y", (2, *index.shape[1:3], 3)), Out("index", index.shape, "mask"))
        case = Case("MAXPOOL_FWD", "", (In("x", x),), outputs, {"kernel": kernel, "stride": stride, "pad": pad})
        np.testing.assert_array_equal(measured(case, "reference", F)["index"].view(np.uint8), index)


@BACKENDS
def test_running_statistics_of_one_row_and_of_none(backend: str) -> None:
    """One value: its unbiased variance has no divisor, and the biased 0 is taken. No valid row: nothing moves."""
    one = (1, 1, 1, 1)
    outputs = (Out("y", (2, 1, 1, 1)), *(Out(k, one, "fp32") for k in ("mean", "inv_std", "next_mean", "next_var")))
    vectors = [In(k, np.full(one, v), "fp32") for k, v in (("g", 2.0), ("b", 1.0), ("m", 3.0), ("v", 5.0))]
    x = In("x", np.array([7.0, 100.0]).reshape(2, 1, 1, 1))
    attrs = {"momentum": 0.25, "eps": 1.0, "activation": "none"}
    for valid, mean, var in ((1, 0.75 * 3 + 0.25 * 7, 0.75 * 5), (0, 3, 5)):
        case = Case("BN_FWD", "", (x, *vectors, scalar("valid", valid, "i32")), outputs, attrs)
        got = measured(case, backend, F)
        assert (got["next_mean"].item(), got["next_var"].item()) == (mean, var)
        assert got["y"].reshape(-1).tolist()[:valid] == [1.0] * valid
        assert np.isfinite(got["y"]).all()


@BACKENDS
def test_running_variance_is_unbiased_and_the_batchs_own_is_not(backend: str) -> None:
    one = (1, 1, 1, 1)
    outputs = (Out("y", (2, 1, 1, 1)), *(Out(k, one, "fp32") for k in ("mean", "inv_std", "next_mean", "next_var")))
    vectors = [In(k, np.full(one, v), "fp32") for k, v in (("g", 1.0), ("b", 0.0), ("m", 0.0), ("v", 0.0))]
    attrs = {"momentum": 0.5, "eps": 0.0, "activation": "none"}
    x = In("x", np.array([1.0, 3.0]).reshape(2, 1, 1, 1))
    got = measured(Case("BN_FWD", "", (x, *vectors, scalar("valid", 2, "i32")), outputs, attrs), backend, F)
    assert (got["mean"].item(), got["inv_std"].item()) == (2, 1)
    assert (got["next_mean"].item(), got["next_var"].item()) == (1, 1)
    assert got["y"].reshape(-1).tolist() == [-1, 1]


@BACKENDS
def test_dropout_follows_the_rules_for_random_numbers(backend: str) -> None:
    """Element by element with the scalar generator, from docs/random-numbers.md."""
    seed, step, layer, p = 0x8BCDEF0112345678, 9, 5, 0.3
    words = [(seed & 0xFFFFFFFF, "low"), (seed >> 32, "high"), (step, "step")]
    state = [scalar(name, word, "i32") for word, name in words]
    case = Case(
        "DROPOUT_FWD",
        "",
        (In("x", np.ones((1, 3, 5, 7))), *state),
        (Out("y", (1, 3, 5, 7)),),
        {"p": p, "layer": layer},
    )
    kept = [philox(seed, e // 4, purpose(Domain.DROPOUT, layer), step, 0)[e % 4] >= p * 2**32 for e in range(105)]
    y = measured(case, backend, F)["y"].reshape(-1)
    assert (y != 0).tolist() == kept
    np.testing.assert_allclose(y[kept], 1 / (1 - p), rtol=1e-6)


@BACKENDS
def test_a_view_repeats_edges_and_mirrors(backend: str) -> None:
    x = grid("1 2 3", "4 5 6")
    for flip, dy, dx, want in (
        (False, 0, 1, [[2, 3, 3], [5, 6, 6]]),
        (False, -1, 0, [[1, 2, 3], [1, 2, 3]]),
        (True, 0, 0, [[3, 2, 1], [6, 5, 4]]),
        (True, 1, 1, [[6, 6, 5], [6, 6, 5]]),
    ):
        attrs = {"flip": flip, "dy": dy, "dx": dx}
        y = measured(Case("INPUT_VIEW", "", (In("x", x),), (Out("y", (1, 2, 3, 1)),), attrs), backend, F)["y"]
        assert y[0, :, :, 0].tolist() == want, attrs


@BACKENDS
def test_trust_ratio_has_a_ceiling_and_is_1_for_a_zero_norm(backend: str) -> None:
    """w = (3, 4), g = (0, 2): r = trust 5 / (2 + wd 5 + eps)."""
    shape, one = (2, 1, 1, 1), (1, 1, 1, 1)
    for trust, weight, gradient, ratio in (
        (0.5, (3, 4), (0, 2), 0.5 * 5 / (2 + 0.1 * 5 + 1e-8)),
        (1e6, (3, 4), (0, 2), 100.0),
        (0.5, (0, 0), (0, 2), 1.0),
        (0.5, (3, 4), (0, 0), 1.0),
    ):
        numbers = {"lr": 0.5, "wd": 0.1, "beta": 0.9, "trust": trust, "eps": 1e-8, "scaling": 4.0}
        inputs = [*(scalar(k, v) for k, v in numbers.items()), scalar("has_nan", 0, "i32")]
        inputs.append(In("grad", np.array(gradient, float).reshape(shape) * 4, "fp32"))
        start = np.array(weight, float).reshape(shape)
        outputs = (
            Out("weight", shape, "fp32", start=start),
            Out("m", shape, "fp32", start=np.full(shape, 0.5)),
            Out("ratio", one, "fp32", start=np.zeros(one)),
        )
        got = measured(Case("LARS_UPDATE", "", tuple(inputs), outputs, {"nesterov": False}), backend, F)
        m = 0.9 * 0.5 + 0.5 * ratio * (np.array(gradient) + 0.1 * np.array(weight))
        np.testing.assert_allclose(got["ratio"].item(), ratio, rtol=1e-6)
        np.testing.assert_allclose(got["m"].reshape(-1), m, rtol=1e-6)
        np.testing.assert_allclose(got["weight"].reshape(-1), np.array(weight) - m, rtol=1e-6, atol=1e-6)


@BACKENDS
def test_watched_spans_raise_the_flag_and_are_never_clamped(backend: str) -> None:
    for loss, clip, flag in ((1e30, 0.0, 0), (np.inf, 0.0, 1), (np.nan, 0.5, 1), (3.0, 0.5, 0)):
        bench = Bench(half=None)
        scaling, has_nan = bench.add("scaling", np.ones(1)), bench.add("has_nan", np.zeros(1, np.int32), DType.INT32)
        grad = bench.add_span(Region.G_FC_WEIGHT, np.full(64, 2.0, np.float32))
        watched = bench.add_span(Region.R_RESULT, np.full(64, loss, np.float32))
        clipped = (grad,) if clip else ()
        bench.run(node("RANGE_CHECK_NAN", (scaling,), (has_nan,), (grad, watched), clipped, clip=clip), backend)
        assert bench.get("has_nan")[0] == flag, (loss, clip)
        np.testing.assert_equal(bench.span_array(watched, DType.FP32), np.full(64, loss, np.float32))
        assert (bench.span_array(grad, DType.FP32) == (clip or 2.0)).all()


def test_no_rounding_but_the_last() -> None:
    """The reference's sums are float64: 2^24 + 1 + 1 - 2^24 is 2 in any order."""
    x = np.array([2.0**24, 1, 1, -(2.0**24)]).reshape(1, 2, 2, 1)
    case = Case("GAP_FWD", "", (In("x", x),), (Out("y", (1, 1, 1, 1)),))
    assert measured(case, "reference", F)["y"].item() == exact(case, F)["y"].item() == 0.5
