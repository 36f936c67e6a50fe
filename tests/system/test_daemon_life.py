"""Law 6: a dead process costs nothing, whoever dies and whenever; and every way down leaves nothing behind."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import LIMIT_SECONDS, DaemonProcess, read_on, train_recipe, val_recipe, wait_for_exit
from training_support import wait_until

from renaissance.core.dtype import DType
from renaissance.core.errors import DataServerError
from renaissance.data.client import close_session, server_stats
from renaissance.data.private_daemon import start_private_daemon
from renaissance.data.station import TransferStation

ROUNDS = 20


def open_train(address: str, **changes: Any) -> TransferStation:
    options = {"dataset": "mnist", "split": "train", "recipe": train_recipe(), "seed": 11, "batch_size": 50}
    return TransferStation(address, **{**options, **changes})


def first_epoch(address: str) -> str:
    with open_train(address) as station:
        for _ in station.epoch(0):
            pass
        return station.epoch_digest(0)


def start_consumer(address: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__).with_name("consumer_process.py")), address]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def kill_worker(daemon: DaemonProcess, rng: random.Random) -> None:
    with open_train(daemon.address) as station:
        victims = rng.sample(range(station.batches_per_epoch), 3)
        for batch in station.epoch(0):
            if batch.index in victims:
                for victim in daemon.worker_pids()[: rng.randint(1, 2)]:
                    with suppress(ProcessLookupError):  # killed a moment ago and not yet reported
                        os.kill(victim, signal.SIGKILL)


def kill_consumer(daemon: DaemonProcess, rng: random.Random) -> None:
    consumer = start_consumer(daemon.address)
    assert consumer.stdout is not None
    for _ in range(rng.randint(1, 40)):
        assert consumer.stdout.readline()
    consumer.kill()
    consumer.communicate(timeout=LIMIT_SECONDS)
    # The session goes with it: the daemon hears of it before it answers the next call, or right after.
    deadline = time.monotonic() + LIMIT_SECONDS
    while any(s["consumer_pid"] == consumer.pid for s in server_stats(daemon.address)["sessions"]):
        assert time.monotonic() < deadline, "the dead consumer's session is still there"


def kill_daemon(daemon: DaemonProcess, rng: random.Random) -> None:
    with open_train(daemon.address) as station:
        kill_at = rng.randrange(station.batches_per_epoch)
        for batch in station.epoch(0):
            if batch.index == kill_at:
                break
        daemon.kill()
        started = time.monotonic()
        with pytest.raises(DataServerError, match=r"died; the run can resume at epoch \d+ batch \d+"):
            read_on(station)
        assert time.monotonic() - started < LIMIT_SECONDS
    daemon.assert_gone()


def test_kill_9_of_anyone_at_any_moment_twenty_times(dts_folder: Path, socket_folder: Path) -> None:
    rng = random.Random(20)
    daemon = DaemonProcess(dts_folder, socket_folder / "ds")
    expected = first_epoch(daemon.address)
    try:
        for number in range(ROUNDS):
            if daemon.process.poll() is not None:
                daemon = DaemonProcess(dts_folder, socket_folder / "ds")
            (kill_worker, kill_consumer, kill_daemon, kill_worker)[number % 4](daemon, rng)
            if daemon.process.poll() is None:
                assert first_epoch(daemon.address) == expected
        if daemon.process.poll() is None:
            assert daemon.stop() == 0
            daemon.assert_gone()
    finally:
        daemon.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_signal_tells_consumers_and_leaves_nothing(
    dts_folder: Path, socket_folder: Path, number: signal.Signals
) -> None:
    daemon = DaemonProcess(dts_folder, socket_folder / "ds")
    try:
        with open_train(daemon.address) as station:
            station.acquire(0, 0).release()
            assert daemon.stop(number) == 0
            with pytest.raises(DataServerError, match=r"the dataserver stopped; the run can resume at epoch \d+ batch"):
                read_on(station)
        daemon.assert_gone()
    finally:
        daemon.close()


def test_consumer_leaves_no_descriptor_behind(daemon: DaemonProcess) -> None:
    first_epoch(daemon.address)  # what libraries open once is not counted
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(6):  # more than the slack below, which is gRPC's: one descriptor lost in an epoch is seen
        first_epoch(daemon.address)
    assert len(os.listdir("/proc/self/fd")) <= before + 4


def test_daemon_frees_everything_of_a_session(daemon: DaemonProcess) -> None:
    folders = [f"/proc/{pid}/fd" for pid in daemon.pids()]

    def descriptors() -> int:
        return sum(len(os.listdir(folder)) for folder in folders)

    first_epoch(daemon.address)
    with open_train(daemon.address):
        during = descriptors()
    for _ in range(12):  # more than the slack below: one descriptor lost in a session is seen
        first_epoch(daemon.address)
    with open_train(daemon.address):  # the session before may still be closing; what is lost stays open
        wait_until(lambda: descriptors() <= during + 4, "descriptors of closed sessions are gone", LIMIT_SECONDS)


def test_socket_files_of_a_killed_daemon_are_replaced(dts_folder: Path, socket_folder: Path) -> None:
    path = socket_folder / "ds"
    for name, kind in ((path, socket.SOCK_STREAM), (Path(f"{path}.data"), socket.SOCK_SEQPACKET)):
        with socket.socket(socket.AF_UNIX, kind) as dead:
            dead.bind(str(name))
    daemon = DaemonProcess(dts_folder, path)
    try:
        first_epoch(daemon.address)
        assert [oct(p.stat().st_mode & 0o777) for p in (path, Path(f"{path}.data"))] == ["0o600", "0o600"]
        assert daemon.stop() == 0
        daemon.assert_gone()
    finally:
        daemon.close()


def test_second_daemon_at_the_same_address_is_refused(daemon: DaemonProcess, dts_folder: Path) -> None:
    second = DaemonProcess(dts_folder, daemon.path)
    out, err = second.process.communicate(timeout=LIMIT_SECONDS)
    assert second.process.returncode == 1
    assert "already serving" in second.answer["error"]
    assert err.splitlines() == [f"dataserver: error: a dataserver is already serving at {daemon.address}"]
    assert not out
    first_epoch(daemon.address)


def test_zygote_death_ends_the_daemon_with_an_error(dts_folder: Path, socket_folder: Path) -> None:
    daemon = DaemonProcess(dts_folder, socket_folder / "ds")
    try:
        with open_train(daemon.address) as station:
            os.kill(daemon.pids()[1], signal.SIGKILL)
            with pytest.raises(DataServerError):
                read_on(station)
        assert daemon.process.wait(LIMIT_SECONDS) == 1
        assert daemon.process.stderr is not None
        assert "worker supervisor" in daemon.process.stderr.read()
        daemon.assert_gone()
    finally:
        daemon.close()


def test_session_closed_from_outside_tells_its_consumer(daemon: DaemonProcess) -> None:
    with open_train(daemon.address) as station:
        close_session(daemon.address, station.session)
        with pytest.raises(DataServerError, match="closed by another client"):
            read_on(station)
    with pytest.raises(DataServerError, match=f"no session {station.session}"):
        close_session(daemon.address, station.session)


def test_private_daemon_dies_with_its_parent(dts_folder: Path) -> None:
    code = (
        "import sys\nfrom renaissance.data.private_daemon import start_private_daemon\n"
        "d = start_private_daemon({'mnist': sys.argv[1]}, workers=2)\n"
        "print(d.pid, d.address, flush=True)\nsys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(dts_folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid, address = parent.stdout.readline().split()
    path = Path(address.removeprefix("unix:"))
    assert path.is_socket()
    handles = [os.pidfd_open(child) for child in descendants(int(pid))]
    assert len(handles) == 4  # daemon, zygote, two workers
    parent.kill()
    parent.communicate(timeout=LIMIT_SECONDS)
    for handle in handles:
        assert wait_for_exit(handle)
        os.close(handle)
    assert not path.parent.exists()


def descendants(pid: int) -> list[int]:
    found = [pid]
    for one in found:
        found += [int(child) for child in Path(f"/proc/{one}/task/{one}/children").read_text().split()]
    return found


def test_private_daemon_that_was_killed_is_an_error_at_close_and_leaves_nothing(dts_folder: Path) -> None:
    private = start_private_daemon({"mnist": dts_folder}, workers=1)
    folder = Path(private.address.removeprefix("unix:")).parent
    handles = [os.pidfd_open(child) for child in descendants(private.pid)]
    os.kill(private.pid, signal.SIGKILL)
    for handle in handles:
        assert wait_for_exit(handle)
        os.close(handle)
    with pytest.raises(DataServerError, match="killed by signal 9"):
        private.close()
    assert not folder.exists()


def test_closing_a_station_wakes_a_waiting_thread(daemon: DaemonProcess) -> None:
    station = open_train(daemon.address, depth=2)
    for worker in daemon.worker_pids():
        os.kill(worker, signal.SIGSTOP)  # from now on no batch arrives
    seen: list[BaseException] = []

    def read() -> None:
        try:
            read_on(station)
        except DataServerError as error:
            seen.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    station.close()
    thread.join(LIMIT_SECONDS)
    assert not thread.is_alive()
    assert "closed" in str(seen[0])


def traces(daemon: DaemonProcess) -> dict[str, int]:
    """What the daemon, its supervisor and its workers have open and mapped, rings apart from the rest."""
    found = {"descriptors": 0, "mappings": 0}
    for pid in daemon.pids():
        found["descriptors"] += len(os.listdir(f"/proc/{pid}/fd"))
        # Only what a session maps; the heap's own mappings come and go.
        found["mappings"] += Path(f"/proc/{pid}/maps").read_text().count("memfd:")
    return found


def settled(daemon: DaemonProcess, expected: dict[str, int] | None = None) -> dict[str, int]:
    """Workers hear of a session's end a moment after it; waits for what is expected, or for what stays."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while (found := traces(daemon)) != expected:
        if expected is None and found == traces(daemon) and not server_stats(daemon.address)["sessions"]:
            return found
        if time.monotonic() > deadline:
            break
    return found


