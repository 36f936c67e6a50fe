"""Work of streams as graphs: operations with what they read and write, in a random order that their edges allow.

An operation that is issued alone is a graph of one node, so there is one way in which things run and are checked.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from cuda_standin.errors import Race
from cuda_standin.memory import Memory, Range, merged, overlap


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One operation. ``ready`` and ``wait``, of one that needs other ranks: whether it can run now, a wait for it."""

    name: str
    run: Callable[[], None]
    reads: tuple[Range, ...] = ()
    writes: tuple[Range, ...] = ()
    ready: Callable[[], bool] | None = None
    wait: Callable[[], None] | None = None

    def title(self, memory: Memory) -> str:
        """Its name with what it writes."""
        return f"{self.name} -> {memory.name(*self.writes[0])}" if self.writes else self.name


@dataclass(eq=False)
class Graph:
    """Operations in the order of their issue, each on one of ``streams``; ``parents`` of each are earlier ones.
    ``log``: how it was captured."""

    ops: Sequence[Op]
    parents: Sequence[frozenset[int]]
    streams: Sequence[int]
    log: tuple[tuple[Any, ...], ...] = ()
    generation: int = -1
    """Of the memory, when its addresses were last known to be valid."""

    def __post_init__(self) -> None:
        self.children: list[list[int]] = [[] for _ in self.ops]
        for i, before in enumerate(self.parents):
            for p in before:
                self.children[p].append(i)
        self.roots = [i for i, before in enumerate(self.parents) if not before]
        self.blockers = [len(before) for before in self.parents]

    @cached_property
    def reads(self) -> list[Range]:
        return merged(r for op in self.ops for r in op.reads)

    @cached_property
    def writes(self) -> list[Range]:
        return merged(w for op in self.ops for w in op.writes)

    @property
    def waits(self) -> int:
        """Events that were waited for in the capture."""
        return sum(entry[0] == "wait" for entry in self.log)

    def ancestors(self) -> list[int]:
        """Bit set of the operations that are ordered before each one."""
        before: list[int] = []
        for parents in self.parents:
            bits = 0
            for p in parents:
                bits |= before[p] | 1 << p
            before.append(bits)
        return before

    def unordered_conflict(self) -> tuple[int, int, Range] | None:
        """The first two operations without an order that touch the same bytes, one of them writing.

        One sweep over the addresses with the sets of operations that read and write there.
        """
        related = self.ancestors()
        for i, before in enumerate(related[:]):
            bit = 1 << i
            for p in _bits(before):
                related[p] |= bit
        events = [(low, 1, high, i, writing) for i, low, high, writing in self._accesses()]
        events += [(high, 0, low, i, writing) for i, low, high, writing in self._accesses()]
        events.sort(key=lambda e: (e[0], e[1]))
        active = {False: 0, True: 0}
        count = [[0] * len(self.ops), [0] * len(self.ops)]
        ends: dict[int, int] = {}
        for at, begins, other_end, i, writing in events:
            if not begins:
                count[writing][i] -= 1
                if not count[writing][i]:
                    active[writing] &= ~(1 << i)
                continue
            bad = (active[True] | (active[False] if writing else 0)) & ~related[i] & ~(1 << i)
            if bad:
                j = (bad & -bad).bit_length() - 1
                return min(i, j), max(i, j), (at, min(other_end, ends.get(j, other_end)))
            count[writing][i] += 1
            active[writing] |= 1 << i
            ends[i] = other_end
        return None

    def _accesses(self) -> Iterable[tuple[int, int, int, bool]]:
        for i, op in enumerate(self.ops):
            for ranges, writing in ((op.reads, False), (op.writes, True)):
                for low, high in ranges:
                    if low < high:
                        yield i, low, high, writing

    def check(self, memory: Memory) -> None:
        """Raise Race for a conflict between operations without an order."""
        found = self.unordered_conflict()
        if found:
            i, j, place = found
            raise Race(_message("graph", self.ops[i].title(memory), self.ops[j].title(memory), memory.name(*place)))


def _bits(value: int) -> Iterable[int]:
    while value:
        low = value & -value
        yield low.bit_length() - 1
        value ^= low


def _message(where: str, first: str, second: str, place: str) -> str:
    return f'{where}: "{first}" and "{second}" are not ordered, and one of them writes {place}'


def conflict(first: Graph, second: Graph) -> Range | None:
    """Bytes that both touch and one of them writes."""
    return (
        overlap(first.writes, second.writes)
        or overlap(first.writes, second.reads)
        or overlap(first.reads, second.writes)
    )


Clock = dict[int, int]
"""For each stream, how many of its launches are ordered before."""


def merge(into: Clock, other: Clock) -> None:
    for stream, count in other.items():
        if into.get(stream, 0) < count:
            into[stream] = count


@dataclass(eq=False, slots=True)
class Launch:
    """One issue of a graph: the ``number``-th of its stream, ordered after what ``clock`` counts."""

    graph: Graph
    stream: int
    number: int
    clock: Clock
    serial: int
    before: set[Launch] = field(default_factory=set)
    after: list[Launch] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    remaining: int = 0
    done: bool = False


