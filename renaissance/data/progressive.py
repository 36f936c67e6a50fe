"""Progressive resolution for any consumer: a new session where the size of the pictures changes, the same one else.

    schedule = ProgressiveResolution(128, 224, epochs=18)

    def open_station(recipe, epoch):
        return TransferStation(address, dataset="imagenet", split="train", recipe=recipe, seed=1, batch_size=256,
                               start_epoch=epoch)

    for epoch, station in progressive_stations(open_station, recipe, schedule, range(18)):
        for batch in station.epoch(epoch):
            train(batch)

The bytes of an epoch depend on its number and its resolution alone, never on the sessions before it, so a run can
resume at any epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from renaissance.data.recipe import Recipe
from renaissance.data.station import TransferStation


class Schedule(Protocol):
    """``ProgressiveResolution``, ``SteppedResolution`` and whatever else gives each epoch its size."""

    def at(self, epoch: int) -> int:
        """Side of the pictures in ``epoch`` (pixels)."""
        ...


def progressive_stations(
    open: Callable[[Recipe, int], TransferStation], recipe: Recipe, schedule: Schedule, epochs: Iterable[int]
) -> Iterator[tuple[int, TransferStation]]:
    """Each epoch with the station to read it from; a station is closed when the next is needed or the loop is left.

    ``open(recipe, epoch)`` opens a session that starts at ``epoch`` with the recipe it is given, which is ``recipe`` at
    the resolution of that epoch. Raises what ``Recipe.with_resolution`` and ``open`` raise.
    """
    station: TransferStation | None = None
    side = 0
    try:
        for epoch in epochs:
            wanted = schedule.at(epoch)
            if station is None or wanted != side:
                sized = recipe.with_resolution(wanted)
                if station is not None:
                    station.close()
                station, side = open(sized, epoch), wanted
            yield epoch, station
    finally:
        if station is not None:
            station.close()
