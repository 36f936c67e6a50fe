"""What a launcher of a host backend sees at capture: the context of one input slot, working memory; and programs of
its calls."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from renaissance.backend.arena import MemoryArena, reserve
from renaissance.backend.programs import EMA_GRAPHS, VALIDATION_GRAPHS
from renaissance.backend.registry import Call, NativeCall, PythonCall, flat_view
from renaissance.core.dtype import DType
from renaissance.core.errors import GraphError, MemoryPlanError, ValueRejected
from renaissance.core.region import Span, align
from renaissance.graph.captured import CapturedGraph, CaptureMode
from renaissance.graph.ids import GraphId
from renaissance.graph.memory_plan import MemoryPlan
from renaissance.tensor.dtensor import DTensor

Binding = Mapping[int, int]
"""Tensor id of an external input -> address of its bytes."""
CACHE_LINE = 64
POOL_BYTES = 64 << 10


class WorkMemory:
    """Scratch that all calls share, small private blocks and named shared ones; all taken before the arena is sealed.

    The scratch is reserved address space whose pages exist only once they are touched: how much the calls need is known
    when the last one has been built, and their addresses have to be known before. ``commit`` then makes it real.
    """

    def __init__(self, arena: MemoryArena, *, beside: WorkMemory | None = None) -> None:
        """``beside``: another one whose shared blocks are used."""
        self._arena = arena
        self.asked = 0
        """The most scratch that was asked for at once."""
        self._reserved, self._scratch = reserve()
        self._pool = self._pool_end = 0
        self._shared: dict[tuple[Hashable, int], int] = {} if beside is None else beside._shared

    def scratch(self, nbytes: int) -> int:
        """Address of the shared scratch."""
        if nbytes > self._reserved.size:
            raise MemoryPlanError(f"scratch: {nbytes} bytes were asked for; this machine has {self._reserved.size}")
        self.asked = max(self.asked, nbytes)
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

    def shared(self, key: Hashable, nbytes: int) -> int:
        """Address of zeroed bytes that all who ask with this key and size get."""
        if (key, nbytes) not in self._shared:
            self._shared[key, nbytes] = self._take(max(nbytes, 1), "shared working memory")
        return self._shared[key, nbytes]

    def commit(self) -> None:
        """Touch the pages of the scratch, so that no step pays for them, and count them as allocated."""
        self._arena.adopt(self._reserved[: self.asked])

    def poison(self) -> None:
        """Fill the scratch with NaN."""
        self._reserved[: self.asked] = 0xFF

    def _take(self, nbytes: int, what: str) -> int:
        return int(self._arena.block(nbytes, what).ctypes.data)


class Preparations:
    """Calls that a validation pass needs once, before its first step (packed and folded weights), by kind of pass."""

    def __init__(self) -> None:
        self._calls: dict[bool, dict[Hashable, tuple[Call, ...]]] = {False: {}, True: {}}

    def add(self, ema: bool, key: Hashable, calls: Sequence[Call]) -> None:
        """Register ``calls`` unless the key is known."""
        self._calls[ema].setdefault(key, tuple(calls))

    def calls(self, ema: bool) -> list[Call]:
        """Everything registered for passes with the main weights or (``ema``) their moving average, in order."""
        return [c for calls in self._calls[ema].values() for c in calls]


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
        preparations: Preparations,
        graph: GraphId,
    ) -> None:
        self._arena, self._plan, self._binding, self._work = arena, plan, binding, work
        self.threads, self.half = threads, half
        self._preparations, self._graph = preparations, graph

    @property
    def validating(self) -> bool:
        return self._graph in VALIDATION_GRAPHS

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

    def shared(self, key: Hashable, nbytes: int) -> int:
        return self._work.shared(key, nbytes)

    def prepare(self, key: Hashable, calls: Sequence[Call]) -> None:
        if not self.validating:
            raise GraphError(f"{self._graph.name}: a preparation outside the validation graphs would run too rarely")
        self._preparations.add(self._graph in EMA_GRAPHS, key, calls)

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


def queue_of(calls: Sequence[Call], backend: str, threads: int) -> CapturedGraph:
    """The calls as a program of ``backend`` that runs on a team of ``threads``.

    Raises ValueRejected for a call of another backend: one that is left out would be an op that does nothing.
    """
    kind = PythonCall if backend == "reference" else NativeCall
    for call in calls:
        if not isinstance(call, kind):
            raise ValueRejected(
                f"{call.label}: {type(call).__name__} on backend {backend!r}; a launcher of this backend returns "
                f"{kind.__name__}"
            )
    if backend == "reference":
        return PythonQueue([c for c in calls if isinstance(c, PythonCall)])
    from renaissance.backend.cpu.onednn import explain
    from renaissance.backend.cpu.queue import NativeQueue, team_call

    native = [c for c in calls if isinstance(c, NativeCall)]
    return NativeQueue([team_call(threads), *native] if native else [], explain)


def address(arena: MemoryArena, plan: MemoryPlan, tensor_id: int) -> int:
    """Address of a tensor in the arena; raises MemoryPlanError for one that lies outside and is not bound."""
    tensor = plan.tensor(tensor_id)
    if plan.is_external(tensor_id):
        raise MemoryPlanError(
            f"tensor {tensor.name!r} of {tensor.region.name} is an input that is not bound here; bind an input slot"
        )
    return arena.base + tensor.offset
