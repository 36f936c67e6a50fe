"""What launchers of this backend return: calls that put work on a stream. Issued once while a program is captured.

    def launch_add(node: Node, ctx: CudaContext) -> list[CudaCall]:
        a, b, y = (ctx.buffer(i) for i in (*node.inputs, *node.outputs))
        n = ctx.tensor(node.outputs[0]).shape.numel
        name = f"add_{suffix(ctx.tensor(node.outputs[0]).dtype)}"
        return [KernelCall("elementwise", name, grid_for(n), BLOCK, (a, b, y, i64(n)), label(node))]

Rules: a call allocates nothing and never waits; step scalars are read by the kernel from their tensors, never passed by
value (law 4); grids follow from sizes, never from the device (law 2).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from renaissance.backend.cuda.runtime import CopyKind, CudaRuntime
from renaissance.core.dtype import DType
from renaissance.core.errors import DTypeError
from renaissance.core.region import Span

if TYPE_CHECKING:
    from renaissance.backend.cuda.libraries import Collectives, Convolutions, Products
    from renaissance.tensor import DTensor

Dim = tuple[int, int, int]
MAX_GRID = 65535 * 8
"""Blocks of a one-dimensional grid; beyond it threads walk in strides."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A piece of device memory: what a pointer argument may touch."""

    ptr: int
    nbytes: int

    def part(self, offset: int, nbytes: int) -> Buffer:
        """``nbytes`` from ``offset`` on; they must lie inside."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"bytes {offset} to {offset + nbytes} of a buffer of {self.nbytes}")
        return Buffer(self.ptr + offset, nbytes)


@dataclass(frozen=True, slots=True)
class Scalar:
    """An argument passed by value: never a step scalar."""

    kind: type[ctypes.c_int32] | type[ctypes.c_uint32] | type[ctypes.c_int64] | type[ctypes.c_float]
    value: int | float

    def packed(self) -> Any:
        """As ctypes passes it."""
        return self.kind(self.value)  # type: ignore[arg-type]  # a float for c_float only


def i32(value: int) -> Scalar:
    """An ``int`` argument."""
    return Scalar(ctypes.c_int32, value)


def u32(value: int) -> Scalar:
    """An ``unsigned int`` argument."""
    return Scalar(ctypes.c_uint32, value)


def i64(value: int) -> Scalar:
    """A ``long long`` argument."""
    return Scalar(ctypes.c_int64, value)


def f32(value: float) -> Scalar:
    """A ``float`` argument."""
    return Scalar(ctypes.c_float, value)


Arguments = tuple[Buffer | Scalar, ...]
"""Of a kernel."""


class Functions(Protocol):
    """Where calls are issued: a device, or its stand-in."""

    @property
    def runtime(self) -> CudaRuntime: ...

    def function(self, module: str, name: str) -> int:
        """Handle of kernel ``name`` of kernels/``module``.cu."""


class CudaCall(Protocol):
    """Work for one stream."""

    @property
    def label(self) -> str: ...

    def issue(self, device: Functions, stream: int) -> None: ...


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One launch of kernel ``function`` of kernels/``module``.cu; ``shared`` bytes of dynamic shared memory."""

    module: str
    function: str
    grid: Dim
    block: Dim
    args: Arguments
    label: str
    shared: int = 0

    def issue(self, device: Functions, stream: int) -> None:
        """Launch it; CUDA copies the arguments at once."""
        values = [ctypes.c_void_p(a.ptr) if isinstance(a, Buffer) else a.packed() for a in self.args]
        params = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        handle = device.function(self.module, self.function)
        device.runtime.hint([a.nbytes for a in self.args if isinstance(a, Buffer)])
        device.runtime.launchKernel(handle, *self.grid, *self.block, self.shared, stream, ctypes.addressof(params), 0)


