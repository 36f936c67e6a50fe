"""For tests of a task up to the moment when it would open its data: settings of their own, and no daemon.

A test file imports the fixtures, which then act on all of its tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from renaissance import GLOBAL_SETTING, PREPROCESSOR_SETTING
from renaissance.task import deep_learning_task

MNIST = Path(__file__).resolve().parents[2] / "data" / "mnist"


@pytest.fixture(autouse=True)
def own_settings() -> Iterator[None]:
    with GLOBAL_SETTING.scoped(), PREPROCESSOR_SETTING.scoped():
        yield


@pytest.fixture(autouse=True)
def no_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a daemon was started")

    monkeypatch.setattr(deep_learning_task.DataPlane, "open", refuse)
