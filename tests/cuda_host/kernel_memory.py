"""Kernels of kernels/*.cu on arrays between guard pages, without a node: for tests of what a kernel does with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from cuda_bench import KERNELS, launch, module
from cuda_emulator import GuardedMemory
from op_cases import loaded, stored

from renaissance.backend.cuda.calls import Buffer, CudaCall, KernelCall
from renaissance.core.dtype import DType

F32 = npt.NDArray[np.float32]


class Memory:
    """Arrays that kernels run on; what one is to overwrite starts as NaN."""

    def __init__(self) -> None:
        self._guarded = GuardedMemory()
        self._arrays: dict[int, npt.NDArray[Any]] = {}

    def put(self, values: npt.ArrayLike, dtype: DType = DType.FP32) -> Buffer:
        """These values, rounded once."""
        return self.keep(stored(np.asarray(values, np.float64), "f", dtype))

    def keep(self, raw: npt.NDArray[Any]) -> Buffer:
        """These bytes."""
        array = self._guarded.array(raw)
        self._arrays[array.ctypes.data] = array
        return Buffer(array.ctypes.data, array.nbytes)

    def empty(self, *shape: int, dtype: DType = DType.FP32) -> Buffer:
        return self.put(np.full(shape, np.nan), dtype)

    def raw(self, buffer: Buffer) -> npt.NDArray[Any]:
        """The elements as they lie there, to be read and written."""
        return self._arrays[buffer.ptr]

    def get(self, buffer: Buffer, dtype: DType = DType.FP32) -> F32:
        with np.errstate(invalid="ignore"):  # a signalling NaN is data here
            return loaded(self.raw(buffer), "f", dtype).astype(np.float32)

    def run(self, *calls: CudaCall, race: bool = False, grid: int | None = None) -> None:
        """Launch kernels, on another grid if given. Raises KernelError."""
        for call in calls:
            assert isinstance(call, KernelCall)
            sized = call if grid is None else replace(call, grid=(grid, 1, 1))
            launch(module(KERNELS / f"{call.module}.cu", race)[call.function], sized)
        self._guarded.check()


def narrow(values: F32, dtype: DType) -> npt.NDArray[Any]:
    """As a tensor holds float32 values."""
    return stored(values.astype(np.float64), "f", dtype)
