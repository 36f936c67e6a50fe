"""What a user asked of a DeepLearningTask, as one frozen value, and which of it is missing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from renaissance.algo import CrossEntropyLoss, Optimizer, Scheduler
from renaissance.backend import why_unavailable
from renaissance.core.enums import Metric
from renaissance.core.errors import DeviceError, ValueRejected
from renaissance.core.machine import CorePlan
from renaissance.task.progress import DEFAULT_METRICS

if TYPE_CHECKING:
    from renaissance.graph import BluePrint

DEFAULT_EPOCHS = 35
BACKENDS = ("cpu", "reference")
ADDRESS_PREFIXES = ("unix:",)


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """Defaults are what a task does when a setter is not called. None: not set."""

    model: BluePrint | None = None
    loss: CrossEntropyLoss | None = None
    optimizer: Optimizer | None = None
    scheduler: Scheduler | None = None
    total_epochs: int = DEFAULT_EPOCHS
    validate_interval: int = 1
    validate_offset: int = 0
    early_stop_top1: float | None = None
    grad_clip: float = 0.0  # 0: off
    metrics: Metric = DEFAULT_METRICS
    dataserver: str | None = None  # address; None: a private daemon
    output: Path | None = None
    checkpoint_epochs: int | None = None
    checkpoint_steps: int | None = None
    resume: Path | bool = False  # True: the latest checkpoint of the output folder
    compute_threads: int | None = None
    cores: CorePlan | None = None  # None: chosen from the machine
    backend: str | None = None  # None: cpu, or reference where cpu cannot run
    check_digest: bool = False

    def missing(self) -> list[str]:
        """What compile() cannot do without, each with the call that gives it; and options that lack another one."""
        needed = {
            "model": "model: call .model(BluePrint(...))",
            "loss": "loss: call .loss(CrossEntropyLoss())",
            "optimizer": "optimizer: call .optimizer(AdamW()), Adam or SGD",
            "scheduler": "scheduler: call .scheduler(CosineAnnealingLR()) or ConstantLR",
        }
        lacking = [hint for name, hint in needed.items() if getattr(self, name) is None]
        if self.output is None:
            if self.checkpoint_epochs or self.checkpoint_steps:
                lacking.append("output folder for checkpoint_every: call .output(folder)")
            if self.resume is True:
                lacking.append("output folder for resume(True): call .output(folder), or give resume a file")
        return lacking

    @property
    def saves_every(self) -> tuple[int, int]:
        """(epochs, steps) between checkpoints, 0 is off: every epoch unless chosen, none without an output folder."""
        if self.output is None:
            return 0, 0
        if self.checkpoint_epochs is None and self.checkpoint_steps is None:
            return 1, 0
        return self.checkpoint_epochs or 0, self.checkpoint_steps or 0


def runnable_backend(wish: str | None, threads: int | None) -> tuple[str, str]:
    """(backend, what to say about it): the one that was asked for, else "cpu", else "reference" with the reason.

    Raises DeviceError when the one that was asked for cannot run here, and ValueRejected for a number of compute
    ``threads`` with "reference", which could not keep to it.
    """
    reason = why_unavailable(wish or "cpu")
    if wish == "reference" and threads is not None:
        raise ValueRejected(
            f"compute_threads is {threads}, but backend 'reference' runs on NumPy's own; drop one of them"
        )
    if reason is None:
        return wish or "cpu", ""
    if wish is not None:
        raise DeviceError(f"backend {wish!r} cannot run here: {reason}")
    return "reference", f" (slow plain NumPy on its own threads, because backend 'cpu' cannot run here: {reason})"


def agreed(option: str, *wishes: tuple[str, int | None]) -> int | None:
    """The value of an option that can be set in several places, each given as (place, value or None).

    Two different wishes are a ValueRejected that names both places.
    """
    given = [(place, value) for place, value in wishes if value is not None]
    for place, value in given[1:]:
        if value != given[0][1]:
            raise ValueRejected(
                f"{option} is {given[0][1]} in {given[0][0]} and {value} in {place}; set it in one place"
            )
    return given[0][1] if given else None


def whole(name: str, value: object, low: int) -> int:
    """``value`` when it is a whole number >= ``low``; raises ValueRejected naming the option."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueRejected(f"{name} is {value!r}; expected a whole number, at least {low}")
    return value


def fraction(name: str, value: object) -> float:
    """``value`` as a float when it lies in (0, 1]; raises ValueRejected naming the option."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value <= 1.0:
        raise ValueRejected(f"{name} is {value!r}; expected a fraction, above 0 and at most 1")
    return float(value)


def flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueRejected(f"{name} is {value!r}; expected True or False")
    return value


def instance(name: str, value: object, kind: type, hint: str) -> None:
    """Raise ValueRejected unless ``value`` is a ``kind``."""
    if not isinstance(value, kind):
        raise ValueRejected(f"{name} is {value!r} ({type(value).__name__}); expected {hint}")
