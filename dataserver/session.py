"""One session: its ring, its place in the stream, its consumer. Owned by the hub thread.

Batches are published in order, each when all workers have finished their share of it. Pixels are never looked at.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections import deque
from contextlib import suppress

from dataserver.shared import Board, create_eventfd, create_memfd, notify
from dataserver.spec import SessionSpec
from renaissance.core.digest import batch_digest, chain_digest
from renaissance.core.errors import ProtocolError
from renaissance.data.protocol import (
    MAX_EPOCH,
    SEQUENCE_MASK,
    Ring,
    SlotHeader,
    make_tag,
    unpack_seek,
)

EPOCH_DIGESTS_KEPT = 16
MAX_GENERATION = (1 << 24) - 1


class Session:
    """Life cycle: made by a gRPC thread, then handed to the hub; ``close`` frees every descriptor."""

    def __init__(self, number: int, spec: SessionSpec, workers: int, start_epoch: int, start_batch: int) -> None:
        """Reserves the ring. Raises DataServerError when memory does not suffice."""
        self.number = number
        self.spec = spec
        self.token = secrets.token_hex(16)
        self.opened = time.monotonic()
        self.consumer: socket.socket | None = None
        self.consumer_pid = 0
        self.batches = self.samples = 0
        self.epoch_digests: deque[tuple[int, str]] = deque(maxlen=EPOCH_DIGESTS_KEPT)
        self._depth = spec.layout.depth
        self._deaths: dict[int, tuple[tuple[int, int], int]] = {}  # worker -> (generation, sequence) of a share, count
        self._chain: list[bytes] | None = None  # batch digests of the current epoch, None when it was joined midway
        self._fds: list[int] = []
        try:
            self.ring_fd = self._own(create_memfd("ring", spec.layout.total_bytes))
            self.board_fd = self._own(create_memfd("board", Board.size(self._depth, workers)))
            self.done_fd = self._own(create_eventfd())
            self.ready_fd = self._own(create_eventfd())
            self._ring = Ring(self.ring_fd, spec.layout, create=True)
            self._board = Board(self.board_fd, self._depth, workers)
        except BaseException:
            self.close()
            raise
        self._jump(1, 0, start_epoch, start_batch)

    def _own(self, fd: int) -> int:
        self._fds.append(fd)
        return fd

    def _jump(self, generation: int, sequence: int, epoch: int, index: int) -> None:
        self._generation, self._sequence = generation, sequence
        self._start = sequence
        self.epoch, self.index = epoch, index
        self._chain = None
        self._board.write_seek(generation, sequence, epoch, index)

    def seek(self, message: bytes) -> None:
        """Carry out the consumer's jump. Raises ProtocolError when it makes no sense."""
        generation, sequence, epoch, index = unpack_seek(message)
        behind = self._sequence - sequence
        if (
            generation != self._generation + 1
            or generation > MAX_GENERATION
            or not 0 <= behind <= self._depth
            or epoch > MAX_EPOCH
            or index >= self.spec.batches_per_epoch
        ):
            raise ProtocolError(
                f"impossible jump to epoch {epoch} batch {index} (generation {generation}, sequence {sequence}); "
                f"the stream is at generation {self._generation}, sequence {self._sequence}, "
                f"{self.spec.batches_per_epoch} batches an epoch"
            )
        self._jump(generation, sequence, epoch, index)

    def count_death(self, worker: int) -> int:
        """How often ``worker`` has died over the share it was at, this time included."""
        share = self._generation, self._board.next_sequence(worker, self._generation, self._start)
        last, count = self._deaths.get(worker, (share, 0))
        self._deaths[worker] = share, count + 1 if last == share else 1
        return self._deaths[worker][1]

    def publish_finished(self) -> None:
        """Publish every batch that is complete and next in order, then wake the consumer once."""
        published = False
        while True:
            slot = self._sequence % self._depth
            if not self._board.is_complete(slot, make_tag(self._generation, self._sequence)):
                break
            self._publish(slot)
            published = True
        if published:
            notify(self.ready_fd)

    def _publish(self, slot: int) -> None:
        valid = self.spec.valid_rows(self.index)
        digest = batch_digest(self.epoch, self.index, self._ring.labels[slot][:valid], self._ring.hashes[slot][:valid])
        header = SlotHeader(self.epoch, self.index, valid, self._sequence, self._generation, digest)
        self._ring.publish(slot, header)
        self.batches += 1
        self.samples += valid
        if self.index == 0:
            self._chain = []
        if self._chain is not None:
            self._chain.append(digest)
        self._sequence = (self._sequence + 1) & SEQUENCE_MASK
        self.index += 1
        if self.index == self.spec.batches_per_epoch:
            if self._chain is not None:
                self.epoch_digests.append((self.epoch, chain_digest(self._chain).hex()))
            self.epoch, self.index = self.epoch + 1, 0

    def tell(self, kind: bytes, text: str) -> None:
        """Last words to the consumer; it may be gone already."""
        if self.consumer is not None:
            with suppress(OSError):
                self.consumer.send(kind + text.encode()[:4000])

    def close(self) -> None:
        if self.consumer is not None:
            self.consumer.close()
            self.consumer = None
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
