"""Strangers on the data socket: who says a session's token becomes its consumer, everybody else is turned away.

Each has little time, only so many are heard at once, and nothing that one of them does makes the hub wait.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from dataserver.shared import SpareDescriptor, none_left
from renaissance.core.errors import DataServerError, ProtocolError, RenaissanceError
from renaissance.core.log import get_logger
from renaissance.data.protocol import MESSAGE_BYTES, PROTOCOL_VERSION, version_mismatch

GREETING_SECONDS = 5.0
"""So long a stranger may take to say the token."""

MAX_STRANGERS = 64
"""More at the same time are hung up on."""

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_log = get_logger("dataserver")

Watch = Callable[[int, Callable[[], None]], None]


class Greeter:
    """Used by the hub, in its thread."""

    def __init__(
        self,
        watch: Watch,
        unwatch: Callable[[int], None],
        welcome: Callable[[socket.socket, int, str], None],
        seconds: float = GREETING_SECONDS,
    ) -> None:
        """``welcome(connection, pid, token)`` takes the connection over or raises; then the stranger is told why."""
        self._watch, self._unwatch, self._welcome = watch, unwatch, welcome
        self._seconds = seconds
        self._strangers: dict[socket.socket, float] = {}  # -> deadline
        self._spare = SpareDescriptor()

    def listen(self, listener: socket.socket) -> None:
        self._watch(listener.fileno(), partial(self._accept, listener))

    @property
    def next_deadline(self) -> float | None:
        """Monotonic time at which ``drop_late`` has to be called."""
        return min(self._strangers.values(), default=None)

    def drop_late(self) -> None:
        now = time.monotonic()
        for connection in [c for c, deadline in self._strangers.items() if deadline <= now]:
            self._unwatch(connection.fileno())
            del self._strangers[connection]
            self._turn_away(connection, f"no token within {self._seconds:g} s")

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            if not none_left(error):
                raise
            self._refuse(listener)
            return
        connection.setblocking(False)
        try:
            _require_own_user(connection)
            if len(self._strangers) >= MAX_STRANGERS:
                raise DataServerError(f"{MAX_STRANGERS} others are saying their tokens just now; try again")
        except (OSError, RenaissanceError) as error:
            self._turn_away(connection, str(error))
            return
        self._strangers[connection] = time.monotonic() + self._seconds
        self._watch(connection.fileno(), partial(self._hear, connection))

    def _refuse(self, listener: socket.socket) -> None:
        """No descriptor is left: hang up on who waits first, or the listener would stay readable and the hub spin."""
        _log.warning("data socket: a connection was refused, all descriptors are in use; raise `ulimit -n`")
        self._spare.give()
        with suppress(OSError):
            listener.accept()[0].close()
        self._spare.take()

    def _hear(self, connection: socket.socket) -> None:
        self._unwatch(connection.fileno())
        del self._strangers[connection]
        try:
            pid, _ = _peer(connection)
            self._welcome(connection, pid, _read_token(connection))
        except (OSError, RenaissanceError) as error:
            self._turn_away(connection, str(error))

    def _turn_away(self, connection: socket.socket, why: str) -> None:
        _log.warning("data socket: %s", why)
        with suppress(OSError):
            connection.send(json.dumps({"error": why}).encode())
        connection.close()

    def close(self) -> None:
        for connection in self._strangers:
            connection.close()
        self._strangers.clear()
        self._spare.give()


def _peer(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the other side, as the kernel knows them."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    return pid, uid


def _require_own_user(connection: socket.socket) -> None:
    _, uid = _peer(connection)
    if uid != os.geteuid():
        raise ProtocolError(f"a process of user {uid} asked for data of user {os.geteuid()}; refused")


def _read_token(connection: socket.socket) -> str:
    try:
        hello = json.loads(connection.recv(MESSAGE_BYTES))
        version, token = int(hello["version"]), str(hello["token"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):  # also Infinity and deep nesting
        raise ProtocolError("expected a JSON object with version and token") from None
    if version != PROTOCOL_VERSION:
        raise ProtocolError(version_mismatch(PROTOCOL_VERSION, version))
    return token
