"""A worker process: prepares its share of every batch of every session, straight into the shared slots.

It runs ahead over free slots on its own schedule, a part of a share of each session in turn. It waits only when no
session has anything to do: for a released slot, for a sample that is being read, and for the daemon.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import traceback
from typing import Any

from dataserver.share import Share
from dataserver.shared import PoolPage, drain, notify
from renaissance.core.errors import CorruptSample, DataServerError, RenaissanceError, without_frames
from renaissance.core.log import get_logger

MESSAGE_BYTES = 1 << 17
ATTACH_FDS = 4
REPORTS_IN_A_MESSAGE = 64
MAX_ERROR_CHARS = 4000
_log = get_logger("dataserver.worker")


class _Worker:
    def __init__(self, worker: int, workers: int, control: socket.socket, wake: int, pool_page: int) -> None:
        self._worker = worker
        self._workers = workers
        self._control = control
        self._wake = wake
        self._page = PoolPage(pool_page, workers)
        self._shares: list[Share] = []
        self._poller = select.poll()
        self._poller.register(control, select.POLLIN)
        self._poller.register(wake, select.POLLIN)

    def run(self) -> None:
        """Until the daemon closes the control socket."""
        self._page.set_ready(self._worker, True)
        while True:
            worked = self._step_all()
            for fd, _ in self._poller.poll(0 if worked else None):
                if fd == self._wake:
                    drain(fd)
                elif not self._handle_message():
                    return

    def _step_all(self) -> bool:
        # Apart from ``run``, where ``share`` would outlive the loop and keep the ring of a closed session mapped.
        worked = False
        for share in tuple(self._shares):
            worked |= self._step(share)
        return worked

    def _step(self, share: Share) -> bool:
        try:
            return share.step()
        except Exception as error:
            self._fail(share.session, error, share.where())
            self._detach(share.session)
            self._page.idle(self._worker)
            # One of a reading thread lies in a frame that its own traceback would keep, and with it the ring.
            without_frames(error)
            return False

    def _report(self, session: int, reports: list[dict[str, object]]) -> None:
        for first in range(0, len(reports), REPORTS_IN_A_MESSAGE):
            some = reports[first : first + REPORTS_IN_A_MESSAGE]
            self._control.send(pickle.dumps({"session": session, "corrupt": some}))

    def _handle_message(self) -> bool:
        message, fds, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES, ATTACH_FDS)
        if not message:
            return False
        request: dict[str, Any] = pickle.loads(message)
        session: int = request["session"]
        if "spec" not in request:
            self._detach(session)
            return True
        self._page.begin(self._worker, session)
        try:
            if len(fds) != ATTACH_FDS:  # the system gives what fits
                raise DataServerError("a worker has no descriptors left; raise the limit of open files (ulimit -n)")
            spec, calls = request["spec"], (self._wake_up, self._report)
            self._shares.append(Share(session, spec, self._worker, self._workers, self._page, fds, *calls))
            fds.pop()  # it owns the last
        except Exception as error:
            self._fail(session, error, "when the session was prepared")
        self._page.idle(self._worker)
        for fd in fds:
            os.close(fd)
        return True

    def _wake_up(self) -> None:
        """For threads: the poll of ``run`` returns, now or when it is next called."""
        notify(self._wake)

    def _detach(self, session: int) -> None:
        for share in [s for s in self._shares if s.session == session]:
            self._shares.remove(share)
            share.close()

    def _fail(self, session: int, error: Exception, where: str) -> None:
        text = str(error) if isinstance(error, RenaissanceError) else f"{type(error).__name__}: {error}"
        if not isinstance(error, CorruptSample):  # that is no fault of the program, and the message says all
            _log.error("session %d, %s: %s", session, where, "".join(traceback.format_exception(error)).rstrip())
        self._control.send(pickle.dumps({"session": session, "error": f"{where}: {text[:MAX_ERROR_CHARS]}"}))


def worker_main(worker: int, workers: int, control: socket.socket, wake: int, pool_page: int) -> None:
    """Entry of a worker process; returns when the daemon is gone or stops."""
    try:
        _Worker(worker, workers, control, wake, pool_page).run()
    except (BrokenPipeError, ConnectionResetError):
        return  # the daemon died between two of our messages; the zygote ends us
