"""Which samples one worker prepares: its rows of every batch of an epoch, from the order of the epoch.

Asked by the worker for the batch at hand and by its read-ahead threads for what comes next, so it is guarded by a lock
and keeps two epochs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from renaissance.data.making.spec import SessionSpec
from renaissance.data.order import epoch_order, rank_share
from renaissance.data.protocol import MAX_EPOCH

EPOCHS_KEPT = 2

Table = tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]
"""Sample ids and labels [batches, own rows] of one epoch; both -1 where a row is empty."""


class EpochTables:
    """``rows`` are the worker's rows of a batch, int64[k]."""

    def __init__(
        self,
        spec: SessionSpec,
        rows: npt.NDArray[np.int64],
        labels: npt.NDArray[np.int32],
        block_starts: npt.NDArray[np.int64] | None,
    ) -> None:
        self._spec = spec
        self._rows = rows
        self._labels = labels
        self._block_starts = block_starts
        self._kept: dict[int, Table] = {}
        self._lock = threading.Lock()

    def epoch(self, epoch: int) -> Table:
        """The table of one epoch; computed when it is not one of the last two that were asked for."""
        with self._lock:
            table = self._kept.pop(epoch, None)
            if table is None:
                while len(self._kept) >= EPOCHS_KEPT:
                    del self._kept[next(iter(self._kept))]
                table = self._compute(epoch)
            self._kept[epoch] = table
            return table

    def upcoming(self, epoch: int, index: int) -> Iterator[int]:
        """The worker's samples from (epoch, index) on, from one epoch into the next, without empty rows."""
        while epoch <= MAX_EPOCH:
            ids, _ = self.epoch(epoch)
            for batch in ids[index:]:
                yield from batch[batch >= 0].tolist()
            if not (ids >= 0).any():  # nor is there in any other epoch: going on would find nothing, and not end
                return
            epoch, index = epoch + 1, 0

    def _compute(self, epoch: int) -> Table:
        spec = self._spec
        order = epoch_order(
            spec.seed,
            epoch,
            spec.dataset.samples,
            shuffle=spec.shuffle,
            validation=spec.validation,
            mode=spec.order,
            block_starts=self._block_starts,
        )
        share = rank_share(order, spec.rank, spec.world_size)
        batch = spec.layout.batch_size
        padded = np.full(spec.batches_per_epoch * batch, -1, np.int64)
        used = min(padded.size, share.size)
        padded[:used] = share[:used]
        ids = np.ascontiguousarray(padded.reshape(-1, batch)[:, self._rows])
        return ids, np.where(ids >= 0, self._labels[ids], np.int32(-1))
