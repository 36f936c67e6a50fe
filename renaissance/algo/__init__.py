"""Loss, optimizers and learning-rate schedules: configuration and formulas, no state."""

from renaissance.algo.loss import CrossEntropyLoss, LossConfig
from renaissance.algo.optimizer import LARS, SGD, Adam, AdamW, Optimizer, OptimizerConfig
from renaissance.algo.scheduler import (
    WSDLR,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWithWarmRestartsLR,
    ExponentialLR,
    LrSchedule,
    MultiStepLR,
    PolynomialLR,
    Scheduler,
    StepLR,
)

__all__ = [
    "LARS",
    "SGD",
    "WSDLR",
    "Adam",
    "AdamW",
    "ConstantLR",
    "CosineAnnealingLR",
    "CosineAnnealingWithWarmRestartsLR",
    "CrossEntropyLoss",
    "ExponentialLR",
    "LossConfig",
    "LrSchedule",
    "MultiStepLR",
    "Optimizer",
    "OptimizerConfig",
    "PolynomialLR",
    "Scheduler",
    "StepLR",
]
