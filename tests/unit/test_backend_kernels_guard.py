"""Law 5's flag, Adam's step count, loss scaling and metric sums."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from backend_kernels_harness import Bench, node

from renaissance.core.dtype import DType
from renaissance.core.errors import ShapeError, ValueRejected
from renaissance.core.region import Region
from renaissance.graph.computation_graph import Node
from renaissance.graph.ops import GRADIENT_LIMIT

BACKENDS = ("cpu", "reference")


def nan_check(
    grad: npt.NDArray[np.float32], clip: float = 0.0, scaling: float = 1.0, threads: int = 1
) -> tuple[Bench, Node]:
    bench = Bench(threads)
    flag, scale = bench.add("has_nan", [9], DType.INT32), bench.add("scaling", [scaling])
    span = bench.add_span(Region.G_FC_WEIGHT, grad)
    return bench, node("RANGE_CHECK_NAN", (scale,), (flag,), (span,), (span,) if clip > 0 else (), clip=clip)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", [1, 7, 4095, 4097, 100_000])
def test_one_bad_element_anywhere_raises_the_flag(backend: str, n: int) -> None:
    clean = np.random.default_rng(n).normal(size=n).astype(np.float32)
    clean[0] = np.nextafter(np.float32(GRADIENT_LIMIT), np.float32(0))
    clean[n // 2] = 1e-42
    for clip in (0.0, 1.0):
        bench, check = nan_check(clean, clip, threads=2)
        bench.run(check, backend)
        assert bench.get("has_nan")[0] == 0
    for place in {0, n // 2, n - 1, min(4096, n - 1)}:
        for bad in (np.nan, np.inf, -np.inf):
            for clip in (0.0, 1.0):
                grad = clean.copy()
                grad[place] = bad
                bench, check = nan_check(grad, clip, threads=2)
                bench.run(check, backend)
                assert bench.get("has_nan")[0] == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("large", [GRADIENT_LIMIT, -GRADIENT_LIMIT, 3.4e38])
def test_gradient_whose_square_is_not_finite_raises_the_flag_unless_it_is_clipped(backend: str, large: float) -> None:
    for clip, flag in ((0.0, 1), (1.0, 0)):
        bench, check = nan_check(np.float32([1.0, large, -1.0]), clip)
        bench.run(check, backend)
        assert bench.get("has_nan")[0] == flag


@pytest.mark.parametrize("backend", BACKENDS)
def test_flag_is_cleared_by_the_next_clean_step(backend: str) -> None:
    grad = np.ones(50, np.float32)
    bench, check = nan_check(grad)
    view = bench.span_array(check.spans_in[0], DType.FP32)
    view[3] = np.inf
    bench.run(check, backend)
    view[3] = 0.0
    bench.run(check, backend)
    assert bench.get("has_nan")[0] == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_clipping_limits_the_unscaled_gradient(backend: str) -> None:
    """Upstream clamps what is still multiplied by the loss scale (spec 10.1, A6)."""
    grad = np.array([-9000.0, -1000.0, 0.5, 2048.0, 2049.0], np.float32)
    bench, check = nan_check(grad, clip=2.0, scaling=1024.0)
    bench.run(check, backend)
    got = bench.span_array(check.spans_in[0], DType.FP32)
    np.testing.assert_array_equal(got, [-2048.0, -1000.0, 0.5, 2048.0, 2048.0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_watched_spans_raise_the_flag_for_nan_and_infinity_alone_and_are_never_clamped(backend: str) -> None:
    """A loss or a variance may be larger than any gradient: only what is no number makes a step bad (law 5)."""
    fine = np.float32([1e38, -3e38, 0.0, 1e-42])
    for clip in (0.0, 2.0):
        for values, flag in ((fine, 0), (np.r_[fine, np.float32(np.nan)], 1), (np.r_[np.float32(-np.inf), fine], 1)):
            bench, check = nan_check(np.ones(5000, np.float32), clip)
            first = bench.add_span(Region.R_RESULT, values)
            second = bench.add_span(Region.B_NEXT_VAR, np.ones(9, np.float32))
            spans = (*check.spans_in, first, second)
            bench.run(node(check.op, check.inputs, check.outputs, spans, check.spans_out, clip=clip), backend)
            assert bench.get("has_nan")[0] == flag
            np.testing.assert_array_equal(bench.span_array(first, DType.FP32), values)


@pytest.mark.parametrize("backend", BACKENDS)
def test_either_flag_raises_the_common_one(backend: str) -> None:
    bench = Bench()
    ids = tuple(bench.add(name, [0], DType.INT32) for name in ("a", "b", "either"))
    for a in (0, 1):
        for b in (0, 1):
            bench.get("a")[0], bench.get("b")[0], bench.get("either")[0] = a, b, 5
            bench.run(node("FLAG_OR", ids[:2], ids[2:]), backend)
            assert bench.get("either")[0] == (a or b)


def test_clip_that_cannot_work_is_refused_by_name() -> None:
    bench, check = nan_check(np.ones(4, np.float32), clip=float("inf"))
    with pytest.raises(ValueRejected, match="RANGE_CHECK_NAN #7: clip is inf"):
        bench.capture(check)


def adam_step(flag: int = 0, step: int = 0) -> tuple[Bench, Node]:
    bench = Bench()
    has_nan, count = bench.add("has_nan", [flag], DType.INT32), bench.add("step", [step], DType.INT32)
    betas = bench.add("beta", [0.9]), bench.add("beta2", [0.999])
    corrections = bench.add("c1", [0.0]), bench.add("c2", [0.0])
    return bench, node("ADAM_STEP", (has_nan, count, *betas), (count, *corrections))


@pytest.mark.parametrize("backend", BACKENDS)
def test_adam_step_counts_and_corrects(backend: str) -> None:
    bench, op = adam_step()
    beta1, beta2 = float(np.float32(0.9)), float(np.float32(0.999))
    for t in range(1, 40):
        bench.run(op, backend)
        assert bench.get("step")[0] == t
        assert bench.get("c1")[0] == pytest.approx(1 / (1 - beta1**t), rel=1e-7)
        assert bench.get("c2")[0] == pytest.approx(1 / (1 - beta2**t), rel=1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
def test_adam_step_far_into_a_run(backend: str) -> None:
    bench, op = adam_step(step=2_000_000)
    bench.run(op, backend)
    assert bench.get("step")[0] == 2_000_001
    assert bench.get("c1")[0] == bench.get("c2")[0] == 1.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_flagged_step_is_not_counted(backend: str) -> None:
    bench, op = adam_step(flag=1, step=5)
    before = bench.all_bytes()
    bench.run(op, backend)
    assert bench.all_bytes() == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_loss_scale_halves_on_overflow_and_grows_after_clean_steps(backend: str) -> None:
    bench = Bench()
    ids = bench.add("has_nan", [0], DType.INT32), bench.add("scaling", [4.0]), bench.add("good", [0], DType.INT32)
    op = node("GRAD_SCALING", ids, ids[1:], growth_interval=3, backoff=0.5, floor=1.0)
    seen = []
    for flag in (0, 0, 1, 1, 1, 1, 0, 0, 0, 0):
        bench.get("has_nan")[0] = flag
        bench.run(op, backend)
        seen.append((float(bench.get("scaling")[0]), int(bench.get("good")[0])))
    assert seen == [(4, 1), (4, 2), (2, 0), (1, 0), (1, 0), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]


def test_loss_scale_rule_out_of_range_is_refused_by_name() -> None:
    bench = Bench()
    ids = bench.add("has_nan", [0], DType.INT32), bench.add("scaling", [4.0]), bench.add("good", [0], DType.INT32)
    with pytest.raises(ValueRejected, match="GRAD_SCALING #7: growth_interval 0"):
        bench.capture(node("GRAD_SCALING", ids, ids[1:], growth_interval=0, backoff=0.5, floor=1.0))


def metrics(*, flag: int | None = 0, count: DType = DType.FP32) -> tuple[Bench, Node]:
    bench = Bench()
    inputs = [bench.add("valid", [200], DType.INT32)]
    inputs += [bench.add(k, [0.0]) for k in ("loss", "top1", "top5")]
    if flag is not None:
        inputs.append(bench.add("has_nan", [flag], DType.INT32))
    outputs = [bench.add(f"sum_{k}", [0.0]) for k in ("loss", "top1", "top5")] + [bench.add("count", [0], count)]
    return bench, node("ACCUM_METRICS", tuple(inputs), tuple(outputs))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("count", [DType.FP32, DType.INT32])
def test_metric_sums_are_weighted_by_valid_samples_and_exact_for_hits(backend: str, count: DType) -> None:
    bench, op = metrics(flag=None, count=count)
    rng = np.random.default_rng(3)
    hits1, hits5, loss = rng.integers(0, 137, 50), rng.integers(0, 137, 50), rng.random(50)
    valid = np.r_[137, np.full(49, 200)]
    for i in range(50):
        bench.get("valid")[0], bench.get("loss")[0] = valid[i], loss[i]
        bench.get("top1")[0], bench.get("top5")[0] = hits1[i] / valid[i], hits5[i] / valid[i]
        bench.run(op, backend)
        assert bench.get("sum_top1")[0] == hits1[: i + 1].sum()
    assert bench.get("count")[0] == valid.sum()
    assert bench.get("sum_top5")[0] == hits5.sum()
    assert bench.get("sum_loss")[0] == pytest.approx((loss * valid).sum(), rel=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_hits_of_any_batch_are_whole(backend: str) -> None:
    """7 of 13 is a rate that gives 6.9999995 when it is multiplied by 13 again."""
    bench, op = metrics(flag=None)
    for valid, hits in ((13, 7), (19, 15), (1300, 1023), (1, 1), (4096, 0), (200, 199)):
        bench.get("valid")[0], bench.get("top1")[0], bench.get("loss")[0] = valid, hits / valid, np.inf
        bench.get("sum_top1")[0] = 0
        bench.run(op, backend)
        assert bench.get("sum_top1")[0] == hits
    assert bench.get("sum_loss")[0] == np.inf


@pytest.mark.parametrize("backend", BACKENDS)
def test_flagged_step_enters_no_metric(backend: str) -> None:
    bench, op = metrics(flag=1)
    bench.get("loss")[0] = np.nan
    before = bench.all_bytes()
    bench.run(op, backend)
    assert bench.all_bytes() == before


def test_metric_operands_that_do_not_pair_are_refused_by_name() -> None:
    bench, op = metrics()
    with pytest.raises(ShapeError, match="ACCUM_METRICS #7"):
        bench.capture(node(op.op, op.inputs[:2], op.outputs))
