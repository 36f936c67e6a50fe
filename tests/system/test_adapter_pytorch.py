"""The dataserver as a PyTorch data set. Skipped by name where torch is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import TRAIN_SAMPLES, train_recipe

from renaissance.core.dtype import DType
from renaissance.core.errors import ValueRejected
from renaissance.data.private_daemon import start_private_daemon
from renaissance.data.station import TransferStation

torch = pytest.importorskip("torch")

BATCH = 64


@pytest.fixture(scope="module")
def address(dts_folder: Path) -> Iterator[str]:
    with start_private_daemon({"mnist": dts_folder}, workers=2) as daemon:
        yield daemon.address


def options(**changes: object) -> dict[str, object]:
    recipe = train_recipe()
    return {"dataset": "mnist", "split": "train", "recipe": recipe, "seed": 5, "batch_size": BATCH, **changes}


def dataset(address: str, **changes: object):
    from renaissance.data.adapters.pytorch import DataServerDataset

    return DataServerDataset(address, **options(**changes))


def test_tensors_are_the_slots_themselves_and_hold_the_bytes_of_the_station(address: str) -> None:
    with dataset(address) as data, TransferStation(address, **options()) as station:
        for (images, labels), batch in zip(data, station.epoch(0), strict=True):
            assert images.shape == (batch.valid, 1, 28, 28)
            assert images.is_contiguous(memory_format=torch.channels_last)
            assert images.data_ptr() in {slot.images.ctypes.data for slot in data.station.slots}
            assert np.array_equal(images.permute(0, 2, 3, 1).numpy(), batch.images[: batch.valid])
            assert labels.dtype is torch.int64
            assert np.array_equal(labels.numpy(), batch.labels[: batch.valid])


def test_bf16_arrives_as_bfloat16(address: str) -> None:
    with dataset(address, dtype=DType.BF16, layout="NHWC") as data, dataset(address, layout="NHWC") as exact:
        images, _ = next(iter(data))
        assert images.dtype is torch.bfloat16
        assert torch.equal(images, next(iter(exact))[0].bfloat16())


def test_every_pass_is_the_next_epoch_and_every_sample_comes_once(address: str) -> None:
    with dataset(address) as data:
        first = [images.clone() for images, _ in data]
        second = [images.clone() for images, _ in data]
        assert [len(images) for images in first] == [BATCH] * (TRAIN_SAMPLES // BATCH) + [TRAIN_SAMPLES % BATCH]
        assert not torch.equal(first[0], second[0])
        data.set_epoch(0)
        assert all(torch.equal(a, b) for a, (b, _) in zip(first, data, strict=True))


def test_a_loader_in_front_changes_nothing(address: str) -> None:
    loader = torch.utils.data.DataLoader
    with dataset(address) as data, dataset(address) as behind:
        for (a, n), (b, m) in zip(data, loader(behind, batch_size=None), strict=True):
            assert torch.equal(a, b)
            assert torch.equal(n, m)


def test_state_is_two_integers_and_goes_on_at_the_exact_batch(address: str) -> None:
    with dataset(address) as data:
        stream = iter(data)
        for _ in range(3):
            next(stream)
        state = data.state_dict()
        assert state == {"epoch": 0, "batch": 3}
        expected = next(stream)[0].clone()
    with dataset(address) as resumed:
        resumed.load_state_dict(state)
        assert torch.equal(next(iter(resumed))[0], expected)
        with pytest.raises(ValueRejected, match="batch"):
            resumed.load_state_dict({"epoch": 0, "batch": 10**6})


def test_held_tensors_keep_their_contents_for_as_long_as_was_asked(address: str) -> None:
    with dataset(address, hold=3) as data:
        window: list[tuple[object, object]] = []
        for images, _ in data:
            window.append((images, images.clone()))
            del window[:-3]
            assert all(torch.equal(view, copy) for view, copy in window)
    with pytest.raises(ValueRejected, match="hold is 4"):
        dataset(address, hold=4)


def test_breaking_off_and_reading_again_gives_the_slots_back(address: str) -> None:
    with dataset(address) as data:
        for _ in range(20):
            for _ in data:
                break
        assert data.state_dict()["batch"] == 20 % len(data)


def test_a_loader_with_workers_is_refused_and_says_what_to_do(address: str) -> None:
    with dataset(address) as data:
        loader = torch.utils.data.DataLoader(data, batch_size=None, num_workers=1)
        with pytest.raises(Exception, match="num_workers=0"):
            next(iter(loader))


def test_an_unknown_layout_is_refused(address: str) -> None:
    with pytest.raises(ValueRejected, match="NCHW, NHWC"):
        dataset(address, layout="CHWN")
