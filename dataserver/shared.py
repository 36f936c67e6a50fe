"""Anonymous shared memory, eventfds and the two small pages that the daemon shares with its workers.

Nothing has a name: a memfd vanishes with its last user, so there is nothing to clean up after a crash, and the size of
/dev/shm does not matter. A memfd is reserved in full when it is made (no SIGBUS for lack of memory later) and sealed
against resizing (no SIGBUS through a peer).
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from contextlib import suppress

from renaissance.core.errors import DataServerError
from renaissance.core.machine import available_memory
from renaissance.data.protocol import CACHE_LINE, PAGE, align, fence, split_tag

SEEK_RECORDS = 32
"""Jumps are kept in a ring of records, so that a worker never reads one while the next is being written."""

_GENERATION = 0
_SEEKS = CACHE_LINE // 8
_SEEK_WORDS = 4
_DONE = PAGE // 8


def create_memfd(name: str, size: int) -> int:
    """A sealed memfd of ``size`` bytes, all of it reserved. Raises DataServerError when memory does not suffice.

    What is available is looked at first: Linux does not refuse an impossible reservation, it kills processes.
    """
    available = available_memory()
    if size > available:
        raise DataServerError(f"cannot reserve {size} bytes of shared memory for {name}: {available} are available")
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        os.close(fd)
        raise DataServerError(f"cannot reserve {size} bytes of shared memory for {name}: {error.strerror}") from None
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def seal_read_only(fd: int) -> None:
    """No new writable mapping from now on; the caller has unmapped its own."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)


def write_all(fd: int, offset: int, data: memoryview | bytearray) -> None:
    """Write all of ``data`` at ``offset``, without a mapping: the memfd can be sealed at once."""
    left = memoryview(data).cast("B")
    while left:
        written = os.pwrite(fd, left, offset)
        left, offset = left[written:], offset + written


def create_eventfd() -> int:
    """A counter that can be polled; writing never blocks."""
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


def notify(fd: int) -> None:
    """Wake whoever polls the eventfd. A full counter already does, so that is no error."""
    with suppress(BlockingIOError):
        os.eventfd_write(fd, 1)


def drain(fd: int) -> None:
    """Reset the eventfd."""
    with suppress(BlockingIOError):
        os.eventfd_read(fd)


class SpareDescriptor:
    """One descriptor in reserve, for what must go on when the process has no other left."""

    def __init__(self) -> None:
        self._fd = -1
        self.take()

    def take(self) -> None:
        """Have one in reserve again, unless there is none."""
        with suppress(OSError):
            if self._fd < 0:
                self._fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def give(self) -> None:
        """From now on it is free."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def none_left(error: OSError) -> bool:
    """Whether the process or the system has no descriptor left."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


class Board:
    """Private to daemon and workers, one per session: where the stream is, and which shares are done.

    ``done[slot * workers + w]`` is the tag of the last share worker ``w`` finished in that slot, written by ``w`` only.
    The daemon writes the generation and the jump that began it.
    """

    def __init__(self, fd: int, depth: int, workers: int) -> None:
        self._workers = workers
        self._depth = depth
        self._map = mmap.mmap(fd, self.size(depth, workers))
        self._words = memoryview(self._map).cast("Q")

    @staticmethod
    def size(depth: int, workers: int) -> int:
        return PAGE + align(8 * depth * workers, PAGE)

    @property
    def generation(self) -> int:
        return self._words[_GENERATION]

    def write_seek(self, generation: int, sequence: int, epoch: int, index: int) -> None:
        """Daemon: from ``sequence`` on, the stream is (epoch, index) and what follows."""
        at = _SEEKS + _SEEK_WORDS * (generation % SEEK_RECORDS)
        self._words[at], self._words[at + 1], self._words[at + 2] = sequence, epoch, index
        fence()
        self._words[_GENERATION] = generation

    def read_seek(self) -> tuple[int, int, int, int]:
        """Worker: (generation, sequence, epoch, index) of the newest jump."""
        while True:
            generation = self._words[_GENERATION]
            fence()
            at = _SEEKS + _SEEK_WORDS * (generation % SEEK_RECORDS)
            record = generation, self._words[at], self._words[at + 1], self._words[at + 2]
            fence()
            if self._words[_GENERATION] == generation:
                return record

    def mark_done(self, slot: int, worker: int, tag: int) -> bool:
        """Worker: its share of the slot is written. True when now all shares of the slot are."""
        fence()
        first = _DONE + slot * self._workers
        self._words[first + worker] = tag
        fence()
        return self._words[first : first + self._workers].tolist().count(tag) == self._workers

    def is_complete(self, slot: int, tag: int) -> bool:
        first = _DONE + slot * self._workers
        if self._words[first : first + self._workers].tolist().count(tag) != self._workers:
            return False
        fence()
        return True

    def next_sequence(self, worker: int, generation: int, start: int) -> int:
        """The first share of this generation that ``worker`` has not finished: where its successor goes on.

        A worker finishes its shares in order, so the largest tag it left decides.
        """
        tags = [self._words[_DONE + slot * self._workers + worker] for slot in range(self._depth)]
        done = [sequence for g, sequence in map(split_tag, tags) if g == generation]
        return max(done, default=start - 1) + 1


class PoolPage:
    """Private to daemon and workers, one per pool: whose share each worker is at, read by the daemon when one dies."""

    def __init__(self, fd: int, workers: int) -> None:
        self._map = mmap.mmap(fd, self.size(workers))
        self._words = memoryview(self._map).cast("Q")

    @staticmethod
    def size(workers: int) -> int:
        return align(CACHE_LINE * workers, PAGE)

    def set_ready(self, worker: int, ready: bool) -> None:
        """Set by a worker that runs; cleared by the daemon before it starts one."""
        self._words[worker * CACHE_LINE // 8 + 1] = ready

    def is_ready(self, worker: int) -> bool:
        return bool(self._words[worker * CACHE_LINE // 8 + 1])

    def begin(self, worker: int, session: int) -> None:
        self._words[worker * CACHE_LINE // 8] = session

    def idle(self, worker: int) -> None:
        self._words[worker * CACHE_LINE // 8] = 0

    def current_session(self, worker: int) -> int:
        """The session whose share the worker is preparing, 0 for none."""
        return self._words[worker * CACHE_LINE // 8]
