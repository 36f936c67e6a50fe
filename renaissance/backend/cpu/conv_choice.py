"""Which algorithm runs a convolution: a rule by shape, element type and instruction set.

The rule is fixed and no timing at capture, so that the same machine always runs the same code (law 2).
"""

from __future__ import annotations

from typing import Any, cast

from renaissance.backend.cpu.conv_algorithms import (
    BackwardData,
    BackwardWeight,
    Direction,
    Forward,
    Job,
    LibraryBackwardData,
    LibraryBackwardWeight,
    LibraryForward,
    WidenedBackwardData,
    WidenedBackwardWeight,
    WidenedForward,
)
from renaissance.backend.cpu.conv_winograd import WinogradBackwardData, WinogradBackwardWeight, WinogradForward

CANDIDATES: dict[Direction, tuple[Any, ...]] = {
    Direction.FORWARD: (WinogradForward, LibraryForward, WidenedForward),
    Direction.DATA: (WinogradBackwardData, LibraryBackwardData, WidenedBackwardData),
    Direction.WEIGHT: (WinogradBackwardWeight, LibraryBackwardWeight, WidenedBackwardWeight),
}
"""Classes of algorithms; the first that supports a job and is not passed over by the rule is taken."""


def forward(job: Job) -> Forward:
    """The algorithm for CONV_FWD and CONV_INF."""
    return cast("Forward", choose(job))


def backward_data(job: Job) -> BackwardData:
    """The algorithm for CONV_BWD_DATA."""
    return cast("BackwardData", choose(job))


def backward_weight(job: Job) -> BackwardWeight:
    """The algorithm for CONV_BWD_WEIGHT."""
    return cast("BackwardWeight", choose(job))


def choose(job: Job) -> Forward | BackwardData | BackwardWeight:
    """The algorithm of a job, made."""
    made: Forward | BackwardData | BackwardWeight = supported(job)[0](job)
    return made


def supported(job: Job) -> list[Any]:
    """Classes of algorithms that can run a job, in order of preference."""
    return [a for a in CANDIDATES[job.direction] if a.supports(job)]