@dataclass(frozen=True, slots=True)
class CopyCall:
    """A copy, device to device unless ``kind`` says otherwise; host memory has to be page-locked."""

    target: Buffer
    source: Buffer
    label: str
    kind: CopyKind = CopyKind.DEVICE_TO_DEVICE

    def issue(self, device: Functions, stream: int) -> None:
        """Copy the smaller of the two sizes."""
        size = min(self.target.nbytes, self.source.nbytes)
        device.runtime.memcpyAsync(self.target.ptr, self.source.ptr, size, self.kind, stream)


@dataclass(frozen=True, slots=True)
class FillCall:
    """Every byte of ``target`` becomes ``value``."""

    target: Buffer
    label: str
    value: int = 0

    def issue(self, device: Functions, stream: int) -> None:
        """Fill."""
        device.runtime.memsetAsync(self.target.ptr, self.value, self.target.nbytes, stream)


@dataclass(frozen=True, slots=True)
class LibraryCall:
    """A call of cuDNN, cuBLASLt or NCCL; ``run`` takes the stream."""

    run: Callable[[int], None] = field(repr=False)
    label: str = ""

    def issue(self, device: Functions, stream: int) -> None:
        """Call the library."""
        self.run(stream)


class CudaContext(Protocol):
    """What a launcher may ask for. Addresses are absolute; tensors are compact (no channel padding)."""

    @property
    def half(self) -> DType | None:
        """The 16-bit type of the numeric profile; None without AMP."""

    @property
    def validating(self) -> bool:
        """True for nodes of a validation step: weights stay what they are from step to step."""

    @property
    def convolutions(self) -> Convolutions: ...

    @property
    def products(self) -> Products: ...

    @property
    def collectives(self) -> Collectives:
        """Raises DeviceError when there is one rank."""

    def tensor(self, tensor_id: int) -> DTensor:
        """Descriptor of a tensor: name, shape [N,H,W,C], dtype, region."""

    def buffer(self, tensor_id: int) -> Buffer:
        """The elements of a tensor; the address is a multiple of 256."""

    def span(self, span: Span) -> Buffer:
        """A span of regions; padding inside it is zero and stays zero under every range op. May be empty."""

    def scratch(self, nbytes: int) -> Buffer:
        """Working memory of the node's stream, a multiple of 256; contents are undefined when a call of the node
        starts and last until the node's last call. The same address is handed out each time: ask once per node and
        cut it up with ``Buffer.part``."""

    def shared(self, key: Hashable, nbytes: int) -> Buffer:
        """Memory that every node that asks with this key and size gets; it keeps its contents between calls."""

    def prepare(self, key: Hashable, calls: Sequence[CudaCall]) -> None:
        """Calls to run before the first validation step after weights or folded parameters have changed, and not in
        every step. Same key: registered once. Raises GraphError outside a validation graph."""


BLOCK: Dim = (256, 1, 1)
"""The usual block."""
ONE_THREAD: tuple[Dim, Dim] = ((1, 1, 1), (32, 1, 1))
"""Grid and block of a kernel that works on single numbers."""
WARP = 32
PACK_BYTES = 16
"""What a thread loads or stores at once, of each operand, where addresses and sizes allow it."""


def grid_for(count: int, per_block: int = 256) -> Dim:
    """A one-dimensional grid for ``count`` items, ``per_block`` for each block: at least one block, at most MAX_GRID
    (kernels walk in grid strides)."""
    return (max(1, min(-(-count // per_block), MAX_GRID)), 1, 1)


def packs_grid(count: int, dtype: DType) -> Dim:
    """Grid of an element-wise kernel over ``count`` elements: a pack for each thread."""
    return grid_for(-(-count * dtype.itemsize // PACK_BYTES))


_SUFFIXES = {DType.FP32: "f32", DType.FP16: "f16", DType.BF16: "bf16"}


def suffix(dtype: DType) -> str:
    """Ending of the name of a kernel that is there once for each floating type."""
    try:
        return _SUFFIXES[dtype]
    except KeyError:
        raise DTypeError(f"no CUDA kernel for {dtype.name}; expected FP32, FP16 or BF16") from None
