"""Every epoch's numbers as TensorBoard events. Needs tensorboardX (extra "tensorboard")."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
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
    """Writes the epochs that are done (a resumed run has some), then each that is added. A context manager.

    Written here and now: tensorboardX's SummaryWriter hands events to a thread, and waits for ever once a full disk has
    ended that one.
    """

    def __init__(self, folder: Path, done: Iterable[EpochRecord] = ()) -> None:
        """Events that an earlier run left in the folder are hidden by the first of this one's."""
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.record_writer import RecordWriter
        from tensorboardX.summary import scalar

        make_folder(folder)
        self._folder, self._event, self._scalar = folder, Event, scalar
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        with self._named_errors():
            self._file: Any = RecordWriter(str(folder / name))
        self._write(file_version="brain.Event:2")
        self._write(step=1, session_log=SessionLog(status=SessionLog.START))
        for record in done:
            self.add(record)

    def add(self, record: EpochRecord) -> None:
        """One finished epoch; what it has not (no validation, no EMA) is left out, and so are NaN and infinity."""
        for tag, field in TAGS.items():
            value = getattr(record, field)
            if value is not None and math.isfinite(value):
                self._write(step=record.epoch, summary=self._scalar(tag, value))
        with self._named_errors():
            self._file.flush()

    def close(self) -> None:
        with self._named_errors():
            self._file.close()

    def __enter__(self) -> TensorBoardLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        with suppress(*(() if kind is None else (RenaissanceError,))):  # the first error says more
            self.close()

    def _write(self, **content: Any) -> None:
        with self._named_errors():
            self._file.write(self._event(wall_time=time.time(), **content).SerializeToString())

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RenaissanceError(f"{self._folder}: TensorBoard events cannot be written: {error.strerror}") from error
