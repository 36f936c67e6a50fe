"""CIFAR and picture sets through real daemons: the same bytes whatever the workers, the load, the container, the kills
and the company, under every policy for damaged pictures; and nothing that grows or stays behind."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import picture_sets as sets
import pytest
from conftest import LIMIT_SECONDS
from picture_sets import epoch_digests, open_cifar, open_pictures

from renaissance.core.dtype import DType
from renaissance.core.errors import DataServerError
from renaissance.data.client import server_stats
from renaissance.data.private_daemon import PrivateDaemon, start_private_daemon
from renaissance.data.station import Batch, TransferStation

LOADS = ("fully", "partial")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """cifar, tree, packed (the tree as a DTS file) and damaged (the tree with three pictures spoilt)."""
    made = {name: tmp_path_factory.mktemp(name) for name in ("cifar", "tree", "packed")}
    sets.make_cifar(made["cifar"])
    sets.make_tree(made["tree"])
    sets.pack_tree(made["tree"], made["packed"])
    made["damaged"] = tmp_path_factory.mktemp("damaged") / "tree"
    shutil.copytree(made["tree"], made["damaged"])
    sets.damage(made["damaged"])
    return made


def start(folders: dict[str, Path], load: str, workers: int, pictures: str = "tree", **options: Any) -> PrivateDaemon:
    data = {"cifar10": folders["cifar"], "imagenet": folders[pictures]}
    return start_private_daemon(data, workers=workers, load=load, **options)


@pytest.fixture(scope="module")
def daemons(folders: dict[str, Path]) -> Iterator[dict[str, PrivateDaemon]]:
    """One with two workers for each way to load."""
    with start(folders, "fully", 2) as fully, start(folders, "partial", 2) as partial:
        yield {"fully": fully, "partial": partial}


@pytest.fixture(scope="module")
def expected(daemons: dict[str, PrivateDaemon]) -> dict[str, list[str]]:
    """Epoch digests of the sets read fully by two workers."""
    address = daemons["fully"].address
    return {
        "cifar": epoch_digests(open_cifar(address, check_digest=True)),
        "pictures": epoch_digests(open_pictures(address, check_digest=True)),
        "val": epoch_digests(open_pictures(address, split="val", recipe=sets.VAL_RECIPE, check_digest=True)),
    }


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("workers", [1, 3, 7])
def test_worker_count_and_load_do_not_change_bytes(
    folders: dict[str, Path], expected: dict[str, list[str]], load: str, workers: int
) -> None:
    with start(folders, load, workers) as daemon:
        assert epoch_digests(open_cifar(daemon.address)) == expected["cifar"]
        assert epoch_digests(open_pictures(daemon.address)) == expected["pictures"]


def test_partial_with_two_workers_too(daemons: dict[str, PrivateDaemon], expected: dict[str, list[str]]) -> None:
    address = daemons["partial"].address
    assert epoch_digests(open_cifar(address, check_digest=True)) == expected["cifar"]
    assert epoch_digests(open_pictures(address, check_digest=True)) == expected["pictures"]
    assert epoch_digests(open_pictures(address, split="val", recipe=sets.VAL_RECIPE)) == expected["val"]


@pytest.mark.parametrize("load", LOADS)
def test_packed_file_in_the_order_of_the_tree_gives_its_bytes(
    folders: dict[str, Path], expected: dict[str, list[str]], load: str
) -> None:
    with start(folders, load, 3, "packed") as daemon:
        assert epoch_digests(open_pictures(daemon.address)) == expected["pictures"]
        assert epoch_digests(open_pictures(daemon.address, split="val", recipe=sets.VAL_RECIPE)) == expected["val"]
        by_blocks = [epoch_digests(open_pictures(daemon.address, order="blocks")) for _ in range(2)]
        assert by_blocks[0] == by_blocks[1] != expected["pictures"]


def batches(station: TransferStation, epochs: int) -> Iterator[Batch]:
    for epoch in range(epochs):
        yield from station.epoch(epoch)


def kill_now_and_then(daemon: PrivateDaemon, station: TransferStation, epochs: int = 2) -> list[str]:
    """Read epochs while workers are killed before every second batch; returns the epoch digests."""
    kills = 0
    with station:
        for epoch in range(epochs):
            for batch in station.epoch(epoch):
                if batch.index % 2 == 0:
                    victim = server_stats(daemon.address)["workers"][batch.index // 2 % 2]["pid"]
                    if not victim:  # its successor is still being started
                        continue
                    with suppress(ProcessLookupError):  # ended by our last signal, which nobody has noticed yet
                        os.kill(victim, signal.SIGKILL)
                        kills += 1
        assert kills >= epochs
        return [station.epoch_digest(epoch) for epoch in range(epochs)]


@pytest.mark.parametrize("load", LOADS)
def test_killed_workers_do_not_change_bytes(
    daemons: dict[str, PrivateDaemon], expected: dict[str, list[str]], load: str
) -> None:
    daemon = daemons[load]
    assert kill_now_and_then(daemon, open_cifar(daemon.address, check_digest=True)) == expected["cifar"]
    assert kill_now_and_then(daemon, open_pictures(daemon.address, check_digest=True)) == expected["pictures"]


@pytest.mark.parametrize("load", LOADS)
def test_sessions_at_once_get_the_bytes_they_get_alone(
    daemons: dict[str, PrivateDaemon], expected: dict[str, list[str]], load: str
) -> None:
    """Training, the same once more, validation, and another set, all in step."""
    address = daemons[load].address
    with (
        open_pictures(address) as first,
        open_pictures(address) as second,
        open_pictures(address, split="val", recipe=sets.VAL_RECIPE) as val,
        open_cifar(address) as other,
    ):
        streams = [first, second, val, other]
        readers = [batches(station, 2) for station in streams]
        while readers:
            readers = [reader for reader in readers if next(reader, None) is not None]
        found = [[station.epoch_digest(epoch) for epoch in (0, 1)] for station in streams]
    assert found == [expected["pictures"], expected["pictures"], expected["val"], expected["cifar"]]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_together_get_each_sample_once(daemons: dict[str, PrivateDaemon], world: int) -> None:
    rows: list[bytes] = []
    for rank in range(world):
        changes = {"recipe": sets.CIFAR_PLAIN, "dtype": DType.UINT8, "rank": rank, "world_size": world}
        with open_cifar(daemons["partial"].address, **changes) as station:
            for batch in station.epoch(1):
                rows += [row.tobytes() for row in batch.images[: batch.valid]]
    assert len(rows) == len(set(rows)) == sets.CIFAR_SAMPLES


# Damaged pictures


@pytest.fixture(scope="module")
def under_policy(folders: dict[str, Path], expected: dict[str, list[str]]) -> Iterator[dict[str, PrivateDaemon]]:
    """Daemons on the damaged tree."""
    del expected  # its daemons first
    with start(folders, "fully", 3, "damaged") as fully, start(folders, "partial", 2, "damaged") as partial:
        yield {"fully": fully, "partial": partial}


DAMAGED = {4: "n0_004.JPEG", 23: "n1_023.JPEG", 41: "n2_041.JPEG"}


@pytest.mark.parametrize("load", LOADS)
def test_damaged_picture_ends_the_session_by_default(under_policy: dict[str, PrivateDaemon], load: str) -> None:
    address = under_policy[load].address
    with pytest.raises(DataServerError, match=r"epoch 0 batch \d: .*/n\d_0\d\d\.JPEG: .*; on_corrupt substitute or"):
        epoch_digests(open_pictures(address))
    assert len(epoch_digests(open_cifar(address))) == 2  # the daemon and its workers live on


@pytest.mark.parametrize("policy", ["substitute", "blank"])
def test_policy_gives_the_same_bytes_whatever_the_load_workers_and_kills(
    under_policy: dict[str, PrivateDaemon], expected: dict[str, list[str]], policy: str
) -> None:
    changes = {"on_corrupt": policy, "max_corrupt": 10, "max_corrupt_share": 1.0}
    found, listed = [], []
    for load in LOADS:
        daemon = under_policy[load]
        station = open_pictures(daemon.address, check_digest=True, **changes)
        found.append(epoch_digests(station))
        listed.append({(e.epoch, e.sample): e for e in station.corrupt_samples() if e.epoch < 2})
        found.append(kill_now_and_then(daemon, open_pictures(daemon.address, check_digest=True, **changes)))
    assert all(digests == found[0] for digests in found)
    assert found[0] != expected["pictures"]
    for entries in listed:
        assert set(entries) == {(epoch, sample) for epoch in (0, 1) for sample in DAMAGED}
        for (_, sample), entry in entries.items():
            assert DAMAGED[sample] in entry.text
            assert entry.action == policy
    assert {k: e.substitute for k, e in listed[0].items()} == {k: e.substitute for k, e in listed[1].items()}


def test_more_damaged_pictures_than_allowed_end_the_session(under_policy: dict[str, PrivateDaemon]) -> None:
    changes = {"on_corrupt": "blank", "max_corrupt": 2, "max_corrupt_share": 1.0}
    with pytest.raises(DataServerError, match="3 samples are corrupt, max_corrupt is 2"):
        # Opened in here too: workers may be that far before the consumer has connected, which then is told.
        epoch_digests(open_pictures(under_policy["partial"].address, **changes), epochs=3)


# What grows, and what stays behind


def own_bytes(pid: int) -> int:
    """Memory of a process that it shares with nobody by design: no files, no shared memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def processes(daemon: PrivateDaemon) -> list[int]:
    return [daemon.pid, *(worker["pid"] for worker in server_stats(daemon.address)["workers"])]


