"""Activations, sums, dropout, and ops that only move elements, on a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cuda_bench import FLOATS, check, launcher, measured, needs_compiler, run_case
from kernel_memory import F32, Memory, narrow
from op_cases import Case, In, Out, exact, loaded, scalar, stored, wiring
from op_cases import measured as measured_on
from op_sweep import ACTIVATIONS, activations, dropouts, sums, views

from renaissance.backend.cuda.calls import BLOCK, Buffer, CopyCall, KernelCall, f32, i32, i64, packs_grid, suffix, u32
from renaissance.backend.cuda.launch_elementwise import KINDS
from renaissance.backend.reference.elementwise import DERIVATIVE, FORWARD, dropout_factor
from renaissance.core.dtype import DType
from renaissance.core.errors import DTypeError, RenaissanceError, ShapeError, ValueRejected
from renaissance.core.philox import Domain, dropout_threshold, philox, purpose
from renaissance.graph.op_types import SAVES_INPUT
from renaissance.graph.ops import ACTIVATIONS as DECLARED

pytestmark = needs_compiler
SEED = (0x9ABCDEF0, 0x12345678)
EXTREMES = (0.0, -0.0, 1e-30, -1e-30, 0.5, -0.5, 3.0, -3.0, 6.0, 6.5, 30.0, -30.0, 89.0, -89.0, 1e4, -1e4)
by_type = pytest.mark.parametrize("dtype", FLOATS, ids=["fp32", "fp16", "bf16"])


def test_activations_equal_float64() -> None:
    check(activations())


def test_sums_and_means_equal_float64() -> None:
    check(sums())


def test_dropout_equals_float64() -> None:
    check(case for case in dropouts() if case.op != "DROPOUT_ADVANCE")


def test_moved_elements_equal_float64() -> None:
    check(views())


@by_type
def test_activations_and_slopes_keep_their_limits_and_nan(dtype: DType) -> None:
    """Nothing overflows on the way to a finite limit, and a NaN stays one."""
    assert set(KINDS) == set(DECLARED) == set(ACTIVATIONS)
    values = np.array([*EXTREMES, np.inf, np.nan, -np.inf]).reshape(1, 1, 1, -1)
    near = {"rtol": 2.0**-7 if dtype.is_half else 1e-5, "atol": 1e-6}
    for kind in KINDS:
        forward = Case("ACT_FWD", kind, (In("x", values),), (Out("y", values.shape),), {"kind": kind})
        y, x = measured(forward, dtype)["y"], loaded(stored(values, "f", dtype), "f", dtype)
        with np.errstate(invalid="ignore", over="ignore"):
            want = FORWARD[kind](x)
        if kind == "silu":
            want[..., -1] = 0  # the limit of x sigmoid(x)
        np.testing.assert_allclose(y, want, **near, err_msg=kind)

        saved = values if kind in SAVES_INPUT else y
        inputs = (In("dy", np.ones(values.shape)), In("saved", saved))
        backward = Case("ACT_BWD", kind, inputs, (Out("dx", values.shape),), {"kind": kind})
        held = loaded(stored(saved, "f", dtype), "f", dtype)
        slope = DERIVATIVE[kind](np.clip(held, -128, 128) if kind in SAVES_INPUT else held)
        np.testing.assert_allclose(measured(backward, dtype)["dx"], slope, **near, err_msg=kind)


@by_type
def test_a_slope_of_zero_lets_nothing_pass(dtype: DType) -> None:
    flat = {"relu": 0.0, "relu6": 6.0, "tanh": -1.0, "sigmoid": 1.0, "hardswish": -3.0, "elu": -1.0}
    for kind, saved in flat.items():
        inputs = (
            In("dy", np.array([np.nan, np.inf, 1.0]).reshape(1, 1, 1, 3)),
            In("saved", np.full((1, 1, 1, 3), saved)),
        )
        assert not measured(Case("ACT_BWD", kind, inputs, (Out("dx", (1, 1, 1, 3)),), {"kind": kind}), dtype)[
            "dx"
        ].any()


@by_type
def test_nan_passes_through(dtype: DType) -> None:
    """Law 5: a NaN that a forward op swallowed would never reach the NaN check."""
    for case in (*sums(), *views(), *dropouts()):
        if case.op == "DROPOUT_ADVANCE" or case.attrs.get("p") == 0.1:
            continue
        x = case.inputs[0].values.astype(np.float64)
        x[(0, *(size // 2 for size in x.shape[1:]))] = np.nan
        planted = replace(case, inputs=(replace(case.inputs[0], values=x), *case.inputs[1:]))
        name = case.outputs[0].name
        assert (np.isnan(measured(planted, dtype)[name]) == np.isnan(exact(planted, dtype)[name])).all(), case.title


def dropout_case(n: int, p: float, layer: int, step: int, values: F32) -> Case:
    state = zip(("seed_low", "seed_high", "dropout_step"), (*SEED, step), strict=True)
    inputs = (In("x", values.reshape(1, 1, 1, n)), *(scalar(k, v, "i32") for k, v in state))
    return Case("DROPOUT_FWD", f"{n}", inputs, (Out("y", (1, 1, 1, n)),), {"p": p, "layer": layer})


@by_type
def test_dropout_has_the_bits_of_the_cpu(dtype: DType) -> None:
    """Odd sizes, all thresholds; fp16, which the CPU does not know, keeps the same elements of the documented words."""
    for n, p, layer, step in ((1, 0.5, 0, 0), (7, 0.3, 2, 2**31 - 1), (1021, 0.999, 7, 1), (5003, 0.1, 2**24 - 1, 77)):
        values = np.random.default_rng(n).standard_normal(n).astype(np.float32)
        values[0] = -np.abs(values[0])
        case = dropout_case(n, p, layer, step, values)
        got = run_case(case, dtype).all_bytes()["y"]
        factor = dropout_factor(n, p, layer, SEED[0] | SEED[1] << 32, step).astype(np.float32)
        held = loaded(stored(values, "f", dtype), "f", dtype).astype(np.float32)
        assert got == narrow(held * factor + np.float32(0), dtype).tobytes()
        if dtype is not DType.FP16:
            assert got == stored(measured_on(case, "cpu", dtype)["y"], "f", dtype).tobytes()


def test_the_least_word_that_keeps_an_element_is_the_threshold() -> None:
    word = philox(SEED[0] | SEED[1] << 32, 2, purpose(Domain.DROPOUT, 1), 9, 0)[3]
    for threshold, factor in ((word, 2.0), (word + 1, 0.0)):
        memory = Memory()
        x, y = memory.put(np.ones(12)), memory.empty(12)
        seeds = [memory.keep(np.array([w], np.uint32).view(np.int32)) for w in (*SEED, 9)]
        scalars = (i64(12), u32(purpose(Domain.DROPOUT, 1)), u32(threshold), f32(2.0))
        memory.run(KernelCall("dropout", "dropout_f32", (1, 1, 1), BLOCK, (x, y, *seeds, *scalars), "dropout"))
        assert memory.get(y)[11] == factor


@by_type
def test_threads_that_walk_in_strides_give_the_same_bits(dtype: DType) -> None:
    """Of huge tensors a thread takes more than one line: here the grid is cut down to one block."""
    n = 3 * 256 * 8 + 5
    rng, ending = np.random.default_rng(3), suffix(dtype)
    a, b = rng.standard_normal(n), rng.standard_normal(n)
    words = [np.array([w], np.uint32).view(np.int32) for w in (*SEED, 9)]

    def calls(memory: Memory) -> tuple[list[KernelCall], list[Buffer]]:
        x, y = memory.put(a, dtype), memory.put(b, dtype)
        out = [memory.empty(n, dtype=dtype) for _ in range(5)]
        seeds = [memory.keep(w) for w in words]
        grid = packs_grid(n, dtype)
        size, drops = i64(n), (u32(purpose(Domain.DROPOUT, 1)), u32(dropout_threshold(0.4)), f32(1 / 0.6))
        return [
            KernelCall("elementwise", f"act_forward_{ending}", grid, BLOCK, (x, out[0], size, i32(4)), "a"),
            KernelCall("elementwise", f"act_backward_{ending}", grid, BLOCK, (x, y, out[1], size, i32(6)), "b"),
            KernelCall("elementwise", f"add_{ending}", grid, BLOCK, (x, y, out[2], size, i32(1)), "c"),
            KernelCall("dropout", f"dropout_{ending}", grid, BLOCK, (x, out[3], *seeds, size, *drops), "d"),
            KernelCall("shape", f"mean_logits_{ending}", grid, BLOCK, (x, y, x, x, x, out[4], size, i32(2)), "e"),
        ], out

    results = []
    for grid in (None, 1):
        memory = Memory()
        launches, outputs = calls(memory)
        memory.run(*launches, grid=grid)
        results.append([memory.raw(o).tobytes() for o in outputs])
    assert results[0] == results[1]
    assert len(set(results[0])) == 5


def test_pixels_and_rows_in_strides_move_to_the_same_places() -> None:
    rng = np.random.default_rng(4)
    x, wide = rng.integers(0, 2**16, (700, 3), np.uint16), rng.integers(0, 2**32, (700, 16), np.uint32)
    memory = Memory()
    padded, dropped = memory.keep(np.full((700, 8), 7, np.uint16)), memory.keep(np.full((700, 9), 7, np.uint32))
    pads = (memory.keep(x), padded, i64(700), i32(3), i32(8))
    drops = (memory.keep(wide), dropped, i64(700), i32(16), i32(9))
    picture = rng.integers(0, 2**16, (3, 5, 4, 3), np.uint16)
    view = memory.keep(np.zeros_like(picture))
    views_ = (memory.keep(picture), view, i64(15), i32(5), i32(4), i32(3), i32(1), i32(0), i32(0))
    for name, arguments in (("pad_channels_16", pads), ("drop_channels_32", drops), ("input_view_16", views_)):
        memory.run(KernelCall("shape", name, (3, 1, 1), BLOCK, arguments, name), grid=1)
    assert (memory.raw(padded)[:, :3] == x).all()
    assert not memory.raw(padded)[:, 3:].any()
    assert (memory.raw(dropped) == wide[:, :9]).all()
    assert (memory.raw(view) == picture[:, :, ::-1]).all()


def test_a_flatten_is_one_copy() -> None:
    case = next(c for c in views() if c.op == "FLATTEN_FWD" and c.inputs[0].values.size > 100)
    bench = run_case(case, DType.BF16)
    (call,) = launcher(case.op)(wiring(case)[0], bench)
    assert isinstance(call, CopyCall)
    assert bench.all_bytes()["x"] == bench.all_bytes()["y"]


def case_of(
    op: str, inputs: dict[str, tuple[int, ...]], output: tuple[int, ...], last: str = "f", **attrs: str
) -> Case:
    """Zeros of these shapes; ``last`` is the kind of the last input."""
    kinds = ["f"] * (len(inputs) - 1) + [last]
    operands = (In(name, np.zeros(shape), k) for (name, shape), k in zip(inputs.items(), kinds, strict=True))
    return Case(op, "", tuple(operands), (Out("y", output),), attrs)


EIGHT = (1, 1, 1, 8)
PAIR = {"a": EIGHT, "b": EIGHT}
NO_VALUES = np.zeros(4, np.float32)
REFUSED: tuple[tuple[Case, type[RenaissanceError], str], ...] = (
    (
        case_of("ACT_FWD", {"x": EIGHT}, (1, 1, 1, 9), kind="relu"),
        ShapeError,
        r"ACT_FWD #7: tensor 'y' is \[1,1,1,9\]; expected 8 elements",
    ),
    (
        case_of("ACT_FWD", {"x": EIGHT}, EIGHT, kind="gelu"),
        ValueRejected,
        "ACT_FWD #7: kind 'gelu'; expected one of: relu, ",
    ),
    (
        case_of("GRAD_SUM", PAIR, EIGHT, "fp32"),
        DTypeError,
        "GRAD_SUM #7: tensors of different types: a FP16, b FP32, y FP16; expected one type",
    ),
    (
        Case("FLATTEN_FWD", "", (In("x", np.zeros(EIGHT), "i32"),), (Out("y", EIGHT, "i32"),)),
        DTypeError,
        "FLATTEN_FWD #7: tensor 'x' is INT32; expected FP32, FP16 or BF16",
    ),
    (
        case_of("ADD_FWD", PAIR, EIGHT, activation="elu"),
        ValueRejected,
        "ADD_FWD #7: activation 'elu'; expected one of: none, relu, relu6",
    ),
    (
        case_of("CHANNEL_PADDING_FWD", {"x": (1, 2, 2, 3)}, (1, 2, 2, 16)),
        ShapeError,
        r"CHANNEL_PADDING_FWD #7: 'x' is \[1,2,2,3\] and 'y' is \[1,2,2,16\]",
    ),
    (
        case_of("INPUT_VIEW", {"x": (1, 2, 4, 1)}, (1, 4, 2, 1)),
        ShapeError,
        r"INPUT_VIEW #7: 'y' is \[1,4,2,1\]; expected \[1,2,4,1\] like 'x'",
    ),
    (dropout_case(4, 1.0, 0, 0, NO_VALUES), ValueRejected, "DROPOUT_FWD #7: p is 1.0; expected 0 <= p < 1"),
    (dropout_case(4, 0.5, 1 << 24, 0, NO_VALUES), ValueRejected, "DROPOUT_FWD #7: layer is 16777216; expected 0 to"),
)


@pytest.mark.parametrize(("case", "error", "words"), REFUSED, ids=[words.split(":")[0] for *_, words in REFUSED])
def test_operands_that_do_not_fit_are_refused_by_name(case: Case, error: type[RenaissanceError], words: str) -> None:
    with pytest.raises(error, match=words):
        run_case(case, DType.FP16)
