"""The hub: the daemon's one event loop. It owns workers and sessions; gRPC threads hand it calls and wait.

Everything it waits for is a descriptor (eventfds, sockets, the zygote, a signal), so it never sleeps and never spins:
a dead peer is an event like a finished batch.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import select
import signal
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from dataserver.session import Session
from dataserver.shared import PoolPage, create_eventfd, create_memfd, drain, notify
from dataserver.zygote import Zygote
from renaissance.core.errors import DataServerError, ProtocolError, RenaissanceError
from renaissance.core.log import get_logger
from renaissance.data.protocol import FAILED, MESSAGE_BYTES, PROTOCOL_VERSION, STOPPING, receive, version_mismatch

CONNECT_SECONDS = 30.0
"""A session whose consumer has not connected to the data socket by then is dropped."""

MAX_DEATHS_AT_A_SHARE = 5
"""A worker that dies more often over one share fails the session it was working for."""

MAX_FAILED_STARTS = 5
"""A worker that dies more often before it even runs ends the daemon: starting another would never end."""

UNHEARD_KEPT = 64

MAX_DIRECT_WAKES = 8
"""Up to this many workers are woken by the consumer itself; more go through the hub, which costs the consumer less."""

_T = TypeVar("_T")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_log = get_logger("dataserver")


@dataclass(slots=True)
class WorkerSlot:
    """A place in the pool; the process in it may change."""

    number: int
    wake: int  # eventfd, the same for every process that works here
    control: socket.socket | None = None
    pid: int = 0  # 0 while there is none
    restarts: int = 0
    failed_starts: int = 0  # in a row, of processes that died before they ran


class Hub:
    """Start it with ``run()`` in the main thread; everything else is called from there or through ``call``."""

    def __init__(self, zygote: Zygote, workers: int, on_started: Callable[[], None] | None = None) -> None:
        """``on_started`` is called once, from ``run``, when all workers are there."""
        self._zygote = zygote
        self._on_started = on_started
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._calls: deque[tuple[Callable[[], object], Future[object]]] = deque()
        self._call_lock = threading.Lock()
        self._call_event = create_eventfd()
        self._relay = create_eventfd()
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)  # given up to refuse a connection
        self._page_fd = create_memfd("pool", PoolPage.size(workers))
        self._page = PoolPage(self._page_fd, workers)
        self._pool = [WorkerSlot(w, create_eventfd()) for w in range(workers)]
        self._sessions: dict[int, tuple[Session, int]] = {}  # number -> session, memfd of its data set
        self._deadlines: dict[int, float] = {}  # sessions that wait for their consumer
        self._unheard: dict[str, str] = {}  # token -> why a session ended before its consumer came
        self._greeting: set[socket.socket] = set()
        self._running = False
        self._failure: str | None = None
        self._accepting_calls = True
        self.sessions_opened = 0
        self.watch(self._call_event, self._run_calls)
        self.watch(self._relay, self._relay_release)
        self.watch(zygote.fileno(), self._hear_zygote)
        for slot in self._pool:
            self._spawn(slot)

    # Event loop

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Call ``callback`` whenever ``fd`` is readable or its peer is gone."""
        self._callbacks[fd] = callback
        self._epoll.register(fd, select.EPOLLIN)

    def _unwatch(self, fd: int) -> None:
        if self._callbacks.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def run(self) -> None:
        """Until ``stop``. Raises DataServerError when the worker supervisor died."""
        self._running = True
        while self._running:
            self._run_ready(self._epoll.poll(self._timeout()))
            if self._deadlines:
                self._drop_late_sessions()
        if self._failure is not None:
            raise DataServerError(self._failure)

    def _run_ready(self, events: list[tuple[int, int]]) -> None:
        # Apart from ``run``, where callbacks would live on during the next poll, and with them closed sessions' rings.
        ready = [(fd, self._callbacks[fd]) for fd, _ in events]
        for fd, callback in ready:
            # An earlier callback of this round may have closed the descriptor, and its number may be in use again.
            if self._callbacks.get(fd) is callback:
                callback()

    def stop(self) -> None:
        self._running = False

    def call(self, function: Callable[[], _T]) -> _T:
        """Run ``function`` in the hub's thread and return its result; for other threads."""
        future: Future[object] = Future()
        with self._call_lock:
            if not self._accepting_calls:
                raise DataServerError("the dataserver is stopping")
            self._calls.append((function, future))
        notify(self._call_event)
        return future.result()  # type: ignore[return-value]

    def _run_calls(self) -> None:
        drain(self._call_event)
        while self._calls:  # appended by other threads, popped here only
            function, future = self._calls.popleft()
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

    def _timeout(self) -> float | None:
        if not self._deadlines:
            return None
        return max(0.0, min(self._deadlines.values()) - time.monotonic())

    # Workers

    @property
    def workers(self) -> list[WorkerSlot]:
        return self._pool

    def _spawn(self, slot: WorkerSlot) -> None:
        self._page.set_ready(slot.number, False)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        slot.control = ours
        self._zygote.spawn(slot.number, theirs, slot.wake, self._page_fd)
        theirs.close()
        self.watch(ours.fileno(), partial(self._hear_worker, slot))
        for session, data_fd in self._sessions.values():
            self._attach(slot, session, data_fd)

    def _attach(self, slot: WorkerSlot, session: Session, data_fd: int) -> None:
        message = pickle.dumps({"session": session.number, "spec": session.spec})
        self._send_worker(slot, message, [session.ring_fd, session.board_fd, data_fd, session.done_fd])

    def _send_worker(self, slot: WorkerSlot, message: bytes, fds: list[int]) -> None:
        if slot.control is not None:
            with suppress(BrokenPipeError, ConnectionResetError):  # its successor is told anyway
                socket.send_fds(slot.control, [message], fds)

    def _wake_workers(self) -> None:
        for slot in self._pool:
            notify(slot.wake)

    def _relay_release(self) -> None:
        drain(self._relay)
        self._wake_workers()

    def _hear_worker(self, slot: WorkerSlot) -> None:
        assert slot.control is not None
        message = receive(slot.control)
        if message:
            report = pickle.loads(message)
            self._fail_session(report["session"], report["error"])
            return
        # Dead; the zygote reports how. Until then nothing is sent to it.
        self._unwatch(slot.control.fileno())
        slot.control.close()
        slot.control = None

    def _hear_zygote(self) -> None:
        report = self._zygote.receive()
        if report is None:
            self._unwatch(self._zygote.fileno())
            self._failure = f"the worker supervisor (pid {self._zygote.pid}) died; start the dataserver again"
            self.stop()
        elif "started" in report:
            self._pool[report["started"]].pid = report["pid"]
            if self._on_started is not None and all(slot.pid for slot in self._pool):
                self._on_started()
                self._on_started = None
        else:
            self._replace(self._pool[report["exited"]], report["code"])

    def _replace(self, slot: WorkerSlot, code: int) -> None:
        if slot.control is not None:
            self._unwatch(slot.control.fileno())
            slot.control.close()
            slot.control = None
        how = f"killed by {_signal_name(-code)}" if code < 0 else f"exit code {code}"
        _log.warning("worker %d (pid %d) died: %s; starting another", slot.number, slot.pid, how)
        slot.pid = 0
        slot.restarts += 1
        slot.failed_starts = 0 if self._page.is_ready(slot.number) else slot.failed_starts + 1
        if slot.failed_starts > MAX_FAILED_STARTS:
            self._failure = f"worker {slot.number} died {slot.failed_starts} times before it could start ({how})"
            self.stop()
            return
        number = self._page.current_session(slot.number)
        if number in self._sessions:
            deaths = self._sessions[number][0].count_death(slot.number)
            if deaths > MAX_DEATHS_AT_A_SHARE:
                self._fail_session(number, f"worker {slot.number} died {deaths} times at the same batch ({how})")
        self._page.idle(slot.number)
        self._spawn(slot)
        for held, _ in list(self._sessions.values()):  # its last share may be done but not announced
            held.publish_finished()

    # Sessions

    @property
    def sessions(self) -> list[Session]:
        return [session for session, _ in self._sessions.values()]

    def add_session(self, session: Session, data_fd: int) -> None:
        """Workers start on it at once; the consumer must connect within CONNECT_SECONDS."""
        self._sessions[session.number] = session, data_fd
        self._deadlines[session.number] = time.monotonic() + CONNECT_SECONDS
        self.sessions_opened += 1
        self.watch(session.done_fd, partial(self._shares_done, session))
        for slot in self._pool:
            self._attach(slot, session, data_fd)

    def close_session(self, number: int) -> bool:
        """End a session from outside; False when there is none of that number."""
        if number not in self._sessions:
            return False
        self._end_session(number, STOPPING, "the session was closed by another client")
        return True

    def _shares_done(self, session: Session) -> None:
        drain(session.done_fd)
        session.publish_finished()

    def _fail_session(self, number: int, text: str) -> None:
        if number in self._sessions:
            _log.error("session %d failed: %s", number, text)
            self._end_session(number, FAILED, text)

    def _end_session(self, number: int, kind: bytes, text: str) -> None:
        session, _ = self._sessions.pop(number)
        self._deadlines.pop(number, None)
        session.tell(kind, text)
        if session.consumer is None:
            self._unheard[session.token] = text
            while len(self._unheard) > UNHEARD_KEPT:
                del self._unheard[next(iter(self._unheard))]
        self._unwatch(session.done_fd)
        if session.consumer is not None:
            self._unwatch(session.consumer.fileno())
        for slot in self._pool:
            self._send_worker(slot, pickle.dumps({"session": number}), [])
        session.close()
        _log.info("session %d closed after %d batches: %s", number, session.batches, text)

    def _drop_late_sessions(self) -> None:
        now = time.monotonic()
        for number in [n for n, deadline in self._deadlines.items() if deadline <= now]:
            self._end_session(number, FAILED, f"no consumer connected within {CONNECT_SECONDS:g} s")

    # Data socket

    def listen(self, listener: socket.socket) -> None:
        """Accept consumers on the data socket."""
        self.watch(listener.fileno(), partial(self._accept, listener))

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self._refuse(listener)
            return
        connection.setblocking(False)
        self._greeting.add(connection)
        self.watch(connection.fileno(), partial(self._greet, connection))

    def _refuse(self, listener: socket.socket) -> None:
        """No descriptor is left: hang up on who waits first, or the listener would stay readable and the hub spin."""
        _log.warning("data socket: a connection was refused, all descriptors are in use; raise `ulimit -n`")
        os.close(self._spare)
        with suppress(OSError):
            listener.accept()[0].close()
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _greet(self, connection: socket.socket) -> None:
        self._unwatch(connection.fileno())
        self._greeting.discard(connection)
        try:
            self._connect(connection)
        except (OSError, RenaissanceError) as error:
            _log.warning("data socket: %s", error)
            with suppress(OSError):
                connection.send(json.dumps({"error": str(error)}).encode())
            connection.close()

    def _connect(self, connection: socket.socket) -> None:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(credentials)
        if uid != os.geteuid():
            raise ProtocolError(f"a process of user {uid} asked for data of user {os.geteuid()}; refused")
        try:
            hello = json.loads(connection.recv(MESSAGE_BYTES))
            version, token = int(hello["version"]), str(hello["token"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):  # also Infinity and deep nesting
            raise ProtocolError("expected a JSON object with version and token") from None
        if version != PROTOCOL_VERSION:
            raise ProtocolError(version_mismatch(PROTOCOL_VERSION, version))
        for number in self._deadlines:
            session, _ = self._sessions[number]
            if session.token == token:
                break
        else:
            if token in self._unheard:
                raise DataServerError(f"the dataserver gave up this session: {self._unheard.pop(token)}")
            raise ProtocolError("no session waits for this token; it ended or another consumer has it")
        wakes = [slot.wake for slot in self._pool] if len(self._pool) <= MAX_DIRECT_WAKES else [self._relay]
        socket.send_fds(connection, [b'{"ok": true}'], [session.ring_fd, session.ready_fd, *wakes])
        del self._deadlines[number]
        session.consumer, session.consumer_pid = connection, pid
        self.watch(connection.fileno(), partial(self._hear_consumer, session))
        _log.info("session %d: consumer pid %d connected", number, pid)

    def _hear_consumer(self, session: Session) -> None:
        assert session.consumer is not None
        try:
            message = receive(session.consumer)
        except BlockingIOError:
            return
        if not message:
            self._end_session(session.number, STOPPING, "the consumer is gone")
            return
        try:
            session.seek(message)
        except ProtocolError as error:
            self._fail_session(session.number, str(error))
        else:
            self._wake_workers()

    def refuse_calls(self) -> None:
        """From now on ``call`` raises; calls that wait already are answered."""
        with self._call_lock:
            self._accepting_calls = False
        self._run_calls()

    def close(self) -> None:
        """Tell every consumer, then free everything but the zygote."""
        self.refuse_calls()
        for number in list(self._sessions):
            self._end_session(number, STOPPING, "the dataserver stopped")
        for connection in self._greeting:
            connection.close()
        for slot in self._pool:
            if slot.control is not None:
                slot.control.close()
            os.close(slot.wake)
        for fd in (self._call_event, self._relay, self._page_fd, self._spare):
            os.close(fd)
        self._epoll.close()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name of their own
        return f"signal {number}"
