"""Seeing the daemon: statistics, top, metrics, closing a session, digest files."""

from __future__ import annotations

import builtins
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import LIMIT_SECONDS, DaemonProcess, read_on, train_recipe, val_recipe
from prometheus_client.parser import text_string_to_metric_families

from dataserver.cli import main
from dataserver.digests import DIFFERENT
from renaissance.core.errors import DataServerError
from renaissance.data.client import server_stats
from renaissance.data.digest_file import read_digests, write_digests
from renaissance.data.private_daemon import start_private_daemon
from renaissance.data.station import TransferStation


@pytest.fixture(scope="module")
def digest_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("digests")


@pytest.fixture(scope="module")
def address(dts_folder: Path, digest_folder: Path) -> Iterator[str]:
    with start_private_daemon({"mnist": dts_folder}, workers=2, digest_folder=digest_folder) as private:
        yield private.address


def open_train(address: str, **changes: Any) -> TransferStation:
    options = {"dataset": "mnist", "split": "train", "recipe": train_recipe(), "seed": 11, "batch_size": 50}
    return TransferStation(address, **{**options, **changes})


def wait_until(condition: Callable[[], bool]) -> None:
    """Asks the daemon again and again, which takes a moment each time."""
    deadline = time.monotonic() + 4 * LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline


def stats_of(station: TransferStation) -> dict[str, Any]:
    return next(s for s in server_stats(station.address)["sessions"] if s["session"] == station.session)


def test_occupancy_and_waiting_are_what_they_are(address: str) -> None:
    with open_train(address, depth=4) as station:
        batches = [station.acquire(0, index) for index in range(3)]
        batches[1].release()
        for batch in station.epoch(0, 3):
            assert batch.index == 3
            break
        wait_until(lambda: stats_of(station)["waits_for"] == "consumer")  # what can be prepared, is
        mine = stats_of(station)
        # Slots 0 and 2 are held; 1 and 3 were given back, but the batch after next needs slot 0 first.
        assert (mine["prepared"], mine["held"], mine["free"]) == (0, 2, 2)
        assert mine["members"][0]["taken"] == 4
        assert mine["members"][0]["state"] == "reading"
        assert mine["members"][0]["consumer_pid"] == os.getpid()
        assert mine["samples_per_second"] > 0
        for batch in batches:
            batch.release()
        for index in range(4, 13):
            station.acquire(0, index).release()
        stats = server_stats(address)
    assert stats["loading"] == []
    assert stats["samples"] >= 611
    assert stats["own_bytes"] < stats["rss_bytes"]
    for worker in stats["workers"]:
        assert worker["state"] in ("running", "sleeping", "disk")
        assert 0 < worker["own_bytes"] < worker["rss_bytes"]
        assert worker["age_seconds"] > 0


def test_a_stopped_worker_is_seen_and_holds_up_neither_calls_nor_new_sessions(daemon: DaemonProcess) -> None:
    """Far more sessions than fit its socket are opened and closed while it does not listen."""
    victim = daemon.worker_pid(0)
    os.kill(victim, signal.SIGSTOP)
    for _ in range(150):
        open_train(daemon.address, depth=2).close()
    station = open_train(daemon.address, depth=2)
    stats = server_stats(daemon.address, timeout=LIMIT_SECONDS)
    assert stats["workers"][0]["state"] == "stopped"
    os.kill(victim, signal.SIGCONT)
    assert [b.index for b in station.epoch(0)] == list(range(13))
    assert server_stats(daemon.address)["workers"][0]["pid"] == victim
    station.close()


def test_top_prints_one_frame_for_a_pipe(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with open_train(address, share="pair", share_count=2), open_train(address) as station:
        station.acquire(0, 0).release()
        assert main(["top", "--dataserver", address, "--once"]) == 0
    frame = capsys.readouterr().out
    assert re.search(r"dataserver \S+, pid \d+, up .*, mnist", frame)
    assert "2 sessions open" in frame
    assert "mnist train (pair)" in frame
    assert "for members" in frame
    assert re.search(r"\| awaited +\| -", frame)
    assert "\x1b" not in frame
    assert all(len(line) <= 160 for line in frame.splitlines())


def test_top_without_rich_or_daemon_says_what_to_do(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], socket_folder: Path
) -> None:
    assert main(["top", "--once", "--dataserver", f"unix:{socket_folder}/none"]) == 1
    assert "no dataserver at" in capsys.readouterr().err
    assert main(["top", "--interval", "0"]) == 1
    assert "--interval is 0" in capsys.readouterr().err
    real = builtins.__import__

    def without_rich(name: str, *rest: Any, **options: Any) -> Any:
        if name.split(".")[0] == "rich":
            raise ImportError(name)
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without_rich)
    assert main(["top", "--once", "--dataserver", address]) == 1
    assert "pip install 'renaissance[top]'" in capsys.readouterr().err


class Terminal:
    """``dataserver top`` on a terminal of its own."""

    def __init__(self, address: str) -> None:
        self._ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "dataserver", "top", "--dataserver", address, "--interval", "0.1"]
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm", "COLUMNS": "150"}
        )
        os.close(theirs)

    def wait_for(self, text: str) -> bool:
        seen = ""
        while select.select([self._ours], [], [], 4 * LIMIT_SECONDS)[0]:
            seen += os.read(self._ours, 65536).decode(errors="replace")
            if text in seen:
                return True
        return False

    def close(self) -> int:
        self.process.send_signal(signal.SIGINT)
        while select.select([self._ours], [], [], LIMIT_SECONDS)[0]:  # a full terminal would hold it up
            try:
                if not os.read(self._ours, 65536):
                    break
            except OSError:
                break
        os.close(self._ours)
        return self.process.wait(LIMIT_SECONDS)


