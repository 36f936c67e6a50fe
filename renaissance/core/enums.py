"""Enumerations shared by every layer of the house. Numbers are explicit; a test counts the members."""

from __future__ import annotations

from enum import IntEnum, IntFlag


class Phase(IntEnum):
    """Life of a task; transitions go one way only (see ``PhaseMachine``)."""

    PLANNING = 0
    MEMORY_LOCKED = 1
    COMPILED = 2


class StreamKind(IntEnum):
    """The five streams of a rank. On the CPU they only label the launch order."""

    TRANS = 0
    COMP_1 = 1
    COMP_2 = 2
    COMP_3 = 3
    UPDATE = 4


class OptimizerKind(IntEnum):
    SGD = 0
    SGD_MOMENTUM = 1
    SGD_NESTEROV = 2
    LARS = 3
    LARS_NESTEROV = 4
    ADAM = 5
    ADAMW = 6


class DatasetType(IntEnum):
    NONE = 0
    IMAGENET = 1
    MNIST = 2
    CIFAR_10 = 3
    CIFAR_100 = 4


class NormMode(IntEnum):
    """Normalisation presets; the constants live in ``renaissance.data.recipe``."""

    NO_NORM = 0
    MLPERF = 1
    IMAGENET = 2
    MNIST = 3
    CIFAR = 4


class Metric(IntFlag):
    NONE = 0
    TRAIN_LOSS = 1
    VAL_LOSS = 2
    VAL_TOP1 = 4
    VAL_TOP5 = 8
    EMA_TOP1 = 16
    EMA_TOP5 = 32
    EMA_LOSS = 64


class TTA(IntEnum):
    """Test-time augmentation: the views of a picture whose logits are averaged."""

    DISABLED = 0
    LR = 1
    """The picture and its mirror image."""
    SHIFT_1PX = 2
    """The picture and four copies shifted by one pixel."""


class CompileInfo(IntFlag):
    """Which plans ``compile()`` prints."""

    NONE = 0
    ARCH_PLAN = 1
    MEMORY_PLAN = 2
    TRAIN_GRAPH = 4
    INFER_GRAPH = 8
    ALL = 15


class InitKind(IntEnum):
    NONE = 0
    ZEROS = 1
    CONSTANTS = 2
    KAIMING_NORMAL = 3
    KAIMING_UNIFORM = 4
    XAVIER_NORMAL = 5
    XAVIER_UNIFORM = 6
    TRUNC_NORMAL = 7
    FIXED_NORMAL = 8
    STANDARD = 9
    ZERO_GAMMA = 10


class FanMode(IntEnum):
    FAN_IN = 0
    FAN_OUT = 1
    FAN_AVG = 2
