"""What a SimpleTask runs on: memory for its plan and a program for each of its graphs, on the host or on a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol, cast

import numpy.typing as npt

from renaissance.backend.arena import MemoryArena
from renaissance.backend.capture import Preparations, SlotContext, WorkMemory, queue_of
from renaissance.backend.cuda import device as devices
from renaissance.backend.cuda.arena import DeviceArena
from renaissance.backend.cuda.calls import CudaCall
from renaissance.backend.cuda.context import NodeContext
from renaissance.backend.cuda.device import ORIGIN, DeviceContext
from renaissance.backend.cuda.mailbox import DeviceCopies
from renaissance.backend.cuda.program import Item, Program, capture_all, items_of
from renaissance.backend.executor import prepare_threads
from renaissance.backend.registry import Call, OpRegistry, default_registry
from renaissance.core.dtype import DType
from renaissance.graph import CapturedGraph, GraphId, MemoryPlan, Node
from renaissance.task.gpu import GpuChoice, gpu_failures

Graphs = Mapping[str, tuple[Node, ...]]


class SimpleRun(Protocol):
    """The tensors of a plan in memory, all zeros, and graphs that are captured."""

    def launch(self, graph: str) -> None:
        """Run a graph; what was written before is there, what it writes is there for what comes after."""

    def launch_uncaptured(self, graph: str) -> None:
        """The same call by call."""

    def read(self, tensor: int) -> npt.NDArray[Any]:
        """The elements [N,H,W,C] of a tensor as they are stored; for reading only."""

    def write(self, tensor: int, values: npt.NDArray[Any]) -> None:
        """Copy elements [N,H,W,C] into a tensor, converted to how they are stored."""


class _Before:
    """What a compiled model prepares once for a validation pass is done in every run here: weights may have changed."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.before: list[Any] = []

    def prepare(self, key: Hashable, calls: Sequence[Any]) -> None:
        self.before += calls


class _HostContext(_Before, SlotContext):
    """Of a node on the CPU."""


class _GpuContext(_Before, NodeContext):
    """Of a node on a GPU."""


def _registry(backend: str, graphs: Graphs) -> OpRegistry:
    registry = default_registry(backend)
    registry.require({node.op for nodes in graphs.values() for node in nodes}, backend)
    return registry


class HostRun:
    """On the CPU: backend "cpu" or "reference". Raises MissingKernelError for an op that it cannot run."""

    def __init__(self, plan: MemoryPlan, graphs: Graphs, backend: str, threads: int, half: DType | None) -> None:
        self._plan, self._graphs, self._backend, self._threads, self._half = plan, graphs, backend, threads, half
        self._registry = _registry(backend, graphs)
        prepare_threads(backend, threads, None)
        self._arena = MemoryArena(plan.total_bytes)
        self._work = WorkMemory(self._arena)
        self._captured: dict[str, CapturedGraph] = {}
        for name, nodes in graphs.items():
            calls = [call for node in nodes for call in self._calls(node, self._work)]
            self._captured[name] = queue_of(calls, backend, threads)
        self._work.commit()
        self._arena.seal()

    def _calls(self, node: Node, work: WorkMemory) -> Sequence[Call]:
        graph = GraphId.SIMPLE_TASK_GRAPH
        context = _HostContext(self._arena, self._plan, {}, work, self._threads, self._half, Preparations(), graph)
        calls = self._registry.launcher(node.op, self._backend)(node, context)
        return [*context.before, *calls]

    def launch(self, graph: str) -> None:
        self._captured[graph].launch()

    def launch_uncaptured(self, graph: str) -> None:
        """Every call is built anew, and is a program of its own."""
        work = WorkMemory(MemoryArena(1), beside=self._work)
        for node in self._graphs[graph]:
            for call in self._calls(node, work):
                queue_of([call], self._backend, self._threads).launch()

    def read(self, tensor: int) -> npt.NDArray[Any]:
        return SlotContext.view(self._arena, self._plan, tensor)

    def write(self, tensor: int, values: npt.NDArray[Any]) -> None:
        self.read(tensor)[...] = values


class GpuRun:
    """On a GPU: one allocation, a CUDA Graph for each graph. Raises MissingKernelError for an op without a kernel, and
    DeviceError when the GPU cannot be used."""

    def __init__(self, plan: MemoryPlan, graphs: Graphs, choice: GpuChoice, half: DType | None) -> None:
        self._plan, self._half = plan, half
        self._registry = _registry("cuda", graphs)
        with gpu_failures(f"GPU {choice.index}"):
            self._device = devices.open_device(choice.index, tf32=choice.tf32)
        self._arena = DeviceArena(plan.total_bytes)
        self._programs: dict[str, Program] = {}
        self._copies: DeviceCopies | None = None
        try:
            with gpu_failures(f"GPU {choice.index} ({self._device.name})"):
                self._capture(graphs)
        except BaseException:
            self._close(self._device, self._programs, self._copies, self._arena)
            raise
        # Not bound to this object, so that it can go; at the end of the process the driver gives everything back.
        weakref.finalize(self, self._close, self._device, self._programs, self._copies, self._arena).atexit = False

    def _capture(self, graphs: Graphs) -> None:
        """Measure the working memory, allocate, warm up, capture."""
        for nodes in graphs.values():
            self._items(nodes)
        self._arena.allocate(self._device.runtime, self._plan.tensors)
        self._copies = DeviceCopies(self._device, max(tensor.nbytes for tensor in self._plan.tensors))
        for name, nodes in graphs.items():
            self._programs[name] = Program(self._device, self._items(nodes))
        capture_all(self._device, self._arena, self._programs.values(), self._programs.values())

    def _items(self, nodes: Sequence[Node]) -> list[Item]:
        return items_of(Item("start", ORIGIN, ()), nodes, self._plan, self._calls)

    def _calls(self, node: Node) -> tuple[CudaCall, ...]:
        graph = GraphId.SIMPLE_TASK_GRAPH
        context = _GpuContext(self._device, self._arena, self._plan, self._half, Preparations(), graph, node.stream)
        calls = self._registry.launcher(node.op, "cuda")(node, context)
        return tuple(cast(CudaCall, call) for call in (*context.before, *calls))

    def launch(self, graph: str) -> None:
        """Returns at once; the next graph, and ``read``, wait for it."""
        self._programs[graph].launch()

    def launch_uncaptured(self, graph: str) -> None:
        """The same streams and events."""
        self._programs[graph].issue()

    def read(self, tensor: int) -> npt.NDArray[Any]:
        """A copy."""
        assert self._copies is not None  # made by _capture
        return self._copies.read_tensor(self._arena, self._plan.tensor(tensor))

    def write(self, tensor: int, values: npt.NDArray[Any]) -> None:
        assert self._copies is not None  # made by _capture
        self._copies.write_tensor(self._arena, self._plan.tensor(tensor), values)

    @staticmethod
    def _close(
        device: DeviceContext, programs: Mapping[str, Program], copies: DeviceCopies | None, arena: DeviceArena
    ) -> None:
        devices.give_back([device.synchronize, *(program.close for program in programs.values())])
        devices.give_back([arena.free] if copies is None else [copies.close, arena.free])
        device.close()
