"""The end of a step of CUDA on the emulator: NaN check, optimizers, averages, loss scale, counters, whole spans.

Against float64, in any order of threads, free of races; law 5: with the flag set, no byte that persists changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cuda_bench import KERNELS, CudaBench, check, launcher, measured, module, needs_compiler
from op_cases import Case, In, Out, loaded, place, scalar, wiring
from op_cases import stored as narrowed
from op_sweep import averages, flags, trust_ratios, updates

from renaissance.backend.cuda.launch_update import LARS_ALONE, LARS_PARTIALS
from renaissance.backend.reference.operands import narrow
from renaissance.core.dtype import DType
from renaissance.core.errors import DTypeError, ShapeError, ValueRejected
from renaissance.core.region import Region
from renaissance.graph.ops import GRADIENT_LIMIT

pytestmark = needs_compiler

ONE = (1, 1, 1, 1)
FULL, HALVES = (DType.FP32,), (DType.FP16, DType.BF16)
W, A, G, M, V, E = (Region[f"{series}_FC_WEIGHT"] for series in "WAGMVE")
VALUES = {"lr": 1e-3, "wd": 0.1, "beta": 0.9, "beta2": 0.999, "eps": 1e-8, "bias_corr1": 5.3, "bias_corr2": 501.0}
KINDS = {"SGD": (2, 0), "MOMENTUM": (3, 1), "NESTEROV": (3, 1), "ADAM": (7, 2), "ADAMW": (7, 2)}
"""Scalars and moments of an optimizer."""
TAILS = (1, 2, 3, 4, 7, 1023, 1030)
"""Sizes around what a thread takes at once, and around a block."""


def update(
    kind: str, spans: Mapping[Region, npt.NDArray[Any]], *, flag: int = 0, decay: bool = True, **given: float
) -> Case:
    count, moments = KINDS[kind]
    inputs = [scalar(name, given.get(name, value)) for name, value in list(VALUES.items())[:count]]
    inputs += [scalar("scaling", given.get("scaling", 8.0)), scalar("has_nan", flag, "i32")]
    title = f"{spans[W].size}, flag {flag}"
    reads = (G, M, V)[: 1 + moments]
    return Case(f"RANGE_UPDATE_{kind}", title, tuple(inputs), (), {"decay": decay}, spans, reads, (W, A))


def random_spans(n: int) -> dict[Region, npt.NDArray[Any]]:
    rng = np.random.default_rng(n)
    return {
        W: rng.normal(size=n),
        A: rng.normal(size=n),
        G: rng.normal(size=n) * 8,
        M: rng.normal(size=n),
        V: rng.random(n),
    }


def stored(values: npt.NDArray[Any], dtype: DType = DType.FP32) -> npt.NDArray[np.float64]:
    """As a tensor of this type holds them."""
    return loaded(narrowed(values, "f", dtype), "f", dtype)


def test_optimizers_and_averages_equal_float64_in_every_order_of_threads() -> None:
    cases = [*updates(), *averages(), *flags()]
    for i, n in enumerate(TAILS):
        cases += [update(kind, random_spans(n), decay=(i + k) % 2 == 0) for k, kind in enumerate(KINDS)]
        spans = {W: random_spans(n)[W], E: random_spans(n + 1)[W][:n]}
        scalars = (scalar("ema_decay", 0.9), scalar("has_nan", 0, "i32"))
        cases.append(Case("RANGE_EMA_UPDATE", str(n), scalars, (), {}, spans, (W,), (E,)))
    check(cases)


def test_half_copy_is_the_new_weight_rounded_once() -> None:
    for f in HALVES:
        for kind in KINDS:
            got = measured(update(kind, random_spans(1030)), f)
            np.testing.assert_array_equal(got[A.name], stored(got[W.name], f))


def test_padding_stays_zero_and_a_step_of_rate_zero_keeps_every_weight() -> None:
    spans = random_spans(1030)
    for values in spans.values():
        values[256:512] = 0
    for kind in KINDS:
        for decay in (True, False):
            got = measured(update(kind, spans, decay=decay), DType.FP16)
            assert not any(values[256:512].any() for values in got.values())
            still = measured(update(kind, spans, decay=decay, lr=0.0), DType.FP16)
            np.testing.assert_array_equal(still[W.name], stored(spans[W]))


def test_scalars_are_read_by_each_launch() -> None:
    """Law 4: the same calls, captured once, follow a new learning rate, and the flag."""
    case = update("ADAMW", random_spans(1030))
    node, ids = wiring(case)
    bench = CudaBench(DType.FP16)
    for operand in case.inputs:
        place(bench, operand, DType.FP16)
    for region, values in case.spans.items():
        bench.add_span(region, narrow(values, region.dtype(DType.FP16)))
    calls = launcher(case.op)(node, bench)
    weights = bench.span_array(node.spans_out[0], DType.FP32)
    for rate, flag, moves in ((0.0, 0, False), (1e-3, 0, True), (1e-3, 1, False)):
        bench.array(ids["lr"])[...], bench.array(ids["has_nan"])[...] = rate, flag
        before = weights.copy()
        bench.run(calls)
        assert (weights != before).all() if moves else (weights == before).all()


def test_flagged_step_leaves_every_byte_of_what_persists() -> None:
    """Law 5, with gradients and losses that are NaN: all optimizers, averages, statistics, LARS, counters, metrics."""
    spans = random_spans(1030)
    spans[G][:] = np.nan
    cases = [update(kind, spans, flag=1) for kind in KINDS]
    flag = scalar("has_nan", 1, "i32")
    cases.append(
        Case("RANGE_EMA_UPDATE", "", (scalar("ema_decay", 0.9), flag), (), {}, {W: spans[G], E: spans[W]}, (W,), (E,))
    )
    cases.append(Case("RANGE_COPY", "", (flag,), (), {}, {W: spans[G], E: spans[W]}, (W,), (E,)))
    cases += [lars(n, flag=1, grad=np.full(n, np.nan)) for n in (5, LARS_ALONE + 1)]
    cases.append(adam_step(step=5, flag=1))
    cases.append(counter("DROPOUT_ADVANCE", "dropout_step", 7, flag=1))
    for case in cases:
        for f in (DType.FP32, *HALVES):
            got = measured(case, f)
            for out in case.outputs:
                if out.name in got and out.start is not None:
                    want = stored(out.start, f) if out.kind == "f" else out.start.astype(np.float32)
                    np.testing.assert_array_equal(got[out.name], want, f"{case.op} {out.name}")
            for region in case.writes:
                if region.name in got:
                    want = stored(case.spans[region], region.dtype(f))
                    np.testing.assert_array_equal(got[region.name], want, f"{case.op} {region.name}")


def check_nan(
    grad: npt.ArrayLike, clip: float = 0.0, scaling: float = 1.0, watched: npt.ArrayLike = (), more: npt.ArrayLike = ()
) -> Case:
    spans = {G: np.asarray(grad, np.float64), Region.R_RESULT: np.asarray(watched), Region.B_NEXT_VAR: np.asarray(more)}
    present = {r: v for r, v in spans.items() if r is G or v.size}
    out = Out("has_nan", ONE, "i32", start=np.full(ONE, 9))
    writes = (G,) if clip > 0 else ()
    return Case(
        "RANGE_CHECK_NAN",
        f"clip {clip}",
        (scalar("scaling", scaling),),
        (out,),
        {"clip": clip},
        present,
        tuple(present),
        writes,
    )


def flagged(case: Case) -> int:
    return int(measured(case, DType.FP32)["has_nan"].item())


@pytest.mark.parametrize("n", [1, 3, 1030, 5000])
def test_one_bad_element_anywhere_raises_the_flag(n: int) -> None:
    clean = np.random.default_rng(n).normal(size=n)
    clean[0] = np.nextafter(np.float32(GRADIENT_LIMIT), np.float32(0))
    clean[n // 2] = 1e-42
    for clip in (0.0, 1.0):
        assert flagged(check_nan(clean, clip)) == 0
        for position in {0, n // 2, n - 1}:
            for bad in (np.nan, np.inf, -np.inf):
                grad = clean.copy()
                grad[position] = bad
                assert flagged(check_nan(grad, clip)) == 1
                assert flagged(check_nan(clean[:1], clip, watched=grad)) == 1
                assert flagged(check_nan(clean[:1], clip, watched=clean, more=grad)) == 1
    for clip in (0.0, 1.0):
        assert measured(check_nan(np.full(n, np.nan), clip), DType.FP32, order=5, race=True)["has_nan"] == 1
    check([check_nan(clean), check_nan(clean * 1e3, 2.0, 1024.0, clean, clean)], FULL)


def test_gradient_whose_square_is_not_finite_raises_the_flag_unless_it_is_clipped_or_only_watched() -> None:
    for large in (GRADIENT_LIMIT, -GRADIENT_LIMIT, 3.4e38):
        assert flagged(check_nan([1.0, large, -1.0])) == 1
        assert flagged(check_nan([1.0, large, -1.0], 1.0)) == 0
        assert flagged(check_nan([1.0], 0.0, 1.0, [large], [large, 1.0])) == 0


def test_largest_gradient_that_passes_leaves_finite_moments() -> None:
    spans = {r: np.ones(8) for r in (W, A, M, V)} | {
        G: np.full(8, np.nextafter(np.float32(GRADIENT_LIMIT), np.float32(0)))
    }
    for kind in ("ADAM", "ADAMW"):
        got = measured(update(kind, spans, scaling=1.0, beta2=0.01), DType.BF16)
        assert all(np.isfinite(values).all() for values in got.values())


def test_clipping_limits_the_unscaled_gradient() -> None:
    got = measured(check_nan([-9000.0, -1000.0, 0.5, 2048.0, 2049.0], 2.0, 1024.0), DType.FP32)
    assert got[G.name].tolist() == [-2048.0, -1000.0, 0.5, 2048.0, 2048.0]


def grad_scaling(flag: int, scale: float, good: int, interval: int = 3) -> tuple[float, int]:
    inputs = (scalar("has_nan", flag, "i32"), scalar("scaling", scale), scalar("good_steps", good, "i32"))
    outputs = (Out("scaling", ONE, "fp32"), Out("good_steps", ONE, "i32"))
    attrs = {"growth_interval": interval, "backoff": 0.5, "floor": 1.0}
    got = measured(Case("GRAD_SCALING", "", inputs, outputs, attrs), DType.FP32)
    return float(got["scaling"].item()), int(got["good_steps"].item())


def test_loss_scale_halves_on_overflow_and_grows_after_clean_steps() -> None:
    state, seen = (4.0, 0), []
    for flag in (0, 0, 1, 1, 1, 1, 0, 0, 0, 0):
        state = grad_scaling(flag, *state)
        seen.append(state)
    assert seen == [(4, 1), (4, 2), (2, 0), (1, 0), (1, 0), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]
    assert grad_scaling(0, 2.0**31, 2) == (2.0**31, 0)
    with pytest.raises(ValueRejected, match="GRAD_SCALING #7: growth_interval 0"):
        grad_scaling(0, 4.0, 0, interval=0)


def adam_step(step: int, flag: int = 0) -> Case:
    inputs = (scalar("has_nan", flag, "i32"), scalar("step", step, "i32"), scalar("beta", 0.9), scalar("beta2", 0.999))
    corrections = tuple(Out(name, ONE, "fp32", start=np.full(ONE, 0.25)) for name in ("c1", "c2"))
    return Case("ADAM_STEP", str(step), inputs, (Out("step", ONE, "i32", start=np.full(ONE, step)), *corrections))


def counter(op: str, name: str, value: int, flag: int) -> Case:
    inputs = (scalar("has_nan", flag, "i32"), scalar(name, value, "i32"))
    return Case(op, f"flag {flag}", inputs, (Out(name, ONE, "i32", start=np.full(ONE, value)),))


def test_counters_and_bias_corrections_equal_float64() -> None:
    cases = [adam_step(t) for t in (0, 1, 2, 38, 1000, 2_000_000)]
    cases += [counter("DROPOUT_ADVANCE", "dropout_step", 41, flag) for flag in (0, 1)]
    check(cases, FULL)
    assert measured(cases[-2], DType.FP32)["dropout_step"] == 42
    assert measured(cases[5], DType.FP32)["c1"] == 1.0


def test_scalars_of_the_host_reach_their_places() -> None:
    lr, valid = np.zeros(1, np.float32), np.zeros(1, np.int32)
    stage = module(KERNELS / "scalars.cu")["stage_scalars"]
    stage((1, 1, 1), (32, 1, 1), [np.float32([0.125]), np.int32([200]), lr, valid])
    assert (lr.item(), valid.item()) == (0.125, 200)


def lars(
    n: int,
    *,
    flag: int = 0,
    nesterov: bool = False,
    grad: npt.NDArray[Any] | None = None,
    large: float = 1.0,
    **given: float,
) -> Case:
    rng = np.random.default_rng(n)
    values = {"lr": 0.5, "wd": 0.05, "beta": 0.9, "trust": 0.02, "eps": 1e-8, "scaling": 8.0} | given
    shape = (1, 1, 1, n)
    grad = rng.normal(size=n) * 8 if grad is None else grad
    inputs = [scalar(name, value) for name, value in values.items()]
    inputs += [scalar("has_nan", flag, "i32"), In("grad", grad.reshape(shape), "fp32")]
    outs = (
        Out("weight", shape, "fp32", 8, start=rng.normal(size=shape) * large),
        Out("m", shape, "fp32", 8, start=rng.normal(size=shape)),
        Out("ratio", ONE, "fp32", 8, start=np.full(ONE, 7.0)),
        Out("half", shape, "f", 8, start=rng.normal(size=shape)),
    )
    return Case("LARS_UPDATE", f"{n}, flag {flag}", tuple(inputs), outs, {"nesterov": nesterov})


def test_lars_equals_float64_in_every_order_of_threads() -> None:
    """One block alone, a few blocks, and more elements than partial sums have threads."""
    check([*trust_ratios(), *(lars(n, nesterov=bool(n % 2)) for n in (*TAILS, LARS_ALONE, LARS_ALONE + 5))])
    check([lars(LARS_PARTIALS * 512 * 4 + 777)], (DType.FP16,), orders=(5,))
    measured(lars(LARS_ALONE + 5), DType.BF16, order=5, race=True)


def test_norms_of_a_large_tensor_are_double_and_the_ratio_is_clamped() -> None:
    """The sum of 300,000 squares of 1 + 1e-3 is off by more than 1e-4 when it is kept in float32."""
    n = 300_000
    case = lars(n, grad=np.full(n, 8.0), wd=0.0, eps=0.0)
    case = Case(
        case.op,
        "",
        case.inputs,
        (Out("weight", (1, 1, 1, n), "fp32", start=np.full((1, 1, 1, n), 1.001)), *case.outputs[1:3]),
        case.attrs,
    )
    assert measured(case, DType.FP32)["ratio"].item() == pytest.approx(0.02 * float(np.float32(1.001)), rel=2e-7)
    for size in (50, LARS_ALONE + 1):
        for large, factor, expected in ((0.0, 1.0, 1.0), (1.0, 0.0, 1.0), (1e-15, 1e-15, 1.0), (1.0, 1e-9, 100.0)):
            got = measured(lars(size, grad=np.full(size, 8.0 * factor), large=large, wd=0.0, trust=1.0), DType.FP32)
            assert got["ratio"] == expected
            assert np.isfinite(got["weight"]).all()


def cast(op: str, spans: Mapping[Region, npt.NDArray[Any]], source: Region, target: Region) -> Case:
    return Case(op, str(spans[source].size), (), (), {}, spans, (source,), (target,))


def test_spans_are_copied_cleared_and_cast() -> None:
    flag = scalar("has_nan", 0, "i32")
    for n in TAILS:
        spans = random_spans(n)
        pair = {W: spans[W], E: spans[G]}
        check([Case("RANGE_COPY", str(n), inputs, (), {}, pair, (W,), (E,)) for inputs in ((), (flag,))], FULL)
        check([Case("RANGE_CLEAR", str(n), (), (), {}, pair, (), (W, E))], FULL)
        for f in HALVES:
            down = cast("RANGE_CAST_FP32_TO_HALF", spans, W, A)
            up = cast("RANGE_CAST_HALF_TO_FP32", spans, A, W)
            for order, race in ((0, False), (1, False), (5, True)):
                got = measured(down, f, order, race)
                np.testing.assert_array_equal(got[A.name], stored(stored(spans[W]), f))
                np.testing.assert_array_equal(measured(up, f, order, race)[W.name], stored(spans[A], f))
    edges = np.array(
        [65504.0, 65519.0, 65520.0, 1e5, -np.inf, np.nan, 2.0**-24, 2.0**-26, 1 + 2.0**-11, 1 + 3 * 2.0**-11]
    )
    got = measured(Case("RANGE_CAST_FP32_TO_HALF", "", (), (), {}, {W: edges, A: edges}, (W,), (A,)), DType.FP16)[
        A.name
    ]
    np.testing.assert_array_equal(got, [65504, 65504, np.inf, np.inf, -np.inf, np.nan, 2.0**-24, 0, 1, 1 + 2.0**-9])


def test_operands_that_do_not_fit_are_refused_by_name() -> None:
    spans = random_spans(64)
    with pytest.raises(
        ShapeError, match="RANGE_UPDATE_ADAMW #7: span M_FC_WEIGHT has 128 bytes but W_FC_WEIGHT has 256"
    ):
        measured(update("ADAMW", spans | {M: spans[M][:32]}), DType.FP32)
    with pytest.raises(ShapeError, match="RANGE_UPDATE_SGD #7: span A_FC_WEIGHT has 64 bytes; expected 128"):
        measured(update("SGD", spans | {A: spans[A][:32]}), DType.FP16)
    with pytest.raises(ValueRejected, match="RANGE_CHECK_NAN #7: clip is inf"):
        measured(check_nan(spans[G], np.inf), DType.FP32)
    with pytest.raises(
        DTypeError, match=r"RANGE_CAST_FP32_TO_HALF #7.*are FP32 and FP32; expected.*half type \(FP16\)"
    ):
        measured(cast("RANGE_CAST_FP32_TO_HALF", spans, W, G), DType.FP16)
    case = lars(10)
    with pytest.raises(ShapeError, match="LARS_UPDATE #7: 7 inputs and 4 outputs"):
        measured(Case(case.op, "", case.inputs[:7], case.outputs, case.attrs), DType.FP16)
    with pytest.raises(DTypeError, match="LARS_UPDATE #7: tensor 'lr' is INT32; expected FP32"):
        measured(Case(case.op, "", (scalar("lr", 1, "i32"), *case.inputs[1:]), case.outputs, case.attrs), DType.FP16)
