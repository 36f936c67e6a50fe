"""Starts the gRPC server of the control plane, with the standard health service, on a Unix socket of mode 0600."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from dataserver.hub import Hub
from dataserver.service import DataServerService
from dataserver.store import DatasetStore
from renaissance.core.errors import DataServerError
from renaissance.data.protocol import DATA_SUFFIX, grpc_target
from renaissance.data.wire import dataserver_pb2, dataserver_pb2_grpc

SERVICE = dataserver_pb2.DESCRIPTOR.services_by_name["DataServer"].full_name
MAX_MESSAGE_BYTES = 1 << 20


def start_control(hub: Hub, store: DatasetStore, path: str, memory_limit: int, threads: int) -> grpc.Server:
    """Serve ``path``; the caller stops the returned server. Raises DataServerError when the socket cannot be bound."""
    executor = ThreadPoolExecutor(threads, thread_name_prefix="dataserver-grpc")
    server = grpc.server(executor, options=[("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)])
    service = DataServerService(hub, store, path + DATA_SUFFIX, memory_limit)
    dataserver_pb2_grpc.add_DataServerServicer_to_server(service, server)
    status = health.HealthServicer()
    for name in ("", SERVICE):
        status.set(name, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    old_mask = os.umask(0o177)
    try:
        bound = server.add_insecure_port(grpc_target(path))
    except RuntimeError as error:
        raise DataServerError(f"unix:{path}: cannot listen: {error}") from None
    finally:
        os.umask(old_mask)
    if not bound:
        raise DataServerError(f"unix:{path}: cannot listen")
    server.start()
    return server
