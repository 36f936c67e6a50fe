"""The shared ring's layout and hand-over rules, without processes."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataserver import shared
from dataserver.shared import Board, PoolPage, create_eventfd, create_memfd, drain, notify, seal_read_only
from renaissance.core.dtype import DType
from renaissance.core.errors import DataServerError, ProtocolError, ValueRejected
from renaissance.data import address, protocol
from renaissance.data.making.spec import Load, LoadedSet, SessionSpec
from renaissance.data.protocol import Ring, RingLayout, SlotHeader, make_tag, pack_seek, receive, split_tag, unpack_seek
from renaissance.data.sources import Encoding

LAYOUT = RingLayout(4, 7, 28, 28, 1, 1, DType.BF16)


@pytest.fixture
def ring_fd() -> Iterator[int]:
    fd = create_memfd("test", LAYOUT.total_bytes)
    yield fd
    os.close(fd)


layouts = st.builds(
    lambda depth, batch, side, channels, extra, dtype: RingLayout(
        depth, batch, side, side, channels, channels + extra, dtype
    ),
    st.integers(2, 64),
    st.integers(1, 3000),
    st.integers(1, 300),
    st.sampled_from([1, 3]),
    st.integers(0, 5),
    st.sampled_from(protocol.DELIVERED_DTYPES),
)


@given(layouts)
def test_parts_of_a_slot_are_aligned_and_do_not_overlap(layout: RingLayout) -> None:
    batch = layout.batch_size
    assert protocol._HEADER.size <= layout.hashes_offset
    assert layout.hashes_offset + 8 * batch <= layout.labels_offset
    assert layout.labels_offset + 4 * batch <= layout.images_offset
    assert layout.images_offset + batch * layout.row_bytes <= layout.slot_stride
    for slot in range(layout.depth):
        assert (layout.slot_offset(slot) + layout.images_offset) % protocol.IMAGE_ALIGNMENT == 0
    assert layout.slot_offset(layout.depth) == layout.total_bytes
    assert len(layout.control_bytes()) <= protocol.PAGE


def test_layout_of_mnist_is_the_documented_one() -> None:
    """Numbers of the worked example in docs/shared-memory.md, counted by hand."""
    layout = RingLayout(4, 200, 28, 28, 1, 1, DType.FP32)
    assert layout.row_bytes == 3136
    assert (layout.hashes_offset, layout.labels_offset, layout.images_offset) == (256, 2048, 4096)
    assert layout.slot_stride == 634_880
    assert layout.total_bytes == 2_547_712
    expected = (
        b"RNSRING1" + struct.pack("<10I", 2, 4, 200, 28, 28, 1, 1, 0, 1, 0) + struct.pack("<QQ", 634_880, 2_547_712)
    )
    assert layout.control_bytes() == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 1}, "depth is 1; expected 2 to 64"),
        ({"batch_size": 0}, "batch size is 0"),
        ({"padded_channels": 2}, "padded channels is 2; expected 3 to 64"),
        ({"dtype": DType.INT8}, "dtype is int8"),
    ],
)
def test_impossible_layouts_are_refused(changes: dict[str, int], message: str) -> None:
    fields = {"depth": 4, "batch_size": 1, "height": 1, "width": 1, "channels": 3, "padded_channels": 4}
    with pytest.raises(ValueRejected, match=message):
        RingLayout(**{"dtype": DType.FP32, **fields, **changes})


@given(st.integers(1, (1 << 24) - 1), st.integers(0, (1 << 40) - 1))
def test_tag_names_generation_and_sequence(generation: int, sequence: int) -> None:
    tag = make_tag(generation, sequence)
    assert 0 < tag < 1 << 64
    assert split_tag(tag) == (generation, sequence)


def test_published_batch_is_seen_by_another_mapping(ring_fd: int) -> None:
    daemon, consumer = Ring(ring_fd, LAYOUT, create=True), Ring(ring_fd, LAYOUT)
    header = SlotHeader(epoch=3, index=9, valid=5, sequence=6, generation=2, digest=bytes(range(16)))
    daemon.images[2][:] = 0x3F80
    daemon.publish(2, header)
    assert consumer.words[consumer.tag_words[2]] == make_tag(2, 6)
    assert consumer.header(2) == header
    assert (consumer.images[2] == 0x3F80).all()
    assert [t for t in (0, 1, 3) if consumer.words[consumer.tag_words[t]]] == []


def test_slot_is_free_only_after_its_last_batch_was_released(ring_fd: int) -> None:
    ring = Ring(ring_fd, LAYOUT, create=True)
    for sequence in range(4):
        assert ring.is_free_for(sequence, sequence)
    for sequence in range(4, 40):
        slot = sequence % 4
        assert not ring.is_free_for(slot, sequence)
        ring.release(slot, sequence - 4)
        assert ring.is_free_for(slot, sequence)


def test_a_ring_is_whole_pages_that_hold_every_slot(ring_fd: int) -> None:
    ring = Ring(ring_fd, LAYOUT, create=True)
    start, nbytes = ring.memory
    assert start % mmap.PAGESIZE == nbytes % mmap.PAGESIZE == 0
    for array in (*ring.images, *ring.labels, *ring.hashes):
        assert start <= array.ctypes.data < array.ctypes.data + array.nbytes <= start + nbytes


def test_ring_of_another_layout_is_refused(ring_fd: int) -> None:
    Ring(ring_fd, LAYOUT, create=True)
    with pytest.raises(ProtocolError, match="control page"):
        Ring(ring_fd, RingLayout(4, 7, 28, 28, 1, 1, DType.FP16))


def test_memfd_cannot_be_resized_by_a_peer(ring_fd: int) -> None:
    for size in (0, LAYOUT.total_bytes * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(ring_fd, size)
    assert os.fstat(ring_fd).st_blocks * 512 >= LAYOUT.total_bytes  # reserved in full


def test_sealed_data_set_cannot_be_written(ring_fd: int) -> None:
    seal_read_only(ring_fd)
    with pytest.raises(PermissionError):
        mmap.mmap(ring_fd, LAYOUT.total_bytes)
    mmap.mmap(ring_fd, LAYOUT.total_bytes, flags=mmap.MAP_PRIVATE).close()
    with pytest.raises(PermissionError):
        fcntl.fcntl(ring_fd, fcntl.F_ADD_SEALS, 0)


def test_memory_that_does_not_exist_is_an_error_that_says_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "available_memory", lambda: 4095)
    with pytest.raises(DataServerError, match="cannot reserve 4096 bytes of shared memory for ring: 4095 are"):
        create_memfd("ring", 4096)


def test_seek_message_round_trip() -> None:
    assert unpack_seek(pack_seek(2, 3, 4, 5)) == (2, 3, 4, 5)
    for bad in (b"", b"SEEK", pack_seek(2, 3, 4, 5) + b"x", b"KEES" + pack_seek(2, 3, 4, 5)[4:]):
        with pytest.raises(ProtocolError):
            unpack_seek(bad)


def test_eventfd_never_blocks() -> None:
    fd = create_eventfd()
    os.eventfd_write(fd, (1 << 64) - 2)  # the counter's maximum
    notify(fd)
    drain(fd)
    drain(fd)
    os.close(fd)


def test_last_words_are_read_after_a_reset() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.send(b"never read")
    theirs.send(b"goodbye")
    theirs.close()
    assert receive(ours) == b"goodbye"
    assert receive(ours) == b""
    ours.close()


@pytest.fixture
def board() -> Iterator[Board]:
    fd = create_memfd("board", Board.size(4, 3))
    yield Board(fd, 4, 3)
    os.close(fd)


def test_batch_is_complete_when_every_share_of_it_is(board: Board) -> None:
    tag = make_tag(1, 5)
    assert [board.mark_done(1, worker, tag) for worker in (2, 0)] == [False, False]
    assert not board.is_complete(1, tag)
    assert board.mark_done(1, 1, tag)
    assert board.is_complete(1, tag)
    assert not board.is_complete(1, make_tag(2, 5))


def test_successor_goes_on_at_the_first_unfinished_share(board: Board) -> None:
    assert board.next_sequence(1, 1, 0) == 0
    for sequence in range(7):
        board.mark_done(sequence % 4, 1, make_tag(1, sequence))
    assert board.next_sequence(1, 1, 0) == 7
    assert board.next_sequence(0, 1, 0) == 0
    assert board.next_sequence(1, 2, 5) == 5  # a jump: nothing of the new generation is done


def test_newest_jump_is_read(board: Board) -> None:
    for generation in range(1, 100):
        board.write_seek(generation, generation * 3, generation % 7, generation % 5)
        assert board.read_seek() == (generation, generation * 3, generation % 7, generation % 5)


def test_pool_page_tells_whose_share_a_worker_was_at() -> None:
    fd = create_memfd("pool", PoolPage.size(3))
    page = PoolPage(fd, 3)
    page.begin(1, 42)
    assert [page.current_session(w) for w in range(3)] == [0, 42, 0]
    page.idle(1)
    assert page.current_session(1) == 0
    os.close(fd)


@given(st.integers(1, 500), st.integers(1, 60), st.integers(1, 5))
def test_valid_rows_add_up_to_the_samples(samples: int, batch: int, world: int) -> None:
    layout = RingLayout(2, batch, 1, 1, 1, 1, DType.UINT8)
    dataset = LoadedSet("mnist", "val", Load.FULLY, Encoding.PIXELS, samples, 10, 1, 1, 1, "")
    batches = -(-samples // (batch * world))
    total = 0
    for rank in range(world):
        spec = SessionSpec("mnist", "val", dataset, "", 0, False, rank, world, batches, layout)
        rows = [spec.valid_rows(index) for index in range(batches)]
        assert all(0 <= r <= batch for r in rows)
        total += sum(rows)
        assert spec.advance(3, 0, 2 * batches + 1) == (5 + 1 // batches, 1 % batches)
    assert total == samples


def test_default_address_is_in_a_folder_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert address.default_address() == f"unix:{tmp_path}/renaissance/dataserver.sock"
    folder = tmp_path / "renaissance"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    with pytest.raises(ValueRejected, match="mode 0700"):
        address.default_address()


def test_views_share_the_mapping(ring_fd: int) -> None:
    ring = Ring(ring_fd, LAYOUT, create=True)
    ring.rows[3][6, -2:] = np.frombuffer(struct.pack("<H", 0x4049), np.uint8)
    assert ring.images[3][6, 27, 27, 0] == 0x4049
