"""The event loop of the daemon, with the worker supervisor replaced by a socket."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from dataserver.hub import Hub
from dataserver.shared import create_eventfd, notify


class SilentZygote:
    pid = 0

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def fileno(self) -> int:
        return self.ours.fileno()

    def spawn(self, worker: int, control: socket.socket, wake: int, pool_page: int) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    zygote = SilentZygote()
    hub = Hub(zygote, 1)  # type: ignore[arg-type]
    yield hub
    hub.close()
    zygote.ours.close()
    zygote.theirs.close()


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
