"""One session: its ring, its place in the stream, its consumers. Owned by the hub thread.

Batches are published in order, each when all workers have finished their share of it. Pixels are never looked at.
A session has one consumer, or the members of a share group, who read the same batches of one ring: a slot is free again
when every member that has not departed has given it back.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum

from dataserver.corrupt import CorruptLog
from dataserver.rates import RateMeter
from dataserver.shared import Board, create_eventfd, create_memfd, notify
from renaissance.core.digest import batch_digest, chain_digest
from renaissance.core.errors import ProtocolError
from renaissance.data.making.spec import SessionSpec
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


class MemberState(StrEnum):
    """Where a consumer of a session is in its life."""

    AWAITED = "awaited"  # a member of a share group that has not opened it yet
    CONNECTING = "connecting"  # opened, not yet on the data socket
    READING = "reading"
    GONE = "gone"


@dataclass(slots=True)
class Member:
    """One consumer of a session."""

    number: int
    ready_fd: int
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    state: MemberState = MemberState.AWAITED
    deadline: float = 0.0  # monotonic; while it is connecting
    consumer: socket.socket | None = None
    pid: int = 0


class Session:
    """Life cycle: made by a gRPC thread, then handed to the hub; ``close`` frees every descriptor."""

    def __init__(
        self,
        number: int,
        spec: SessionSpec,
        workers: int,
        start_epoch: int,
        start_batch: int,
        *,
        share: str = "",
        decoder: str = "",
        on_epoch: Callable[[Session, int, list[bytes]], None] | None = None,
    ) -> None:
        """Reserves the ring. ``on_epoch`` gets the batch digests of every epoch that was delivered from its start.

        Raises DataServerError when memory does not suffice.
        """
        self.number = number
        self.spec = spec
        self.start = start_epoch, start_batch
        self.share = share
        self.decoder = decoder
        self.opened = time.monotonic()
        self.batches = self.samples = 0
        self.rates = RateMeter()
        self.corrupt = CorruptLog(spec)
        self.epoch_digests: deque[tuple[int, str]] = deque(maxlen=EPOCH_DIGESTS_KEPT)
        self._on_epoch = on_epoch
        self._depth = spec.layout.depth
        self._deaths: dict[int, tuple[tuple[int, int], int]] = {}  # worker -> (generation, sequence) of a share, count
        self._chain: list[bytes] | None = None  # batch digests of the current epoch, None when it was joined midway
        self._fds: list[int] = []
        self.members: list[Member] = []
        try:
            self.ring_fd = self._own(create_memfd("ring", spec.layout.total_bytes))
            self.board_fd = self._own(create_memfd("board", Board.size(self._depth, workers)))
            self.done_fd = self._own(create_eventfd())
            for member in range(spec.layout.members):
                self.members.append(Member(member, self._own(create_eventfd())))
            self._ring = Ring(self.ring_fd, spec.layout, create=True)
            self._board = Board(self.board_fd, self._depth, workers)
        except BaseException:
            self.close()
            raise
        self._jump(1, 0, start_epoch, start_batch)

    def _own(self, fd: int) -> int:
        self._fds.append(fd)
        return fd

    # Members

    def admit(self, seconds: float) -> Member | None:
        """The next member, who must connect within ``seconds``; None when all have come."""
        for member in self.members:
            if member.state is MemberState.AWAITED:
                member.state = MemberState.CONNECTING
                member.deadline = time.monotonic() + seconds
                return member
        return None

    def depart(self, member: Member) -> bool:
        """The member is gone; False when nobody of those who came is left, which ends the session."""
        if member.consumer is not None:
            member.consumer.close()
            member.consumer = None
        member.state = MemberState.GONE
        self._ring.depart(member.number)
        return any(m.state in (MemberState.CONNECTING, MemberState.READING) for m in self.members)

    @property
    def complete(self) -> bool:
        """True when nobody is awaited any more."""
        return all(member.state is not MemberState.AWAITED for member in self.members)

    @property
    def consumer_pid(self) -> int:
        """Of the first member that reads, 0 when none does."""
        return next((m.pid for m in self.members if m.state is MemberState.READING), 0)

    # The stream

    def _jump(self, generation: int, sequence: int, epoch: int, index: int) -> None:
        self._generation, self._sequence = generation, sequence
        self._start = sequence
        self.epoch, self.index = epoch, index
        self._chain = None
        self._board.write_seek(generation, sequence, epoch, index)

    def seek(self, message: bytes) -> None:
        """Carry out the consumer's jump. Raises ProtocolError when it makes no sense."""
        generation, sequence, epoch, index = unpack_seek(message)
        if len(self.members) > 1:
            raise ProtocolError(f"a member of a share group cannot jump (to epoch {epoch} batch {index})")
        behind = self._sequence - sequence
        # A consumer that was interrupted in a jump leaves a generation out.
        if (
            not self._generation < generation <= MAX_GENERATION
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

    def count_finished(self) -> int:
        """Batches that are complete and next in order."""
        count = 0
        while count < self._depth:
            sequence = (self._sequence + count) & SEQUENCE_MASK
            if not self._board.is_complete(sequence % self._depth, make_tag(self._generation, sequence)):
                break
            count += 1
        return count

    def publish(self, count: int) -> int:
        """Publish the next ``count`` batches, which are complete, wake the consumers once; returns their samples."""
        samples = self.samples
        for _ in range(count):
            self._publish(self._sequence % self._depth)
        if count:
            self.rates.add(count, self.samples - samples)
            for member in self.members:
                notify(member.ready_fd)
        return self.samples - samples

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
                self._end_epoch(self._chain)
            self.epoch, self.index = self.epoch + 1, 0

    def _end_epoch(self, chain: list[bytes]) -> None:
        self.epoch_digests.append((self.epoch, chain_digest(chain).hex()))
        if self._on_epoch is not None:
            self._on_epoch(self, self.epoch, chain)

    def show_corrupt(self) -> None:
        """Let consumers see how many corrupt samples there are without asking."""
        self._ring.corrupt = self.corrupt.occurrences

    # Who waits for whom

    def occupancy(self) -> tuple[int, int, int]:
        """(prepared and not taken by all, taken and not given back by all, empty or being filled) slots."""
        here = [m.number for m in self.members if m.state is not MemberState.GONE]
        ends = {number: min(self.member_words(number)[0], self._sequence) for number in here}
        prepared = held = 0
        for sequence in range(max(0, self._sequence - self._depth), self._sequence):
            slot = sequence % self._depth
            if self._ring.words[self._ring.tag_words[slot]] != make_tag(self._generation, sequence):
                continue  # of before a jump
            if any(sequence >= end for end in ends.values()):
                prepared += 1
            elif any(self._ring.released(number, slot) <= sequence for number in here):
                held += 1
        return prepared, held, self._depth - prepared - held

    def held_by(self, member: int) -> int:
        """Batches that the member has taken and not given back."""
        taken = min(self.member_words(member)[0], self._sequence)
        first = max(0, self._sequence - self._depth)
        return sum(self._ring.released(member, s % self._depth) <= s for s in range(first, taken))

    def member_words(self, member: int) -> tuple[int, bool, float]:
        """(batches taken, whether it waits, seconds waited in all) as the member itself says."""
        return self._ring.member_words(member)

    def waits_for(self) -> str:
        """What the stream stands still for: "members", "consumer", "workers", or "" when nobody waits."""
        if not self.complete:
            return "members"
        if not self._ring.is_free_for(self._sequence % self._depth, self._sequence):
            return "consumer"
        reading = [m.number for m in self.members if m.state is MemberState.READING]
        return "workers" if any(self.member_words(number)[1] for number in reading) else ""

    # The end

    def tell(self, kind: bytes, text: str) -> None:
        """Last words to every consumer; they may be gone already."""
        for member in self.members:
            if member.consumer is not None:
                with suppress(OSError):
                    member.consumer.send(kind + text.encode()[:4000])

    def close(self) -> None:
        for member in self.members:
            if member.consumer is not None:
                member.consumer.close()
                member.consumer = None
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