class Scheduler:
    """Runs launches when it is told to, one operation after the other, in an order drawn from ``seed``.

    To make rare orders frequent, streams have a random rank, drawn anew at every wait, and of a few operations that are
    ready the one of the first stream runs; half of the waits run only what they wait for, the other half anything.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._ready: list[tuple[Launch, int]] = []
        self.trace: deque[tuple[int, str]] = deque(maxlen=100_000)
        """(serial of the launch, name of the operation) of what ran last."""

    def submit(self, launch: Launch) -> None:
        """Take a launch whose ``before`` holds launches that are not done."""
        for other in launch.before:
            other.after.append(launch)
        if not launch.before:
            self._start(launch)

    def _start(self, launch: Launch) -> None:
        launch.left, launch.remaining = launch.graph.blockers[:], len(launch.graph.ops)
        if not launch.remaining:
            self._finish(launch)
        self._ready += [(launch, i) for i in launch.graph.roots]

    def _finish(self, launch: Launch) -> None:
        launch.done, launch.left = True, []
        for other in launch.after:
            other.before.discard(launch)
            if not other.before:
                self._start(other)
        launch.after = []

    def _run(self, at: int) -> None:
        launch, i = self._ready[at]
        self._ready[at] = self._ready[-1]
        self._ready.pop()
        op = launch.graph.ops[i]
        self.trace.append((launch.serial, op.name))
        op.run()
        for child in launch.graph.children[i]:
            launch.left[child] -= 1
            if not launch.left[child]:
                self._ready.append((launch, child))
        launch.remaining -= 1
        if not launch.remaining:
            self._finish(launch)

    def finish(self, targets: Iterable[Launch]) -> None:
        """Run until all of ``targets`` are done."""
        left = [t for t in targets if not t.done]
        if not left:
            return
        needed = _closure(left) if self._random.random() < 0.5 else None
        ranks: dict[int, float] = {}
        stuck: set[tuple[Launch, int]] = set()
        while any(not t.done for t in left):
            candidates = [k for k, item in enumerate(self._ready) if item not in stuck]
            if needed is not None:
                candidates = [k for k in candidates if self._ready[k][0] in needed]
            if candidates:
                at = self._choose(candidates, ranks)
                launch, i = self._ready[at]
                ready = launch.graph.ops[i].ready
                if ready is not None and not ready():
                    stuck.add((launch, i))
                    continue
                self._run(at)
            else:  # all that could run waits for other ranks
                launch, i = next(iter(stuck))
                wait = launch.graph.ops[i].wait
                if wait is not None:
                    wait()
            stuck.clear()

    def progress(self) -> None:
        """Run a few operations that are ready and need no other rank, or none."""
        if self._random.random() < 0.5:
            return
        ranks: dict[int, float] = {}
        for _ in range(self._random.randrange(1, 16)):
            candidates = [
                k
                for k, (launch, i) in enumerate(self._ready)
                if (ready := launch.graph.ops[i].ready) is None or ready()
            ]
            if not candidates:
                return
            self._run(self._choose(candidates, ranks))

    def _choose(self, candidates: list[int], ranks: dict[int, float]) -> int:
        drawn = [candidates[int(self._random.random() * len(candidates))] for _ in range(3)]

        def rank(at: int) -> float:
            launch, i = self._ready[at]
            stream = launch.graph.streams[i]
            if stream not in ranks:
                ranks[stream] = self._random.random()
            return ranks[stream]

        return min(drawn, key=rank)


def _closure(targets: list[Launch]) -> set[Launch]:
    found, left = set(targets), list(targets)
    while left:
        for other in left.pop().before:
            if other not in found:
                found.add(other)
                left.append(other)
    return found


class History:
    """Launches that the host does not know to be done, to find two without an order that touch the same bytes."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._open: dict[int, deque[Launch]] = {}
        self._known: dict[tuple[Graph, Graph], Range | None] = {}
        self.host: Clock = {}
        """What the host has waited for."""
        self.compared = 0
        """Pairs of launches without an order, so far."""

    def waited(self, clock: Clock) -> None:
        """The host knows that what ``clock`` counts is done."""
        merge(self.host, clock)
        for stream, launches in self._open.items():
            while launches and launches[0].number <= self.host.get(stream, 0):
                launches.popleft()

    def add(self, launch: Launch) -> None:
        """Raise Race if ``launch`` conflicts with an earlier one that is not ordered before it."""
        for stream, launches in self._open.items():
            ordered = launch.clock.get(stream, 0)
            if stream != launch.stream:
                for other in reversed(launches):
                    if other.number <= ordered:
                        break
                    self._compare(other, launch)
        self._open.setdefault(launch.stream, deque()).append(launch)

    def _compare(self, first: Launch, second: Launch) -> None:
        self.compared += 1
        both = first.graph, second.graph
        captured = bool(both[0].log or both[1].log)
        if captured and both in self._known:
            place = self._known[both]
        else:
            place = conflict(*both)
            if captured:
                self._known[both] = place
        if place:
            one, other = (self._named(graph, place) for graph in both)
            raise Race(_message("streams", one, other, self._memory.name(*place)))

    def _named(self, graph: Graph, place: Range) -> str:
        """The operation of ``graph`` that touches ``place``, a writing one if there is one."""
        for ranges in (lambda op: op.writes, lambda op: op.reads):
            for op in graph.ops:
                if any(low < place[1] and place[0] < high for low, high in ranges(op)):
                    return op.title(self._memory)
        return "?"

    def using(self, low: int, high: int) -> Op | None:
        """An operation that the host does not know to be done and that touches a range."""
        for launches in self._open.values():
            for launch in launches:
                for op in launch.graph.ops:
                    if any(a < high and low < b for a, b in (*op.reads, *op.writes)):
                        return op
        return None
