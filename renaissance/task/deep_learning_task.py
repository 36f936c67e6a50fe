"""DeepLearningTask: trains a classifier that was described with chained setters.

    task = DeepLearningTask()
    task.model(mlp).loss(CrossEntropyLoss()).optimizer(AdamW()).scheduler(ConstantLR()).total_epochs(5)
    task.compile()
    result = task.run()

Every setter acts or raises, and only before ``compile``. docs/training.md is the user's page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any, Self

from renaissance.algo import CrossEntropyLoss, LrSchedule, Optimizer, Scheduler
from renaissance.core.dtype import DType
from renaissance.core.enums import DatasetType, Metric, Phase
from renaissance.core.errors import DataServerError, PhaseError, ValueRejected
from renaissance.core.kernel_cache import kernels_are_cached
from renaissance.core.machine import CorePlan
from renaissance.core.settings import GLOBAL_SETTING, SettingSnapshot
from renaissance.core.shape import Shape
from renaissance.data.preprocessor import PREPROCESSOR_SETTING, PreprocessorConfig
from renaissance.graph import BluePrint, CompiledModel, CompileRequest
from renaissance.graph.arch_plan import build_arch_plan
from renaissance.task.base import TaskBase
from renaissance.task.checkpoint import Checkpoint, CheckpointFolder, load_checkpoint, verify_identity
from renaissance.task.dataplane import DataPlane, Feed
from renaissance.task.engine import Engine
from renaissance.task.facts import configuration, identity, versions
from renaissance.task.loop import LoopPlan, TrainingLoop
from renaissance.task.options import (
    ADDRESS_PREFIXES,
    BACKENDS,
    TaskOptions,
    agreed,
    flag,
    fraction,
    instance,
    runnable_backend,
    whole,
)
from renaissance.task.output import check_output, owned
from renaissance.task.progress import PRINTABLE_METRICS, ConsoleReporter, Reporter, SilentReporter
from renaissance.task.result import EpochLog, Progress, TrainingResult, write_result
from renaissance.task.state import read_state, weight_digest, write_state

FIRST_RUN = "first run: compiling kernels, which takes up to a minute and is kept for later runs"


class DeepLearningTask(TaskBase):
    """One training run on the data of ``PREPROCESSOR_SETTING`` with the settings of ``GLOBAL_SETTING``."""

    def __init__(self) -> None:
        super().__init__()
        self._options = TaskOptions()
        self._reporter: Reporter | None = None
        self._data: DataPlane | None = None  # between compile() and the end of run()
        self._checkpoint: tuple[Path, Checkpoint] | None = None  # that the run goes on from
        self._newest: Path | None = None  # checkpoint to go on from, should the run break off
        # Set by compile().
        self._settings: SettingSnapshot
        self._preprocessor: PreprocessorConfig
        self._cores: CorePlan
        self._backend: str
        self._backend_note: str
        self._schedule: LrSchedule
        self._identity: Mapping[str, Any]

    # -- options ------------------------------------------------------------------------------------------------

    def _set(self, setter: str, **values: Any) -> Self:
        self._phase.require(setter, Phase.PLANNING)
        self._options = replace(self._options, **values)
        return self

    def model(self, blueprint: BluePrint) -> Self:
        """The layers; the last one must give as many values as the data set has classes."""
        instance("model", blueprint, BluePrint, "a BluePrint(seq(...))")
        return self._set("model", model=blueprint)

    def loss(self, loss: CrossEntropyLoss) -> Self:
        instance("loss", loss, CrossEntropyLoss, "a CrossEntropyLoss()")
        return self._set("loss", loss=loss)

    def optimizer(self, optimizer: Optimizer) -> Self:
        instance("optimizer", optimizer, Optimizer, "SGD(), Adam() or AdamW()")
        optimizer.config()  # options that contradict each other are refused here, by name
        return self._set("optimizer", optimizer=optimizer)

    def scheduler(self, scheduler: Scheduler) -> Self:
        instance("scheduler", scheduler, Scheduler, "ConstantLR() or CosineAnnealingLR()")
        return self._set("scheduler", scheduler=scheduler)

    def total_epochs(self, epochs: int) -> Self:
        """Epochs of the whole run, those before a resume included (default 35)."""
        return self._set("total_epochs", total_epochs=whole("total_epochs", epochs, 1))

    def validate_every(self, interval: int, offset: int = 0) -> Self:
        """Validate after epoch e (from 1) when e >= offset and e - offset is a multiple of interval."""
        return self._set(
            "validate_every",
            validate_interval=whole("validate_every: interval", interval, 1),
            validate_offset=whole("validate_every: offset", offset, 0),
        )

    def early_stop_by_top1(self, threshold: float) -> Self:
        """Stop after the first validated epoch whose top-1 is at least ``threshold`` (a fraction)."""
        return self._set("early_stop_by_top1", early_stop_top1=fraction("early_stop_by_top1", threshold))

    def grad_clip(self, limit: float) -> Self:
        """Clamp every element of the unscaled gradient to -limit..limit, limit > 0."""
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0.0 < limit < float("inf"):
            raise ValueRejected(f"grad_clip is {limit!r}; expected a finite number above 0")
        return self._set("grad_clip", grad_clip=float(limit))

    def metrics(self, mask: Metric) -> Self:
        """Columns of the epoch table (default: training loss, validation loss, top-1, top-5)."""
        mask = Metric(mask)
        if mask & ~PRINTABLE_METRICS:
            raise ValueRejected(f"metrics: {mask & ~PRINTABLE_METRICS!r} needs EMA, which is not part of this version")
        return self._set("metrics", metrics=mask)

    def dataserver(self, address: str) -> Self:
        """Take batches from the running daemon at ``unix:PATH`` instead of starting a private one."""
        if not isinstance(address, str) or not address.startswith(ADDRESS_PREFIXES):
            raise ValueRejected(f"dataserver address is {address!r}; expected unix:PATH")
        return self._set("dataserver", dataserver=address)

    def output(self, folder: str | Path) -> Self:
        """Folder for result.json, log.jsonl and checkpoints/."""
        return self._set("output", output=Path(folder))

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

    def compute_threads(self, threads: int) -> Self:
        """Threads of the CPU kernels (default: chosen from the cores this process may use)."""
        return self._set("compute_threads", compute_threads=whole("compute_threads", threads, 1))

    def cores(self, plan: CorePlan) -> Self:
        """How workers and compute threads share the machine: counts, CPUs, waiting policy, niceness (default:
        ``CorePlan.choose()``; change parts of it with ``dataclasses.replace``)."""
        instance("cores", plan, CorePlan, "a CorePlan, such as CorePlan.choose(wait_policy=WaitPolicy.ACTIVE)")
        return self._set("cores", cores=plan)

    def backend(self, name: str) -> Self:
        """ "cpu", or "reference": plain NumPy, slow, for checks (default: cpu, or reference where cpu cannot run)."""
        if name not in BACKENDS:
            raise ValueRejected(f"backend is {name!r}; expected one of: {', '.join(BACKENDS)}")
        return self._set("backend", backend=name)

    def check_digest(self, on: bool = True) -> Self:
        """Hash every delivered batch again on arrival and compare with what the daemon says."""
        return self._set("check_digest", check_digest=flag("check_digest", on))

    def reporter(self, reporter: Reporter) -> Self:
        """Who is told how the run goes (default: the console)."""
        self._reporter = reporter
        return self

    def quiet(self) -> Self:
        """Show nothing."""
        return self.reporter(SilentReporter())

    # -- compile ------------------------------------------------------------------------------------------------

    def _prepare(self) -> tuple[BluePrint, CompileRequest]:
        options, settings = self._options, GLOBAL_SETTING.snapshot()
        lacking = options.missing()
        if not PREPROCESSOR_SETTING.committed:
            lacking.append("data: call PREPROCESSOR_SETTING.dataset(name, folder). ... .commit()")
        elif settings.dataset_type is DatasetType.NONE:
            lacking.append("data: GLOBAL_SETTING was reset since; call PREPROCESSOR_SETTING.commit() again")
        if settings.device is None:
            lacking.append("device: call GLOBAL_SETTING.use_cpu()")
        if settings.local_batch_size is None:
            lacking.append("batch size: call GLOBAL_SETTING.global_batch_size(n)")
        if lacking:
            raise ValueRejected(f"cannot compile, missing: {'; '.join(lacking)}")
        blueprint, batch, preprocessor = options.model, settings.local_batch_size, PREPROCESSOR_SETTING.config
        assert blueprint is not None  # both are in the list above
        assert batch is not None
        if options.dataserver is not None and (told := preprocessor.private_only()):
            raise ValueRejected(
                f"{told} is for a private dataserver; the one at {options.dataserver} was told by the options of"
                " `dataserver serve`; drop one of the two"
            )
        if preprocessor.resolutions is not None:
            raise ValueRejected(
                "train_resolutions: a compiled task has one training resolution; open sessions of other sizes yourself,"
                " with PREPROCESSOR_SETTING.config.train_recipe_at(epoch)"
            )
        cores = _cores(options, settings, preprocessor)
        self._backend, self._backend_note = runnable_backend(options.backend, _threads(options, settings))
        GLOBAL_SETTING.lock("compile()")
        self._settings, self._preprocessor = settings, preprocessor
        self._cores = cores
        # A model that cannot be trained, or a checkpoint that cannot be read, shall cost no daemon.
        build_arch_plan(blueprint, self._sample_shape(), preprocessor.num_classes)
        if options.output is not None:
            check_output(options.output)
        self._checkpoint = self._load_checkpoint()
        start = self._checkpoint[1].progress if self._checkpoint is not None else Progress()
        feed = Feed(
            seed=settings.seed,
            batch_size=batch,
            dtype=DType.BF16 if settings.amp else DType.FP32,
            check_digest=options.check_digest,
            start=(start.epoch, start.next_batch),
        )
        if not kernels_are_cached():
            self._show(FIRST_RUN)
        self._data = DataPlane.open(preprocessor, feed, options.dataserver, self._cores)
        return blueprint, self._request(batch, *self._data.tails())

    def _load_checkpoint(self) -> tuple[Path, Checkpoint] | None:
        source = self._options.resume
        if source is False:
            return None
        if source is True:
            assert self._options.output is not None  # checked with the other options
            source = CheckpointFolder(self._options.output).latest()
        return source, load_checkpoint(source)

    def _request(self, batch: int, train_last: int | None, val_last: int | None) -> CompileRequest:
        options, settings, preprocessor = self._options, self._settings, self._preprocessor
        assert options.optimizer is not None  # checked with the other options
        assert options.loss is not None
        optimizer, sample, val = options.optimizer.config(), self._sample_shape(), preprocessor.val_recipe.resolution
        return CompileRequest(
            height=sample.h,
            width=sample.w,
            channels=sample.c,
            num_classes=preprocessor.num_classes,
            train_batch=batch,
            val_batch=batch,
            train_last=train_last,
            val_last=val_last,
            val_size=None if val == sample.h else (val, val),
            half=DType.BF16 if settings.amp else None,
            optimizer=optimizer.kind,
            label_smoothing=options.loss.config().label_smoothing,
            weight_decay=optimizer.weight_decay,
            beta=optimizer.beta1 if optimizer.has_second_moment else optimizer.momentum,
            beta2=optimizer.beta2,
            eps=optimizer.eps,
            grad_clip=options.grad_clip,
            world_size=settings.world_size,
            initializer=self._initializer,
        )

    def _sample_shape(self) -> Shape:
        """[1, height, width, channels] of a delivered training sample."""
        recipe = self._preprocessor.train_recipe
        return Shape(1, recipe.resolution, recipe.resolution, recipe.color_channels)

    def _capture(self, compiled: CompiledModel) -> Engine:
        assert self._data is not None  # opened by _prepare
        return Engine(compiled, self._backend, self._cores, self._data.train.slots, self._data.val.slots)

    def _ready(self) -> None:
        """Everything exists: fix the schedule, and put a checkpoint's state in place."""
        options, data = self._options, self._data
        assert options.scheduler is not None  # checked with the other options
        assert data is not None
        self._schedule = options.scheduler.prepare(options.total_epochs, data.train.batches_per_epoch)
        self._identity = identity(
            self.compiled,
            options,
            self._settings,
            self._preprocessor,
            self._schedule,
            (data.train.num_samples, data.val.num_samples),
            self.engine.profile(),
        )
        if self._checkpoint is not None:
            path, checkpoint = self._checkpoint
            verify_identity(path, checkpoint.identity, self._identity)
            write_state(self.compiled, self.engine, checkpoint.arrays, str(path))
        self._show(self._summary(data))

    def _summary(self, data: DataPlane) -> str:
        """What the user did not choose, or may want to check before a long run."""
        where = f"the dataserver at {data.train.address}" if data.daemon is None else "a private dataserver"
        profile = ", ".join(f"{name} {value}" for name, value in self.engine.profile().items())
        lines = [
            f"data   {self._preprocessor.dataset}: {data.train.num_samples} training and {data.val.num_samples}"
            f" validation samples from {where}",
            f"cores  {self._cores.text()}{'' if data.daemon else ' (that dataserver has its own workers)'}",
            f"engine {profile}; arena {self.compiled.arena_bytes / 1e6:.1f} MB{self._backend_note}",
        ]
        if self._checkpoint is not None:
            at = self._checkpoint[1].progress
            lines.append(f"resume {self._checkpoint[0]}: epoch {at.epoch + 1}, step {at.next_batch + 1}")
        return "\n".join(lines)

    def close(self) -> None:
        """Leave the daemon (and stop a private one); the weights stay readable. run() ends with it."""
        if self._engine is not None:
            self._engine.close()
        if self._data is not None:
            self._data.close()
            self._data = None

    # -- run ----------------------------------------------------------------------------------------------------

    def run(self) -> TrainingResult:
        """Train to the end and return the result; also writes it when there is an output folder.

        Raises PhaseError before compile() and on a second call, DataServerError when the daemon fails. Whatever
        happens, a private daemon is stopped.
        """
        self._phase.require("run", Phase.COMPILED)
        if self._data is None:
            raise PhaseError("run: this task has run (or was closed); a task trains once, make a new one")
        output = self._options.output
        try:
            with owned(output) if output is not None else nullcontext():
                return self._train(self._data)
        except DataServerError as error:
            raise type(error)(f"{error}; {self._how_to_go_on()}") from error
        except KeyboardInterrupt:
            self._tell().close()
            self._tell().plan(f"interrupted; {self._how_to_go_on()}")
            raise
        finally:
            self._tell().close()
            self.close()

    def dry_run(self) -> TrainingResult:
        """Compile if that is not done yet, show what run() would do, train nothing, and give everything back."""
        if self.phase is Phase.PLANNING:
            self.compile()
        if self._data is None:
            raise PhaseError("dry_run: this task has run (or was closed); make a new one")
        options, data = self._options, self._data
        lines = [
            f"dry run: {options.total_epochs} epochs of {data.train.batches_per_epoch} steps",
            f"validation after every {options.validate_interval} epochs from epoch {options.validate_offset},"
            f" {data.val.batches_per_epoch} steps",
            f"early stop at top-1 {options.early_stop_top1}",
            f"checkpoint every {options.saves_every[0]} epochs, every {options.saves_every[1]} steps (0: off)",
            f"output {options.output}",
        ]
        self._tell().plan("\n".join(lines))
        self.close()
        return TrainingResult()

    def _train(self, data: DataPlane) -> TrainingResult:
        options, started, began = self._options, datetime.now(UTC), perf_counter()
        start = self._checkpoint[1].progress if self._checkpoint is not None else None
        log = EpochLog(options.output, start.history if start else ()) if options.output is not None else None
        loop = TrainingLoop(
            self._loop_plan(data),
            self.engine,
            data.train,
            data.val,
            self._tell(),
            start=start,
            save=self._saver(),
            epoch_done=log.append if log is not None else None,
        )
        progress = loop.run()
        result = TrainingResult.of(progress, weight_digest(self.compiled, self.engine))
        if options.output is not None:
            facts = {
                "started": started.isoformat(timespec="seconds"),
                "ended": datetime.now(UTC).isoformat(timespec="seconds"),
                "run_seconds": perf_counter() - began,
                "cores": self._cores.text(),
                "numeric": self.engine.profile(),
                "versions": {**versions(), **self.engine.versions()},
                "configuration": configuration(options, self._settings, self._preprocessor, self._schedule),
            }
            write_result(options.output, result, facts)
        self._tell().run_finished(result)
        return result

    def _loop_plan(self, data: DataPlane) -> LoopPlan:
        options, schedule, request = self._options, self._schedule, self.compiled.request
        return LoopPlan(
            total_epochs=options.total_epochs,
            rates=lambda epoch: [schedule.lr(epoch, batch) for batch in range(data.train.batches_per_epoch)],
            train_last=request.train_last is not None,
            val_last=request.val_last is not None,
            validate_interval=options.validate_interval,
            validate_offset=options.validate_offset,
            early_stop_top1=options.early_stop_top1,
            checkpoint_epochs=options.saves_every[0],
            checkpoint_steps=options.saves_every[1],
        )

    def _saver(self) -> Callable[[Progress], Path] | None:
        """Writes a checkpoint of the present state under the given progress; None when nothing is saved."""
        if self._options.output is None or not any(self._options.saves_every):
            return None
        folder = CheckpointFolder(self._options.output)
        if self._checkpoint is not None:
            folder.adopt(self._checkpoint[0])

        def save(progress: Progress) -> Path:
            arrays, dtypes = read_state(self.compiled, self.engine)
            self._newest = folder.write(Checkpoint(self._identity, progress, arrays, dtypes))
            return self._newest

        return save

    def _how_to_go_on(self) -> str:
        newest = self._newest or (self._checkpoint[0] if self._checkpoint is not None else None)
        if newest is not None:
            return f"resume from {newest}"
        if self._options.output is None:
            return "no checkpoint was asked for (output(folder)), so the run starts anew"
        return "no checkpoint was written yet, so the run starts anew"

    # -- inside -------------------------------------------------------------------------------------------------

    def _seed(self) -> int:
        return self._settings.seed

    def _show(self, text: str) -> None:
        self._tell().plan(text)

    def _tell(self) -> Reporter:
        if self._reporter is None:
            self._reporter = ConsoleReporter(self._options.metrics)
        return self._reporter


def _cores(options: TaskOptions, settings: SettingSnapshot, preprocessor: PreprocessorConfig) -> CorePlan:
    """The plan that was given, or one for this machine that keeps every number that was given."""
    plan = options.cores
    threads = _threads(options, settings, ("the task's core plan", plan.compute_threads if plan else None))
    workers = agreed(
        "preprocess_workers",
        ("PREPROCESSOR_SETTING", preprocessor.preprocess_workers),
        ("the task's core plan", plan.workers if plan else None),
    )
    return plan or CorePlan.choose(workers=workers, compute_threads=threads)


def _threads(options: TaskOptions, settings: SettingSnapshot, *others: tuple[str, int | None]) -> int | None:
    """The number of compute threads that was asked for, None for none; two different ones are refused."""
    asked = (("the task", options.compute_threads), ("GLOBAL_SETTING", settings.compute_threads))
    return agreed("compute_threads", *asked, *others)
