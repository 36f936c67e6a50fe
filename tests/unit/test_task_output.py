"""An output folder that cannot be used is refused before anything starts; two runs never share one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from renaissance.core.errors import RenaissanceError, ValueRejected
from renaissance.task.output import check_output, owned
from renaissance.task.result import EpochLog, EpochRecord, TrainingResult, write_result

RECORD = EpochRecord(1, 0.5, None, None, None, 1e-3, 2.5, 2.0, 0.5, 60000, "00" * 16)


def test_looking_makes_nothing(tmp_path: Path) -> None:
    check_output(tmp_path / "a" / "b")
    check_output(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("below", ["", "sub", "sub/sub"])
def test_file_in_the_place_of_the_folder_is_named(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueRejected, match=r"output is .*, but .*/file is a file; give a folder"):
        check_output(tmp_path / "file" / below)


def test_folder_that_cannot_be_written_into_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # the tests may run as root
    with pytest.raises(ValueRejected, match="cannot be written into"):
        check_output(tmp_path / "new")


def test_second_run_in_the_same_folder_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    with owned(tmp_path / "run"):
        with pytest.raises(ValueRejected, match=r"run, where another run is writing"), owned(tmp_path / "run"):
            pass
        assert not list((tmp_path / "run").iterdir()), "the lock leaves no file"
    with owned(tmp_path / "run"):
        pass


def test_folder_that_vanishes_or_is_blocked_is_an_error_with_its_name(tmp_path: Path) -> None:
    log = EpochLog(tmp_path / "run")
    (tmp_path / "run" / "log.jsonl").unlink()
    (tmp_path / "run" / "log.jsonl").mkdir()
    with pytest.raises(RenaissanceError, match=r"log\.jsonl: cannot be written"):
        log.append(RECORD)
    (tmp_path / "file").touch()
    with pytest.raises(RenaissanceError, match="file: the folder cannot be made"):
        write_result(tmp_path / "file", TrainingResult(), {})
