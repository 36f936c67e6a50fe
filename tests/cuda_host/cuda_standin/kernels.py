"""Kernels of the stand-in: .cu files built for the CPU, with what a driver checks before a launch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from cuda_emulator import Kernel, KernelError, Module

from cuda_standin.errors import CudaError

MAX_SHARED = 48 * 1024
"""Bytes of shared memory of a block for a kernel that has not asked for more."""
MAX_THREADS = 1024
MAX_BLOCK = (1024, 1024, 64)
MAX_GRID = (2**31 - 1, 65535, 65535)
Dim = tuple[int, int, int]
Pointer = tuple[str, int, bool]
"""Which argument, its address, and whether the kernel only reads there."""


@cache
def _module(path: str) -> Module:
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
        self._kinds = [(str(p), p.ctype, p.is_pointer, p.is_const) for p in kernel.params]

    def bound(self, grid: Dim, block: Dim, shared: int, params: int) -> tuple[Callable[[], None], list[Pointer]]:
        """A launch with a copy of the arguments that ``params`` points at, and its pointers."""
        self._check(grid, block, shared)
        raw = (ctypes.c_void_p * max(1, len(self._kinds))).from_address(params)
        values: list[Any] = []
        pointers: list[Pointer] = []
        for i, (kind, ctype, is_pointer, is_const) in enumerate(self._kinds):
            source = raw[i]
            if source is None:
                raise CudaError("InvalidValue", f"{self.name}: argument {i} ({kind}) is missing")
            values.append(ctype(ctype.from_address(source).value))
            if is_pointer:
                pointers.append((f"argument {i} ({kind})", values[-1].value or 0, is_const))
        packed = (ctypes.c_void_p * (len(values) + 1))(*(ctypes.addressof(v) for v in values))
        kernel, address = self._kernel, ctypes.addressof(packed)

        def run(kept: object = (values, packed)) -> None:
            kernel.launch(grid, block, address, shared)

        return run, pointers

    def check_aliases(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Of (address, bytes) behind each pointer. Raises CudaError where a promise of ``__restrict__`` is broken."""
        try:
            self._kernel.check_aliases(ranges)
        except KernelError as error:
            raise CudaError("InvalidValue", str(error)) from None

    def _check(self, grid: Dim, block: Dim, shared: int) -> None:
        for what, given, most in (("grid", grid, MAX_GRID), ("block", block, MAX_BLOCK)):
            if any(not 1 <= g <= m for g, m in zip(given, most, strict=True)):
                raise CudaError("InvalidConfiguration", f"{self.name}: {what} {given}; at least 1, at most {most}")
        threads = block[0] * block[1] * block[2]
        if threads > MAX_THREADS:
            raise CudaError("InvalidConfiguration", f"{self.name}: {threads} threads in a block; at most {MAX_THREADS}")
        if shared > MAX_SHARED:
            raise CudaError("InvalidValue", f"{self.name}: {shared} bytes of shared memory; at most {MAX_SHARED}")
