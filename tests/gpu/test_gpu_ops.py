"""Every op on the device against exact float64, in fp32, fp16 and bf16, with the bounds of the CPU's op sweep."""

from __future__ import annotations

from collections import defaultdict

import pytest
from gpu_bench import run_case
from op_cases import Case, compare, registry, results_of
from op_sweep import FAMILIES

from renaissance.backend.cuda.device import DeviceContext
from renaissance.core.dtype import DType
from renaissance.graph.ops import OPS

FLOATS = (DType.FP32, DType.FP16, DType.BF16)
CASES: dict[str, list[Case]] = defaultdict(list)
for family in FAMILIES:
    for one in family():
        CASES[one.op].append(one)


def test_every_op_of_the_table_runs_on_cuda() -> None:
    assert set(registry("cuda").ops("cuda")) == set(OPS)


@pytest.mark.parametrize("op", sorted(CASES))
def test_op_on_the_device_is_within_the_bounds_of_exact_arithmetic(device: DeviceContext, op: str) -> None:
    failures = []
    for f in FLOATS:
        for case in CASES[op]:
            bench = run_case(device, case, f)
            bad = [str(e) for e in compare(case, f, results_of(case, f, bench)) if e.of_allowed > 1]
            first = bench.all_bytes()
            bench.close()
            if f is DType.FP16:  # one type is enough to see bits that depend on timing
                again = run_case(device, case, f)
                if again.all_bytes() != first:
                    bad.append("other bits the second time")
                again.close()
            failures += [f"{op} {case.title}, {f.name}: {b}" for b in bad]
    assert not failures, "\n".join(failures[:20])
