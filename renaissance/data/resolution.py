"""Schedules of the output size over the epochs, as values (spec/data 6.5); ``Recipe.with_resolution`` does the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from renaissance.core.errors import ValueRejected
from renaissance.data.transform_checks import integer
from renaissance.data.transforms import MAX_SIZE

MAX_EPOCH = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ProgressiveResolution:
    """Grows from ``begin`` to ``end`` pixels over the first ``epochs`` epochs, then stays."""

    begin: int
    end: int
    epochs: int

    def __post_init__(self) -> None:
        begin = integer("ProgressiveResolution", "begin", self.begin, 1, MAX_SIZE)
        end = integer("ProgressiveResolution", "end", self.end, 1, MAX_SIZE)
        if begin > end:
            raise ValueRejected(f"ProgressiveResolution: begin {begin} is above end {end}; give the smaller first")
        epochs = integer("ProgressiveResolution", "epochs", self.epochs, 1, MAX_EPOCH)
        for field, value in (("begin", begin), ("end", end), ("epochs", epochs)):
            object.__setattr__(self, field, value)

    def at(self, epoch: int) -> int:
        """Pixels in ``epoch``, counted from 0; raises ValueRejected for a negative one."""
        epoch = integer("ProgressiveResolution", "epoch", epoch, 0, MAX_EPOCH)
        return self.begin + (self.end - self.begin) * min(epoch, self.epochs) // self.epochs

    def sizes(self) -> tuple[int, ...]:
        """Every size that occurs, smallest first: what a trainer compiles for."""
        if self.epochs >= self.end - self.begin:  # at most a pixel more each epoch
            return tuple(range(self.begin, self.end + 1))
        return tuple(self.at(epoch) for epoch in range(self.epochs + 1))


@dataclass(frozen=True, slots=True)
class SteppedResolution:
    """``steps``: pairs (first epoch, pixels); the first epoch of the first is 0 and they rise."""

    steps: Sequence[tuple[int, int]]

    def __post_init__(self) -> None:
        given = self.steps
        if not isinstance(given, Sequence) or not given or not all(_is_pair(step) for step in given):
            raise ValueRejected(f"SteppedResolution: steps is {given!r}; expected pairs of epoch and pixels")
        steps = tuple(
            (
                integer("SteppedResolution", f"epoch of step {i}", epoch, 0, MAX_EPOCH),
                integer("SteppedResolution", f"pixels of step {i}", pixels, 1, MAX_SIZE),
            )
            for i, (epoch, pixels) in enumerate(given)
        )
        epochs = [epoch for epoch, _ in steps]
        if epochs[0] != 0 or any(b <= a for a, b in pairwise(epochs)):
            raise ValueRejected(f"SteppedResolution: epochs are {epochs}; expected 0 first, then rising")
        object.__setattr__(self, "steps", steps)

    def at(self, epoch: int) -> int:
        """Pixels in ``epoch``, counted from 0; raises ValueRejected for a negative one."""
        epoch = integer("SteppedResolution", "epoch", epoch, 0, MAX_EPOCH)
        return [pixels for first, pixels in self.steps if first <= epoch][-1]

    def sizes(self) -> tuple[int, ...]:
        """Every size that occurs, smallest first: what a trainer compiles for."""
        return tuple(sorted({pixels for _, pixels in self.steps}))


def _is_pair(step: object) -> bool:
    return isinstance(step, Sequence) and len(step) == 2
