"""Laws 2 and 6 with everything switched on: a trainer that is killed again and again ends like one left in peace.

Residual network with batch norm and dropout, LARS with Nesterov, decay, clipping, loss scaling, switch-EMA, progressive
resolution, a first layer that is frozen on the way, test-time augmentation. What is compared is the digest of the
weights and that of their moving averages; what is saved is shown to be worth saving.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
from training_support import EVERYTHING_EPOCHS, GROWS, cut_mnist, everything_task, settings, start_child

from renaissance.task.checkpoint import CheckpointFolder, load_checkpoint
from renaissance.task.result import read_result

STEPS = 6
"""Per epoch, on the cut data set."""


def test_run_killed_at_random_steps_ends_like_the_straight_one(tmp_path: Path) -> None:
    data = cut_mnist(tmp_path / "data")
    with settings(data, progressive=GROWS):
        task = everything_task().output(tmp_path / "straight").compile()
        compiled, engine = task.compiled, task.engine
        initial = {compiled.tensor(i).name: engine.read(i).copy() for i in compiled.state}
        series = {compiled.tensor(i).name: compiled.tensor(i).region.series for i in compiled.state}
        straight = task.run()

    broken = tmp_path / "broken"
    half, draw = EVERYTHING_EPOCHS * STEPS // 2, random.Random(20)
    kills = [draw.randrange(2, half), draw.randrange(half, 2 * half - 2)]  # at each resolution
    done = 0
    for at in kills:
        resume = ["--resume"] if done else []
        with start_child(data, broken, EVERYTHING_EPOCHS, 1, "--everything", *resume) as trainer:
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
        progress = load_checkpoint(CheckpointFolder(broken).latest()).progress
        done = progress.epoch * STEPS + progress.next_batch
        assert at - 1 <= done <= at + 1

    saved = load_checkpoint(CheckpointFolder(broken).latest()).arrays
    still = {name for name, value in saved.items() if np.array_equal(value, initial[name])}
    assert {s for name, s in series.items() if name not in still} >= set("WMEB")
    assert not still - {"scaling", "accum_top1", "accum_top5"}, "what is saved has moved since the start"
    assert saved["dropout_step"].item() == done == saved["good_steps"].item()

    with start_child(data, broken, EVERYTHING_EPOCHS, 1, "--everything", "--resume") as trainer:
        out, err = trainer.communicate()
        assert trainer.returncode == 0, err
    assert straight.ema_digest not in (None, straight.weight_digest)
    want = f"digests {straight.data_digest} {straight.weight_digest} {straight.ema_digest}"
    assert out.splitlines()[-1] == want
    whole, pieces = read_result(tmp_path / "straight"), read_result(broken)
    for name in ("train_loss", "val_loss", "top1", "top5", "ema_loss", "ema_top1", "best_ema_top1", "best_epoch"):
        assert whole[name] == pieces[name], name
