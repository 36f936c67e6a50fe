"""One worker's part of one session: where it is in the stream, and the way from there to finished shares.

Worker w of W owns the rows p with p mod W = w of each batch. What it writes depends on the recipe, the seed, the epoch
and the stored samples alone, so a successor that does a share again writes the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from dataserver.shared import Board, PoolPage, notify
from renaissance.data.making.makers import map_data, open_maker
from renaissance.data.making.policy import ShareOfBatch
from renaissance.data.making.spec import SessionSpec
from renaissance.data.protocol import MAX_EPOCH, Ring, fence, make_tag


class Share:
    """Made when the session is attached, closed when it ends. ``step`` never waits for anything."""

    def __init__(
        self,
        session: int,
        spec: SessionSpec,
        worker: int,
        workers: int,
        page: PoolPage,
        fds: list[int],
        on_ready: Callable[[], None],
        on_damage: Callable[[int, list[dict[str, object]]], None],
    ) -> None:
        """``fds``: ring, board, data set, and the done eventfd, which this object owns; the mappings need no fd.
        ``on_ready`` is called from any thread when ``step``, which had nothing to do, has something; ``on_damage`` with
        the session and what was found damaged, before the batch can be published.
        """
        ring, board, data, self._done = fds
        self._page = page
        self._on_damage = on_damage
        layout = spec.layout
        self.session = session
        self._spec = spec
        self._worker = worker
        self._depth = layout.depth
        self._ring = Ring(ring, layout)
        self._board = Board(board, layout.depth, workers)
        self._rows = np.arange(worker, layout.batch_size, workers, dtype=np.int64)
        self._stride = slice(worker, None, workers)
        self._maker, self._tables, self._policy = open_maker(spec, map_data(data, spec.dataset), self._rows, on_ready)
        self._generation = 0
        self._sequence = self._epoch = self._index = 0
        self._at_hand: ShareOfBatch | None = None  # begun, but not finished
        self._made = 0  # rows of it that are

    def step(self) -> bool:
        """Go on with the next share if its slot is free; False when there is nothing to do now."""
        if self._board.generation != self._generation:
            self._reposition()
        slot = self._sequence % self._depth
        if not self._ring.is_free_for(slot, self._sequence):
            return False
        if self._epoch > MAX_EPOCH:
            return False  # the consumer may still be reading the last one
        fence()
        self._page.begin(self._worker, self.session)
        if self._at_hand is None:
            self._at_hand, self._made = self._begin(slot), 0
        made = self._make(self._at_hand) if self._rows.size else 0
        self._made += made
        if self._made == self._rows.size:
            self._finish(slot)
        self._page.idle(self._worker)
        return made > 0 or self._at_hand is None

    def _begin(self, slot: int) -> ShareOfBatch:
        ids, labels = self._tables.epoch(self._epoch)
        self._ring.labels[slot][self._stride] = labels[self._index]
        return ShareOfBatch(
            epoch=self._epoch,
            index=self._index,
            ids=ids[self._index],
            rows=self._rows,
            out=self._ring.rows[slot],
            hashes=self._ring.hashes[slot],
            labels=self._ring.labels[slot],
        )

    def _make(self, share: ShareOfBatch) -> int:
        try:
            return self._maker.make(share, self._made)
        finally:
            if reports := self._policy.take_reports():
                self._on_damage(self.session, reports)

    def _finish(self, slot: int) -> None:
        if self._board.mark_done(slot, self._worker, make_tag(self._generation, self._sequence)):
            notify(self._done)
        self._at_hand = None
        self._sequence += 1
        self._index += 1
        if self._index == self._spec.batches_per_epoch:
            self._epoch, self._index = self._epoch + 1, 0

    def _reposition(self) -> None:
        generation, start, epoch, index = self._board.read_seek()
        self._generation = generation
        self._sequence = self._board.next_sequence(self._worker, generation, start)
        self._epoch, self._index = self._spec.advance(epoch, index, self._sequence - start)
        self._at_hand = None  # what was begun for the old place is not needed any more
        self._maker.restart(self._epoch, self._index)

    def where(self) -> str:
        """The place in the stream, for messages."""
        return f"epoch {self._epoch} batch {self._index}"

    def close(self) -> None:
        """Free the descriptors and the threads; never waits."""
        self._maker.close()
        os.close(self._done)
