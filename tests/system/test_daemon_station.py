"""What a consumer can rely on: fixed slots, views without a copy, release, digests, threads, DLPack."""

from __future__ import annotations

import ctypes
import gc
import linecache
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import LIMIT_SECONDS, train_recipe

from renaissance.core.dtype import DType
from renaissance.core.errors import DataServerError, DigestMismatch, ValueRejected
from renaissance.data import dlpack
from renaissance.data import station as station_module
from renaissance.data.private_daemon import start_private_daemon
from renaissance.data.station import TransferStation


@pytest.fixture(scope="module")
def address(dts_folder: Path) -> Iterator[str]:
    with start_private_daemon({"mnist": dts_folder}, workers=2) as private:
        yield private.address


def open_train(address: str, **changes: Any) -> TransferStation:
    options = {"dataset": "mnist", "split": "train", "recipe": train_recipe(), "seed": 11, "batch_size": 50}
    return TransferStation(address, **{**options, **changes})


def test_batches_go_round_the_slots_at_fixed_aligned_addresses(address: str) -> None:
    with open_train(address) as station:
        addresses = [slot.images.ctypes.data for slot in station.slots]
        assert all(a % 256 == 0 for a in addresses)
        expected = 0
        for epoch in (0, 1):
            for batch in station.epoch(epoch):
                assert batch.slot == expected % 4
                assert batch.images.ctypes.data == addresses[batch.slot]
                assert batch.images.shape == (50, 28, 28, 1)
                assert batch.images.dtype == np.float32
                assert batch.labels.dtype == np.int32
                expected += 1


def test_kept_batches_stay_untouched_until_released(address: str) -> None:
    with open_train(address, depth=4) as station:
        kept = []
        for batch in station.epoch(0):
            kept.append((batch.keep(), batch.images.copy()))
            if len(kept) == 4:
                break
        for batch, copy in kept:
            np.testing.assert_array_equal(batch.images, copy)
        with pytest.raises(ValueRejected, match="not yet released"):
            station.acquire(0, 4)
        kept[0][0].release()
        kept[0][0].release()  # a second time is harmless
        assert kept[0][0].released
        station.acquire(0, 4).release()


def test_batches_can_be_released_in_any_order_and_from_another_thread(address: str) -> None:
    with open_train(address) as station:
        expected = [b.digest for b in station.epoch(0)]
    with open_train(address, depth=3, check_digest=True) as station:
        seen = []
        for index in range(0, station.batches_per_epoch - 1, 2):
            pair = [station.acquire(0, index), station.acquire(0, index + 1)]
            seen += [b.digest for b in pair]
            thread = threading.Thread(target=pair[1].release)
            thread.start()
            thread.join()
            pair[0].release()
        assert seen == expected[: len(seen)]


def test_leaving_the_loop_releases_the_batch(address: str) -> None:
    with open_train(address) as station:
        seen = []
        for batch in station.epoch(0):
            seen.append(batch)
            if len(seen) == 3:
                break
        gc.collect()
        assert [batch.released for batch in seen] == [True] * 3
        assert [b.index for b in station.epoch(0)] == list(range(13))


def test_digest_check_names_the_flipped_row(address: str) -> None:
    with open_train(address, check_digest=True) as station:
        batch = station.acquire(0, 0)
        batch.release()
        slot = station._sequence % station.depth
        # Wait for the next batch without checking it, flip a byte of row 17, then check.
        station.check_digest = False
        with station.acquire(0, 1):
            station.check_digest = True
            station._check(slot, station._ring.header(slot))
            station._ring.rows[slot][17, 5] ^= 1
            with pytest.raises(DigestMismatch, match=r"epoch 0 batch 1 \(mnist train\): row 17"):
                station._check(slot, station._ring.header(slot))
            station._ring.rows[slot][17, 5] ^= 1
            station._ring.labels[slot][3] ^= 1
            with pytest.raises(DigestMismatch, match="epoch 0 batch 1"):
                station._check(slot, station._ring.header(slot))


def test_epoch_digest_is_refused_for_an_epoch_not_seen_in_full(address: str) -> None:
    with open_train(address) as station:
        for _ in station.epoch(0, 3):
            pass
        with pytest.raises(ValueRejected, match="no digest of epoch 0"):
            station.epoch_digest(0)


def test_positions_that_do_not_exist_are_refused_and_the_station_goes_on(address: str) -> None:
    with open_train(address) as station:
        for epoch, index in ((0, 13), (0, -1), (-1, 0), (2**31, 0)):
            with pytest.raises(ValueRejected, match="expected 0 to"):
                station.acquire(epoch, index)
        station.acquire(0, 0).release()
    with pytest.raises(DataServerError, match="closed"):
        station.acquire(0, 1)


def test_reading_in_another_thread_gives_the_same_batches(address: str) -> None:
    with open_train(address) as station:
        expected = [b.digest for b in station.epoch(0)]
    seen: list[str] = []
    with open_train(address) as station:
        thread = threading.Thread(target=lambda: seen.extend(b.digest for b in station.epoch(0)))
        thread.start()
        thread.join(LIMIT_SECONDS)
    assert seen == expected


