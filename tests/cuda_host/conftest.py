"""CUDA sources on the CPU: no GPU and no driver. Tests that need a C++ compiler or NVIDIA's wheels skip by name."""

from __future__ import annotations

import nvrtc_ahead
import pytest

COMPILES_ALL = "test_every_kernel_compiles_for_every_target_within_its_limits"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The test that waits for all kernels comes last of all, since they are compiled beside the others."""
    items.sort(key=lambda item: item.name == COMPILES_ALL)


def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.config.option.collectonly and any(item.name == COMPILES_ALL for item in session.items):
        nvrtc_ahead.start()


def pytest_sessionfinish() -> None:
    nvrtc_ahead.stop()
