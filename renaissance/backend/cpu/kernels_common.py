"""What every Numba kernel of the CPU backend shares: lazy compilation, block size, bfloat16 conversion.

Work is cut into blocks by size only, and every inner loop runs from 0 over a block's own view: LLVM then knows that no
index is negative, which is what lets it vectorise. A kernel is compiled when the first graph that needs it is captured
(and cached on disk), so a process pays only for the ops it uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cfunc, njit

from renaissance.backend.cpu.intrinsics import KERNEL
from renaissance.backend.registry import CaptureContext, label
from renaissance.core.dtype import DType
from renaissance.core.errors import DTypeError, MissingKernelError
from renaissance.graph.computation_graph import Node
from renaissance.tensor.dtensor import DTensor

BLOCK = 1024
"""Elements per block: the fp32 streams of one optimizer block (w, g, m, v) fit the first-level cache together."""
PARALLEL_ELEMENTS = 32768
"""Below this many elements a kernel runs in the launching thread: waking the team costs more than it saves. The choice
depends on the size only, and a kernel gives the same bits either way."""


class Kernel:
    """A Numba ``cfunc`` of signature ``KERNEL`` that is compiled when its address is first asked for."""

    def __init__(self, function: Callable[[int], None]) -> None:
        self._function = function
        self._compiled: Any = None
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__

    @property
    def address(self) -> int:
        """Address of the compiled function."""
        if self._compiled is None:
            self._compiled = cfunc(KERNEL, cache=True, error_model="numpy")(self._function)
        return int(self._compiled.address)


def team_for(ctx: CaptureContext, elements: int) -> int:
    """Threads for an element-wise kernel over ``elements``: the whole team, or 1 when the work is small."""
    return ctx.threads if elements >= PARALLEL_ELEMENTS else 1


def is_half(node: Node, tensor: DTensor) -> bool:
    """True for BF16, False for FP32; raises MissingKernelError for FP16 and DTypeError for anything else."""
    if tensor.dtype is DType.FP16:
        raise MissingKernelError(
            f"{label(node)}: tensor {tensor.name!r} is fp16 and the CPU kernels know fp32 and bf16; use bf16"
        )
    if tensor.dtype not in (DType.FP32, DType.BF16):
        raise DTypeError(f"{label(node)}: tensor {tensor.name!r} is {tensor.dtype.name}; expected FP32 or BF16")
    return tensor.dtype is DType.BF16


def same_type(node: Node, ctx: CaptureContext, *ids: int) -> int:
    """1 when all tensors are BF16, 0 when all are FP32; raises DTypeError for a mixture."""
    tensors = [ctx.tensor(i) for i in ids]
    kinds = {is_half(node, t) for t in tensors}
    if len(kinds) > 1:
        given = ", ".join(f"{t.name} {t.dtype.name}" for t in tensors)
        raise DTypeError(f"{label(node)}: tensors of different types: {given}; expected one type")
    return int(kinds.pop())


@njit(cache=True)
def bf16_bits(bits):  # type: ignore[no-untyped-def]  # uint32 pattern of a float32 -> uint16; nearest even, NaN stays quiet
    # Numba widens every integer operation to 64 bits; each cast back keeps twice as many lanes in a vector.
    last = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    rounded = np.uint32(np.uint32(bits + np.uint32(0x7FFF)) + last)
    if np.uint32(bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
        rounded = np.uint32(bits | np.uint32(0x400000))
    return np.uint16(np.uint32(rounded >> np.uint32(16)))


@njit(cache=True)
def narrow(value):  # type: ignore[no-untyped-def]  # float32 -> uint16 bfloat16, nearest even
    return bf16_bits(np.float32(value).view(np.uint32))


@njit(cache=True)
def widen(pattern):  # type: ignore[no-untyped-def]  # uint16 bfloat16 -> the same number as float32
    return np.uint32(np.uint32(pattern) << np.uint32(16)).view(np.float32)
