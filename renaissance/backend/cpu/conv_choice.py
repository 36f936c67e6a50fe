"""Which algorithm runs a convolution: a rule by shape, element type and instruction set."""

from __future__ import annotations

from renaissance.backend.cpu.conv_algorithms import (
    BackwardData,
    BackwardWeight,
    Forward,
    Job,
    LibraryBackwardData,
    LibraryBackwardWeight,
    LibraryForward,
    WidenedBackwardData,
    WidenedBackwardWeight,
    WidenedForward,
    half_convolutions,
)
from renaissance.backend.cpu.onednn import onednn


def forward(job: Job) -> Forward:
    """The algorithm for CONV_FWD and CONV_INF."""
    return WidenedForward(job) if _widen(job) else LibraryForward(job)


def backward_data(job: Job) -> BackwardData:
    """The algorithm for CONV_BWD_DATA."""
    return WidenedBackwardData(job) if _widen(job) else LibraryBackwardData(job)


def backward_weight(job: Job) -> BackwardWeight:
    """The algorithm for CONV_BWD_WEIGHT."""
    return WidenedBackwardWeight(job) if _widen(job) else LibraryBackwardWeight(job)


def _widen(job: Job) -> bool:
    return job.half and not half_convolutions(onednn())
