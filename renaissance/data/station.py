"""TransferStation: the consumer's end of the ring. Batches are views into memory shared with the dataserver, no copy.

    recipe = Recipe.build([Pad(2), RandomCrop(28)], NormMode.MNIST, resolution=28, color_channels=1)
    with TransferStation("unix:/run/ds.sock", dataset="mnist", split="train", recipe=recipe, seed=1,
                         batch_size=200) as station:
        for batch in station.epoch(0):
            train(batch.images, batch.labels, batch.valid)

Any (epoch, batch) can be asked for; the bytes are the same as in a run that came there by itself. Reading on in order,
also from one epoch into the next, never waits for a jump. Linux only.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import TracebackType

from renaissance.core.digest import batch_digest, chain_digest, xxh64
from renaissance.core.dtype import DType
from renaissance.core.errors import DataServerError, DeviceError, DigestMismatch, ProtocolError, ValueRejected
from renaissance.core.log import get_logger
from renaissance.data.batch import Batch, CorruptEntry, SlotView
from renaissance.data.client import Access, close_session, open_session
from renaissance.data.consumer_state import STATE_VERSION, CorruptList, start_of
from renaissance.data.handshake import connect_data, data_socket
from renaissance.data.protocol import (
    CORRUPT_POLICIES,
    DEFAULT_MAX_CORRUPT,
    DEFAULT_MAX_CORRUPT_SHARE,
    FAILED,
    MAX_BATCH_SIZE,
    MAX_CORRUPT,
    MAX_DEPTH,
    MAX_EPOCH,
    MAX_PADDED_CHANNELS,
    MAX_WORLD_SIZE,
    MIN_DEPTH,
    ORDERS,
    PROTOCOL_VERSION,
    STOPPING,
    Ring,
    RingLayout,
    SlotHeader,
    check_choice,
    check_group,
    check_range,
    check_share_of_set,
    fence,
    make_tag,
    pack_seek,
    receive,
)
from renaissance.data.recipe import Recipe

__all__ = ["Batch", "CorruptEntry", "SlotView", "TransferStation"]

EPOCH_DIGESTS_KEPT = 4096

_log = get_logger("data.station")


class TransferStation:
    """A session of a dataserver. Not for use from two threads at once, except ``Batch.release`` and ``close``."""

    def __init__(
        self,
        address: str,
        *,
        dataset: str,
        split: str,
        recipe: Recipe,
        seed: int,
        batch_size: int,
        dtype: DType = DType.FP32,
        shuffle: bool | None = None,
        depth: int = 4,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        padded_channels: int | None = None,
        check_digest: bool = False,
        start_epoch: int = 0,
        start_batch: int = 0,
        state: Mapping[str, int] | None = None,
        order: str = "global",
        on_corrupt: str = "fail",
        max_corrupt: int = DEFAULT_MAX_CORRUPT,
        max_corrupt_share: float = DEFAULT_MAX_CORRUPT_SHARE,
        share: str = "",
        share_count: int = 1,
        token_file: str | os.PathLike[str] | None = None,
        tls_ca: str | os.PathLike[str] | None = None,
        timeout: float = 30.0,
    ) -> None:
        """Open a session; ``shuffle`` defaults to True for "train" and False for "val".

        ``batch_size`` is per rank. ``state``: of an earlier station, instead of ``start_epoch`` and ``start_batch``.
        ``order`` "blocks" shuffles so that a packed file is read in large pieces. ``on_corrupt``: a sample that cannot
        be read or decoded fails the session ("fail"), is replaced by another one drawn by its id ("substitute"), or
        becomes a row of zeros with label -1 ("blank"); over ``max_corrupt`` such samples, or a part of over
        ``max_corrupt_share`` of the set, fail the session in any case. ``share``: the ``share_count`` stations opened
        with this name and the same options read one stream, prepared once; none can jump. ``token_file`` and
        ``tls_ca`` are for a control address ``tcp:HOST:PORT`` of this machine (see ``client.Access``).

        ``timeout`` (s) bounds opening, not waiting for batches: that ends when the batch is there or the dataserver is
        gone. Raises ValueRejected for an impossible value, DataServerError when nobody listens or the dataserver
        refuses, ProtocolError for another protocol version.
        """
        if not hasattr(os, "memfd_create"):
            raise DeviceError(f"TransferStation needs Linux (memfd, eventfd, descriptor passing), not {sys.platform}")
        check_range("batch size", batch_size, 1, MAX_BATCH_SIZE)
        check_range("depth", depth, MIN_DEPTH, MAX_DEPTH)
        check_range("seed", seed, 0, 2**64 - 1)
        check_range("world size", world_size, 1, MAX_WORLD_SIZE)
        check_range("rank", rank, 0, world_size - 1)
        if state is not None:
            given = {"seed": seed, "batch_size": batch_size, "rank": rank, "world_size": world_size}
            start_epoch, start_batch = start_of(state, given, (start_epoch, start_batch))
        check_range("start epoch", start_epoch, 0, MAX_EPOCH)
        check_range("start batch", start_batch, 0, 2**31)
        check_choice("order", order, ORDERS)
        check_choice("on_corrupt", on_corrupt, CORRUPT_POLICIES)
        check_range("max_corrupt", max_corrupt, 0, MAX_CORRUPT)
        check_share_of_set(max_corrupt_share)
        check_group(share, share_count)
        if padded_channels is not None:
            check_range("padded channels", padded_channels, 1, MAX_PADDED_CHANNELS)
        self._access = Access.of(address, token_file, tls_ca)
        self.address = address
        self.order, self.on_corrupt = order, on_corrupt
        self.max_corrupt, self.max_corrupt_share = max_corrupt, max_corrupt_share
        self.share, self.share_count = share, share_count
        self.dataset, self.split, self.recipe, self.seed = dataset, split, recipe, seed
        self.batch_size, self.dtype, self.depth = batch_size, dtype, depth
        self.rank, self.world_size, self.drop_last = rank, world_size, drop_last
        self.shuffle = split == "train" if shuffle is None else shuffle
        self.check_digest = check_digest
        self.wait_seconds = 0.0
        """Time spent blocked in ``acquire`` because a batch was not ready (s)."""
        self._closed = False
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._release_lock = threading.Lock()
        self._connect(timeout, padded_channels, start_epoch, start_batch)
        self._generation, self._sequence = 1, 0
        self._position = (start_epoch, start_batch)
        self._held: list[Batch | None] = [None] * depth
        self._digest_epoch = -1
        self._digests: list[bytes] = []
        self._epoch_digests: dict[int, str] = {}

    def _connect(self, timeout: float, padded_channels: int | None, start_epoch: int, start_batch: int) -> None:
        from renaissance.data.wire import dataserver_pb2 as pb

        request = pb.OpenSessionRequest(
            protocol_version=PROTOCOL_VERSION,
            dataset=self.dataset,
            split=self.split,
            recipe_json=self.recipe.to_json(),
            seed=self.seed,
            batch_size=self.batch_size,
            dtype=self.dtype.name.lower(),
            shuffle=self.shuffle,
            depth=self.depth,
            rank=self.rank,
            world_size=self.world_size,
            drop_last=self.drop_last,
            padded_channels=padded_channels or 0,
            start_epoch=start_epoch,
            start_batch=start_batch,
            order=self.order,
            on_corrupt=self.on_corrupt,
            max_corrupt=self.max_corrupt,
            max_corrupt_share=self.max_corrupt_share,
            share=self.share,
            share_count=self.share_count,
        )
        reply = open_session(self.address, request, timeout, self._access)
        self.session: int = reply.session
        self._corrupt = CorruptList(self.address, self.session, self._access)
        self.num_samples: int = reply.num_samples
        self.num_classes: int = reply.num_classes
        self.batches_per_epoch: int = reply.batches_per_epoch
        self.sample_shape: tuple[int, int, int] = (reply.height, reply.width, reply.padded_channels)
        self.member: int = reply.member
        self.format: str = reply.format
        """ "dts" or "raw"; "" for pixels held in memory, whose form of storage decides nothing."""
        self.encoding: str = reply.encoding
        self.level: str = reply.level
        self.load: str = reply.load
        self.decode: str = reply.decode
        """The recipe's decode mode, and ``decoder`` what decodes; both "" when nothing is decoded."""
        self.decoder: str = reply.decoder
        layout = RingLayout(
            depth=self.depth,
            batch_size=self.batch_size,
            height=reply.height,
            width=reply.width,
            channels=reply.channels,
            padded_channels=reply.padded_channels,
            dtype=self.dtype,
            members=reply.members,
        )
        try:
            self._socket, fds = connect_data(self.address, data_socket(self.address, reply), reply.token, timeout)
        except DataServerError:
            if reply.members == 1:  # the daemon would keep the ring for a consumer that never comes
                with suppress(DataServerError):
                    close_session(self.address, reply.session, access=self._access)
            raise
        try:
            ring_fd, self._ready, *self._wakes = fds
            self._ring = Ring(ring_fd, layout, member=reply.member)
        except BaseException:
            self._socket.close()
            for fd in fds:
                os.close(fd)
            raise
        os.close(ring_fd)
        self.slots = [SlotView(i, n) for i, n in zip(self._ring.images, self._ring.labels, strict=True)]
        self._poller = select.poll()
        self._poller.register(self._ready, select.POLLIN)
        self._poller.register(self._socket, select.POLLIN)

    @property
    def memory(self) -> tuple[int, int]:
        """(address, bytes) of the shared memory that all slots lie in, whole pages; mapped as long as a slot's view is
        held."""
        return self._ring.memory

    # Reading

    def epoch(self, epoch: int, start_batch: int = 0) -> Iterator[Batch]:
        """The batches of one epoch, from ``start_batch`` on.

        Each is released when the next is asked for, or when the loop is left, unless taken with ``batch.keep()``.
        """
        check_range("start batch", start_batch, 0, self.batches_per_epoch)  # the last: nothing is left of the epoch
        for index in range(start_batch, self.batches_per_epoch):
            batch: Batch | None = None
            try:
                batch = self.acquire(epoch, index)
                yield batch
            finally:
                try:
                    _release_unless_kept(batch)
                finally:  # twice: an interrupt in the first try must not leave the slot held
                    _release_unless_kept(batch)

    def acquire(self, epoch: int, index: int) -> Batch:
        """Wait for one batch; the stream jumps there first when it is elsewhere.

        Interrupted (Ctrl-C), it has taken nothing: the same batch can be acquired again. Raises DataServerError when
        the dataserver is gone or gave up (the message says where to resume), ValueRejected for a position that does
        not exist, when the slot it needs is still held, or for a jump in a share group; DigestMismatch when digests are
        checked and the bytes are not what was computed.
        """
        before: tuple[int, tuple[int, int], int, list[bytes]] | None = None
        slot = digests = 0
        try:
            with self._lock:
                if (epoch, index) != self._position:
                    self._jump(epoch, index)
                slot = self._sequence % self.depth
                if self._held[slot] is not None:
                    raise ValueRejected(
                        f"epoch {epoch} batch {index} needs slot {slot}, which holds {self._held[slot]}, not yet "
                        f"released; release batches, or open the station with a depth over {self.depth}"
                    )
                self._wait(slot, make_tag(self._generation, self._sequence))
                header = self._ring.header(slot)
                if (header.epoch, header.index) != (epoch, index):
                    raise ProtocolError(
                        f"slot {slot} should hold epoch {epoch} batch {index}, its header says epoch {header.epoch} "
                        f"batch {header.index}; the shared ring was overwritten"
                    )
                if self.check_digest:
                    self._check(slot, header)
                batch = Batch(self.slots[slot], slot, self.dtype, header, self.release)
                digests = len(self._digests)
                before = self._sequence, self._position, self._digest_epoch, self._digests
                self._take(batch, header)
            return batch
        except BaseException:
            if before is not None:  # interrupted after all: the caller will never see the batch
                self._sequence, self._position, self._digest_epoch, self._digests = before
                del self._digests[digests:]
                self._held[slot] = None
            raise

    def _take(self, batch: Batch, header: SlotHeader) -> None:
        self._held[batch.slot] = batch
        self._sequence += 1
        self._ring.take(self._sequence)
        last = header.index + 1 == self.batches_per_epoch
        self._position = (header.epoch + 1, 0) if last else (header.epoch, header.index + 1)
        if last and header.epoch == MAX_EPOCH:
            self._position = (-1, 0)  # nothing follows: whatever is asked for next is a jump, or refused
        self._note_digest(header, last)

    def _jump(self, epoch: int, index: int) -> None:
        self._check_open()
        check_range("epoch", epoch, 0, MAX_EPOCH)
        check_range("batch index", index, 0, self.batches_per_epoch - 1)
        if self._ring.layout.members > 1:
            raise ValueRejected(
                f"epoch {epoch} batch {index}: the next batch of share group {self.share!r} is epoch "
                f"{self._position[0]} batch {self._position[1]}; its members read in order and cannot jump"
            )
        # Nowhere and a generation on before anything is sent: an interrupt leaves a stream that jumps again next time.
        self._position = (-1, 0)
        self._generation += 1
        try:
            self._socket.send(pack_seek(self._generation, self._sequence, epoch, index))
        except OSError:
            self._position = (epoch, index)
            self._raise_last_words()
        self._position = (epoch, index)
        # Releases of slots reached by the old generation alone are not needed: the daemon reuses their numbers.

    def _wait(self, slot: int, tag: int) -> None:
        words, word = self._ring.words, self._ring.tag_words[slot]
        if words[word] != tag or self._closed:
            started = time.perf_counter()
            self._ring.wait(True, int(self.wait_seconds * 1e9))
            try:
                while words[word] != tag or self._closed:
                    self._check_open()
                    for fd, _ in self._poller.poll():
                        if fd == self._ready:
                            os.eventfd_read(fd)
                        elif words[word] != tag:
                            self._raise_last_words()
                        else:
                            break
            finally:
                self.wait_seconds += time.perf_counter() - started
                self._ring.wait(False, int(self.wait_seconds * 1e9))
        fence()

    def _raise_last_words(self) -> None:
        """Raise what the dataserver said before it closed the socket, or that it died without a word."""
        self._check_open()
        epoch, index = self._position
        resume = f"the run can resume at epoch {epoch} batch {index}"
        message = receive(self._socket)
        kind, text = message[: len(FAILED)], message[len(FAILED) :].decode(errors="replace")
        if kind == FAILED:
            raise DataServerError(f"{self.address}: the dataserver gave up this session: {text}; {resume}")
        if kind == STOPPING:
            raise DataServerError(f"{self.address}: {text}; {resume}")
        raise DataServerError(f"{self.address}: the dataserver died; {resume}")

    def release(self, batch: Batch) -> None:
        """Give a batch's slot back; a second time is harmless."""
        try:
            self._give_back(batch)
        except BaseException:  # interrupted: a slot that stays held would stop the stream for good
            self._give_back(batch)
            raise

    def _give_back(self, batch: Batch) -> None:
        with self._release_lock:
            if batch._released:
                return
            if not self._closed:
                self._ring.release(batch.slot, batch.sequence)
                for fd in self._wakes:
                    with suppress(BlockingIOError):  # so many wake-ups are pending already
                        os.eventfd_write(fd, 1)
            self._held[batch.slot] = None
            batch._released = True

    # Digests

    def _check(self, slot: int, header: SlotHeader) -> None:
        """Compute row hashes and batch digest again from the bytes of the slot."""
        where = f"epoch {header.epoch} batch {header.index} ({self.dataset} {self.split})"
        rows, hashes, labels = self._ring.rows[slot], self._ring.hashes[slot], self._ring.labels[slot]
        for row in range(self.batch_size):
            found = int(xxh64(rows[row]))
            if found != int(hashes[row]):
                raise DigestMismatch(
                    f"{where}: row {row} has hash {found:016x}, the dataserver computed {int(hashes[row]):016x}; "
                    "its bytes changed after they were delivered"
                )
        valid = header.valid
        digest = batch_digest(header.epoch, header.index, labels[:valid], hashes[:valid])
        if digest != header.digest:
            raise DigestMismatch(
                f"{where}: labels or row hashes give digest {digest.hex()}, the dataserver computed "
                f"{header.digest.hex()}"
            )

    def _note_digest(self, header: SlotHeader, last: bool) -> None:
        if header.index == 0:
            self._digest_epoch, self._digests = header.epoch, []
        if self._digest_epoch != header.epoch or len(self._digests) != header.index:
            return
        self._digests.append(header.digest)
        if last:
            self._epoch_digests[header.epoch] = chain_digest(self._digests).hex()
            while len(self._epoch_digests) > EPOCH_DIGESTS_KEPT:
                del self._epoch_digests[next(iter(self._epoch_digests))]

    def epoch_digest(self, epoch: int) -> str:
        """Hex digest of an epoch that was acquired in full, in order. Raises ValueRejected for any other."""
        try:
            return self._epoch_digests[epoch]
        except KeyError:
            raise ValueRejected(
                f"no digest of epoch {epoch}: its {self.batches_per_epoch} batches were not all acquired in order"
            ) from None

    @property
    def partial_digests(self) -> tuple[int, tuple[str, ...]]:
        """(epoch, hex digests of its batches so far): what a checkpoint keeps to know the epoch's digest later."""
        return self._digest_epoch, tuple(d.hex() for d in self._digests)

    def restore_digests(self, epoch: int, digests: tuple[str, ...] | list[str]) -> None:
        """Take up ``partial_digests`` of an earlier run, so that resuming at batch ``len(digests)`` completes them."""
        check_range("number of batch digests", len(digests), 0, self.batches_per_epoch)
        self._digest_epoch, self._digests = epoch, [bytes.fromhex(d) for d in digests]

    # Where it is, and what was wrong

    def state(self) -> dict[str, int]:
        """Where the next batch in order is, as plain integers; give it to a new station to go on there.

        Valid with any number of workers. A batch that was acquired counts as read.
        """
        epoch, index = self._position
        if epoch < 0:
            raise ValueRejected("the stream has no next batch: its last one was read, or a jump was interrupted")
        given = {"seed": self.seed, "batch_size": self.batch_size, "rank": self.rank, "world_size": self.world_size}
        return {"version": STATE_VERSION, "epoch": epoch, "batch": index, **given}

    @property
    def corrupt_count(self) -> int:
        """How often a sample was corrupt so far, by (epoch, sample), as the dataserver counts. Costs nothing."""
        return self._ring.corrupt

    def corrupt_samples(self) -> list[CorruptEntry]:
        """The samples that could not be delivered so far, those of batches prepared ahead included.

        In the order in which they were met, at most the first 4096. Asks the dataserver when there are new ones; still
        there after ``close``. Raises DataServerError when it is gone.
        """
        return self._corrupt.update(self.corrupt_count)

    # Life

    def _check_open(self) -> None:
        if self._closed:
            raise DataServerError("this TransferStation is closed")

    def close(self) -> None:
        """End the session; wakes an ``acquire`` in another thread, which raises. Safe to call twice.

        Views of slots stay readable, but nobody fills them any more.
        """
        with self._release_lock:
            if self._closed:
                return
            self._closed = True
        if os.getpid() == self._process and self.corrupt_count:
            self._corrupt.warn(f"{self.dataset} {self.split}", self.on_corrupt, self.corrupt_count)
        if os.getpid() == self._process:  # a forked child shares the connection: it must not end its parent's session
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes a poll
        with self._lock, self._release_lock:
            self._socket.close()
            for fd in (self._ready, *self._wakes):
                os.close(fd)

    def __enter__(self) -> TransferStation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and hasattr(self, "_poller"):
            self.close()


def _release_unless_kept(batch: Batch | None) -> None:
    if batch is not None and not batch.kept:
        batch.release()
