"""Where one stream has to wait for another: as few events as the dependences of a program need.

Nodes are issued in order, each on its stream. A stream runs in order by itself; across streams a node waits for an
event that was recorded after the node it depends on. What a stream has already waited for, directly or through others,
is not waited for again (vector clocks).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from renaissance.core.enums import StreamKind


@dataclass(frozen=True, slots=True)
class Step:
    """One item of a program: its stream, and the earlier items it waits for by event."""

    stream: StreamKind
    waits: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """``steps[i]`` belongs to item i; ``joins`` are the items that the origin waits for at the end."""

    steps: tuple[Step, ...]
    joins: tuple[int, ...]

    @property
    def recorded(self) -> frozenset[int]:
        """Items after which an event is recorded."""
        return frozenset(w for step in self.steps for w in step.waits) | frozenset(self.joins)


def schedule(streams: Sequence[StreamKind], before: Sequence[Collection[int]], origin: StreamKind) -> Schedule:
    """``before[i]``: positions of the items that item i depends on, all smaller than i.

    Item 0 has to be on ``origin``: it is the fork, which everything follows.
    """
    clocks: dict[StreamKind, dict[StreamKind, int]] = {s: {} for s in (*streams, origin)}
    known: list[dict[StreamKind, int]] = []  # per item: the last item of each stream that is done when it is
    steps = []
    for at, stream in enumerate(streams):
        needs = {*before[at], *((0,) if at else ())}
        waits = _wait_for(needs, stream, streams, clocks[stream], known)
        clocks[stream][stream] = at
        known.append(dict(clocks[stream]))
        steps.append(Step(stream, waits))
    ends = {max(at for at, s in enumerate(streams) if s is stream) for stream in set(streams)}
    return Schedule(tuple(steps), _wait_for(ends, origin, streams, clocks[origin], known))


def _wait_for(
    needs: Collection[int],
    stream: StreamKind,
    streams: Sequence[StreamKind],
    clock: dict[StreamKind, int],
    known: Sequence[dict[StreamKind, int]],
) -> tuple[int, ...]:
    """The needed items that ``stream`` does not know to be done, the latest first; ``clock`` is brought up to date."""
    waits = []
    for need in sorted(needs, reverse=True):
        if streams[need] is not stream and clock.get(streams[need], -1) < need:
            waits.append(need)
            for other, last in known[need].items():
                clock[other] = max(clock.get(other, -1), last)
    return tuple(waits)
