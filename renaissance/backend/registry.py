"""The contract between a compiled graph and the code that runs it: launchers, calls and the op registry.

A *launcher* is called once per node and input size (and slot, when the node reads an input), when a program is
captured. It reads the node and the ``CaptureContext`` (addresses, shapes, scratch memory) and returns the calls that do
the work; it does no work itself.

    def launch_add(node: Node, ctx: CaptureContext) -> list[Call]:
        a, b, y = (ctx.tensor(i) for i in (*node.inputs, *node.outputs))
        arguments = (ctx.ptr(a.id), ctx.ptr(b.id), ctx.ptr(y.id), y.shape.numel)
        return [kernel_call(add_kernel, arguments, label(node), threads=ctx.threads)]

    def register(registry: OpRegistry) -> None:
        registry.register("ADD_FWD", "cpu", launch_add)

Backend "cuda" has a context and calls of its own (``renaissance.backend.cuda.calls``).
Backend "cpu" returns ``NativeCall`` (built by ``renaissance.backend.cpu.queue.kernel_call`` or by the oneDNN binding);
backend "reference" returns ``PythonCall``, a closure over NumPy views from ``ctx.array``. Rules for both:

* Nothing is allocated when a call runs (the reference backend may use NumPy temporaries).
* Step scalars (learning rate, batch_valid, loss scale, ...) are read from their tensors when the call runs, never
  copied into the call at capture: a captured program holds no frozen number (law 4).
* The result does not depend on the number of threads: work is cut into chunks by size, and sums run over chunks in a
  fixed order (law 2).
* The address of a tensor is fixed for the life of the program, so it may be baked into the call.

Modules that register launchers: ``backend.cpu.products``, ``conv`` and ``kernels``, ``backend.cuda.launchers`` and
``backend.reference``, each with a function ``register(registry)``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from renaissance.backend.cuda.calls import CudaCall
from renaissance.core.dtype import DType
from renaissance.core.errors import DeviceError, MissingKernelError, ValueRejected
from renaissance.core.region import Span

if TYPE_CHECKING:
    from renaissance.graph import Node
    from renaissance.tensor import DTensor

HOST_BACKENDS = ("cpu", "reference")
"""Those whose tensors lie in host memory."""
BACKENDS = (*HOST_BACKENDS, "cuda")


@dataclass(frozen=True, slots=True)
class NativeCall:
    """One native function call of a queue; plain integers, so that a replay needs no Python.

    ``fn(args[0], args[1], args[2], args[3])`` is called with the C calling convention, every argument a 64-bit integer
    or pointer. Failure is a nonzero 32-bit return value when ``status`` is 0, else a nonzero int64 at address
    ``status`` after the call (kernels of a thread team have no return value).
    """

    fn: int
    args: tuple[int, int, int, int]
    label: str
    """Names the node in errors and dumps, e.g. ``FC_FWD #3``."""
    status: int = 0
    keep: tuple[object, ...] = field(default=(), repr=False, compare=False)
    """Objects (argument arrays, library handles) that must live as long as the call."""


@dataclass(frozen=True, slots=True)
class PythonCall:
    """One call of the reference backend."""

    fn: Callable[[], None]
    label: str


Call = NativeCall | PythonCall | CudaCall


def label(node: Node) -> str:
    """How a node is named in errors and dumps, e.g. ``FC_FWD #3``."""
    return f"{node.op} #{node.index}"


