"""Tasks: what a user configures, compiles and runs."""

from renaissance.task.deep_learning_task import DeepLearningTask
from renaissance.task.progress import ConsoleReporter, Reporter, SilentReporter
from renaissance.task.result import EpochRecord, TrainingResult, read_result

__all__ = [
    "ConsoleReporter",
    "DeepLearningTask",
    "EpochRecord",
    "Reporter",
    "SilentReporter",
    "TrainingResult",
    "read_result",
]
