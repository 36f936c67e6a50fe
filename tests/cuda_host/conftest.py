"""CUDA sources on the CPU: no GPU and no driver. Tests that need a C++ compiler or NVIDIA's wheels skip by name."""

from __future__ import annotations

import nvrtc_ahead
import pytest


def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.config.option.collectonly and any(item.path.stem == "test_nvrtc_targets" for item in session.items):
        nvrtc_ahead.start()


def pytest_sessionfinish() -> None:
    nvrtc_ahead.stop()
