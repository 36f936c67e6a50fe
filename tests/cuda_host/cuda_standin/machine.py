"""What is behind the calls of the stand-in: handles, the rules of a capture, and how work is issued and run."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from cuda_standin.capture import Capture
from cuda_standin.errors import CudaError
from cuda_standin.memory import Memory, Range
from cuda_standin.work import Clock, Graph, History, Launch, Op, Scheduler, merge

T = TypeVar("T")


@dataclass(eq=False)
class Stream:
    tail: set[Launch] = field(default_factory=set)
    clock: Clock = field(default_factory=dict)
    launches: int = 0


@dataclass(eq=False)
class Event:
    recorded: bool = False
    capture: Capture | None = None
    after: set[Launch] = field(default_factory=set)
    clock: Clock = field(default_factory=dict)


@dataclass(eq=False)
class Executable:
    graph: Graph
    last: Launch | None = None


class Machine:
    """A device without its calls; see ``runtime.FakeCuda``."""

    def __init__(self, seed: int, check: bool) -> None:
        self.memory = Memory()
        self.counts: Counter[str] = Counter()
        """Calls by name, and operations by kind (kernel, copy, fill, library)."""
        self.launched: list[int] = []
        """Handles of executable graphs, as often as they were launched."""
        self._check = check
        self._scheduler, self._history = Scheduler(seed), History(self.memory)
        self._handles = itertools.count(0x1000)
        self._objects: dict[int, Any] = {}
        self._capture: Capture | None = None
        self._open: dict[Launch, None] = {}
        self._serials = itertools.count()
        self._hints: list[int] | None = None
        self._warm: set[Hashable] = set()
        self._failed: str | None = None

    # -- beside CUDA --------------------------------------------------------------------------------------------

    @contextmanager
    def phase(self) -> Iterator[Counter[str]]:
        """What is called inside, by name; filled in at the end."""
        before, inside = Counter(self.counts), Counter[str]()
        try:
            yield inside
        finally:
            inside.update(self.counts - before)

    @property
    def trace(self) -> list[tuple[int, str]]:
        """(number of the launch, name of the operation) of what ran, in this order."""
        return list(self._scheduler.trace)

    @property
    def compared(self) -> int:
        """How many pairs of launches without an order there have been."""
        return self._history.compared

    def graph(self, executable: int) -> Graph:
        """The graph behind an executable handle."""
        return self._get(executable, Executable).graph

    def executables(self) -> list[int]:
        """Handles of all executable graphs."""
        return [h for h, o in self._objects.items() if isinstance(o, Executable)]

    def replace(self, executable: int, graph: Graph) -> None:
        """Let later launches of a handle run another graph."""
        self._get(executable, Executable).graph = graph

    @property
    def capturing(self) -> bool:
        """Whether any stream is capturing."""
        return self._capture is not None

    def device_range(self, address: int, size: int, what: str) -> Range:
        """Bytes of device memory. Raises CudaError if they are not inside one allocation."""
        return self.memory.range(address, size, what)

    def hint(self, sizes: Sequence[int]) -> None:
        """Bytes behind each pointer argument of the next launch."""
        self._hints = list(sizes)

    def name_range(self, ptr: int, size: int, name: str) -> None:
        """Name a piece of memory for messages."""
        self.memory.call(ptr, size, name)

    # -- rules --------------------------------------------------------------------------------------------------

    def _called(self, name: str) -> None:
        self.counts[name] += 1
        if self._failed:
            raise CudaError("LaunchFailure", f"{name} after a failed operation: {self._failed}")

    def _outside_capture(self, name: str) -> None:
        """Count a call that a capture forbids; inside one it is an error and the capture is void."""
        self._called(name)
        if self._capture:
            self._capture.broken = f"{name} while a stream is capturing"
            raise CudaError("StreamCaptureUnsupported", self._capture.broken)

    def warm(self, what: Hashable, name: str) -> None:
        """``what`` is used, which has to have happened outside of a capture before. Raises CudaError."""
        if self._capture is None:
            self._warm.add(what)
        elif what not in self._warm:
            self._capture.broken = f"the first use of {name} is in a capture; use it once before"
            raise CudaError("StreamCaptureUnsupported", self._capture.broken)

    def _new(self, what: object) -> int:
        handle = next(self._handles)
        self._objects[handle] = what
        return handle

    def _get(self, handle: int, kind: type[T]) -> T:
        found = self._objects.get(handle)
        if not isinstance(found, kind):
            raise CudaError("InvalidResourceHandle", f"{handle:#x} is not a {kind.__name__.lower()} (any more)")
        return found

    # -- issue and run ------------------------------------------------------------------------------------------

    def library(
        self,
        stream: int,
        name: str,
        run: Callable[[], None],
        reads: Sequence[Range],
        writes: Sequence[Range],
        **options: Any,
    ) -> None:
        """An operation of a library. ``options``: ``ready`` and ``wait`` of an Op."""
        self._called("library")
        self.issue(stream, Op(name, run, tuple(reads), tuple(writes), **options))

    def issue(self, stream: int, op: Op) -> None:
        """Put an operation on a stream, or into the running capture."""
        self._get(stream, Stream)
        if self._capture:
            self._capture.add(stream, op)
        else:
            self._launch(stream, Graph((op,), (frozenset(),), (stream,)), [])

    def _launch(self, stream: int, graph: Graph, after: list[Launch]) -> Launch:
        where = self._get(stream, Stream)
        where.launches += 1
        for other in after:
            merge(where.clock, other.clock)
            merge(where.clock, {other.stream: other.number})
        merge(where.clock, self._history.host)
        before = {launch for launch in (*where.tail, *after) if not launch.done}
        launch = Launch(graph, stream, where.launches, dict(where.clock), next(self._serials), before)
        if self._check:
            self._history.add(launch)
        where.clock[stream] = where.launches
        where.tail = {launch}
        self._open[launch] = None
        self._scheduler.submit(launch)
        return launch

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._failed = self._failed or str(error)
            raise
        if len(self._open) > 64:
            self._open = {launch: None for launch in self._open if not launch.done}

    def _wait_for(self, launches: set[Launch], clock: Clock) -> None:
        self._run(lambda: self._scheduler.finish(launches))
        self._history.waited(clock)

    def _drain(self) -> None:
        """Run everything."""
        self._run(lambda: self._scheduler.finish(list(self._open)))
        for found in self._objects.values():
            if isinstance(found, Stream):
                self._history.waited(found.clock)

    def close(self) -> None:
        """Give all memory back. Raises if something was written beside an allocation."""
        self._objects.clear()
        self._open.clear()
        damage = [d for block in self.memory.blocks.values() if (d := block.damage())]
        for block in self.memory.blocks.values():
            block.close()
        self.memory.blocks.clear()
        if damage:
            raise CudaError("IllegalAddress", damage[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
