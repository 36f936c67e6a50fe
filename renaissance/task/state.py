"""What persists between steps, as named arrays, and the digest that stands for the weights.

The weight digest is BLAKE2b-128 over the fp32 master weights, biases and batch-norm parameters, each parameter's
logical elements in NHWC order, little-endian, without padding, parameters in the order of (region, ordinal). The EMA
digest is the same over their moving averages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from renaissance.core.digest import DIGEST_BYTES
from renaissance.core.dtype import DType
from renaissance.core.errors import CheckpointError
from renaissance.graph import CompiledModel
from renaissance.graph.model import Parameter
from renaissance.task.engine import Engine


def weight_digest(compiled: CompiledModel, engine: Engine) -> str:
    """Hex digest of the master weights, biases and batch-norm parameters."""
    return _digest(engine, [p.weight for p in _in_order(compiled)])


def ema_digest(compiled: CompiledModel, engine: Engine) -> str | None:
    """Hex digest of the moving averages; None for a model without."""
    averages = [p.ema for p in _in_order(compiled) if p.ema is not None]
    return _digest(engine, averages) if averages else None


def _in_order(compiled: CompiledModel) -> list[Parameter]:
    return sorted(compiled.parameters, key=lambda p: (compiled.tensor(p.weight).region, p.ordinal))


def _digest(engine: Engine, tensors: Iterable[int]) -> str:
    h = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for tensor in tensors:
        h.update(np.ascontiguousarray(engine.read(tensor), dtype="<f4").tobytes())
    return h.hexdigest()


def read_state(compiled: CompiledModel, engine: Engine) -> tuple[dict[str, npt.NDArray[Any]], dict[str, DType]]:
    """Views of everything a checkpoint holds: (arrays by name, dtypes by name)."""
    tensors = [compiled.tensor(tensor_id) for tensor_id in compiled.state]
    return {t.name: engine.read(t.id) for t in tensors}, {t.name: t.dtype for t in tensors}


def write_state(compiled: CompiledModel, engine: Engine, arrays: Mapping[str, npt.NDArray[Any]], source: str) -> None:
    """Restore what ``read_state`` gave. Raises CheckpointError when names, shapes or types differ; then nothing is
    written."""
    tensors = {t.name: t for t in map(compiled.tensor, compiled.state)}
    if tensors.keys() != arrays.keys():
        missing, unknown = sorted(tensors.keys() - arrays.keys()), sorted(arrays.keys() - tensors.keys())
        raise CheckpointError(f"{source}: tensors missing: {missing}, unknown: {unknown}; it belongs to another model")
    for name, tensor in tensors.items():
        given = arrays[name]
        if given.shape != tensor.shape.dims or given.dtype != tensor.dtype.numpy:
            raise CheckpointError(
                f"{source}: tensor {name} is {list(given.shape)} {given.dtype}, this model needs {tensor.shape}"
                f" {tensor.dtype.numpy}"
            )
    for name, tensor in tensors.items():
        engine.write(tensor.id, arrays[name])
    engine.weights_written()
