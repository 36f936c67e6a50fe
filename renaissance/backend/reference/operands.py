"""How the reference ops read and write: values as float64, rounded once when they are stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from renaissance.backend.registry import CaptureContext
from renaissance.core.dtype import DType, bf16_from_fp32, fp32_from_bf16
from renaissance.core.region import Span
from renaissance.graph.computation_graph import Node

F64 = npt.NDArray[np.float64]


class Operands:
    """Reads and writes the tensors and spans of one node as float64 (or integer) arrays."""

    def __init__(self, node: Node, ctx: CaptureContext) -> None:
        self.node = node
        self._ctx = ctx

    def read(self, tensor_id: int) -> F64:
        """A floating tensor [N,H,W,C] as float64."""
        return widen(self._ctx.array(tensor_id), self._ctx.tensor(tensor_id).dtype)

    def rows(self, tensor_id: int) -> F64:
        """A floating tensor as a float64 matrix [N, H*W*C]."""
        values = self.read(tensor_id)
        return values.reshape(values.shape[0], -1)

    def write(self, tensor_id: int, values: npt.ArrayLike) -> None:
        """Round ``values`` once to the tensor's dtype and store them in its shape."""
        out = self._ctx.array(tensor_id)
        out[...] = narrow(np.asarray(values), self._ctx.tensor(tensor_id).dtype).reshape(out.shape)

    def shape(self, tensor_id: int) -> tuple[int, ...]:
        """(N, H, W, C)."""
        return self._ctx.tensor(tensor_id).shape.dims

    def raw(self, tensor_id: int) -> npt.NDArray[Any]:
        """The elements as they are stored (a view)."""
        return self._ctx.array(tensor_id)

    def ints(self, tensor_id: int) -> npt.NDArray[np.int32]:
        """An INT32 tensor as a flat array (a view)."""
        return self._ctx.array(tensor_id).reshape(-1)

    def number(self, tensor_id: int) -> float:
        """A scalar tensor, float or integer."""
        value = self._ctx.array(tensor_id).reshape(-1)[0]
        return float(widen(np.asarray([value]), self._ctx.tensor(tensor_id).dtype)[0])

    def flag(self, tensor_id: int) -> bool:
        return bool(self.ints(tensor_id)[0])

    def span(self, span: Span, dtype: DType = DType.FP32) -> npt.NDArray[Any]:
        """A writable flat view of a span."""
        return self._ctx.span_array(span, dtype)

    def write_span(self, span: Span, values: F64) -> None:
        """Round ``values`` once to the span's dtype and store them."""
        self.span(span, self.span_dtype(span))[:] = narrow(values, self.span_dtype(span))

    def span_dtype(self, span: Span) -> DType:
        return span.first.dtype(self._ctx.half)

    def attr(self, name: str, default: float) -> float:
        return float(self.node.attrs.get(name, default))


def widen(values: npt.NDArray[Any], dtype: DType) -> F64:
    with np.errstate(invalid="ignore"):  # a signalling NaN is data here
        return (fp32_from_bf16(values) if dtype is DType.BF16 else values).astype(np.float64)


def narrow(values: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any]:
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype is DType.BF16:
            return bf16_from_fp32(np.atleast_1d(values).astype(np.float32))
        return values.astype(dtype.numpy)


RELU6_CEILING = 6.0


def passed(y: F64, activation: str) -> npt.NDArray[np.bool_]:
    """Where "relu" or "relu6" with output ``y`` lets the gradient through; NaN does, so that it is seen."""
    cut = y <= 0
    return ~(cut | (y >= RELU6_CEILING) if activation == "relu6" else cut)


def activate(x: F64, activation: str) -> F64:
    """The fused activations "none", "relu" and "relu6"; NaN stays NaN."""
    if activation == "none":
        return x
    x = np.where(x <= 0, 0.0, x)
    return np.where(x > RELU6_CEILING, RELU6_CEILING, x) if activation == "relu6" else x


Op = Callable[[Operands], None]
