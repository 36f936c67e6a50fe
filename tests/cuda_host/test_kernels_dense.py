"""What goes with products and convolutions on a GPU: passes after them, masks, bias gradients, folded batch norm."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from cuda_bench import FLOATS, CudaBench, check, launcher, measured, needs_compiler
from cuda_emulator import thread_order
from kernel_memory import F32, Memory, narrow
from op_cases import Case, In, exact, loaded, place, wiring
from op_sweep import convolutions, products

from renaissance.backend.cuda.calls import CudaCall, KernelCall
from renaissance.backend.cuda.dense import ColumnSums, Finish, finish_grid, mask_relu, widen
from renaissance.core.dtype import DType
from renaissance.core.errors import DTypeError, RenaissanceError, ShapeError, ValueRejected

pytestmark = needs_compiler
by_type = pytest.mark.parametrize("dtype", FLOATS, ids=["fp32", "fp16", "bf16"])
PRODUCTS = list(products())
CONVOLUTIONS = list(convolutions())


def activate(values: F32, activation: int) -> F32:
    values = np.where(values <= 0, np.float32(0), values) if activation else values
    return np.where(values > 6, np.float32(6), values) if activation == 2 else values


@by_type
def test_the_pass_after_a_product_adds_in_float32_and_rounds_once(dtype: DType) -> None:
    """x is the sums in float32 or y itself; bias and residual may be absent; NaN stays."""
    shapes = ((1, 1), (3, 10), (5, 33), (7, 64), (70, 24), (2, 1000), (400, 6))
    sources = (dtype, DType.FP32) if dtype.is_half else (dtype,)
    options = itertools.product(shapes, sources, (False, True), (False, True), range(3))
    for i, ((rows, columns), source, with_bias, with_residual, activation) in enumerate(options):
        rng, memory = np.random.default_rng(i), Memory()
        x, residual = (3 * rng.standard_normal((rows, columns)) for _ in range(2))
        x[rows // 2, columns // 2] = np.nan
        from_, more = memory.put(x, source), memory.put(residual, dtype)
        bias = memory.put(rng.standard_normal(columns), DType.FP32)
        y = from_ if source is dtype else memory.empty(rows, columns, dtype=dtype)
        want = memory.get(from_, source)
        want = want + memory.get(bias) if with_bias else want
        want = want + memory.get(more, dtype) if with_residual else want
        finish = Finish(
            from_, y, rows, columns, dtype, bias if with_bias else None, more if with_residual else None, activation
        )
        call = finish.call("finish")
        memory.run(call)
        np.testing.assert_array_equal(
            memory.get(y, dtype), loaded(narrow(activate(want, activation), dtype), "f", dtype)
        )
        assert np.isnan(memory.get(y, dtype)).sum() == 1


def test_a_thread_of_the_pass_stays_in_its_columns() -> None:
    """A grid that takes several steps is a multiple of a row wide, or a thread would add the bias of other columns."""
    for columns, rows in itertools.product((1, 3, 8, 10, 24, 64, 1000, 4096, 50_257), (1, 100, 12_544, 802_816)):
        for dtype in FLOATS:
            line = 16 // dtype.itemsize
            width = line if columns % line == 0 else 1
            packs, (blocks, _, _) = rows * columns // width, finish_grid(rows * columns, columns, dtype)
            assert blocks * 256 >= packs or blocks * 256 % (columns // width) == 0
            assert blocks <= -(-packs // 256)
            assert packs <= 8 * 256 * blocks or blocks * 256 > 2**27
    for dtype, rows, columns, grid in ((DType.FP16, 1400, 24, 3), (DType.FP32, 300, 10, 5), (DType.BF16, 900, 8, 1)):
        memory, rng = Memory(), np.random.default_rng(1)
        x, bias = memory.put(rng.standard_normal((rows, columns)), dtype), memory.put(range(columns), DType.FP32)
        want = narrow(memory.get(x, dtype) + memory.get(bias), dtype)
        memory.run(Finish(x, x, rows, columns, dtype, bias).call("finish"), grid=grid)
        np.testing.assert_array_equal(memory.raw(x), want)


@by_type
def test_column_sums_have_one_order_whatever_the_threads_do(dtype: DType) -> None:
    """Short and long matrices, whole packs and single columns, against float64; a column of ones counts the rows."""
    sizes = ((1, 1), (7, 3), (200, 10), (1024, 65), (1025, 8), (3000, 300), (5001, 24), (70_000, 2), (2100, 272))
    for rows, columns in sizes:
        memory = Memory()
        values = np.random.default_rng(rows).standard_normal((rows, columns))
        values[:, 0] = 1
        x, sums = memory.put(values, dtype), ColumnSums(rows, columns, dtype)
        exact = memory.get(x, dtype).astype(np.float64)
        results = set()
        for order in (0, 1, 5):
            db, scratch = memory.empty(columns), memory.empty(max(sums.scratch_bytes // 4, 1))
            with thread_order(order):
                memory.run(*sums.calls(x, db, scratch, "sums"))
            results.add(memory.raw(db).tobytes())
        assert len(results) == 1
        got = memory.get(db).astype(np.float64)
        assert got[0] == rows
        allowed = 2.0**-24 * (np.sqrt(rows) + 40) * np.sqrt((exact**2).sum(axis=0)) + 1e-30
        assert (np.abs(got - exact.sum(axis=0)) <= allowed).all()


def test_column_sums_and_passes_have_no_races() -> None:
    for rows, columns, dtype in ((1300, 24, DType.FP16), (90, 65, DType.FP32)):
        memory, sums = Memory(), ColumnSums(rows, columns, dtype)
        x, db = memory.put(np.ones((rows, columns)), dtype), memory.empty(columns)
        scratch = memory.empty(max(sums.scratch_bytes // 4, 1))
        memory.run(*sums.calls(x, db, scratch, "sums"), race=True)
        assert (memory.get(db) == rows).all()
        bias = memory.put(np.ones(columns), DType.FP32)
        memory.run(Finish(x, x, rows, columns, dtype, bias).call("finish"), race=True)
        memory.run(mask_relu(x, x, rows * columns, dtype, "mask"), race=True)
        assert (memory.get(x, dtype) == 2).all()


@by_type
def test_a_gradient_passes_where_the_relu_was_open_and_where_it_saw_nan(dtype: DType) -> None:
    for n in (1, 7, 8, 4099):
        memory, rng = Memory(), np.random.default_rng(n)
        y = np.maximum(rng.standard_normal(n), 0)
        y[n // 2] = np.nan
        values = rng.standard_normal(n)
        values[0] = np.inf
        out, dx = memory.put(y, dtype), memory.put(values, dtype)
        want = np.where(memory.get(out, dtype) <= 0, np.float32(0), memory.get(dx, dtype))
        memory.run(mask_relu(out, dx, n, dtype, "mask"))
        np.testing.assert_array_equal(memory.get(dx, dtype), want)


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16], ids=["fp16", "bf16"])
def test_widening_keeps_every_pattern(dtype: DType) -> None:
    """All 65536 of them, NaNs and denormals too, and a last line that is not full."""
    memory = Memory()
    x = memory.put(np.zeros(65_536 + 5), dtype)
    memory.raw(x)[:65_536] = np.arange(65_536, dtype=np.uint16).view(memory.raw(x).dtype)
    y = memory.empty(65_536 + 5)
    memory.run(widen(x, y, 65_536 + 5, dtype, "widen"))
    np.testing.assert_array_equal(memory.raw(y), memory.get(x, dtype))


def test_products_equal_float64() -> None:
    check(PRODUCTS)


@by_type
def test_convolutions_equal_float64(dtype: DType) -> None:
    check(CONVOLUTIONS, (dtype,))


def masked(case: Case) -> Case:
    """A gradient of data that the ReLU of the layer below cuts, with a NaN in that layer's output."""
    shape = case.outputs[0].shape
    y = np.maximum(np.random.default_rng(shape).standard_normal(shape), 0)
    y[(0,) * 4] = np.nan
    return replace(case, inputs=(*case.inputs, In("y_prev", y)), attrs={"mask": "relu"})


