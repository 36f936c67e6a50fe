"""The loop of a worker, without a process of its own: what it says when it cannot serve a session, what it frees."""

from __future__ import annotations

import gc
import os
import pickle
import socket
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from dataserver.shared import PoolPage, create_eventfd, create_memfd
from dataserver.worker import MAX_ERROR_CHARS, MESSAGE_BYTES, _Worker
from renaissance.core.errors import FormatError


class Rig:
    def __init__(self) -> None:
        self.hub, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.hub.settimeout(5)
        self.theirs = theirs
        self.fds = [create_eventfd(), create_memfd("page", PoolPage.size(1))]
        self.worker = _Worker(0, 1, theirs, *self.fds)

    def said(self) -> dict[str, object]:
        message: dict[str, object] = pickle.loads(self.hub.recv(MESSAGE_BYTES))
        return message


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.hub.close()
    rig.theirs.close()
    for fd in rig.fds:
        os.close(fd)


def failing_share(error: Exception, kept: object) -> SimpleNamespace:
    """What a read-ahead does: the error lies in a local variable of the frame that raises it."""

    def step() -> bool:
        ring, found = kept, [error]
        assert ring is not None
        raise found[0]

    return SimpleNamespace(session=7, step=step, where=lambda: "epoch 1 batch 2", close=lambda: None)


def test_error_of_a_reading_thread_keeps_no_ring_mapped(rig: Rig) -> None:
    class Ring:
        pass

    ring = Ring()
    gone = weakref.ref(ring)
    gc.disable()
    try:
        share = failing_share(FormatError("a.dts: changed since the set was opened"), ring)
        assert not rig.worker._step(share)  # type: ignore[arg-type]
        del ring, share
        assert gone() is None
    finally:
        gc.enable()
    assert rig.said() == {"session": 7, "error": "epoch 1 batch 2: a.dts: changed since the set was opened"}


def test_error_of_any_length_fits_into_a_message(rig: Rig) -> None:
    """The hub could not read a longer one, and ended."""
    rig.worker._step(failing_share(FormatError("x" * (3 * MESSAGE_BYTES)), rig))  # type: ignore[arg-type]
    assert len(str(rig.said()["error"])) < MAX_ERROR_CHARS + 50


def test_session_whose_descriptors_did_not_all_arrive_fails_and_the_worker_lives(rig: Rig) -> None:
    """Out of descriptors, a worker gets those that fit; it died of that, again and again."""
    before = len(os.listdir("/proc/self/fd"))
    sent = [create_eventfd(), create_eventfd()]
    socket.send_fds(rig.hub, [pickle.dumps({"session": 3, "spec": None})], sent)
    assert rig.worker._handle_message()
    for fd in sent:
        os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before
    assert "when the session was prepared: a worker has no descriptors left; raise" in str(rig.said()["error"])
