"""Program: calls on several streams with the events between them, issued one by one or captured as a CUDA Graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from renaissance.backend.cuda.arena import DeviceArena
from renaissance.backend.cuda.calls import CudaCall, LibraryCall
from renaissance.backend.cuda.device import ORIGIN, DeviceContext
from renaissance.backend.cuda.recording import recorded
from renaissance.backend.cuda.schedule import schedule
from renaissance.core.enums import StreamKind
from renaissance.graph.captured import CaptureMode
from renaissance.graph.computation_graph import Node
from renaissance.graph.dependence import data_predecessors
from renaissance.graph.memory_plan import MemoryPlan


@dataclass(frozen=True, slots=True)
class Item:
    """The calls of one node, and the positions of the earlier items that it depends on."""

    label: str
    stream: StreamKind
    calls: tuple[CudaCall, ...]
    before: frozenset[int] = frozenset()


def items_of(
    first: Item, nodes: Sequence[Node], plan: MemoryPlan, calls: Callable[[Node], tuple[CudaCall, ...]]
) -> list[Item]:
    """The nodes in order behind ``first``, with the dependences of the graph: values, and memory that is used again."""
    position = {node.index: at for at, node in enumerate(nodes, 1)}
    defined = data_predecessors(nodes, tuple(tensor.region for tensor in plan.tensors))
    items = [first]
    for node in nodes:
        before = frozenset(position[i] for i in (*defined[node.index], *node.after) if i in position)
        items.append(Item(node.label, node.stream, calls(node), before))
    return items


class Program:
    """A list of items, whose first is on the origin stream and forks the others.

    ``issue`` runs it call by call; after ``capture`` a ``launch`` is one graph launch on the origin stream (a
    ``CapturedGraph``). Events belong to the device and are made once per program.
    """

    mode = CaptureMode.CUDA_GRAPH

    def __init__(self, device: DeviceContext, items: Sequence[Item], origin: StreamKind = ORIGIN) -> None:
        self._device, self._items, self._origin = device, tuple(items), origin
        self._schedule = schedule([i.stream for i in items], [i.before for i in items], origin)
        self._events = {at: device.event() for at in sorted(self._schedule.recorded)}
        self._graph = self._exec = 0

    def issue(self) -> None:
        """Put every call on its stream, with the events between streams."""
        runtime, streams = self._device.runtime, self._device.streams
        for at, (item, step) in enumerate(zip(self._items, self._schedule.steps, strict=True)):
            for other in step.waits:
                runtime.streamWaitEvent(streams[item.stream], self._events[other])
            for call in item.calls:
                call.issue(self._device, streams[item.stream])
            if at in self._events:
                runtime.eventRecord(self._events[at], streams[item.stream])
        for other in self._schedule.joins:
            runtime.streamWaitEvent(streams[self._origin], self._events[other])

    def capture(self) -> None:
        """Record the calls into a graph. Issue the program once before: kernels are loaded then, and libraries warm."""
        runtime, origin = self._device.runtime, self._device.streams[self._origin]
        self._graph = recorded(runtime, origin, self.issue)
        self._exec = runtime.graphInstantiate(self._graph)
        runtime.graphUpload(self._exec, origin)

    def launch(self) -> None:
        """Replay the captured graph on the origin stream; returns at once."""
        self._device.runtime.graphLaunch(self._exec, self._device.streams[self._origin])

    def close(self) -> None:
        """Destroy the graph. May be called again."""
        runtime = self._device.runtime
        for handle, destroy in ((self._exec, runtime.graphExecDestroy), (self._graph, runtime.graphDestroy)):
            if handle:
                destroy(handle)
        self._graph = self._exec = 0

    # -- facts --------------------------------------------------------------------------------------------------

    @property
    def graph(self) -> int:
        """Handle of the captured graph; 0 before ``capture``."""
        return self._graph

    @property
    def empty(self) -> bool:
        """True when there is nothing to launch."""
        return not any(item.calls for item in self._items)

    @property
    def own_nodes(self) -> int:
        """Nodes of the captured graph that are not a library's: kernels of ours, copies and fills."""
        return sum(not isinstance(c, LibraryCall) for item in self._items for c in item.calls)

    @property
    def library_calls(self) -> int:
        """Calls of libraries; each becomes one node or more."""
        return sum(isinstance(c, LibraryCall) for item in self._items for c in item.calls)

    @property
    def waits(self) -> int:
        """Events that one stream waits for and another one records."""
        return sum(len(step.waits) for step in self._schedule.steps) + len(self._schedule.joins)

    def dump(self) -> str:
        """One line per item: stream, label, calls, and the items it waits for."""
        lines = []
        for at, (item, step) in enumerate(zip(self._items, self._schedule.steps, strict=True)):
            after = f"  after {', '.join(map(str, step.waits))}" if step.waits else ""
            lines.append(f"{at:4d}  {item.stream.name:<6}  {item.label}: {len(item.calls)}{after}")
        joins = ", ".join(map(str, self._schedule.joins)) or "nothing"
        return "\n".join([*lines, f"      {self._origin.name:<6}  end, after {joins}"])


def capture_all(
    device: DeviceContext, arena: DeviceArena, programs: Iterable[Program], captured: Iterable[Program]
) -> None:
    """Issue ``programs`` once, so that kernels are loaded and libraries warm, make the arena forget what they computed,
    and capture ``captured``."""
    arena.clear(device)
    for program in programs:
        program.issue()
        device.synchronize()
    arena.clear(device)
    for program in captured:
        program.capture()
    device.synchronize()
