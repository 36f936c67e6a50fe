"""Share groups: several consumers, one stream prepared once, the same bytes for each; a death costs others nothing."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import LIMIT_SECONDS, DaemonProcess, train_recipe, val_recipe

from renaissance.core.dtype import DType
from renaissance.core.errors import DataServerError, ValueRejected
from renaissance.data.client import server_stats
from renaissance.data.private_daemon import start_private_daemon
from renaissance.data.protocol import pack_seek, split_tag
from renaissance.data.station import TransferStation

EPOCHS = 3

MEMBER = """
import sys
from conftest import train_recipe
from renaissance.data.station import TransferStation
address, epochs, die_at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with TransferStation(address, dataset="mnist", split="train", recipe=train_recipe(), seed=11, batch_size=50,
                     share="jobs", share_count=3, check_digest=True) as station:
    count = 0
    for epoch in range(epochs):
        for batch in station.epoch(epoch):
            print(batch.epoch, batch.index, batch.digest, flush=True)  # which is checked against the bytes
            count += 1
            if count == die_at:
                print("stuck", flush=True)
                sys.stdin.read()  # holds a batch until it is killed
"""


@pytest.fixture(scope="module")
def address(dts_folder: Path) -> Iterator[str]:
    with start_private_daemon({"mnist": dts_folder}, workers=2) as private:
        yield private.address


def open_train(address: str, **changes: Any) -> TransferStation:
    options = {"dataset": "mnist", "split": "train", "recipe": train_recipe(), "seed": 11, "batch_size": 50}
    return TransferStation(address, **{**options, **changes})


def start_member(address: str, die_at: int = -1) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", MEMBER, address, str(EPOCHS), str(die_at)]
    folder = Path(__file__).parent
    return subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_three_processes_get_identical_bytes_and_one_may_be_killed(daemon: DaemonProcess) -> None:
    with open_train(daemon.address) as alone:
        expected = [f"{e} {b.index} {b.digest}\n" for e in range(EPOCHS) for b in alone.epoch(e)]
    members = [start_member(daemon.address), start_member(daemon.address), start_member(daemon.address, die_at=20)]
    doomed = members[2]
    assert doomed.stdout is not None
    its_lines = [doomed.stdout.readline() for _ in range(21)]
    assert its_lines.pop() == "stuck\n"
    stats = server_stats(daemon.address)
    doomed.kill()
    outputs = []
    for member in members[:2]:
        out, _ = member.communicate(timeout=4 * LIMIT_SECONDS)
        assert member.returncode == 0
        outputs.append(out.splitlines(keepends=True))
    doomed.communicate(timeout=LIMIT_SECONDS)
    assert outputs == [expected, expected]
    assert its_lines == expected[:20]
    groups = [s for s in stats["sessions"] if s["share"] == "jobs"]
    assert len(groups) == 1  # one ring
    assert len(groups[0]["members"]) == 3
    assert groups[0]["batches"] <= 20 + 4  # prepared once, no further than the slowest allows


def test_nobody_misses_a_batch_however_late_the_others_come(address: str) -> None:
    first = open_train(address, share="late", share_count=2)
    taken = [first.acquire(0, index).digest for index in range(4)]
    mine = [s for s in server_stats(address)["sessions"] if s["share"] == "late"]
    assert [m["state"] for m in mine[0]["members"]] == ["reading", "awaited"]
    assert mine[0]["waits_for"] == "members"
    with first, open_train(address, share="late", share_count=2) as second:
        assert second.member == 1
        seen = []
        for index in range(4):
            batch = second.acquire(0, index)
            seen.append(batch.digest)
            batch.release()
        assert seen == taken


def test_slowest_member_decides_and_closing_it_lets_the_others_go_on(address: str) -> None:
    with open_train(address, share="slow", share_count=2, depth=2) as fast:
        slow = open_train(address, share="slow", share_count=2, depth=2)
        held = [slow.acquire(0, 0), slow.acquire(0, 1)]
        for index in (0, 1):
            fast.acquire(0, index).release()
        mine = [s for s in server_stats(address)["sessions"] if s["share"] == "slow"]
        assert [s["waits_for"] for s in mine] == ["consumer"]
        assert [m["held"] for m in mine[0]["members"]] == [0, 2]
        assert [split_tag(slow._ring.words[word])[1] for word in slow._ring.tag_words] == [b.sequence for b in held]
        slow.close()
        assert [b.index for b in fast.epoch(0, 2)] == list(range(2, 13))
    assert [s for s in server_stats(address)["sessions"] if s["share"] == "slow"] == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 12}, "seed is 12 here and 11 in the running group"),
        ({"batch_size": 49}, "batch size is 49 here and 50"),
        ({"dtype": DType.BF16}, "dtype is bf16 here and fp32"),
        ({"depth": 5}, "depth is 5 here and 4"),
        ({"recipe": val_recipe()}, "recipe is"),
        ({"split": "val", "recipe": val_recipe()}, "data set is mnist val here and mnist train"),
        ({"share_count": 3}, "share_count is 3 here and 2"),
        ({"shuffle": False}, "shuffle is False here and True"),
        ({"rank": 1, "world_size": 2}, "batches per epoch"),
        ({"start_batch": 1}, r"start \(epoch, batch\) is \(0, 1\) here and \(0, 0\)"),
        ({"on_corrupt": "blank"}, "on_corrupt is blank here and fail"),
        ({"max_corrupt": 7}, "max_corrupt is 7 here and 100"),
        ({"padded_channels": 2}, "padded channels is 2 here and 1"),
    ],
)
def test_members_that_would_get_other_bytes_are_refused_by_name(address: str, changes: Any, named: str) -> None:
    group = {"share": "strict", "share_count": 2}
    with open_train(address, **group), pytest.raises(DataServerError, match=named):
        open_train(address, **{**group, **changes})


def test_a_member_too_many_or_a_lost_one_cannot_come_in(address: str) -> None:
    with open_train(address, share="full", share_count=2):
        open_train(address, share="full", share_count=2).close()
        with pytest.raises(DataServerError, match="has had all its 2 members"):
            open_train(address, share="full", share_count=2)
    with open_train(address, share="full", share_count=2, seed=99) as again:  # the name is free again
        assert again.member == 0


def test_members_cannot_jump_and_the_attempt_harms_nobody(address: str) -> None:
    group = {"share": "jump", "share_count": 2}
    with open_train(address, **group) as one, open_train(address, **group) as two:
        one.acquire(0, 0).release()
        with pytest.raises(ValueRejected, match="the next batch of share group 'jump' is epoch 0 batch 1"):
            one.acquire(5, 0)
        one.acquire(0, 1).release()
        one._socket.send(pack_seek(2, 2, 0, 9))  # as a program that is none of ours might
        with pytest.raises(DataServerError, match="cannot jump"):
            for _ in one.epoch(0, 2):
                pass
        assert [b.index for b in two.epoch(0)] == list(range(13))


def test_group_of_one_and_impossible_groups(address: str) -> None:
    with open_train(address, share="alone", share_count=1) as station:
        station.acquire(0, 3).release()  # nobody is harmed by a jump
    for changes in ({"share_count": 2}, {"share": "x" * 129}, {"share": "a\nb"}, {"share": "x", "share_count": 65}):
        with pytest.raises(ValueRejected, match="share"):
            open_train(address, **changes)


def test_state_of_a_station_goes_on_at_the_same_batch_with_another_number_of_workers(
    address: str, dts_folder: Path
) -> None:
    with open_train(address) as station:
        expected = {(b.epoch, b.index): b.digest for e in (0, 1) for b in station.epoch(e)}
        for index in range(9):
            station.acquire(0, index).release()
        state = json.loads(json.dumps(station.state()))
    assert (state["epoch"], state["batch"]) == (0, 9)
    with (
        start_private_daemon({"mnist": dts_folder}, workers=3) as other,
        open_train(other.address, state=state) as station,
    ):
        for batch in station.epoch(0, 9):
            assert batch.digest == expected[0, batch.index]
        assert (station.state()["epoch"], station.state()["batch"]) == (1, 0)
        for batch in station.epoch(1):
            assert batch.digest == expected[1, batch.index]
    for changes, named in (
        ({"seed": 12}, "seed is 11, this station has 12"),
        ({"batch_size": 49}, "batch_size is 50, this station has 49"),
        ({"state": {"epoch": 1}}, "expected whole numbers under"),
        ({"start_batch": 3}, "both given"),
    ):
        with pytest.raises(ValueRejected, match=named):
            open_train(address, **{"state": state, **changes})


def test_waiting_is_seen_by_the_daemon_as_it_is(address: str) -> None:
    with open_train(address, depth=2) as station:
        batch = station.acquire(0, 0)
        poller = select.poll()
        poller.register(station._ready, select.POLLIN)
        assert poller.poll(LIMIT_SECONDS * 1000) or station._ring.words[station._ring.tag_words[1]]
        mine = next(s for s in server_stats(address)["sessions"] if s["session"] == station.session)
        assert (mine["held"], mine["prepared"] + mine["free"]) == (1, 1)
        assert mine["members"][0]["taken"] == 1
        batch.release()
