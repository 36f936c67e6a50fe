"""The harness of the kernels' tests sees what it is there for: wrong values, other bits, touched neighbours, races."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import cuda_bench
import numpy as np
import pytest
from cuda_bench import check, needs_compiler
from cuda_emulator import KernelError
from op_cases import Case, In, Out

from renaissance.backend.cuda.calls import Buffer, CopyCall, CudaCall, CudaContext, FillCall, KernelCall, i32
from renaissance.graph import Node

pytestmark = needs_compiler
SHAPE = (2, 4, 4, 8)
CASE = Case(
    "GRAD_SUM",
    "two tensors",
    (In("a", np.arange(256.0).reshape(SHAPE) / 64), In("b", np.ones(SHAPE))),
    (Out("dx", SHAPE),),
    linear=True,
)
KERNELS = """
#include "dialect.cuh"
extern "C" __global__ void add(const float* a, const float* b, float* y, int n)
{
    const int i = first_index();
    if (i < n) y[i] = a[i] + b[i];
}
// Rounded at the end of a sum whose order is that in which the threads come.
extern "C" __global__ void in_turn(const float* a, const float* b, float* y, int n)
{
    __shared__ int turn;
    if (threadIdx.x == 0) turn = 0;
    __syncthreads();
    const int mine = atomicAdd(&turn, 1);
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = a[i] + b[i] * (1.0f + 1e-9f * mine);
}
extern "C" __global__ void through_const(const float* a, const float* b, float* y, int n)
{
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = const_cast<float*>(a)[i] += b[i];
}
extern "C" __global__ void neighbours(const float* a, const float* b, float* y, int n)
{
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = a[i] + b[i];
    if (threadIdx.x == 0 && y[n - 1] != 0.0f) y[0] = a[0] + b[0];
}
"""
Launch = Callable[[Node, CudaContext], Sequence[CudaCall]]


@pytest.fixture(scope="module")
def own_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "own.cu").write_text(KERNELS)
    return folder


@pytest.fixture
def checked(own_kernels: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Launch], None]:
    """Runs ``check`` on CASE in fp32 with a launcher of the test's own."""
    monkeypatch.setattr(cuda_bench, "KERNELS", own_kernels)

    def run(launch: Launch) -> None:
        monkeypatch.setattr(cuda_bench, "launcher", lambda op: launch)
        check([CASE], [cuda_bench.DType.FP32])

    return run


def buffers(node: Node, ctx: CudaContext) -> tuple[Buffer, ...]:
    return tuple(ctx.buffer(i) for i in (*node.inputs, *node.outputs))


def launcher(kernel: str, blocks: int = 2, threads: int = 128, n: int = 256) -> Launch:
    def launch(node: Node, ctx: CudaContext) -> list[CudaCall]:
        arguments = (*buffers(node, ctx), i32(n))
        return [KernelCall("own", kernel, (blocks, 1, 1), (threads, 1, 1), arguments, "GRAD_SUM #7")]

    return launch


def test_a_right_kernel_passes(checked: Callable[[Launch], None]) -> None:
    checked(launcher("add"))


@pytest.mark.parametrize(
    ("launch", "error", "message"),
    [
        (launcher("add", n=255), AssertionError, "GRAD_SUM two tensors, FP32: Error"),
        (launcher("add", blocks=3, n=257), KernelError, "add: memory fault at"),
        (launcher("in_turn", blocks=1), AssertionError, "thread order 1 gives other bits in dx"),
        (launcher("through_const", blocks=1), KernelError, "a is an input and has changed"),
        (launcher("neighbours", blocks=1), KernelError, "race on global memory"),
        (launcher("add", threads=100), KernelError, "blocks of 100 threads"),
        (launcher("missing"), KernelError, "has no kernel 'missing'"),
    ],
)
def test_what_is_wrong_is_found(
    checked: Callable[[Launch], None], launch: Launch, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        checked(launch)


def test_scratch_memory_holds_nan_and_is_asked_for_once(checked: Callable[[Launch], None]) -> None:
    def from_scratch(node: Node, ctx: CudaContext) -> list[CudaCall]:
        return [CopyCall(ctx.buffer(node.outputs[0]), ctx.scratch(1024), "")]

    def twice(node: Node, ctx: CudaContext) -> list[CudaCall]:
        ctx.scratch(16)
        return [FillCall(ctx.scratch(16), "")]

    with pytest.raises(AssertionError, match="relative=inf"):
        checked(from_scratch)
    with pytest.raises(AssertionError, match="asks for scratch memory once"):
        checked(twice)