def test_wait_seconds_counts_blocked_time(address: str) -> None:
    with open_train(address) as station:
        for epoch in range(7, 57):  # a cold jump waits, unless this process is kept from running meanwhile
            station.acquire(epoch, 7).release()
        assert station.wait_seconds > 0


def test_views_outlive_the_station(address: str) -> None:
    with open_train(address) as station:
        batch = station.acquire(0, 0)  # never released, so never overwritten
        images, copy = batch.images, batch.images.copy()
    del station, batch
    gc.collect()
    np.testing.assert_array_equal(images, copy)


@pytest.mark.parametrize("dtype", [DType.FP32, DType.FP16])
def test_dlpack_shares_memory(address: str, dtype: DType) -> None:
    with open_train(address, dtype=dtype) as station, station.acquire(0, 0) as batch:
        array = np.from_dlpack(batch)
        assert array.dtype == dtype.numpy
        assert array.ctypes.data == batch.images.ctypes.data
        np.testing.assert_array_equal(array, batch.images)


def test_dlpack_exports_true_bfloat16_and_frees_it_once(address: str) -> None:
    with open_train(address, dtype=DType.BF16, padded_channels=4) as station, station.acquire(0, 0) as batch:
        assert batch.__dlpack_device__() == (1, 0)
        capsule = batch.__dlpack__(stream=None)
        managed = dlpack._ManagedTensor.from_address(dlpack._get_pointer(id(capsule), b"dltensor"))
        tensor = managed.tensor
        assert (tensor.code, tensor.bits, tensor.lanes) == (4, 16, 1)
        assert list(tensor.shape[: tensor.ndim]) == [50, 28, 28, 4]
        assert list(tensor.strides[: tensor.ndim]) == [28 * 28 * 4, 28 * 4, 4, 1]
        assert tensor.data == batch.images.ctypes.data
        assert len(dlpack._alive) == 1
        del capsule  # nobody took it
        assert not dlpack._alive
        capsule = batch.__dlpack__()
        address_of = dlpack._get_pointer(id(capsule), b"dltensor")
        managed = dlpack._ManagedTensor.from_address(address_of)
        prototype = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
        rename = prototype(("PyCapsule_SetName", ctypes.pythonapi))
        name = b"used_dltensor"
        assert rename(capsule, name) == 0  # what a consumer does
        del capsule
        assert len(dlpack._alive) == 1
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(managed.deleter)(address_of)
        assert not dlpack._alive
        with pytest.raises(BufferError):
            batch.__dlpack__(copy=True)


def test_ten_lines_are_enough(address: str, tmp_path: Path) -> None:
    """The example of the module's documentation, as a program of its own."""
    program = tmp_path / "ten.py"
    program.write_text(
        "import sys\n"
        "from renaissance import NormMode, Pad, RandomCrop, Recipe, TransferStation\n"
        "recipe = Recipe.build([Pad(2), RandomCrop(28)], NormMode.MNIST, resolution=28, color_channels=1)\n"
        "options = dict(dataset='mnist', split='train', recipe=recipe, seed=1, batch_size=200)\n"
        "total = 0\n"
        "with TransferStation(sys.argv[1], **options) as station:\n"
        "    for batch in station.epoch(3):\n"
        "        total += batch.valid\n"
        "print(total, batch.images.shape, batch.labels[-1])\n"
    )
    done = subprocess.run(
        [sys.executable, str(program), address], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "611 (200, 28, 28, 1) -1\n"


class Interrupt:
    """Ctrl-C at the ``number``-th line that is run in the station's module; at any other place nothing is the station's
    to put right."""

    def __init__(self, number: int) -> None:
        self._left = number
        self.happened, self.where = False, 0

    def __call__(self, frame: Any, event: str, argument: object) -> Interrupt | None:
        if frame.f_code.co_filename != station_module.__file__ or self.happened:
            return None
        # The interpreter takes signals at calls and loops, never at these lines; a tracer could.
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and line != "try:" and not line.startswith("with "):
            if self._left == 0:
                self.happened, self.where = True, frame.f_lineno
                raise KeyboardInterrupt
            self._left -= 1
        return self


@pytest.mark.parametrize("position", [(0, 0), (3, 2)], ids=["in order", "after a jump"])
def test_interrupt_at_any_line_leaves_no_slot_held_and_the_stream_readable(
    address: str, position: tuple[int, int]
) -> None:
    with open_train(address, batch_size=200) as station:
        expected = {(b.epoch, b.index): b.digest for e in range(5) for b in station.epoch(e)}
    epoch, first = position
    with open_train(address, batch_size=200, depth=2) as station:
        number = 0
        while True:
            interrupt = Interrupt(number)
            kept = sys.gettrace()
            with suppress(KeyboardInterrupt):
                sys.settrace(interrupt)
                try:
                    stream = station.epoch(epoch, first)
                    for batch in stream:
                        if batch.index == first + 1:
                            break
                    stream.close()
                finally:
                    sys.settrace(kept)
            if not interrupt.happened:
                break
            assert station._held == [None, None], interrupt.where
            for batch in station.epoch(epoch, first):
                assert batch.digest == expected[epoch, batch.index]
            number += 1
        assert number > 60  # that many lines were interrupted
        assert [b.digest for b in station.epoch(epoch)] == [expected[epoch, i] for i in range(4)]
        assert station.epoch_digest(epoch)
