"""Which models a run writes besides checkpoints: the best one so far, and those of chosen epochs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from renaissance.task.result import EpochRecord


class Save(Protocol):
    """Writes the model to a file, with its moving averages as the weights when ``ema``."""

    def __call__(self, path: Path, *, ema: bool) -> object: ...


class ModelSaver:
    """Gets every finished epoch. ``done``: the epochs before a resume, whose best counts on."""

    def __init__(
        self, save: Save, best: Path | None, at: Iterable[tuple[int, Path]], done: Iterable[EpochRecord] = ()
    ) -> None:
        self._save = save
        self._best_path = best
        self._at = dict(at)
        self._best = max((r.better_top1 for r in done if r.better_top1 is not None), default=-1.0)

    def epoch_done(self, record: EpochRecord) -> None:
        """Write what this epoch asks for. The first of equals stays the best, and weights before moving averages."""
        if record.epoch in self._at:
            self._save(self._at[record.epoch], ema=False)
        reached = record.better_top1
        if reached is not None and reached > self._best:
            self._best = reached
            if self._best_path is not None:
                self._save(self._best_path, ema=record.top1 is None or record.top1 < reached)
