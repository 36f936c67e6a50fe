"""The data side of a run: a private daemon or an address, and a session for each set and training resolution.

Closing is idempotent and never hides what went wrong first: a daemon that has died is already the error of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from renaissance.core.dtype import DType
from renaissance.core.errors import DataServerError, ValueRejected
from renaissance.core.log import get_logger
from renaissance.core.machine import CorePlan
from renaissance.data.order import share_size
from renaissance.data.preprocessor import PreprocessorConfig
from renaissance.data.private_daemon import PrivateDaemon, start_private_daemon
from renaissance.data.recipe import Recipe
from renaissance.data.station import TransferStation

_log = get_logger("task.dataplane")


Tails = tuple[int | None, int | None]
"""Rows of the last training and validation batch where they are fewer than a full batch, else None."""


def tails(samples: tuple[int, int], batch: int, drop_last: bool, world_size: int = 1) -> Tails:
    """Of sets with ``samples`` training and validation samples, for each rank; ``drop_last``: training has no short
    batch. A rank whose share is one sample smaller has an empty row in it."""
    train, val = (share_size(n, world_size) for n in samples)
    return None if drop_last else train % batch or None, val % batch or None


@dataclass(frozen=True, slots=True)
class Start:
    """A training session: its recipe, and the epoch and batch (from 0) that are read first."""

    recipe: Recipe
    epoch: int
    batch: int


@dataclass(frozen=True, slots=True)
class Feed:
    """What is asked of the daemon: ``trains`` is one recipe for each training resolution, with where it starts."""

    seed: int
    batch_size: int  # of each rank
    dtype: DType
    check_digest: bool
    trains: tuple[Start, ...]
    val_start: int = 0  # pass over the validation set, from 0
    rank: int = 0
    world_size: int = 1


class DataPlane:
    """Open sessions; a context manager. Made by ``open``."""

    def __init__(self, daemon: PrivateDaemon | None, trains: Sequence[TransferStation], val: TransferStation) -> None:
        self.daemon = daemon
        self.train = trains[0]
        self.train_end = trains[1] if len(trains) > 1 else None
        self.val = val

    @classmethod
    def open(cls, preprocessor: PreprocessorConfig, feed: Feed, address: str | None, cores: CorePlan) -> Self:
        """Start a daemon unless an address is given, and open all sessions.

        Raises DataServerError when the daemon cannot be reached or started, ProtocolError when it speaks another
        version. Nothing is left behind then.
        """
        daemon = None
        if address is None:
            daemon = start_private_daemon(
                {preprocessor.dataset: preprocessor.folder},
                workers=cores.workers,
                data_format=preprocessor.format,
                cpus=cores.worker_cpus,
                nice=cores.worker_nice,
                load=preprocessor.load,
                level=preprocessor.level,
                read_ahead=preprocessor.read_ahead or 0,
            )
            address = daemon.address
        opened: list[TransferStation] = []
        try:
            for start in (*feed.trains, None):
                opened.append(_station(address, preprocessor, feed, start))  # noqa: PERF401  # the second may fail
        except BaseException:
            _close_all(opened, daemon)
            raise
        plane = cls(daemon, opened[:-1], opened[-1])
        for station in opened:
            if station.num_classes != preprocessor.num_classes:
                plane.close()
                raise ValueRejected(
                    f"the dataserver's {preprocessor.dataset} ({station.split}) has {station.num_classes} classes; the "
                    f"files in {preprocessor.folder} have {preprocessor.num_classes}, which the model is built for"
                )
        return plane

    @property
    def stations(self) -> tuple[TransferStation, ...]:
        """All sessions."""
        return tuple(s for s in (self.train, self.train_end, self.val) if s is not None)

    @property
    def samples(self) -> tuple[int, int]:
        """Sizes of the training and the validation set."""
        return self.train.num_samples, self.val.num_samples

    def tails(self) -> Tails:
        """Rows of the short last batches of the sessions that are open."""
        train = self.train
        return tails(self.samples, train.batch_size, train.drop_last, train.world_size)

    def close(self) -> None:
        _close_all(self.stations, self.daemon)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _station(address: str, preprocessor: PreprocessorConfig, feed: Feed, start: Start | None) -> TransferStation:
    """A training session that begins at ``start``, or the validation session (None)."""
    training = start is not None
    return TransferStation(
        address,
        dataset=preprocessor.dataset,
        split="train" if training else "val",
        recipe=preprocessor.val_recipe if start is None else start.recipe,
        seed=feed.seed,
        batch_size=feed.batch_size,
        dtype=feed.dtype,
        shuffle=preprocessor.shuffle_train if training else False,
        depth=preprocessor.ring_depth,
        drop_last=preprocessor.drop_last if training else False,
        check_digest=feed.check_digest,
        start_epoch=feed.val_start if start is None else start.epoch,
        start_batch=0 if start is None else start.batch,
        rank=feed.rank,
        world_size=feed.world_size,
        order=preprocessor.order if training else "global",
        on_corrupt=preprocessor.corrupt.action,
        max_corrupt=preprocessor.corrupt.max_samples,
        max_corrupt_share=preprocessor.corrupt.max_share,
    )


def _close_all(stations: Sequence[TransferStation], daemon: PrivateDaemon | None) -> None:
    for station in stations:
        station.close()
    if daemon is not None:
        try:
            daemon.close()
        except DataServerError as error:
            _log.warning("%s", str(error))  # not the object: a kept log record would keep the frames, and the ring
