"""Saved models: one safetensors file with everything that inference needs, and nothing that executes.

The file holds the fp32 master weights (convolutions as [out, kernel, kernel, in / groups], fully connected layers as
[out, in], everything per channel as a vector) under the names of the layers, the running statistics of the batch norms,
and metadata: the ArchPlan, the recipe of the validation samples, the element type the model was trained in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_bytes

import renaissance
from renaissance.core.dtype import DType
from renaissance.core.errors import FormatError, MissingFileError, ValueRejected
from renaissance.core.files import written_when_complete
from renaissance.data.recipe import Recipe
from renaissance.graph import CompiledModel
from renaissance.graph.arch_json import from_json, to_json
from renaissance.graph.arch_plan import ArchPlan
from renaissance.task.engine import Engine

if TYPE_CHECKING:
    from renaissance.task.deep_learning_task import DeepLearningTask

FORMAT = "renaissance-model-1"
KEYS = frozenset({"format", "arch_plan", "recipe", "dtype", "dataset", "weights", "renaissance"})
Arrays = Mapping[str, npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class SavedModel:
    """A model at rest. ``tensors`` are fp32 in the file's shapes; ``recipe`` prepares the samples it is asked about."""

    arch_plan: ArchPlan
    recipe: Recipe
    dtype: DType
    dataset: str
    weights: str
    """"main", or "ema" when the moving averages of the weights were saved as the weights."""
    tensors: Arrays


def save_model(path: Path | str, task: DeepLearningTask, *, ema: bool = False) -> None:
    """Write the model of a compiled task; with ``ema`` its moving averages as the weights.

    The file appears when it is complete. Raises PhaseError before compile(), ValueRejected for ``ema`` without EMA and
    for a name that does not end in ".safetensors".
    """
    write_model(path, snapshot(task, ema=ema))


def snapshot(task: DeepLearningTask, *, ema: bool = False) -> SavedModel:
    """The model of a compiled task as it is now, copied; raises what ``save_model`` raises."""
    compiled, engine = task.compiled, task.engine
    if ema and not compiled.request.ema:
        raise ValueRejected("ema=True, but this task keeps no moving averages; call use_ema() before compile")
    preprocessor = task.preprocessor
    return SavedModel(
        arch_plan=compiled.arch_plan,
        recipe=preprocessor.val_recipe,
        dtype=compiled.request.half or DType.FP32,
        dataset=preprocessor.dataset,
        weights="ema" if ema else "main",
        tensors=read_tensors(compiled, engine, ema=ema),
    )


def tensor_ids(compiled: CompiledModel, *, ema: bool = False) -> dict[str, int]:
    """Name in the file -> tensor id, of parameters (or their moving averages) and running statistics."""
    ids = {p.name: p.weight if not ema or p.ema is None else p.ema for p in compiled.parameters}
    for norm in compiled.batch_norms:
        for tensor in (norm.prev_mean, norm.prev_var):
            ids[compiled.tensor(tensor).name] = tensor
    return ids


def read_tensors(compiled: CompiledModel, engine: Engine, *, ema: bool = False) -> dict[str, npt.NDArray[np.float32]]:
    """Copies of everything that a saved model holds, in the file's shapes."""
    return {
        name: engine.read(tensor).astype(np.float32).reshape(file_shape(compiled, tensor))
        for name, tensor in tensor_ids(compiled, ema=ema).items()
    }


def file_shape(compiled: CompiledModel, tensor: int) -> tuple[int, ...]:
    """The shape of a tensor in the file: convolutions have four dimensions, products two, what is per channel one."""
    descriptor = compiled.tensor(tensor)
    match descriptor.region.name.partition("_")[2]:
        case "FIRST_CONV" | "DEEP_CONV":
            return descriptor.shape.dims
        case "FC_WEIGHT":
            return descriptor.shape.n, descriptor.shape.numel // descriptor.shape.n
        case _:
            return (descriptor.shape.numel,)


def write_tensors(compiled: CompiledModel, engine: Engine, saved: SavedModel, source: str = "saved model") -> None:
    """Put the tensors of a saved model into an engine compiled for its ArchPlan.

    Raises FormatError when names or shapes differ; then nothing is written.
    """
    ids = tensor_ids(compiled)
    if ids.keys() != saved.tensors.keys():
        missing, unknown = sorted(ids.keys() - saved.tensors.keys()), sorted(saved.tensors.keys() - ids.keys())
        raise FormatError(f"{source}: tensors missing: {missing}, unknown: {unknown}; expected those of its ArchPlan")
    for name, tensor in ids.items():
        given, expected = saved.tensors[name].shape, file_shape(compiled, tensor)
        if given != expected:
            raise FormatError(f"{source}: tensor {name} is {list(given)}; expected {list(expected)}")
    for name, tensor in ids.items():
        engine.write(tensor, saved.tensors[name].reshape(compiled.tensor(tensor).shape.dims))
    engine.weights_written()


def write_model(path: Path | str, saved: SavedModel) -> None:
    """Write a saved model; the file appears when it is complete."""
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueRejected(f"save_model: {path}; expected a name that ends in .safetensors")
    facts = {
        "format": FORMAT,
        "arch_plan": to_json(saved.arch_plan),
        "recipe": saved.recipe.to_json(),
        "dtype": saved.dtype.name,
        "dataset": saved.dataset,
        "weights": saved.weights,
        "renaissance": renaissance.__version__,
    }
    arrays = {name: np.ascontiguousarray(values, "<f4") for name, values in saved.tensors.items()}
    with written_when_complete(path) as file:
        file.write(to_bytes(arrays, facts))


def read_model(path: Path | str) -> SavedModel:
    """The model in a file. Raises MissingFileError, or FormatError that names the file and what is wrong with it."""
    path = Path(path)
    if not path.is_file():
        raise MissingFileError(f"{path}: no such file; expected a model saved as .safetensors")
    try:
        with safe_open(str(path), "np") as file:
            facts = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise FormatError(f"{path}: is not a safetensors file: {error}") from None
    if facts.get("format") != FORMAT or not facts.keys() >= KEYS:
        raise FormatError(
            f"{path}: its metadata has format {facts.get('format')!r} and the keys {sorted(facts)}; expected"
            f" {FORMAT!r} and {sorted(KEYS)}: a file that save_model wrote"
        )
    for name, values in tensors.items():
        if values.dtype != np.float32:
            raise FormatError(f"{path}: tensor {name} is {values.dtype}; expected float32")
    try:
        recipe, dtype = Recipe.from_json(facts["recipe"]), DType[facts["dtype"]]
    except (ValueRejected, KeyError, TypeError) as error:
        raise FormatError(f"{path}: metadata: {error}") from None
    if dtype not in (DType.FP32, DType.BF16, DType.FP16):
        raise FormatError(f"{path}: metadata: dtype is {dtype.name}; expected FP32, BF16 or FP16")
    arch_plan = from_json(facts["arch_plan"], f"{path}: arch_plan")
    if recipe.color_channels != arch_plan.input.c:
        raise FormatError(
            f"{path}: its recipe makes {recipe.color_channels} channels, its first layer reads {arch_plan.input.c}"
        )
    return SavedModel(arch_plan, recipe, dtype, facts["dataset"], facts["weights"], tensors)
