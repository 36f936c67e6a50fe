"""The stand-in for CUDA's runtime: it refuses what CUDA refuses, and what CUDA lets pass silently shows."""

from __future__ import annotations

import ctypes
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cuda_emulator import compiler
from cuda_standin import NOT_READY, CudaError, FakeCuda
from standin_bench import Bench

from renaissance.backend.cuda.calls import Buffer, KernelCall, i32
from renaissance.backend.cuda.runtime import DISABLE_TIMING, THREAD_LOCAL, CopyKind, CudaRuntime, calls, cupy_runtime

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++: CUDA kernels cannot be built for the CPU")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_every_call_has_the_name_and_the_parameters_that_cupy_gives_it() -> None:
    pytest.importorskip("cupy", reason="needs CuPy for its signatures")
    real = cupy_runtime()
    for name in calls():
        line = (getattr(real, name).__doc__ or "").splitlines()[0]
        found = re.match(r"\w+\((.*?)\)", line)
        assert found, line
        theirs = [p.split("=")[0].split()[-1] for p in found[1].split(",") if p.strip()]
        for ours in (CudaRuntime, FakeCuda):
            named = [p for p in inspect.signature(getattr(ours, name)).parameters if p != "self"]
            assert named == theirs, (ours, line)


def test_nothing_runs_before_the_host_waits(bench: Bench) -> None:
    back, x = bench.pinned(np.zeros(4)), bench.buffer(4, "x")
    bench.send(x, bench.pinned([1, 2, 3, 4]), 0)
    bench.fetch(back, x, 0)
    assert not back.any()
    assert np.isnan(bench.values(x)).all()  # memory that nobody has written yet
    bench.wait()
    assert back.tolist() == [1, 2, 3, 4]


def test_host_memory_that_is_written_too_early_reaches_the_device(bench: Bench) -> None:
    source, x = bench.pinned([1]), bench.buffer(1, "x")
    bench.send(x, source, 0)
    source[:] = 2  # nobody has waited for the copy
    bench.wait()
    assert bench.values(x).tolist() == [2]


@pytest.mark.parametrize("event", [False, True])
def test_a_missing_event_shows_in_some_order(tmp_path: Path, event: bool) -> None:
    seen = set()
    for seed in range(12):
        bench = Bench(tmp_path, seed=seed, check=False)
        x, y, one = (bench.buffer(1, name) for name in "xy1")
        for target in (x, one):
            bench.send(target, bench.pinned([1]), 0)
        bench.wait()
        bench.send(x, bench.pinned([5]), 0)
        if event:
            bench.after(1, 0)
        bench.scaled(x, one, y, 1)
        bench.fake.deviceSynchronize()
        seen.add(bench.values(y)[0])
        bench.fake.close()
    assert seen == ({5.0} if event else {1.0, 5.0})


def test_the_order_of_execution_is_a_function_of_the_seed(tmp_path: Path) -> None:
    def order(seed: int) -> list[tuple[int, str]]:
        bench = Bench(tmp_path, seed=seed)
        for at in range(12):
            bench.fill(bench.buffer(1, str(at)), at % 3, at)
        bench.fake.deviceSynchronize()
        return bench.fake.trace

    assert order(3) == order(3)
    assert len({str(order(seed)) for seed in range(6)}) > 3


def test_a_rate_in_memory_takes_effect_on_replay_and_one_passed_by_value_does_not(bench: Bench) -> None:
    x, rate, y = (bench.buffer(2, name) for name in ("x", "rate", "y"))
    source, host_rate = bench.pinned([1, 2]), bench.pinned([10, 10])
    bench.scaled(x, rate, y, 0)
    bench.wait()
    offset = 0.5
    bench.begin()
    bench.send(x, source, 0)
    bench.send(rate, host_rate, 0)
    bench.scaled(x, rate, y, 0, offset)
    graph = bench.end()
    for host_rate[:], offset, expected in ((10, 0.5, [10.5, 20.5]), (100, 7.0, [100.5, 200.5])):  # noqa: B007
        bench.fake.graphLaunch(graph, bench.streams[0])
        bench.wait()
        assert bench.values(y).tolist() == expected


