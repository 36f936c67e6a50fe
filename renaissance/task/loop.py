"""The epoch loop: takes batches from a source, replays the step on them, validates, keeps count.

It knows neither graphs nor processes, only two small interfaces (``StepEngine`` and ``BatchSource``), so its
bookkeeping is tested without either. Per step it runs five lines of Python; everything else happens at the ends of
segments: a progress update, a checkpoint, the tail batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from renaissance.core.digest import chain_digest
from renaissance.core.errors import ValueRejected
from renaissance.task.progress import Reporter
from renaissance.task.result import EpochRecord, Progress

PROGRESS_UPDATES = 50
"""Progress updates per epoch: enough for a smooth bar, too few to cost anything."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Metric accumulators: sums over samples, and how many samples."""

    loss: float
    top1: float
    top5: float
    count: float

    def mean(self, total: float) -> float:
        return total / self.count if self.count > 0 else float("nan")


class StepEngine(Protocol):
    """Runs steps on input slots; implemented by ``task.engine``."""

    def train_step(
        self, slot: int, valid: int, lr: float, last: bool, *, end: bool = False, frozen: bool = False
    ) -> None:
        """One training step on the batch in train slot ``slot``; ``last`` picks the tail batch's variant, ``end`` the
        second resolution's, ``frozen`` leaves the first layer as it is."""

    def freeze_first_layer(self, frozen: bool) -> None:
        """Goes with ``frozen`` of the steps that follow."""

    def prepare_validation(self, ema: bool = False) -> None:
        """Called before the steps of a validation pass."""

    def val_step(self, slot: int, valid: int, last: bool, *, ema: bool = False) -> None: ...

    def release(self, batch: SlotBatch) -> None:
        """Give a batch back as soon as its step has no more use for it; the step was asked for before."""

    def drain(self) -> None:
        """Every batch is given back when this returns."""

    def switch_ema(self) -> None:
        """Copy the moving averages into the weights."""

    def clear_metrics(self) -> None: ...

    def reduce_metrics(self) -> None:
        """Make the metrics of a validation pass their mean over the ranks; called when there are several."""

    def metrics(self) -> Sums:
        """After every step so far; waits for them."""

    def progress(self) -> Sums:
        """As far as it is known without waiting."""


class SlotBatch(Protocol):
    """What the loop reads of a delivered batch."""

    @property
    def slot(self) -> int: ...
    @property
    def valid(self) -> int: ...
    @property
    def digest_bytes(self) -> bytes: ...
    def release(self) -> None: ...


class BatchSource(Protocol):
    """One TransferStation."""

    @property
    def batches_per_epoch(self) -> int: ...
    @property
    def wait_seconds(self) -> float: ...
    def acquire(self, epoch: int, index: int) -> SlotBatch: ...


@dataclass(frozen=True, slots=True)
class Sources:
    """Where batches come from: ``train_end`` at the second training resolution, for a run that has one."""

    train: BatchSource
    val: BatchSource
    train_end: BatchSource | None = None


class Peers(Protocol):
    """The ranks of a run with several, this one included. All of them call alike."""

    @property
    def size(self) -> int: ...

    def combine(self, digests: list[bytes]) -> list[bytes]:
        """Digests of steps, from those of the batches that this rank had in them."""

    def check(self) -> None:
        """Raise when another rank is lost: what the engine has computed since is void."""


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """The numbers of a run. ``rates(epoch)`` gives the learning rate of each step of an epoch (index from 0)."""

    total_epochs: int
    rates: Callable[[int], list[float]]
    sizes: tuple[int, ...] = ()  # pixels of each epoch's training samples, for the records; () where nobody asks
    end_epochs: frozenset[int] = frozenset()  # indices from 0 of the epochs at the second training resolution
    train_last: bool = False  # the last training batch is smaller and has its own variant
    val_last: bool = False
    validates: Callable[[int], bool] = lambda epoch: True  # whether to validate after an epoch (counted from 1)
    early_stop_top1: float | None = None
    ema: bool = False  # validate the moving averages too
    switch_ema: bool = False  # every epoch but the first starts from the moving averages
    freeze_after: int | None = None  # the first layer is frozen once that many epochs are done
    checkpoint_epochs: int = 0  # 0: off
    checkpoint_steps: int = 0  # 0: off

    @property
    def passes(self) -> int:
        """Passes over the validation set per validation."""
        return 2 if self.ema else 1

    def passes_before(self, epoch: int) -> int:
        """Validation passes of the epochs before the one with this index: what numbers the passes for the source.

        Counted, so that the source always reads on in order and never has to start over somewhere else.
        """
        return self.passes * sum(self.validates(done) for done in range(1, epoch + 1))


