"""Pooling of CUDA on the emulator."""

from __future__ import annotations

from cuda_bench import check, needs_compiler
from op_sweep import pools

pytestmark = needs_compiler


def test_every_pool_agrees_with_float64() -> None:
    check(pools())
