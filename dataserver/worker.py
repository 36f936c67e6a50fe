"""A worker process: prepares its share of every batch of every session, straight into the shared slots.

Worker w of W owns the rows p with p mod W = w of each batch. It runs ahead over free slots on its own schedule; the
only things it waits for are a released slot and the daemon. What it writes depends on the recipe, the seed, the epoch
and the sample ids alone, so a successor that does a share again writes the same bytes.
"""

from __future__ import annotations

import mmap
import os
import pickle
import select
import socket
import traceback
from typing import Any

import numpy as np
import numpy.typing as npt

from dataserver.shared import Board, PoolPage, drain, notify
from dataserver.spec import SessionSpec
from renaissance.core.errors import RenaissanceError
from renaissance.core.log import get_logger
from renaissance.data.compile import compile_recipe
from renaissance.data.order import epoch_order, rank_share
from renaissance.data.protocol import MAX_EPOCH, Ring, fence, make_tag
from renaissance.data.recipe import Recipe

MESSAGE_BYTES = 1 << 17
ATTACH_FDS = 4
_log = get_logger("dataserver.worker")


class Share:
    """One worker's part of one session."""

    def __init__(
        self, session: int, spec: SessionSpec, worker: int, workers: int, page: PoolPage, fds: list[int]
    ) -> None:
        """``fds``: ring, board, data set, and the done eventfd, which this object owns; the mappings need no fd."""
        ring, board, data, self._done = fds
        self._page = page
        layout = spec.layout
        self.session = session
        self._spec = spec
        self._worker = worker
        self._depth = layout.depth
        self._ring = Ring(ring, layout)
        self._board = Board(board, layout.depth, workers)
        # Private, not read-only: kernels are compiled for writable arrays, and the memfd is sealed anyway.
        mapped = mmap.mmap(data, spec.dataset.total_bytes, flags=mmap.MAP_PRIVATE)
        self._images, self._labels = spec.dataset.pixels(memoryview(mapped))
        self._rows = np.arange(worker, layout.batch_size, workers, dtype=np.int64)
        self._stride = slice(worker, None, workers)
        size = spec.dataset.height, spec.dataset.width, spec.dataset.channels
        self._compiled = compile_recipe(Recipe.from_json(spec.recipe_json), *size, layout.dtype, layout.padded_channels)
        self._generation = 0
        self._sequence = self._epoch = self._index = 0
        self._table_epoch = -1
        self._ids: npt.NDArray[np.int64] = np.empty((0, 0), np.int64)  # [batches, own rows], -1 = empty
        self._label_table: npt.NDArray[np.int32] = np.empty((0, 0), np.int32)  # [batches, own rows]

    def step(self) -> bool:
        """Prepare the next share if its slot is free; False when there is nothing to do now."""
        if self._board.generation != self._generation:
            self._reposition()
        slot = self._sequence % self._depth
        if not self._ring.is_free_for(slot, self._sequence):
            return False
        if self._epoch > MAX_EPOCH:
            return False  # the consumer may still be reading the last one
        fence()
        self._page.begin(self._worker, self.session)
        if self._epoch != self._table_epoch:
            self._load_epoch()
        self._ring.labels[slot][self._stride] = self._label_table[self._index]
        if self._rows.size:
            self._compiled.process(
                self._images,
                self._ids[self._index],
                self._ids[self._index],
                self._spec.seed,
                self._epoch,
                self._spec.validation,
                self._ring.rows[slot],
                self._rows,
                self._ring.hashes[slot],
            )
        if self._board.mark_done(slot, self._worker, make_tag(self._generation, self._sequence)):
            notify(self._done)
        self._sequence += 1
        self._index += 1
        if self._index == self._spec.batches_per_epoch:
            self._epoch, self._index = self._epoch + 1, 0
        self._page.idle(self._worker)
        return True

    def _reposition(self) -> None:
        generation, start, epoch, index = self._board.read_seek()
        self._generation = generation
        self._sequence = self._board.next_sequence(self._worker, generation, start)
        self._epoch, self._index = self._spec.advance(epoch, index, self._sequence - start)

    def _load_epoch(self) -> None:
        spec = self._spec
        order = epoch_order(
            spec.seed, self._epoch, spec.dataset.samples, shuffle=spec.shuffle, validation=spec.validation
        )
        share = rank_share(order, spec.rank, spec.world_size)
        batch = spec.layout.batch_size
        padded = np.full(spec.batches_per_epoch * batch, -1, np.int64)
        used = min(padded.size, share.size)
        padded[:used] = share[:used]
        self._ids = np.ascontiguousarray(padded.reshape(-1, batch)[:, self._stride])
        self._label_table = np.where(self._ids >= 0, self._labels[self._ids], np.int32(-1))
        self._table_epoch = self._epoch

    def where(self) -> str:
        return f"epoch {self._epoch} batch {self._index}"

    def close(self) -> None:
        os.close(self._done)


class _Worker:
    def __init__(self, worker: int, workers: int, control: socket.socket, wake: int, pool_page: int) -> None:
        self._worker = worker
        self._workers = workers
        self._control = control
        self._wake = wake
        self._page = PoolPage(pool_page, workers)
        self._shares: list[Share] = []
        self._poller = select.poll()
        self._poller.register(control, select.POLLIN)
        self._poller.register(wake, select.POLLIN)

    def run(self) -> None:
        """Until the daemon closes the control socket."""
        self._page.set_ready(self._worker, True)
        while True:
            worked = self._step_all()
            for fd, _ in self._poller.poll(0 if worked else None):
                if fd == self._wake:
                    drain(fd)
                elif not self._handle_message():
                    return

    def _step_all(self) -> bool:
        # Apart from ``run``, where ``share`` would outlive the loop and keep the ring of a closed session mapped.
        worked = False
        for share in tuple(self._shares):
            worked |= self._step(share)
        return worked

    def _step(self, share: Share) -> bool:
        try:
            return share.step()
        except Exception as error:
            self._fail(share.session, error, share.where())
            self._detach(share.session)
            self._page.idle(self._worker)
            return False

    def _handle_message(self) -> bool:
        message, fds, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES, ATTACH_FDS)
        if not message:
            return False
        request: dict[str, Any] = pickle.loads(message)
        session: int = request["session"]
        if "spec" not in request:
            self._detach(session)
            return True
        self._page.begin(self._worker, session)
        try:
            self._shares.append(Share(session, request["spec"], self._worker, self._workers, self._page, fds))
        except Exception as error:
            os.close(fds[3])
            self._fail(session, error, "when the recipe was compiled")
        self._page.idle(self._worker)
        for fd in fds[:3]:
            os.close(fd)
        return True

    def _detach(self, session: int) -> None:
        for share in [s for s in self._shares if s.session == session]:
            self._shares.remove(share)
            share.close()

    def _fail(self, session: int, error: Exception, where: str) -> None:
        text = str(error) if isinstance(error, RenaissanceError) else f"{type(error).__name__}: {error}"
        _log.error("session %d, %s: %s", session, where, "".join(traceback.format_exception(error)).rstrip())
        self._control.send(pickle.dumps({"session": session, "error": f"{where}: {text}"}))


def worker_main(worker: int, workers: int, control: socket.socket, wake: int, pool_page: int) -> None:
    """Entry of a worker process; returns when the daemon is gone or stops."""
    try:
        _Worker(worker, workers, control, wake, pool_page).run()
    except (BrokenPipeError, ConnectionResetError):
        return  # the daemon died between two of our messages; the zygote ends us
