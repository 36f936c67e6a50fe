"""The stand-in finds accesses to the same memory without an order: inside graphs, between graphs, between streams."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from cuda_standin import Race
from cuda_standin.capture import replayed
from cuda_standin.errors import CudaError
from cuda_standin.memory import Memory, Range, merged, overlap
from cuda_standin.work import Graph, Op
from standin_bench import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_capture_without_an_event_names_both_operations_and_the_buffer(bench: Bench) -> None:
    x, y = bench.buffer(8, "images"), bench.buffer(8, "weights")
    source = bench.pinned(range(8))
    bench.begin()
    bench.after(1, 0)
    bench.send(x, source, 1)
    bench.fake.memcpyAsync(y.ptr, x.ptr, 32, 3, bench.streams[0])
    bench.after(0, 1)
    message = r'graph: "copy host to device -> images" and "copy device to device -> weights" are not .* writes images'
    with pytest.raises(Race, match=message):
        bench.end()


def test_readers_may_share_and_disjoint_parts_may_be_written_at_once(bench: Bench) -> None:
    x, parts = bench.buffer(64, "x"), bench.buffer(128, "parts")
    bench.fill(x, 0)
    bench.wait()
    bench.begin()
    bench.after(1, 0)
    for stream in (0, 1):
        part = parts.part(256 * stream, 256)
        bench.fake.memcpyAsync(part.ptr, x.ptr, 256, 3, bench.streams[stream])
    bench.after(0, 1)
    bench.fake.graphLaunch(bench.end(), bench.streams[0])
    bench.wait()
    assert not bench.values(parts).any()


def test_graphs_of_two_streams_have_to_be_ordered_by_events_or_by_the_host(bench: Bench) -> None:
    """A transfer graph beside a compute graph, as the executor runs them."""
    a, b, y = (bench.buffer(64, name) for name in ("input A", "input B", "result"))
    source = bench.pinned(range(64))
    graphs = {}
    for name, target in (("send A", a), ("send B", b)):
        bench.begin(1)
        bench.send(target, source, 1)
        graphs[name] = bench.end(1)
    bench.begin()
    bench.fake.memcpyAsync(y.ptr, a.ptr, 256, 3, bench.streams[0])
    graphs["compute A"] = bench.end()

    def launch(name: str, stream: int) -> None:
        bench.fake.graphLaunch(graphs[name], bench.streams[stream])

    launch("send A", 1)
    bench.after(0, 1)
    launch("compute A", 0)
    launch("send B", 1)  # overlaps the computation
    with pytest.raises(Race, match=r'streams: "copy device to device -> result" and .* writes input A'):
        launch("send A", 1)
    bench.fake.deviceSynchronize()
    launch("send A", 1)  # the host has waited
    with pytest.raises(Race, match="writes input A"):
        bench.fill(a, 2)
    bench.after(2, 1)
    bench.fill(a, 2)
    event = bench.fake.eventCreateWithFlags(2)
    bench.fake.eventRecord(event, bench.streams[2])
    while bench.fake.eventQuery(event):
        pass
    launch("compute A", 0)  # the host has asked and knows
    bench.wait()


def test_order_goes_through_other_streams(bench: Bench) -> None:
    x = bench.buffer(4, "x")
    bench.fill(x, 0)
    bench.after(1, 0)
    bench.after(2, 1)
    bench.fill(x, 2)
    with pytest.raises(Race):
        bench.fill(x, 1)


def test_each_wait_of_a_capture_can_be_left_out(bench: Bench) -> None:
    x, y = bench.buffer(4, "x"), bench.buffer(4, "y")
    bench.begin()
    bench.fill(x, 0)
    bench.after(1, 0)
    bench.fill(y, 1)
    bench.after(1, 0)  # not needed: stream 1 knows already
    bench.fake.memcpyAsync(y.ptr, x.ptr, 16, 3, bench.streams[1])
    bench.after(0, 1)
    graph = bench.fake.graph(bench.end())
    found = []
    for wait in range(3):
        try:
            replayed(graph.log, wait).check(bench.fake.memory)
            found.append("nothing")
        except (CudaError, Race) as error:
            found.append(type(error).__name__)
    assert found == ["CudaError", "nothing", "CudaError"]
    assert replayed(graph.log).parents == graph.parents


def test_one_wait_can_be_dropped_while_calls_are_made(tmp_path: Path) -> None:
    bench = Bench(tmp_path, drop_wait=1)
    x = bench.buffer(4, "x")
    bench.fill(x, 0)
    bench.after(1, 0)
    bench.fill(x, 1)
    bench.after(2, 1)
    with pytest.raises(Race):
        bench.fill(x, 2)


def test_the_sweep_finds_what_comparing_all_pairs_finds() -> None:
    rng = random.Random(1)
    for _ in range(300):
        count = rng.randrange(2, 12)

        def ranges(most: int) -> tuple[Range, ...]:
            starts = [rng.randrange(40) for _ in range(rng.randrange(most))]
            return tuple((low, low + rng.randrange(0, 6)) for low in starts)

        ops = [Op(str(i), lambda: None, ranges(4), ranges(2)) for i in range(count)]
        parents = [frozenset(p for p in range(i) if rng.random() < 0.45) for i in range(count)]
        graph = Graph(ops, parents, [0] * count)
        before = graph.ancestors()
        op = ops.__getitem__
        pairs = [("writes", "writes"), ("writes", "reads"), ("reads", "writes")]
        conflicts = {
            (i, j)
            for i, j in itertools.combinations(range(count), 2)
            if not before[j] >> i & 1
            and any(
                max(a[0], b[0]) < min(a[1], b[1])
                for one, other in pairs
                for a in getattr(op(i), one)
                for b in getattr(op(j), other)
            )
        }  # fmt: skip
        found = graph.unordered_conflict()
        assert (found is not None) == bool(conflicts)
        assert found is None or found[:2] in conflicts


def test_merged_ranges_cover_the_same_bytes() -> None:
    rng = random.Random(2)
    for _ in range(200):
        sets = [[(low := rng.randrange(50), low + rng.randrange(5)) for _ in range(6)] for _ in range(2)]
        covered = [{byte for low, high in ranges for byte in range(low, high)} for ranges in sets]
        shared = overlap(*(merged(ranges) for ranges in sets))
        assert (shared is not None) == bool(covered[0] & covered[1])
        assert shared is None or set(range(*shared)) <= covered[0] & covered[1]


def test_writes_beside_an_allocation_are_found_when_it_is_freed(bench: Bench) -> None:
    import ctypes

    x = bench.buffer(3, "x")
    ctypes.memset(x.ptr + 12, 0, 1)
    with pytest.raises(CudaError, match="behind an allocation of 12 bytes"):
        bench.fake.free(x.ptr)


def test_names_are_those_of_the_smallest_pieces() -> None:
    memory = Memory()
    whole = memory.allocate(4096)
    memory.call(whole, 4096, "arena")
    memory.call(whole + 256, 16, "weights")
    memory.call(whole + 256, 32, "scratch")
    assert memory.name(whole + 257) == "weights or scratch"
    assert memory.name(whole) == "arena"
    assert memory.name(16) == "0x10"


def test_six_hundred_nodes_and_hundreds_of_launches_are_quick(bench: Bench) -> None:
    """By counting, not by a clock: a launch is compared only with those that it has no order with."""
    arena = bench.buffer(64 * 600, "arena")
    bench.begin()
    for stream in (1, 2):
        bench.after(stream, 0)
    for at in range(600):
        bench.fill(arena.part(256 * at, 256), at % 3)
    for stream in (1, 2):
        bench.after(0, stream)
    graph = bench.end()
    for _ in range(100):
        bench.fake.graphLaunch(graph, bench.streams[0])
    bench.wait()
    assert len(bench.fake.trace) == 60_000
    assert bench.fake.compared == 0
