"""Nothing is allocated after compile (law 3): counted over 100 steps of a real run, and the count can fail."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from training_support import cut_mnist, settings, small_task

from renaissance.core.errors import MemoryPlanError
from renaissance.task import DeepLearningTask, SilentReporter

BATCH = 8
WARM_UP, COUNTED = 20, 100
HEAP_LIMIT = 32 * 1024
"""Bytes of growth allowed over the counted steps: the epoch keeps one 16-byte digest per step, as objects about 50."""


class Allocations(SilentReporter):
    """Counts what the counted steps took from the arena and from Python's heap."""

    def __init__(self, task: DeepLearningTask) -> None:
        self.task = task
        self.arena = -1
        self.heap = -1

    def _now(self) -> tuple[int, int]:
        return self.task.engine.executor.arena.allocations, tracemalloc.get_traced_memory()[0]

    def step(self, done_steps: int, loss: float, samples_per_s: float, wait_share: float) -> None:
        if done_steps == WARM_UP:
            self.start = self._now()
        elif done_steps == WARM_UP + COUNTED:
            end = self._now()
            self.arena, self.heap = end[0] - self.start[0], end[1] - self.start[1]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cut_mnist(tmp_path_factory.mktemp("mnist"))


@pytest.fixture
def _traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def count(data: Path, each_step: Callable[[DeepLearningTask], object] | None = None) -> Allocations:
    with settings(data, batch=BATCH):
        task = small_task(1)
        counter = Allocations(task)
        task.reporter(counter).compile()
        if each_step is not None:
            step = task.engine.train_step

            def with_allocation(slot: int, valid: int, lr: float, last: bool, *, end: bool, frozen: bool) -> None:
                step(slot, valid, lr, last, end=end, frozen=frozen)
                each_step(task)

            task.engine.train_step = with_allocation  # type: ignore[method-assign]
        task.run()
    assert counter.arena >= 0, "the counted steps were reached"
    return counter


def passes(counter: Allocations) -> bool:
    return counter.arena == 0 and counter.heap < HEAP_LIMIT


@pytest.mark.usefixtures("_traced")
def test_steps_after_warm_up_allocate_nothing(data: Path) -> None:
    counter = count(data)
    assert counter.arena == 0
    assert counter.heap < HEAP_LIMIT


@pytest.mark.usefixtures("_traced")
def test_the_count_fails_when_a_step_keeps_memory(data: Path) -> None:
    kept: list[bytearray] = []
    assert not passes(count(data, lambda task: kept.append(bytearray(1024))))


def test_the_arena_refuses_a_block_after_compile(data: Path) -> None:
    with pytest.raises(MemoryPlanError, match="after compile"):
        count(data, lambda task: task.engine.executor.arena.block(256, "planted"))
