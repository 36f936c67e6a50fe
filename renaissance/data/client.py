"""Calls to the dataserver's control plane, with its refusals turned into this project's errors.

gRPC is imported on first use: a process that never talks to a dataserver does not pay for it.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from renaissance.core.errors import DataServerError, ProtocolError
from renaissance.data.protocol import PROTOCOL_VERSION, grpc_target, unix_path, version_mismatch

if TYPE_CHECKING:
    from renaissance.data.wire import dataserver_pb2 as pb

DEFAULT_TIMEOUT = 30.0


@contextmanager
def control_stub(address: str) -> Iterator[Any]:
    """A gRPC stub of the service at ``unix:PATH``. Raises DataServerError at once when nobody listens there."""
    path = unix_path(address)
    check_listening(address, path)
    import grpc

    from renaissance.data.wire import dataserver_pb2_grpc

    with grpc.insecure_channel(grpc_target(path), options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield dataserver_pb2_grpc.DataServerStub(channel)


def check_listening(address: str, path: str) -> None:
    """Raise DataServerError with what to do when no process accepts connections on the socket ``path``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError as error:
            why = {errno.ENOENT: "no such socket", errno.ECONNREFUSED: "nobody listens there any more"}
            reason = why.get(error.errno or 0, error.strerror)
            raise DataServerError(
                f"no dataserver at {address}: {reason}; start one with `dataserver serve --data NAME=FOLDER "
                f"--listen {address}`"
            ) from None


def call(address: str, method: Callable[..., Any], request: Any, timeout: float) -> Any:
    """One call. Raises ProtocolError for another protocol version, else DataServerError with the server's words."""
    import grpc

    try:
        return method(request, timeout=timeout)
    except grpc.RpcError as error:
        code, details = error.code(), error.details()
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            raise ProtocolError(f"{address}: {details}") from None
        if code is grpc.StatusCode.UNIMPLEMENTED:
            raise ProtocolError(f"{address}: the process there is not a dataserver of this version") from None
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise DataServerError(f"{address}: the dataserver did not answer within {timeout:g} s") from None
        if code is grpc.StatusCode.UNAVAILABLE:
            raise DataServerError(f"{address}: the dataserver is gone or stopping ({details})") from None
        raise DataServerError(f"{address}: {details}") from None


def open_session(address: str, request: pb.OpenSessionRequest, timeout: float) -> pb.OpenSessionReply:
    """Open a session and check that the other side speaks our protocol."""
    with control_stub(address) as stub:
        reply = call(address, stub.OpenSession, request, timeout)
    if reply.protocol_version != PROTOCOL_VERSION:
        raise ProtocolError(f"{address}: {version_mismatch(reply.protocol_version, PROTOCOL_VERSION)}")
    return reply


def close_session(address: str, session: int, timeout: float = DEFAULT_TIMEOUT) -> None:
    """End a session from outside; its consumer gets a DataServerError."""
    from renaissance.data.wire import dataserver_pb2 as pb

    with control_stub(address) as stub:
        call(address, stub.CloseSession, pb.CloseSessionRequest(session=session), timeout)


def server_stats(address: str, timeout: float = DEFAULT_TIMEOUT) -> dict[str, Any]:
    """What ``dataserver stats --json`` prints: server, workers (with pids) and sessions as plain data."""
    from renaissance.data.wire import dataserver_pb2 as pb

    with control_stub(address) as stub:
        info = call(address, stub.ServerInfo, pb.ServerInfoRequest(), timeout)
        stats = call(address, stub.Stats, pb.StatsRequest(), timeout)
    return {**_plain(info), **_plain(stats)}


def _plain(message: Any) -> dict[str, Any]:
    """Every field, also those at their default; 64-bit numbers as int (protobuf's JSON form makes strings of them)."""
    plain: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None:
            plain[field.name] = [_plain(item) for item in value]
        elif isinstance(value, int | float | str):
            plain[field.name] = value
        else:
            plain[field.name] = list(value)
    return plain
