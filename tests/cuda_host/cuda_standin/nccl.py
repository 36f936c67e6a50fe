"""NCCL among ranks that are threads of one process, each with a FakeCuda of its own.

A collective is an operation of its stream: it runs when all ranks have come to it, and other operations of the stream's
device may run meanwhile. Ranks that call differently are an error, and so is a rank that waits for one that has gone.
Two collectives of one rank without an order between them are a race for the communicator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from cuda_standin.libraries import view
from cuda_standin.runtime import FakeCuda
from renaissance.backend.cuda.nccl import AVERAGE, FLOAT32, NcclCollectives
from renaissance.core.dtype import DType

PATIENCE = 60.0
"""Seconds until a rank that hears nothing gives up; ranks that end are noticed at once."""
T = TypeVar("T")


class NcclError(RuntimeError):
    """A collective failed, or would have hung."""


@dataclass
class Meeting:
    """The calls of one collective and the values of the ranks that have come, by rank."""

    calls: dict[int, str] = field(default_factory=dict)
    values: dict[int, npt.NDArray[np.float32]] = field(default_factory=dict)


class World:
    """The ranks of one communicator."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.meetings: list[Meeting] = []
        self.gone: set[int] = set()
        self.changed = threading.Condition()

    def come(self, number: int, rank: int, call: str, values: npt.NDArray[np.float32]) -> None:
        """``rank`` has come to its collective ``number``."""
        with self.changed:
            while len(self.meetings) <= number:
                self.meetings.append(Meeting())
            self.meetings[number].calls[rank] = call
            self.meetings[number].values[rank] = values
            self.changed.notify_all()

    def complete(self, number: int) -> bool:
        """Whether all ranks have come. Raises NcclError if they call differently or if one has gone."""
        calls = self.meetings[number].calls
        if len(set(calls.values())) > 1:
            said = ", ".join(f"rank {rank}: {call}" for rank, call in sorted(calls.items()))
            raise NcclError(f"collective {number} differs: {said}")
        if len(calls) < self.size and self.gone - calls.keys():
            missing = sorted(self.gone - calls.keys())
            raise NcclError(f"collective {number}: ranks {sorted(calls)} wait, and {missing} have gone")
        return len(calls) == self.size

    def wait(self, number: int) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.complete(number), PATIENCE):
                raise NcclError(f"collective {number}: only ranks {sorted(self.meetings[number].calls)} have come")

    def leave(self, rank: int) -> None:
        """``rank`` will not come any more."""
        with self.changed:
            self.gone.add(rank)
            self.changed.notify_all()

    def mean(self, number: int) -> npt.NDArray[np.float32]:
        """In the order of the ranks."""
        values = self.meetings[number].values
        total = values[0].astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            for rank in range(1, self.size):
                total = total + values[rank]
            return (total / self.size).astype(np.float32)


class StandInCommunicator:
    """``cupy.cuda.nccl.NcclCommunicator``, as far as ``renaissance.backend.cuda.nccl.Communicator`` goes."""

    def __init__(self, fake: FakeCuda, world: World, rank: int) -> None:
        self._fake, self._world, self._rank = fake, world, rank
        self._begun = 0
        self._token = fake.memory.allocate(1, host=True)
        fake.name_range(self._token, 1, "the communicator")
        self.waits_for_graphs = False
        """Whether it was left while there were graphs with its collectives."""

    def allReduce(  # noqa: N802  # CuPy's name
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int
    ) -> None:
        """The mean of float32 values; the only form the backend uses."""
        if (datatype, op) != (FLOAT32, AVERAGE):
            raise NcclError(f"allReduce of type {datatype} with operation {op}; expected {FLOAT32} and {AVERAGE}")
        self._fake.warm(id(self), "a collective of this communicator")
        source, target = (self._fake.device_range(p, 4 * count, "allReduce") for p in (sendbuf, recvbuf))
        call, number = f"mean of {count}", -1

        def ready() -> bool:
            nonlocal number
            if number < 0:
                number = self._begun
                self._begun += 1
                self._world.come(number, self._rank, call, view(sendbuf, count, DType.FP32).copy())
            with self._world.changed:
                return self._world.complete(number)

        def run() -> None:
            nonlocal number
            view(recvbuf, count, DType.FP32)[:] = self._world.mean(number)
            number = -1

        def wait() -> None:
            self._world.wait(number)

        writes = (target, (self._token, self._token + 1))
        self._fake.library(stream, f"all-reduce {call}", run, (source,), writes, ready=ready, wait=wait)

    def abort(self) -> None:
        """NCCL waits for graphs that hold its collectives, for ever if nobody destroys them."""
        token = (self._token, self._token + 1)
        graphs = [self._fake.graph(executable) for executable in self._fake.executables()]
        self.waits_for_graphs = any(token in op.writes for graph in graphs for op in graph.ops)
        self._world.leave(self._rank)


class StandInCollectives(NcclCollectives):
    """``libraries.Collectives`` of one rank of ``world``."""

    def __init__(self, fake: FakeCuda, world: World, rank: int) -> None:
        self.communicator = StandInCommunicator(fake, world, rank)
        super().__init__(self.communicator, rank, world.size, {"nccl": "stand-in"})


def run_ranks(size: int, body: Callable[[World, int], T]) -> list[T]:
    """Run ``body(world, rank)`` for all ranks, each in a thread; returns their results, or raises the first error."""
    world, results, errors = World(size), {}, list[BaseException]()

    def rank_of(rank: int) -> None:
        try:
            results[rank] = body(world, rank)
        except BaseException as error:
            errors.append(error)
        finally:
            world.leave(rank)

    threads = [threading.Thread(target=rank_of, args=(rank,), name=f"rank {rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]
