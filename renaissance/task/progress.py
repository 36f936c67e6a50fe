"""How a run is shown: the Reporter interface, the console's table and bar, and silence.

The training loop calls a reporter and knows nothing of terminals. The table goes to stdout, one stable line per epoch,
so that logs can be compared; the bar goes to stderr and only exists on a terminal.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

from tqdm import tqdm

from renaissance.core.enums import Metric
from renaissance.task.result import EpochRecord, TrainingResult

DEFAULT_METRICS = Metric.TRAIN_LOSS | Metric.VAL_LOSS | Metric.VAL_TOP1 | Metric.VAL_TOP5
EMA_METRICS = Metric.EMA_TOP1 | Metric.EMA_TOP5 | Metric.EMA_LOSS


class Reporter(Protocol):
    """What the training loop tells. ``step`` is called a few dozen times per epoch, not for every step."""

    def plan(self, text: str) -> None:
        """Plans asked for by ``compile(info=...)`` and the cores plan."""

    def run_started(self, total_epochs: int, done_epochs: int) -> None: ...

    def epoch_started(self, epoch: int, steps: int, done_steps: int) -> None:
        """``epoch`` counts from 1; ``done_steps`` is not 0 when a run resumes inside an epoch."""

    def step(self, done_steps: int, loss: float, samples_per_s: float, wait_share: float) -> None: ...

    def epoch_finished(self, record: EpochRecord) -> None: ...

    def run_finished(self, result: TrainingResult) -> None: ...

    def close(self) -> None:
        """Called once at the end, also after an error: leave the terminal clean."""


class SilentReporter:
    """Shows nothing."""

    def plan(self, text: str) -> None:
        pass

    def run_started(self, total_epochs: int, done_epochs: int) -> None:
        pass

    def epoch_started(self, epoch: int, steps: int, done_steps: int) -> None:
        pass

    def step(self, done_steps: int, loss: float, samples_per_s: float, wait_share: float) -> None:
        pass

    def epoch_finished(self, record: EpochRecord) -> None:
        pass

    def run_finished(self, result: TrainingResult) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the epoch table; ``metric`` NONE means it is always shown."""

    title: str
    width: int
    metric: Metric
    text: Callable[[EpochRecord], str]


def _number(value: float | None, digits: int, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}"


COLUMNS = (
    Column("epoch", 5, Metric.NONE, lambda r: str(r.epoch)),
    Column("train loss", 10, Metric.TRAIN_LOSS, lambda r: _number(r.train_loss, 6)),
    Column("val loss", 10, Metric.VAL_LOSS, lambda r: _number(r.val_loss, 6)),
    Column("top-1 %", 7, Metric.VAL_TOP1, lambda r: _number(r.top1, 2, 100.0)),
    Column("top-5 %", 7, Metric.VAL_TOP5, lambda r: _number(r.top5, 2, 100.0)),
    Column("EMA loss", 10, Metric.EMA_LOSS, lambda r: _number(r.ema_loss, 6)),
    Column("EMA top-1 %", 11, Metric.EMA_TOP1, lambda r: _number(r.ema_top1, 2, 100.0)),
    Column("EMA top-5 %", 11, Metric.EMA_TOP5, lambda r: _number(r.ema_top5, 2, 100.0)),
    Column("lr", 10, Metric.NONE, lambda r: _number(r.lr, 8)),
    Column("s", 7, Metric.NONE, lambda r: _number(r.seconds, 2)),
    Column("samples/s", 10, Metric.NONE, lambda r: _number(r.samples_per_s, 0)),
    Column("wait %", 6, Metric.NONE, lambda r: _number(r.wait_share, 1, 100.0)),
)


def table_header(metrics: Metric = DEFAULT_METRICS) -> str:
    return "  ".join(c.title.rjust(c.width) for c in _shown(metrics))


def table_row(record: EpochRecord, metrics: Metric = DEFAULT_METRICS) -> str:
    """The epoch's line; "-" where the epoch was not validated."""
    return "  ".join(c.text(record).rjust(c.width) for c in _shown(metrics))


def _shown(metrics: Metric) -> tuple[Column, ...]:
    return tuple(c for c in COLUMNS if c.metric is Metric.NONE or c.metric & metrics)


BAR = "{desc} |{bar}| {n_fmt}/{total_fmt} [{remaining}{postfix}]"
"""With the postfix of a step it fits a terminal of 80 columns."""
USUAL_COLUMNS = 80
ROWS = 20
"""More than one bar needs; without a number tqdm asks the terminal, and draws nothing if that says 0."""


def _columns(terminal: TextIO) -> int:
    """Width of a terminal; some say 0, which means unknown."""
    try:
        return os.get_terminal_size(terminal.fileno()).columns or USUAL_COLUMNS
    except OSError:
        return USUAL_COLUMNS


class ConsoleReporter:
    """The default of ``DeepLearningTask.run``: a table on ``out`` and, when ``err`` is a terminal, a bar per epoch.

    Either is None in a process that was started with that stream closed; then nothing is shown there.
    """

    def __init__(self, metrics: Metric = DEFAULT_METRICS, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._metrics = metrics
        self._out: TextIO | None = out if out is not None else sys.stdout
        self._err: TextIO | None = err if err is not None else sys.stderr
        self._bar: tqdm[Any] | None = None
        self._total_epochs = 0

    def plan(self, text: str) -> None:
        self._line(text)

    def run_started(self, total_epochs: int, done_epochs: int) -> None:
        self._total_epochs = total_epochs
        if done_epochs:
            self._line(f"resumed after {done_epochs} of {total_epochs} epochs")
        self._line(table_header(self._metrics))

    def epoch_started(self, epoch: int, steps: int, done_steps: int) -> None:
        if self._err is not None and self._err.isatty():
            self._bar = tqdm(
                total=steps,
                initial=done_steps,
                desc=f"epoch {epoch}/{self._total_epochs}",
                bar_format=BAR,
                ncols=_columns(self._err),
                nrows=ROWS,
                leave=False,
                file=self._err,
            )

    def step(self, done_steps: int, loss: float, samples_per_s: float, wait_share: float) -> None:
        if self._bar is not None:
            known = "-" if math.isnan(loss) else f"{loss:.4f}"  # a GPU's first numbers arrive later
            self._bar.set_postfix_str(
                f"loss {known}, {samples_per_s:,.0f} samples/s, wait {wait_share:.0%}", refresh=False
            )
            self._bar.update(done_steps - self._bar.n)

    def epoch_finished(self, record: EpochRecord) -> None:
        self.close()
        self._line(table_row(record, self._metrics))

    def run_finished(self, result: TrainingResult) -> None:
        if result.stopped_early:
            last = result.history[-1]
            self._line(f"stopped early: top-1 reached {last.better_top1 or 0.0:.2%} in epoch {last.epoch}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _line(self, text: str) -> None:
        if self._out is not None:
            self._out.write(text + "\n")
            self._out.flush()
