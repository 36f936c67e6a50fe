"""The 33 graphs of a model, its six variants, and the order in which a step launches graphs (spec/framework 3.5, 6.4).

A *variant* is one set of input sizes; a *program* is the list of graphs that one step or one service call launches.
Programs are what the verifier checks: the order inside a program is the order that has to be right.
"""

from __future__ import annotations

from enum import IntEnum

from renaissance.core.enums import StreamKind


class GraphId(IntEnum):
    TRANSFER_A = 0
    TRANSFER_B = 1
    FIRST_LAYER_FWD_A = 2
    FIRST_LAYER_FWD_B = 3
    DEEP_FWD_BWD = 4
    ZERO_GRAD = 5
    FIRST_LAYER_BWD_A = 6
    FIRST_LAYER_BWD_B = 7
    FIRST_COMM = 8
    DEEP_COMM = 9
    CAST_DEEP_GRAD_FP16_TO_FP32 = 10
    CAST_FIRST_GRAD_FP16_TO_FP32 = 11
    NAN_CHECK_AND_GRAD_SCALING = 12
    STATS_COMM = 13
    UPDATE_STATS = 14
    OPTIMIZER = 15
    EMA_UPDATE = 16
    INF_MAIN_A = 17
    INF_MAIN_B = 18
    INF_EMA_A = 19
    INF_EMA_B = 20
    CAST_MAIN_FP32_TO_FP16 = 21
    CAST_EMA_FP32_TO_FP16 = 22
    ACCUM_METRICS = 23
    ACCUM_METRICS_TRAIN_LAST = 24
    ACCUM_METRICS_VAL_LAST = 25
    VAL_RESULT_COMM = 26
    CLEAR_METRICS = 27
    SIMPLE_TASK_GRAPH = 28
    LARS_FC_OPT = 29
    LARS_FIRST_CONV_OPT = 30
    LARS_DEEP_CONV_OPT = 31
    UPDATE_BN_INF_PARAMS = 32

    @property
    def stream(self) -> StreamKind:
        """The stream the executor launches this graph on."""
        return _STREAMS.get(self, StreamKind.UPDATE)

    @property
    def shape_invariant(self) -> bool:
        """True when nothing in the graph depends on batch size or resolution: one capture serves all variants."""
        return self not in _SHAPED


class Variant(IntEnum):
    """One set of input sizes. LOWRES is the resolution training ends with (the name is upstream's)."""

    TRAIN_BASE = 0
    TRAIN_LAST = 1
    TRAIN_LOWRES = 2
    TRAIN_LOWRES_LAST = 3
    VAL_BASE = 4
    VAL_LAST = 5

    @property
    def is_training(self) -> bool:
        return self < Variant.VAL_BASE


_SHAPED = frozenset(
    {
        GraphId.FIRST_LAYER_FWD_A,
        GraphId.FIRST_LAYER_FWD_B,
        GraphId.DEEP_FWD_BWD,
        GraphId.FIRST_LAYER_BWD_A,
        GraphId.FIRST_LAYER_BWD_B,
        GraphId.INF_MAIN_A,
        GraphId.INF_MAIN_B,
        GraphId.INF_EMA_A,
        GraphId.INF_EMA_B,
        GraphId.SIMPLE_TASK_GRAPH,
    }
)

_STREAMS = {
    GraphId.TRANSFER_A: StreamKind.TRANS,
    GraphId.TRANSFER_B: StreamKind.TRANS,
    GraphId.LARS_FIRST_CONV_OPT: StreamKind.COMP_2,
    GraphId.LARS_DEEP_CONV_OPT: StreamKind.COMP_3,
} | dict.fromkeys(_SHAPED | {GraphId.LARS_FC_OPT}, StreamKind.COMP_1)

SLOT_A, SLOT_B = 0, 1
"""Parity of an input slot: even slots of the ring are A, odd ones B."""


def train_program(slot: int, frozen: bool = False) -> tuple[GraphId, ...]:
    """Graphs of one training step on input slot A (0) or B (1), in launch order; absent graphs are skipped.

    ``frozen`` leaves out the backward pass and the update of the first layer. Three points of the order: ACCUM_METRICS
    comes after the NaN check, so that a skipped step does not enter the epoch mean (law 5); unlike upstream there is no
    cast of the weights here, the update writes master and half weights in one pass; the LARS graphs come before
    OPTIMIZER, whose last node changes the loss scale that every update divides by.
    """
    backward = () if frozen else ((GraphId.FIRST_LAYER_BWD_A, GraphId.FIRST_LAYER_BWD_B)[slot],)
    first_update = () if frozen else (GraphId.LARS_FIRST_CONV_OPT,)
    return (
        (GraphId.TRANSFER_A, GraphId.TRANSFER_B)[slot],
        GraphId.ZERO_GRAD,
        (GraphId.FIRST_LAYER_FWD_A, GraphId.FIRST_LAYER_FWD_B)[slot],
        GraphId.DEEP_FWD_BWD,
        GraphId.CAST_DEEP_GRAD_FP16_TO_FP32,
        GraphId.DEEP_COMM,
        *backward,
        GraphId.CAST_FIRST_GRAD_FP16_TO_FP32,
        GraphId.FIRST_COMM,
        GraphId.STATS_COMM,
        GraphId.NAN_CHECK_AND_GRAD_SCALING,
        GraphId.ACCUM_METRICS,
        GraphId.UPDATE_STATS,
        GraphId.LARS_FC_OPT,
        *first_update,
        GraphId.LARS_DEEP_CONV_OPT,
        GraphId.OPTIMIZER,
        GraphId.EMA_UPDATE,
    )


def val_program(slot: int, ema: bool = False) -> tuple[GraphId, ...]:
    """Graphs of one validation step on input slot A (0) or B (1), in launch order.

    ``ema``: with the averaged weights.
    """
    main = (GraphId.INF_MAIN_A, GraphId.INF_MAIN_B)
    averaged = (GraphId.INF_EMA_A, GraphId.INF_EMA_B)
    return (
        (GraphId.TRANSFER_A, GraphId.TRANSFER_B)[slot],
        (averaged if ema else main)[slot],
        GraphId.ACCUM_METRICS,
    )


SERVICE_PROGRAMS: tuple[tuple[GraphId, ...], ...] = (
    (GraphId.CLEAR_METRICS,),  # start of every training and validation epoch
    (GraphId.CAST_MAIN_FP32_TO_FP16,),  # once after initialisation or loading, with AMP
    (GraphId.UPDATE_BN_INF_PARAMS,),  # before validation with the main weights
    (GraphId.CAST_EMA_FP32_TO_FP16,),  # before validation with the averaged weights
    (GraphId.VAL_RESULT_COMM,),  # end of validation, with several ranks
)


def programs(graph_name: str, freezes: bool = False) -> tuple[tuple[GraphId, ...], ...]:
    """Every program of the training ("train") or inference ("infer") graph: the steps on slots A and B first.

    ``freezes``: with the training programs that leave out the first layer's backward pass.
    """
    if graph_name == "train":
        frozen = (train_program(0, frozen=True), train_program(1, frozen=True)) if freezes else ()
        return (train_program(0), train_program(1), *frozen, *SERVICE_PROGRAMS)
    averaged = (val_program(0, ema=True), val_program(1, ema=True))
    return (val_program(0), val_program(1), *averaged, *SERVICE_PROGRAMS)
