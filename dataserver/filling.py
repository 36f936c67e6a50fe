"""Loading a set of pictures fully: all stored bytes into one memfd, in file order, by several threads.

A sample that cannot be read is left out and its place says so; the policy of each session decides what becomes of it.
Nothing is mapped here, so the memfd can be sealed at once, also after an error.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from dataserver.shared import write_all
from renaissance.core.errors import CorruptSample, DataServerError
from renaissance.core.log import get_logger
from renaissance.data.making.spec import NOT_STORED, SAMPLE_ALIGNMENT, LoadedSet
from renaissance.data.sources import Source, SourceSpec

CHUNK_BYTES = 8 << 20
"""Written to the memfd at once; a sample that is larger makes a chunk of its own."""

THREADS = 4
"""More than one pays where opening and reading a file waits for a disk or a network."""

DAMAGED_SAID = 10
_log = get_logger("dataserver.store")


class Filler:
    """One load. ``done_bytes`` may be read from any thread at any time."""

    def __init__(self, fd: int, loaded: LoadedSet, source: Source, index: bytearray, stopping: threading.Event) -> None:
        """``index``: what ``source.write_index`` wrote; ``stopping``: set to end the load early."""
        self.done_bytes = 0
        self._fd = fd
        self._spec: SourceSpec = source.spec
        self._index = memoryview(index)
        self._stopping = stopping
        self._sizes = source.sizes.astype(np.int64)
        ends = np.cumsum((self._sizes + SAMPLE_ALIGNMENT - 1) & -SAMPLE_ALIGNMENT)
        self._places = np.empty(loaded.samples, np.uint64)
        self._places[:1] = 0
        self._places[1:] = ends[:-1]
        self._places += np.uint64(loaded.data_offset)
        self._lock = threading.Lock()
        self._failed = False
        self._damaged = 0
        self._chunks = self._cut(ends)

    def run(self) -> npt.NDArray[np.uint64]:
        """Read everything; u64[samples], the place of each in the memfd or NOT_STORED.

        Raises DataServerError when told to stop, and what a reader raises beside CorruptSample.
        """
        with ThreadPoolExecutor(THREADS, thread_name_prefix="dataserver-load") as pool:
            for future in [pool.submit(self._work) for _ in range(THREADS)]:
                future.result()
        if self._damaged > DAMAGED_SAID:
            _log.warning("%s: %d samples cannot be read", self._spec.source, self._damaged)
        return self._places

    def _cut(self, ends: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
        """[first, last) of each chunk, in file order."""
        first = 0
        while first < ends.size:
            limit = (int(ends[first - 1]) if first else 0) + CHUNK_BYTES
            last = max(first + 1, int(np.searchsorted(ends, limit, side="right")))
            yield first, last
            first = last

    def _work(self) -> None:
        buffer = bytearray(CHUNK_BYTES)
        with Source.attach(self._spec, self._index) as source:
            try:
                while True:
                    with self._lock:
                        chunk = None if self._failed else next(self._chunks, None)
                    if chunk is None:
                        return
                    needed = self._size_of(*chunk)
                    if needed > len(buffer):
                        buffer = bytearray(needed)
                    self._read_chunk(source, memoryview(buffer), *chunk)
            except BaseException:
                self._failed = True
                raise

    def _size_of(self, first: int, last: int) -> int:
        return int(self._places[last - 1] - self._places[first]) + int(self._sizes[last - 1])

    def _read_chunk(self, source: Source, buffer: memoryview, first: int, last: int) -> None:
        start = int(self._places[first])
        used = self._size_of(first, last)
        missing = []
        for sample in range(first, last):
            if self._stopping.is_set():
                raise DataServerError(f"{self._spec.source}: not loaded, the dataserver is stopping")
            at = int(self._places[sample]) - start
            size = int(self._sizes[sample])
            try:
                source.read_into(sample, buffer[at : at + size])
            except CorruptSample as error:
                missing.append(sample)
                self._say(error)
        write_all(self._fd, start, buffer[:used])
        self._places[missing] = NOT_STORED
        with self._lock:
            self.done_bytes += used

    def _say(self, error: CorruptSample) -> None:
        with self._lock:
            self._damaged += 1
            if self._damaged <= DAMAGED_SAID:
                _log.warning("cannot be read: %s", error)
