"""Which programs a compiled model has, and which nodes each consists of; the same for every backend.

A *step key* is (variant, input slot, option): the option is ``frozen`` of a training step and ``ema`` of a validation
step.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from renaissance.core.errors import ValueRejected
from renaissance.graph import CompiledModel, GraphId, Node, Variant, train_program, val_program
from renaissance.graph.ids import SERVICE_PROGRAMS

SERVICE = tuple(graph for program in SERVICE_PROGRAMS for graph in program)
"""Graphs launched alone, between steps."""
EMA_GRAPHS = frozenset({GraphId.INF_EMA_A, GraphId.INF_EMA_B})
VALIDATION_GRAPHS = EMA_GRAPHS | {GraphId.INF_MAIN_A, GraphId.INF_MAIN_B}

StepKey = tuple[Variant, int, bool]


class Side(IntEnum):
    """Which batches a slot holds: training, training at the final resolution, validation."""

    TRAIN = 0
    TRAIN_END = 1
    VAL = 2


def side_of(model: CompiledModel, variant: Variant) -> Side:
    """The slots that steps of ``variant`` read."""
    if not variant.is_training:
        return Side.VAL
    two = model.request.train_end_size is not None
    return Side.TRAIN_END if two and variant in (Variant.TRAIN_LOWRES, Variant.TRAIN_LOWRES_LAST) else Side.TRAIN


def step_keys(model: CompiledModel, slots: Mapping[Side, int]) -> list[StepKey]:
    """Every step that the model can be asked for; ``slots``: number of input slots of each side."""
    request = model.request
    keys = []
    for variant in Variant:
        options = (False, True) if (request.freeze_first_layer if variant.is_training else request.ema) else (False,)
        keys += [(variant, slot, option) for slot in range(slots[side_of(model, variant)]) for option in options]
    return keys


def step_graphs(variant: Variant, slot: int, option: bool) -> tuple[GraphId, ...]:
    """Graphs of a step in launch order."""
    return train_program(slot % 2, frozen=option) if variant.is_training else val_program(slot % 2, ema=option)


def step_nodes(model: CompiledModel, variant: Variant, slot: int, option: bool) -> list[Node]:
    """Nodes of a step in launch order. Shape-invariant graphs are the base plan's; their tensors lie at the same place
    in every plan."""
    return [n for g in step_graphs(variant, slot, option) for n in model.atlas.entry(variant, g).nodes]


def step_captures(model: CompiledModel, variant: Variant, slot: int, option: bool) -> tuple[int, ...]:
    """Indices of the captures of a step: steps with the same ones execute the same nodes."""
    return tuple(model.atlas.entry(variant, graph).captured for graph in step_graphs(variant, slot, option))


def service_nodes(model: CompiledModel, graph: GraphId) -> tuple[Node, ...]:
    """Nodes of a service graph."""
    train = model.atlas.entry(Variant.TRAIN_BASE, graph).nodes
    return train or model.atlas.entry(Variant.VAL_BASE, graph).nodes


def require_kind(variant: Variant, *, training: bool) -> None:
    """Raise ValueRejected when a training or validation step is asked for with a variant of the other kind."""
    if variant.is_training is not training:
        step, kind = ("run_train_step", "training") if training else ("run_val_step", "validation")
        raise ValueRejected(f"{step}: {variant.name} is not a {kind} variant")


def require_rows(model: CompiledModel, variant: Variant, valid: int) -> None:
    """Raise ValueRejected for a number of valid rows that a batch of ``variant`` cannot have."""
    batch = model.request.batch(variant)
    if not 0 <= valid <= batch:
        raise ValueRejected(f"{variant.name}: {valid} rows of the batch count; expected 0 to its size {batch}")


def refuse_step(model: CompiledModel, key: StepKey, slots: Mapping[Side, int]) -> ValueRejected:
    """The error for a step that was not captured: says what is missing."""
    variant, slot, option = key
    count = slots[side_of(model, variant)]
    if option and slot in range(count):
        what = "freeze_first_layer" if variant.is_training else "ema"
        return ValueRejected(f"{variant.name}: the model was compiled without {what}; compile it with that option")
    known = f"0 to {count - 1}" if count else "none: no slots are bound for this side"
    return ValueRejected(f"{variant.name}: input slot {slot}; expected {known}")


def refuse_graph(graph: GraphId) -> ValueRejected:
    """The error for a graph that is not launched alone."""
    known = ", ".join(g.name for g in SERVICE)
    return ValueRejected(f"run_graph: {graph.name} is part of a step; expected one of: {known}")


def preparing_graph(ema: bool) -> GraphId:
    """The service graph that a validation pass begins with."""
    return GraphId.CAST_EMA_FP32_TO_FP16 if ema else GraphId.UPDATE_BN_INF_PARAMS
