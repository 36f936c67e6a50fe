"""NCCL through CuPy: the mean over ranks, one process per GPU.

What makes the sums the same from run to run (law 2): the order in which NCCL adds the ranks' values follows from its
algorithm, the number of values, the rings it finds in the machine's topology, and its version. ``ALGORITHM`` is pinned
to rings. Left alone NCCL may let the NVLink switch add (NVLS), whose order changes from call to call; all ranks get the
same bits either way, because a sum is made once and handed on. With two ranks the order of the terms cannot matter.
With more, the topology of the machine belongs to the numeric profile, like the GPU.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any, Protocol, Self

from renaissance.backend.cuda.calls import Buffer
from renaissance.core.errors import DeviceError, ValueRejected
from renaissance.core.gpus import INSTALL

FLOAT32 = 7
"""ncclFloat32."""
AVERAGE = 4
"""ncclAvg: the sum of the values times 1 / ranks. NaN and infinities of one rank reach all."""

ALGORITHM = "NCCL_ALGO"
REPEATABLE = ("ring", "tree")
"""Algorithms that add in an order of their own choosing, which is always the same."""
DEFAULTS = {ALGORITHM: "Ring", "NCCL_SOCKET_IFNAME": "lo"}
"""What is told to NCCL unless the environment says otherwise. All ranks are on one machine, so they can find each other
over the loopback interface, where nobody else listens."""
LEAVING_SECONDS = 5.0
"""For NCCL to give back what it holds."""
NUMERIC = (ALGORITHM, "NCCL_PROTO", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS")
"""Variables of NCCL's that change how values are grouped into sums."""


class Communicator(Protocol):
    """What is used of ``cupy.cuda.nccl.NcclCommunicator``; errors are exceptions."""

    def allReduce(  # noqa: N802  # CuPy's name
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int
    ) -> None: ...
    def abort(self) -> None: ...


def new_unique_id() -> bytes:
    """What all ranks of one communicator have to know; made by rank 0. Raises DeviceError without NCCL."""
    configure()
    nccl = _nccl()
    try:
        return bytes(nccl.get_unique_id())
    except nccl.NcclError as error:
        raise DeviceError(f"NCCL: no unique id for the ranks: {error}") from error


def configure(environ: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Tell NCCL what it reads from the environment when it is first used; returns what the sums depend on.

    Raises ValueRejected for an NCCL_ALGO whose sums are not the same from run to run.
    """
    for name, value in DEFAULTS.items():
        environ.setdefault(name, value)
    chosen = environ[ALGORITHM]
    if not all(part.strip().lower() in REPEATABLE for part in chosen.split(",")):
        raise ValueRejected(
            f"{ALGORITHM} is {chosen!r} in the environment; expected Ring, Tree or Ring,Tree, whose sums are the same "
            "in every run; unset it for Ring"
        )
    return {name: environ[name] for name in NUMERIC if name in environ}


class NcclCollectives:
    """``libraries.Collectives``: the ranks of one communicator. Made by ``connect``.

    Every collective has to be issued in the same order on all ranks and never twice at a time, which holds when all are
    on one stream, or on streams that events put in order. The first one connects the ranks, so it must not be captured;
    the executor issues every program once before it captures any.

    A communicator is always left by ``ncclCommAbort``: ``ncclCommDestroy`` waits for ranks that may be gone by then.
    Either waits until every graph that holds a collective is destroyed, so it is asked for on a thread of its own.
    """

    def __init__(self, communicator: Communicator, rank: int, size: int, facts: dict[str, str]) -> None:
        self._communicator: Communicator | None = communicator
        self._rank, self._size, self._facts = rank, size, facts

    @classmethod
    def connect(cls, unique_id: bytes, rank: int, size: int) -> Self:
        """Join the communicator of all ``size`` ranks with the current GPU; waits for the others.

        Raises DeviceError when NCCL cannot, with its reason.
        """
        chosen = configure()
        nccl = _nccl()
        try:
            communicator = nccl.NcclCommunicator(size, unique_id, rank)
        except nccl.NcclError as error:
            raise DeviceError(
                f"NCCL: rank {rank} of {size} cannot connect: {error}; NCCL_DEBUG=WARN in the environment says more. "
                "Each rank needs a GPU of its own"
            ) from error
        _never_collect(communicator)
        return cls(communicator, rank, size, {"nccl": version_text(nccl.get_version()), **chosen})

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def mean(self, stream: int, values: Buffer) -> None:
        """Every rank's float32 ``values`` become their mean over the ranks, in place. All ranks call alike."""
        if values.nbytes % 4:
            raise ValueRejected(f"NCCL: {values.nbytes} bytes are no whole number of float32 values")
        self._use().allReduce(values.ptr, values.ptr, values.nbytes // 4, FLOAT32, AVERAGE, stream)

    def facts(self) -> dict[str, str]:
        """Version and algorithm: part of the numeric profile."""
        return dict(self._facts)

    def abort(self) -> None:
        """Let running and waiting collectives end, with undefined values, because another rank will never come; returns
        at once. May be called from another thread than the one that waits for the GPU, and again."""
        self._leave()

    def close(self) -> None:
        """Leave the communicator, when all ranks have what they need of this one. May be called again."""
        leaving = self._leave()
        if leaving is not None:
            leaving.join(LEAVING_SECONDS)

    def _leave(self) -> threading.Thread | None:
        communicator, self._communicator = self._communicator, None
        if communicator is None:
            return None
        leaving = threading.Thread(target=_abort, args=(communicator,), name="leave NCCL", daemon=True)
        leaving.start()
        return leaving

    def _use(self) -> Communicator:
        if self._communicator is None:
            raise DeviceError(f"NCCL: rank {self._rank} of {self._size} has left its communicator")
        return self._communicator


def _abort(communicator: Communicator) -> None:
    with suppress(Exception):  # whatever made us leave is the error to raise
        communicator.abort()


def _never_collect(communicator: Communicator) -> None:
    """Keep it past the end of the interpreter: its finalizer destroys it, which would wait for graphs that are still
    there, for ever."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(communicator))


def version_text(code: int) -> str:
    """ "2.32.3" of 23203, NCCL's number for it since 2.9."""
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"


def _nccl() -> Any:
    """CuPy's module, which has no types."""
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise DeviceError(f"NCCL cannot be loaded: {error}; several GPUs need {INSTALL}") from None
    if not nccl.available:
        raise DeviceError(f"NCCL cannot be loaded; several GPUs need {INSTALL}")
    return nccl
