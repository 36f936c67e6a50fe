"""What a launcher sees at capture: the context of one input slot, working memory, and the reference backend's queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt

from renaissance.backend.arena import MemoryArena
from renaissance.backend.registry import PythonCall, flat_view
from renaissance.core.dtype import DType
from renaissance.core.errors import MemoryPlanError
from renaissance.core.region import Span, align
from renaissance.graph.captured import CaptureMode
from renaissance.graph.memory_plan import MemoryPlan
from renaissance.tensor.dtensor import DTensor

Binding = Mapping[int, int]
"""Tensor id of an external input -> address of its bytes."""
CACHE_LINE = 64
POOL_BYTES = 64 << 10


class WorkMemory:
    """Scratch that all calls share, and small private blocks; both are taken from the arena, before it is sealed."""

    def __init__(self, arena: MemoryArena, scratch_bytes: int) -> None:
        self._arena = arena
        self.scratch_bytes = scratch_bytes
        self.asked = 0
        """The most scratch that was asked for at once."""
        self._scratch = self._take(scratch_bytes, "scratch") if scratch_bytes else 0
        self._pool = self._pool_end = 0

    def scratch(self, nbytes: int) -> int:
        """Address of the shared scratch. While sizes are being found (``scratch_bytes`` 0) it is no memory at all."""
        self.asked = max(self.asked, nbytes)
        if self.scratch_bytes and nbytes > self.scratch_bytes:
            raise MemoryPlanError(f"scratch: {nbytes} bytes were asked for; expected at most {self.scratch_bytes}")
        return self._scratch

    def private(self, nbytes: int) -> int:
        """Address of zeroed bytes that nobody else gets."""
        nbytes = align(max(nbytes, 1), CACHE_LINE)
        if self._pool + nbytes > self._pool_end:
            size = max(POOL_BYTES, nbytes)
            self._pool = self._take(size, "private working memory")
            self._pool_end = self._pool + size
        self._pool += nbytes
        return self._pool - nbytes

    def _take(self, nbytes: int, what: str) -> int:
        return int(self._arena.block(nbytes, what).ctypes.data)


class SlotContext:
    """``registry.CaptureContext`` for one plan and one input slot."""

    def __init__(
        self,
        arena: MemoryArena,
        plan: MemoryPlan,
        binding: Binding,
        work: WorkMemory,
        threads: int,
        half: DType | None,
    ) -> None:
        self._arena, self._plan, self._binding, self._work = arena, plan, binding, work
        self.threads, self.half = threads, half

    def tensor(self, tensor_id: int) -> DTensor:
        return self._plan.tensor(tensor_id)

    def ptr(self, tensor_id: int) -> int:
        if tensor_id in self._binding:
            return self._binding[tensor_id]
        return address(self._arena, self._plan, tensor_id)

    def array(self, tensor_id: int) -> npt.NDArray[Any]:
        if tensor_id not in self._binding:
            return self.view(self._arena, self._plan, tensor_id)
        tensor = self.tensor(tensor_id)
        return flat_view(self._binding[tensor_id], tensor.shape.numel, tensor.dtype.numpy).reshape(tensor.shape.dims)

    def span_ptr(self, span: Span) -> tuple[int, int]:
        offset, nbytes = self._plan.resolve_span(span)
        return self._arena.base + offset, nbytes

    def span_array(self, span: Span, dtype: DType) -> npt.NDArray[Any]:
        return self._arena.view(*self._plan.resolve_span(span)).view(dtype.numpy)

    def scratch(self, nbytes: int) -> int:
        return self._work.scratch(nbytes)

    def private(self, nbytes: int) -> int:
        return self._work.private(nbytes)

    @staticmethod
    def view(arena: MemoryArena, plan: MemoryPlan, tensor_id: int) -> npt.NDArray[Any]:
        """Writable view [N,H,W,C] of a tensor that lies in the arena."""
        tensor = plan.tensor(tensor_id)
        start = address(arena, plan, tensor_id) - arena.base
        return arena.view(start, tensor.nbytes).view(tensor.dtype.numpy).reshape(tensor.shape.dims)


class PythonQueue:
    """A program of the reference backend: Python calls in order (a ``CapturedGraph``)."""

    mode = CaptureMode.EAGER

    def __init__(self, calls: Sequence[PythonCall]) -> None:
        self._calls = tuple(calls)

    def launch(self) -> None:
        """Run every call in order."""
        for call in self._calls:
            call.fn()

    def dump(self) -> str:
        """One line per call."""
        return "\n".join(f"{i:4d}  {call.label}" for i, call in enumerate(self._calls))


def address(arena: MemoryArena, plan: MemoryPlan, tensor_id: int) -> int:
    """Address of a tensor in the arena; raises MemoryPlanError for one that lies outside and is not bound."""
    tensor = plan.tensor(tensor_id)
    if plan.is_external(tensor_id):
        raise MemoryPlanError(
            f"tensor {tensor.name!r} of {tensor.region.name} is an input that is not bound here; bind an input slot"
        )
    return arena.base + tensor.offset
