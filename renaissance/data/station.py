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

import json
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from renaissance.core.digest import batch_digest, chain_digest, xxh64
from renaissance.core.dtype import DType
from renaissance.core.errors import DataServerError, DeviceError, DigestMismatch, ProtocolError, ValueRejected
from renaissance.core.log import get_logger
from renaissance.data.client import open_session
from renaissance.data.dlpack import CPU_DEVICE, bf16_capsule
from renaissance.data.protocol import (
    FAILED,
    MAX_BATCH_SIZE,
    MAX_DEPTH,
    MAX_EPOCH,
    MAX_PADDED_CHANNELS,
    MESSAGE_BYTES,
    MIN_DEPTH,
    PROTOCOL_VERSION,
    STOPPING,
    Ring,
    RingLayout,
    SlotHeader,
    check_range,
    fence,
    make_tag,
    pack_seek,
    receive,
    unix_path,
)
from renaissance.data.recipe import Recipe

MAX_FDS = 253
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_log = get_logger("data.station")


@dataclass(frozen=True, slots=True)
class SlotView:
    """One slot of the ring; the addresses stay the same for the life of the station."""

    images: npt.NDArray[Any]  # [B, R, R, padded channels], uint16 bit patterns for BF16
    labels: npt.NDArray[np.int32]  # [B]


