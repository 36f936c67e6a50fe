"""Kernels of the stand-in: .cu files built for the CPU, with what a driver checks before a launch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from cuda_standin.errors import CudaError

if TYPE_CHECKING:
    from cuda_emulator import Kernel, Module

MAX_DYNAMIC_SHARED = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""
USUAL_SHARED = 48 * 1024
OPT_IN_SHARED = 99 * 1024
"""Bytes of shared memory of a block that every supported architecture allows after opting in (sm_86, sm_89, sm_120)."""
MAX_THREADS = 1024
MAX_BLOCK = (1024, 1024, 64)
MAX_GRID = (2**31 - 1, 65535, 65535)
Dim = tuple[int, int, int]
Pointer = tuple[str, int, bool]
"""Which argument, its address, and whether the kernel only reads there."""
SCALARS: dict[str, type[ctypes._SimpleCData]] = {
    "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
    "f32": ctypes.c_float,
    "f64": ctypes.c_double,
}


@cache
def _module(path: str) -> Module:
    from cuda_emulator import Module  # needs a C++ compiler

    return Module(path)


class DeviceModule:
    """A loaded module."""

    def __init__(self, path: str) -> None:
        self._module, self._path = _module(path), path

    def function(self, name: str) -> DeviceFunction:
        if name not in self._module.kernels:
            raise CudaError("SymbolNotFound", f"no kernel {name} in {self._path}")
        return DeviceFunction(self._module.kernels[name])


class DeviceFunction:
    """A kernel of a loaded module."""

    def __init__(self, kernel: Kernel) -> None:
        self.name = kernel.name
        self._kernel = kernel
        self._shared = USUAL_SHARED

    def set_attribute(self, attribute: int, value: int) -> None:
        """Opt in to more dynamic shared memory than usual."""
        if attribute != MAX_DYNAMIC_SHARED:
            raise CudaError("InvalidValue", f"{self.name}: attribute {attribute}; expected {MAX_DYNAMIC_SHARED}")
        if not 0 <= value <= OPT_IN_SHARED:
            raise CudaError("InvalidValue", f"{self.name}: {value} bytes of shared memory; at most {OPT_IN_SHARED}")
        self._shared = max(value, USUAL_SHARED)

    def bound(self, grid: Dim, block: Dim, shared: int, params: int) -> tuple[Callable[[], None], list[Pointer]]:
        """A launch with a copy of the arguments at ``params``, and its pointers."""
        self._check(grid, block, shared)
        signature = self._kernel.params
        raw = (ctypes.c_void_p * max(1, len(signature))).from_address(params)
        values: list[ctypes._SimpleCData] = []
        pointers: list[Pointer] = []
        for i, kind in enumerate(signature):
            source = raw[i]
            if source is None:
                raise CudaError("InvalidValue", f"{self.name}: argument {i} ({kind}) is missing")
            if kind.endswith("*"):
                address = ctypes.c_void_p.from_address(source).value or 0
                values.append(ctypes.c_void_p(address))
                pointers.append((f"argument {i} ({kind})", address, kind.startswith("const ")))
            else:
                held = SCALARS[kind]
                values.append(held(held.from_address(source).value))
        packed = (ctypes.c_void_p * max(1, len(values)))(*(ctypes.addressof(v) for v in values))
        kernel = self._kernel

        def run(kept: object = values) -> None:
            kernel.launch(grid, block, shared, packed)

        return run, pointers

    def _check(self, grid: Dim, block: Dim, shared: int) -> None:
        for what, given, most in (("grid", grid, MAX_GRID), ("block", block, MAX_BLOCK)):
            if any(not 1 <= g <= m for g, m in zip(given, most, strict=True)):
                raise CudaError("InvalidConfiguration", f"{self.name}: {what} {given}; at least 1, at most {most}")
        threads = block[0] * block[1] * block[2]
        most = min(MAX_THREADS, getattr(self._kernel, "max_threads", None) or MAX_THREADS)
        if threads > most:
            raise CudaError("InvalidConfiguration", f"{self.name}: {threads} threads in a block; at most {most}")
        if shared > self._shared:
            raise CudaError(
                "InvalidValue", f"{self.name}: {shared} bytes of dynamic shared memory; at most {self._shared}"
            )
