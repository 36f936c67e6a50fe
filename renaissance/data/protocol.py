"""Layout of the shared ring and the messages on the data socket: the contract between dataserver and consumer.

docs/shared-memory.md is the same contract in prose. Invariants:

- Every word has exactly one writer. The daemon writes ``tag`` (a batch is ready), each consumer its page of the ring.
- A batch is named by its tag: generation (how often the consumer has jumped) and sequence number in the stream.
  Batch ``s`` lies in slot ``s % depth``, so even slots are A and odd slots are B.
- A slot is filled for sequence ``s`` only after every member that has not departed has released ``s - depth``.
"""

from __future__ import annotations

import mmap
import socket
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit, types
from numba.extending import intrinsic

from renaissance.core.dtype import DType
from renaissance.core.errors import ProtocolError, ValueRejected

U8 = npt.NDArray[np.uint8]
I32 = npt.NDArray[np.int32]
U64 = npt.NDArray[np.uint64]

PROTOCOL_VERSION = 2
MAGIC = b"RNSRING1"
PAGE = 4096
CACHE_LINE = 64
IMAGE_ALIGNMENT = 256
MIN_DEPTH, MAX_DEPTH = 2, PAGE // CACHE_LINE
MAX_BATCH_SIZE = 65536
MAX_PADDED_CHANNELS = 64
DELIVERED_DTYPES = (DType.UINT8, DType.FP32, DType.FP16, DType.BF16)
MAX_EPOCH = (1 << 31) - 2
MAX_MEMBERS = 64
MAX_WORLD_SIZE = 1 << 20
MAX_CORRUPT = 1 << 20
MAX_SHARE_NAME = 128
DEFAULT_MAX_CORRUPT = 100
DEFAULT_MAX_CORRUPT_SHARE = 0.01
ORDERS = ("global", "blocks")
CORRUPT_POLICIES = ("fail", "substitute", "blank")
SEQUENCE_BITS = 40
SEQUENCE_MASK = (1 << SEQUENCE_BITS) - 1
MESSAGE_BYTES = 65536
"""Largest message on the data socket."""

_CONTROL = struct.Struct("<8s10IQQ")  # magic, version, geometry, members, 0, slot stride, total bytes
_DEPARTED = PAGE // 2 // 8  # control page, daemon: bit m is set when member m no longer counts
_CORRUPT = _DEPARTED + CACHE_LINE // 8  # control page, daemon: corrupt samples met so far
_TAKEN, _WAITING, _WAITED = 1, 2, 3  # words after the member's first ``released`` word
_HEADER = struct.Struct("<6Q16s")  # tag, epoch, index, valid, sequence, generation, digest
_SEEK = struct.Struct("<4s4Q")  # "SEEK", generation, sequence, epoch, batch index
SEEK = b"SEEK"
FAILED = b"FAIL"
STOPPING = b"STOP"


@intrinsic
def _fence_intrinsic(typing_context):  # type: ignore[no-untyped-def]  # () -> void
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@njit(cache=True)
def fence():  # type: ignore[no-untyped-def]  # () -> void
    """Full memory barrier: plain stores of shared words become ordered on every processor, not on x86 only."""
    _fence_intrinsic()


