"""Law 1 through the whole data plane: delivered bytes depend on stored bytes, recipe, seed, epoch and sample only."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TRAIN_SAMPLES, VAL_SAMPLES, DaemonProcess, make_samples, train_recipe, val_recipe

from renaissance.core.digest import chain_digest
from renaissance.core.dtype import DType, fp32_from_bf16
from renaissance.data.client import server_stats
from renaissance.data.order import epoch_order
from renaissance.data.private_daemon import start_private_daemon
from renaissance.data.station import TransferStation


def open_train(address: str, **changes: Any) -> TransferStation:
    options = {"dataset": "mnist", "split": "train", "recipe": train_recipe(), "seed": 11, "batch_size": 50}
    return TransferStation(address, **{**options, **changes})


def epoch_digest(address: str, epoch: int = 0, **changes: Any) -> str:
    with open_train(address, **changes) as station:
        for _ in station.epoch(epoch):
            pass
        return station.epoch_digest(epoch)


@pytest.fixture(scope="module")
def address(dts_folder: Path):
    with start_private_daemon({"mnist": dts_folder}, workers=2) as private:
        yield private.address


@pytest.fixture(scope="module")
def digests(address: str) -> list[str]:
    """Of epochs 0 and 1 with two workers."""
    return [epoch_digest(address, epoch) for epoch in (0, 1)]


@pytest.mark.parametrize("workers", [1, 3, 7])
def test_worker_count_does_not_change_bytes(dts_folder: Path, digests: list[str], workers: int) -> None:
    with start_private_daemon({"mnist": dts_folder}, workers=workers) as private:
        assert [epoch_digest(private.address, epoch) for epoch in (0, 1)] == digests


def test_raw_and_dts_input_give_the_same_bytes(raw_folder: Path, digests: list[str]) -> None:
    with start_private_daemon({"mnist": raw_folder}, workers=2, data_format="raw") as private:
        assert epoch_digest(private.address) == digests[0]


def test_seed_and_epoch_change_bytes(address: str, digests: list[str]) -> None:
    assert digests[0] != digests[1]
    assert epoch_digest(address, seed=12) not in digests


def test_ring_depth_and_memory_placement_do_not_change_bytes(address: str, digests: list[str]) -> None:
    assert epoch_digest(address, depth=2) == digests[0]
    assert epoch_digest(address, depth=64) == digests[0]


def test_daemon_and_station_agree_on_the_epoch_digest(address: str, digests: list[str]) -> None:
    with open_train(address, check_digest=True) as station:
        for epoch in (0, 1):
            for batch in station.epoch(epoch):
                assert batch.epoch == epoch
        mine = [s for s in server_stats(address)["sessions"] if s["session"] == station.session]
        told = {d["epoch"]: d["digest"] for d in mine[0]["epoch_digests"]}
    assert [told[0], told[1]] == digests


def test_an_epoch_started_cold_at_any_batch_gives_the_same_batches(address: str) -> None:
    with open_train(address) as station:
        expected = [(b.index, b.valid, b.digest) for b in station.epoch(3)]
    for start in (0, 1, 7, len(expected) - 1):
        with open_train(address, start_epoch=3, start_batch=start) as station:
            assert [(b.index, b.valid, b.digest) for b in station.epoch(3, start)] == expected[start:]


def test_jumping_about_in_one_session_gives_the_same_batches(address: str) -> None:
    with open_train(address) as station:
        expected = {(e, b.index): b.digest for e in (0, 1) for b in station.epoch(e)}
        rng = np.random.default_rng(5)
        for _ in range(60):
            at = int(rng.integers(0, 2)), int(rng.integers(0, station.batches_per_epoch))
            with station.acquire(*at) as batch:
                assert (batch.epoch, batch.index) == at
                assert batch.digest == expected[at]


def test_daemon_reports_no_digest_of_an_epoch_that_was_jumped_about_in(address: str) -> None:
    with open_train(address) as station:
        for index in (0, 1, 2):
            station.acquire(0, index).release()
        for _ in station.epoch(0, 7):
            pass
        station.acquire(1, 0).release()  # so epoch 0 is over for the daemon, too
        mine = [s for s in server_stats(address)["sessions"] if s["session"] == station.session]
    assert 0 not in {d["epoch"] for d in mine[0]["epoch_digests"]}


def test_digests_of_an_interrupted_epoch_complete_after_resume(address: str, digests: list[str]) -> None:
    with open_train(address) as station:
        for index in range(5):
            station.acquire(0, index).release()
        saved = station.partial_digests
    with open_train(address, start_batch=5) as station:
        station.restore_digests(*saved)
        for _ in station.epoch(0, 5):
            pass
        assert station.epoch_digest(0) == digests[0]
    assert chain_digest([bytes.fromhex(d) for d in saved[1]]).hex() != digests[0]


def test_samples_do_not_depend_on_the_batch_size(address: str) -> None:
    rows = {}
    for size in (50, 64):
        with open_train(address, batch_size=size) as station:
            rows[size] = np.concatenate([b.images[: b.valid].copy() for b in station.epoch(2)])
    assert rows[50].shape == (TRAIN_SAMPLES, 28, 28, 1)
    np.testing.assert_array_equal(rows[50], rows[64])


def test_ranks_share_the_epoch_without_overlap(address: str) -> None:
    order = epoch_order(11, 0, TRAIN_SAMPLES, shuffle=True)
    labels, _ = make_samples(TRAIN_SAMPLES, TRAIN_SAMPLES)
    for rank in range(3):
        with open_train(address, rank=rank, world_size=3) as station:
            delivered = np.concatenate([b.labels[: b.valid].copy() for b in station.epoch(0)])
            assert station.batches_per_epoch == 5  # ceil(611 / 150)
        np.testing.assert_array_equal(delivered, labels[order[rank::3]])


def test_validation_is_in_file_order_and_its_tail_is_empty(address: str) -> None:
    labels, images = make_samples(VAL_SAMPLES, VAL_SAMPLES)
    expected = ((images.astype(np.float64) / 255 - 0.1307) / 0.3081).astype(np.float32)
    with open_train(address, split="val", recipe=val_recipe(), check_digest=True) as station:
        assert station.num_samples == VAL_SAMPLES
        assert station.num_classes == 10
        at = 0
        for batch in station.epoch(0):
            np.testing.assert_array_equal(batch.labels[: batch.valid], labels[at : at + batch.valid])
            np.testing.assert_array_equal(batch.images[: batch.valid], expected[at : at + batch.valid])
            assert (batch.labels[batch.valid :] == -1).all()
            assert not batch.images[batch.valid :].any()
            at += batch.valid
        assert at == VAL_SAMPLES
        assert batch.valid == VAL_SAMPLES % 50


def test_drop_last_leaves_out_the_tail(address: str) -> None:
    with open_train(address, drop_last=True) as station:
        assert [b.valid for b in station.epoch(0)] == [50] * (TRAIN_SAMPLES // 50)


def test_bf16_is_the_rounded_fp32_and_channels_can_be_padded(address: str) -> None:
    with open_train(address) as full, open_train(address, dtype=DType.BF16, padded_channels=4) as half:
        assert half.sample_shape == (28, 28, 4)
        for wide, narrow in zip(full.epoch(0), half.epoch(0), strict=True):
            assert narrow.images.dtype == np.uint16
            assert not narrow.images[..., 1:].any()
            widened = fp32_from_bf16(narrow.images[..., 0])
            np.testing.assert_allclose(widened, wide.images[..., 0], rtol=2**-8, atol=0)


def test_two_consumers_at_once_do_not_disturb_each_other(address: str, digests: list[str]) -> None:
    with open_train(address) as first, open_train(address) as second, open_train(address, seed=5) as third:
        for _ in zip(first.epoch(0), second.epoch(0), third.epoch(0), strict=True):
            pass
        assert first.epoch_digest(0) == second.epoch_digest(0) == digests[0]
        assert third.epoch_digest(0) != digests[0]


def test_workers_killed_in_the_middle_of_a_batch_do_not_change_bytes(daemon: DaemonProcess) -> None:
    """The worker is caught while its rows appear: the hash of its first row is written, those of its last are not."""
    kills, workers = 12, 2
    options = {"batch_size": TRAIN_SAMPLES, "depth": 2, "padded_channels": 32}  # wide rows: milliseconds a share
    with open_train(daemon.address, **options) as station:
        undisturbed = [next(station.epoch(epoch)).digest for epoch in range(kills + 2)]
    caught, victims = 0, [0] * workers
    with open_train(daemon.address, check_digest=True, **options) as station:
        for epoch in range(kills):
            batch = station.acquire(epoch, 0)
            assert batch.digest == undisturbed[epoch]
            hashes = station._ring.hashes[batch.slot]
            hashes[:] = 0
            worker = epoch % workers
            victims[worker] = daemon.worker_pid(worker, victims[worker])
            batch.release()
            while not hashes[worker]:  # ends: the released slot is filled next
                pass
            os.kill(victims[worker], signal.SIGKILL)
            caught += not hashes[worker::workers].all()
        for epoch in range(kills, kills + 2):
            with station.acquire(epoch, 0) as batch:
                assert batch.digest == undisturbed[epoch]
    assert caught > 0
    assert all(daemon.worker_pid(worker, victims[worker]) for worker in range(workers))
    assert sum(worker["restarts"] for worker in server_stats(daemon.address)["workers"]) == kills


def test_real_mnist_from_raw_files() -> None:
    folder = Path(__file__).parents[2] / "data" / "mnist"
    with (
        start_private_daemon({"mnist": folder}, workers=2, data_format="raw") as private,
        open_train(private.address, batch_size=200, dtype=DType.BF16, check_digest=True) as station,
    ):
        assert (station.num_samples, station.batches_per_epoch) == (60000, 300)
        counts = np.zeros(10, np.int64)
        for batch in station.epoch(0):
            counts += np.bincount(batch.labels[: batch.valid], minlength=10)
        assert counts.tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
