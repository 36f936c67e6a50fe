"""Calls to the dataserver's control plane, with its refusals turned into this project's errors.

gRPC is imported on first use: a process that never talks to a dataserver does not pay for it.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from renaissance.core.errors import DataServerError, ProtocolError, RenaissanceError, ValueRejected
from renaissance.data.address import grpc_target, is_tcp, read_token, tcp_endpoint, unix_path
from renaissance.data.protocol import PROTOCOL_VERSION, version_mismatch

if TYPE_CHECKING:
    from renaissance.data.wire import dataserver_pb2 as pb

DEFAULT_TIMEOUT = 30.0
PROBE_SECONDS = 5.0
"""For the questions that only make an error message better, and for connecting over TCP."""

TOKEN_FILE_VARIABLE = "RENAISSANCE_TOKEN_FILE"
TLS_CA_VARIABLE = "RENAISSANCE_TLS_CA"
TLS_NAME_VARIABLE = "RENAISSANCE_TLS_NAME"


@dataclass(frozen=True, slots=True)
class Access:
    """How a dataserver at ``tcp:HOST:PORT`` is reached: by token, by TLS, or both. A Unix socket needs neither."""

    token: str | None = None
    tls_ca: bytes | None = None  # certificate of the authority that signed the daemon's, PEM
    tls_name: str | None = None  # the name in the daemon's certificate, where it is not the host's

    @classmethod
    def of(
        cls,
        address: str,
        token_file: str | os.PathLike[str] | None = None,
        tls_ca: str | os.PathLike[str] | None = None,
        tls_name: str | None = None,
    ) -> Access:
        """From files given, or named by RENAISSANCE_TOKEN_FILE, RENAISSANCE_TLS_CA and RENAISSANCE_TLS_NAME.

        Raises ValueRejected when a file cannot be used, when TCP has neither, and when a Unix socket is given one.
        """
        if not is_tcp(address):
            for name, value in (("token_file", token_file), ("tls_ca", tls_ca), ("tls_name", tls_name)):
                if value is not None:
                    raise ValueRejected(f"{name} is given, but {address} is a Unix socket, which needs none; drop it")
            return cls()
        tcp_endpoint(address)
        token_file = token_file or os.environ.get(TOKEN_FILE_VARIABLE)
        tls_ca = tls_ca or os.environ.get(TLS_CA_VARIABLE)
        if token_file is None and tls_ca is None:
            raise ValueRejected(
                f"{address}: a dataserver over TCP wants a token or TLS; give token_file or tls_ca, or set "
                f"{TOKEN_FILE_VARIABLE} or {TLS_CA_VARIABLE}"
            )
        return cls(
            token=None if token_file is None else read_token(token_file),
            tls_ca=None if tls_ca is None else _read_certificate(tls_ca),
            tls_name=tls_name or os.environ.get(TLS_NAME_VARIABLE),
        )


def _read_certificate(path: str | os.PathLike[str]) -> bytes:
    try:
        with open(path, "rb") as file:
            content = file.read(1 << 20)
    except OSError as error:
        raise ValueRejected(f"{os.fspath(path)}: certificate cannot be read: {error.strerror}") from None
    if b"-----BEGIN CERTIFICATE-----" not in content:
        raise ValueRejected(f"{os.fspath(path)}: expected a certificate in PEM form")
    return content


@contextmanager
def control_stub(address: str, access: Access | None = None) -> Iterator[Any]:
    """A gRPC stub of the service at ``unix:PATH`` or ``tcp:HOST:PORT``.

    ``access`` None: from the environment. Raises DataServerError at once when nobody listens there.
    """
    if not is_tcp(address):
        unix_path(address)
    access = Access.of(address) if access is None else access
    check_listening(address)
    import grpc

    from renaissance.data.wire import dataserver_pb2_grpc

    options: list[tuple[str, Any]] = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    if access.tls_ca is None:
        channel = grpc.insecure_channel(grpc_target(address), options=options)
    else:
        if access.tls_name is not None:
            options.append(("grpc.ssl_target_name_override", access.tls_name))
        credentials = grpc.ssl_channel_credentials(root_certificates=access.tls_ca)
        channel = grpc.secure_channel(grpc_target(address), credentials, options=options)
    with channel:
        yield dataserver_pb2_grpc.DataServerStub(channel)


def check_listening(address: str) -> None:
    """Raise DataServerError with what to do when no process accepts connections at the address."""
    try:
        if is_tcp(address):
            socket.create_connection(tcp_endpoint(address), timeout=PROBE_SECONDS).close()
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.connect(unix_path(address))
    except OSError as error:
        if isinstance(error, RenaissanceError):
            raise
        why = {errno.ENOENT: "no such socket", errno.ECONNREFUSED: "nobody listens there any more"}
        reason = why.get(error.errno or 0, error.strerror or str(error))
        raise DataServerError(
            f"no dataserver at {address}: {reason}; start one with `dataserver serve --data NAME=FOLDER "
            f"--listen {address}`"
        ) from None


def call(address: str, method: Callable[..., Any], request: Any, timeout: float, access: Access | None = None) -> Any:
    """One call. Raises ProtocolError for another protocol version, else DataServerError with the server's words."""
    import grpc

    access = Access.of(address) if access is None else access
    metadata = [("authorization", f"Bearer {access.token}")] if access.token else []
    try:
        return method(request, timeout=timeout, metadata=metadata)
    except grpc.RpcError as error:
        code, details = error.code(), error.details()
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            raise ProtocolError(f"{address}: {details}") from None
        if code is grpc.StatusCode.UNIMPLEMENTED:
            raise ProtocolError(f"{address}: the process there is not a dataserver of this version") from None
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise TimeLimit(f"{address}: the dataserver did not answer within {timeout:g} s") from None
        if code is grpc.StatusCode.UNAVAILABLE:
            raise DataServerError(f"{address}: {_why_unavailable(address, access, str(details))}") from None
        raise DataServerError(f"{address}: {details}") from None


