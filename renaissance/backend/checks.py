"""What launchers of every backend check before they build a call: a tensor's element type and size.

A kernel trusts its arguments, so a tensor that does not fit must end here, by name.
"""

from __future__ import annotations

from renaissance.backend.registry import label
from renaissance.core.dtype import DType
from renaissance.core.errors import DTypeError, ShapeError
from renaissance.graph.computation_graph import Node
from renaissance.tensor.dtensor import DTensor


def of_size(node: Node, tensor: DTensor, numel: int) -> DTensor:
    """``tensor`` itself when it has ``numel`` elements; else ShapeError."""
    if tensor.shape.numel != numel:
        raise ShapeError(f"{label(node)}: tensor {tensor.name!r} is {tensor.shape}; expected {numel} elements")
    return tensor


def expect(node: Node, tensor: DTensor, dtype: DType, numel: int | None = None) -> DTensor:
    """``tensor`` itself when it has the dtype and (if given) ``numel`` elements; else a named error."""
    if tensor.dtype is not dtype:
        raise DTypeError(f"{label(node)}: tensor {tensor.name!r} is {tensor.dtype.name}; expected {dtype.name}")
    return tensor if numel is None else of_size(node, tensor, numel)
