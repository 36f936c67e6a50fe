"""Loss, optimizers and learning-rate schedules: configuration and formulas, no state."""

from renaissance.algo.loss import CrossEntropyLoss, LossConfig
from renaissance.algo.optimizer import SGD, Adam, AdamW, Optimizer, OptimizerConfig
from renaissance.algo.scheduler import ConstantLR, CosineAnnealingLR, LrSchedule, Scheduler

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "ConstantLR",
    "CosineAnnealingLR",
    "CrossEntropyLoss",
    "LossConfig",
    "LrSchedule",
    "Optimizer",
    "OptimizerConfig",
    "Scheduler",
]
