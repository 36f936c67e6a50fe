"""The places of the worker pool, and what each worker still has to be told.

Sending never blocks: a worker that is stopped (SIGSTOP, a debugger, a frozen cgroup) holds up its own shares, not the
daemon. What is put off stays as few as there are open sessions: the end of one that it has not heard of cancels out.
"""

from __future__ import annotations

import errno
import pickle
import signal
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

Message = tuple[dict[str, object], list[int]]


@dataclass(slots=True)
class WorkerSlot:
    """A place in the pool; the process in it may change."""

    number: int
    wake: int  # eventfd, the same for every process that works here
    control: socket.socket | None = None
    pid: int = 0  # 0 while there is none
    restarts: int = 0
    failed_starts: int = 0  # in a row, of processes that died before they ran
    started: float = 0.0  # monotonic
    outbox: deque[tuple[int, bool]] = field(default_factory=deque)  # (session, begin or else end) it must be told
    full: bool = False  # its socket took no more; the outbox waits until there is room

    def put(self, session: int, *, begin: bool) -> bool:
        """Note what the worker must hear; True when there is something to send for this."""
        if self.control is None:
            return False  # its successor is told what is open then
        if not begin and (session, True) in self.outbox:
            self.outbox.remove((session, True))
            return False
        self.outbox.append((session, begin))
        return True

    def flush(self, attach: Callable[[int], Message]) -> bool:
        """Send what there is to say; False when the worker's socket is full.

        ``attach(session)`` makes the message that begins one. Raises WorkerDeaf when the worker must be replaced.
        """
        assert self.control is not None
        while self.outbox:
            session, begin = self.outbox[0]
            message, fds = attach(session) if begin else ({"session": session}, [])
            try:
                socket.send_fds(self.control, [pickle.dumps(message)], fds)
            except BlockingIOError:
                return False
            except (BrokenPipeError, ConnectionResetError):  # its successor is told anyway
                self.outbox.clear()
                return True
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS:
                    raise
                raise WorkerDeaf from None
            self.outbox.popleft()
        return True


class WorkerDeaf(Exception):
    """So many descriptors were sent to a worker that has not taken them that the kernel allows no more."""


def signal_name(number: int) -> str:
    """``SIGKILL``, or the number."""
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name of their own
        return f"signal {number}"
