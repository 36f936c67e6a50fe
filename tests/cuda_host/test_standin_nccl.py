"""NCCL among threads: sums over ranks in captured graphs, and calls that would hang are errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from cuda_standin import CudaError, Race
from cuda_standin.nccl import NcclError, StandInCollectives, World, run_ranks
from standin_bench import Bench

from renaissance.core.errors import ValueRejected

Body = Callable[[World, int], list[npt.NDArray[np.float32]]]


def step(
    folder: Path, count: Callable[[int], int] = lambda rank: 8, replays: Callable[[int], int] = lambda rank: 3
) -> Body:
    """A graph that takes the mean of values from the host on a side stream, and replays of it."""

    def body(world: World, rank: int) -> list[npt.NDArray[np.float32]]:
        bench = Bench(folder, seed=rank)
        collectives = StandInCollectives(bench.fake, world, rank)
        source, back, values = bench.pinned(np.zeros(8)), bench.pinned(np.zeros(8)), bench.buffer(8, "gradient")
        other = bench.buffer(64, "other")
        collectives.mean(bench.streams[1], other)  # connects the ranks, which a capture forbids
        bench.wait(1)
        bench.begin()
        bench.send(values, source, 0)
        bench.after(1, 0)
        collectives.mean(bench.streams[1], values.part(0, 4 * count(rank)))
        for _ in range(4):
            bench.fill(other, 0)
        bench.after(0, 1)
        bench.fetch(back, values, 0)
        graph = bench.end()
        results = []
        for replay in range(replays(rank)):
            source[:] = [np.inf if replay == 2 and rank else rank + replay] * 8
            bench.fake.graphLaunch(graph, bench.streams[0])
            bench.wait()
            results.append(back.copy())
        return results

    return body


def test_a_captured_mean_over_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(2, step(tmp_path))
    assert np.array_equal(first, second)
    assert [float(r[0]) for r in first] == [0.5, 1.5, np.inf]


def test_ranks_that_call_differently_are_named(tmp_path: Path) -> None:
    with pytest.raises(NcclError, match="collective 1 differs: rank 0: mean of 8, rank 1: mean of 7"):
        run_ranks(2, step(tmp_path, count=lambda rank: 8 - rank))


def test_a_rank_that_waits_alone_does_not_hang(tmp_path: Path) -> None:
    with pytest.raises(NcclError, match=r"collective 3: ranks \[1\] wait, and \[0\] have gone"):
        run_ranks(2, step(tmp_path, replays=lambda rank: 2 + rank))


def test_the_collectives_of_a_rank_need_an_order(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    collectives = StandInCollectives(bench.fake, World(1), 0)
    buffers = bench.buffer(4, "first"), bench.buffer(4, "second")
    bench.begin()
    with pytest.raises(CudaError, match="the first use of a collective of this communicator is in a capture"):
        collectives.mean(bench.streams[0], buffers[0])
    with pytest.raises(CudaError):
        bench.end()
    collectives.mean(bench.streams[0], buffers[0])
    bench.wait()
    bench.begin()
    bench.after(1, 0)
    for stream in (0, 1):
        collectives.mean(bench.streams[stream], buffers[stream])
    bench.after(0, 1)
    with pytest.raises(Race, match="writes the communicator"):
        bench.end()


def test_asking_does_not_wait_for_other_ranks(tmp_path: Path) -> None:
    bench, world = Bench(tmp_path), World(2)
    fake, collectives = bench.fake, StandInCollectives(bench.fake, world, 0)
    values, event = bench.buffer(4, "x"), fake.eventCreateWithFlags(2)
    bench.fill(values, 0)
    collectives.mean(bench.streams[0], values)
    fake.eventRecord(event, bench.streams[0])
    assert {fake.eventQuery(event) for _ in range(50)} == {600}
    world.leave(1)
    with pytest.raises(NcclError, match=r"\[1\] have gone"):
        bench.wait()
    with pytest.raises(ValueRejected, match="whole number"):
        collectives.mean(bench.streams[0], values.part(0, 3))


def test_a_communicator_outlives_the_graphs_that_hold_its_collectives(tmp_path: Path) -> None:
    bench, world = Bench(tmp_path), World(1)
    collectives, values = StandInCollectives(bench.fake, world, 0), bench.buffer(4, "x")
    collectives.mean(bench.streams[0], values)
    bench.wait()
    bench.begin()
    collectives.mean(bench.streams[0], values)
    graph = bench.end()
    collectives.close()
    assert collectives.communicator.waits_for_graphs
    bench.fake.graphExecDestroy(graph)
    other = StandInCollectives(bench.fake, world, 0)
    other.close()
    assert not other.communicator.waits_for_graphs
