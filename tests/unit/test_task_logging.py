"""What a run leaves besides result and checkpoints: curves, TensorBoard events, chosen models."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from renaissance.core.errors import RenaissanceError
from renaissance.task.curves import draw_curves
from renaissance.task.logging_tensorboard import TensorBoardLog
from renaissance.task.model_saver import ModelSaver
from renaissance.task.result import EpochRecord, Progress, TrainingResult

RECORD = EpochRecord(1, 2.0, 1.5, 0.5, 0.9, 0.1, 2.5, 2.0, 0.5, 1000, "00" * 16, resolution=20)
HISTORY = [
    RECORD,
    replace(RECORD, epoch=2, train_loss=float("nan"), val_loss=None, top1=None, top5=None, resolution=28),
    replace(RECORD, epoch=3, train_loss=1.0, top1=0.6, ema_loss=1.2, ema_top1=0.7, ema_top5=0.95, resolution=28),
]


def test_learning_curves_are_a_picture_with_the_same_bytes_every_time(tmp_path: Path) -> None:
    first = draw_curves(tmp_path, HISTORY).read_bytes()
    assert draw_curves(tmp_path, HISTORY).read_bytes() == first
    pixels = np.asarray(Image.open(tmp_path / "curves.png").convert("RGB"))
    assert pixels.shape == (400, 1000, 3)
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 20, "lines are drawn"
    assert draw_curves(tmp_path, HISTORY[:1]).read_bytes() != first
    assert [p.name for p in tmp_path.iterdir()] == ["curves.png"]
    assert "matplotlib.pyplot" not in sys.modules, "no window system is touched"


def test_tensorboard_gets_every_epoch_and_a_resumed_run_those_before_it(tmp_path: Path) -> None:
    with TensorBoardLog(tmp_path, HISTORY[:1]) as board:
        board.add(HISTORY[1])
        board.add(HISTORY[2])
    (file,) = tmp_path.iterdir()
    events = read_events(file)
    assert dict(events["loss/train"]) == {1: 2.0, 3: 1.0}, "NaN is left out"
    assert [step for step, _ in events["accuracy/top-1"]] == [1, 3]
    assert events["accuracy/ema_top-1"] == [(3, np.float32(0.7))]
    assert [value for _, value in events["run/resolution"]] == [20, 28, 28]


def test_a_full_disk_ends_tensorboard_with_an_error_that_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboardX import record_writer

    monkeypatch.setattr(record_writer, "open_file", lambda path: open("/dev/full", "wb"))  # noqa: SIM115
    with (
        pytest.raises(RenaissanceError, match=f"{tmp_path}: TensorBoard events cannot be written: No space left"),
        TensorBoardLog(tmp_path) as board,
    ):
        board.add(RECORD)


def read_events(path: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboardX.proto.event_pb2 import Event

    found: dict[str, list[tuple[int, float]]] = {}
    data, at = path.read_bytes(), 0
    while at < len(data):  # length u64, its CRC u32, the event, its CRC u32
        size = int.from_bytes(data[at : at + 8], "little")
        event = Event.FromString(data[at + 12 : at + 12 + size])
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value.simple_value))
        at += 16 + size
    return found


def test_the_best_model_and_those_of_chosen_epochs_are_saved() -> None:
    saved: list[tuple[str, bool]] = []

    def save(path: Path, *, ema: bool) -> None:
        saved.append((path.name, ema))

    def feed(top1: list[float | None], ema: list[float | None], done: int = 0) -> list[tuple[str, bool]]:
        saved.clear()
        records = [
            replace(RECORD, epoch=i + 1, top1=a, ema_top1=b) for i, (a, b) in enumerate(zip(top1, ema, strict=True))
        ]
        saver = ModelSaver(save, Path("best"), [(2, Path("second"))], records[:done])
        for record in records[done:]:
            saver.epoch_done(record)
        return list(saved)

    assert feed([0.5, None, 0.5, 0.6], [None] * 4) == [("best", False), ("second", False), ("best", False)]
    assert feed([0.5, 0.7, 0.6], [0.6, 0.7, 0.8]) == [
        ("best", True),
        ("second", False),
        ("best", False),
        ("best", True),
    ]
    assert feed([0.5, 0.7, 0.6], [None] * 3, done=2) == [], "the best before a resume counts on"
    assert feed([0.0], [None]) == [("best", False)], "a first model is kept, however bad"


def test_result_names_the_best_of_weights_and_of_moving_averages() -> None:
    result = TrainingResult.of(Progress(history=tuple(HISTORY)), "aa", "bb")
    assert (result.best_top1, result.best_epoch) == (0.6, 3)
    assert (result.best_ema_top1, result.best_ema_top5, result.best_ema_epoch) == (0.7, 0.95, 3)
    assert (result.weight_digest, result.ema_digest) == ("aa", "bb")
    plain = TrainingResult.of(Progress(history=(HISTORY[1],)), "aa")
    assert (plain.best_epoch, plain.best_ema_top1, plain.best_ema_epoch, plain.ema_digest) == (-1, None, -1, None)