class CaptureContext(Protocol):
    """What a launcher may ask for. Addresses are absolute and already bound to one input slot."""

    @property
    def threads(self) -> int:
        """Threads of the team that parallel calls run on; 1 or more."""

    @property
    def half(self) -> DType | None:
        """The 16-bit type of the numeric profile; None without AMP."""

    def tensor(self, tensor_id: int) -> DTensor:
        """Descriptor of a tensor: name, shape [N,H,W,C], dtype, region."""

    def ptr(self, tensor_id: int) -> int:
        """Address of the first element; a multiple of 256 except for input slots bound by the caller (64)."""

    def array(self, tensor_id: int) -> npt.NDArray[Any]:
        """Writable NumPy view with shape [N,H,W,C] and the tensor's dtype (BF16 as uint16 bit patterns)."""

    def span_ptr(self, span: Span) -> tuple[int, int]:
        """(address, bytes) of a span of regions; (address, 0) when it is empty. Padding inside a span is zero and
        stays zero under every range op."""

    def span_array(self, span: Span, dtype: DType) -> npt.NDArray[Any]:
        """Writable flat NumPy view of a span as elements of ``dtype``."""

    def scratch(self, nbytes: int) -> int:
        """Address of ``nbytes`` of working memory, a multiple of 256, shared by all calls: its contents are undefined
        when a call starts. The same address is handed out each time, so ask once per call for everything it needs."""

    def private(self, nbytes: int) -> int:
        """Address of ``nbytes`` of zeroed memory that only this node uses; it keeps its contents between calls, but a
        node is captured once per input size: what outlives a step belongs in a tensor."""

    def shared(self, key: Hashable, nbytes: int) -> int:
        """Address of ``nbytes`` of zeroed memory that every node that asks with this key and size gets, e.g. weights
        packed for validation, which serve all input slots and batch sizes."""

    @property
    def validating(self) -> bool:
        """True for nodes of a validation step: weights stay what they are from step to step."""

    def prepare(self, key: Hashable, calls: Sequence[Call]) -> None:
        """Calls to run before the first validation step after weights or folded parameters have changed, and not in
        every step. Same key: registered once. Raises GraphError outside a validation graph."""


Launcher = Callable[["Node", Any], Sequence[Call]]
"""The second argument is a ``CaptureContext``; of backend "cuda" a ``CudaContext``."""


class OpRegistry:
    """Which backend runs which op. An op without a launcher fails when the graph is compiled, by name."""

    def __init__(self) -> None:
        self._launchers: dict[tuple[str, str], Launcher] = {}

    def register(self, op: str, backend: str, launcher: Launcher) -> None:
        """Make ``launcher`` the one for ``op`` on ``backend``; a second one for the same pair is an error."""
        if backend not in BACKENDS:
            raise ValueRejected(f"op {op}: unknown backend {backend!r}; expected one of: {', '.join(BACKENDS)}")
        known = self._launchers.setdefault((op, backend), launcher)
        if known is not launcher:
            raise ValueRejected(
                f"op {op}, backend {backend}: already registered by {known.__module__}.{known.__name__}"
            )

    def launcher(self, op: str, backend: str) -> Launcher:
        """The launcher of ``op``. Raises MissingKernelError that names the op, the backend and who else runs it."""
        try:
            return self._launchers[op, backend]
        except KeyError:
            others = [b for o, b in self._launchers if o == op]
            hint = f"it runs on: {', '.join(sorted(others))}" if others else "no backend runs it"
            raise MissingKernelError(f"op {op} has no kernel on backend {backend!r}; {hint}") from None

    def require(self, ops: Iterable[str], backend: str) -> None:
        """Raise MissingKernelError that lists every op of ``ops`` without a launcher on ``backend``."""
        missing = sorted({op for op in ops if (op, backend) not in self._launchers})
        if len(missing) == 1:
            self.launcher(missing[0], backend)
        if missing:
            raise MissingKernelError(f"ops without a kernel on backend {backend!r}: {', '.join(missing)}")

    def ops(self, backend: str) -> tuple[str, ...]:
        """Names of the ops that ``backend`` runs, sorted."""
        return tuple(sorted(op for op, b in self._launchers if b == backend))


def default_registry(backend: str) -> OpRegistry:
    """A registry with everything this project has for ``backend``. Loads the native library only for "cpu"."""
    registry = OpRegistry()
    if backend == "cpu":
        from renaissance.backend.cpu import conv, kernels, products

        products.register(registry)
        conv.register(registry)
        kernels.register(registry)
    elif backend == "reference":
        from renaissance.backend import reference

        reference.register(registry)
    elif backend == "cuda":
        from renaissance.backend.cuda import launchers

        launchers.register(registry)
    else:
        raise ValueRejected(f"unknown backend {backend!r}; expected one of: {', '.join(BACKENDS)}")
    return registry


def why_unavailable(backend: str) -> str | None:
    """Why this machine cannot run ``backend``, in words; None when it can. Loads the native library for "cpu"."""
    if backend == "cpu":
        from renaissance.backend.cpu.onednn import onednn

        try:
            onednn()
        except DeviceError as error:
            return str(error)
    return None


def flat_view(address: int, count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Writable NumPy view of ``count`` elements at ``address``. The caller keeps the memory alive."""
    buffer = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return np.frombuffer(memoryview(buffer), dtype)
