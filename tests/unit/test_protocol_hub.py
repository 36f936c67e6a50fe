"""The event loop of the daemon, with the worker supervisor replaced by a socket."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from dataserver import hub as hub_module
from dataserver.greeter import MAX_STRANGERS
from dataserver.hub import Hub
from dataserver.pool import WorkerSlot
from dataserver.session import Member, MemberState, Session
from dataserver.shared import create_eventfd, notify
from renaissance.core.dtype import DType
from renaissance.data.making.spec import Load, LoadedSet, OnCorrupt, SessionSpec
from renaissance.data.protocol import RingLayout, make_tag
from renaissance.data.sources import Encoding


class SilentZygote:
    pid = 0

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def fileno(self) -> int:
        return self.ours.fileno()

    def spawn(self, worker: int, control: socket.socket, wake: int, pool_page: int) -> None:
        self.worker = control.dup()  # what the last worker that was started would read

    def close(self) -> None:
        for end in (self.ours, self.theirs, self.worker):
            end.close()


@pytest.fixture
def zygote() -> Iterator[SilentZygote]:
    zygote = SilentZygote()
    yield zygote
    zygote.close()


@pytest.fixture
def hub(zygote: SilentZygote) -> Iterator[Hub]:
    hub = Hub(zygote, 1)  # type: ignore[arg-type]
    yield hub
    hub.close()


def test_event_of_a_closed_descriptor_does_not_reach_its_successor(hub: Hub) -> None:
    """A killed worker's socket and its successor's often get one number in one round; a blocking read then hung."""
    first, second = create_eventfd(), create_eventfd()
    calls: list[str] = []

    def replace(other: int) -> None:
        calls.append("replaced")
        hub._unwatch(other)
        os.close(other)
        fresh = create_eventfd()
        if fresh != other:
            os.dup2(fresh, other)
            os.close(fresh)
        hub.watch(other, lambda: calls.append("stale"))
        hub.stop()

    hub.watch(first, lambda: replace(second))
    hub.watch(second, lambda: replace(first))
    notify(first)
    notify(second)
    hub.run()
    assert calls == ["replaced"]


def test_calls_from_other_threads_are_refused_once_stopping(hub: Hub) -> None:
    hub.refuse_calls()
    with pytest.raises(ConnectionError, match="stopping"):
        hub.call(lambda: 1)


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen(200)
        yield listener


def stranger_at(listener: socket.socket) -> socket.socket:
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.settimeout(5)
    stranger.connect(listener.getsockname())
    return stranger


def test_stranger_who_says_nothing_is_told_that_time_is_up(listener: socket.socket) -> None:
    zygote = SilentZygote()
    hub = Hub(zygote, 1, greeting_seconds=0.05)  # type: ignore[arg-type]
    hub.listen(listener)
    with stranger_at(listener) as stranger:
        hub.watch(stranger.fileno(), hub.stop)
        hub.run()
        assert json.loads(stranger.recv(4096)) == {"error": "no token within 0.05 s"}
        assert stranger.recv(1) == b""
        hub._unwatch(stranger.fileno())
    hub.close()
    zygote.close()


def test_strangers_beyond_the_limit_are_turned_away_and_the_first_still_heard(
    hub: Hub, listener: socket.socket
) -> None:
    hub.listen(listener)
    strangers = [stranger_at(listener) for _ in range(MAX_STRANGERS + 1)]
    hub.watch(strangers[-1].fileno(), hub.stop)
    hub.run()
    assert "others are saying their tokens" in json.loads(strangers[-1].recv(4096))["error"]
    hub._unwatch(strangers[-1].fileno())
    strangers[0].send(b'{"version": 2, "token": "guess"}')
    hub.watch(strangers[0].fileno(), hub.stop)
    hub.run()
    assert "no session waits for this token" in json.loads(strangers[0].recv(4096))["error"]
    hub._unwatch(strangers[0].fileno())
    for stranger in strangers:
        stranger.close()


def session_of(members: int, share: str = "", on_corrupt: OnCorrupt = OnCorrupt.FAIL) -> Session:
    loaded = LoadedSet("mnist", "train", Load.FULLY, Encoding.PIXELS, 10, 10, 1, 1, 1, "made up")
    layout = RingLayout(2, 10, 1, 1, 1, 1, DType.UINT8, members=members)
    spec = SessionSpec("mnist", "train", loaded, "{}", 0, True, 0, 1, 1, layout, on_corrupt=on_corrupt)
    return Session(1, spec, 1, 0, 0, share=share)


def group_of_two(hub: Hub) -> tuple[Session, Member]:
    session = session_of(2, "pair")
    return session, hub.add_session(session, session.ring_fd)


def test_group_whose_members_do_not_all_come_fails_by_name(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that came would wait for ever."""
    session, first = group_of_two(hub)
    first.state = MemberState.READING
    first.consumer, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    hub.watch(first.consumer.fileno(), lambda: None)
    hub._drop_late()
    assert hub.sessions == [session]
    monkeypatch.setattr(hub_module, "GATHER_SECONDS", 0.0)
    hub._drop_late()
    assert hub.sessions == []
    assert theirs.recv(4096) == b"FAILshare group 'pair': of 2 members 1 came within 0 s"
    assert hub.sessions_failed == 1
    theirs.close()


def test_member_that_opens_but_never_connects_departs_and_the_other_goes_on(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "CONNECT_SECONDS", 0.0)
    session, _ = group_of_two(hub)
    joined = hub.join_session("pair")
    assert joined is not None
    second = joined[1]
    second.deadline += 1000
    hub._drop_late()
    assert [m.state for m in session.members] == [MemberState.GONE, MemberState.CONNECTING]
    assert not session._ring.is_free_for(0, 2)
    session._ring.words[session.spec.layout.released_word(1, 0)] = 1
    assert session._ring.is_free_for(0, 2)  # only the living count
    second.deadline = 0.0
    hub._drop_late()
    assert hub.sessions == []


def test_worker_that_listens_again_keeps_the_hub_busy_no_longer(hub: Hub, zygote: SilentZygote) -> None:
    """Room in its socket stayed an event for ever when all it was to be told had cancelled out."""
    slot = hub.workers[0]
    assert slot.control is not None
    with suppress(BlockingIOError):
        while True:
            slot.control.send(bytes(4096))
    session = session_of(1)
    hub.add_session(session, session.ring_fd)
    assert slot.full
    assert hub.close_session(1)
    zygote.worker.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            zygote.worker.recv(4096)
    for _ in range(2):
        hub._run_ready(hub._epoll.poll(0))
    assert hub._epoll.poll(0) == []


def test_batch_that_is_finished_while_reports_are_read_is_published_after_its_own(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has a batch must be able to hear what is corrupt in it."""
    session = session_of(1, on_corrupt=OnCorrupt.BLANK)
    hub.add_session(session, session.ring_fd)
    board = session._board
    board.mark_done(0, 0, make_tag(1, 0))
    read: list[int] = []

    def read_reports(slot: WorkerSlot) -> bool:
        read.append(session.batches)
        board.mark_done(1, 0, make_tag(1, 1))  # its report came after we looked
        return True

    monkeypatch.setattr(hub, "_read_reports", read_reports)
    hub._shares_done(session)
    assert (read, session.batches, hub.batches) == ([0], 1, 1)
    hub._shares_done(session)
    assert (read, session.batches, hub.batches) == ([0, 1], 2, 2)
