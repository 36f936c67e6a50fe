"""The whole surface of CUDA that the backend touches: integer handles and integer addresses only.

Names and arguments are those of ``cupy.cuda.runtime`` and ``cupy.cuda.driver``, so the real implementation only picks
them from these two modules. A stand-in with the same surface (tests/cuda_host) runs everything above it without a GPU,
and refuses what a capture forbids. No CuPy array, memory pool, RawModule or BLAS call is used anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from types import SimpleNamespace
from typing import Protocol, cast


class CopyKind(IntEnum):
    """cudaMemcpyKind."""

    HOST_TO_DEVICE = 1
    DEVICE_TO_HOST = 2
    DEVICE_TO_DEVICE = 3


NON_BLOCKING = 1
"""cudaStreamNonBlocking: no implicit order with the legacy stream."""
DISABLE_TIMING = 2
"""cudaEventDisableTiming."""
THREAD_LOCAL = 1
"""cudaStreamCaptureModeThreadLocal: what this thread may not do while it captures is an error, other threads go on."""


class CudaRuntime(Protocol):
    """Every call of CUDA that the backend makes. Errors are exceptions."""

    # devices
    def setDevice(self, device: int) -> None: ...  # noqa: N802  # CUDA's own names, here and below
    def deviceSynchronize(self) -> None: ...  # noqa: N802

    # memory
    def malloc(self, size: int) -> int: ...
    def free(self, ptr: int) -> None: ...
    def hostAlloc(self, size: int, flags: int) -> int: ...  # noqa: N802
    def freeHost(self, ptr: int) -> None: ...  # noqa: N802
    def hostRegister(self, ptr: int, size: int, flags: int) -> None: ...  # noqa: N802
    def hostUnregister(self, ptr: int) -> None: ...  # noqa: N802
    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None: ...  # noqa: N802
    def memsetAsync(self, ptr: int, value: int, size: int, stream: int) -> None: ...  # noqa: N802

    # streams and events
    def streamCreateWithPriority(self, flags: int, priority: int) -> int: ...  # noqa: N802
    def streamDestroy(self, stream: int) -> None: ...  # noqa: N802
    def streamSynchronize(self, stream: int) -> None: ...  # noqa: N802
    def streamWaitEvent(self, stream: int, event: int, flags: int = 0) -> None: ...  # noqa: N802
    def eventCreateWithFlags(self, flags: int) -> int: ...  # noqa: N802
    def eventDestroy(self, event: int) -> None: ...  # noqa: N802
    def eventRecord(self, event: int, stream: int) -> None: ...  # noqa: N802
    def eventQuery(self, event: int) -> int: ...  # noqa: N802  # 0: done; cudaErrorNotReady otherwise
    def eventSynchronize(self, event: int) -> None: ...  # noqa: N802

    # capture and graphs
    def streamBeginCapture(self, stream: int, mode: int) -> None: ...  # noqa: N802
    def streamEndCapture(self, stream: int) -> int: ...  # noqa: N802
    def streamIsCapturing(self, stream: int) -> bool: ...  # noqa: N802
    def graphInstantiate(self, graph: int) -> int: ...  # noqa: N802
    def graphUpload(self, graphExec: int, stream: int) -> None: ...  # noqa: N802
    def graphLaunch(self, graphExec: int, stream: int) -> None: ...  # noqa: N802
    def graphDestroy(self, graph: int) -> None: ...  # noqa: N802
    def graphExecDestroy(self, graphExec: int) -> None: ...  # noqa: N802

    # modules and kernels
    def moduleLoadData(self, image: bytes) -> int: ...  # noqa: N802
    def moduleGetFunction(self, module: int, funcname: str) -> int: ...  # noqa: N802
    def launchKernel(  # noqa: N802
        self,
        f: int,
        grid_dim_x: int,
        grid_dim_y: int,
        grid_dim_z: int,
        block_dim_x: int,
        block_dim_y: int,
        block_dim_z: int,
        shared_mem_bytes: int,
        stream: int,
        kernel_params: int,
        extra: int,
    ) -> None: ...

    # beside CUDA: nothing on a GPU; names and extents for the checks of the stand-in
    def hint(self, sizes: Sequence[int]) -> None:
        """Bytes behind each pointer argument of the next launch."""

    def name_range(self, ptr: int, size: int, name: str) -> None:
        """What lies in a piece of device memory, for messages."""


DRIVER_CALLS = ("moduleLoadData", "moduleGetFunction", "launchKernel")
BESIDE_CUDA = ("hint", "name_range")


def calls() -> tuple[str, ...]:
    """Names of the calls of CUDA, without those beside it."""
    return tuple(n for n in vars(CudaRuntime) if not n.startswith("_") and n not in BESIDE_CUDA)


def cupy_runtime() -> CudaRuntime:
    """CUDA itself, through CuPy. Imports CuPy only now; raises ImportError without it."""
    from cupy.cuda import driver, runtime

    found = {name: getattr(driver if name in DRIVER_CALLS else runtime, name) for name in calls()}
    beside = {"hint": lambda sizes: None, "name_range": lambda ptr, size, name: None}
    return cast(CudaRuntime, SimpleNamespace(**found, **beside))