def test_launches_of_graphs_run_in_the_order_of_their_stream_and_those_of_one_executable_always(bench: Bench) -> None:
    x, y, two = (bench.buffer(1, name) for name in "xy2")
    bench.send(two, bench.pinned([2]), 0)
    bench.scaled(x, two, y, 0)
    bench.send(x, bench.pinned([1]), 0)
    bench.wait()
    bench.begin()
    bench.scaled(x, two, y, 0)
    bench.scaled(y, two, x, 0)
    graph = bench.end()
    for launch in range(10):
        bench.fake.graphLaunch(graph, bench.streams[launch % 3])
    bench.fake.deviceSynchronize()
    assert bench.values(x)[0] == 4.0**10


def test_an_event_is_done_when_what_came_before_it_has_run_and_asking_lets_time_pass(bench: Bench) -> None:
    event = bench.fake.eventCreateWithFlags(DISABLE_TIMING)
    assert bench.fake.eventQuery(event) == 0  # never recorded
    x = bench.buffer(64, "x")
    for value in range(40):
        bench.fill(x, 0, value)
    bench.fake.eventRecord(event, bench.streams[0])
    answers = [bench.fake.eventQuery(event) for _ in range(200)]
    assert set(answers) == {0, NOT_READY}
    assert answers == sorted(answers, reverse=True)
    assert bench.values(x).tobytes() == bytes([39]) * 256
    assert not bench.fake.counts["streamSynchronize"] + bench.fake.counts["eventSynchronize"]


FORBIDDEN: dict[str, Callable[[Bench], object]] = {
    "malloc": lambda b: b.fake.malloc(16),
    "free": lambda b: b.fake.free(16),
    "hostAlloc": lambda b: b.fake.hostAlloc(16, 0),
    "hostRegister": lambda b: b.fake.hostRegister(4096, 16, 0),
    "hostUnregister": lambda b: b.fake.hostUnregister(4096),
    "freeHost": lambda b: b.fake.freeHost(4096),
    "moduleLoadData": lambda b: b.fake.moduleLoadData(b"x.cu"),
    "streamSynchronize": lambda b: b.wait(2),
    "deviceSynchronize": lambda b: b.fake.deviceSynchronize(),
    "eventQuery": lambda b: b.fake.eventQuery(b.fake.eventCreateWithFlags(DISABLE_TIMING)),
    "eventSynchronize": lambda b: b.fake.eventSynchronize(b.fake.eventCreateWithFlags(DISABLE_TIMING)),
    "graphInstantiate": lambda b: b.fake.graphInstantiate(b.empty),
    "graphLaunch": lambda b: b.fake.graphLaunch(b.executable, b.streams[0]),
    "streamCreateWithPriority": lambda b: b.fake.streamCreateWithPriority(1, 0),
    "streamBeginCapture": lambda b: b.fake.streamBeginCapture(b.streams[2], THREAD_LOCAL),
}


@pytest.mark.parametrize("call", FORBIDDEN)
def test_a_capture_forbids(call: str, bench: Bench) -> None:
    bench.begin()
    bench.empty = bench.fake.streamEndCapture(bench.streams[0])  # type: ignore[attr-defined]
    bench.executable = bench.fake.graphInstantiate(bench.empty)  # type: ignore[attr-defined]
    x = bench.buffer(1, "x")
    bench.begin()
    with pytest.raises(CudaError, match=f"{call} while a stream is capturing"):
        FORBIDDEN[call](bench)
    with pytest.raises(CudaError, match="StreamCaptureInvalidated"):
        bench.fill(x, 0)
    with pytest.raises(CudaError, match="StreamCaptureInvalidated"):
        bench.end()
    bench.fill(x, 0)  # and after it everything works again
    bench.wait()


