"""What launchers of this backend check beside ``backend.checks``: one floating type, and a fused activation."""

from __future__ import annotations

from renaissance.backend.cuda.calls import CudaContext, suffix
from renaissance.backend.registry import label
from renaissance.core.dtype import DType
from renaissance.core.errors import DTypeError, ValueRejected
from renaissance.graph.computation_graph import Node

FUSED = ("none", "relu", "relu6")
"""The index is the number of a fused activation in dialect.cuh."""


def same_float(node: Node, ctx: CudaContext, *ids: int) -> DType:
    """The floating type (FP32, FP16 or BF16) that all of these tensors have; DTypeError for a mixture or another."""
    tensors = [ctx.tensor(i) for i in ids]
    if len({t.dtype for t in tensors}) > 1:
        given = ", ".join(f"{t.name} {t.dtype.name}" for t in tensors)
        raise DTypeError(f"{label(node)}: tensors of different types: {given}; expected one type")
    try:
        suffix(tensors[0].dtype)
    except DTypeError:
        given = f"{tensors[0].name!r} is {tensors[0].dtype.name}"
        raise DTypeError(f"{label(node)}: tensor {given}; expected FP32, FP16 or BF16") from None
    return tensors[0].dtype


def fused_activation(node: Node) -> int:
    """The number of attribute ``activation``, 0 without one; raises ValueRejected for another value."""
    value = node.attrs.get("activation", "none")
    if value not in FUSED:
        raise ValueRejected(f"{label(node)}: activation {value!r}; expected one of: {', '.join(FUSED)}")
    return FUSED.index(str(value))
