"""Every mistake that a GPU may hide is found on the CPU, and named: deliberately wrong kernels, one for each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_bench import CudaBench, launch, needs_compiler
from cuda_emulator import GuardedMemory, KernelError, Module, thread_order

from renaissance.backend.cuda.calls import Buffer, KernelCall, f32, i32, i64

pytestmark = needs_compiler
FOLDER = Path(__file__).parent / "kernels_for_tests"


@pytest.fixture(scope="module")
def wrong() -> Module:
    return Module(FOLDER / "wrong.cu")


@pytest.fixture(scope="module")
def racing() -> Module:
    return Module(FOLDER / "wrong.cu", race=True)


def floats(count: int) -> Any:
    return np.zeros(count, np.float32)


@pytest.mark.parametrize(
    ("kernel", "threads", "arguments", "message"),
    [
        ("divergent_barrier", 64, [floats(64)], r"divergent __syncthreads: some threads are at wrong\.cu:\d+"),
        ("skipped_barrier", 64, [floats(64)], "divergent __syncthreads"),
        (
            "shuffle_after_return",
            32,
            [floats(1), 20],
            r"wrong\.cu:\d+: .* names lanes that have returned",
        ),
        (
            "shuffle_of_half_a_warp",
            32,
            [floats(32)],
            "names lanes that have returned|for its warp",
        ),
        ("past_shared_memory", 32, [floats(32)], r"wrong\.cu:\d+: array index out of bounds \(32\), thread \(31,0,0\)"),
        ("overflowing_product", 1, [floats(1), 70_000, 70_000], "signed multiplication overflow"),
        ("division_by_zero", 1, [floats(1), 0], "division by zero"),
        ("larger_than_its_bounds", 96, [floats(96)], "a block of 96 threads; __launch_bounds__ allows 64"),
        ("without_end", 1, [floats(2)], "memory fault"),
        ("past_the_end", 2048, [floats(1), 0], "a block of 2048 threads"),
    ],
)
def test_a_mistake_is_found_in_every_order_of_threads(
    wrong: Module, kernel: str, threads: int, arguments: list[Any], message: str
) -> None:
    for order in (0, 1, 2):
        with thread_order(order), pytest.raises(KernelError, match=message):
            wrong[kernel]((1,), (threads,), arguments)


def test_a_missing_barrier_shows_in_another_order_and_is_named_by_the_race_check(wrong: Module, racing: Module) -> None:
    results = []
    for order in (0, 1, 2):
        y = floats(256)
        with thread_order(order):
            wrong["missing_barrier"]((1,), (256,), [y])
        results.append(y)
    assert np.isnan(results[0]).any()
    assert not np.array_equal(results[0], results[1], equal_nan=True)
    with pytest.raises(KernelError, match="race on shared memory: read by thread 127 of block 0, then"):
        racing["missing_barrier"]((1,), (256,), [floats(256)])


def test_a_missing_second_barrier_is_a_race(racing: Module) -> None:
    for order in (0, 1, 5):
        with thread_order(order), pytest.raises(KernelError, match="race on shared memory"):
            racing["missing_second_barrier"]((1,), (64,), [floats(66), floats(64)])


def test_blocks_that_share_a_sum_race_and_threads_that_share_a_pack(racing: Module) -> None:
    with pytest.raises(KernelError, match="race on global memory: written by thread 0 of block 0, then read"):
        racing["unordered_sum"]((4,), (1,), [floats(1)])
    with pytest.raises(KernelError, match="written by thread 30 of block 0, then written by thread 31"):
        racing["overlapping_packs"]((1,), (32,), [np.zeros(256, np.float16)])


def test_shared_memory_that_nobody_wrote_is_nan_in_every_block(wrong: Module) -> None:
    y = floats(64)
    wrong["unwritten_shared_memory"]((3,), (64,), [y])
    assert np.isnan(y).all()


def test_more_dynamic_shared_memory_than_asked_for(wrong: Module) -> None:
    wrong["past_dynamic_shared_memory"]((1,), (32,), [floats(32)], shared=128)
    with pytest.raises(KernelError, match="wrote past its 124 bytes of dynamic shared memory"):
        wrong["past_dynamic_shared_memory"]((1,), (32,), [floats(32)], shared=124)


def test_misaligned_vector(wrong: Module) -> None:
    x = GuardedMemory().array(floats(64))
    with pytest.raises(KernelError, match=r"wrong\.cu:\d+: misaligned address \(4\)"):
        wrong["misaligned_vector"]((1,), (1,), [x, floats(1)])


def test_an_access_past_a_page_ends_the_launch_and_not_the_process(wrong: Module) -> None:
    memory = GuardedMemory()
    y = memory.array(floats(64), "y")
    for far in (5000, -5000):
        with pytest.raises(KernelError, match=r"past_the_end: memory fault at 0x[0-9a-f]+, thread"):
            wrong["past_the_end"]((1,), (32,), [y.ctypes.data + far, 10])
    memory.check()
    wrong["past_the_end"]((1,), (32,), [y, 31])
    assert y[:32].all()


def test_an_access_just_past_an_array_is_found_by_its_guards() -> None:
    bench = CudaBench(None, kernels=FOLDER)
    found = bench.memory.allocate(100, "y")
    with pytest.raises(KernelError, match="written 0 bytes past the 100 bytes of y"):
        bench.run([KernelCall("wrong", "past_the_end", (1, 1, 1), (32, 1, 1), (Buffer(found.ptr, 100), i32(25)), "")])


def test_wrong_arguments_are_refused(wrong: Module) -> None:
    kernel = wrong["past_the_end"]
    with pytest.raises(KernelError, match=r"past_the_end\(f32\*, i32\) takes 2 arguments, got 1"):
        kernel((1,), (32,), [floats(4)])
    with pytest.raises(KernelError, match=r"argument 0 is an array of float64, the kernel takes f32\*"):
        kernel((1,), (32,), [np.zeros(4), 4])
    with pytest.raises(KernelError, match="argument 1 is 4294967296, which i32 cannot hold"):
        kernel((1,), (32,), [floats(4), 1 << 32])
    y = Buffer(floats(4).ctypes.data, 16)
    for arguments, message in (
        ((y,), "takes 2 arguments, got 1"),
        ((y, i64(1)), "argument 1 is a c_long, the kernel takes i32"),
        ((y, f32(1.0)), "argument 1 is a c_float, the kernel takes i32"),
        ((y, y), "argument 1 is a buffer, the kernel takes i32"),
        ((i64(1), i32(1)), r"argument 0 is a c_long, the kernel takes f32\*"),
    ):
        with pytest.raises(KernelError, match=message):
            launch(kernel, KernelCall("wrong", "past_the_end", (1, 1, 1), (32, 1, 1), arguments, "OP #1"))
    with pytest.raises(KernelError, match="blocks of 33 threads; expected a multiple of 32"):
        launch(kernel, KernelCall("wrong", "past_the_end", (1, 1, 1), (33, 1, 1), (y, i32(1)), "OP #1"))
    with pytest.raises(KernelError, match=r"wrong\.cu has no kernel 'missing'; it has missing_barrier"):
        wrong["missing"]


def test_writing_to_what_a_restrict_pointer_reads_is_refused() -> None:
    kernel = Module(FOLDER / "right.cu")["row_sums"]
    assert [p.is_restrict for p in kernel.params] == [True, True, True, False]
    x, sums, exact = (Buffer(4096 * i, 400) for i in range(1, 4))
    launched = KernelCall("right", "row_sums", (1, 1, 1), (32, 1, 1), (), "OP #1")
    for sums, message in ((x, "pointer 0 is __restrict__, and pointer 1"), (exact.part(396, 4), "pointer 1 is .* 2")):
        with pytest.raises(KernelError, match=message):
            launch(kernel, replace(launched, args=(x, sums, exact, i32(1))))


def test_what_the_dialect_does_not_have_does_not_compile(tmp_path: Path) -> None:
    for code, message in (
        ("atomicAdd(y, 1.0f);", "floating-point atomics"),
        ("y[0] = INFINITY;", "INFINITY"),
        ("uint32_t i = 0; y[i] = 0;", "uint32_t"),
        ('asm("mov.u32 %0, %laneid;" : "=r"(*(int*)y));', "asm"),
    ):
        file = tmp_path / "no.cu"
        file.write_text(f'#include "dialect.cuh"\nextern "C" __global__ void no(float* y) {{ {code} }}\n')
        with pytest.raises(KernelError, match=message):
            Module(file)
    (tmp_path / "none.cu").write_text("__global__ void not_exported(float* y) {}\n")
    with pytest.raises(KernelError, match="has no kernel"):
        Module(tmp_path / "none.cu")
