"""CapturedGraph: the executable form of a list of nodes. Backends implement it; nothing here runs anything."""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol


class CaptureMode(IntEnum):
    """What a backend makes of a program."""

    EAGER = 0
    """Node by node through Python, for tests and debugging."""
    QUEUE = 1
    """A CPU queue of bound native calls."""
    CUDA_GRAPH = 2
    """One CUDA Graph per rank."""


class CapturedGraph(Protocol):
    """A program bound to addresses. ``launch`` replays it and allocates nothing (law 3)."""

    @property
    def mode(self) -> CaptureMode:
        """How it was captured."""

    def launch(self) -> None:
        """Run the program once. Raises DeviceError that names the node when a call reports failure."""
