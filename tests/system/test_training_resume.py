"""Laws 2 and 6 with everything switched on: a trainer that is killed again and again ends like one left in peace.

Residual network with batch norm and dropout, LARS with Nesterov, decay, clipping, loss scaling, switch-EMA, progressive
resolution, a first layer that is frozen on the way, test-time augmentation. What is compared is the digest of the
weights and that of their moving averages; what is saved is shown to be worth saving.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from training_support import EVERYTHING_EPOCHS, GROWS, cut_mnist, everything_task, settings, start_child

from renaissance.task import TrainingResult
from renaissance.task.checkpoint import CheckpointFolder, load_checkpoint
from renaissance.task.models import read_model
from renaissance.task.result import read_result

STEPS = 6
"""Per epoch, on the cut data set."""


@dataclass(frozen=True)
class Straight:
    """A run that nobody disturbed, and what its state was before the first step."""

    data: Path
    folder: Path
    result: TrainingResult
    initial: dict[str, npt.NDArray[Any]]
    series: dict[str, str]  # of each tensor's region


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Straight:
    folder = tmp_path_factory.mktemp("straight")
    data = cut_mnist(folder / "data")
    with settings(data, progressive=GROWS):
        task = everything_task(data / "choices.json").output(folder / "run").learning_curves(True)
        task.tensorboard(folder / "board").save_best_model(folder / "models" / "best.safetensors")
        task.save_model_at_epoch(EVERYTHING_EPOCHS, folder / "last.safetensors").compile()
        compiled, engine = task.compiled, task.engine
        tensors = [compiled.tensor(i) for i in compiled.state]
        initial = {t.name: engine.read(t.id).copy() for t in tensors}
        return Straight(data, folder, task.run(), initial, {t.name: t.region.series for t in tensors})


def test_run_killed_at_random_steps_ends_like_the_straight_one(straight: Straight, tmp_path: Path) -> None:
    half, draw = EVERYTHING_EPOCHS * STEPS // 2, random.Random(20)
    kills = [draw.randrange(2, half), draw.randrange(half, 2 * half - 2)]  # at each resolution
    done = 0
    for at in kills:
        resume = ["--resume"] if done else []
        with start_child(straight.data, tmp_path, EVERYTHING_EPOCHS, 1, "--everything", *resume) as trainer:
            assert trainer.stdout is not None
            for line in trainer.stdout:
                done += line.startswith("step")
                if done == at:
                    break
            else:
                raise AssertionError(f"it ended before step {at}: {trainer.communicate()[1]}")
            trainer.kill()
            trainer.communicate()
        # Steps after the last complete checkpoint are done again.
        progress = load_checkpoint(CheckpointFolder(tmp_path).latest()).progress
        done = progress.epoch * STEPS + progress.next_batch
        assert at - 1 <= done <= at + 1

    saved = load_checkpoint(CheckpointFolder(tmp_path).latest()).arrays
    still = {name for name, value in saved.items() if np.array_equal(value, straight.initial[name])}
    assert {series for name, series in straight.series.items() if name not in still} >= set("WMEB")
    assert not still - {"scaling", "accum_top1", "accum_top5"}, "what is saved has moved since the start"
    assert saved["dropout_step"].item() == done == saved["good_steps"].item()

    with start_child(straight.data, tmp_path, EVERYTHING_EPOCHS, 1, "--everything", "--resume") as trainer:
        out, err = trainer.communicate()
        assert trainer.returncode == 0, err
    want = straight.result
    assert want.ema_digest not in (None, want.weight_digest)
    assert out.splitlines()[-1] == f"digests {want.data_digest} {want.weight_digest} {want.ema_digest}"
    whole, pieces = read_result(straight.folder / "run"), read_result(tmp_path)
    for name in ("train_loss", "val_loss", "top1", "top5", "ema_loss", "ema_top1", "best_ema_top1", "best_epoch"):
        assert whole[name] == pieces[name], name


def test_a_run_leaves_what_it_was_asked_for(straight: Straight) -> None:
    folder, result = straight.folder, straight.result
    assert {p.name for p in (folder / "run").iterdir()} == {"result.json", "log.jsonl", "curves.png", "checkpoints"}
    assert [p.name.split(".")[0] for p in (folder / "board").iterdir()] == ["events"]
    assert [r.resolution for r in result.history] == [20, 20, 28, 28]
    assert all(r.ema_top1 is not None and r.ema_loss is not None for r in result.history)
    written = read_result(folder / "run")
    assert written["numeric"]["convolutions"], "what tune chose is part of the profile"
    assert json.loads((straight.data / "choices.json").read_text())["choices"]
    assert written["configuration"]["train_resolution"] == [[0, 20], [2, 28]]
    assert read_model(folder / "last.safetensors").weights == "main"
    better = [r.better_top1 for r in result.history]
    best = result.history[better.index(max(x for x in better if x is not None))]
    assert read_model(folder / "models" / "best.safetensors").weights == (
        "main" if best.top1 == best.better_top1 else "ema"
    )
