"""Layout of the shared ring and the messages on the data socket: the contract between dataserver and consumer.

docs/shared-memory.md is the same contract in prose. Invariants:

- Every word has exactly one writer. The daemon writes ``tag`` (a batch is ready), the consumer writes ``released``.
- A batch is named by its tag: generation (how often the consumer has jumped) and sequence number in the stream.
  Batch ``s`` lies in slot ``s % depth``, so even slots are A and odd slots are B.
- A slot is filled for sequence ``s`` only after the consumer has released ``s - depth``.
"""

from __future__ import annotations

import mmap
import os
import socket
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
from numba import njit, types
from numba.extending import intrinsic

from renaissance.core.dtype import DType
from renaissance.core.errors import ProtocolError, ValueRejected

U8 = npt.NDArray[np.uint8]
I32 = npt.NDArray[np.int32]
U64 = npt.NDArray[np.uint64]

PROTOCOL_VERSION = 1
MAGIC = b"RNSRING1"
PAGE = 4096
CACHE_LINE = 64
IMAGE_ALIGNMENT = 256
MIN_DEPTH, MAX_DEPTH = 2, PAGE // CACHE_LINE
MAX_BATCH_SIZE = 65536
MAX_PADDED_CHANNELS = 64
DELIVERED_DTYPES = (DType.UINT8, DType.FP32, DType.FP16, DType.BF16)
MAX_EPOCH = (1 << 31) - 2
SEQUENCE_BITS = 40
SEQUENCE_MASK = (1 << SEQUENCE_BITS) - 1
MESSAGE_BYTES = 65536
"""Largest message on the data socket."""

_CONTROL = struct.Struct("<8s8IQQ")  # magic, version, geometry, slot stride, total bytes
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
    """Offsets and sizes (bytes) of a ring, a pure function of its seven numbers.

    Page 0 is the control page, page 1 holds the consumer's ``released`` words (one per cache line), then come the
    slots: header, row hashes u64[B], labels i32[B], images [B, height, width, padded_channels].
    """

    depth: int
    batch_size: int
    height: int
    width: int
    channels: int
    padded_channels: int
    dtype: DType

    def __post_init__(self) -> None:
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
        return 2 * PAGE + self.depth * self.slot_stride

    def slot_offset(self, slot: int) -> int:
        return 2 * PAGE + slot * self.slot_stride

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
            self.slot_stride,
            self.total_bytes,
        )


class Ring:
    """Views into a mapped ring; the same class serves daemon, worker and consumer.

    ``words`` gives shared 64-bit words by byte offset / 8. Slot views keep the mapping alive, so it is unmapped when
    the last view is gone.
    """

    def __init__(self, fd: int, layout: RingLayout, *, create: bool = False) -> None:
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
        self.released_words = [(PAGE + CACHE_LINE * slot) // 8 for slot in range(layout.depth)]
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

    def header(self, slot: int) -> SlotHeader:
        return SlotHeader.unpack_from(self.buffer, self.layout.slot_offset(slot))

    def publish(self, slot: int, header: SlotHeader) -> None:
        """Daemon side: the slot is complete; after this call the consumer may read it."""
        header.pack_into(self.buffer, self.layout.slot_offset(slot))
        fence()
        self.words[self.tag_words[slot]] = make_tag(header.generation, header.sequence)

    def release(self, slot: int, sequence: int) -> None:
        """Consumer side: the slot that held ``sequence`` may be overwritten."""
        fence()
        self.words[self.released_words[slot]] = sequence + 1

    def is_free_for(self, slot: int, sequence: int) -> bool:
        """Worker side: may ``sequence`` be written into the slot?"""
        return self.words[self.released_words[slot]] + self.layout.depth > sequence


def pack_seek(generation: int, sequence: int, epoch: int, index: int) -> bytes:
    """The consumer's jump: from ``sequence`` on, the stream is (epoch, index) and what follows it."""
    return _SEEK.pack(SEEK, generation, sequence, epoch, index)


def unpack_seek(message: bytes) -> tuple[int, int, int, int]:
    """(generation, sequence, epoch, index). Raises ProtocolError for anything else."""
    if len(message) != _SEEK.size or not message.startswith(SEEK):
        raise ProtocolError(f"data socket: expected a {_SEEK.size} byte SEEK message, got {len(message)} bytes")
    _, generation, sequence, epoch, index = _SEEK.unpack(message)
    return generation, sequence, epoch, index


def receive(connection: socket.socket) -> bytes:
    """The next message of a SOCK_SEQPACKET socket; b"" once the peer is gone and everything it said was read.

    When the peer closes with messages of ours unread, Linux reports that reset before the peer's last words, once.
    """
    for _ in range(2):
        try:
            return connection.recv(MESSAGE_BYTES)
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


def unix_path(address: str) -> str:
    """The path of ``unix:PATH``. Raises ValueRejected for other schemes and for paths a Unix socket cannot have."""
    scheme, _, path = address.partition(":")
    if scheme != "unix":
        raise ValueRejected(
            f"address {address!r}: only unix:PATH is supported; TCP would need TLS or a token, which this version lacks"
        )
    path = path.removeprefix("//")
    longest = 107 - len(DATA_SUFFIX)
    if not path or len(path.encode()) > longest:
        raise ValueRejected(f"address {address!r}: expected unix:PATH with a path of 1 to {longest} bytes")
    return path


def grpc_target(path: str) -> str:
    """The gRPC name of a Unix socket: a URI, in which %, ? and # of the path would mean something else."""
    return f"unix:{quote(os.fsencode(path), safe='/')}"


def runtime_folder() -> Path:
    """Folder of the default socket, made with mode 0700: $XDG_RUNTIME_DIR/renaissance or /tmp/renaissance-UID.

    Raises ValueRejected when it exists but belongs to somebody else or is open to others.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(base) / "renaissance" if base else Path(f"/tmp/renaissance-{os.geteuid()}")
    try:
        folder.mkdir(mode=0o700, parents=False, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise ValueRejected(f"{folder}: cannot be made or read: {error.strerror}; give unix:PATH") from None
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077 or not stat.S_ISDIR(status.st_mode):
        raise ValueRejected(f"{folder}: expected a folder of user {os.geteuid()} with mode 0700; give unix:PATH")
    return folder


def default_address() -> str:
    """Where a daemon listens, and a client looks, when nothing is said."""
    return f"unix:{runtime_folder() / 'dataserver.sock'}"


DATA_SUFFIX = ".data"
"""The data socket lies beside the control socket, under its name and this suffix."""
