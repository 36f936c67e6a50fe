"""Progressive resolution without the trainer: each epoch has the bytes of a session opened for it alone."""

from __future__ import annotations

from pathlib import Path

import picture_sets as sets
import pytest
from picture_sets import open_pictures

from renaissance.core.errors import DataServerError, ValueRejected
from renaissance.data.client import server_stats
from renaissance.data.private_daemon import start_private_daemon
from renaissance.data.progressive import progressive_stations
from renaissance.data.recipe import Recipe
from renaissance.data.resolution import ProgressiveResolution, SteppedResolution
from renaissance.data.station import TransferStation


def test_each_epoch_has_the_bytes_of_a_session_of_its_own(tmp_path: Path) -> None:
    sets.make_tree(tmp_path)
    schedule = ProgressiveResolution(24, 32, epochs=4)
    with start_private_daemon({"imagenet": tmp_path}, workers=1) as daemon:
        opened: list[tuple[int, int]] = []

        def open_at(recipe: Recipe, epoch: int) -> TransferStation:
            opened.append((epoch, recipe.resolution))
            return open_pictures(daemon.address, recipe=recipe, start_epoch=epoch)

        found = {}
        for epoch, station in progressive_stations(open_at, sets.PICTURE_RECIPE, schedule, range(6)):
            for batch in station.epoch(epoch):
                assert batch.images.shape[1:] == (schedule.at(epoch), schedule.at(epoch), 3)
            found[epoch] = station.epoch_digest(epoch)
        assert opened == [(0, 24), (1, 26), (2, 28), (3, 30), (4, 32)]
        assert not server_stats(daemon.address)["sessions"]
        for epoch in (0, 3, 5):
            recipe = sets.PICTURE_RECIPE.with_resolution(schedule.at(epoch))
            with open_pictures(daemon.address, recipe=recipe, start_epoch=epoch) as alone:
                for _ in alone.epoch(epoch):
                    pass
                assert alone.epoch_digest(epoch) == found[epoch]
        stations = progressive_stations(open_at, sets.PICTURE_RECIPE, SteppedResolution([(0, 24), (9, 32)]), [3, 9])
        _, first = next(stations)
        stations.close()  # type: ignore[attr-defined]
        with pytest.raises(DataServerError):
            first.acquire(3, 0)


def test_recipe_without_a_size_to_change_is_refused_before_anything_is_opened() -> None:
    def never(recipe: Recipe, epoch: int) -> TransferStation:
        raise AssertionError("opened")

    with pytest.raises(ValueRejected, match="no transform sets the size"):
        next(progressive_stations(never, sets.CIFAR_PLAIN, SteppedResolution([(0, 24)]), [0]))
