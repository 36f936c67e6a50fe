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

    def train_step(self, slot: int, valid: int, lr: float, last: bool) -> None:
        """One training step on the batch in train slot ``slot``; ``last`` picks the tail batch's variant."""

    def val_step(self, slot: int, valid: int, last: bool) -> None: ...

    def clear_metrics(self) -> None: ...

    def metrics(self) -> Sums: ...


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
class LoopPlan:
    """The numbers of a run. ``rates(epoch)`` gives the learning rate of each step of an epoch (index from 0)."""

    total_epochs: int
    rates: Callable[[int], list[float]]
    train_last: bool = False  # the last training batch is smaller and has its own variant
    val_last: bool = False
    validate_interval: int = 1
    validate_offset: int = 0
    early_stop_top1: float | None = None
    checkpoint_epochs: int = 0  # 0: off
    checkpoint_steps: int = 0  # 0: off

    def validates(self, epoch: int) -> bool:
        """Whether to validate after this epoch (counted from 1)."""
        return epoch >= self.validate_offset and (epoch - self.validate_offset) % self.validate_interval == 0


class TrainingLoop:
    """One run. ``save`` writes a checkpoint of the given progress; ``epoch_done`` gets every finished epoch."""

    def __init__(
        self,
        plan: LoopPlan,
        engine: StepEngine,
        train: BatchSource,
        val: BatchSource,
        reporter: Reporter,
        *,
        start: Progress | None = None,
        save: Callable[[Progress], object] | None = None,
        epoch_done: Callable[[EpochRecord], object] | None = None,
    ) -> None:
        self._plan = plan
        self._engine = engine
        self._train = train
        self._val = val
        self._reporter = reporter
        self._save = save
        self._epoch_done = epoch_done
        start = start or Progress()
        self._epoch = start.epoch
        self._next = start.next_batch
        self._history = list(start.history)
        self._digests = [bytes.fromhex(digest) for digest in start.batch_digests]
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
        rates = self._plan.rates(self._epoch)
        if self._next == 0:
            self._engine.clear_metrics()
        self._reporter.epoch_started(self._epoch + 1, len(rates), self._next)
        self._train_steps(rates)
        sums = self._engine.metrics()
        began = perf_counter()
        val = self._validate() if self._plan.validates(self._epoch + 1) else None
        record = EpochRecord(
            epoch=self._epoch + 1,
            train_loss=sums.mean(sums.loss),
            val_loss=val.mean(val.loss) if val else None,
            top1=val.mean(val.top1) if val else None,
            top5=val.mean(val.top5) if val else None,
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
        threshold = self._plan.early_stop_top1
        return threshold is not None and record.top1 is not None and record.top1 >= threshold

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
            sums = self._engine.metrics()
            self._train_seconds = seconds = perf_counter() - began
            self._reporter.step(self._next, sums.mean(sums.loss), self._samples / seconds, self._wait_seconds / seconds)
            # One that is due at the end of an epoch is written after validation, as the start of the next epoch.
            if self._save is not None and self._next < steps and self._step_checkpoint_due(steps):
                self._save(self.progress())

    def _step_checkpoint_due(self, steps: int) -> bool:
        every = self._plan.checkpoint_steps
        return every > 0 and (self._epoch * steps + self._next) % every == 0

    def _segment(self, end: int, rates: list[float], last: bool) -> None:
        """Steps ``self._next`` to ``end`` of one variant: the only Python that runs per step."""
        acquire, step = self._train.acquire, self._engine.train_step
        digests, epoch, samples = self._digests, self._epoch, 0
        waited = self._train.wait_seconds
        for index in range(self._next, end):
            batch = acquire(epoch, index)
            step(batch.slot, batch.valid, rates[index], last)
            samples += batch.valid
            digests.append(batch.digest_bytes)
            batch.release()
        self._next = end
        self._samples += samples
        self._wait_seconds += self._train.wait_seconds - waited

    def _validate(self) -> Sums:
        source, engine = self._val, self._engine
        steps = source.batches_per_epoch
        engine.clear_metrics()
        for index in range(steps):
            batch = source.acquire(self._epoch, index)
            engine.val_step(batch.slot, batch.valid, self._plan.val_last and index == steps - 1)
            batch.release()
        return engine.metrics()
