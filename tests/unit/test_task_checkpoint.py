"""Checkpoints: what goes in comes out, half files are never seen, another run's checkpoint is refused by name."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from renaissance.core.dtype import DType
from renaissance.core.errors import CheckpointError
from renaissance.task import checkpoint as module
from renaissance.task.checkpoint import (
    Checkpoint,
    CheckpointFolder,
    load_checkpoint,
    save_checkpoint,
    verify_identity,
)
from renaissance.task.result import EpochRecord, Progress

IDENTITY = {"seed": 123, "optimizer": {"kind": "ADAMW", "beta2": 0.999}, "sizes": (1, 2)}
RECORD = EpochRecord(1, 0.1 + 0.2, None, None, None, 1e-3, 2.5, 2.0, 0.5, 60000, "00" * 16)


def make(epoch: int = 1, batch: int = 7) -> Checkpoint:
    rng = np.random.default_rng(0)
    progress = Progress(epoch, batch, (RECORD,), ("aa", "bb"), 14, 1.5, 0.25)
    arrays = {
        "fc0.weight": rng.standard_normal((3, 1, 1, 5)).astype(np.float32),
        "step": np.array([[[[42]]]], dtype=np.int32),
    }
    return Checkpoint(IDENTITY, progress, arrays, {"fc0.weight": DType.FP32, "step": DType.INT32})


def test_checkpoint_round_trip_is_exact(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a.tsr", make())
    read = load_checkpoint(tmp_path / "a.tsr")
    assert read.progress == make().progress
    assert list(read.arrays) == ["fc0.weight", "step"]
    for name, array in make().arrays.items():
        assert read.arrays[name].tobytes() == array.tobytes()
        assert read.arrays[name].shape == array.shape
    verify_identity(tmp_path / "a.tsr", read.identity, IDENTITY)


def test_mismatch_names_every_part_with_both_values(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a.tsr", make())
    stored = load_checkpoint(tmp_path / "a.tsr").identity
    other = {**IDENTITY, "seed": 124, "optimizer": {"kind": "ADAMW", "beta2": 0.99}}
    with pytest.raises(CheckpointError) as caught:
        verify_identity(tmp_path / "a.tsr", stored, other)
    text = str(caught.value)
    assert "optimizer.beta2 is 0.999 in the checkpoint and 0.99 in this run" in text
    assert "seed is 123 in the checkpoint and 124 in this run" in text


def test_folder_keeps_the_last_two_and_names_the_latest(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    paths = [folder.write(make(epoch, batch)) for epoch, batch in [(0, 5), (1, 0), (1, 5)]]
    assert folder.latest() == paths[-1]
    assert sorted(p.name for p in folder.path.iterdir()) == sorted([paths[1].name, paths[2].name, "latest"])


def test_new_run_in_an_old_folder_never_resumes_the_old_one(tmp_path: Path) -> None:
    CheckpointFolder(tmp_path).write(make(99, 0))
    fresh = CheckpointFolder(tmp_path)
    path = fresh.write(make(1, 0))
    assert fresh.latest() == path
    assert sorted(p.name for p in fresh.path.iterdir()) == [path.name, "latest"]


def test_writer_killed_at_any_moment_leaves_a_complete_latest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CheckpointFolder(tmp_path)
    first = folder.write(make(1, 0))

    class Killed(BaseException):
        pass

    def die(*arguments: object) -> None:
        raise Killed

    for name in ("save_checkpoint", "write_atomic"):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, die)
            with pytest.raises(Killed):
                folder.write(make(2, 0))
        assert CheckpointFolder(tmp_path).latest() == first
        assert load_checkpoint(first).progress.epoch == 1


def test_next_checkpoint_removes_what_a_killed_writer_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CheckpointFolder(tmp_path)
    temporary: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda source, target: (temporary.append(source), os.rename(source, target)))
        folder.write(make(1, 0))
    for path in temporary:
        Path(path).write_bytes(b"half")
    path = folder.write(make(2, 0))
    assert len(temporary) == 2, "the checkpoint and the pointer"
    assert {p.name for p in folder.path.iterdir()} == {"epoch-00001-batch-000000.tsr", path.name, "latest"}


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe\x80", b"a\0b", b"epoch-00009-batch-000000.tsr\n", b"../a.tsr\n", None]
)
def test_damaged_pointer_is_named_with_what_it_says(tmp_path: Path, content: bytes | None) -> None:
    folder = CheckpointFolder(tmp_path)
    pointer = folder.write(make(1, 0)).with_name("latest")
    pointer.unlink()
    if content is None:
        pointer.mkdir()
    else:
        pointer.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"checkpoints/latest: (names '|cannot be read)"):
        folder.latest()


def test_no_checkpoint_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        CheckpointFolder(tmp_path).latest()
    with pytest.raises(CheckpointError, match=r"nothing\.tsr: no such checkpoint"):
        load_checkpoint(tmp_path / "nothing.tsr")


@pytest.mark.parametrize("damage", ["truncate", "flip", "text"])
def test_damaged_checkpoint_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.tsr"
    save_checkpoint(path, make())
    data = bytearray(path.read_bytes())
    if damage == "truncate":
        data = data[:-3]
    elif damage == "flip":
        data[-3] ^= 1
    else:
        data = bytearray(b"not a checkpoint")
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"a\.tsr: not a readable checkpoint"):
        load_checkpoint(path)


def test_metadata_of_another_kind_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make().progress.to_json()
    for changed, named in (
        ({}, "metadata: KeyError: 'epoch'"),
        ({**whole, "history": [{}]}, "metadata: KeyError: 'epoch'"),
        ({**whole, "history": 3}, "metadata: TypeError"),
        ({**whole, "epoch": "1"}, "the run is at epoch '1', batch 7; expected numbers from 0"),
    ):
        monkeypatch.setattr(Progress, "to_json", lambda self, changed=changed: changed)
        save_checkpoint(tmp_path / "a.tsr", make())
        with pytest.raises(CheckpointError, match=f"a\\.tsr: .*{named}"):
            load_checkpoint(tmp_path / "a.tsr")


def test_foreign_tsr_file_is_refused(tmp_path: Path) -> None:
    from renaissance.core.shape import Shape
    from renaissance.tensor import Tensor, save_tsr

    save_tsr(tmp_path / "w.tsr", Tensor.zeros(Shape.of(4)))
    with pytest.raises(CheckpointError, match="not a readable checkpoint"):
        load_checkpoint(tmp_path / "w.tsr")
