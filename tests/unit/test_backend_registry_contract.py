"""The registry: a missing kernel is named at compile, and an op has one launcher per backend."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from renaissance.backend import OpRegistry, default_registry
from renaissance.backend.registry import Call, CaptureContext, flat_view
from renaissance.core.errors import MissingKernelError, ValueRejected
from renaissance.graph import OPS, Node


def launch(node: Node, ctx: CaptureContext) -> Sequence[Call]:
    return []


def other(node: Node, ctx: CaptureContext) -> Sequence[Call]:
    return []


def test_a_missing_kernel_names_op_backend_and_who_runs_it() -> None:
    registry = OpRegistry()
    registry.register("CONV_FWD", "reference", launch)
    with pytest.raises(MissingKernelError, match=r"op CONV_FWD has no kernel on backend 'cpu'; it runs on: reference"):
        registry.launcher("CONV_FWD", "cpu")
    with pytest.raises(MissingKernelError, match=r"op WARP_FWD .* no backend runs it"):
        registry.require(["WARP_FWD"], "cpu")


def test_all_missing_kernels_are_listed_at_once() -> None:
    registry = OpRegistry()
    registry.register("RELU_FWD", "cpu", launch)
    registry.require(["RELU_FWD"], "cpu")
    with pytest.raises(MissingKernelError, match="backend 'cpu': CONV_FWD, WARP_FWD"):
        registry.require(["WARP_FWD", "RELU_FWD", "CONV_FWD"], "cpu")


def test_an_op_has_one_launcher_per_backend() -> None:
    registry = OpRegistry()
    registry.register("RELU_FWD", "cpu", launch)
    registry.register("RELU_FWD", "cpu", launch)
    with pytest.raises(ValueRejected, match="RELU_FWD, backend cpu: already registered"):
        registry.register("RELU_FWD", "cpu", other)
    with pytest.raises(ValueRejected, match=r"unknown backend 'tpu'; expected one of: cpu, reference"):
        registry.register("RELU_FWD", "tpu", launch)
    with pytest.raises(ValueRejected, match="unknown backend 'tpu'"):
        default_registry("tpu")


def test_the_reference_backend_runs_every_op_of_one_rank() -> None:
    declared = set(OPS) - {"RANGE_MEAN_ALLREDUCE"}
    assert declared <= set(default_registry("reference").ops("reference"))


def test_a_flat_view_is_the_memory_itself() -> None:
    import numpy as np

    memory = np.arange(6, dtype=np.int32)
    view = flat_view(memory.ctypes.data + 4, 3, np.dtype(np.int32))
    view[1] = 77
    assert memory.tolist() == [0, 1, 77, 3, 4, 5]