def test_many_sessions_leave_no_descriptor_and_no_mapping(daemon: DaemonProcess) -> None:
    """1,000 of them by hand; here enough that one lost in each is seen."""
    for _ in range(3):
        first_epoch(daemon.address)
    before = settled(daemon)
    for _ in range(25):
        with open_train(daemon.address) as station:
            station.acquire(0, 0).release()
        group = {"share": "group", "share_count": 2}
        one, two = open_train(daemon.address, **group), open_train(daemon.address, **group)
        one.acquire(0, 0).release()
        two.acquire(0, 0).release()
        one.close()
        two.close()
    assert settled(daemon, before) == before
    assert server_stats(daemon.address)["sessions_opened"] >= 53


def own_memory(daemon: DaemonProcess) -> dict[int, int]:
    """Bytes of each process that no file and no shared memory accounts for."""
    found = {}
    for pid in daemon.pids():
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        found[pid] = next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))
    return found


def test_memory_does_not_grow_with_the_batches(daemon: DaemonProcess) -> None:
    """200,000 by hand, with the same result."""
    with open_train(daemon.address, batch_size=2, dtype=DType.BF16, depth=8) as station:
        for epoch in range(5):
            for _ in station.epoch(epoch):
                pass
        before = own_memory(daemon)
        for epoch in range(5, 25):
            for _ in station.epoch(epoch):
                pass
        after = own_memory(daemon)
    assert before.keys() == after.keys()
    assert {pid: after[pid] - before[pid] for pid in after if after[pid] > before[pid] + (1 << 20)} == {}


