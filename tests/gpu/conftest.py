"""Tests that need a GPU; without one each is skipped by name, with the reason.

RENAISSANCE_GPU=standin runs them on the stand-in of tests/cuda_host: for work on the tests themselves.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from renaissance.backend.cuda.device import DeviceContext, open_device
from renaissance.core.errors import DeviceError


@pytest.fixture(scope="session")
def device() -> Iterator[DeviceContext]:
    """GPU 0, opened once."""
    if os.environ.get("RENAISSANCE_GPU") == "standin":
        import cuda_standin

        with cuda_standin.device() as opened:
            yield opened
        return
    try:
        opened = open_device(0)
    except DeviceError as error:
        pytest.skip(f"no GPU: {error}")
    with opened:
        yield opened


@pytest.fixture(scope="session")
def real_gpu(device: DeviceContext) -> DeviceContext:
    """For what the stand-in cannot show."""
    if device.name == "stand-in":
        pytest.skip("needs a GPU, not its stand-in")
    return device
