"""One node of backend "cuda" on the CPU: its launcher's calls, issued at once on the emulator, against exact float64.

    check(CASES["BN_FWD"])

runs every case in fp32, fp16 and bf16 in three orders of threads: the result lies within what op_cases allows, has the
same bits in every order, no byte beside an operand was touched, no input has changed; and small cases once more with
the race check. Products and convolutions are NumPy's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from cuda_emulator import GuardedMemory, Kernel, KernelError, Module, Parameter, compiler, thread_order
from cuda_emulator.build import build, scan
from op_cases import Case, compare, for_type, place_all, regions_of, registry, results_of, wiring

from renaissance.backend.cuda.calls import (
    Buffer,
    CopyCall,
    CudaCall,
    FillCall,
    KernelCall,
    LibraryCall,
    Scalar,
)
from renaissance.backend.cuda.libraries import Collectives, Convolutions, Products
from renaissance.backend.registry import Launcher
from renaissance.core.dtype import DType
from renaissance.core.errors import DeviceError
from renaissance.core.region import Region, Span
from renaissance.tensor.dtensor import DTensor

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
FLOATS = (DType.FP32, DType.FP16, DType.BF16)
ORDERS = (0, 1, 5)
RACE_ELEMENTS = 60_000
"""Operands of a case that runs under the race check have at most so many elements."""
RACE_CASES = 3
"""So many cases of each op run under the race check: the largest ones that are small enough."""
ALIGNMENT = 256

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no g++: CUDA kernels cannot be built for the CPU")


@cache
def module(path: Path, race: bool = False) -> Module:
    """The kernels of a file, loaded once per process."""
    started = _race_build(path)
    if race:
        started.join()
    return Module(path, race=race)


@cache
def _race_build(path: Path) -> Thread:
    """Begun with the first use of a file, while the other build is made and its kernels run: g++ uses one core."""

    def make() -> None:
        with suppress(KernelError):  # loading the module says so
            build(scan(path), race=True)

    thread = Thread(target=make, name=f"race build of {path.name}")
    thread.start()
    return thread


class Immediate:
    """What the stand-in libraries need of a FakeCuda: their operations run when they are issued."""

    capturing = False

    def library(self, stream: int, name: str, run: Any, reads: object, writes: object) -> None:
        run()

    def warm(self, key: int, name: str) -> None:
        pass

    def device_range(self, ptr: int, size: int, what: str) -> tuple[int, int]:
        return ptr, ptr + size


class CudaBench:
    """Tensors and spans of one node, each in guarded memory of its own; a ``CudaContext``, and where calls run."""

    validating = False

    def __init__(self, half: DType | None, *, race: bool = False, kernels: Path | None = None) -> None:
        self.half, self.race, self._kernels = half, race, kernels or KERNELS
        self.memory = GuardedMemory()
        self.names: dict[str, int] = {}
        self.preparations: list[CudaCall] = []
        self._tensors: list[DTensor] = []
        self._buffers: list[Buffer] = []
        self._bytes: list[npt.NDArray[np.uint8]] = []
        self._spans: dict[Span, tuple[Buffer, npt.NDArray[np.uint8]]] = {}
        self._shared: dict[tuple[Hashable, int], Buffer] = {}
        self._scratch: Buffer | None = None

    def _allocate(self, nbytes: int, name: str) -> tuple[Buffer, npt.NDArray[np.uint8]]:
        found = self.memory.allocate(nbytes, name)
        return Buffer(found.ptr, nbytes), found.bytes

    # Operands

    def adopt(self, tensor: DTensor) -> int:
        """A tensor with this descriptor, all NaN; its id must be the next one."""
        assert tensor.id == len(self._tensors)
        buffer, data = self._allocate(tensor.nbytes, tensor.name)
        self._tensors.append(tensor)
        self._buffers.append(buffer)
        self._bytes.append(data)
        self.names[tensor.name] = tensor.id
        return tensor.id

    def array(self, tensor_id: int) -> npt.NDArray[Any]:
        """The elements of a tensor [N,H,W,C], to be read and written."""
        tensor = self._tensors[tensor_id]
        return self._bytes[tensor_id].view(tensor.dtype.numpy).reshape(tensor.shape.dims)

    def add_span(self, region: Region, values: npt.NDArray[Any]) -> Span:
        """A span of one region that holds exactly ``values``."""
        span = Span(region, region)
        self._spans[span] = self._allocate(values.nbytes, region.name)
        self._spans[span][1][:] = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        return span

    def span_array(self, span: Span, dtype: DType) -> npt.NDArray[Any]:
        return self._spans[span][1].view(dtype.numpy)

    def all_bytes(self) -> dict[str, bytes]:
        """Every byte of every tensor and span, by name."""
        tensors = {t.name: d.tobytes() for t, d in zip(self._tensors, self._bytes, strict=True)}
        return tensors | {str(span): data.tobytes() for span, (_, data) in self._spans.items()}

    # CudaContext

    def tensor(self, tensor_id: int) -> DTensor:
        return self._tensors[tensor_id]

    def buffer(self, tensor_id: int) -> Buffer:
        return self._buffers[tensor_id]

    def span(self, span: Span) -> Buffer:
        return self._spans[span][0]

    def scratch(self, nbytes: int) -> Buffer:
        assert self._scratch is None, "a launcher asks for scratch memory once"
        self._scratch, _ = self._allocate(-(-nbytes // ALIGNMENT) * ALIGNMENT, "scratch")
        return self._scratch

    def shared(self, key: Hashable, nbytes: int) -> Buffer:
        if (key, nbytes) not in self._shared:
            self._shared[key, nbytes], _ = self._allocate(nbytes, f"shared {key}")
        return self._shared[key, nbytes]

    def prepare(self, key: Hashable, calls: Sequence[CudaCall]) -> None:
        assert self.validating, "a preparation outside validation"
        self.preparations.extend(calls)

    @property
    def convolutions(self) -> Convolutions:
        from cuda_standin.libraries import StandInConvolutions

        return StandInConvolutions(cast(Any, Immediate()))

    @property
    def products(self) -> Products:
        from cuda_standin.libraries import StandInProducts

        return StandInProducts(cast(Any, Immediate()))

    @property
    def collectives(self) -> Collectives:
        raise DeviceError("one rank")

    # Calls

    def run(self, calls: Iterable[CudaCall]) -> None:
        """Run them one after the other. Raises KernelError for a wrong kernel or a wrong call."""
        for call in calls:
            if isinstance(call, KernelCall):
                launch(module(self._kernels / f"{call.module}.cu", self.race)[call.function], call)
            elif isinstance(call, CopyCall):
                size = min(call.target.nbytes, call.source.nbytes)
                ctypes.memmove(call.target.ptr, call.source.ptr, size)
            elif isinstance(call, FillCall):
                ctypes.memset(call.target.ptr, call.value, call.target.nbytes)
            else:
                assert isinstance(call, LibraryCall), call
                call.run(0)
        self.memory.check()


def launch(kernel: Kernel, call: KernelCall) -> None:
    """Run a launch, and see that it is one: sizes and types are those that the compiled kernel has."""
    if len(call.args) != len(kernel.params):
        raise KernelError(f"{call.label}: {kernel} takes {len(kernel.params)} arguments, got {len(call.args)}")
    threads = call.block[0] * call.block[1] * call.block[2]
    if threads % 32:
        raise KernelError(f"{call.label}: {kernel.name} in blocks of {threads} threads; expected a multiple of 32")
    pairs = enumerate(zip(kernel.params, call.args, strict=True))
    values = [_value(f"{call.label}: {kernel}", i, p, a) for i, (p, a) in pairs]
    kernel.check_aliases([(a.ptr, a.nbytes) for a in call.args if isinstance(a, Buffer)])
    kernel(call.grid, call.block, values, call.shared)


def _value(where: str, number: int, parameter: Parameter, argument: Buffer | Scalar) -> int | float:
    if isinstance(argument, Buffer):
        if not parameter.is_pointer:
            raise KernelError(f"{where}: argument {number} is a buffer, the kernel takes {parameter}")
        return argument.ptr
    if parameter.is_pointer or argument.kind is not parameter.ctype:
        raise KernelError(f"{where}: argument {number} is a {argument.kind.__name__}, the kernel takes {parameter}")
    return argument.value


def launcher(op: str) -> Launcher:
    return registry("cuda").launcher(op, "cuda")


def run_case(case: Case, f: DType, order: int = 0, race: bool = False) -> CudaBench:
    """The bench after one node has run; raises KernelError for whatever it did wrong, changed inputs among it."""
    bench = CudaBench(f if f.is_half else None, race=race)
    with thread_order(order):
        carry_out(bench, case, f)
    return bench


def carry_out(bench: CudaBench, case: Case, f: DType) -> None:
    """Place the operands, run the node, and see that no input has changed."""
    case = for_type(case, f)
    wired, _ = wiring(case)
    place_all(bench, case, f)
    before = bench.all_bytes()
    calls = launcher(case.op)(wired, bench)
    bench.run((*bench.preparations, *calls))
    written = {o.name for o in case.outputs} | {r.name for r in regions_of(case)}
    for name, data in bench.all_bytes().items():
        if name not in written and data != before[name]:
            raise KernelError(f"{case.op} {case.title}: {name} is an input and has changed")


def measured(case: Case, f: DType, order: int = 0, race: bool = False) -> dict[str, npt.NDArray[Any]]:
    """Every output (and span, by region name) of a case, widened to float64 where it is a float."""
    return results_of(case, f, run_case(case, f, order, race))


def check(cases: Iterable[Case], dtypes: Sequence[DType] = FLOATS, orders: Sequence[int] = ORDERS) -> None:
    """Every case in every type: within the bounds, with the same bits in every order, and without races."""
    cases = list(cases)
    for f in dtypes:
        for case in cases:
            where = f"{case.op} {case.title}, {f.name}"
            first = run_case(case, f, orders[0])
            for error in compare(case, f, results_of(case, f, first)):
                assert error.of_allowed <= 1, f"{where}: {error}"
            for order in orders[1:]:
                again = run_case(case, f, order).all_bytes()
                different = [name for name, data in first.all_bytes().items() if again[name] != data]
                assert not different, f"{where}: thread order {order} gives other bits in {', '.join(different)}"
        for case in small_cases(cases):
            run_case(case, f, orders[-1], race=True)


def small_cases(cases: Sequence[Case]) -> list[Case]:
    """Of each op the largest cases that are small enough for the race check."""
    chosen: list[Case] = []
    for op in dict.fromkeys(case.op for case in cases):
        small = sorted((c for c in cases if c.op == op and _elements(c) <= RACE_ELEMENTS), key=_elements)
        chosen += small[-RACE_CASES:]
    return chosen


def _elements(case: Case) -> int:
    tensors = sum(i.values.size for i in case.inputs) + sum(int(np.prod(o.shape)) for o in case.outputs)
    return tensors + sum(v.size for v in case.spans.values())
