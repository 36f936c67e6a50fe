"""A compiled model run node by node in float64 by the reference ops: nothing is rounded, so gradients can be compared
with central differences and fused graphs with plain ones (no tests here)."""

from typing import Any

import numpy as np
import numpy.typing as npt

from renaissance.backend.reference import OPS
from renaissance.backend.reference.operands import F64, Operands
from renaissance.core.dtype import DType
from renaissance.graph import CompiledModel, Node, Variant, train_program, val_program
from renaissance.graph.ids import GraphId

MASKED = -1
Memory = dict[int, npt.NDArray[Any]]


class Exact(Operands):
    """Operands that live in a dictionary of float64 (or integer) arrays [N,H,W,C]."""

    def __init__(self, node: Node, memory: Memory, model: CompiledModel, variant: Variant) -> None:
        self.node = node
        self._memory = memory
        self._plan = model.plans[variant]

    def read(self, tensor_id: int) -> F64:
        return self._memory[tensor_id]

    def write(self, tensor_id: int, values: npt.ArrayLike) -> None:
        self._memory[tensor_id] = np.array(values, np.float64).reshape(self.shape(tensor_id))

    def shape(self, tensor_id: int) -> tuple[int, ...]:
        return self._plan.tensor(tensor_id).shape.dims

    def raw(self, tensor_id: int) -> npt.NDArray[Any]:
        dtype = self._plan.tensor(tensor_id).dtype
        integers = {DType.INT8: np.int8, DType.INT32: np.int32}
        return self._memory.setdefault(tensor_id, np.zeros(self.shape(tensor_id), integers.get(dtype, np.float64)))

    def ints(self, tensor_id: int) -> npt.NDArray[np.int32]:
        return self.raw(tensor_id).reshape(-1)

    def number(self, tensor_id: int) -> float:
        return float(self._memory[tensor_id].reshape(-1)[0])


def start(model: CompiledModel, seed: int, valid: int, variant: Variant = Variant.TRAIN_BASE) -> Memory:
    """Memory with both input slots, parameters, statistics and scalars filled; rows past ``valid`` are masked."""
    rng, plan = np.random.default_rng(seed), model.plans[variant]
    memory: Memory = {}
    for slot in model.inputs:
        shape = plan.tensor(slot.data).shape
        labels = rng.integers(0, model.request.num_classes, (shape.n, 1, 1, 1)).astype(np.int32)
        labels[valid:] = MASKED
        data = rng.normal(size=shape.dims)
        data[valid:] = 0.0
        memory |= {slot.label: labels, slot.data: data}
    for name, i in model.scalars.items():
        integer = plan.tensor(i).dtype is DType.INT32
        memory[i] = np.full((1, 1, 1, 1), model.scalar_init[name], np.int32 if integer else np.float64)
    memory[model.scalar("batch_valid")][...] = valid
    memory[model.scalar("label_smoothing")][...] = 0.1
    memory[model.scalar("seed_low")][...] = seed
    for p in model.parameters:
        fan_in = p.shape.h * p.shape.w * p.shape.c if p.shape.n > 1 else 1
        values = rng.normal(size=p.shape.dims) / np.sqrt(fan_in)
        memory |= {i: values.copy() for i in (p.weight, p.half, p.ema, p.ema_half) if i is not None}
    for norm in model.batch_norms:
        shape_of = plan.tensor(norm.prev_mean).shape.dims
        memory |= {norm.prev_mean: rng.normal(size=shape_of), norm.prev_var: rng.uniform(0.5, 2, shape_of)}
    return memory


def run(model: CompiledModel, memory: Memory, program: tuple[GraphId, ...], variant: Variant) -> None:
    """Run the nodes of ``program`` that work on tensors; range ops are left out."""
    graph = model.training if variant.is_training else model.inference
    for node in graph.program(program):
        if not node.op.startswith(("RANGE_", "ACCUM_", "ADAM_", "GRAD_SCALING")):
            OPS[node.op](Exact(node, memory, model, variant))


COMPUTE = frozenset(g for slot in (0, 1) for g in train_program(slot)[:8])


def step(model: CompiledModel, memory: Memory, slot: int, variant: Variant = Variant.TRAIN_BASE) -> float:
    """The forward and backward pass of a training step; returns the loss."""
    run(model, memory, tuple(g for g in train_program(slot) if g in COMPUTE), variant)
    return float(memory[model.scalar("loss")].reshape(-1)[0])


def validate(model: CompiledModel, memory: Memory, slot: int, ema: bool = False) -> F64:
    """Folded parameters, then a validation step; returns the logits [N,K]."""
    service = GraphId.CAST_EMA_FP32_TO_FP16 if ema else GraphId.UPDATE_BN_INF_PARAMS
    run(model, memory, (service,), Variant.VAL_BASE)
    run(model, memory, val_program(slot, ema)[:2], Variant.VAL_BASE)
    return memory[model.val_logits].reshape(memory[model.val_logits].shape[0], -1)
