"""What a model holds before its first step, the same on every backend."""

from __future__ import annotations

import numpy as np

from renaissance.backend.interface import Executor
from renaissance.graph import CompiledModel, Variant
from renaissance.tensor import fill_parameter

GOLDEN = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: multiples of it are far from each other."""


def initialize(executor: Executor, model: CompiledModel, seed: int, rank: int = 0) -> None:
    """Everything that persists as it is before the first step: parameters drawn (a function of seed and ordinal),
    their averages equal to them, running statistics by their own rule, moments zero, scalars at their first values, the
    dropout key from seed and rank."""
    for parameter in model.parameters:
        values = fill_parameter(parameter.init, parameter.shape, seed, parameter.ordinal)
        executor.write(parameter.weight, values)
        if parameter.ema is not None:
            executor.write(parameter.ema, values)
        for moment in (parameter.m, parameter.v):
            if moment is not None:
                executor.write(moment, np.zeros(1, model.tensor(moment).dtype.numpy))
    for tensor in model.plans[Variant.TRAIN_BASE].tensors:
        if tensor.region.series == "B" and tensor.init is not None:
            executor.write(tensor.id, fill_parameter(tensor.init, tensor.shape, seed, 0))
    for name, value in model.scalar_init.items():
        executor.write_scalar(name, value)
    for name, word in zip(("seed_low", "seed_high"), dropout_key(seed, rank), strict=True):
        if name in model.scalars:
            executor.write_scalar(name, word)
    executor.cast_weights()


def dropout_key(seed: int, rank: int) -> tuple[int, int]:
    """Low and high word, as int32, of the key of a rank's dropout masks: the seed at rank 0, others far from it."""
    low, high = np.array([(seed + rank * GOLDEN) % 2**64], np.uint64).view(np.int32)
    return int(low), int(high)
