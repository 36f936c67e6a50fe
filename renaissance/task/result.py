"""What a run leaves behind: one record per epoch, the result, and their two files.

``result.json`` is written once, whole, under its final name (law 7); ``log.jsonl`` gets one line per finished epoch.
Epochs are counted from 1 in everything a user reads; fractions are 0..1, times seconds, speeds samples/s.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from renaissance.core.digest import chain_digest
from renaissance.core.errors import FormatError, MissingFileError, RenaissanceError
from renaissance.core.files import written_when_complete
from renaissance.task.output import make_folder

RESULT_FILE = "result.json"
LOG_FILE = "log.jsonl"


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """One finished epoch. Validation fields are None in an epoch without validation."""

    epoch: int  # from 1
    train_loss: float  # mean over the samples of the steps that were not skipped
    val_loss: float | None
    top1: float | None  # fraction
    top5: float | None  # fraction
    lr: float  # of the epoch's first step
    seconds: float  # training and validation
    train_seconds: float
    wait_seconds: float  # of train_seconds, blocked on the dataserver
    samples: int  # trained on in this epoch
    data_digest: str  # hex, of every training batch delivered
    ema_loss: float | None = None  # of the moving averages; None without EMA, too
    ema_top1: float | None = None
    ema_top5: float | None = None
    resolution: int = 0  # side of the training samples, pixels

    @property
    def better_top1(self) -> float | None:
        """The higher top-1 of weights and moving averages."""
        return max((top1 for top1 in (self.top1, self.ema_top1) if top1 is not None), default=None)

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.train_seconds if self.train_seconds > 0 else 0.0

    @property
    def wait_share(self) -> float:
        return self.wait_seconds / self.train_seconds if self.train_seconds > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> EpochRecord:
        return cls(**{name: data[name] for name in cls.__dataclass_fields__})


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run is: which batch comes next, and what the finished epochs and the open one have left."""

    epoch: int = 0  # index from 0 of the open epoch
    next_batch: int = 0
    history: tuple[EpochRecord, ...] = ()
    batch_digests: tuple[str, ...] = ()  # hex, of the open epoch's batches before next_batch
    samples: int = 0  # trained on in the open epoch
    train_seconds: float = 0.0  # of the open epoch
    wait_seconds: float = 0.0  # of the open epoch
    stopped_early: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "next_batch": self.next_batch,
            "history": [record.to_json() for record in self.history],
            "batch_digests": list(self.batch_digests),
            "samples": self.samples,
            "train_seconds": self.train_seconds,
            "wait_seconds": self.wait_seconds,
            "stopped_early": self.stopped_early,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Progress:
        return cls(
            epoch=data["epoch"],
            next_batch=data["next_batch"],
            history=tuple(EpochRecord.from_json(record) for record in data["history"]),
            batch_digests=tuple(data["batch_digests"]),
            samples=data["samples"],
            train_seconds=data["train_seconds"],
            wait_seconds=data["wait_seconds"],
            stopped_early=data["stopped_early"],
        )


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The outcome of a run; ``best_*`` are of the epoch with the highest top-1 (the first of equals), ``best_ema_*`` of
    that with the highest EMA top-1."""

    best_top1: float = 0.0
    best_top5: float = 0.0
    best_epoch: int = -1  # from 1; -1 without any validation
    data_digest: str = ""  # hex, chain of the epoch digests
    weight_digest: str = ""  # hex, see task.state.weight_digest
    stopped_early: bool = False
    history: tuple[EpochRecord, ...] = ()
    best_ema_top1: float | None = None  # None without EMA
    best_ema_top5: float | None = None
    best_ema_epoch: int = -1
    ema_digest: str | None = None  # as weight_digest, of the moving averages

    @classmethod
    def of(cls, progress: Progress, weights: str, ema: str | None = None) -> TrainingResult:
        """The result of a run that ended at ``progress`` with the digests ``weights`` and ``ema``."""
        # max keeps the first of equals
        best = max(progress.history, key=lambda record: _rank(record.top1), default=None)
        best_ema = max(progress.history, key=lambda record: _rank(record.ema_top1), default=None)
        return cls(
            best_top1=(best.top1 or 0.0) if best else 0.0,
            best_top5=(best.top5 or 0.0) if best else 0.0,
            best_epoch=best.epoch if best and best.top1 is not None else -1,
            best_ema_top1=best_ema.ema_top1 if best_ema else None,
            best_ema_top5=best_ema.ema_top5 if best_ema else None,
            best_ema_epoch=best_ema.epoch if best_ema and best_ema.ema_top1 is not None else -1,
            ema_digest=ema,
            data_digest=chain_digest(bytes.fromhex(record.data_digest) for record in progress.history).hex(),
            weight_digest=weights,
            stopped_early=progress.stopped_early,
            history=progress.history,
        )

    @property
    def epochs(self) -> int:
        """Epochs trained, those before a resume included."""
        return len(self.history)

    @property
    def samples_per_s(self) -> float:
        """Training samples over training seconds, all epochs, validation not counted."""
        seconds = sum(r.train_seconds for r in self.history)
        return sum(r.samples for r in self.history) / seconds if seconds > 0 else 0.0

    @property
    def wait_share(self) -> float:
        """Share of the training seconds that was spent blocked on the dataserver."""
        seconds = sum(r.train_seconds for r in self.history)
        return sum(r.wait_seconds for r in self.history) / seconds if seconds > 0 else 0.0

    @property
    def epoch_seconds(self) -> tuple[float, ...]:
        return tuple(r.seconds for r in self.history)

    def to_json(self) -> dict[str, Any]:
        return {
            "best_top1": self.best_top1,
            "best_top5": self.best_top5,
            "best_epoch": self.best_epoch,
            "best_ema_top1": self.best_ema_top1,
            "best_ema_top5": self.best_ema_top5,
            "best_ema_epoch": self.best_ema_epoch,
            "epochs": self.epochs,
            "samples_per_s": self.samples_per_s,
            "wait_share": self.wait_share,
            "data_digest": self.data_digest,
            "weight_digest": self.weight_digest,
            "ema_digest": self.ema_digest,
            "stopped_early": self.stopped_early,
            "epoch_seconds": list(self.epoch_seconds),
            "train_loss": [r.train_loss for r in self.history],
            "val_loss": [r.val_loss for r in self.history],
            "top1": [r.top1 for r in self.history],
            "top5": [r.top5 for r in self.history],
            "ema_loss": [r.ema_loss for r in self.history],
            "ema_top1": [r.ema_top1 for r in self.history],
            "ema_top5": [r.ema_top5 for r in self.history],
        }


def _rank(top1: float | None) -> float:
    """An epoch that was not validated is below every one that was."""
    return -1.0 if top1 is None else top1


def write_atomic(path: Path, data: bytes) -> None:
    """Make ``path`` hold exactly ``data``, or what it held before; its folder is made when missing."""
    make_folder(path.parent)
    with written_when_complete(path) as file:
        file.write(data)


def write_result(folder: Path, result: TrainingResult, facts: Mapping[str, Any]) -> Path:
    """Write result.json: the result, then ``facts`` (configuration, versions, numeric profile, times)."""
    path = folder / RESULT_FILE
    write_atomic(path, (json.dumps(_plain({**result.to_json(), **facts}), indent=2) + "\n").encode())
    return path


def read_result(folder: Path) -> dict[str, Any]:
    """Read result.json. Raises MissingFileError, or FormatError when it is not JSON."""
    path = folder / RESULT_FILE
    try:
        data: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise MissingFileError(f"{path}: no such file; a run writes it when it ends") from None
    except ValueError as error:
        raise FormatError(f"{path}: not a JSON result file ({error})") from None
    return data


class EpochLog:
    """``log.jsonl``: starts as the records already done (a resumed run has some), then one line per epoch."""

    def __init__(self, folder: Path, done: Iterable[EpochRecord] = ()) -> None:
        self._path = folder / LOG_FILE
        write_atomic(self._path, "".join(self._line(record) for record in done).encode())

    def append(self, record: EpochRecord) -> None:
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(self._line(record))
        except OSError as error:
            raise RenaissanceError(f"{self._path}: cannot be written: {error.strerror}") from error

    @staticmethod
    def _line(record: EpochRecord) -> str:
        return json.dumps(_plain(record.to_json())) + "\n"


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity; other readers reject them, so they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