def test_top_outlives_the_daemon(dts_folder: Path, socket_folder: Path) -> None:
    daemon = DaemonProcess(dts_folder, socket_folder / "ds", 1)
    top = Terminal(daemon.address)
    try:
        assert top.wait_for(f"pid {daemon.process.pid}")
        assert daemon.stop() == 0
        assert top.wait_for("Asking again")
        daemon.close()
        daemon = DaemonProcess(dts_folder, socket_folder / "ds", 1)
        assert top.wait_for(f"pid {daemon.process.pid}")
    finally:
        daemon.close()
        assert top.close() == 130


def test_close_command_ends_one_session_by_number(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with open_train(address) as doomed, open_train(address) as other:
        assert main(["close", str(doomed.session), "--dataserver", address]) == 0
        assert capsys.readouterr().out == f"session {doomed.session} closed\n"
        with pytest.raises(DataServerError, match="closed by another client"):
            read_on(doomed)
        other.acquire(0, 0).release()
        assert main(["close", str(doomed.session), "--dataserver", address]) == 1
        assert f"no session {doomed.session}" in capsys.readouterr().err
    assert main(["close", "0", "--dataserver", address]) == 1


def scrape(url: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=LIMIT_SECONDS) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples}


def test_metrics_are_read_at_the_moment_of_the_scrape(dts_folder: Path, socket_folder: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    daemon = DaemonProcess(dts_folder, socket_folder / "ds", 1, "--metrics", str(port))
    url = f"http://127.0.0.1:{port}/metrics"
    try:
        before = scrape(url)
        assert before["dataserver_samples_total", ()] == 0
        with (
            open_train(daemon.address) as station,
            socket.create_connection(("127.0.0.1", port)),  # somebody who says nothing delays a scrape, no more
        ):
            for _ in station.epoch(0):
                pass
            during = scrape(url)
        labels = (("dataset", "mnist"), ("rank", "0"), ("session", str(station.session)), ("split", "train"))
        assert during["dataserver_session_samples_total", labels] >= 611
        assert during["dataserver_samples_total", ()] >= 611
        assert during["dataserver_sessions", ()] == 1
        assert during["dataserver_worker_up", (("worker", "0"),)] == 1
        slots = [value for (name, _), value in during.items() if name == "dataserver_session_slots"]
        assert sum(slots) == 4
        after = scrape(url)
        assert after["dataserver_sessions", ()] == 0
        assert after["dataserver_sessions_opened_total", ()] == 1
        assert daemon.stop() == 0
        daemon.assert_gone()
    finally:
        daemon.close()


def test_metrics_port_that_is_taken_is_one_error(dts_folder: Path, socket_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        daemon = DaemonProcess(dts_folder, socket_folder / "ds", 1, "--metrics", str(port))
        assert f"--metrics 127.0.0.1:{port}: cannot listen" in daemon.answer["error"]
        daemon.close()
    assert not list(socket_folder.iterdir())


def files_of(folder: Path, count: int, address: str) -> list[Path]:
    """Written in a thread of the daemon's: those that are there once it has said so."""
    wait_until(lambda: server_stats(address)["digest_files"] >= count)
    return sorted(folder.glob("*.digests"))


def test_digest_files_hold_every_epoch_that_was_delivered_from_its_start(address: str, digest_folder: Path) -> None:
    with open_train(address, seed=77, start_batch=5) as station:
        for batch in station.epoch(0, 5):
            assert batch.index >= 5
        expected = [[b.digest for b in station.epoch(epoch)] for epoch in (1, 2)]
        digests = [station.epoch_digest(epoch) for epoch in (1, 2)]
    options = {"split": "val", "recipe": val_recipe(), "batch_size": 100}
    with open_train(address, **options) as val:
        for _ in val.epoch(0):
            pass
    wait_until(lambda: any(read_digests(path).header.split == "val" for path in digest_folder.glob("*.digests")))
    files = [read_digests(path) for path in files_of(digest_folder, 3, address)]
    train = {f.header.epoch: f for f in files if f.header.split == "train" and f.header.seed == 77}
    assert 0 not in train
    assert [[d.hex() for d in train[epoch].batches] for epoch in (1, 2)] == expected
    assert [train[epoch].digest.hex() for epoch in (1, 2)] == digests
    header = train[1].header
    assert header.recipe == train_recipe().to_json()
    assert (header.num_samples, header.batch_size, header.dtype, header.order) == (611, 50, "fp32", "global")


def test_digests_that_differ_from_an_earlier_run_are_kept_beside_it(
    dts_folder: Path, tmp_path: Path, socket_folder: Path
) -> None:
    """What law 1 excludes; a file that somebody changed stands for it."""
    daemon = DaemonProcess(dts_folder, socket_folder / "ds", 1, "--digest-folder", str(tmp_path))
    try:
        with open_train(daemon.address) as station:
            for _ in station.epoch(0):
                pass
        (first,) = [p for p in files_of(tmp_path, 1, daemon.address) if "e000000" in p.name]
        kept = read_digests(first)
        write_digests(first, kept.header, [bytes(16), *kept.batches[1:]])
        with open_train(daemon.address) as station:
            for _ in station.epoch(0):
                pass
        wait_until(lambda: server_stats(daemon.address)["digest_failures"] == 1)
        assert read_digests(first).batches[0] == bytes(16)
        assert read_digests(first.with_name(first.name + DIFFERENT)).batches == kept.batches
        assert daemon.stop() == 0
        assert daemon.process.stderr is not None
        assert "was delivered with other bytes before" in daemon.process.stderr.read()
    finally:
        daemon.close()