def test_what_is_issued_beside_a_capture_would_be_missing_on_replay(bench: Bench) -> None:
    x = bench.buffer(1, "x")
    bench.begin()
    with pytest.raises(CudaError, match='"fill" on a stream that is not part of the running capture'):
        bench.fill(x, 1)
    with pytest.raises(CudaError, match="Invalidated"):
        bench.end()


def test_a_capture_is_joined_ended_and_left_as_cuda_wants_it(bench: Bench) -> None:
    fake, (main, side, third), x, y = bench.fake, bench.streams, bench.buffer(1, "x"), bench.buffer(1, "y")
    outside, inside = (fake.eventCreateWithFlags(DISABLE_TIMING) for _ in range(2))
    with pytest.raises(CudaError, match="never recorded"):
        fake.streamWaitEvent(main, outside)
    with pytest.raises(CudaError, match="never recorded"):
        fake.eventSynchronize(outside)
    fake.eventRecord(outside, third)
    bench.begin()
    with pytest.raises(CudaError, match="Isolation"):
        fake.streamWaitEvent(main, outside)
    with pytest.raises(CudaError, match="Invalidated"):
        bench.end()
    bench.begin()
    bench.fill(x, 0)
    bench.after(1, 0)
    bench.fill(y, 1)
    with pytest.raises(CudaError, match=r'Unjoined.*which ends in "fill"'):
        bench.end()
    bench.begin()
    bench.after(1, 0)
    with pytest.raises(CudaError, match="Unmatched"):
        fake.streamEndCapture(side)
    with pytest.raises(CudaError, match="Invalidated"):
        bench.end()
    bench.begin()
    fake.eventRecord(inside, main)
    assert fake.streamIsCapturing(main)
    assert not fake.streamIsCapturing(side)
    bench.end()
    for use in (lambda: fake.streamWaitEvent(side, inside), lambda: fake.eventQuery(inside)):
        with pytest.raises(CudaError, match="CapturedEvent"):
            use()
    with pytest.raises(CudaError, match="IllegalState"):
        bench.end()
    with pytest.raises(CudaError, match="capture mode"):
        fake.streamBeginCapture(main, 2)


def test_a_kernel_is_not_launched_for_the_first_time_in_a_capture(bench: Bench) -> None:
    """With lazy loading its code would be loaded then, which a capture forbids."""
    x, y = bench.buffer(4, "x"), bench.buffer(4, "y")
    bench.function("bench", "scaled")
    bench.begin()
    with pytest.raises(CudaError, match="the first use of scaled is in a capture"):
        bench.scaled(x, x, y, 0)
    with pytest.raises(CudaError, match="Invalidated"):
        bench.end()


def test_copies_need_page_locked_memory_and_stay_inside_allocations(bench: Bench) -> None:
    fake, x, pageable = bench.fake, bench.buffer(16, "x"), np.zeros(32, np.float32)
    with pytest.raises(CudaError, match="page-locked"):
        bench.send(x, pageable[:16], 0)
    fake.hostRegister(pageable.ctypes.data, pageable.nbytes, 0)
    with pytest.raises(CudaError, match="AlreadyRegistered"):
        fake.hostRegister(pageable.ctypes.data + 64, 8, 0)
    with pytest.raises(CudaError, match="at x run 64 past the allocation"):
        bench.send(x, pageable, 0)
    with pytest.raises(CudaError, match="overlap"):
        fake.memcpyAsync(x.ptr, x.ptr + 4, 16, CopyKind.DEVICE_TO_DEVICE, bench.streams[0])
    with pytest.raises(CudaError, match="not device memory"):
        fake.memsetAsync(x.ptr - 4096, 0, 4, bench.streams[0])
    bench.send(x, pageable[:16], 0)
    with pytest.raises(CudaError, match="may not be done; wait for it first"):
        fake.hostUnregister(pageable.ctypes.data)
    bench.wait()
    fake.hostUnregister(pageable.ctypes.data)
    with pytest.raises(CudaError, match="NotRegistered"):
        fake.hostUnregister(pageable.ctypes.data)