SLOW_LOAD = (
    "import os, sys, time, types\n"
    "from dataserver.store import DatasetStore\n"
    "gate, real = sys.argv.pop(1), DatasetStore._read_pixels\n"
    "def slow(self, place, info, split, limit):\n"
    "    if split == 'train':\n"
    "        place.total, place.filler = 1000, types.SimpleNamespace(done_bytes=439)\n"
    "        while not os.path.exists(gate): time.sleep(0.01)\n"
    "    return real(self, place, info, split, limit)\n"
    "DatasetStore._read_pixels = slow\n"
    "from dataserver.cli import main\n"
    "sys.exit(main(sys.argv[1:]))\n"
)


def test_a_load_holds_up_only_those_who_need_it_and_says_how_far_it_is(
    dts_folder: Path, socket_folder: Path, tmp_path: Path
) -> None:
    address, gate = f"unix:{socket_folder}/ds", tmp_path / "gate"
    serve = ["serve", "--data", f"mnist={dts_folder}", "--listen", address, "--workers", "1"]
    command = [sys.executable, "-c", SLOW_LOAD, str(gate), *serve]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert any("serving" in line for line in process.stderr)
            with pytest.raises(DataServerError, match=r"within 0\.5 s: still loading mnist train, 43 %; open it again"):
                open_train(address, timeout=0.5)
            stats = server_stats(address, timeout=LIMIT_SECONDS)
            assert [(p["dataset"], p["split"], p["done_bytes"]) for p in stats["loading"]] == [("mnist", "train", 439)]
            with open_train(address, split="val", recipe=val_recipe()) as val:
                val.acquire(0, 0).release()
            gate.touch()
            with open_train(address) as station:
                station.acquire(0, 0).release()
            stats = server_stats(address)
            assert stats["loading"] == []
            assert stats["sessions_opened"] == 2  # none for the client that gave up
            gate.unlink()
            process.terminate()
            process.communicate(timeout=LIMIT_SECONDS)
            assert process.returncode == 0
        finally:
            process.kill()


def test_load_that_never_ends_does_not_keep_the_daemon_from_stopping(
    dts_folder: Path, socket_folder: Path, tmp_path: Path
) -> None:
    """A read from a network disk that is gone returns never, and Python waits at exit for the thread that is in it."""
    address = f"unix:{socket_folder}/ds"
    serve = ["serve", "--data", f"mnist={dts_folder}", "--listen", address, "--workers", "1"]
    command = [sys.executable, "-c", SLOW_LOAD, str(tmp_path / "never"), *serve]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert any("serving" in line for line in process.stderr)
            with pytest.raises(DataServerError, match="still loading mnist train"):
                open_train(address, timeout=0.5)
            process.terminate()
            log = process.communicate(timeout=LIMIT_SECONDS)[1]
            assert process.returncode == 0
            assert "mnist train: is still being loaded; not waited for any longer" in log
        finally:
            process.kill()
    assert not list(socket_folder.iterdir())
