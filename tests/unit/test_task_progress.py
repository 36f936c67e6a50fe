"""The epoch table is stable text; no bar without a terminal."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest

from renaissance.cli.errors import run_command
from renaissance.core.enums import Metric
from renaissance.task.progress import ConsoleReporter, table_header, table_row
from renaissance.task.result import EpochLog, EpochRecord, TrainingResult, read_result, write_result

RECORD = EpochRecord(
    epoch=3,
    train_loss=0.5123456789,
    val_loss=0.25,
    top1=0.98765,
    top5=0.9999,
    lr=0.001,
    seconds=2.5,
    train_seconds=2.0,
    wait_seconds=0.5,
    samples=60000,
    data_digest="00" * 16,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_epoch_table_golden() -> None:
    assert table_header() == (
        "epoch  train loss    val loss  top-1 %  top-5 %          lr        s   samples/s  wait %"
    )
    assert table_row(RECORD) == (
        "    3    0.512346    0.250000    98.77    99.99  0.00100000     2.50       30000    25.0"
    )


def test_epoch_without_validation_shows_dashes() -> None:
    unvalidated = EpochRecord.from_json({**RECORD.to_json(), "val_loss": None, "top1": None, "top5": None})
    assert table_row(unvalidated).split()[2:5] == ["-", "-", "-"]


def test_metrics_mask_chooses_the_columns() -> None:
    assert table_header(Metric.VAL_TOP1).split() == ["epoch", "top-1", "%", "lr", "s", "samples/s", "wait", "%"]


def _show(err: io.StringIO) -> tuple[str, str]:
    out = io.StringIO()
    reporter = ConsoleReporter(out=out, err=err)
    reporter.run_started(5, 0)
    reporter.epoch_started(3, 10, 0)
    reporter.step(10, 0.5, 1000.0, 0.25)
    reporter.epoch_finished(RECORD)
    reporter.close()
    return out.getvalue(), err.getvalue()


def test_no_bar_when_stderr_is_not_a_terminal() -> None:
    out, err = _show(io.StringIO())
    assert out.splitlines() == [table_header(), table_row(RECORD)]
    assert err == ""


def test_bar_on_a_terminal_leaves_the_table_alone() -> None:
    out, err = _show(Terminal())
    assert out.splitlines() == [table_header(), table_row(RECORD)]
    assert "epoch 3/5" in err


class Console(Terminal):
    """A terminal that tells its size; 0 x 0 is what a serial line or a pseudo-terminal without a window says."""

    def __init__(self, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size((columns, columns and 24)))

    def fileno(self) -> int:
        return 2


@pytest.mark.parametrize("columns", [80, 0])
def test_bar_shows_loss_speed_and_wait_share_in_80_columns(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    err = Console(columns, monkeypatch)
    monkeypatch.setattr(sys, "stderr", err)  # tqdm asks a standard stream for its size
    reporter = ConsoleReporter(out=io.StringIO())
    reporter.run_started(100, 0)
    reporter.epoch_started(100, 300, 0)
    time = iter(range(1, 10))
    monkeypatch.setattr(reporter._bar, "_time", lambda: next(time) + reporter._bar.start_t)
    reporter.step(1, float("nan"), 1.0, 0.0)
    assert "loss -, 1 samples/s" in err.getvalue(), "no number has arrived yet"
    reporter.step(300, 0.85781, 113794.2, 1.0)
    shown = err.getvalue().split("\r")[-1]
    assert "loss 0.8578, 113,794 samples/s, wait 100%]" in shown
    assert len(shown) <= 80
    reporter.close()


def test_closed_streams_show_nothing_and_fail_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    reporter = ConsoleReporter()
    reporter.plan("text")
    reporter.epoch_started(1, 10, 0)
    reporter.step(10, 0.5, 1000.0, 0.25)
    reporter.epoch_finished(RECORD)
    assert run_command(lambda: None) == 0


def test_result_file_has_the_promised_keys_and_no_nan(tmp_path: Path) -> None:
    bad_loss = EpochRecord.from_json({**RECORD.to_json(), "train_loss": float("nan")})
    result = TrainingResult(0.9, 0.99, 1, "aa", "bb", False, (bad_loss, RECORD))
    write_result(tmp_path, result, {"versions": {"numpy": "2"}})
    data = json.loads((tmp_path / "result.json").read_text(), parse_constant=lambda name: 1 / 0)
    for key in ("best_top1", "best_top5", "best_epoch", "epochs", "samples_per_s", "wait_share", "data_digest"):
        assert key in data
    assert data["epochs"] == 2
    assert data["samples_per_s"] == 30000
    assert data["wait_share"] == 0.25
    assert data["epoch_seconds"] == [2.5, 2.5]
    assert data["train_loss"][0] is None
    assert read_result(tmp_path) == data
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_resumed_log_starts_with_the_epochs_already_done(tmp_path: Path) -> None:
    log = EpochLog(tmp_path)
    log.append(RECORD)
    log.append(RECORD)
    EpochLog(tmp_path, [RECORD]).append(RECORD)
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert EpochRecord.from_json(json.loads(lines[0])) == RECORD