def test_a_graph_that_outlives_its_memory_is_refused(bench: Bench) -> None:
    x = bench.buffer(16, "x")
    bench.begin()
    bench.fill(x, 0)
    graph = bench.end()
    bench.fake.graphLaunch(graph, bench.streams[0])
    bench.fake.free(x.ptr)
    with pytest.raises(CudaError, match='"fill" uses memory that is gone'):
        bench.fake.graphLaunch(graph, bench.streams[0])


def test_launches_are_checked_as_a_driver_does(bench: Bench) -> None:
    x, y = bench.buffer(20000, "x"), bench.buffer(1, "y")
    fake, stream = bench.fake, bench.streams[0]
    count = i32(16)

    def launch(grid: tuple[int, int, int], block: tuple[int, int, int], shared: int = 0, size: int = y.nbytes) -> None:
        args = (x, Buffer(y.ptr, size), count)
        KernelCall("bench", "shared_sum", grid, block, args, "sum", shared).issue(bench, stream)

    for grid, block, shared, message in (
        ((0, 1, 1), (32, 1, 1), 0, "grid"),
        ((1, 65536, 1), (32, 1, 1), 0, "grid"),
        ((1, 1, 1), (32, 32, 2), 0, "2048 threads"),
        ((1, 1, 1), (1, 1, 128), 0, "block"),
        ((1, 1, 1), (32, 1, 1), 49153, "49153 bytes of shared memory; at most 49152"),
    ):
        with pytest.raises(CudaError, match=message):
            launch(grid, block, shared)
    launch((1, 1, 1), (32, 1, 1), 49152)
    with pytest.raises(CudaError, match=r"shared_sum, argument 1 \(f32\*\): 8 bytes at y run 4 past"):
        launch((1, 1, 1), (32, 1, 1), size=8)
    with pytest.raises(CudaError, match="no kernel missing"):
        bench.function("bench", "missing")
    fake.hint([4])
    with pytest.raises(CudaError, match="2 pointers, hinted sizes: 1"):
        raw_launch(bench, bench.function("bench", "shared_sum"))


def raw_launch(bench: Bench, function: int) -> None:
    values = [ctypes.c_void_p(0), ctypes.c_void_p(0), ctypes.c_int32(0)]
    params = (ctypes.c_void_p * 3)(*(ctypes.addressof(v) for v in values))
    bench.fake.launchKernel(function, 1, 1, 1, 32, 1, 1, 0, bench.streams[0], ctypes.addressof(params), 0)


def test_a_kernel_that_writes_past_its_memory_fails_at_the_next_wait_and_so_does_everything_after_it(
    bench: Bench,
) -> None:
    y = bench.buffer(64, "y")
    call = KernelCall("bench", "past_the_end", (1, 1, 1), (32, 1, 1), (y, i32(64)), "past")
    call.issue(bench, bench.streams[0])
    with pytest.raises(Exception, match="past_the_end"):
        bench.wait()
    with pytest.raises(CudaError, match="after a failed operation: past_the_end"):
        bench.fill(y, 0)


def test_handles_are_checked(bench: Bench) -> None:
    event = bench.fake.eventCreateWithFlags(DISABLE_TIMING)
    bench.fake.eventDestroy(event)
    for use in (
        lambda: bench.fake.eventRecord(event, bench.streams[0]),
        lambda: bench.fake.streamSynchronize(0),
        lambda: bench.fake.graphLaunch(bench.streams[0], bench.streams[0]),
    ):
        with pytest.raises(CudaError, match="InvalidResourceHandle"):
            use()
    with pytest.raises(CudaError, match="one, 0"):
        bench.fake.setDevice(1)
