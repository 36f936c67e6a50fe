"""Right kernels give right numbers on the CPU, in every order of threads, and pass the race check."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cuda_bench import needs_compiler
from cuda_emulator import GuardedMemory, Module, thread_order

from renaissance.core.dtype import bf16_from_fp32, fp32_from_bf16

pytestmark = needs_compiler
FILE = Path(__file__).parent / "kernels_for_tests" / "right.cu"
ORDERS = (0, 1, 5)


@pytest.fixture(scope="module", params=[False, True], ids=["checked", "race"])
def right(request: pytest.FixtureRequest) -> Module:
    return Module(FILE, race=request.param)


@pytest.fixture(params=ORDERS)
def order(request: pytest.FixtureRequest) -> Iterator[None]:
    with thread_order(request.param):
        yield


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


@pytest.mark.usefixtures("order")
def test_packs_of_three_types_and_a_tail(right: Module) -> None:
    x = normal(1003) * np.float32(1000)
    memory = GuardedMemory()
    for suffix, stored, expected in (
        ("f32", x, x * np.float32(0.3)),
        ("f16", x.astype(np.float16), (x.astype(np.float16).astype(np.float32) * np.float32(0.3)).astype(np.float16)),
        ("bf16", bf16_from_fp32(x), bf16_from_fp32(fp32_from_bf16(bf16_from_fp32(x)) * np.float32(0.3))),
    ):
        source, y = memory.array(stored, "x"), memory.array(np.zeros_like(stored), "y")
        right[f"scale_{suffix}"]((3, 1, 1), (256, 1, 1), [source, y, np.float32(0.3), 1003])
        np.testing.assert_array_equal(y, expected)
    memory.check()


def test_halves_round_as_numpy_does(right: Module) -> None:
    """Every binary16 number and its neighbourhood, among them ties, subnormal numbers, infinities and NaN."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    halves = bits.view(np.float16)
    memory = GuardedMemory()
    x, y = memory.array(halves), memory.array(np.zeros_like(halves))
    right["scale_f16"]((8,), (256,), [x, y, 1.0, bits.size])
    np.testing.assert_array_equal(y, halves)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = (halves.astype(np.float32) * np.float32(1.4142135)).astype(np.float16)
    right["scale_f16"]((8,), (256,), [x, y, np.float32(1.4142135), bits.size])
    np.testing.assert_array_equal(y, expected)


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("block", [(32, 1, 1), (8, 4, 4), (1, 2, 32), (1024, 1, 1)])
def test_sums_over_a_block_of_three_dimensions(right: Module, block: tuple[int, int, int]) -> None:
    x = normal(5, 333)
    sums, exact = np.zeros(5, np.float32), np.zeros(5)
    right["row_sums"]((5, 1, 1), block, [x, sums, exact, 333])
    np.testing.assert_allclose(sums, x.sum(axis=1, dtype=np.float64), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(exact, x.sum(axis=1, dtype=np.float64), rtol=1e-4, atol=1e-4)
    x[2, 100] = np.nan
    right["row_sums"]((5, 1, 1), block, [x, sums, exact, 333])
    assert np.isnan([sums[2], exact[2]]).all()


@pytest.mark.usefixtures("order")
def test_dynamic_shared_memory_atomics_ballots_and_votes(right: Module) -> None:
    x = normal(20, 10).astype(np.float16)
    y = np.zeros_like(x)
    right["flip_rows"]((10,), (32,), [x, y, 20], shared=40)
    np.testing.assert_array_equal(y, x[::-1])

    values = normal(1000)
    count, lanes = np.zeros(1, np.int32), np.zeros(32, np.uint32)
    right["count_positive"]((4,), (256,), [values, count, lanes, 1000])
    positive = np.append(values > 0, np.zeros(24, bool))
    assert count[0] == positive.sum()
    np.testing.assert_array_equal(lanes, np.packbits(positive, bitorder="little").view(np.uint32))

    for ones, twos in ((76, 0), (76, 1), (96, 0)):
        x96 = np.zeros(96, np.int32)
        x96[:ones], x96[:twos] = 1, 2
        result = np.zeros(96, np.int32)
        right["votes"]((1,), (96,), [x96, result])
        assert set(result) == {ones * 100 + bool(twos) * 10 + (ones == 96)}


def test_high_and_low_words_of_a_product(right: Module) -> None:
    x = np.random.default_rng(2).integers(0, 1 << 32, 100, dtype=np.uint32)
    y = np.zeros((100, 2), np.uint32)
    right["high_words"]((1,), (64,), [x, y, 0xD2511F53, 100])
    product = x.astype(np.uint64) * np.uint64(0xD2511F53)
    np.testing.assert_array_equal(y[:, 0], (product >> np.uint64(32)).astype(np.uint32))
    np.testing.assert_array_equal(y[:, 1], product.astype(np.uint32))


def test_numbers_below_the_smallest_normal_one_are_0_as_on_a_gpu(right: Module) -> None:
    x = np.array([1e-39, 2e-38, -1e-39, 1.0], np.float32)
    y = np.ones(4, np.float32)
    memory = GuardedMemory()
    right["scale_f32"]((1,), (32,), [memory.array(x), y, 0.25, 4])
    np.testing.assert_array_equal(y, np.array([0, 0, 0, 0.25], np.float32))
    assert np.float32(1e-39) * np.float32(0.5) != 0  # and only while a kernel runs


def test_signatures_are_those_of_the_compiled_kernels(right: Module) -> None:
    assert str(right["scale_bf16"]) == "scale_bf16(const bf16*, bf16*, f32, i64)"
    assert str(right["row_sums"]) == "row_sums(const f32*, f32*, f64*, i32)"
    assert list(right.kernels)[:3] == ["scale_f32", "scale_f16", "scale_bf16"]


def test_processes_that_build_the_same_file_at_once_all_get_it(tmp_path: Path) -> None:
    (tmp_path / "one.cu").write_text('extern "C" __global__ void one(int* y) { y[0] = 1; }\n')
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]; import numpy as np; from cuda_emulator import Module\n"
        "y = np.zeros(1, np.int32); Module(sys.argv[1])['one']((1,), (1,), [y]); print(y[0])"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "one.cu"), str(Path(__file__).parent)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate()[0] for process in running] == ["1\n"] * 3
