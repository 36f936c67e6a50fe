"""The kernels of one .cu file as Python functions that check how they are called."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cuda_emulator.build import MOST_DYNAMIC_BYTES, Entry, KernelError, build, scan, scheduler

Dim = tuple[int, int, int]
_VALUES: dict[str, Any] = {
    "i8": ctypes.c_int8,
    "u8": ctypes.c_uint8,
    "i16": ctypes.c_int16,
    "u16": ctypes.c_uint16,
    "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
    "f32": ctypes.c_float,
    "f64": ctypes.c_double,
}
_ARRAYS = {
    **{f"{kind}{8 * size}": np.dtype(f"{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8)},
    **{f"f{8 * size}": np.dtype(f"f{size}") for size in (2, 4, 8)},
    "bf16": np.dtype("u2"),
}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a kernel. ``kind``: "f32", "f16", "bf16", "i64", ... of the value or of what is pointed to."""

    kind: str
    is_pointer: bool
    is_const: bool
    """Of a pointer: the kernel only reads there."""
    is_restrict: bool = False
    """The compiler may take it that nobody else reaches what the kernel reads or writes there."""

    def __str__(self) -> str:
        return f"{'const ' if self.is_pointer and self.is_const else ''}{self.kind}{'*' if self.is_pointer else ''}"

    @property
    def ctype(self) -> Any:
        """How the argument is passed. Raises KernelError for a structure by value."""
        if self.is_pointer:
            return ctypes.c_void_p
        if self.kind not in _VALUES:
            raise KernelError(f"a parameter of {self.kind} by value; pass numbers and pointers only")
        return _VALUES[self.kind]

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """The NumPy type of the elements behind a pointer (bit patterns for bf16); None for structures."""
        return _ARRAYS.get(self.kind)


class Kernel:
    """One ``extern "C" __global__`` function. Its parameters are those of the compiled function."""

    def __init__(self, library: ctypes.PyDLL, entry: Entry, file: str) -> None:
        self.name, self.file = entry.name, file
        signature = getattr(library, f"emulator_signature__{self.name}")
        signature.restype = ctypes.c_char_p
        self.params: tuple[Parameter, ...] = tuple(_parameters(signature().decode(), entry.restrict))
        self._launch = getattr(library, f"emulator_launch__{self.name}")
        self._launch.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.params))})"

    def __call__(self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared: int = 0) -> None:
        """Launch it and wait. A pointer is a NumPy array of the right type, or an address; ``shared`` is in bytes.

        Raises KernelError when the arguments do not fit, and for whatever the kernel does wrong.
        """
        if len(args) != len(self.params):
            raise KernelError(f"{self} takes {len(self.params)} arguments, got {len(args)}")
        values = [self._value(i, p, a) for i, (p, a) in enumerate(zip(self.params, args, strict=True))]
        params = (ctypes.c_void_p * (len(values) + 1))(*(ctypes.addressof(v) for v in values))
        self.launch(grid, block, ctypes.addressof(params), shared)

    def launch(self, grid: Sequence[int], block: Sequence[int], params: int, shared: int = 0) -> None:
        """Launch it with ``params``, the address of an array of addresses of the arguments, as cuLaunchKernel does."""
        if shared > MOST_DYNAMIC_BYTES:
            raise KernelError(f"{self.name}: {shared} bytes of dynamic shared memory; at most {MOST_DYNAMIC_BYTES}")
        sizes = (ctypes.c_uint * 6)(1, 1, 1, 1, 1, 1)
        sizes[: len(grid)] = list(grid)
        sizes[3 : 3 + len(block)] = list(block)
        if self._launch(sizes, shared, params):
            raise KernelError(f"{self.name}: {scheduler().emulator_error().decode()}")

    def check_aliases(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Raises KernelError when something is written that a ``__restrict__`` pointer reaches too: a GPU may then read
        what was there before, which does not show here. ``ranges``: (address, bytes) behind each pointer argument."""
        pointers = [p for p in self.params if p.is_pointer]
        for i, (one, (start, size)) in enumerate(zip(pointers, ranges, strict=True)):
            for j, (other, (begin, count)) in enumerate(zip(pointers, ranges, strict=True)):
                overlap = min(start + size, begin + count) > max(start, begin)
                if i != j and overlap and one.is_restrict and not (one.is_const and other.is_const):
                    raise KernelError(f"{self}: pointer {i} is __restrict__, and pointer {j} leads to the same bytes")

    def _value(self, number: int, parameter: Parameter, argument: Any) -> Any:
        where = f"{self}: argument {number}"
        if not parameter.is_pointer:
            value = parameter.ctype(argument)
            if parameter.kind[0] in "iu" and value.value != argument:
                raise KernelError(f"{where} is {argument}, which {parameter} cannot hold")
            return value
        if isinstance(argument, np.ndarray):
            array: npt.NDArray[Any] = argument
            if parameter.dtype is not None and array.dtype != parameter.dtype:
                raise KernelError(f"{where} is an array of {array.dtype}, the kernel takes {parameter}")
            if not array.flags.c_contiguous or (not parameter.is_const and not array.flags.writeable):
                raise KernelError(f"{where} is not an array in one piece that may be written")
            return ctypes.c_void_p(array.ctypes.data)
        return ctypes.c_void_p(int(argument))


class Module:
    """The kernels of a .cu file, by name. ``race``: the build that finds races, and neither indices nor alignment."""

    def __init__(self, path: Path | str, *, race: bool = False) -> None:
        self.path, self.race = Path(path), race
        source = scan(self.path)
        scheduler()
        # PyDLL: Python's lock is held, so that ranks that are threads run one kernel at a time
        library = ctypes.PyDLL(str(build(source, race=race)))
        self.kernels = {entry.name: Kernel(library, entry, self.path.name) for entry in source.kernels}

    def __getitem__(self, name: str) -> Kernel:
        try:
            return self.kernels[name]
        except KeyError:
            raise KernelError(f"{self.path.name} has no kernel {name!r}; it has {', '.join(self.kernels)}") from None


def set_thread_order(order: int) -> None:
    """Order in which threads and blocks run: 0 ascending, 1 descending, others shuffled in different ways."""
    scheduler().emulator_set_order(order)


@contextmanager
def thread_order(order: int) -> Iterator[None]:
    """As ``set_thread_order``, and ascending again afterwards."""
    set_thread_order(order)
    try:
        yield
    finally:
        set_thread_order(0)


def _parameters(codes: str, restrict: Sequence[bool]) -> Iterator[Parameter]:
    """From four characters each; see Describe in cuda_emulator.h."""
    for i in range(len(codes) // 4):
        how, constant, kind, size = codes[4 * i : 4 * i + 4]
        number = ord(size) - ord("0")
        name = {"h": "f16", "b": "bf16", "?": f"struct{number}"}.get(kind, f"{kind}{8 * number}")
        yield Parameter(name, how == "p", constant == "c", restrict[i])
