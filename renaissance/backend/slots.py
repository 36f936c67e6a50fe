"""Input slots: the pieces of host memory that hold a batch each, and what an executor asks of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from renaissance.backend.interface import Memory
from renaissance.core.errors import DTypeError, ShapeError
from renaissance.graph import CompiledModel, Variant
from renaissance.tensor.dtensor import DTensor

OWN_SLOTS = 2
"""An executor that is given no slots makes so many for itself: A and B."""


@dataclass(frozen=True, slots=True)
class InputArrays:
    """An input slot: images [N,H,W,C] of the model's input dtype (BF16 as uint16), labels int32 [N]."""

    images: npt.NDArray[Any]
    labels: npt.NDArray[np.int32]


def input_tensors(model: CompiledModel, variant: Variant) -> tuple[DTensor, DTensor]:
    """Images and labels of a step as they are described to whoever brings them."""
    inputs = model.inputs[0]
    return model.tensor(inputs.data, variant), model.tensor(inputs.label, variant)


def memory_address(memory: Memory, tensor: DTensor, what: str) -> int:
    """Address of the memory that a tensor is bound to; DTypeError or ShapeError that names ``what`` if it is unfit."""
    if isinstance(memory, int):
        return memory
    nbytes, stored = tensor.nbytes, tensor.dtype.numpy
    if memory.dtype != stored:
        raise DTypeError(f"{what}: an array of {memory.dtype}; expected {stored}, which stores {tensor.dtype.name}")
    if not memory.flags.c_contiguous or memory.nbytes < nbytes:
        raise ShapeError(
            f"{what}: an array of {memory.nbytes} bytes, contiguous: {memory.flags.c_contiguous}; "
            f"expected at least {nbytes} contiguous bytes"
        )
    return int(memory.ctypes.data)
