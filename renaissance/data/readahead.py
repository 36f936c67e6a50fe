"""Read-ahead: stored samples, read by threads in exactly the order in which they will be asked for.

Invariants: each sample of the given order is read once; what ``take`` returns follows that order, whatever thread read
it; an error appears at the position of the sample that it concerns; the memory is one buffer of fixed size, reused as
a ring; neither ``take`` nor ``restart`` nor ``close`` ever waits for a read. The reads (``os.preadv``) release the GIL,
so they overlap the decoding that the consumer does meanwhile.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from renaissance.core.errors import ValueRejected, without_frames

ALIGNMENT = 64
MAX_ENTRIES = 2048
"""Samples read ahead at most, however small they are: each costs some memory beside its bytes."""

MIN_BUDGET = 1 << 16


class Readable(Protocol):
    """What is needed of a ``renaissance.data.sources.Source``; used by one thread only, which closes it."""

    def read_into(self, sample: int, out: memoryview) -> int: ...

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Entry:
    """A sample that is being read, or has been. ``done`` and what follows are written by the thread that reads it."""

    sample: int
    generation: int
    start: int
    end: int  # of its place in the buffer, rounded up
    done: bool = False
    count: int = 0  # bytes read
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class StoredSample:
    """``stored`` u8[n] are the bytes of the sample, valid until the next ``take`` or ``restart``; or the error."""

    sample: int
    stored: npt.NDArray[np.uint8]
    error: Exception | None


class ReadAhead:
    """One thread for each source, for one consumer thread. ``close`` it; the threads close their sources."""

    def __init__(
        self,
        sources: Sequence[Readable],
        sizes: npt.NDArray[np.uint32],
        budget: int,
        on_ready: Callable[[], None],
        name: str = "read-ahead",
    ) -> None:
        """``sizes`` u32[N]: stored bytes of every sample. ``budget``: bytes of the buffer; it holds at least the
        largest sample. ``on_ready`` is called from a thread when a sample is there for which ``take`` returned None.

        Raises ValueRejected for a budget under 64 KiB or without a source.
        """
        if budget < MIN_BUDGET or not sources:
            raise ValueRejected(
                f"read-ahead: {budget} bytes for {len(sources)} sources; expected at least {MIN_BUDGET} bytes, 1 source"
            )
        self._sizes = sizes
        self._capacity = _up(max(budget, int(sizes.max(initial=1))))
        # Mapped, not allocated: its pages exist once they are written, and go back to the system at the end.
        self._buffer = memoryview(mmap.mmap(-1, self._capacity))
        self._bytes = np.frombuffer(self._buffer, np.uint8)
        self._on_ready = on_ready
        self._turn = threading.Lock()  # held by the thread that decides what is read next
        self._changed = threading.Condition()  # guards all that follows
        self._samples: Iterator[int] | None = None
        self._generation = 0
        self._live: deque[_Entry] = deque()  # in order; the first is the one taken last while ``_holding``
        self._holding = False
        self._waiting = False  # ``take`` returned None and wants ``on_ready``
        self._head = 0  # where the next place begins
        self._stale = 0  # reads of older generations that still write into the buffer
        self._closed = False
        self._threads = [
            threading.Thread(target=self._read_all, args=(source,), name=name, daemon=True) for source in sources
        ]
        self._sources: Sequence[Readable] = sources  # until the threads run, which own them then

    @property
    def capacity(self) -> int:
        """Size of the buffer (bytes)."""
        return self._capacity

    def restart(self, samples: Iterable[int]) -> None:
        """From now on ``take`` returns these; what was read ahead is dropped. They are asked for in a thread."""
        with self._changed:
            self._generation += 1
            self._stale += sum(not entry.done for entry in self._live)
            self._live.clear()
            self._holding = self._waiting = False
            self._head = 0
            self._samples = iter(samples)
            self._changed.notify_all()
        if self._sources:
            self._sources = ()
            for thread in self._threads:
                thread.start()

    def take(self) -> StoredSample | None:
        """The next sample of the order; None when it is not there yet (then ``on_ready`` will be called)."""
        with self._changed:
            if self._holding:
                self._holding = False
                self._live.popleft()
                self._changed.notify_all()
            if not self._live or not self._live[0].done:
                self._waiting = True
                return None
            self._holding = True
            entry = self._live[0]
        return StoredSample(entry.sample, self._bytes[entry.start : entry.start + entry.count], entry.error)

    def close(self) -> None:
        """Threads end after the read they are at; a read that never returns holds its own thread and buffer only."""
        with self._changed:
            self._closed = True
            self._waiting = False
            self._live.clear()
            self._samples = None
            self._changed.notify_all()
        for source in self._sources:
            source.close()
        self._sources = ()

    def join(self, timeout: float) -> bool:
        """After ``close``: wait for the threads; False when one is still reading after ``timeout`` seconds each."""
        for thread in self._threads:
            if thread.ident is not None:  # it was started
                thread.join(timeout)
        return not any(thread.is_alive() for thread in self._threads)

    # In the threads

    def _read_all(self, source: Readable) -> None:
        try:
            while (entry := self._next_entry()) is not None:
                if entry.error is None:
                    place = self._buffer[entry.start : entry.start + int(self._sizes[entry.sample])]
                    try:
                        entry.count = source.read_into(entry.sample, place)
                    except Exception as error:  # for the consumer, at this position
                        entry.error = without_frames(error)  # of this thread, which would keep the buffer alive
                self._finish(entry)
        finally:
            source.close()

    def _next_entry(self) -> _Entry | None:
        """The next sample of the order with a place for it; None when closed."""
        with self._turn:
            while True:
                with self._changed:
                    while self._samples is None and not self._closed:
                        self._changed.wait()
                    if self._closed:
                        return None
                    assert self._samples is not None
                    generation, samples = self._generation, self._samples
                entry = self._ask(samples, generation)  # without the lock: it may compute the order of an epoch
                with self._changed:
                    if (entry is None or entry.error is not None) and generation == self._generation:
                        self._samples = None
                    if entry is not None and self._give_place(entry):
                        return entry

    def _ask(self, samples: Iterator[int], generation: int) -> _Entry | None:
        """None at the end of the order; an order that fails is an error at this position, and ends there."""
        try:
            sample = next(samples, None)
            return None if sample is None else _Entry(sample, generation, 0, _up(max(1, int(self._sizes[sample]))))
        except Exception as error:
            return _Entry(-1, generation, 0, ALIGNMENT, error=without_frames(error))

    def _give_place(self, entry: _Entry) -> bool:
        """Wait for room; False when the order was restarted meanwhile, or closed. Called with the lock."""
        size = entry.end
        while entry.generation == self._generation and not self._closed:
            start = self._find_room(size) if not self._stale and len(self._live) < MAX_ENTRIES else None
            if start is not None:
                entry.start, entry.end = start, start + size
                self._head = entry.end
                self._live.append(entry)
                return True
            self._changed.wait()
        return False

    def _find_room(self, size: int) -> int | None:
        """Places are given in order and come back in order: what is free is one stretch, or two at the ends."""
        if not self._live:
            return 0
        oldest = self._live[0].start
        if self._head > oldest:
            if self._head + size <= self._capacity:
                return self._head
            return 0 if size <= oldest else None
        return self._head if self._head + size <= oldest else None

    def _finish(self, entry: _Entry) -> None:
        with self._changed:
            if entry.generation != self._generation:
                self._stale -= 1
                self._changed.notify_all()
                return
            entry.done = True
            wanted = self._waiting and bool(self._live) and self._live[0] is entry
            if wanted:
                self._waiting = False
        if wanted:
            self._on_ready()


def _up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