def _why_unavailable(address: str, access: Access, details: str) -> str:
    if not is_tcp(address) or "failed to connect" not in details:
        return f"the dataserver is gone or stopping ({details})"
    if access.tls_ca is None:
        return f"what listens there hung up; give tls_ca if it is a dataserver with TLS ({details})"
    return (
        "what listens there is not the owner of a certificate that tls_ca signed for this host's name (or "
        f"{TLS_NAME_VARIABLE}); is it the right authority, and does the dataserver have TLS? ({details})"
    )


class TimeLimit(DataServerError):
    """The dataserver lives, as far as we know, but did not answer in time."""


def open_session(
    address: str, request: pb.OpenSessionRequest, timeout: float, access: Access | None = None
) -> pb.OpenSessionReply:
    """Open a session and check that the other side speaks our protocol."""
    access = Access.of(address) if access is None else access
    with control_stub(address, access) as stub:
        try:
            reply = call(address, stub.OpenSession, request, timeout, access)
        except TimeLimit as error:
            busy = _what_takes_long(address, access)
            if busy:
                raise TimeLimit(
                    f"{address}: the dataserver did not open the session within {timeout:g} s: {busy}; open it again "
                    "later, or with a longer timeout"
                ) from None
            raise error from None
    if reply.protocol_version != PROTOCOL_VERSION:
        raise ProtocolError(f"{address}: {version_mismatch(reply.protocol_version, PROTOCOL_VERSION)}")
    return reply


def _what_takes_long(address: str, access: Access) -> str:
    """For a message: ``still loading imagenet train, 43 %``; "" when nothing does or nobody says."""
    try:
        stats = server_stats(address, PROBE_SECONDS, access)
    except DataServerError:
        return ""
    parts = []
    for load in stats["loading"]:
        done = f", {100 * load['done_bytes'] // load['total_bytes']} %" if load["total_bytes"] else ""
        parts.append(f"{load['dataset']} {load['split']}{done}")
    if parts:
        return f"still loading {', '.join(parts)}"
    return "still compiling the recipe's kernels, which are kept for the next time" if stats["opening"] else ""


def close_session(address: str, session: int, timeout: float = DEFAULT_TIMEOUT, access: Access | None = None) -> None:
    """End a session from outside; its consumers get a DataServerError."""
    from renaissance.data.wire import dataserver_pb2 as pb

    access = Access.of(address) if access is None else access
    with control_stub(address, access) as stub:
        call(address, stub.CloseSession, pb.CloseSessionRequest(session=session), timeout, access)


def corrupt_samples(
    address: str, session: int, timeout: float = DEFAULT_TIMEOUT, access: Access | None = None
) -> pb.CorruptSamplesReply:
    """What a session could not read or decode; also for a while after its end."""
    from renaissance.data.wire import dataserver_pb2 as pb

    access = Access.of(address) if access is None else access
    with control_stub(address, access) as stub:
        reply: pb.CorruptSamplesReply = call(
            address, stub.CorruptSamples, pb.CorruptSamplesRequest(session=session), timeout, access
        )
    return reply


def server_stats(address: str, timeout: float = DEFAULT_TIMEOUT, access: Access | None = None) -> dict[str, Any]:
    """What ``dataserver stats --json`` prints: server, workers (with pids) and sessions as plain data."""
    from renaissance.data.wire import dataserver_pb2 as pb

    access = Access.of(address) if access is None else access
    with control_stub(address, access) as stub:
        info = call(address, stub.ServerInfo, pb.ServerInfoRequest(), timeout, access)
        stats = call(address, stub.Stats, pb.StatsRequest(), timeout, access)
    return {**plain(info), **plain(stats)}


def plain(message: Any) -> dict[str, Any]:
    """Every field, also those at their default; 64-bit numbers as int (protobuf's JSON form makes strings of them)."""
    values: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None:
            values[field.name] = [plain(item) for item in value]
        elif isinstance(value, int | float | str):
            values[field.name] = value
        else:
            values[field.name] = list(value)
    return values
