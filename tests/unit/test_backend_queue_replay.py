"""The native queue: one team of threads, errors that name the node, denormals flushed, nothing allocated."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import tracemalloc

import numpy as np
import pytest
from numba import njit

from renaissance.backend.cpu.intrinsics import ARGS, STATUS, f32, get_mxcsr, i64, my_range, team_rank, team_size, words
from renaissance.backend.cpu.kernels_common import Kernel
from renaissance.backend.cpu.queue import NativeQueue, kernel_call, team_call
from renaissance.backend.cpu.threads import LIMIT_VARIABLES, configure, runtime
from renaissance.backend.registry import NativeCall
from renaissance.core.errors import DeviceError, ValueRejected

TEAMS = (1, 2, 3)
TINY = np.float32(1.5e-38)  # normal; half of it is not


@Kernel
def count_visit(address):  # type: ignore[no-untyped-def]  # context: counters int64 [16], size int64 [1]
    ctx = words(address)
    i64(ctx[ARGS], 16)[team_rank(ctx)] += 1
    i64(ctx[ARGS + 1], 1)[0] = team_size(ctx)


@Kernel
def halve(address):  # type: ignore[no-untyped-def]  # context: x fp32 [16], y fp32 [16]
    ctx = words(address)
    rank = team_rank(ctx)
    f32(ctx[ARGS + 1], 16)[rank] = f32(ctx[ARGS], 16)[rank] * np.float32(0.5)


@Kernel
def fail_with(address):  # type: ignore[no-untyped-def]  # context: status to report
    ctx = words(address)
    ctx[STATUS] = ctx[ARGS]


@Kernel
def mark_range(address):  # type: ignore[no-untyped-def]  # context: marks int64 [count], count, chunk
    ctx = words(address)
    marks = i64(ctx[ARGS], ctx[ARGS + 1])
    start, stop = my_range(ctx, ctx[ARGS + 1], ctx[ARGS + 2])
    for i in range(start, stop):
        marks[i] += 1


@njit
def control_word():  # type: ignore[no-untyped-def]  # () -> int32
    return get_mxcsr()


@pytest.fixture(autouse=True)
def _team() -> None:
    configure(2)


@pytest.mark.parametrize("team", TEAMS)
def test_a_kernel_runs_once_on_every_thread_of_the_team(team: int) -> None:
    counters, size = np.zeros(16, np.int64), np.zeros(1, np.int64)
    call = kernel_call(count_visit, (counters.ctypes.data, size.ctypes.data), "count", threads=team)
    queue = NativeQueue([call])
    for _ in range(3):
        queue.launch()
    assert counters.tolist() == [3] * team + [0] * (16 - team)
    assert size[0] == team


@pytest.mark.parametrize("team", TEAMS)
@pytest.mark.parametrize(("count", "chunk"), [(1, 4), (7, 4), (8, 4), (9, 4), (1000, 64), (3, 1000)])
def test_ranges_cover_every_element_once(team: int, count: int, chunk: int) -> None:
    marks = np.zeros(count, np.int64)
    NativeQueue([kernel_call(mark_range, (marks.ctypes.data, count, chunk), "mark", threads=team)]).launch()
    assert marks.tolist() == [1] * count


@pytest.mark.parametrize("team", TEAMS)
def test_denormals_are_flushed_in_every_thread_and_the_caller_keeps_its_control_word(team: int) -> None:
    x, y = np.full(16, TINY), np.full(16, np.float32(9))
    before = control_word()
    NativeQueue([kernel_call(halve, (x.ctypes.data, y.ctypes.data), "halve", threads=team)]).launch()
    assert y.tolist() == [0.0] * team + [9.0] * (16 - team)
    assert control_word() == before
    with np.errstate(under="ignore"):
        assert x[0] * np.float32(0.5) != 0, "outside a launch denormals are kept"


def test_threads_that_ran_with_denormals_flush_them_in_the_next_launch() -> None:
    x, y = np.full(16, TINY), np.zeros(16, np.float32)
    call = kernel_call(halve, (x.ctypes.data, y.ctypes.data), "halve", threads=2)
    fn, context, team, flags = call.args
    runtime().library.GOMP_parallel(ctypes.c_void_p(fn), ctypes.c_void_p(context), ctypes.c_uint(team), flags)
    assert (y[:2] != 0).all(), "outside a launch every thread keeps denormals"
    NativeQueue([call]).launch()
    assert not y.any()


def test_the_control_word_is_restored_after_a_failure() -> None:
    before = control_word()
    with pytest.raises(DeviceError):
        NativeQueue([kernel_call(fail_with, (5,), "FC_FWD #1")]).launch()
    assert control_word() == before


@pytest.mark.parametrize("team", [1, 2])
def test_a_failing_kernel_stops_the_replay_and_is_named(team: int) -> None:
    counters, size = np.zeros(16, np.int64), np.zeros(1, np.int64)
    arguments = (counters.ctypes.data, size.ctypes.data)
    queue = NativeQueue(
        [
            kernel_call(count_visit, arguments, "first"),
            kernel_call(fail_with, (-3,), "SOFTMAX_CE_FWD #8", threads=team),
            kernel_call(count_visit, arguments, "last"),
        ]
    )
    for _ in range(2):
        with pytest.raises(DeviceError, match=r"call 2 of 3, SOFTMAX_CE_FWD #8: kernel status -3"):
            queue.launch()
    assert counters[0] == 2, "the call before the failure ran each time, the one after it never"


def test_a_failing_library_call_is_explained() -> None:
    absolute = ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p).value
    assert absolute is not None
    NativeQueue([NativeCall(absolute, (0, 0, 0, 0), "fine")]).launch()
    queue = NativeQueue([NativeCall(absolute, (-2, 0, 0, 0), "FC_FWD #3")], lambda status: f"status {status} explained")
    with pytest.raises(DeviceError, match=r"call 1 of 1, FC_FWD #3: status 2 explained"):
        queue.launch()


def test_a_hundred_thousand_replays_allocate_nothing() -> None:
    counters, size = np.zeros(16, np.int64), np.zeros(1, np.int64)
    arguments = (counters.ctypes.data, size.ctypes.data)
    queue = NativeQueue(
        [team_call(2), kernel_call(count_visit, arguments, "a"), kernel_call(count_visit, arguments, "b")]
    )
    queue.launch()
    tracemalloc.start()
    try:
        queue.launch()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(100_000):
            queue.launch()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 4096
    assert counters[0] == 2 * 100_002


def test_contexts_live_as_long_as_the_queue() -> None:
    counters, size = np.zeros(16, np.int64), np.zeros(1, np.int64)
    queue = NativeQueue([kernel_call(count_visit, (counters.ctypes.data, size.ctypes.data), "count")])
    filler = [np.full(ARGS + 2, -1, np.int64) for _ in range(2000)]
    queue.launch()
    assert counters[0] == 1
    assert len(filler) == 2000


def test_the_team_size_holds_in_the_launching_thread() -> None:
    counters, size = np.zeros(16, np.int64), np.zeros(1, np.int64)
    queue = NativeQueue([team_call(3)])
    seen = []

    def launch() -> None:
        queue.launch()
        seen.append(runtime().library.omp_get_max_threads())

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert seen == [3]
    assert runtime().library.omp_get_max_threads() == 2, "the size belongs to a thread"
    assert counters.sum() + size.sum() == 0


def test_openmp_leaves_no_name_in_dev_shm_that_a_killed_process_could_not_remove() -> None:
    configure(2)
    assert not [name for name in os.listdir("/dev/shm") if str(os.getpid()) in name]


def test_threads_are_configured_by_name() -> None:
    assert str(configure(2, "passive")) == "compute threads 2, waiting passive (sleep at once)"
    assert configure(1, "active").blocktime_ms == runtime().library.kmp_get_blocktime() == 1
    with pytest.raises(ValueRejected, match="compute threads: 0"):
        configure(0)
    with pytest.raises(ValueRejected, match="wait policy 'sleepy'; expected one of: passive, active"):
        configure(1, "sleepy")


def test_a_dump_names_every_call() -> None:
    assert NativeQueue([team_call(2), kernel_call(fail_with, (0,), "RANGE_CLEAR #0")]).dump().splitlines() == [
        "   0  team of 2",
        "   1  RANGE_CLEAR #0",
    ]


@pytest.mark.parametrize("variable", LIMIT_VARIABLES)
def test_a_team_that_cannot_be_had_is_refused_instead_of_waited_for(variable: str) -> None:
    """Launched all the same, oneDNN's barriers would wait for the missing threads for ever."""
    code = "from renaissance.backend.cpu.threads import configure; configure(2); configure(3)"
    run = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {variable: "2"}, capture_output=True, text=True, timeout=60
    )
    assert f"compute threads: 3; the OpenMP runtime allows 2: unset {LIMIT_VARIABLES[0]} and" in run.stderr


def test_a_runtime_told_to_open_no_team_opens_ours() -> None:
    code = (
        "from renaissance.backend.cpu.threads import configure, runtime; configure(2); "
        "print(runtime().library.omp_get_max_active_levels())"
    )
    environment = os.environ | {"OMP_MAX_ACTIVE_LEVELS": "0"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert run.stdout == "1\n", run.stderr
