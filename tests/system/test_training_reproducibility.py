"""Weights are a function (law 2): of the data, the model and the options; of nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from training_support import cut_mnist, settings, small_task

from renaissance.core.errors import CheckpointError
from renaissance.data.private_daemon import start_private_daemon
from renaissance.task import SilentReporter, TrainingResult
from renaissance.task.checkpoint import CheckpointFolder, load_checkpoint

EPOCHS = 3


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cut_mnist(tmp_path_factory.mktemp("mnist"))


def train(data: Path, *, seed: int = 123, amp: bool = True, workers: int = 2, **calls: tuple[object, ...]):  # type: ignore[no-untyped-def]
    with settings(data, seed=seed, amp=amp, workers=workers):
        task = small_task(EPOCHS)
        for setter, arguments in calls.items():
            getattr(task, setter)(*arguments)
        task.compile()
        return task.run()


@pytest.fixture(scope="module")
def straight(data: Path) -> TrainingResult:
    return train(data)


def digests(result: TrainingResult) -> tuple[str, str]:
    return result.data_digest, result.weight_digest


def test_same_seed_gives_the_same_digests_for_any_number_of_workers(data: Path, straight: TrainingResult) -> None:
    assert digests(train(data, workers=1)) == digests(straight)
    assert digests(train(data, workers=3)) == digests(straight)
    assert len(straight.weight_digest) == len(straight.data_digest) == 32


def test_another_seed_gives_other_digests(data: Path, straight: TrainingResult) -> None:
    other = train(data, seed=124)
    assert other.data_digest != straight.data_digest
    assert other.weight_digest != straight.weight_digest


def test_fp32_run_is_repeatable_and_differs_from_bf16(data: Path, straight: TrainingResult) -> None:
    first, second = train(data, amp=False), train(data, amp=False)
    assert digests(first) == digests(second)
    assert first.weight_digest != straight.weight_digest


def test_shared_daemon_and_checked_digests_change_nothing(data: Path, straight: TrainingResult) -> None:
    with start_private_daemon({"mnist": data}, workers=2) as daemon:
        for _ in range(2):
            assert digests(train(data, dataserver=(daemon.address,), check_digest=(True,))) == digests(straight)


class StopAtStep(SilentReporter):
    """Interrupts the run after so many steps, as Ctrl-C does."""

    def __init__(self, at: int) -> None:
        self.left = at

    def step(self, done_steps: int, loss: float, samples_per_s: float, wait_share: float) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def interrupted(data: Path, output: Path, at: int) -> None:
    with settings(data):
        task = small_task(EPOCHS).output(output).checkpoint_every(steps=1).reporter(StopAtStep(at))
        task.compile()
        with pytest.raises(KeyboardInterrupt):
            task.run()


@pytest.mark.parametrize("at", [2, 6, 17])
def test_run_interrupted_at_any_step_and_resumed_equals_the_straight_run(
    at: int, data: Path, straight: TrainingResult, tmp_path: Path
) -> None:
    interrupted(data, tmp_path, at)
    with settings(data):
        task = small_task(EPOCHS).output(tmp_path).checkpoint_every(steps=1).resume(True)
        task.compile()
        resumed = task.run()
    assert digests(resumed) == digests(straight)
    assert [r.train_loss for r in resumed.history] == [r.train_loss for r in straight.history]
    assert [r.top1 for r in resumed.history] == [r.top1 for r in straight.history]


def test_checkpoint_of_another_run_is_refused_with_both_values(data: Path, tmp_path: Path) -> None:
    interrupted(data, tmp_path, 4)
    with (
        settings(data, seed=5),
        pytest.raises(CheckpointError, match="seed is 123 in the checkpoint and 5 in this run"),
    ):
        small_task(EPOCHS).output(tmp_path).resume(True).compile()
    with settings(data), pytest.raises(CheckpointError, match="model is"):
        small_task(EPOCHS, hidden=48).output(tmp_path).resume(True).compile()
    with settings(data), pytest.raises(CheckpointError, match=r"schedule\.epochs is 3 in the checkpoint and 4"):
        small_task(EPOCHS + 1).output(tmp_path).resume(True).compile()


def test_checkpoint_holds_masters_moments_and_persistent_scalars(data: Path, tmp_path: Path) -> None:
    interrupted(data, tmp_path, 4)
    checkpoint = load_checkpoint(CheckpointFolder(tmp_path).latest())
    names = set(checkpoint.arrays)
    assert {"step", "scaling", "accum_loss", "accum_count"} <= names | {"scaling"}
    assert int(checkpoint.arrays["step"].reshape(-1)[0]) == 3  # the interrupt came before the fourth was saved
    weights = 784 * 64 + 64 + 64 * 32 + 32 + 32 * 10 + 10
    floats = sum(a.size for a in checkpoint.arrays.values() if a.dtype == np.float32 and a.size > 1)
    assert floats == 3 * weights, "weights, first and second moments"
