"""One node of backend "cuda" on a device: the harness of tests/cuda_host with device memory behind its arrays."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from cuda_bench import CudaBench, carry_out
from op_cases import Case

from renaissance.backend.cuda.calls import Buffer, CudaCall
from renaissance.backend.cuda.device import DeviceContext
from renaissance.backend.cuda.libraries import Convolutions, Products
from renaissance.backend.cuda.pinned import PinnedBlock
from renaissance.backend.cuda.runtime import CopyKind
from renaissance.core.dtype import DType

GUARD = 256
"""Bytes before and after each operand that no kernel may touch."""
PATTERN = 0xA5


class GpuBench(CudaBench):
    """Arrays live on the host; ``run`` takes them to the device and brings them back."""

    def __init__(self, device: DeviceContext, half: DType | None) -> None:
        super().__init__(half)
        self._device = device
        self._places: list[tuple[int, npt.NDArray[np.uint8], str]] = []

    def _allocate(self, nbytes: int, name: str) -> tuple[Buffer, npt.NDArray[np.uint8]]:
        ptr = self._device.runtime.malloc(nbytes + 2 * GUARD)
        data = np.full(nbytes + 2 * GUARD, PATTERN, np.uint8)
        data[GUARD : GUARD + nbytes] = 0xFF
        self._places.append((ptr, data, name))
        return Buffer(ptr + GUARD, nbytes), data[GUARD : GUARD + nbytes]

    @property
    def convolutions(self) -> Convolutions:
        return self._device.convolutions

    @property
    def products(self) -> Products:
        return self._device.products

    def run(self, calls: Iterable[CudaCall]) -> None:
        """Issue the calls on the origin stream and wait; operands are brought back, and their guards looked at."""
        self._copy(CopyKind.HOST_TO_DEVICE)
        for call in calls:
            call.issue(self._device, self._device.origin)
        self._device.synchronize()
        self._copy(CopyKind.DEVICE_TO_HOST)
        for _, data, name in self._places:
            guards = np.concatenate([data[:GUARD], data[-GUARD:]])
            assert (guards == PATTERN).all(), f"bytes beside {name} were written"

    def _copy(self, kind: CopyKind) -> None:
        runtime, origin = self._device.runtime, self._device.origin
        block = PinnedBlock(runtime, max(data.size for _, data, _ in self._places))
        for ptr, data, _ in self._places:
            if kind is CopyKind.HOST_TO_DEVICE:
                block.bytes[: data.size] = data
                runtime.memcpyAsync(ptr, block.buffer.ptr, data.size, kind, origin)
            else:
                runtime.memcpyAsync(block.buffer.ptr, ptr, data.size, kind, origin)
            self._device.synchronize()
            if kind is CopyKind.DEVICE_TO_HOST:
                data[:] = block.bytes[: data.size]
        block.free()

    def close(self) -> None:
        for ptr, _, _ in self._places:
            self._device.runtime.free(ptr)
        self._places.clear()


def run_case(device: DeviceContext, case: Case, f: DType) -> GpuBench:
    """The bench after one node has run; its arrays hold the results. To be closed."""
    bench = GpuBench(device, f if f.is_half else None)
    carry_out(bench, case, f)
    return bench
