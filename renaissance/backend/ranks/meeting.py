"""How the ranks of one machine find each other: the socket, who may connect, and the frames of a connection.

Frame: kind (1 byte), length (4 bytes), payload. A list of byte strings is packed as length and bytes of each.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import stat
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from enum import IntEnum
from time import monotonic, sleep

import renaissance
from renaissance.backend.ranks.launch import RENDEZVOUS, Launch
from renaissance.core.errors import DeviceError, ValueRejected

_HEAD = struct.Struct("<BI")
_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_CHUNK = 1 << 16
_LONGEST_PATH = 107
_RETRY_SECONDS = 0.02
_HELLO_SECONDS = 5.0
"""For a word of a process that is there."""


class Kind(IntEnum):
    """What a frame says."""

    HELLO = 1  # who comes
    WELCOME = 2  # all have come
    REFUSED = 3  # why the run cannot begin
    PART = 4  # one rank's part of a gather
    PARTS = 5  # all parts
    FAILED = 6  # a rank cannot go on, or is gone
    BYE = 7  # the sender leaves on purpose


class Link:
    """A connection to another rank. ``left``: it has said goodbye."""

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self.rank, self.left = rank, False
        self._connection, self._sending = connection, threading.Lock()
        self._received = bytearray()
        self.pid, self.uid, _ = _CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid})"

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Raises OSError when the other side is gone."""
        with self._sending:
            self._connection.sendall(_HEAD.pack(kind, len(payload)) + payload)

    def pump(self) -> bool:
        """Take what has come, without waiting; False when nothing more will."""
        try:
            while data := self._connection.recv(_CHUNK, socket.MSG_DONTWAIT):
                self._received += data
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def messages(self) -> Iterator[tuple[Kind, bytes]]:
        """The frames that have come in full."""
        while len(self._received) >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._received)
            end = _HEAD.size + length
            if len(self._received) < end:
                return
            payload = bytes(self._received[_HEAD.size : end])
            del self._received[:end]
            yield Kind(kind), payload

    def wait(self, deadline: float) -> tuple[Kind, bytes] | None:
        """The next frame; None when the other side is gone. Raises TimeoutError."""
        while True:
            alive = self.pump()
            for message in self.messages():
                return message
            if not alive:
                return None
            if not select.select([self._connection], [], [], max(0.0, deadline - monotonic()))[0]:
                raise TimeoutError

    def close(self) -> None:
        self._connection.close()


def pack(parts: Sequence[bytes]) -> bytes:
    """One byte string of several."""
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def unpack(packed: bytes) -> list[bytes]:
    """What ``pack`` was given."""
    parts, at = [], 0
    while at < len(packed):
        (length,) = _LENGTH.unpack_from(packed, at)
        at += _LENGTH.size
        parts.append(packed[at : at + length])
        at += length
    return parts


def meet(launch: Launch, path: str, seconds: float) -> list[Link]:
    """Links to all other ranks at rank 0, else to rank 0. Raises DeviceError when they do not all come in time."""
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise ValueRejected(f"{path}: a socket's path has at most {_LONGEST_PATH} bytes; set {RENDEZVOUS} to another")
    deadline = monotonic() + seconds
    if launch.rank:
        return [_visit(launch, path, deadline, seconds)]
    listener = _listen(path, launch.size)
    try:
        return _host(listener, launch, path, deadline, seconds)
    finally:
        listener.close()
        with suppress(FileNotFoundError):
            os.unlink(path)


# -- rank 0 -------------------------------------------------------------------------------------------------------


