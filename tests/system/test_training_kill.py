"""A dead process costs nothing (law 6), seen from the trainer: any of the three kinds is killed in the middle of a run.

Always: no hang, an error where one is due, nothing left behind, and the run that goes on ends with the very same
weights and data digest as one that nobody disturbed.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from training_support import (
    children,
    cut_mnist,
    daemon_folders,
    is_alive,
    open_descriptors,
    ring_mappings,
    settings,
    small_task,
    start_child,
    wait_until,
)

from renaissance.core.errors import DataServerError
from renaissance.data.client import server_stats
from renaissance.task import SilentReporter, TrainingResult

EPOCHS, STEPS = 3, 6
"""Of a run on the cut data set."""

HANG = 5.0
"""Seconds: law 6's limit."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cut_mnist(tmp_path_factory.mktemp("mnist"))


@pytest.fixture(scope="module")
def undisturbed(data: Path) -> TrainingResult:
    with settings(data):
        task = small_task(EPOCHS)
        task.compile()
        return task.run()


@pytest.fixture(autouse=True)
def _own_folder_for_sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Not below tmp_path: the path of a Unix socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="kill-", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield


class KillAtStep(SilentReporter):
    """Sends SIGKILL to ``victim()`` once ``at`` steps of the run are done."""

    def __init__(self, at: int, victim) -> None:  # type: ignore[no-untyped-def]
        self.at, self.victim, self.done, self.killed_at = at, victim, 0, 0.0

    def step(self, done_steps: int, loss: float, samples_per_s: float, wait_share: float) -> None:
        self.done += 1
        if self.done == self.at:
            os.kill(self.victim(), signal.SIGKILL)
            self.killed_at = time.monotonic()


def assert_nothing_left(descriptors: int) -> None:
    gc.collect()  # the traceback of an expected error holds the last batch
    wait_until(lambda: not children(os.getpid()), "child processes end")
    assert daemon_folders() == set()
    assert ring_mappings() == 0
    assert open_descriptors() <= descriptors


@pytest.mark.parametrize("at", random.Random(6).sample(range(2, EPOCHS * STEPS - 3), 6))
def test_killed_trainer_leaves_nothing_and_its_resumed_run_equals_the_undisturbed_one(
    at: int, data: Path, undisturbed: TrainingResult, tmp_path: Path
) -> None:
    with start_child(data, tmp_path, EPOCHS, 1) as trainer:
        assert trainer.stdout is not None
        steps = 0
        for line in trainer.stdout:
            steps += line.startswith("step")
            if steps == at:
                break
        family = children(trainer.pid)
        assert family, "the private daemon and its workers are children"
        trainer.kill()
        trainer.communicate()
        wait_until(lambda: not any(map(is_alive, family)), "daemon and workers end with their trainer", HANG)
        wait_until(lambda: daemon_folders() == set(), "the daemon's socket folder is gone", HANG)
        assert not [name for name in os.listdir("/dev/shm") if str(trainer.pid) in name]

    with start_child(data, tmp_path, EPOCHS, 1, "--resume") as resumed:
        out, err = resumed.communicate()
        assert resumed.returncode == 0, err
    assert out.splitlines()[-1] == f"digests {undisturbed.data_digest} {undisturbed.weight_digest}"
    assert out.count("step") <= EPOCHS * STEPS - at + 1, "it went on where the other one was"


@pytest.mark.parametrize("at", random.Random(7).sample(range(1, EPOCHS * STEPS - 4), 7))
def test_killed_daemon_is_a_clear_error_at_once_and_the_run_can_go_on(
    at: int, data: Path, undisturbed: TrainingResult, tmp_path: Path
) -> None:
    descriptors = open_descriptors()
    with settings(data):
        broken = small_task(EPOCHS).output(tmp_path).checkpoint_every(steps=1)
        killer = KillAtStep(at, lambda: broken._data.daemon.pid)  # type: ignore[union-attr]
        broken.reporter(killer).compile()
        with pytest.raises(DataServerError, match=r"resume from .*epoch-\d+-batch-\d+\.tsr"):
            broken.run()
        assert time.monotonic() - killer.killed_at < HANG
        assert_nothing_left(descriptors)
        task = small_task(EPOCHS).output(tmp_path).checkpoint_every(steps=1).resume(True)
        task.compile()
        result = task.run()
    assert (result.data_digest, result.weight_digest) == (undisturbed.data_digest, undisturbed.weight_digest)


def test_run_that_breaks_off_never_points_to_a_checkpoint_of_another_run(data: Path, tmp_path: Path) -> None:
    with settings(data):
        small_task(1).output(tmp_path).compile().run()
        broken = small_task(EPOCHS).output(tmp_path)
        broken.reporter(KillAtStep(1, lambda: broken._data.daemon.pid)).compile()  # type: ignore[union-attr]
        with pytest.raises(DataServerError, match="no checkpoint was written yet"):
            broken.run()


@pytest.mark.parametrize("at", random.Random(8).sample(range(1, EPOCHS * STEPS - 2), 7))
def test_killed_worker_changes_nothing(at: int, data: Path, undisturbed: TrainingResult, tmp_path: Path) -> None:
    descriptors = open_descriptors()
    with settings(data):
        task = small_task(EPOCHS)
        address = lambda: task._data.daemon.address  # noqa: E731
        task.reporter(KillAtStep(at, lambda: random.Random(at).choice(worker_pids(address()))))
        task.compile()
        result = task.run()
    assert (result.data_digest, result.weight_digest) == (undisturbed.data_digest, undisturbed.weight_digest)
    assert_nothing_left(descriptors)


def worker_pids(address: str) -> list[int]:
    """The daemon's workers, as its statistics name them."""
    return [worker["pid"] for worker in server_stats(address)["workers"]]
