"""A small machine for the tests of the stand-in: streams, page-locked arrays, and kernels of a few lines."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from cuda_standin import FakeCuda

from renaissance.backend.cuda.calls import Buffer, KernelCall, Scalar
from renaissance.backend.cuda.runtime import DISABLE_TIMING, NON_BLOCKING, THREAD_LOCAL, CopyKind

SOURCE = """
extern "C" __global__ void scaled(const float* x, const float* rate, float* y, float offset, int n)
{
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = x[i] * rate[0] + offset;
}
extern "C" __global__ void shared_sum(const float* x, float* y, int n)
{
    extern __shared__ float part[];
    for (int i = threadIdx.x; i < n; i += blockDim.x) part[i] = x[i];
    __syncthreads();
    if (threadIdx.x == 0) { float s = 0; for (int i = 0; i < n; i++) s += part[i]; y[0] = s; }
}
extern "C" __global__ void past_the_end(float* y, int n) { y[n + threadIdx.x] = 1.0f; }
"""


class Bench:
    """``streams`` of a FakeCuda; calls are issued to it as a device would."""

    def __init__(self, folder: Path, streams: int = 3, **options: Any) -> None:
        self.runtime = self.fake = FakeCuda(**options)
        self.streams = [self.fake.streamCreateWithPriority(NON_BLOCKING, 0) for _ in range(streams)]
        self._file = folder / "bench.cu"
        self._file.write_text(SOURCE)
        self._functions: dict[str, int] = {}
        self._module = 0

    def function(self, module: str, name: str) -> int:
        if name not in self._functions:
            self._module = self._module or self.fake.moduleLoadData(str(self._file).encode())
            self._functions[name] = self.fake.moduleGetFunction(self._module, name)
        return self._functions[name]

    def pinned(self, values: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Page-locked float32."""
        array = np.array(values, np.float32)
        address = self.fake.hostAlloc(array.nbytes, 0)
        held = np.frombuffer((ctypes.c_uint8 * array.nbytes).from_address(address), np.float32)
        held[:] = array.reshape(-1)
        return held

    def buffer(self, count: int, name: str) -> Buffer:
        """``count`` float32 on the device."""
        ptr = self.fake.malloc(4 * count)
        self.fake.name_range(ptr, 4 * count, name)
        return Buffer(ptr, 4 * count)

    def values(self, buffer: Buffer) -> npt.NDArray[np.float32]:
        """What lies on the device now, without waiting for anything."""
        return np.frombuffer(ctypes.string_at(buffer.ptr, buffer.nbytes), np.float32)

    def send(self, target: Buffer, source: npt.NDArray[np.float32], stream: int) -> None:
        self.fake.memcpyAsync(
            target.ptr, source.ctypes.data, source.nbytes, CopyKind.HOST_TO_DEVICE, self.streams[stream]
        )

    def fetch(self, target: npt.NDArray[np.float32], source: Buffer, stream: int) -> None:
        self.fake.memcpyAsync(
            target.ctypes.data, source.ptr, target.nbytes, CopyKind.DEVICE_TO_HOST, self.streams[stream]
        )

    def scaled(self, x: Buffer, rate: Buffer, y: Buffer, stream: int, offset: float = 0.0) -> None:
        """y = x * rate + offset."""
        count = Scalar(ctypes.c_int32, y.nbytes // 4)
        args = (x, rate, y, Scalar(ctypes.c_float, offset), count)
        KernelCall("bench", "scaled", (1, 1, 1), (32, 1, 1), args, "scaled").issue(self, self.streams[stream])

    def fill(self, target: Buffer, stream: int, value: int = 0) -> None:
        self.fake.memsetAsync(target.ptr, value, target.nbytes, self.streams[stream])

    def after(self, stream: int, other: int) -> None:
        """``stream`` waits for all that has been issued to ``other``."""
        event = self.fake.eventCreateWithFlags(DISABLE_TIMING)
        self.fake.eventRecord(event, self.streams[other])
        self.fake.streamWaitEvent(self.streams[stream], event)

    def begin(self, stream: int = 0) -> None:
        self.fake.streamBeginCapture(self.streams[stream], THREAD_LOCAL)

    def end(self, stream: int = 0) -> int:
        """The handle of the executable graph."""
        return self.fake.graphInstantiate(self.fake.streamEndCapture(self.streams[stream]))

    def wait(self, stream: int = 0) -> None:
        self.fake.streamSynchronize(self.streams[stream])
