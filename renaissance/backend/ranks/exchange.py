"""Ranks: the processes of one run on one machine. They meet, tell each other small things, and watch each other.

They meet at a Unix socket that only their user can open: rank 0 listens until all have come, then the socket's name is
gone. Every other rank keeps a connection to rank 0 until the end. A thread reads it, so that a rank that dies or fails
is known everywhere at once, also while the others wait for the GPU.

No gradients travel here; NCCL carries those.
"""

from __future__ import annotations

import json
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Self

from renaissance.backend.ranks.launch import Launch
from renaissance.backend.ranks.meeting import Kind, Link, meet, pack, unpack
from renaissance.core.errors import DeviceError, ValueRejected
from renaissance.core.log import get_logger

MEETING_SECONDS = 120.0
"""How long a rank waits for the others to come; they are started together."""
PATIENCE_SECONDS = 30.0
"""How long a process may go on after another rank was lost, before it is ended from outside."""

SAME = "start all ranks with the same program, configuration and files"

_log = get_logger("backend.ranks")


class RankFailed(DeviceError):
    """Another rank of the run has died, failed or left."""


class Ranks:
    """This process and the others. A context manager; made by ``join``. For use from one thread."""

    def __init__(
        self,
        rank: int,
        size: int,
        links: list[Link],
        *,
        patience: float = PATIENCE_SECONDS,
        last_resort: Callable[[], object] = lambda: os._exit(1),
    ) -> None:
        """``links``: to all others at rank 0, else to rank 0. ``last_resort`` ends a process that another rank's death
        has left waiting for ever, in a library that cannot be told."""
        self.rank, self.size = rank, size
        self._links = {link.rank: link for link in links}
        self._patience, self._last_resort = patience, last_resort
        self._condition = threading.Condition()
        self._inbox: dict[int, deque[bytes]] = {link.rank: deque() for link in links}
        self._failure: str | None = None
        self._void = False  # a rank has died or failed
        self._timer: threading.Timer | None = None
        self._callbacks: list[Callable[[], object]] = []
        self._closing = False
        self._parting = False  # from here on the others may leave
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._reader = threading.Thread(target=self._read, name="ranks", daemon=True)
        self._reader.start()

    @classmethod
    def join(cls, launch: Launch, path: str | os.PathLike[str], seconds: float = MEETING_SECONDS) -> Self:
        """Meet the other ranks of ``launch`` at the socket ``path``.

        Raises DeviceError that names who has not come within ``seconds``, and ValueRejected for a path that cannot be
        used. Nothing is left behind.
        """
        return cls(launch.rank, launch.size, meet(launch, os.fspath(path), seconds))

    # -- talking ------------------------------------------------------------------------------------------------

    def gather(self, what: str, payload: bytes, *, last: bool = False) -> list[bytes]:
        """The payloads of all ranks, in order of rank. All ranks call alike; ``what`` is checked to be the same.
        ``last``: after it each may leave when it likes; before, one that leaves is lost.

        Waits as long as the others live; raises RankFailed when one does not, or is somewhere else in the run.
        """
        with self._condition:
            self._parting |= last
        mine = pack([what.encode(), payload])
        if self.rank:
            self._send(self._links[0], Kind.PART, mine)
            parts = unpack(self._take(0))
        else:
            parts = [mine, *(self._take(rank) for rank in sorted(self._links))]
            for link in self._links.values():
                self._send(link, Kind.PARTS, pack(parts))
        names, payloads = zip(*(unpack(part) for part in parts), strict=True)
        for rank, name in enumerate(names):
            if name != names[0]:
                raise RankFailed(
                    f"the ranks are not in step: rank 0 is at {names[0].decode()!r}, rank {rank} at {name.decode()!r}; "
                    f"{SAME}"
                )
        return list(payloads)

    def share(self, what: str, text: str = "") -> str:
        """Rank 0's ``text``, on all ranks."""
        return self.gather(what, text.encode() if self.rank == 0 else b"")[0].decode()

    def agree(self, what: str, facts: Mapping[str, Any], *, hint: str = SAME, last: bool = False) -> None:
        """Raise ValueRejected on all ranks, naming the first difference, unless all ranks have the same ``facts``.
        ``hint`` says what to do then; ``last`` as of ``gather``."""
        mine = json.dumps(facts, sort_keys=True).encode()
        answers = [json.loads(part) for part in self.gather(what, mine, last=last)]
        for rank, other in enumerate(answers):
            for name, here, there in _differences("", answers[0], other):
                raise ValueRejected(
                    f"the ranks disagree about {what}: {name} is {here!r} on rank 0 and {there!r} on rank {rank}; "
                    f"{hint}"
                )

    # -- watching -----------------------------------------------------------------------------------------------

    def check(self, seconds: float = 0.0) -> None:
        """Raise RankFailed when a rank has been lost since, or is within ``seconds``."""
        with self._condition:
            self._condition.wait_for(lambda: self._failure is not None, seconds)
            failure = self._failure
        if failure is not None:
            self._noticed()
            raise RankFailed(failure)

    def on_failure(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` when a rank is lost, from the thread that reads: it shall end what this one waits for, and
        return at once."""
        with self._condition:
            self._callbacks.append(callback)
            late = self._failure is not None
        if late:
            callback()

    def fail(self, reason: str) -> None:
        """Tell the others that this rank cannot go on; they raise RankFailed. Nothing when one has failed before."""
        with self._condition:
            if self._failure is not None or self._closing:
                return
        for link in self._links.values():
            self._send(link, Kind.FAILED, f"rank {self.rank} failed: {reason}".encode())

    def close(self) -> None:
        """Leave the others, who are told so. May be called again."""
        self._noticed()
        with self._condition:
            if self._closing:
                return
            self._closing = True
        for link in self._links.values():
            self._send(link, Kind.BYE)
        os.eventfd_write(self._wake, 1)
        if threading.current_thread() is not self._reader:
            self._reader.join()
        for link in self._links.values():
            link.close()
        os.close(self._wake)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        if error is not None:
            self.fail(str(error) or type(error).__name__)
        self.close()

    # -- inside -------------------------------------------------------------------------------------------------

    def _send(self, link: Link, kind: Kind, payload: bytes = b"") -> None:
        with suppress(OSError):  # it is gone; the reader says so
            link.send(kind, payload)

    def _take(self, rank: int) -> bytes:
        """The next message of ``rank``. What was sent before a rank died or failed counts at the end of a run only;
        what was sent before one left counts."""
        box = self._inbox[rank]
        with self._condition:
            self._condition.wait_for(lambda: box or self._failure is not None or self._links[rank].left)
            if box and (self._parting or not self._void):
                return box.popleft()
            failure = self._failure or f"{self._links[rank]} has left the run"
        self._noticed()
        raise RankFailed(failure)

    def _noticed(self) -> None:
        """This process goes on by itself: no last resort is needed."""
        with self._condition:
            timer, self._timer = self._timer, None
            self._patience = 0.0
        if timer is not None:
            timer.cancel()

    def _read(self) -> None:
        """Body of the thread: read every link until all are closed, or this process leaves."""
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        links = {link.fileno(): link for link in self._links.values()}
        for descriptor in links:
            poller.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in poller.poll():
                if descriptor == self._wake:
                    return
                link = links[descriptor]
                alive = link.pump()
                for kind, payload in link.messages():
                    self._handle(link, kind, payload)
                if not alive:
                    poller.unregister(descriptor)
                    if not link.left:
                        self._lost(f"{link} has died", link)

    def _handle(self, link: Link, kind: Kind, payload: bytes) -> None:
        if kind is Kind.FAILED:
            self._lost(payload.decode(errors="replace"), link)
            return
        with self._condition:
            if kind is Kind.BYE:
                link.left = True
            else:
                self._inbox[link.rank].append(payload)
            self._condition.notify_all()
            early = link.left and not self._parting
        if early:
            self._lost(f"{link} has left the run", link, left=True)

    def _lost(self, failure: str, source: Link, left: bool = False) -> None:
        with self._condition:
            if self._failure is not None or self._closing:
                return
            self._failure, self._void = failure, not left
            self._condition.notify_all()
            callbacks = list(self._callbacks)
            if self._patience > 0 and not left:
                self._timer = threading.Timer(self._patience, self._give_up)
                self._timer.daemon = True
                self._timer.start()
        for link in self._links.values():
            if link is not source:
                self._send(link, Kind.FAILED, failure.encode())
        for callback in callbacks:
            callback()

    def _give_up(self) -> None:
        _log.critical(
            "rank %d of %d: %s; this process does not get on and is ended", self.rank, self.size, self._failure
        )
        self._last_resort()


def _differences(name: str, first: Any, second: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(first, dict) and isinstance(second, dict):
        for key in sorted(first.keys() | second.keys()):
            yield from _differences(f"{name}.{key}" if name else key, first.get(key), second.get(key))
    elif first != second:
        yield name, first, second
