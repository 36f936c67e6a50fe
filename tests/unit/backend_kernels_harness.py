"""A small stand-in for a captured program: named arrays in aligned memory, one node, both backends.

``Bench.run`` captures one node with the launchers of a backend and launches it, exactly as the executor does.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from renaissance.backend import reference
from renaissance.backend.cpu import kernels
from renaissance.backend.cpu.queue import NativeQueue
from renaissance.backend.registry import Call, NativeCall, OpRegistry, PythonCall
from renaissance.core.dtype import DType
from renaissance.core.enums import StreamKind
from renaissance.core.region import Region, Span
from renaissance.core.shape import Shape
from renaissance.graph.computation_graph import Node
from renaissance.graph.ids import GraphId
from renaissance.tensor.dtensor import DTensor

REGISTRY = OpRegistry()
kernels.register(REGISTRY)
reference.register(REGISTRY)


def aligned(nbytes: int) -> npt.NDArray[np.uint8]:
    """Zeroed bytes at an address that is a multiple of 256."""
    raw = np.zeros(nbytes + 256, np.uint8)
    start = -raw.ctypes.data % 256
    return raw[start : start + nbytes]


class Bench:
    """Tensors and spans of one node; a ``CaptureContext``."""

    def __init__(self, threads: int = 1, half: DType | None = DType.BF16) -> None:
        self.threads, self.half = threads, half
        self._tensors: list[DTensor] = []
        self._bytes: list[npt.NDArray[np.uint8]] = []
        self._spans: dict[Span, npt.NDArray[np.uint8]] = {}
        self._private: list[npt.NDArray[np.uint8]] = []
        self._shared: dict[tuple[Hashable, int], int] = {}
        self._prepared: dict[Hashable, tuple[Call, ...]] = {}
        self.names: dict[str, int] = {}

    def add(self, name: str, values: npt.ArrayLike, dtype: DType = DType.FP32, shape: Shape | None = None) -> int:
        """A tensor with these values (bit patterns for BF16); shape [N,1,1,C] of a matrix, [N,1,1,1] of a vector."""
        array = np.ascontiguousarray(values, dtype=dtype.numpy)
        if shape is None:
            shape = Shape(array.shape[0], 1, 1, array.shape[1]) if array.ndim == 2 else Shape(max(array.size, 1))
        tensor = self.adopt(DTensor.make(len(self._tensors), name, shape, dtype, Region.T_TEMP_FP32))
        self.array(tensor)[...] = array.reshape(shape.dims)
        return tensor

    def adopt(self, tensor: DTensor) -> int:
        """A tensor with this descriptor, zeroed; its id must be the next one."""
        assert tensor.id == len(self._tensors)
        self._tensors.append(tensor)
        self._bytes.append(aligned(tensor.slot_bytes))
        self.names[tensor.name] = tensor.id
        return tensor.id

    def raw(self, tensor_id: int) -> npt.NDArray[np.uint8]:
        """All bytes of a tensor's slot."""
        return self._bytes[tensor_id]

    def add_span(self, region: Region, values: npt.NDArray[Any]) -> Span:
        """A span of one region that holds exactly ``values``."""
        span = Span(region, region)
        self._spans[span] = aligned(values.nbytes)
        self._spans[span][:] = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        return span

    # CaptureContext

    def tensor(self, tensor_id: int) -> DTensor:
        return self._tensors[tensor_id]

    def ptr(self, tensor_id: int) -> int:
        return int(self._bytes[tensor_id].ctypes.data)

    def array(self, tensor_id: int) -> npt.NDArray[Any]:
        tensor = self._tensors[tensor_id]
        return self._bytes[tensor_id][: tensor.nbytes].view(tensor.dtype.numpy).reshape(tensor.shape.dims)

    def span_ptr(self, span: Span) -> tuple[int, int]:
        return int(self._spans[span].ctypes.data), self._spans[span].nbytes

    def span_array(self, span: Span, dtype: DType) -> npt.NDArray[Any]:
        return self._spans[span].view(dtype.numpy)

    def scratch(self, nbytes: int) -> int:
        return self.private(nbytes)

    def private(self, nbytes: int) -> int:
        self._private.append(aligned(nbytes))
        return int(self._private[-1].ctypes.data)

    validating = False

    def shared(self, key: Hashable, nbytes: int) -> int:
        if (key, nbytes) not in self._shared:
            self._shared[key, nbytes] = self.private(max(nbytes, 1))
        return self._shared[key, nbytes]

    def prepare(self, key: Hashable, calls: Sequence[Call]) -> None:
        self._prepared.setdefault(key, tuple(calls))

    # One node

    def capture(self, node: Node, backend: str = "cpu") -> NativeQueue | list[PythonCall]:
        calls = REGISTRY.launcher(node.op, backend)(node, self)
        if backend == "cpu":
            return NativeQueue([c for c in calls if isinstance(c, NativeCall)])
        return [c for c in calls if isinstance(c, PythonCall)]

    def run(self, node: Node, backend: str = "cpu") -> None:
        """Capture the node, run what it prepares once, then the node itself."""
        program = self.capture(node, backend)
        if isinstance(program, NativeQueue):
            prepared = [c for calls in self._prepared.values() for c in calls]
            NativeQueue([c for c in prepared if isinstance(c, NativeCall)]).launch()
            program.launch()
        else:
            for call in program:
                call.fn()

    def get(self, name: str) -> npt.NDArray[Any]:
        return self.array(self.names[name]).reshape(-1)

    def all_bytes(self) -> bytes:
        """Every byte of every tensor and span."""
        return b"".join(b.tobytes() for b in (*self._bytes, *self._spans.values()))


def node(
    op: str,
    inputs: tuple[int, ...] = (),
    outputs: tuple[int, ...] = (),
    spans_in: tuple[Span, ...] = (),
    spans_out: tuple[Span, ...] = (),
    **attrs: int | float | str | bool,
) -> Node:
    return Node(7, op, attrs, inputs, outputs, spans_in, spans_out, GraphId(0), StreamKind.COMP_1)


def ulps(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> int:
    """Largest distance in units in the last place between two float32 arrays of finite numbers."""
    keys = []
    for x in (a, b):
        bits = np.ascontiguousarray(x, np.float32).view(np.int32).astype(np.int64)
        keys.append(np.where(bits < 0, -(bits & 0x7FFFFFFF), bits))
    return int(np.abs(keys[0] - keys[1]).max()) if a.size else 0
