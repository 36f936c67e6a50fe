"""Tasks: what a user configures, compiles and runs."""

from renaissance.task.deep_learning_task import DeepLearningTask
from renaissance.task.dry_run import DryRun
from renaissance.task.progress import ConsoleReporter, Reporter, SilentReporter
from renaissance.task.result import EpochRecord, TrainingResult, read_result
from renaissance.task.simple import SimpleTask, op

__all__ = [
    "ConsoleReporter",
    "DeepLearningTask",
    "DryRun",
    "EpochRecord",
    "Reporter",
    "SilentReporter",
    "SimpleTask",
    "TrainingResult",
    "op",
    "read_result",
]