def align(value: int, alignment: int) -> int:
    """``value`` rounded up to a multiple of ``alignment`` (bytes)."""
    return -(-value // alignment) * alignment


def make_tag(generation: int, sequence: int) -> int:
    """The 64-bit name of a batch in the ring; 0 is never a tag because generations start at 1."""
    return generation << SEQUENCE_BITS | sequence


def split_tag(tag: int) -> tuple[int, int]:
    """(generation, sequence) of a tag."""
    return tag >> SEQUENCE_BITS, tag & SEQUENCE_MASK


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """What the daemon says about the batch in a slot."""

    epoch: int
    index: int
    valid: int
    sequence: int
    generation: int
    digest: bytes  # 16 bytes, core.digest.batch_digest

    def pack_into(self, buffer: memoryview, offset: int) -> None:
        """Write everything but the tag, which is stored last and alone (it publishes the slot)."""
        packed = _HEADER.pack(0, self.epoch, self.index, self.valid, self.sequence, self.generation, self.digest)
        buffer[offset + 8 : offset + _HEADER.size] = packed[8:]

    @classmethod
    def unpack_from(cls, buffer: memoryview, offset: int) -> SlotHeader:
        return cls(*_HEADER.unpack_from(buffer, offset)[1:])


@dataclass(frozen=True, slots=True)
class RingLayout:
    """Offsets and sizes (bytes) of a ring, a pure function of its eight numbers.

    Page 0 is the control page, page 1 + m holds what member m writes (its ``released`` words, one per cache line), then
    come the slots: header, row hashes u64[B], labels i32[B], images [B, height, width, padded_channels].
    """

    depth: int
    batch_size: int
    height: int
    width: int
    channels: int
    padded_channels: int
    dtype: DType
    members: int = 1  # consumers that read the same batches

    def __post_init__(self) -> None:
        check_range("members", self.members, 1, MAX_MEMBERS)
        check_range("depth", self.depth, MIN_DEPTH, MAX_DEPTH)
        check_range("batch size", self.batch_size, 1, MAX_BATCH_SIZE)
        check_range("padded channels", self.padded_channels, self.channels, MAX_PADDED_CHANNELS)
        if self.dtype not in DELIVERED_DTYPES:
            allowed = ", ".join(d.name.lower() for d in DELIVERED_DTYPES)
            raise ValueRejected(f"dtype is {self.dtype.name.lower()}; a session delivers one of: {allowed}")

    @property
    def row_bytes(self) -> int:
        return self.height * self.width * self.padded_channels * self.dtype.itemsize

    @property
    def hashes_offset(self) -> int:
        return IMAGE_ALIGNMENT

    @property
    def labels_offset(self) -> int:
        return align(self.hashes_offset + 8 * self.batch_size, IMAGE_ALIGNMENT)

    @property
    def images_offset(self) -> int:
        return align(self.labels_offset + 4 * self.batch_size, PAGE)

    @property
    def slot_stride(self) -> int:
        return align(self.images_offset + self.batch_size * self.row_bytes, PAGE)

    @property
    def total_bytes(self) -> int:
        return self.slot_offset(self.depth)

    def slot_offset(self, slot: int) -> int:
        return (1 + self.members) * PAGE + slot * self.slot_stride

    def released_word(self, member: int, slot: int) -> int:
        """Index of the 64-bit word in which the member says which batch of the slot it has given back."""
        return ((1 + member) * PAGE + CACHE_LINE * slot) // 8

    def control_bytes(self) -> bytes:
        """The start of page 0."""
        return _CONTROL.pack(
            MAGIC,
            PROTOCOL_VERSION,
            self.depth,
            self.batch_size,
            self.height,
            self.width,
            self.channels,
            self.padded_channels,
            int(self.dtype),
            self.members,
            0,
            self.slot_stride,
            self.total_bytes,
        )


class Ring:
    """Views into a mapped ring; the same class serves daemon, worker and consumer.

    ``words`` gives shared 64-bit words by byte offset / 8. Slot views keep the mapping alive, so it is unmapped when
    the last view is gone.
    """

    def __init__(self, fd: int, layout: RingLayout, *, create: bool = False, member: int = 0) -> None:
        """``member`` is whose words ``release`` and ``take`` write; daemon and workers read those of all members."""
        self.layout = layout
        self._map = mmap.mmap(fd, layout.total_bytes)
        self.buffer = memoryview(self._map)
        control = layout.control_bytes()
        if create:
            self.buffer[: len(control)] = control
        elif bytes(self.buffer[: len(control)]) != control:
            raise ProtocolError(
                f"shared ring: control page does not describe {layout}; the dataserver laid it out differently. "
                "Use the same version of renaissance on both sides"
            )
        self.words = self.buffer.cast("Q")
        offsets = [layout.slot_offset(slot) for slot in range(layout.depth)]
        self.tag_words = [offset // 8 for offset in offsets]
        slots, members = range(layout.depth), range(layout.members)
        self.released_words = [layout.released_word(member, slot) for slot in slots]
        self._of_member = self.released_words[0]
        self._by_slot = [[layout.released_word(m, slot) for m in members] for slot in slots]
        batch = (layout.batch_size,)
        self.hashes: list[U64] = [self._view(o + layout.hashes_offset, batch, np.uint64) for o in offsets]
        self.labels: list[I32] = [self._view(o + layout.labels_offset, batch, np.int32) for o in offsets]
        rows = (layout.batch_size, layout.row_bytes)
        self.rows: list[U8] = [self._view(o + layout.images_offset, rows, np.uint8) for o in offsets]
        shape = (layout.batch_size, layout.height, layout.width, layout.padded_channels)
        self.images = [self._view(o + layout.images_offset, shape, layout.dtype.numpy) for o in offsets]

    def _view(self, offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        count = int(np.prod(shape))
        return np.frombuffer(self.buffer, dtype=dtype, count=count, offset=offset).reshape(shape)

    @property
    def memory(self) -> tuple[int, int]:
        """(address, bytes) of the whole mapping: pages, of whatever size here, that nothing else lies in."""
        return int(np.frombuffer(self.buffer, np.uint8).ctypes.data), align(self.layout.total_bytes, mmap.PAGESIZE)

    def header(self, slot: int) -> SlotHeader:
        return SlotHeader.unpack_from(self.buffer, self.layout.slot_offset(slot))

    def publish(self, slot: int, header: SlotHeader) -> None:
        """Daemon side: the slot is complete; after this call the consumer may read it."""
        header.pack_into(self.buffer, self.layout.slot_offset(slot))
        fence()
        self.words[self.tag_words[slot]] = make_tag(header.generation, header.sequence)

    def release(self, slot: int, sequence: int) -> None:
        """Consumer side: the slot that held ``sequence`` may be overwritten as far as this member is concerned."""
        fence()
        self.words[self.released_words[slot]] = sequence + 1

    def take(self, sequence: int) -> None:
        """Consumer side: every batch before ``sequence`` was taken. Only for statistics."""
        self.words[self._of_member + _TAKEN] = sequence

    def wait(self, waiting: bool, nanoseconds: int) -> None:
        """Consumer side: whether it is blocked, and for how long it has been in all. Only for statistics."""
        self.words[self._of_member + _WAITED] = nanoseconds
        self.words[self._of_member + _WAITING] = waiting

    def member_words(self, member: int) -> tuple[int, bool, float]:
        """Daemon side: (batches taken, whether it is blocked, seconds blocked in all) as the member says."""
        first = self.layout.released_word(member, 0)
        waited = self.words[first + _WAITED] / 1e9
        return self.words[first + _TAKEN], bool(self.words[first + _WAITING]), waited

    def released(self, member: int, slot: int) -> int:
        """Daemon side: one more than the sequence number that the member gave back last in the slot."""
        return self.words[self.layout.released_word(member, slot)]

    def depart(self, member: int) -> None:
        """Daemon side: the member is gone; what it holds counts as released from now on."""
        self.words[_DEPARTED] |= 1 << member
        fence()

    def is_free_for(self, slot: int, sequence: int) -> bool:
        """Worker side: may ``sequence`` be written into the slot?"""
        words, floor = self.words, sequence - self.layout.depth
        released = self._by_slot[slot]
        if len(released) == 1:
            return words[released[0]] > floor
        departed = words[_DEPARTED]
        return all(words[word] > floor for member, word in enumerate(released) if not departed >> member & 1)

    @property
    def corrupt(self) -> int:
        """Corrupt samples met so far, by (epoch, sample); written by the daemon."""
        return self.words[_CORRUPT]

    @corrupt.setter
    def corrupt(self, count: int) -> None:
        self.words[_CORRUPT] = count


def pack_seek(generation: int, sequence: int, epoch: int, index: int) -> bytes:
    """The consumer's jump: from ``sequence`` on, the stream is (epoch, index) and what follows it."""
    return _SEEK.pack(SEEK, generation, sequence, epoch, index)


def unpack_seek(message: bytes) -> tuple[int, int, int, int]:
    """(generation, sequence, epoch, index). Raises ProtocolError for anything else."""
    if len(message) != _SEEK.size or not message.startswith(SEEK):
        raise ProtocolError(f"data socket: expected a {_SEEK.size} byte SEEK message, got {len(message)} bytes")
    _, generation, sequence, epoch, index = _SEEK.unpack(message)
    return generation, sequence, epoch, index


def receive(connection: socket.socket, size: int = MESSAGE_BYTES) -> bytes:
    """The next message of a SOCK_SEQPACKET socket; b"" once the peer is gone and everything it said was read.

    When the peer closes with messages of ours unread, Linux reports that reset before the peer's last words, once.
    """
    for _ in range(2):
        try:
            return connection.recv(size)
        except ConnectionResetError:
            continue
        except BrokenPipeError:
            break
    return b""


def check_range(name: str, value: int, low: int, high: int) -> None:
    """Raise ValueRejected unless ``low <= value <= high``."""
    if not low <= value <= high:
        raise ValueRejected(f"{name} is {value}; expected {low} to {high}")


def version_mismatch(dataserver: int, client: int) -> str:
    """The message for two sides of different protocol versions."""
    return (
        f"the dataserver speaks protocol version {dataserver}, this client version {client}; "
        "install the same version of renaissance on both sides"
    )


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueRejected unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise ValueRejected(f"{name} is {value[:100]!r}; expected one of: {', '.join(allowed)}")


def check_share_of_set(share: float) -> None:
    """Raise ValueRejected unless ``share``, a part of a data set, is 0 to 1."""
    if not 0.0 <= share <= 1.0:  # also for NaN
        raise ValueRejected(f"max_corrupt_share is {share:g}; expected 0 to 1")


def check_group(name: str, count: int) -> None:
    """Raise ValueRejected for a share group that cannot be: a count without a name, or a name that cannot be logged."""
    if not name:
        if count != 1:
            raise ValueRejected(f"share_count is {count} without a share group; give share=NAME too")
        return
    if len(name) > MAX_SHARE_NAME or not name.isprintable():
        raise ValueRejected(f"share is {name[:MAX_SHARE_NAME]!r}; expected 1 to {MAX_SHARE_NAME} printable characters")
    check_range("share_count", count, 1, MAX_MEMBERS)
