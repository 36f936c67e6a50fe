"""Every epoch's numbers as TensorBoard events. Needs tensorboardX (extra "tensorboard")."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from renaissance.core.errors import RenaissanceError
from renaissance.task.output import make_folder
from renaissance.task.result import EpochRecord

TAGS = {
    "loss/train": "train_loss",
    "loss/validation": "val_loss",
    "loss/ema": "ema_loss",
    "accuracy/top-1": "top1",
    "accuracy/top-5": "top5",
    "accuracy/ema_top-1": "ema_top1",
    "accuracy/ema_top-5": "ema_top5",
    "run/learning_rate": "lr",
    "run/samples_per_second": "samples_per_s",
    "run/wait_share": "wait_share",
    "run/resolution": "resolution",
}
"""Tag -> field of EpochRecord; the step of an event is the epoch, from 1."""


class TensorBoardLog:
    """Writes the epochs that are done (a resumed run has some), then each that is added. A context manager."""

    def __init__(self, folder: Path, done: Iterable[EpochRecord] = ()) -> None:
        """Events that an earlier run left in the folder are hidden by the first of this one's."""
        from tensorboardX import SummaryWriter

        make_folder(folder)
        self._folder = folder
        try:
            self._writer: Any = SummaryWriter(str(folder), purge_step=1)
        except OSError as error:
            raise RenaissanceError(f"{folder}: TensorBoard events cannot be written: {error.strerror}") from error
        for record in done:
            self.add(record)

    def add(self, record: EpochRecord) -> None:
        """One finished epoch; what it has not (no validation, no EMA) is left out, and so are NaN and infinity."""
        for tag, field in TAGS.items():
            value = getattr(record, field)
            if value is not None and math.isfinite(value):
                self._writer.add_scalar(tag, value, record.epoch)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def __enter__(self) -> TensorBoardLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
