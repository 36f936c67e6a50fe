"""What a user asked of a DeepLearningTask, as one frozen value, and which of it is missing."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from renaissance.algo import CrossEntropyLoss, Optimizer, Scheduler
from renaissance.backend import why_unavailable
from renaissance.core.dtype import FP32_ROUNDS_TO_ONE
from renaissance.core.enums import TTA, Metric
from renaissance.core.errors import DeviceError, ValueRejected
from renaissance.core.machine import CorePlan
from renaissance.task.progress import DEFAULT_METRICS, EMA_METRICS

if TYPE_CHECKING:
    from renaissance.graph import BluePrint

DEFAULT_EPOCHS = 35
DEFAULT_EMA_DECAY = 0.9
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
    loss_scale: float | None = None  # first loss scale; None: no scaling
    freeze_after: int | None = None  # finished epochs
    use_ema: float | None = None  # decay
    use_sema: bool = False
    sema_decay: float | None = None
    tta: TTA = TTA.DISABLED
    wanted_metrics: Metric | None = None  # None: the usual ones
    dataserver: str | None = None  # address; None: a private daemon
    output: Path | None = None
    tensorboard: Path | None = None
    learning_curves: bool | None = None  # None: when there is an output folder and matplotlib is installed
    save_best: Path | None = None
    save_at: tuple[tuple[int, Path], ...] = ()  # (epoch from 1, file)
    tuning: Path | None = None
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
            "optimizer": "optimizer: call .optimizer(AdamW()), Adam, SGD or LARS",
            "scheduler": "scheduler: call .scheduler(CosineAnnealingLR()) or another schedule",
        }
        lacking = [hint for name, hint in needed.items() if getattr(self, name) is None]
        if self.output is None:
            if self.checkpoint_epochs or self.checkpoint_steps:
                lacking.append("output folder for checkpoint_every: call .output(folder)")
            if self.resume is True:
                lacking.append("output folder for resume(True): call .output(folder), or give resume a file")
            if self.learning_curves:
                lacking.append("output folder for learning_curves(True): call .output(folder)")
        return lacking

    def contradictions(self) -> list[str]:
        """Options that cannot all act, each with what to change."""
        found, epochs = [], self.total_epochs
        if self.sema_decay is not None and not self.use_sema:
            found.append(f"sema_decay is {self.sema_decay}, but use_sema is off; call use_sema(True), or drop it")
        if self.use_sema and self.use_ema is not None and self.sema_decay not in (None, self.use_ema):
            found.append(
                f"use_ema has decay {self.use_ema} and sema_decay is {self.sema_decay}; there is one moving average,"
                " set its decay in one place"
            )
        if not self.ema and self.metrics & EMA_METRICS:
            found.append(f"metrics: {self.metrics & EMA_METRICS!r} needs use_ema(decay) or use_sema(True)")
        if self.freeze_after is not None and self.freeze_after >= epochs:
            found.append(
                f"freeze_first_layer_after is {self.freeze_after}, but there are {epochs} epochs; it never acts"
            )
        late = [epoch for epoch, _ in self.save_at if epoch > epochs]
        if late:
            found.append(f"save_model_at_epoch is {late[0]}, but there are {epochs} epochs; it never acts")
        models = [path for _, path in self.save_at] + ([self.save_best] if self.save_best is not None else [])
        twice = next((path for path in models if models.count(path) > 1), None)
        if twice is not None:
            found.append(
                f"save_best_model, save_model_at_epoch: two of them write {twice}; give each a file of its own"
            )
        validated = any(self.validates(epoch) for epoch in range(1, epochs + 1))
        if not validated and (self.save_best is not None or self.early_stop_top1 is not None):
            name = "early_stop_by_top1" if self.save_best is None else "save_best_model"
            found.append(
                f"{name} needs a validated epoch, but validate_every({self.validate_interval}, {self.validate_offset})"
                f" validates none of {epochs}"
            )
        return found

    def validates(self, epoch: int) -> bool:
        """Whether to validate after this epoch (counted from 1)."""
        return epoch >= self.validate_offset and (epoch - self.validate_offset) % self.validate_interval == 0

    @property
    def ema(self) -> bool:
        """Whether there is a moving average of the weights."""
        return self.use_ema is not None or self.use_sema

    @property
    def ema_decay(self) -> float:
        """Decay of the moving average; of use when there is one."""
        given = self.use_ema if self.use_ema is not None else self.sema_decay
        return DEFAULT_EMA_DECAY if given is None else given

    @property
    def metrics(self) -> Metric:
        """Columns of the epoch table."""
        if self.wanted_metrics is not None:
            return self.wanted_metrics
        return DEFAULT_METRICS | EMA_METRICS if self.ema else DEFAULT_METRICS

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


def averaging(name: str, value: object) -> float:
    """``value`` as the decay of a moving average. As a float32 it must be below 1: a 1 would never move."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < FP32_ROUNDS_TO_ONE:
        raise ValueRejected(f"{name} is {value!r}; expected a number, 0 <= value < 1 (as float32: at most 0.99999994)")
    return float(value)


def installed(option: str, module: str, extra: str) -> None:
    """Raise ValueRejected, with the line that installs it, when an optional package is missing."""
    if find_spec(module) is None:
        raise ValueRejected(
            f"{option} needs the package {module}, which is not installed: pip install 'renaissance[{extra}]'"
        )


def flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueRejected(f"{name} is {value!r}; expected True or False")
    return value


def instance(name: str, value: object, kind: type, hint: str) -> None:
    """Raise ValueRejected unless ``value`` is a ``kind``."""
    if not isinstance(value, kind):
        raise ValueRejected(f"{name} is {value!r} ({type(value).__name__}); expected {hint}")