def _listen(path: str, backlog: int) -> socket.socket:
    """A listening socket of mode 0600 at ``path``; one that a dead process has left there is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            listener.bind(path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            _remove_stale(path)
            listener.bind(path)
        os.chmod(path, 0o600)  # before it listens: nobody has connected yet
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise ValueRejected(f"{path}: the ranks cannot meet here: {error.strerror}; set {RENDEZVOUS}") from None
    except BaseException:
        listener.close()
        raise
    return listener


def _remove_stale(path: str) -> None:
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise ValueRejected(f"{path}: is there, and no socket; set {RENDEZVOUS} to a path of its own")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise DeviceError(
        f"{path}: the ranks of another run are meeting here; wait for it, or set {RENDEZVOUS} to a path of its own for "
        "each run"
    )


def _host(listener: socket.socket, launch: Launch, path: str, deadline: float, seconds: float) -> list[Link]:
    """Accept the other ranks, and welcome them when all have come. On an error those that have come are told."""
    links: dict[int, Link] = {}
    try:
        while len(links) < launch.size - 1:
            watched: list[socket.socket | Link] = [listener, *links.values()]
            ready = select.select(watched, [], [], max(0.0, deadline - monotonic()))[0]
            if not ready:
                missing = ", ".join(str(r) for r in range(1, launch.size) if r not in links)
                raise DeviceError(
                    f"not all {launch.size} ranks have come to {path} within {seconds:g} s, missing: {missing}; start "
                    f"all of them at once, and set {RENDEZVOUS} if they do not find each other"
                )
            for gone in [link for link in links.values() if link in ready and not link.pump()]:
                raise DeviceError(f"{gone} has died before all ranks were there")
            if listener in ready:
                _admit(listener, launch, path, links, deadline)
        for link in links.values():
            link.send(Kind.WELCOME)
    except BaseException as error:
        for link in (*links.values(), *_knocking(listener)):
            with suppress(OSError):
                link.send(Kind.REFUSED, str(error).encode())
            link.close()
        if isinstance(error, OSError):
            raise DeviceError(f"a rank has died before all ranks were there: {error.strerror}") from None
        raise
    return [links[rank] for rank in sorted(links)]


def _knocking(listener: socket.socket) -> list[Link]:
    """Those that have connected and were not let in yet."""
    listener.setblocking(False)
    found = []
    with suppress(BlockingIOError):
        while True:
            found.append(Link(listener.accept()[0], -1))
    return found


def _admit(listener: socket.socket, launch: Launch, path: str, links: dict[int, Link], deadline: float) -> None:
    """Accept one connection and add it to ``links``. One that says nothing, or is another user's, is dropped."""
    connection, _ = listener.accept()
    link = Link(connection, -1)
    try:
        hello = link.wait(min(deadline, monotonic() + _HELLO_SECONDS)) if link.uid == os.geteuid() else None
    except TimeoutError:
        hello = None
    if hello is None or hello[0] is not Kind.HELLO:
        link.close()
        return
    words = json.loads(hello[1])
    link.rank = words["rank"]
    wrong = None
    if words["version"] != renaissance.__version__:
        wrong = f"{link} has version {words['version']}, rank 0 has {renaissance.__version__}"
    elif words["size"] != launch.size or not 0 < link.rank < launch.size:
        wrong = f"{link} says that it is one of {words['size']} ranks, rank 0 is one of {launch.size}"
    elif link.rank in links:
        wrong = f"{links[link.rank]} and process {link.pid} both say that they are rank {link.rank}"
    if wrong is not None:
        text = f"{wrong}; start all ranks at once with one launcher"
        with suppress(OSError):
            link.send(Kind.REFUSED, text.encode())
        link.close()
        raise DeviceError(text)
    links[link.rank] = link


# -- the others ---------------------------------------------------------------------------------------------------


def _visit(launch: Launch, path: str, deadline: float, seconds: float) -> Link:
    """Connect to rank 0, say who comes, and wait until all are there."""
    link = Link(_connect(path, deadline, seconds), 0)
    try:
        if link.uid != os.geteuid():
            raise DeviceError(f"{path}: belongs to user {link.uid}, not to {os.geteuid()}; set {RENDEZVOUS}")
        words = {"rank": launch.rank, "size": launch.size, "version": renaissance.__version__}
        with suppress(OSError):  # it may have given up already, and said why
            link.send(Kind.HELLO, json.dumps(words).encode())
        answer = link.wait(deadline + _HELLO_SECONDS)  # rank 0 knows who is missing, so it shall say so
        if answer is None:
            raise DeviceError(f"{link} has died before all ranks were there")
        if answer[0] is not Kind.WELCOME:
            raise DeviceError(f"rank 0: {answer[1].decode(errors='replace')}")
    except TimeoutError:
        link.close()
        raise DeviceError(f"{link}, at {path}, waits for others that have not come within {seconds:g} s") from None
    except BaseException:
        link.close()
        raise
    return link


def _connect(path: str, deadline: float, seconds: float) -> socket.socket:
    """Try until rank 0 listens."""
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(path)
            return connection
        except OSError as error:
            connection.close()
            if error.errno not in (errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN):
                raise ValueRejected(f"{path}: the ranks cannot meet here: {error.strerror}; set {RENDEZVOUS}") from None
        if monotonic() >= deadline:
            raise DeviceError(
                f"rank 0 has not come to {path} within {seconds:g} s; start all ranks at once, and set {RENDEZVOUS} if "
                "they do not find each other"
            )
        sleep(_RETRY_SECONDS)
