"""Workers of one session without processes: shares that a test steps, and a consumer that reads what they finish."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dataserver.share import Share
from dataserver.shared import Board, PoolPage, create_eventfd, create_memfd
from dataserver.store import DatasetStore
from renaissance.core.digest import batch_digest
from renaissance.core.dtype import DType
from renaissance.data.making.spec import LoadedSet, SessionSpec
from renaissance.data.order import batches_per_epoch
from renaissance.data.protocol import Ring, RingLayout, make_tag
from renaissance.data.recipe import Recipe

LIMIT_SECONDS = 20.0
MEMORY = 1 << 30


def session_spec(dataset: LoadedSet, recipe: Recipe, **changes: object) -> SessionSpec:
    """A session on ``dataset``; ``batch_size``, ``dtype``, ``depth`` and fields of SessionSpec can be changed."""
    given = {"batch_size": 16, "dtype": DType.UINT8, "depth": 2, "rank": 0, "world_size": 1, "seed": 5} | changes
    size, depth, dtype = given.pop("batch_size"), given.pop("depth"), given.pop("dtype")
    channels = recipe.color_channels
    layout = RingLayout(depth, size, recipe.resolution, recipe.resolution, channels, channels, dtype)  # type: ignore[arg-type]
    fields = {
        "dataset_name": dataset.name,
        "split": dataset.split,
        "dataset": dataset,
        "recipe_json": recipe.to_json(),
        "shuffle": dataset.split == "train",
        "batches_per_epoch": batches_per_epoch(dataset.samples, size, given["world_size"]),  # type: ignore[arg-type]
        "layout": layout,
    }
    return SessionSpec(**(fields | given))  # type: ignore[arg-type]


@dataclass
class Delivered:
    epoch: int
    index: int
    labels: np.ndarray
    rows: np.ndarray
    digest: bytes


@dataclass
class Workers:
    """All workers of one session, stepped by the caller's thread."""

    spec: SessionSpec
    data_fd: int
    workers: int = 1
    reports: list[dict[str, object]] = field(default_factory=list)
    alter: Callable[[Share], None] | None = None  # called for every share that is made

    def __post_init__(self) -> None:
        layout = self.spec.layout
        self._fds = [
            create_memfd("ring", layout.total_bytes),
            create_memfd("board", Board.size(layout.depth, self.workers)),
        ]
        self._fds.append(create_memfd("page", PoolPage.size(self.workers)))
        self.ring = Ring(self._fds[0], layout, create=True)
        self.board = Board(self._fds[1], layout.depth, self.workers)
        self.ready = threading.Event()
        self._generation, self._sequence = 0, 0
        self._position = (0, 0)
        self.seek(0, 0)
        self.shares = [self._share(worker) for worker in range(self.workers)]

    def _share(self, worker: int) -> Share:
        ring, board, page_fd = self._fds
        fds = [ring, board, self.data_fd, create_eventfd()]
        page = PoolPage(page_fd, self.workers)
        share = Share(
            1, self.spec, worker, self.workers, page, fds, self.ready.set, lambda _, r: self.reports.extend(r)
        )
        if self.alter is not None:
            self.alter(share)
        return share

    def replace(self, worker: int) -> None:
        """As if the worker had been killed: a successor that knows only what is in shared memory."""
        self.shares[worker].close()
        self.shares[worker] = self._share(worker)

    def seek(self, epoch: int, index: int) -> None:
        self._generation += 1
        self._position = (epoch, index)
        self.board.write_seek(self._generation, self._sequence, epoch, index)

    def step(self) -> bool:
        """One step of every worker; False when none had anything to do."""
        worked = [share.step() for share in self.shares]
        return any(worked)

    def run_until(self, done: Callable[[], bool]) -> None:
        while not done():
            self.ready.clear()
            if not self.step() and not done():
                assert self.ready.wait(LIMIT_SECONDS), "a worker waits, and nobody wakes it"

    def next(self) -> Delivered:
        """The next batch, as a consumer gets it."""
        slot = self._sequence % self.spec.layout.depth
        self.run_until(lambda: self.board.is_complete(slot, make_tag(self._generation, self._sequence)))
        epoch, index = self._position
        labels, rows = self.ring.labels[slot].copy(), self.ring.rows[slot].copy()
        valid = self.spec.valid_rows(index)
        digest = batch_digest(epoch, index, labels[:valid], self.ring.hashes[slot][:valid])
        self.ring.release(slot, self._sequence)
        self._sequence += 1
        self._position = self.spec.advance(epoch, index, 1)
        return Delivered(epoch, index, labels, rows, digest)

    def epoch(self) -> list[Delivered]:
        return [self.next() for _ in range(self.spec.batches_per_epoch)]

    def close(self) -> None:
        for share in self.shares:
            share.close()
        self.shares.clear()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()


def load(folder: Path, name: str, split: str = "train", **options: str) -> tuple[DatasetStore, LoadedSet, int]:
    """A store and one split of it; close the store."""
    store = DatasetStore({name: folder}, **options)  # type: ignore[arg-type]
    return store, *store.load(name, split, MEMORY)
