"""The data socket's first words: who we are, the session's token, and back come the descriptors of the ring."""

from __future__ import annotations

import json
import os
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING

from renaissance.core.errors import DataServerError, ProtocolError
from renaissance.data.address import is_tcp, machine_identity, unix_path
from renaissance.data.protocol import MESSAGE_BYTES, PROTOCOL_VERSION

if TYPE_CHECKING:
    from renaissance.data.wire import dataserver_pb2 as pb

MAX_FDS = 253
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def data_socket(address: str, reply: pb.OpenSessionReply) -> str:
    """The path of the data socket as it is seen from here. Raises DataServerError when that is another machine."""
    path: str = reply.data_socket
    if not is_tcp(address):
        # Beside the control socket: the folder may be mounted elsewhere, as in a container, or its name relative.
        return os.path.join(os.path.dirname(unix_path(address)), os.path.basename(path))
    if reply.machine != machine_identity():
        raise DataServerError(
            f"{address}: this dataserver runs on another machine. Batches are handed over in shared memory, so a "
            "consumer needs a dataserver on its own machine; over TCP another one can only be watched"
        )
    return path


def connect_data(address: str, path: str, token: str, timeout: float) -> tuple[socket.socket, list[int]]:
    """Connect to the data socket and receive the descriptors: ring, ready eventfd, wake eventfds."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fds: list[int] = []
    try:
        connection.settimeout(timeout)
        connection.connect(path)
        _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if uid not in (os.geteuid(), 0):
            raise ProtocolError(f"{address}: the data socket belongs to user {uid}, not to {os.geteuid()}; refused")
        with suppress(BrokenPipeError):  # it may have turned us away already; what it said can still be read
            connection.send(json.dumps({"version": PROTOCOL_VERSION, "token": token}).encode())
        try:
            message, fds, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, MAX_FDS)
        except ConnectionResetError:  # reported once, before its last words
            message, fds, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, MAX_FDS)
        for fd in fds:
            os.set_inheritable(fd, False)  # received descriptors stay open in programs that are started, else
        if not message:
            raise DataServerError(f"{address}: the dataserver died while the session was opened")
        answer = json.loads(message)
        if "error" in answer:
            raise DataServerError(f"{address}: {answer['error']}")
        if len(fds) < 3:
            raise ProtocolError(f"{address}: expected at least 3 descriptors from the data socket, got {len(fds)}")
        connection.settimeout(None)
        return connection, fds
    except BaseException as error:
        connection.close()
        for fd in fds:
            os.close(fd)
        if isinstance(error, TimeoutError):
            raise DataServerError(f"{address}: no answer from the data socket within {timeout:g} s") from None
        if isinstance(error, OSError) and not isinstance(error, DataServerError):
            raise DataServerError(f"{address}: cannot use the data socket {path}: {error.strerror}") from None
        raise
