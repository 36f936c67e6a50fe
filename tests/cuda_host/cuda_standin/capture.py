"""A stream capture: which streams take part, what each has recorded, and the rules of CUDA for its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cuda_standin.errors import CudaError
from cuda_standin.work import Graph, Op


class Capture:
    """Records what is issued to ``origin`` and the streams that join it. Keeps a log, so that the same capture can be
    made again without one of its waits."""

    def __init__(self, origin: int) -> None:
        self.origin = origin
        self.broken: str | None = None
        """What invalidated it."""
        self.waits = 0
        self._ops: list[Op] = []
        self._parents: list[frozenset[int]] = []
        self._streams: list[int] = []
        self._tails: dict[int, frozenset[int]] = {origin: frozenset()}
        self._events: dict[int, frozenset[int]] = {}
        self._log: list[tuple[Any, ...]] = []

    def __contains__(self, stream: int) -> bool:
        return stream in self._tails

    def _tail(self, stream: int, what: str) -> frozenset[int]:
        if self.broken:
            raise CudaError("StreamCaptureInvalidated", self.broken)
        if stream not in self._tails:
            self.broken = f"{what} on a stream that is not part of the running capture: it would run now, not on replay"
            raise CudaError("StreamCaptureIsolation", self.broken)
        return self._tails[stream]

    def add(self, stream: int, op: Op) -> None:
        """An operation on a stream of the capture."""
        before = self._tail(stream, f'"{op.name}"')
        self._tails[stream] = frozenset({len(self._ops)})
        self._ops.append(op)
        self._parents.append(before)
        self._streams.append(stream)
        self._log.append(("add", stream, op))

    def record(self, stream: int, event: int) -> None:
        self._events[event] = self._tail(stream, "an event")
        self._log.append(("record", stream, event))

    def wait(self, stream: int, event: int) -> None:
        """``stream`` joins the capture if it is not part of it yet."""
        if self.broken:
            raise CudaError("StreamCaptureInvalidated", self.broken)
        self._tails[stream] = self._tails.get(stream, frozenset()) | self._events[event]
        self.waits += 1
        self._log.append(("wait", stream, event))

    def finish(self) -> Graph:
        """The graph. Raises CudaError for an invalidated capture, or one with a stream that nothing waits for."""
        if self.broken:
            raise CudaError("StreamCaptureInvalidated", self.broken)
        graph = Graph(self._ops, self._parents, self._streams, tuple(self._log))
        joined, left = set(self._tails[self.origin]), list(self._tails[self.origin])
        while left:
            new = self._parents[left.pop()] - joined
            joined |= new
            left += new
        for stream, tail in self._tails.items():
            if tail - joined:
                last = self._ops[max(tail - joined)].name
                raise CudaError(
                    "StreamCaptureUnjoined", f'nothing waits for stream {stream:#x}, which ends in "{last}"'
                )
        return graph


def replayed(log: Sequence[tuple[Any, ...]], without: int | None = None) -> Graph:
    """The graph that the same calls give, without the wait number ``without`` (from 0). Raises like the calls."""
    waits = 0
    capture: Capture | None = None
    for kind, stream, what in log:
        capture = capture or Capture(stream)
        if kind == "wait":
            waits += 1
            if waits - 1 == without:
                continue
        getattr(capture, str(kind))(stream, what)
    if capture is None:
        raise ValueError("an empty capture")
    return capture.finish()
