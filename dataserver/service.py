"""The gRPC control plane: checks requests, prepares sessions in its own threads, hands them to the hub.

Every size that comes from the network is bounded before anything is allocated.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from typing import NoReturn

import grpc

from dataserver.hub import Hub
from dataserver.session import Session
from dataserver.spec import LoadedSet, SessionSpec
from dataserver.store import DatasetStore
from renaissance import __version__
from renaissance.core.dtype import DType
from renaissance.core.errors import DataServerError, DTypeError, RenaissanceError, ValueRejected
from renaissance.data.compile import compile_recipe
from renaissance.data.order import batches_per_epoch
from renaissance.data.protocol import (
    MAX_BATCH_SIZE,
    MAX_DEPTH,
    MAX_EPOCH,
    MIN_DEPTH,
    PROTOCOL_VERSION,
    RingLayout,
    check_range,
    version_mismatch,
)
from renaissance.data.recipe import Recipe
from renaissance.data.wire import dataserver_pb2 as pb
from renaissance.data.wire import dataserver_pb2_grpc

MAX_RECIPE_CHARS = 1 << 16
MAX_WORLD_SIZE = 1 << 20
MAX_SESSIONS = 256
MAX_ERROR_CHARS = 1000


class DataServerService(dataserver_pb2_grpc.DataServerServicer):  # type: ignore[misc]
    """Implements proto/dataserver.proto."""

    def __init__(self, hub: Hub, store: DatasetStore, data_socket: str, memory_limit: int) -> None:
        self._hub = hub
        self._store = store
        self._data_socket = data_socket
        self._memory_limit = memory_limit
        self._numbers = itertools.count(1)
        self._started = time.monotonic()
        self._opening = threading.Lock()  # two opens must not both fit into the same rest of memory

    def ServerInfo(self, request: pb.ServerInfoRequest, context: grpc.ServicerContext) -> pb.ServerInfoReply:  # noqa: N802
        return pb.ServerInfoReply(
            protocol_version=PROTOCOL_VERSION,
            version=__version__,
            pid=os.getpid(),
            workers=len(self._hub.workers),
            datasets=self._store.names,
            memory_limit_bytes=self._memory_limit,
        )

    def OpenSession(self, request: pb.OpenSessionRequest, context: grpc.ServicerContext) -> pb.OpenSessionReply:  # noqa: N802
        if request.protocol_version != PROTOCOL_VERSION:
            message = version_mismatch(PROTOCOL_VERSION, request.protocol_version)
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)
        try:
            with self._opening:
                return self._open(request, context)
        except (ValueRejected, DTypeError) as error:
            _abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except RenaissanceError as error:
            _abort(context, grpc.StatusCode.INTERNAL, str(error))
        except (OSError, MemoryError) as error:
            reason = getattr(error, "strerror", None) or "out of memory"
            _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, f"the dataserver cannot open a session: {reason}")

    def _open(self, request: pb.OpenSessionRequest, context: grpc.ServicerContext) -> pb.OpenSessionReply:
        check_range("batch size", request.batch_size, 1, MAX_BATCH_SIZE)
        check_range("depth", request.depth, MIN_DEPTH, MAX_DEPTH)
        check_range("world size", request.world_size, 1, MAX_WORLD_SIZE)
        check_range("rank", request.rank, 0, request.world_size - 1)
        check_range("start epoch", request.start_epoch, 0, MAX_EPOCH)
        if len(request.recipe_json) > MAX_RECIPE_CHARS:
            raise ValueRejected(f"recipe has {len(request.recipe_json)} characters; at most {MAX_RECIPE_CHARS}")
        recipe = Recipe.from_json(request.recipe_json)
        try:
            dataset = self._store.check(request.dataset, request.split)
        except KeyError as error:
            served = ", ".join(self._store.names)
            message = f"data set {error.args[0]!r} is not served here; this dataserver has: {served}"
            _abort(context, grpc.StatusCode.NOT_FOUND, message)
        shape, data_fd = self._store.load(dataset, request.split, self._memory_limit)
        spec = _session_spec(request, dataset, shape, recipe)
        check_range("start batch", request.start_batch, 0, spec.batches_per_epoch - 1)
        self._check_memory(spec.layout, context)
        number = next(self._numbers)
        session = Session(number, spec, len(self._hub.workers), request.start_epoch, request.start_batch)
        try:
            self._hub.call(lambda: self._hub.add_session(session, data_fd))
        except BaseException:
            session.close()
            raise
        layout = spec.layout
        return pb.OpenSessionReply(
            protocol_version=PROTOCOL_VERSION,
            session=number,
            token=session.token,
            data_socket=self._data_socket,
            num_samples=shape.samples,
            num_classes=shape.num_classes,
            batches_per_epoch=spec.batches_per_epoch,
            height=layout.height,
            width=layout.width,
            channels=layout.channels,
            padded_channels=layout.padded_channels,
        )

    def _check_memory(self, layout: RingLayout, context: grpc.ServicerContext) -> None:
        open_sessions = self._hub.call(lambda: [s.spec.layout.total_bytes for s in self._hub.sessions])
        if len(open_sessions) >= MAX_SESSIONS:
            _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_SESSIONS} sessions are open; close one first")
        used = sum(open_sessions) + self._store.loaded_bytes
        if used + layout.total_bytes > self._memory_limit:
            message = (
                f"a ring of {layout.depth} slots of {layout.batch_size} samples takes {layout.total_bytes} bytes; the "
                f"dataserver may use {self._memory_limit} and has {used} in use. Ask for a smaller batch size or "
                "depth, or start it with a larger --memory-limit"
            )
            _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, message)

    def CloseSession(self, request: pb.CloseSessionRequest, context: grpc.ServicerContext) -> pb.CloseSessionReply:  # noqa: N802
        if not self._hub.call(lambda: self._hub.close_session(request.session)):
            _abort(context, grpc.StatusCode.NOT_FOUND, f"no session {request.session}")
        return pb.CloseSessionReply()

    def Stats(self, request: pb.StatsRequest, context: grpc.ServicerContext) -> pb.StatsReply:  # noqa: N802
        try:
            return self._hub.call(self._stats)
        except DataServerError as error:
            _abort(context, grpc.StatusCode.UNAVAILABLE, str(error))

    def _stats(self) -> pb.StatsReply:
        now = time.monotonic()
        return pb.StatsReply(
            uptime_seconds=now - self._started,
            sessions=[_session_stats(session, now) for session in self._hub.sessions],
            workers=[pb.WorkerStats(worker=w.number, pid=w.pid, restarts=w.restarts) for w in self._hub.workers],
            dataset_bytes=self._store.loaded_bytes,
            sessions_opened=self._hub.sessions_opened,
        )


def _session_spec(request: pb.OpenSessionRequest, dataset: str, shape: LoadedSet, recipe: Recipe) -> SessionSpec:
    """Raises ValueRejected, ShapeError or DTypeError when the parts do not fit."""
    dtype = DType.parse(request.dtype)
    layout = RingLayout(
        depth=request.depth,
        batch_size=request.batch_size,
        height=recipe.resolution,
        width=recipe.resolution,
        channels=recipe.color_channels,
        padded_channels=request.padded_channels or recipe.color_channels,
        dtype=dtype,
    )
    if request.split == "val":
        recipe.require_deterministic()
    compile_recipe(recipe, shape.height, shape.width, shape.channels, dtype, layout.padded_channels)
    batches = batches_per_epoch(shape.samples, request.batch_size, request.world_size, request.drop_last)
    if batches == 0:
        raise ValueRejected(
            f"an epoch has no batch: {dataset} {request.split} has {shape.samples} samples, fewer than batch size "
            f"{request.batch_size} x world size {request.world_size}, and drop_last drops the rest"
        )
    return SessionSpec(
        dataset_name=dataset,
        split=request.split,
        dataset=shape,
        recipe_json=recipe.to_json(),  # not the text that came: it may be many times as long
        seed=request.seed,
        shuffle=request.shuffle,
        rank=request.rank,
        world_size=request.world_size,
        batches_per_epoch=batches,
        layout=layout,
    )


def _session_stats(session: Session, now: float) -> pb.SessionStats:
    spec, layout = session.spec, session.spec.layout
    return pb.SessionStats(
        session=session.number,
        dataset=spec.dataset_name,
        split=spec.split,
        dtype=layout.dtype.name.lower(),
        batch_size=layout.batch_size,
        depth=layout.depth,
        rank=spec.rank,
        world_size=spec.world_size,
        seed=spec.seed,
        consumer_pid=session.consumer_pid,
        epoch=session.epoch,
        batch=session.index,
        batches=session.batches,
        samples=session.samples,
        seconds=now - session.opened,
        ring_bytes=layout.total_bytes,
        epoch_digests=[pb.EpochDigest(epoch=e, digest=d) for e, d in session.epoch_digests],
        recipe=Recipe.from_json(spec.recipe_json).fingerprint(),
    )


def _abort(context: grpc.ServicerContext, code: grpc.StatusCode, message: str) -> NoReturn:
    if len(message) > MAX_ERROR_CHARS:  # gRPC drops details that are too long for a header
        message = f"{message[:MAX_ERROR_CHARS]} ... ({len(message)} characters)"
    context.abort(code, message.encode(errors="replace").decode())
    raise AssertionError("context.abort raises")
