"""Starts the gRPC servers of the control plane, with the standard health service.

Always on a Unix socket of mode 0600, which only its user can open. On TCP when asked for, and then with TLS, a token,
or both: without either it is refused. TLS alone tells clients who the daemon is and keeps others from listening; only
the token tells the daemon who the client is. Data never travel over TCP.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from dataserver.service import MAX_OPENING, DataServerService
from dataserver.tcp import TcpAccess
from renaissance.core.errors import DataServerError
from renaissance.core.log import get_logger
from renaissance.data.address import grpc_target
from renaissance.data.wire import dataserver_pb2, dataserver_pb2_grpc

SERVICE = dataserver_pb2.DESCRIPTOR.services_by_name["DataServer"].full_name
MAX_MESSAGE_BYTES = 1 << 20
THREADS = MAX_OPENING + 4
"""Threads are made as they are needed; these few more than can wait for data sets answer health and statistics."""

MAX_TCP_CONNECTIONS = 64
HANDSHAKE_MILLISECONDS = 5000
IDLE_MILLISECONDS = 300_000
_log = get_logger("dataserver")


class _RequireToken(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Every call must say ``authorization: Bearer TOKEN``; the comparison takes the same time whatever it says."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

        def refuse(request: Any, context: grpc.ServicerContext) -> None:
            text = "wrong or missing token; this dataserver wants the one of its --token-file"
            context.abort(grpc.StatusCode.UNAUTHENTICATED, text)

        self._refuse = grpc.unary_unary_rpc_method_handler(refuse)

    def intercept_service(self, continuation: Callable[[Any], Any], details: grpc.HandlerCallDetails) -> Any:
        given = [value for name, value in details.invocation_metadata or () if name == "authorization"]
        said = given[0] if len(given) == 1 else ""
        said_bytes = said.encode() if isinstance(said, str) else bytes(said)
        if not hmac.compare_digest(said_bytes, self._expected):
            return self._refuse
        return continuation(details)


class ControlServers:
    """The running servers; ``stop`` ends both."""

    def __init__(self) -> None:
        self._servers: list[tuple[grpc.Server, ThreadPoolExecutor]] = []

    def add(self, server: grpc.Server, handlers: ThreadPoolExecutor) -> None:
        server.start()
        self._servers.append((server, handlers))

    def stop(self, grace: float) -> None:
        """Refuse new calls, give running ones ``grace`` seconds, and wait for their end, but not for their threads."""
        for event in [server.stop(grace) for server, _ in self._servers]:
            event.wait()
        for _, handlers in self._servers:
            handlers.shutdown(wait=False)


def start_control(service: DataServerService, path: str, tcp: TcpAccess | None) -> ControlServers:
    """Serve ``path`` and what ``tcp`` says. Raises DataServerError when an address cannot be bound."""
    servers = ControlServers()
    server, handlers = _server(service, (), ())
    old_mask = os.umask(0o177)
    try:
        _bind(f"unix:{path}", lambda: server.add_insecure_port(grpc_target(f"unix:{path}")))
    finally:
        os.umask(old_mask)
    servers.add(server, handlers)
    if tcp is not None:
        try:
            servers.add(*_tcp_server(service, tcp))
        except BaseException:
            servers.stop(0)
            raise
    return servers


def _tcp_server(service: DataServerService, tcp: TcpAccess) -> tuple[grpc.Server, ThreadPoolExecutor]:
    options = (
        ("grpc.max_allowed_incoming_connections", MAX_TCP_CONNECTIONS),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MILLISECONDS),
        ("grpc.max_connection_idle_ms", IDLE_MILLISECONDS),
        ("grpc.max_concurrent_streams", 16),
        ("grpc.so_reuseport", 0),  # a second daemon at the same port is an error, not half of the calls
    )
    interceptors = () if tcp.token is None else (_RequireToken(tcp.token),)
    server, handlers = _server(service, interceptors, options)
    target = grpc_target(tcp.address)
    if tcp.certificate is None or tcp.key is None:
        _log.warning("%s: the token and all control travel in the clear; add --tls-cert and --tls-key", tcp.address)
        _bind(tcp.address, lambda: server.add_insecure_port(target))
    else:
        credentials = grpc.ssl_server_credentials([(tcp.key, tcp.certificate)])
        _bind(tcp.address, lambda: server.add_secure_port(target, credentials))
    return server, handlers


def _server(
    service: DataServerService, interceptors: Any, options: tuple[tuple[str, int], ...]
) -> tuple[grpc.Server, ThreadPoolExecutor]:
    handlers = ThreadPoolExecutor(THREADS, thread_name_prefix="dataserver-grpc")
    server = grpc.server(
        handlers,
        interceptors=interceptors,
        options=[("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), *options],
        maximum_concurrent_rpcs=4 * THREADS,
    )
    dataserver_pb2_grpc.add_DataServerServicer_to_server(service, server)
    status = health.HealthServicer()
    for name in ("", SERVICE):
        status.set(name, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    return server, handlers


def _bind(address: str, add: Callable[[], int]) -> None:
    try:
        bound = add()
    except RuntimeError as error:
        raise DataServerError(f"{address}: cannot listen: {error}") from None
    if not bound:
        raise DataServerError(f"{address}: cannot listen")
