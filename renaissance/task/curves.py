"""Learning curves of a run as one picture, ``curves.png`` in the output folder. Needs matplotlib (extra "plot").

matplotlib is imported when a picture is drawn, and only its canvas for files: no window, no global state. The same
records give the same bytes with the same version of matplotlib.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from renaissance.task.result import EpochRecord, write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVES_FILE = "curves.png"
SIZE = (10.0, 4.0)
"""Inches; at 100 dots per inch."""


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw_curves(folder: Path, history: Sequence[EpochRecord]) -> Path:
    """Draw losses, accuracies and the learning rate of ``history`` into ``folder``; returns the file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, dpi=100, layout="constrained")
    losses, accuracies = figure.subplots(1, 2)
    _lines(losses, history, {"training": "train_loss", "validation": "val_loss", "EMA": "ema_loss"}, 1.0)
    losses.set_ylabel("loss")
    names = {"top-1": "top1", "top-5": "top5", "EMA top-1": "ema_top1", "EMA top-5": "ema_top5"}
    _lines(accuracies, history, names, 100.0)
    accuracies.set_ylabel("%")
    rate = accuracies.twinx()
    rate.plot([r.epoch for r in history], [r.lr for r in history], color="0.7", linewidth=1.0)
    rate.set_ylabel("learning rate", color="0.5")
    for before, after in pairwise(history):
        if before.resolution != after.resolution:
            losses.axvline(after.epoch - 0.5, color="0.7", linestyle=":")
            losses.annotate(f"{after.resolution} px", (after.epoch - 0.5, 1.0), xycoords=("data", "axes fraction"))
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Software": None})
    path = folder / CURVES_FILE
    write_atomic(path, picture.getvalue())
    return path


def _lines(axes: Axes, history: Sequence[EpochRecord], names: dict[str, str], scale: float) -> None:
    """One line per field that has values, over the epochs that have one."""
    for label, field in names.items():
        points = [(r.epoch, getattr(r, field) * scale) for r in history if getattr(r, field) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, marker="." if len(points) < 30 else None)
    axes.set_xlabel("epoch")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
