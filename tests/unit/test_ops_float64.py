"""Every op of the CPU backend, forward and backward, fp32 and bf16, against float64 on a sweep of shapes.

What is allowed follows from the arithmetic (fp32 sums of so many terms, one rounding of the result), not from what was
measured; ``python -m bench.op_errors`` prints how much of it is used.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from op_cases import Case, compare, dtype_of, exact, for_type, measured
from op_sweep import FAMILIES

from renaissance.core.dtype import DType
from renaissance.core.shape import Shape
from renaissance.graph.op_schema import check_arity, check_types, roles_for
from renaissance.graph.op_types import TensorType
from renaissance.graph.ops import OPS

CASES: dict[str, list[Case]] = defaultdict(list)
for family in FAMILIES:
    for case in family():
        CASES[case.op].append(case)

WITHOUT_ROUNDING = {
    "ACCUM_METRICS",
    "ADAM_STEP",
    "GRAD_SCALING",
    "LABEL_COPY",
    "RANGE_CAST_FP32_TO_HALF",
    "RANGE_CAST_HALF_TO_FP32",
    "RANGE_CHECK_NAN",
    "RANGE_CLEAR",
    "RANGE_COPY",
    "RANGE_MEAN_ALLREDUCE",
}
"""Copies, counters and checks: compared bit for bit in the tests of their kernels."""
FORWARD = sorted(op for op in CASES if op.endswith(("_FWD", "_INF")) and not op.startswith("SOFTMAX"))


def test_the_sweep_has_every_op_that_rounds_in_the_order_of_the_op_table() -> None:
    assert set(CASES) == set(OPS) - WITHOUT_ROUNDING
    for op, cases in CASES.items():
        for whole in cases:
            case = for_type(whole, DType.BF16)
            declared = OPS[op]
            assert set(case.attrs) == set(declared.attrs), op
            check_arity(op, "inputs", len(case.inputs), roles_for(declared, declared.inputs, case.attrs))
            roles = [o.role for o in declared.outputs]
            check_arity(op, "outputs", len(case.outputs), roles_for(declared, roles, case.attrs))
            inputs = [TensorType(Shape(*i.values.shape), dtype_of(i.kind, DType.BF16)) for i in case.inputs]
            outputs = [TensorType(Shape(*o.shape), dtype_of(o.kind, DType.BF16)) for o in case.outputs]
            check_types(f"{op} {case.title}", declared, inputs, outputs, case.attrs)


@pytest.mark.parametrize("f", [DType.FP32, DType.BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("op", sorted(CASES))
def test_op_equals_float64(op: str, f: DType) -> None:
    for case in CASES[op]:
        for error in compare(case, f, measured(case, "cpu", f)):
            assert error.of_allowed <= 1, f"{op} {case.title}: {error}"


@pytest.mark.parametrize("f", [DType.FP32, DType.BF16], ids=["fp32", "bf16"])
def test_rows_past_the_batch_stay_finite_and_get_no_gradient(f: DType) -> None:
    for case in CASES["BN_FWD"] + CASES["BN_BWD"]:
        valid = int(next(i.values.item() for i in case.inputs if i.name == "batch_valid"))
        got = measured(case, "cpu", f)
        if "y" in got:
            assert np.isfinite(got["y"]).all(), case.title
        for name in {"dx", "dresidual"} & set(got):
            assert not got[name][valid:].any(), case.title


@pytest.mark.parametrize("f", [DType.FP32, DType.BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("op", FORWARD)
def test_nan_passes_through(op: str, f: DType) -> None:
    """Law 5: a NaN that a forward op swallowed would never reach the NaN check."""
    for case in CASES[op]:
        x = case.inputs[0].values.astype(np.float64)
        x[(0, *(size // 2 for size in x.shape[1:]))] = np.nan
        planted = replace(case, inputs=(replace(case.inputs[0], values=x), *case.inputs[1:]))
        got, want = measured(planted, "cpu", f), exact(planted, f)
        name = case.outputs[0].name
        rows = case.outputs[0].rows
        expected = np.isnan(want[name][:rows])
        assert (np.isnan(got[name][:rows]) >= expected).all(), case.title