@by_type
def test_the_mask_of_the_layer_below_cuts_a_gradient(dtype: DType) -> None:
    for case in (c for c in PRODUCTS if c.op == "FC_BWD_DATA"):
        whole, cut, y = measured(case, dtype)["dx"], measured(masked(case), dtype)["dx"], masked(case).inputs[2].values
        np.testing.assert_array_equal(cut, np.where(y <= 0, 0, whole))
        assert cut[(0,) * 4]


@by_type
def test_nan_passes_through(dtype: DType) -> None:
    """Law 5: of an operand, a bias and a residual."""
    for case in (*PRODUCTS, *CONVOLUTIONS):
        if case.op not in ("FC_FWD", "CONV_FWD", "CONV_INF"):
            continue
        for i in {0, len(case.inputs) - 1}:
            values = case.inputs[i].values.astype(np.float64)
            values[(0, *(size // 2 for size in values.shape[1:]))] = np.nan
            planted = replace(case.inputs[i], values=values)
            case_of_nan = replace(case, inputs=(*case.inputs[:i], planted, *case.inputs[i + 1 :]))
            got, want = measured(case_of_nan, dtype)["y"], exact(case_of_nan, dtype)["y"]
            assert (np.isnan(got) == np.isnan(want)).all(), f"{case.op} {case.title}"


def calls_of(case: Case, dtype: DType) -> tuple[list[str], list[str]]:
    """What one node issues before validation and in every step: names of kernels, "plan" for a library's."""
    bench = CudaBench(dtype if dtype.is_half else None)
    bench.validating = case.op == "CONV_INF"
    for operand in (*case.inputs, *case.outputs):
        place(bench, operand, dtype)
    calls = launcher(case.op)(wiring(case)[0], bench)

    def names(calls: Sequence[CudaCall]) -> list[str]:
        return [call.function if isinstance(call, KernelCall) else "plan" for call in calls]

    return names(bench.preparations), names(calls)


def test_an_op_issues_no_more_than_it_has_to() -> None:
    for cases, op in ((PRODUCTS, "FC_FWD"), (CONVOLUTIONS, "CONV_FWD")):
        plain, biased = (next(c for c in cases if c.op == op and len(c.inputs) == inputs) for inputs in (2, 3))
        plain = replace(plain, attrs={**plain.attrs, "activation": "none"})
        assert calls_of(plain, DType.FP16) == calls_of(plain, DType.FP32) == ([], ["plan"])
        assert calls_of(biased, DType.FP32) == ([], ["plan", "finish_f32"])
        # a product of half matrices has float32 sums, a convolution has not
        assert calls_of(biased, DType.BF16)[1][1] == ("finish_wide_bf16" if op == "FC_FWD" else "finish_bf16")
    inference = next(c for c in CONVOLUTIONS if c.op == "CONV_INF" and c.attrs["bias"] and c.attrs["residual"])
    assert calls_of(inference, DType.FP16) == (["fold_weights_f16", "fold_bias"], ["plan", "finish_f16"])
    gradient = next(c for c in CONVOLUTIONS if c.op == "CONV_BWD_WEIGHT" and len(c.outputs) == 2)
    assert calls_of(gradient, DType.FP32) == ([], ["plan", "column_sums_f32"])
    assert calls_of(gradient, DType.FP16) == ([], ["plan", "widen_f16", "column_sums_f16"])


def resized(case: Case, name: str, shape: tuple[int, ...]) -> Case:
    """The case with another shape of an operand."""
    inputs = tuple(replace(i, values=np.zeros(shape)) if i.name == name else i for i in case.inputs)
    return replace(
        case, inputs=inputs, outputs=tuple(replace(o, shape=shape) if o.name == name else o for o in case.outputs)
    )


def test_operands_that_do_not_fit_are_refused_by_name() -> None:
    fc = next(c for c in PRODUCTS if c.op == "FC_FWD" and len(c.inputs) == 3)
    rows, features, out = fc.inputs[0].values.shape[0], fc.inputs[0].values.shape[3], fc.outputs[0].shape[3]
    conv = next(c for c in CONVOLUTIONS if c.op == "CONV_FWD" and len(c.inputs) == 3)
    n, height, width, k = conv.outputs[0].shape
    half_bias = replace(fc, inputs=(*fc.inputs[:2], replace(fc.inputs[2], kind="f")))
    refused: list[tuple[Case, type[RenaissanceError], str]] = [
        (resized(fc, "w", (out, 1, 1, features + 1)), ShapeError, rf"'w' is .*; expected \[{out},1,1,{features}\]"),
        (resized(fc, "y", (rows, 1, 1, out + 1)), ShapeError, rf"'y' is .*; expected \[{rows},1,1,{out}\]"),
        (resized(fc, "b", (1, 1, 1, out + 1)), ShapeError, rf"'b' is .*; expected {out} elements"),
        (half_bias, DTypeError, "FC_FWD #7: tensor 'b' is BF16; expected FP32"),
        (replace(fc, attrs={"activation": "tanh"}), ValueRejected, "activation 'tanh'; expected one of: none, relu"),
        (
            resized(conv, "y", (n, height + 1, width, k)),
            ShapeError,
            rf"'y' is .*; expected \[{n},{height},{width},{k}\]",
        ),
        (
            resized(conv, "w", (k, 99, 99, conv.inputs[1].values.shape[3])),
            ShapeError,
            "no larger than the padded image",
        ),
        (
            replace(conv, attrs={**conv.attrs, "stride": 0}),
            ValueRejected,
            "stride 0; expected an integer of at least 1",
        ),
    ]
    for case, error, words in refused:
        with pytest.raises(error, match=words):
            measured(case, DType.BF16)