@pytest.mark.parametrize("load", LOADS)
def test_memory_of_workers_is_flat(folders: dict[str, Path], load: str) -> None:
    with (
        start(folders, load, 2, read_ahead=1 << 20 if load == "partial" else 0) as daemon,
        open_pictures(daemon.address, batch_size=8) as pictures,
        open_cifar(daemon.address) as cifar,
    ):
        streams = [batches(pictures, 60), batches(cifar, 60)]
        for _ in range(80):  # buffers fill, caches warm up
            assert all(map(next, streams))
        before = {pid: own_bytes(pid) for pid in processes(daemon)}
        for _ in zip(*streams, strict=False):
            pass
        for pid, used in before.items():
            assert own_bytes(pid) < used + (4 << 20), f"process {pid} had {used} bytes"


@pytest.mark.parametrize("load", LOADS)
def test_closed_sessions_leave_no_descriptor_mapping_or_thread(folders: dict[str, Path], load: str) -> None:
    def held() -> list[tuple[int, int, int]]:
        found = []
        for pid in processes(daemon):
            rings = sum("memfd:" in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
            threads = len(os.listdir(f"/proc/{pid}/task")) if pid != daemon.pid else 0  # gRPC keeps a pool
            found.append((len(os.listdir(f"/proc/{pid}/fd")), rings, threads))
        return found

    def use() -> None:
        with open_pictures(daemon.address) as first, open_pictures(daemon.address, batch_size=5) as second:
            for station in (first, second, open_cifar(daemon.address)):
                with station:
                    station.acquire(0, 1).release()
                    station.acquire(2, 0).release()

    with start(folders, load, 2) as daemon:
        use()
        before = held()  # perhaps with sessions that are being freed; a leak of five rounds is more
        for _ in range(5):
            use()
        spare = (2, 0, 0)  # connections of gRPC clients that are being closed
        settle(
            lambda: all(np.less_equal(now, np.add(then, spare)).all() for now, then in zip(held(), before, strict=True))
        )


def settle(condition: Any) -> None:
    """Workers free a session a moment after it is closed."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "still there"


def test_bytes_of_rows_do_not_depend_on_their_batch(daemons: dict[str, PrivateDaemon]) -> None:
    rows = {}
    for size in (16, 7):
        with open_pictures(daemons["partial"].address, batch_size=size) as station:
            rows[size] = np.concatenate([b.images[: b.valid].copy() for b in station.epoch(1)])
    np.testing.assert_array_equal(rows[16], rows[7])