class TrainingLoop:
    """One run. ``save`` writes a checkpoint of the given progress; ``epoch_done`` gets every finished epoch."""

    def __init__(
        self,
        plan: LoopPlan,
        engine: StepEngine,
        sources: Sources,
        reporter: Reporter,
        *,
        start: Progress | None = None,
        save: Callable[[Progress], object] | None = None,
        epoch_done: Callable[[EpochRecord], object] | None = None,
        peers: Peers | None = None,
    ) -> None:
        self._plan = plan
        self._engine = engine
        self._sources = sources
        self._reporter = reporter
        self._save = save
        self._epoch_done = epoch_done
        self._peers, self._ranks = peers, peers.size if peers is not None else 1
        start = start or Progress()
        self._epoch = start.epoch
        self._next = start.next_batch
        self._passes = plan.passes_before(start.epoch)  # over the validation set
        self._history = list(start.history)
        self._digests = [bytes.fromhex(digest) for digest in start.batch_digests]
        self._own_digests: list[bytes] = []  # of this rank's batches that are not in _digests yet
        self._samples = start.samples
        self._train_seconds = start.train_seconds
        self._wait_seconds = start.wait_seconds
        # From the epochs, not from the stored flag: a run that goes on with another threshold, or none, goes by that.
        self._stopped = start.next_batch == 0 and bool(start.history) and self._reaches_threshold(start.history[-1])

    def progress(self) -> Progress:
        """Where the run is, as a checkpoint stores it."""
        return Progress(
            epoch=self._epoch,
            next_batch=self._next,
            history=tuple(self._history),
            batch_digests=tuple(digest.hex() for digest in self._digests),
            samples=self._samples,
            train_seconds=self._train_seconds,
            wait_seconds=self._wait_seconds,
            stopped_early=self._stopped,
        )

    def run(self) -> Progress:
        """Train from the start position to the end (or the early stop); returns the final progress."""
        self._reporter.run_started(self._plan.total_epochs, len(self._history))
        while self._epoch < self._plan.total_epochs and not self._stopped:
            self._run_epoch()
        return self.progress()

    def _run_epoch(self) -> None:
        plan, epoch = self._plan, self._epoch
        rates = plan.rates(epoch)
        if self._next == 0:
            self._engine.clear_metrics()
        if plan.freeze_after is not None:
            self._engine.freeze_first_layer(self._frozen)
        if plan.switch_ema and epoch > 0 and self._next == 0:  # after freezing: a frozen layer is not switched
            self._engine.switch_ema()
        self._reporter.epoch_started(epoch + 1, len(rates), self._next)
        self._train_steps(rates)
        sums = self._engine.metrics()
        self._settle()  # asks every rank, so what was computed so far is sound
        began = perf_counter()
        val = self._validate() if plan.validates(epoch + 1) else None
        ema = self._validate(ema=True) if plan.ema and val else None
        record = EpochRecord(
            epoch=epoch + 1,
            train_loss=sums.mean(sums.loss),
            val_loss=val.mean(val.loss) if val else None,
            top1=val.mean(val.top1) if val else None,
            top5=val.mean(val.top5) if val else None,
            ema_loss=ema.mean(ema.loss) if ema else None,
            ema_top1=ema.mean(ema.top1) if ema else None,
            ema_top5=ema.mean(ema.top5) if ema else None,
            resolution=plan.sizes[epoch] if plan.sizes else 0,
            lr=rates[0],
            seconds=self._train_seconds + perf_counter() - began,
            train_seconds=self._train_seconds,
            wait_seconds=self._wait_seconds,
            samples=self._samples,
            data_digest=chain_digest(self._digests).hex(),
        )
        self._close_epoch(record, len(rates))

    def _close_epoch(self, record: EpochRecord, steps: int) -> None:
        self._history.append(record)
        self._epoch += 1
        self._next = self._samples = 0
        self._digests = []
        self._train_seconds = self._wait_seconds = 0.0
        self._stopped = self._reaches_threshold(record)
        if self._epoch_done is not None:
            self._epoch_done(record)
        self._reporter.epoch_finished(record)
        every = self._plan.checkpoint_epochs
        due = every > 0 and (record.epoch % every == 0 or self._finished)
        if self._save is not None and (due or self._step_checkpoint_due(steps)):
            self._save(self.progress())

    def _reaches_threshold(self, record: EpochRecord) -> bool:
        threshold, best = self._plan.early_stop_top1, record.better_top1
        return threshold is not None and best is not None and best >= threshold

    @property
    def _frozen(self) -> bool:
        after = self._plan.freeze_after
        return after is not None and self._epoch >= after

    @property
    def _finished(self) -> bool:
        return self._stopped or self._epoch == self._plan.total_epochs

    def _train_steps(self, rates: list[float]) -> None:
        """The rest of the open epoch, in segments that end where something besides a step is due."""
        steps = len(rates)
        stride = max(1, steps // PROGRESS_UPDATES)
        every = self._plan.checkpoint_steps
        began = perf_counter() - self._train_seconds
        while self._next < steps:
            ends = [steps, self._next + stride]
            if self._plan.train_last and self._next < steps - 1:
                ends.append(steps - 1)
            done = self._epoch * steps + self._next
            if every:
                ends.append(self._next + every - done % every)
            self._segment(min(ends), rates, last=self._plan.train_last and self._next == steps - 1)
            if self._next == steps:
                self._engine.drain()
                sums = self._engine.metrics()  # waits for the steps: they are part of the time that is taken below
            else:
                sums = self._engine.progress()
            self._check_peers()
            self._train_seconds = seconds = perf_counter() - began
            self._reporter.step(self._next, sums.mean(sums.loss), self._samples / seconds, self._wait_seconds / seconds)
            # One that is due at the end of an epoch is written after validation, as the start of the next epoch.
            if self._next < steps and self._step_checkpoint_due(steps):
                saving = perf_counter()
                self._settle()
                if self._save is not None:
                    self._engine.drain()
                    self._save(self.progress())
                began += perf_counter() - saving  # writing is no training

    def _settle(self) -> None:
        """Every step so far is in ``_digests``. All ranks come here at the same steps, whichever of them writes."""
        own, self._own_digests = self._own_digests, []
        self._digests += own if self._peers is None else self._peers.combine(own)

    def _check_peers(self) -> None:
        if self._peers is not None:
            self._peers.check()

    def _step_checkpoint_due(self, steps: int) -> bool:
        every = self._plan.checkpoint_steps
        return every > 0 and (self._epoch * steps + self._next) % every == 0

    def _segment(self, end: int, rates: list[float], last: bool) -> None:
        """Steps ``self._next`` to ``end`` of one variant: the only Python that runs per step."""
        epoch = self._epoch
        second = epoch in self._plan.end_epochs
        source = self._train_source(second)
        acquire, step, release, frozen = source.acquire, self._engine.train_step, self._engine.release, self._frozen
        digests, samples = self._own_digests, 0
        waited = source.wait_seconds
        for index in range(self._next, end):
            batch = acquire(epoch, index)
            step(batch.slot, batch.valid, rates[index], last, end=second, frozen=frozen)
            samples += batch.valid
            digests.append(batch.digest_bytes)
            release(batch)
        self._next = end
        self._samples += samples * self._ranks  # shares are equal
        self._wait_seconds += source.wait_seconds - waited

    def _train_source(self, second: bool) -> BatchSource:
        if not second:
            return self._sources.train
        if self._sources.train_end is None:
            raise ValueRejected("training loop: an epoch at the second resolution, but no source of such batches")
        return self._sources.train_end

    def _validate(self, ema: bool = False) -> Sums:
        source, engine = self._sources.val, self._engine
        number, steps = self._passes, source.batches_per_epoch
        self._passes += 1
        engine.clear_metrics()
        engine.prepare_validation(ema)
        for index in range(steps):
            batch = source.acquire(number, index)
            engine.val_step(batch.slot, batch.valid, self._plan.val_last and index == steps - 1, ema=ema)
            engine.release(batch)
        engine.drain()
        if self._ranks > 1:
            engine.reduce_metrics()
        sums = engine.metrics()
        self._check_peers()
        return sums
