"""The chained setters of a DeepLearningTask. Each acts or raises, and only before ``compile`` (law 8).

Epochs are counted from 1 in everything a user says or reads; "after epoch e" means once e epochs are done.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from renaissance.algo import CrossEntropyLoss, Optimizer, Scheduler
from renaissance.backend.registry import HOST_BACKENDS
from renaissance.core.dtype import FP32_LARGEST, FP32_SMALLEST_NORMAL
from renaissance.core.enums import TTA, Metric, Phase
from renaissance.core.errors import ValueRejected
from renaissance.core.machine import CorePlan
from renaissance.core.phase import PhaseMachine
from renaissance.graph import BluePrint
from renaissance.task.options import (
    ADDRESS_PREFIXES,
    TaskOptions,
    averaging,
    flag,
    fraction,
    installed,
    instance,
    whole,
)
from renaissance.task.progress import Reporter, SilentReporter

MODEL_SUFFIX = ".safetensors"
MOST_EPOCHS = 1_000_000


class TaskSetters:
    """Everything that ``TaskOptions`` holds, and the reporter."""

    _phase: PhaseMachine
    _options: TaskOptions
    _reporter: Reporter | None

    def _set(self, setter: str, **values: Any) -> Self:
        self._phase.require(setter, Phase.PLANNING)
        self._options = replace(self._options, **values)
        return self

    # -- model and training -------------------------------------------------------------------------------------

    def model(self, blueprint: BluePrint) -> Self:
        """The layers; the last one must give as many values as the data set has classes."""
        instance("model", blueprint, BluePrint, "a BluePrint(seq(...))")
        return self._set("model", model=blueprint)

    def loss(self, loss: CrossEntropyLoss) -> Self:
        instance("loss", loss, CrossEntropyLoss, "a CrossEntropyLoss()")
        return self._set("loss", loss=loss)

    def optimizer(self, optimizer: Optimizer) -> Self:
        instance("optimizer", optimizer, Optimizer, "SGD(), LARS(), Adam() or AdamW()")
        optimizer.config()  # options that contradict each other are refused here, by name
        return self._set("optimizer", optimizer=optimizer)

    def scheduler(self, scheduler: Scheduler) -> Self:
        instance("scheduler", scheduler, Scheduler, "a schedule such as CosineAnnealingLR() or ConstantLR()")
        return self._set("scheduler", scheduler=scheduler)

    def total_epochs(self, epochs: int) -> Self:
        """Epochs of the whole run, those before a resume included (default 35, at most a million)."""
        if whole("total_epochs", epochs, 1) > MOST_EPOCHS:
            raise ValueRejected(f"total_epochs is {epochs}; expected at most {MOST_EPOCHS}, each of which is planned")
        return self._set("total_epochs", total_epochs=epochs)

    def grad_clip(self, limit: float) -> Self:
        """Clamp every element of the unscaled gradient to -limit..limit, limit > 0."""
        number = isinstance(limit, int | float) and not isinstance(limit, bool)
        if not number or not FP32_SMALLEST_NORMAL <= limit <= FP32_LARGEST:
            raise ValueRejected(f"grad_clip is {limit!r}; expected a number above 0, neither 0 nor infinite as float32")
        return self._set("grad_clip", grad_clip=float(limit))

    def loss_scale(self, value: float) -> Self:
        """Multiply the loss by ``value`` (at first) before gradients are computed, and divide them again: halved when
        a step has NaN or Inf, never below 1. fp16 starts with 8192; bf16 and fp32 run without unless it is asked for.
        """
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1.0 <= value < 2.0**127:
            raise ValueRejected(f"loss_scale is {value!r}; expected a number, 1 <= value < 2**127")
        return self._set("loss_scale", loss_scale=float(value))

    def freeze_first_layer_after(self, epoch: int) -> Self:
        """Leave the first convolution as it is once ``epoch`` epochs are done; 0 freezes it from the start."""
        return self._set("freeze_first_layer_after", freeze_after=whole("freeze_first_layer_after", epoch, 0))

    def use_ema(self, decay: float) -> Self:
        """Keep a moving average of all weights, E = d E + (1 - d) W after every step, and validate it as well."""
        return self._set("use_ema", use_ema=averaging("use_ema: decay", decay))

    def use_sema(self, on: bool = True) -> Self:
        """Switch-EMA: as ``use_ema``, and every epoch but the first starts from the moving averages."""
        return self._set("use_sema", use_sema=flag("use_sema", on))

    def sema_decay(self, value: float) -> Self:
        """Decay d of switch-EMA (default 0.9), 0 <= d < 1."""
        return self._set("sema_decay", sema_decay=averaging("sema_decay", value))

    # -- validation ---------------------------------------------------------------------------------------------

    def validate_every(self, interval: int, offset: int = 0) -> Self:
        """Validate after epoch e (from 1) when e >= offset and e - offset is a multiple of interval."""
        return self._set(
            "validate_every",
            validate_interval=whole("validate_every: interval", interval, 1),
            validate_offset=whole("validate_every: offset", offset, 0),
        )

    def early_stop_by_top1(self, threshold: float) -> Self:
        """Stop after the first validated epoch whose top-1 (or EMA top-1) is at least ``threshold`` (a fraction)."""
        return self._set("early_stop_by_top1", early_stop_top1=fraction("early_stop_by_top1", threshold))

    def tta(self, mode: TTA) -> Self:
        """Average the logits of several views of each validation picture: its mirror image, or one-pixel shifts."""
        if not isinstance(mode, TTA):
            raise ValueRejected(f"tta is {mode!r}; expected one of: {', '.join(f'TTA.{m.name}' for m in TTA)}")
        return self._set("tta", tta=mode)

    def metrics(self, mask: Metric) -> Self:
        """Columns of the epoch table (default: training loss, validation loss, top-1, top-5, and EMA's if it is on)."""
        if not isinstance(mask, Metric) or mask & ~ALL_METRICS:
            raise ValueRejected(f"metrics is {mask!r}; expected a Metric, such as Metric.TRAIN_LOSS | Metric.VAL_TOP1")
        return self._set("metrics", wanted_metrics=mask)

    # -- output -------------------------------------------------------------------------------------------------

    def output(self, folder: str | Path) -> Self:
        """Folder for result.json, log.jsonl, curves.png and checkpoints/."""
        return self._set("output", output=Path(folder))

    def learning_curves(self, on: bool | None) -> Self:
        """Draw curves.png into the output folder at the end: True, False, or None: when matplotlib is installed."""
        if on is not None and flag("learning_curves", on):
            installed("learning_curves", "matplotlib", "plot")
        return self._set("learning_curves", learning_curves=on)

    def tensorboard(self, folder: str | Path) -> Self:
        """Write losses, accuracies, learning rate and speed of every epoch as TensorBoard events into ``folder``."""
        installed("tensorboard", "tensorboardX", "tensorboard")
        return self._set("tensorboard", tensorboard=Path(folder))

    def save_best_model(self, path: str | Path) -> Self:
        """Write the model to ``path`` (.safetensors) whenever its validated top-1 is higher than before.

        With EMA it is whichever had the higher top-1, weights or moving averages.
        """
        return self._set("save_best_model", save_best=_model_path("save_best_model", path))

    def save_model_at_epoch(self, epoch: int, path: str | Path) -> Self:
        """Write the weights to ``path`` (.safetensors) after epoch ``epoch`` (from 1). Once per epoch wanted."""
        epoch, file = whole("save_model_at_epoch", epoch, 1), _model_path("save_model_at_epoch", path)
        others = tuple(pair for pair in self._options.save_at if pair[0] != epoch)
        return self._set("save_model_at_epoch", save_at=tuple(sorted((*others, (epoch, file)))))

    def checkpoint_every(self, *, epochs: int | None = None, steps: int | None = None) -> Self:
        """Save after every n-th epoch and/or step (default: every epoch when there is an output folder)."""
        if epochs is None and steps is None:
            raise ValueRejected("checkpoint_every: give epochs=n, steps=n or both")
        return self._set(
            "checkpoint_every",
            checkpoint_epochs=None if epochs is None else whole("checkpoint_every: epochs", epochs, 1),
            checkpoint_steps=None if steps is None else whole("checkpoint_every: steps", steps, 1),
        )

    def resume(self, source: str | Path | bool) -> Self:
        """Go on from a checkpoint file, or from the latest one of the output folder (True)."""
        return self._set("resume", resume=source if isinstance(source, bool) else Path(source))

    def reporter(self, reporter: Reporter) -> Self:
        """Who is told how the run goes (default: the console)."""
        self._reporter = reporter
        return self

    def quiet(self) -> Self:
        """Show nothing."""
        return self.reporter(SilentReporter())

    # -- machine ------------------------------------------------------------------------------------------------

    def dataserver(self, address: str) -> Self:
        """Take batches from the running daemon at ``unix:PATH`` instead of starting a private one."""
        if not isinstance(address, str) or not address.startswith(ADDRESS_PREFIXES):
            raise ValueRejected(f"dataserver address is {address!r}; expected unix:PATH")
        return self._set("dataserver", dataserver=address)

    def compute_threads(self, threads: int) -> Self:
        """Threads of the CPU kernels (default: chosen from the cores this process may use); refused on a GPU."""
        return self._set("compute_threads", compute_threads=whole("compute_threads", threads, 1))

    def cores(self, plan: CorePlan) -> Self:
        """How workers and compute threads share the machine: counts, CPUs, waiting policy, niceness (default:
        ``CorePlan.choose()``; change parts of it with ``dataclasses.replace``)."""
        instance("cores", plan, CorePlan, "a CorePlan, such as CorePlan.choose(wait_policy=WaitPolicy.ACTIVE)")
        return self._set("cores", cores=plan)

    def backend(self, name: str) -> Self:
        """ "cpu", or "reference": plain NumPy, slow, for checks (default: cpu, or reference where cpu cannot run)."""
        if name not in HOST_BACKENDS:
            raise ValueRejected(
                f"backend is {name!r}; expected one of: {', '.join(HOST_BACKENDS)} (a GPU: GLOBAL_SETTING.use_gpu())"
            )
        return self._set("backend", backend=name)

    def tune(self, file: str | Path) -> Self:
        """Measure which algorithm is fastest for each convolution, on a GPU also for each product, once, and keep the
        choices in ``file`` (JSON).

        What the file knows is used without measuring. Choices decide last bits, so a digest of those that were used is
        part of the numeric profile. Without this a fixed rule chooses, or the GPU's library. Not for backend
        "reference".
        """
        return self._set("tune", tuning=Path(file))

    def check_digest(self, on: bool = True) -> Self:
        """Hash every delivered batch again on arrival and compare with what the daemon says."""
        return self._set("check_digest", check_digest=flag("check_digest", on))


ALL_METRICS = Metric(sum(Metric))


def _model_path(option: str, path: str | Path) -> Path:
    if Path(path).suffix != MODEL_SUFFIX:
        raise ValueRejected(f"{option}: path is {str(path)!r}; expected a file name that ends in {MODEL_SUFFIX}")
    return Path(path)