class Batch:
    """One delivered batch. Its arrays are valid until ``release()``; after that the dataserver overwrites them.

    ``labels`` are -1 and ``images`` zero in the rows from ``valid`` on. A copy is the caller's to make.
    """

    __slots__ = ("_header", "_kept", "_released", "_station", "dtype", "images", "labels", "slot")

    def __init__(self, station: TransferStation, slot: int, header: SlotHeader) -> None:
        view = station.slots[slot]
        self.images = view.images
        self.labels = view.labels
        self.slot = slot
        self.dtype = station.dtype
        self._station = station
        self._header = header
        self._kept = False
        self._released = False

    @property
    def epoch(self) -> int:
        return self._header.epoch

    @property
    def index(self) -> int:
        """Number of the batch in its epoch, from 0."""
        return self._header.index

    @property
    def valid(self) -> int:
        """Rows that hold a sample."""
        return self._header.valid

    @property
    def sequence(self) -> int:
        return self._header.sequence

    @property
    def digest(self) -> str:
        """Hex digest of the batch, as the dataserver computed it."""
        return self._header.digest.hex()

    @property
    def digest_bytes(self) -> bytes:
        return self._header.digest

    def keep(self) -> Batch:
        """Take the batch out of the hands of ``station.epoch``: the caller releases it."""
        self._kept = True
        return self

    @property
    def kept(self) -> bool:
        return self._kept

    @property
    def released(self) -> bool:
        return self._released

    def release(self) -> None:
        """Give the slot back. Doing it twice is harmless. May be called from any thread."""
        self._station.release(self)

    def __enter__(self) -> Batch:
        return self.keep()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def __dlpack__(self, **options: Any) -> object:
        """The images as a DLPack capsule without a copy; BF16 is exported as bfloat16, which NumPy cannot do."""
        if self.dtype is not DType.BF16:
            return self.images.__dlpack__(**options)
        if options.get("stream") is not None:
            raise DeviceError("images are in host memory; a stream makes no sense for them")
        if options.get("dl_device") not in (None, CPU_DEVICE) or options.get("copy"):
            raise BufferError("bf16 images are exported in place, on the CPU only")
        return bf16_capsule(self.images)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU_DEVICE

    def __repr__(self) -> str:
        return f"Batch(epoch={self.epoch}, index={self.index}, valid={self.valid}, slot={self.slot})"


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
        timeout: float = 30.0,
    ) -> None:
        """Open a session; ``shuffle`` defaults to True for "train" and False for "val".

        ``batch_size`` is per rank. ``timeout`` (s) bounds opening, not waiting for batches: that ends when the batch
        is there or the dataserver is gone. Raises ValueRejected for an impossible value, DataServerError when nobody
        listens or the dataserver refuses, ProtocolError for another protocol version.
        """
        if not hasattr(os, "memfd_create"):
            raise DeviceError(f"TransferStation needs Linux (memfd, eventfd, descriptor passing), not {sys.platform}")
        check_range("batch size", batch_size, 1, MAX_BATCH_SIZE)
        check_range("depth", depth, MIN_DEPTH, MAX_DEPTH)
        check_range("seed", seed, 0, 2**64 - 1)
        check_range("world size", world_size, 1, 1 << 20)
        check_range("rank", rank, 0, world_size - 1)
        check_range("start epoch", start_epoch, 0, MAX_EPOCH)
        check_range("start batch", start_batch, 0, 2**31)
        if padded_channels is not None:
            check_range("padded channels", padded_channels, 1, MAX_PADDED_CHANNELS)
        self.address = address
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
        )
        reply = open_session(self.address, request, timeout)
        self.session: int = reply.session
        self.num_samples: int = reply.num_samples
        self.num_classes: int = reply.num_classes
        self.batches_per_epoch: int = reply.batches_per_epoch
        self.sample_shape: tuple[int, int, int] = (reply.height, reply.width, reply.padded_channels)
        layout = RingLayout(
            depth=self.depth,
            batch_size=self.batch_size,
            height=reply.height,
            width=reply.width,
            channels=reply.channels,
            padded_channels=reply.padded_channels,
            dtype=self.dtype,
        )
        # Beside the control socket as it is seen from here: the folder may be mounted elsewhere, or its name relative.
        beside = os.path.join(os.path.dirname(unix_path(self.address)), os.path.basename(reply.data_socket))
        self._socket, fds = _handshake(self.address, beside, reply.token, timeout)
        try:
            ring_fd, self._ready, *self._wakes = fds
            self._ring = Ring(ring_fd, layout)
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

    # Reading

    def epoch(self, epoch: int, start_batch: int = 0) -> Iterator[Batch]:
        """The batches of one epoch, from ``start_batch`` on.

        Each is released when the next is asked for, or when the loop is left, unless taken with ``batch.keep()``.
        """
        check_range("start batch", start_batch, 0, self.batches_per_epoch)  # the last: nothing is left of the epoch
        for index in range(start_batch, self.batches_per_epoch):
            batch = self.acquire(epoch, index)
            try:
                yield batch
            finally:
                if not batch.kept:
                    batch.release()

    def acquire(self, epoch: int, index: int) -> Batch:
        """Wait for one batch; the stream jumps there first when it is elsewhere.

        Raises DataServerError when the dataserver is gone or gave up (the message says where to resume), ValueRejected
        for a position that does not exist or when the slot it needs is still held, DigestMismatch when digests are
        checked and the bytes are not what was computed.
        """
        with self._lock:
            if (epoch, index) != self._position:
                self._jump(epoch, index)
            slot = self._sequence % self.depth
            if self._held[slot] is not None:
                raise ValueRejected(
                    f"epoch {epoch} batch {index} needs slot {slot}, which holds {self._held[slot]}, not yet released; "
                    f"release batches, or open the station with a depth over {self.depth}"
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
            batch = self._held[slot] = Batch(self, slot, header)
            self._sequence += 1
            last = index + 1 == self.batches_per_epoch
            self._position = (epoch + 1, 0) if last else (epoch, index + 1)
            if last and epoch == MAX_EPOCH:
                self._position = (-1, 0)  # nothing follows: whatever is asked for next is a jump, or refused
            self._note_digest(header, last)
            return batch

    def _jump(self, epoch: int, index: int) -> None:
        self._check_open()
        check_range("epoch", epoch, 0, MAX_EPOCH)
        check_range("batch index", index, 0, self.batches_per_epoch - 1)
        try:
            self._socket.send(pack_seek(self._generation + 1, self._sequence, epoch, index))
        except OSError:
            self._raise_last_words()
        self._generation += 1
        self._position = (epoch, index)
        # Releases of slots reached by the old generation alone are not needed: the daemon reuses their numbers.

    def _wait(self, slot: int, tag: int) -> None:
        words, word = self._ring.words, self._ring.tag_words[slot]
        if words[word] != tag or self._closed:
            started = time.perf_counter()
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
        with self._release_lock:
            if batch._released:
                return
            batch._released = True
            self._held[batch.slot] = None
            if self._closed:
                return
            self._ring.release(batch.slot, batch.sequence)
            for fd in self._wakes:
                with suppress(BlockingIOError):  # so many wake-ups are pending already
                    os.eventfd_write(fd, 1)

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


def _handshake(address: str, path: str, token: str, timeout: float) -> tuple[socket.socket, list[int]]:
    """Connect to the data socket and receive the descriptors: ring, ready eventfd, wake eventfds."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fds: list[int] = []
    try:
        connection.settimeout(timeout)
        connection.connect(path)
        _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if uid not in (os.geteuid(), 0):
            raise ProtocolError(f"{address}: the data socket belongs to user {uid}, not to {os.geteuid()}; refused")
        connection.send(json.dumps({"version": PROTOCOL_VERSION, "token": token}).encode())
        message, fds, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, MAX_FDS)
        for fd in fds:
            os.set_inheritable(fd, False)  # received descriptors stay open in programs that are started, else
        if not message:
            raise DataServerError(f"{address}: the dataserver died while the session was opened")
        answer = json.loads(message)
        if "error" in answer:
            raise DataServerError(f"{address}: {answer['error']}")
        if len(fds) < 3:
            raise ProtocolError(f"{address}: expected at least 3 descriptors from the data socket, got {len(fds)}")
        connection.settimeout(None)
        return connection, fds
    except BaseException as error:
        connection.close()
        for fd in fds:
            os.close(fd)
        if isinstance(error, TimeoutError):
            raise DataServerError(f"{address}: no answer from the data socket within {timeout:g} s") from None
        if isinstance(error, OSError) and not isinstance(error, DataServerError):
            raise DataServerError(f"{address}: cannot use the data socket {path}: {error.strerror}") from None
        raise
