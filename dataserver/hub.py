"""The hub: the daemon's one event loop. It owns workers and sessions; gRPC threads hand it calls and wait.

Everything it waits for is a descriptor (eventfds, sockets, the zygote, a signal), so it never sleeps and never spins:
a dead peer is an event like a finished batch.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from dataserver.calls import CallQueue
from dataserver.corrupt import CorruptLog
from dataserver.greeter import GREETING_SECONDS, Greeter
from dataserver.pool import Message, WorkerDeaf, WorkerSlot, signal_name
from dataserver.session import Member, MemberState, Session
from dataserver.shared import PoolPage, SpareDescriptor, create_eventfd, create_memfd, drain, none_left, notify
from dataserver.zygote import Zygote
from renaissance.core.errors import DataServerError, ProtocolError, ValueRejected
from renaissance.core.log import get_logger
from renaissance.data.making.spec import OnCorrupt
from renaissance.data.protocol import FAILED, STOPPING, receive

CONNECT_SECONDS = 30.0
"""A consumer that has not connected to the data socket by then is given up."""

GATHER_SECONDS = 600.0
"""A share group whose members have not all come by then fails; those who came would wait for ever."""

MAX_DEATHS_AT_A_SHARE = 5
"""A worker that dies more often over one share fails the session it was working for."""

MAX_FAILED_STARTS = 5
"""A worker that dies more often before it even runs ends the daemon: starting another would never end."""

UNHEARD_KEPT = 64
CLOSED_KEPT = 64
"""So many closed sessions are remembered for those who ask what was corrupt."""

WORKER_MESSAGE_BYTES = 1 << 17

MAX_DIRECT_WAKES = 8
"""Up to this many workers are woken by the consumer itself; more go through the hub, which costs the consumer less."""

_log = get_logger("dataserver")


class Hub:
    """Start it with ``run()`` in the main thread; everything else is called from there or through ``call``."""

    def __init__(
        self,
        zygote: Zygote,
        workers: int,
        on_started: Callable[[], None] | None = None,
        *,
        greeting_seconds: float = GREETING_SECONDS,
    ) -> None:
        """``on_started`` is called once, from ``run``, when all workers are there."""
        self._zygote = zygote
        self._on_started = on_started
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._calls = CallQueue()
        self.call = self._calls.call
        self.refuse_calls = self._calls.refuse
        self._relay = create_eventfd()
        self._page_fd = create_memfd("pool", PoolPage.size(workers))
        self._page = PoolPage(self._page_fd, workers)
        self._pool = [WorkerSlot(w, create_eventfd()) for w in range(workers)]
        self._sessions: dict[int, tuple[Session, int]] = {}  # number -> session, memfd of its data set
        self._gathering: set[int] = set()  # sessions with a consumer that has not come or not connected
        self._unheard: dict[str, str] = {}  # token -> why a session ended before its consumer came
        self._corrupt: dict[int, CorruptLog] = {}  # of closed sessions
        self._greeter = Greeter(self.watch, self._unwatch, self._welcome, greeting_seconds)
        self.listen = self._greeter.listen
        self._spare = SpareDescriptor()
        self._running = False
        self._failure: str | None = None
        self.sessions_opened = self.sessions_failed = 0
        self.batches = self.samples = self.corrupt_occurrences = 0  # of all sessions
        self.watch(self._calls.event, self._calls.run)
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
            self._drop_late()
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

    def _timeout(self) -> float | None:
        deadlines = [deadline for _, _, deadline in self._awaited()]
        if self._greeter.next_deadline is not None:
            deadlines.append(self._greeter.next_deadline)
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    # Workers

    @property
    def workers(self) -> list[WorkerSlot]:
        return self._pool

    def _spawn(self, slot: WorkerSlot) -> None:
        self._page.set_ready(slot.number, False)
        ours, theirs = self._socket_pair()
        ours.setblocking(False)
        slot.control = ours
        slot.full = False
        slot.outbox.clear()
        self._zygote.spawn(slot.number, theirs, slot.wake, self._page_fd)
        theirs.close()
        slot.started = time.monotonic()
        self.watch(ours.fileno(), partial(self._hear_worker, slot))
        for number in self._sessions:
            self._tell_worker(slot, number, attach=True)

    def _socket_pair(self) -> tuple[socket.socket, socket.socket]:
        try:
            return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            if not none_left(error):
                raise
        self._spare.give()  # with what the dead worker's end leaves, enough for its successor
        try:
            return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        finally:
            self._spare.take()

    def _tell_worker(self, slot: WorkerSlot, number: int, *, attach: bool) -> None:
        """Let the worker begin or end a session, now or when it listens again."""
        if slot.put(number, begin=attach) and not slot.full and not self._flush(slot):
            self._set_full(slot, True)

    def _flush(self, slot: WorkerSlot) -> bool:
        try:
            return slot.flush(self._attach_message)
        except WorkerDeaf:
            _log.warning("worker %d (pid %d) does not take what it is sent; replaced", slot.number, slot.pid)
            slot.outbox.clear()
            if slot.pid:
                os.kill(slot.pid, signal.SIGKILL)  # not reaped yet, or its pid would be 0: it is the one
            return True

    def _set_full(self, slot: WorkerSlot, full: bool) -> None:
        """While its socket is full, room in it is an event too."""
        slot.full = full
        if slot.control is not None:
            self._epoll.modify(slot.control.fileno(), select.EPOLLIN | select.EPOLLOUT if full else select.EPOLLIN)

    def _attach_message(self, number: int) -> Message:
        session, data_fd = self._sessions[number]
        fds = [session.ring_fd, session.board_fd, data_fd, session.done_fd]
        return {"session": number, "spec": session.spec}, fds

    def _wake_workers(self) -> None:
        for slot in self._pool:
            notify(slot.wake)

    def _relay_release(self) -> None:
        drain(self._relay)
        self._wake_workers()

    def _hear_worker(self, slot: WorkerSlot) -> None:
        assert slot.control is not None
        if slot.full and self._flush(slot):  # also when what it was to be told has cancelled out meanwhile
            self._set_full(slot, False)
        if not self._read_reports(slot):
            # Dead; the zygote reports how. Until then nothing is sent to it.
            self._hang_up(slot)

    def _read_reports(self, slot: WorkerSlot) -> bool:
        """Everything the worker has said by now; False when it is gone."""
        while slot.control is not None:
            try:
                message = receive(slot.control, WORKER_MESSAGE_BYTES)
            except BlockingIOError:
                return True
            if not message:
                return False
            report = pickle.loads(message)
            if "error" in report:
                self._fail_session(report["session"], report["error"])
            else:
                self._note_corrupt(report["session"], report["corrupt"])
        return False

    def _note_corrupt(self, number: int, reports: list[dict[str, object]]) -> None:
        if number not in self._sessions:
            return
        session, _ = self._sessions[number]
        before = session.corrupt.occurrences
        failure = session.corrupt.note(reports)
        self.corrupt_occurrences += session.corrupt.occurrences - before
        session.show_corrupt()
        if failure is not None:
            self._fail_session(number, failure)

    def _hang_up(self, slot: WorkerSlot) -> None:
        if slot.control is not None:
            self._unwatch(slot.control.fileno())
            slot.control.close()
            slot.control = None
            slot.outbox.clear()

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
            self._read_reports(slot)  # what it said before it died
        self._hang_up(slot)
        how = f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"
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
            self._publish(held)

    # Sessions

    @property
    def sessions(self) -> list[Session]:
        return [session for session, _ in self._sessions.values()]

    def current_session(self, slot: WorkerSlot) -> int:
        """The session whose share the worker prepares just now, 0 for none."""
        return self._page.current_session(slot.number)

    def add_session(self, session: Session, data_fd: int) -> Member:
        """Workers start on it at once; its first consumer, who is returned, must connect within CONNECT_SECONDS."""
        member = session.admit(CONNECT_SECONDS)
        assert member is not None  # a session has at least one
        self._sessions[session.number] = session, data_fd
        self._gathering.add(session.number)
        self.sessions_opened += 1
        self.watch(session.done_fd, partial(self._shares_done, session))
        for slot in self._pool:
            self._tell_worker(slot, session.number, attach=True)
        return member

    def join_session(self, share: str) -> tuple[Session, Member] | None:
        """Let another member into an open share group; None when there is no such group.

        Raises ValueRejected when all its members have come.
        """
        session = self.find_group(share)
        if session is None:
            return None
        member = session.admit(CONNECT_SECONDS)
        if member is None:
            raise ValueRejected(
                f"share group {share!r} has had all its {len(session.members)} members and has started (session "
                f"{session.number}); a member that was lost cannot come back. Use another name, or wait for its end"
            )
        return session, member

    def find_group(self, share: str) -> Session | None:
        """The open session of a share group."""
        return next((s for s, _ in self._sessions.values() if share and s.share == share), None)

    def close_session(self, number: int) -> bool:
        """End a session from outside; False when there is none of that number."""
        if number not in self._sessions:
            return False
        self._end_session(number, STOPPING, "the session was closed by another client")
        return True

    def corrupt_log(self, number: int) -> CorruptLog | None:
        """What was corrupt in a session that is open or was closed lately; None for any other."""
        if number in self._sessions:
            return self._sessions[number][0].corrupt
        return self._corrupt.get(number)

    def _shares_done(self, session: Session) -> None:
        drain(session.done_fd)
        self._publish(session)

    def _publish(self, session: Session) -> None:
        count = session.count_finished()
        if session.spec.on_corrupt is not OnCorrupt.FAIL:
            # Who has a batch must be able to hear what is corrupt in it. Counted before and not again after: a report
            # of what is finished from now on may not be here yet.
            for slot in self._pool:
                if slot.control is not None:
                    self._read_reports(slot)
        if session.number in self._sessions:  # what was heard may have ended it
            self.batches += count
            self.samples += session.publish(count)

    def _fail_session(self, number: int, text: str) -> None:
        if number in self._sessions:
            _log.error("session %d failed: %s", number, text)
            self.sessions_failed += 1
            self._end_session(number, FAILED, text)

    def _end_session(self, number: int, kind: bytes, text: str) -> None:
        session, _ = self._sessions.pop(number)
        self._gathering.discard(number)
        session.tell(kind, text)
        for member in session.members:
            if member.state is MemberState.CONNECTING:
                self._remember_unheard(member.token, text)
            if member.consumer is not None:
                self._unwatch(member.consumer.fileno())
        self._unwatch(session.done_fd)
        for slot in self._pool:
            self._tell_worker(slot, number, attach=False)
        session.close()
        _log.info("session %d closed after %d batches: %s", number, session.batches, text)
        if session.corrupt.occurrences:
            self._report_corrupt(session)

    def _remember_unheard(self, token: str, text: str) -> None:
        self._unheard[token] = text
        while len(self._unheard) > UNHEARD_KEPT:
            del self._unheard[next(iter(self._unheard))]

    def _report_corrupt(self, session: Session) -> None:
        log = session.corrupt
        self._corrupt[session.number] = log
        while len(self._corrupt) > CLOSED_KEPT:
            del self._corrupt[next(iter(self._corrupt))]
        _log.warning(
            "session %d met %d corrupt samples (%d times): %s",
            session.number,
            log.distinct,
            log.occurrences,
            log.summary(),
        )

    def _awaited(self) -> list[tuple[Session, Member, float]]:
        """Members whose patience or ours ends at a time."""
        awaited = []
        for number in self._gathering:
            session, _ = self._sessions[number]
            for member in session.members:
                if member.state is MemberState.CONNECTING:
                    awaited.append((session, member, member.deadline))
                elif member.state is MemberState.AWAITED:
                    awaited.append((session, member, session.opened + GATHER_SECONDS))
        return awaited

    def _drop_late(self) -> None:
        self._greeter.drop_late()
        now = time.monotonic()
        for session, member, deadline in self._awaited():
            if deadline > now or session.number not in self._sessions:
                continue
            if member.state is MemberState.AWAITED:
                came = sum(m.state is not MemberState.AWAITED for m in session.members)
                text = f"of {len(session.members)} members {came} came within {GATHER_SECONDS:g} s"
                self._fail_session(session.number, f"share group {session.share!r}: {text}")
            else:
                text = f"no consumer connected within {CONNECT_SECONDS:g} s"
                self._remember_unheard(member.token, text)
                self._depart(session, member, text)

    # Consumers

    def _welcome(self, connection: socket.socket, pid: int, token: str) -> None:
        """Make the stranger the consumer it has the token of."""
        session, member = self._find_member(token)
        wakes = [slot.wake for slot in self._pool] if len(self._pool) <= MAX_DIRECT_WAKES else [self._relay]
        socket.send_fds(connection, [b'{"ok": true}'], [session.ring_fd, member.ready_fd, *wakes])
        member.state = MemberState.READING
        member.consumer, member.pid = connection, pid
        self.watch(connection.fileno(), partial(self._hear_consumer, session, member))
        self._forget_gathered(session)
        _log.info("session %d: consumer pid %d connected", session.number, pid)

    def _forget_gathered(self, session: Session) -> None:
        if all(member.state in (MemberState.READING, MemberState.GONE) for member in session.members):
            self._gathering.discard(session.number)

    def _find_member(self, token: str) -> tuple[Session, Member]:
        for number in self._gathering:
            session, _ = self._sessions[number]
            for member in session.members:
                if member.state is MemberState.CONNECTING and member.token == token:
                    return session, member
        if token in self._unheard:
            raise DataServerError(f"the dataserver gave up this session: {self._unheard.pop(token)}")
        raise ProtocolError("no session waits for this token; it ended or another consumer has it")

    def _hear_consumer(self, session: Session, member: Member) -> None:
        assert member.consumer is not None
        try:
            message = receive(member.consumer)
        except BlockingIOError:
            return
        if not message:
            self._depart(session, member, "the consumer is gone")
            return
        try:
            session.seek(message)
        except ProtocolError as error:
            if len(session.members) == 1:
                self._fail_session(session.number, str(error))
            else:  # the others did nothing wrong
                _log.error("session %d, member %d: %s", session.number, member.number, error)
                with suppress(OSError):
                    member.consumer.send(FAILED + str(error).encode()[:4000])
                self._depart(session, member, str(error))
        else:
            self._wake_workers()

    def _depart(self, session: Session, member: Member, text: str) -> None:
        """One consumer less; the session ends with its last."""
        if len(session.members) == 1:
            self._end_session(session.number, STOPPING, text)
            return
        if member.consumer is not None:
            self._unwatch(member.consumer.fileno())
        if session.depart(member):
            _log.info("session %d: member %d left: %s", session.number, member.number, text)
            self._forget_gathered(session)
            self._wake_workers()
        else:
            self._end_session(session.number, STOPPING, f"its last member left: {text}")

    def close(self) -> None:
        """Tell every consumer, then free everything but the zygote."""
        self.refuse_calls()
        for number in list(self._sessions):
            self._end_session(number, STOPPING, "the dataserver stopped")
        self._greeter.close()
        for slot in self._pool:
            if slot.control is not None:
                slot.control.close()
            os.close(slot.wake)
        for fd in (self._relay, self._page_fd):
            os.close(fd)
        self._calls.close()
        self._spare.give()
        self._epoll.close()
