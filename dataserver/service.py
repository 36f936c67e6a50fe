"""The gRPC control plane: checks requests, prepares sessions in its own threads, hands them to the hub.

Every size that comes from the network is bounded before anything is allocated. No call waits for the load of a data set
but those that need it.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, TypeVar

import grpc

from dataserver.digests import DigestFolder, stored_format, stored_level
from dataserver.hub import Hub
from dataserver.requests import check_recipe, check_request, decode_mode, decoder_of, require_same, session_spec
from dataserver.session import Member, Session
from dataserver.stats import build_stats
from dataserver.store import DatasetStore
from renaissance import __version__
from renaissance.core.errors import DataServerError, DTypeError, RenaissanceError, ValueRejected
from renaissance.core.log import get_logger
from renaissance.data.address import machine_identity
from renaissance.data.making.spec import DEFAULT_READ_AHEAD, SessionSpec
from renaissance.data.protocol import PROTOCOL_VERSION, version_mismatch
from renaissance.data.recipe import Recipe
from renaissance.data.wire import dataserver_pb2 as pb
from renaissance.data.wire import dataserver_pb2_grpc

MAX_SESSIONS = 256
MAX_OPENING = 64
"""So many sessions may be opened at the same time, which is mostly waiting for a data set; more are refused."""

MAX_ERROR_CHARS = 1000
COMPILING_SECONDS = 1.0
"""A recipe whose kernels are there is ready within milliseconds."""

_log = get_logger("dataserver")
_T = TypeVar("_T")


class DataServerService(dataserver_pb2_grpc.DataServerServicer):  # type: ignore[misc]
    """Implements proto/dataserver.proto."""

    def __init__(
        self,
        hub: Hub,
        store: DatasetStore,
        data_socket: str,
        memory_limit: int,
        read_ahead: int = DEFAULT_READ_AHEAD,
        digests: DigestFolder | None = None,
    ) -> None:
        self._hub = hub
        self._store = store
        self._data_socket = data_socket
        self._memory_limit = memory_limit
        self._read_ahead = read_ahead
        self._digests = digests
        self._numbers = itertools.count(1)
        self._started = time.monotonic()
        self._opening = 0  # sessions, guarded by the lock
        self._counting = threading.Lock()
        self._placing = threading.Lock()  # two opens must not both fit into the same rest of memory

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
        with self._counting:
            too_many = self._opening >= MAX_OPENING
            self._opening += not too_many
        if too_many:
            message = f"{MAX_OPENING} sessions are being opened just now; try again when their data sets are loaded"
            _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        try:
            return self._open(request, context)
        except (ValueRejected, DTypeError) as error:
            _abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except RenaissanceError as error:
            _abort(context, grpc.StatusCode.INTERNAL, str(error))
        except (OSError, MemoryError) as error:
            reason = getattr(error, "strerror", None) or "out of memory"
            _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, f"the dataserver cannot open a session: {reason}")
        finally:
            with self._counting:
                self._opening -= 1

    def _open(self, request: pb.OpenSessionRequest, context: grpc.ServicerContext) -> pb.OpenSessionReply:
        recipe = check_request(request)
        try:
            dataset = self._store.check(request.dataset, request.split)
        except KeyError as error:
            served = ", ".join(self._store.names)
            message = f"data set {error.args[0]!r} is not served here; this dataserver has: {served}"
            _abort(context, grpc.StatusCode.NOT_FOUND, message)
        _, rings = self._open_sessions()
        loaded, data_fd = self._store.load(dataset, request.split, self._memory_limit, rings)
        spec = session_spec(request, dataset, loaded, recipe, self._read_ahead)
        self._refuse_without_room(spec, 0, context)  # before anything of its size is allocated
        with _compiling_is_said(recipe):
            check_recipe(recipe, spec)
        if not context.is_active():  # it gave up while the data set was loaded
            _abort(context, grpc.StatusCode.CANCELLED, "the client is gone")
        with self._placing:
            joined = self._join(request, spec)
            if joined is None:
                self._check_memory(spec, context)
                joined = self._place(request, spec, data_fd)
        return self._reply(*joined, recipe)

    def _join(self, request: pb.OpenSessionRequest, spec: SessionSpec) -> tuple[Session, Member] | None:
        """The place in an open share group, None when there is none of that name."""
        if not request.share:
            return None

        def join() -> tuple[Session, Member] | None:
            session = self._hub.find_group(request.share)
            if session is not None:
                require_same(session, spec, (request.start_epoch, request.start_batch))
            return self._hub.join_session(request.share)

        return self._hub.call(join)

    def _place(self, request: pb.OpenSessionRequest, spec: SessionSpec, data_fd: int) -> tuple[Session, Member]:
        session = Session(
            next(self._numbers),
            spec,
            len(self._hub.workers),
            request.start_epoch,
            request.start_batch,
            share=request.share,
            decoder=decoder_of(spec.dataset),
            on_epoch=self._digests.add if self._digests else None,
        )
        try:
            return session, self._hub.call(lambda: self._hub.add_session(session, data_fd))
        except BaseException:
            session.close()
            raise

    def _reply(self, session: Session, member: Member, recipe: Recipe) -> pb.OpenSessionReply:
        spec, layout, loaded = session.spec, session.spec.layout, session.spec.dataset
        return pb.OpenSessionReply(
            protocol_version=PROTOCOL_VERSION,
            session=session.number,
            token=member.token,
            data_socket=self._data_socket,
            num_samples=loaded.samples,
            num_classes=loaded.num_classes,
            batches_per_epoch=spec.batches_per_epoch,
            height=layout.height,
            width=layout.width,
            channels=layout.channels,
            padded_channels=layout.padded_channels,
            member=member.number,
            members=layout.members,
            recipe=recipe.fingerprint(),
            format=stored_format(spec),
            encoding=loaded.encoding,
            level=stored_level(spec),
            load=loaded.load,
            decode=decode_mode(recipe, loaded),
            decoder=session.decoder,
            machine=machine_identity(),
        )

    def _open_sessions(self) -> tuple[int, int]:
        """How many there are, and the memory they take beside their data (bytes)."""
        workers = len(self._hub.workers)
        taken = self._hub.call(lambda: [_bytes(s.spec, workers) for s in self._hub.sessions])
        return len(taken), sum(taken)

    def _check_memory(self, spec: SessionSpec, context: grpc.ServicerContext) -> None:
        count, rings = self._open_sessions()
        if count >= MAX_SESSIONS:
            _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_SESSIONS} sessions are open; close one first")
        self._refuse_without_room(spec, rings + self._store.loaded_bytes, context)

    def _refuse_without_room(self, spec: SessionSpec, used: int, context: grpc.ServicerContext) -> None:
        workers = len(self._hub.workers)
        if used + _bytes(spec, workers) <= self._memory_limit:
            return
        layout, reading = spec.layout, spec.worker_bytes * workers
        ahead = f" and reading ahead {reading} bytes" if reading else ""
        message = (
            f"a ring of {layout.depth} slots of {layout.batch_size} samples takes {layout.total_bytes} bytes{ahead}"
            f"; the dataserver may use {self._memory_limit} and has {used} in use. Ask for a smaller batch size or "
            "depth, or start it with a larger --memory-limit"
        )
        _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, message)

    def CloseSession(self, request: pb.CloseSessionRequest, context: grpc.ServicerContext) -> pb.CloseSessionReply:  # noqa: N802
        if not self._ask(context, lambda: self._hub.close_session(request.session)):
            _abort(context, grpc.StatusCode.NOT_FOUND, f"no session {request.session}")
        return pb.CloseSessionReply()

    def CorruptSamples(  # noqa: N802
        self, request: pb.CorruptSamplesRequest, context: grpc.ServicerContext
    ) -> pb.CorruptSamplesReply:
        reply = self._ask(context, lambda: self._corrupt_reply(request.session))
        if reply is None:
            _abort(context, grpc.StatusCode.NOT_FOUND, f"no session {request.session}, or it was closed too long ago")
        return reply

    def _corrupt_reply(self, session: int) -> pb.CorruptSamplesReply | None:
        log = self._hub.corrupt_log(session)
        if log is None:
            return None
        samples = [
            pb.CorruptSample(
                sample=s.sample, epoch=s.epoch, batch=s.batch, text=s.text, action=s.action, substitute=s.substitute
            )
            for s in log.listed
        ]
        return pb.CorruptSamplesReply(samples=samples, distinct=log.distinct, occurrences=log.occurrences)

    def Stats(self, request: pb.StatsRequest, context: grpc.ServicerContext) -> pb.StatsReply:  # noqa: N802
        return self._ask(context, self.stats)

    def stats(self) -> pb.StatsReply:
        """In the hub's thread."""
        reply = build_stats(self._hub, self._store, self._digests, self._started)
        reply.opening = self._opening
        return reply

    def _ask(self, context: grpc.ServicerContext, question: Callable[[], _T]) -> _T:
        try:
            return self._hub.call(question)
        except DataServerError as error:
            _abort(context, grpc.StatusCode.UNAVAILABLE, str(error))


@contextmanager
def _compiling_is_said(recipe: Recipe) -> Iterator[None]:
    """One line in the log when the kernels of a recipe were not in the cache, which is known by the time it takes."""
    what = recipe.fingerprint()[:16], ", ".join(t.name for t in recipe.transforms) or "no transforms"
    timer = threading.Timer(
        COMPILING_SECONDS, _log.info, ("compiling kernels (once per installation) of recipe %s: %s", *what)
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _bytes(spec: SessionSpec, workers: int) -> int:
    """Memory that a session takes beside its data set."""
    return spec.layout.total_bytes + spec.worker_bytes * workers


def _abort(context: grpc.ServicerContext, code: grpc.StatusCode, message: str) -> NoReturn:
    if len(message) > MAX_ERROR_CHARS:  # gRPC drops details that are too long for a header
        message = f"{message[:MAX_ERROR_CHARS]} ... ({len(message)} characters)"
    context.abort(code, message.encode(errors="replace").decode())
    raise AssertionError("context.abort raises")
