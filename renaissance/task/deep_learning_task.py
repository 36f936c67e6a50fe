"""DeepLearningTask: trains a classifier that was described with chained setters.

    task = DeepLearningTask()
    task.model(mlp).loss(CrossEntropyLoss()).optimizer(AdamW()).scheduler(ConstantLR()).total_epochs(5)
    task.compile()
    result = task.run()

Every setter acts or raises, and only before ``compile``. docs/training.md is the user's page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy.typing as npt

from renaissance.algo import LrSchedule
from renaissance.backend.cuda.tuning import PlanChoices
from renaissance.backend.ranks.exchange import RankFailed
from renaissance.core.enums import Phase
from renaissance.core.errors import DataServerError, DeviceError, PhaseError, RenaissanceError
from renaissance.core.kernel_cache import kernels_are_cached
from renaissance.core.settings import GLOBAL_SETTING, require_gpus
from renaissance.data.preprocessor import PreprocessorConfig
from renaissance.graph import BluePrint, CompiledModel, CompileRequest
from renaissance.graph.arch_plan import build_arch_plan
from renaissance.task.base import TaskBase
from renaissance.task.checkpoint import Checkpoint, CheckpointFolder, load_checkpoint, verify_identity
from renaissance.task.curves import can_draw, draw_curves
from renaissance.task.dataplane import DataPlane, Feed, Start
from renaissance.task.dry_run import DryRun, dry_run
from renaissance.task.engine import Engine
from renaissance.task.facts import configuration, identity, versions
from renaissance.task.logging_tensorboard import TensorBoardLog
from renaissance.task.loop import LoopPlan, Sources, TrainingLoop
from renaissance.task.model_saver import ModelSaver
from renaissance.task.models import save_model, snapshot
from renaissance.task.options import TaskOptions
from renaissance.task.output import check_file, check_output, make_folder, owned
from renaissance.task.predict import Prediction, Predictor
from renaissance.task.progress import ConsoleReporter, Reporter, SilentReporter
from renaissance.task.ranks import Peers, refuse_launcher, require_equal_shares
from renaissance.task.resolutions import recipe_at
from renaissance.task.result import EpochLog, EpochRecord, Progress, TrainingResult, write_result
from renaissance.task.setters import TaskSetters
from renaissance.task.setup import Setup, make_setup
from renaissance.task.state import ema_digest, read_state, weight_digest, write_state

FIRST_RUN = "first run: compiling kernels, which takes up to a minute and is kept for later runs"


class DeepLearningTask(TaskSetters, TaskBase):
    """One training run on the data of ``PREPROCESSOR_SETTING`` with the settings of ``GLOBAL_SETTING``."""

    def __init__(self) -> None:
        super().__init__()
        self._options = TaskOptions()
        self._reporter: Reporter | None = None
        self._data: DataPlane | None = None  # between compile() and the end of run()
        self._checkpoint: tuple[Path, Checkpoint] | None = None  # that the run goes on from
        self._newest: Path | None = None  # checkpoint to go on from, should the run break off
        self._predictor: Predictor | None = None
        self._choices: dict[str, str] = {}  # digest of what tune(file) chose
        self._tuning = ""  # what it did, on a GPU
        self._peers: Peers | None = None  # the ranks of a run on several GPUs, from compile() to the end of run()
        self._rank = 0
        # Set by compile().
        self._setup: Setup
        self._schedule: LrSchedule
        self._identity: Mapping[str, Any]
        self._configuration: Mapping[str, Any]

    # -- compile ------------------------------------------------------------------------------------------------

    def _prepare(self) -> tuple[BluePrint, CompileRequest]:
        setup = make_setup(self._options)
        GLOBAL_SETTING.lock("compile()")
        self._setup, options = setup, setup.options
        # A model that cannot be trained, a GPU or checkpoint that cannot be used shall cost no daemon.
        build_arch_plan(setup.blueprint, setup.sample_shape, setup.preprocessor.num_classes)
        if setup.on_gpu:
            require_gpus(setup.settings.gpus)
        self._check_places()
        self._checkpoint = self._load_checkpoint()
        self._join()
        if not kernels_are_cached():
            self._show(FIRST_RUN)
        with self._together():
            self._data = data = self._open_data(options.dataserver)
            require_equal_shares(data.train.num_samples, setup.settings.world_size, data.train.drop_last)
        return setup.blueprint, setup.request(self._initializer, data.tails())

    def _join(self) -> None:
        """Meet the other ranks, where there are any."""
        if not self._setup.on_gpu:
            refuse_launcher()
            return
        self._peers = Peers.join(self._setup.settings.gpus)
        self._rank = 0 if self._peers is None else self._peers.rank

    def _together(self) -> AbstractContextManager[None]:
        return nullcontext() if self._peers is None else self._peers.telling()

    def _open_data(self, address: str | None) -> DataPlane:
        """Sessions of this rank. A private daemon is that of rank 0, which serves all."""
        setup, peers = self._setup, self._peers
        if peers is not None and address is None and peers.rank:
            address = peers.share("dataserver")
        data = DataPlane.open(setup.preprocessor, self._feed(), address, setup.cores)
        if peers is not None and data.daemon is not None:
            try:
                peers.share("dataserver", data.daemon.address)
            except BaseException:
                data.close()
                raise
        return data

    def _check_places(self) -> None:
        """Refuse what the run could not write."""
        options = self._options
        for name, folder in (("output", options.output), ("tensorboard", options.tensorboard)):
            if folder is not None:
                check_output(folder, name)
        files = [("save_best_model", options.save_best), ("tune", options.tuning)]
        for name, file in [*files, *(("save_model_at_epoch", path) for _, path in options.save_at)]:
            if file is not None:
                check_file(file, name)

    def _load_checkpoint(self) -> tuple[Path, Checkpoint] | None:
        source = self._options.resume
        if source is False:
            return None
        if source is True:
            assert self._options.output is not None  # checked with the other options
            source = CheckpointFolder(self._options.output).latest()
        return source, load_checkpoint(source)

    def _feed(self) -> Feed:
        """What is asked of the daemon: every session starts where the run will first read it."""
        setup = self._setup
        at = self._checkpoint[1].progress if self._checkpoint is not None else Progress()
        trains = []
        for size in setup.sizes.sizes:
            epoch = setup.sizes.next_epoch(size, at.epoch)
            trains.append(Start(recipe_at(setup.preprocessor, size), epoch, at.next_batch if epoch == at.epoch else 0))
        return Feed(
            seed=setup.settings.seed,
            batch_size=setup.batch,
            dtype=setup.dtype,
            check_digest=setup.options.check_digest,
            trains=tuple(trains),
            val_start=self._epoch_plan().passes_before(at.epoch),
            rank=self._rank,
            world_size=setup.settings.world_size,
        )

    def _capture(self, compiled: CompiledModel) -> Engine:
        data = self._data
        assert data is not None  # opened by _prepare
        end = data.train_end.slots if data.train_end is not None else ()
        setup = self._setup
        assert setup.options.scheduler is not None  # checked with the other options
        self._schedule = setup.options.scheduler.prepare(setup.options.total_epochs, data.train.batches_per_epoch)
        with self._tuned() as choices:
            self._agree(compiled, data)
            return Engine(
                compiled,
                setup.backend,
                setup.cores,
                data.train.slots,
                data.val.slots,
                end,
                gpu=setup.gpu(self._rank, self._peers.connect if self._peers is not None else None, choices),
                mappings=[station.memory for station in data.stations],
                rank=self._rank,
            )

    def _agree(self, compiled: CompiledModel, data: DataPlane) -> None:
        """Before anything is computed together, the ranks make sure that it is the same."""
        if self._peers is None:
            return
        at = self._checkpoint[1].progress if self._checkpoint is not None else Progress()
        facts = {
            **identity(compiled, self._setup, self._schedule, data.samples, {}),
            "configuration": configuration(self._setup, self._schedule),
            "start": [at.epoch, at.next_batch, at.batch_digests[-1:]],
        }
        self._peers.agree("the run", facts)

    @contextmanager
    def _tuned(self) -> Iterator[PlanChoices | None]:
        """What is captured inside takes the algorithms that tune(file) knows, and measures what it does not: by itself
        on the CPU, on a GPU that is opened with what this gives."""
        path, peers = self._options.tuning, self._peers
        if path is None:
            yield None
            return
        make_folder(path.parent)
        if self._setup.on_gpu:
            share = None if peers is None else partial(peers.share, "measured plans")
            plans = PlanChoices(path, rank=self._rank, share=share)
            yield plans
            self._choices, self._tuning = {"tuned": plans.digest()}, plans.text()
            return
        from renaissance.backend.cpu import tuning  # loads the native library, which the reference backend does without

        with tuning.using(path) as choices:
            yield None
        self._choices = {"convolutions": choices.digest()}

    def _profile(self) -> dict[str, Any]:
        """What besides data, model and options the bits of the run may depend on."""
        return {**self.engine.profile(), **self._choices}

    def _ready(self) -> None:
        """Everything exists: fix the schedule, and put a checkpoint's state in place."""
        data = self._data
        assert data is not None
        if self._peers is not None:
            self._peers.agree("the numeric profile", self._profile())
        self._identity = identity(self.compiled, self._setup, self._schedule, data.samples, self._profile())
        # Now, since the objects that were set can still be changed, which would change nothing but this text.
        self._configuration = configuration(self._setup, self._schedule)
        if self._checkpoint is not None:
            path, checkpoint = self._checkpoint
            verify_identity(path, checkpoint.identity, self._identity)
            write_state(self.compiled, self.engine, checkpoint.arrays, str(path))
        self._show(self._summary(data))

    def _summary(self, data: DataPlane) -> str:
        """What the user did not choose, or may want to check before a long run."""
        where = f"the dataserver at {data.train.address}" if data.daemon is None else "a private dataserver"
        profile = ", ".join(f"{name} {value}" for name, value in self._profile().items())
        lines = [
            f"data   {self._setup.preprocessor.dataset}: {data.train.num_samples} training and {data.val.num_samples}"
            f" validation samples from {where}",
            f"cores  {self._setup.cores_text}{'' if data.daemon else ' (that dataserver has its own workers)'}",
            f"engine {profile}; arena {self.compiled.arena_bytes / 1e6:.1f} MB{self._setup.backend_note}",
        ]
        notes = {**self.engine.notes(), "tune": self._tuning}
        lines += [f"{name:<6} {text}" for name, text in notes.items() if text]
        if self._setup.sizes.end is not None:
            sizes = ", ".join(f"{size} pixels after {done} epochs" for done, size in self._setup.sizes.steps())
            lines.append(f"sizes  {sizes}")
        if self._checkpoint is not None:
            at = self._checkpoint[1].progress
            lines.append(f"resume {self._checkpoint[0]}: epoch {at.epoch + 1}, step {at.next_batch + 1}")
        return "\n".join(lines)

    def close(self) -> None:
        """Leave the daemon (and stop a private one); the weights stay readable. run() ends with it."""
        with ExitStack() as stack:  # whatever fails, in this order
            if self._peers is not None:
                stack.callback(self._peers.close)
            if self._data is not None:
                stack.callback(self._data.close)
            if self._engine is not None:
                stack.callback(self._engine.close)
            self._data = self._peers = None

    # -- models -------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Which process this is of a run on several GPUs; 0 prints and writes, and is the only one of other runs."""
        return self._rank

    @property
    def preprocessor(self) -> PreprocessorConfig:
        """The data options that the task was compiled with. Raises PhaseError before compile()."""
        if self._compiled is None:
            raise PhaseError(f"preprocessor: the task is in {self.phase.name}; call compile() first")
        return self._setup.preprocessor

    def save_model(self, path: Path | str, *, ema: bool = False) -> None:
        """Write weights, statistics and layers as one safetensors file, with ``ema`` the moving averages as weights."""
        save_model(path, self, ema=ema)

    def predict(self, images: npt.ArrayLike, *, ema: bool = False) -> Prediction:
        """Classify images [N,H,W,C] with the weights as they are now: uint8 pixels, which are normalised as in
        validation, or floats, taken as they are. The first call compiles; the weights are copied each time.

        Raises PhaseError before compile(), ShapeError for another sample size, ValueRejected for another element type.
        """
        saved = snapshot(self, ema=ema)
        if self._predictor is None:
            batch, setup = self.compiled.request.val_batch, self._setup
            if setup.on_gpu:
                self._predictor = Predictor(saved, batch=batch, gpu=setup.gpu(self._rank))
            else:
                threads = setup.cores.compute_threads if setup.backend == "cpu" else None
                self._predictor = Predictor(saved, batch=batch, threads=threads, backend=setup.backend)
        else:
            self._predictor.load(saved)
        return self._predictor.predict(images)

    # -- run ----------------------------------------------------------------------------------------------------

    def dry_run(self) -> DryRun:
        """Show and return what run() would do. Starts no daemon, allocates no arena, and changes nothing: the task can
        still be configured, compiled and run. Raises what compile() raises for data, model, options, places to write
        into, and a checkpoint that is not there."""
        setup = make_setup(self._options)
        self._check_places()
        self._load_checkpoint()
        plan = dry_run(setup, self._initializer)
        self._show(plan.text())
        return plan

    def run(self) -> TrainingResult:
        """Train to the end and return the result; also writes it when there is an output folder.

        Raises PhaseError before compile() and on a second call, DataServerError when the daemon fails. Whatever
        happens, a private daemon is stopped.
        """
        self._phase.require("run", Phase.COMPILED)
        if self._data is None:
            raise PhaseError("run: this task has run (or was closed); a task trains once, make a new one")
        output, ended = self._options.output if self._rank == 0 else None, False
        try:
            with self._together(), owned(output) if output is not None else nullcontext():
                result = self._train(self._data)
            ended = True
            return result
        except (DataServerError, RankFailed) as error:
            raise type(error)(f"{error}; {self._how_to_go_on()}") from error
        except KeyboardInterrupt:
            self._tell().close()
            self._tell().plan(f"interrupted; {self._how_to_go_on()}")
            raise
        except RuntimeError as error:
            if isinstance(error, RenaissanceError) or not self._setup.on_gpu:
                raise
            raise DeviceError(f"the GPU failed: {error}; {self._how_to_go_on()}") from error
        finally:
            self._tell().close()
            with nullcontext() if ended else suppress(RuntimeError):  # what follows from an error shall not hide it
                self.close()

    def _train(self, data: DataPlane) -> TrainingResult:
        started, began = datetime.now(UTC), perf_counter()
        start = self._checkpoint[1].progress if self._checkpoint is not None else Progress()
        sources = Sources(data.train, data.val, data.train_end)
        with self._epoch_listeners(start) as listeners:
            loop = TrainingLoop(
                self._loop_plan(data),
                self.engine,
                sources,
                self._tell(),
                start=start,
                save=self._saver(),
                epoch_done=lambda record: [listener(record) for listener in listeners],
                peers=self._peers,
            )
            progress = loop.run()
        compiled, engine = self.compiled, self.engine
        result = TrainingResult.of(progress, weight_digest(compiled, engine), ema_digest(compiled, engine))
        if self._peers is not None:  # the daemon of rank 0 is needed until here, by all
            self._peers.finish({"weights": result.weight_digest, "averages": result.ema_digest})
        if self._rank:
            return result
        if self._options.output is not None:
            facts = {
                "started": started.isoformat(timespec="seconds"),
                "ended": datetime.now(UTC).isoformat(timespec="seconds"),
                "run_seconds": perf_counter() - began,
                "cores": self._setup.cores_text,
                "numeric": self._profile(),
                "versions": {**versions(), **self.engine.versions()},
                "configuration": self._configuration,
            }
            write_result(self._options.output, result, facts)
            self._draw_curves(self._options.output, result)
        self._tell().run_finished(result)
        return result

    @contextmanager
    def _epoch_listeners(self, start: Progress) -> Iterator[list[Callable[[EpochRecord], object]]]:
        """Who gets every finished epoch, each already told of those before a resume."""
        options, listeners = self._options, list[Callable[[EpochRecord], object]]()
        if self._rank:
            yield listeners
            return
        with ExitStack() as stack:
            if options.output is not None:
                listeners.append(EpochLog(options.output, start.history).append)
            if options.tensorboard is not None:
                board = stack.enter_context(TensorBoardLog(options.tensorboard, start.history))
                listeners.append(board.add)
            if options.save_best is not None or options.save_at:
                saver = ModelSaver(self._save_model, options.save_best, options.save_at, start.history)
                listeners.append(saver.epoch_done)
            yield listeners

    def _save_model(self, path: Path, *, ema: bool) -> None:
        make_folder(path.parent)
        self.save_model(path, ema=ema)

    def _draw_curves(self, output: Path, result: TrainingResult) -> None:
        wanted = self._options.learning_curves
        if result.history and (can_draw() if wanted is None else wanted):
            draw_curves(output, result.history)

    def _epoch_plan(self) -> LoopPlan:
        """The loop's plan as far as it is about epochs, which is known before the data is."""
        options, sizes = self._options, self._setup.sizes
        return LoopPlan(
            total_epochs=options.total_epochs,
            rates=lambda epoch: [],
            sizes=sizes.by_epoch,
            end_epochs=sizes.end_epochs,
            validates=options.validates,
            early_stop_top1=options.early_stop_top1,
            ema=options.ema,
            switch_ema=options.use_sema,
            freeze_after=options.freeze_after,
            checkpoint_epochs=options.saves_every[0],
            checkpoint_steps=options.saves_every[1],
        )

    def _loop_plan(self, data: DataPlane) -> LoopPlan:
        train_last, val_last = data.tails()
        return replace(
            self._epoch_plan(),
            rates=self._schedule.epoch_rates,
            train_last=train_last is not None,
            val_last=val_last is not None,
        )

    def _saver(self) -> Callable[[Progress], Path] | None:
        """Writes a checkpoint of the present state under the given progress; None when nothing is saved."""
        if self._options.output is None or not any(self._options.saves_every) or self._rank:
            return None
        folder = CheckpointFolder(self._options.output)
        if self._checkpoint is not None:
            folder.adopt(self._checkpoint[0])

        def save(progress: Progress) -> Path:
            arrays, dtypes = read_state(self.compiled, self.engine)
            if self._peers is not None:
                self._peers.check()  # else what was read may be void
            self._newest = folder.write(Checkpoint(self._identity, progress, arrays, dtypes))
            return self._newest

        return save

    def _how_to_go_on(self) -> str:
        if self._rank and self._options.output is not None:
            return f"resume from the newest checkpoint that rank 0 has written into {self._options.output}, if any"
        newest = self._newest or (self._checkpoint[0] if self._checkpoint is not None else None)
        if newest is not None:
            return f"resume from {newest}"
        if self._options.output is None:
            return "no checkpoint was asked for (output(folder)), so the run starts anew"
        return "no checkpoint was written yet, so the run starts anew"

    # -- inside -------------------------------------------------------------------------------------------------

    def _seed(self) -> int:
        return self._setup.settings.seed

    def _show(self, text: str) -> None:
        self._tell().plan(text)

    def _tell(self) -> Reporter:
        if self._rank:
            return SilentReporter()
        if self._reporter is not None:
            return self._reporter
        console = ConsoleReporter(self._options.metrics)
        if self._phase.phase is not Phase.PLANNING:  # the columns are settled
            self._reporter = console
        return console
