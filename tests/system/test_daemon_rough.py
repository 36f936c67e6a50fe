"""Rough surroundings: no descriptors left, hang-ups, kills before the daemon serves, odd paths, forked consumers."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import LIMIT_SECONDS, DaemonProcess, open_request, train_recipe, wait_for_exit

from dataserver.cli import main
from renaissance.core.errors import DataServerError, ValueRejected
from renaissance.data import client
from renaissance.data.private_daemon import start_private_daemon
from renaissance.data.protocol import MAX_EPOCH
from renaissance.data.station import TransferStation


@pytest.fixture(scope="module")
def address(dts_folder: Path) -> Iterator[str]:
    with start_private_daemon({"mnist": dts_folder}, workers=1) as private:
        yield private.address


def open_train(address: str, **changes: Any) -> TransferStation:
    options = {"dataset": "mnist", "split": "train", "recipe": train_recipe(), "seed": 11, "batch_size": 50}
    return TransferStation(address, **{**options, **changes})


def limit_descriptors(daemon: DaemonProcess, limit: int) -> None:
    _, hard = resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (limit, hard))


def test_connections_beyond_the_descriptor_limit_are_refused_and_the_daemon_lives(
    dts_folder: Path, socket_folder: Path
) -> None:
    daemon = DaemonProcess(dts_folder, socket_folder / "ds", 1)
    strangers: list[socket.socket] = []
    try:
        in_use = len(os.listdir(f"/proc/{daemon.process.pid}/fd"))
        limit_descriptors(daemon, in_use + 8)
        for _ in range(20):
            strangers.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            strangers[-1].settimeout(LIMIT_SECONDS)
            strangers[-1].connect(f"{daemon.path}.data")
        assert strangers[-1].recv(1) == b""  # hung up on
        limit_descriptors(daemon, 1024)
        for stranger in strangers:
            stranger.close()
        with open_train(daemon.address) as station:
            station.acquire(0, 0).release()
        assert daemon.stop() == 0
        daemon.assert_gone()
    finally:
        for stranger in strangers:
            stranger.close()
        daemon.close()


def test_session_without_descriptors_for_it_is_refused_by_name(dts_folder: Path, socket_folder: Path) -> None:
    daemon = DaemonProcess(dts_folder, socket_folder / "ds", 1)
    try:
        with open_train(daemon.address):
            in_use = len(os.listdir(f"/proc/{daemon.process.pid}/fd"))
        limit_descriptors(daemon, in_use - 2)
        with pytest.raises(DataServerError, match="cannot open a session: Too many open files"):
            client.open_session(daemon.address, open_request(), LIMIT_SECONDS)
        limit_descriptors(daemon, 1024)
        assert daemon.stop() == 0
    finally:
        daemon.close()


def test_dead_worker_is_replaced_with_the_last_descriptor(dts_folder: Path, socket_folder: Path) -> None:
    daemon = DaemonProcess(dts_folder, socket_folder / "ds", 1)
    strangers: list[socket.socket] = []
    try:
        with open_train(daemon.address) as station:
            station.acquire(0, 0).release()
            _, _, worker = daemon.pids()
            limit_descriptors(daemon, 1 + max(int(name) for name in os.listdir(f"/proc/{daemon.process.pid}/fd")))
            while not strangers or not select.select([strangers[-1]], [], [], 0.2)[0]:  # the last is hung up on
                strangers.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                strangers[-1].connect(f"{daemon.path}.data")
            os.kill(worker, signal.SIGKILL)
            for _ in station.epoch(1):
                pass
            limit_descriptors(daemon, 1024)
            assert client.server_stats(daemon.address)["workers"][0]["restarts"] == 1
        assert daemon.stop() == 0
        daemon.assert_gone()
    finally:
        for stranger in strangers:
            stranger.close()
        daemon.close()


def test_daemon_takes_the_descriptors_it_may_have(dts_folder: Path, socket_folder: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        daemon = DaemonProcess(dts_folder, socket_folder / "ds", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        for pid in daemon.pids():
            assert resource.prlimit(pid, resource.RLIMIT_NOFILE)[0] > 200
    finally:
        daemon.close()


def test_the_text_of_a_recipe_never_reaches_a_worker_only_its_canonical_form(address: str) -> None:
    """A key given twice is legal JSON; the longer text did not fit the workers' messages and killed them for ever."""
    text = '{"version":"' + "\u4e00" * 50000 + '",' + train_recipe().to_json()[1:]
    assert len(text) < 65536
    reply = client.open_session(address, open_request(recipe_json=text), LIMIT_SECONDS)
    with open_train(address) as station:
        station.acquire(0, 0).release()
    assert [w["restarts"] for w in client.server_stats(address)["workers"]] == [0]
    client.close_session(address, reply.session)


@pytest.mark.parametrize("changes", [{"dataset": "x" * 100000}, {"recipe_json": '{"' + "y" * 60000 + '":1}'}])
def test_refusal_of_a_huge_value_still_says_what_is_wrong(address: str, changes: dict[str, str]) -> None:
    with pytest.raises(DataServerError, match=r"unknown data set|recipe: expected the keys"):
        client.open_session(address, open_request(**changes), LIMIT_SECONDS)


def test_hang_up_of_the_whole_group_stops_cleanly(dts_folder: Path, socket_folder: Path) -> None:
    """What a closing terminal sends; the supervisor used to die of it and could not clean up."""
    daemon = DaemonProcess(dts_folder, socket_folder / "ds")
    try:
        for pid in daemon.pids():
            os.kill(pid, signal.SIGHUP)
        assert daemon.process.wait(LIMIT_SECONDS) == 0
        daemon.assert_gone()
    finally:
        daemon.close()


def test_quit_key_kills_the_daemon_but_leaves_no_file(dts_folder: Path, socket_folder: Path) -> None:
    daemon = DaemonProcess(dts_folder, socket_folder / "ds")
    try:
        resource.prlimit(daemon.process.pid, resource.RLIMIT_CORE, (0, 0))
        for pid in daemon.pids():
            os.kill(pid, signal.SIGQUIT)
        assert daemon.process.wait(LIMIT_SECONDS) == -signal.SIGQUIT
        daemon.assert_gone()
    finally:
        daemon.close()


def test_worker_killed_by_a_signal_without_a_name_is_replaced(daemon: DaemonProcess) -> None:
    victim = daemon.worker_pid(0)
    os.kill(victim, 40)
    assert daemon.worker_pid(0, victim)


KILLED_AT = (
    "import os, signal, sys\n"
    "from dataserver import server\n"
    "module, name = sys.argv[1].split(':')\n"
    "__import__(module)\n"
    "real = getattr(sys.modules[module], name)\n"
    "def deadly(*given, **options):\n"
    "    real(*given, **options)\n"
    "    os.kill(os.getpid(), signal.SIGKILL)\n"
    "setattr(sys.modules[module], name, deadly)\n"
    "from dataserver.cli import main\n"
    "sys.exit(main(sys.argv[2:]))\n"
)


@pytest.mark.parametrize("place", ["dataserver.server:_socket_path", "os:mkdir", "dataserver.server:_bind_data_socket"])
def test_private_daemon_killed_before_it_serves_leaves_no_folder(dts_folder: Path, tmp_path: Path, place: str) -> None:
    reader, writer = os.pipe()
    command = [sys.executable, "-c", KILLED_AT, place, "serve", "--data", f"mnist={dts_folder}", "--workers", "1"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen([*command, "--ready-fd", str(writer)], pass_fds=(writer,), env=environment)
    os.close(writer)
    assert process.wait(60) == -signal.SIGKILL
    os.close(reader)
    deadline = time.monotonic() + LIMIT_SECONDS
    while list(tmp_path.iterdir()):  # the supervisor outlives the daemon by milliseconds
        assert time.monotonic() < deadline, f"left behind: {list(tmp_path.iterdir())}"


@pytest.mark.parametrize("name", ["100%25", "a?b", "a#b", "a b"])
def test_socket_paths_with_signs_that_mean_something_in_a_uri(dts_folder: Path, socket_folder: Path, name: str) -> None:
    daemon = DaemonProcess(dts_folder, socket_folder / name, 1)
    try:
        assert sorted(p.name for p in socket_folder.iterdir()) == [name, f"{name}.data"]
        with open_train(daemon.address) as station:
            station.acquire(0, 0).release()
        assert daemon.stop() == 0
        daemon.assert_gone()
    finally:
        daemon.close()


def test_consumer_may_see_the_sockets_under_another_path(address: str, socket_folder: Path) -> None:
    """As in a container into which the folder is mounted."""
    path = Path(address.removeprefix("unix:"))
    (socket_folder / "seen").symlink_to(path.parent)
    moved = Path(f"{path}.data").rename(f"{path}.away")
    try:
        for name in (path.name, f"{path.name}.data"):
            source = moved if name.endswith(".data") else path
            (socket_folder / name).symlink_to(source)
        with open_train(f"unix:{socket_folder / path.name}") as station:
            station.acquire(0, 0).release()
    finally:
        moved.rename(f"{path}.data")


def test_folder_that_somebody_keeps_locked_is_an_error_not_a_hang(dts_folder: Path, socket_folder: Path) -> None:
    """In /tmp anybody can do that."""
    descriptor = os.open(socket_folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        started = time.monotonic()
        daemon = DaemonProcess(dts_folder, socket_folder / "ds", 1)
        assert time.monotonic() - started < 60
        assert f"{socket_folder}: locked by another process" in daemon.answer["error"]
        daemon.close()
    finally:
        os.close(descriptor)


def maps_of_rings(daemon: DaemonProcess) -> int:
    return sum(Path(f"/proc/{pid}/maps").read_text().count("memfd:ring") for pid in daemon.pids())


def test_ring_of_a_closed_session_is_unmapped_in_every_process(daemon: DaemonProcess) -> None:
    with open_train(daemon.address) as station:
        for _ in station.epoch(0):
            pass
        assert maps_of_rings(daemon)
    deadline = time.monotonic() + LIMIT_SECONDS
    while maps_of_rings(daemon):
        assert time.monotonic() < deadline, "the memory of a closed session is still in use"


def test_forked_child_that_closes_the_station_does_not_end_its_parents_session(address: str) -> None:
    with open_train(address) as station:
        station.acquire(0, 0).release()
        child = os.fork()
        if child == 0:
            station.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        for _ in station.epoch(0, 1):
            pass
        station.acquire(5, 0).release()  # a jump needs the daemon


def is_inheritable(fd: int) -> bool:
    """False for one that gRPC has closed in the meantime."""
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False


def test_no_descriptor_of_a_station_is_inherited_by_programs(address: str) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with open_train(address):
        opened = {int(fd) for fd in set(os.listdir("/proc/self/fd")) - before}
        links = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in opened if os.path.lexists(f"/proc/self/fd/{fd}")}
        assert len(links) >= 3
        assert [link for fd, link in links.items() if is_inheritable(fd)] == []


def test_daemon_without_standard_descriptors_keeps_their_numbers_off_its_rings(
    dts_folder: Path, socket_folder: Path
) -> None:
    address = f"unix:{socket_folder}/ds"
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "dataserver", "serve", "--data", f"mnist={dts_folder}", "--listen", address]
    command += ["--workers", "1", "--ready-fd", str(writer)]
    process = subprocess.Popen(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command], pass_fds=(writer,))
    os.close(writer)
    try:
        with open(reader) as pipe:
            assert json.loads(pipe.readline()) == {"address": address}
        with open_train(address) as station:
            station.acquire(0, 0).release()
            assert {os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in range(3)} == {"/dev/null"}
        process.terminate()
        assert process.wait(LIMIT_SECONDS) == 0
    finally:
        process.kill()
        process.wait()


def test_the_last_epoch_can_be_read_to_its_end(address: str) -> None:
    with open_train(address, start_epoch=MAX_EPOCH, depth=64) as station:
        for _ in station.epoch(MAX_EPOCH):
            pass
        assert station.epoch_digest(MAX_EPOCH)
        with pytest.raises(ValueRejected, match="epoch is"):
            station.acquire(MAX_EPOCH + 1, 0)


def test_start_past_the_end_of_an_epoch_and_impossible_padding_are_refused(address: str) -> None:
    with open_train(address) as station:
        assert list(station.epoch(0, station.batches_per_epoch)) == []
        with pytest.raises(ValueRejected, match="start batch is 14; expected 0 to 13"):
            next(station.epoch(0, 14))
    for channels in (0, -1, 65):
        with pytest.raises(ValueRejected, match=f"padded channels is {channels}"):
            open_train(address, padded_channels=channels)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_signal_while_kernels_are_compiled_ends_it_at_once(
    dts_folder: Path, socket_folder: Path, tmp_path: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "dataserver", "serve", "--data", f"mnist={dts_folder}"]
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    process = subprocess.Popen(
        [*command, "--listen", f"unix:{socket_folder}/ds", "--workers", "1"],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not list(tmp_path.rglob("*.nbi")):  # the first of many kernels is there
            assert process.poll() is None
        process.send_signal(number)
        _, said = process.communicate(timeout=LIMIT_SECONDS)
        assert process.returncode == (130 if number == signal.SIGINT else -number)
        assert "Traceback" not in said
        assert list(socket_folder.iterdir()) == []
    finally:
        process.kill()
        process.communicate()


def test_interrupt_key_reaches_the_trainer_alone(dts_folder: Path) -> None:
    with start_private_daemon({"mnist": dts_folder}, workers=1) as private:
        assert os.getpgid(private.pid) != os.getpgid(0)
        handle = os.pidfd_open(private.pid)
    assert wait_for_exit(handle)
    os.close(handle)


@pytest.mark.parametrize("kind", ["missing", "file", "dangling"])
def test_unusable_runtime_folder_is_one_line(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "run"
    if kind != "missing":
        base.mkdir()
    if kind == "file":
        (base / "renaissance").write_text("")
    if kind == "dangling":
        (base / "renaissance").symlink_to(tmp_path / "nowhere")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    assert main(["stats"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert str(base / "renaissance") in lines[0]


def test_runtime_folder_of_somebody_else_or_open_to_others_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "renaissance").symlink_to(tmp_path / "real")
    assert main(["stats"]) == 1
    (tmp_path / "renaissance").unlink()
    (tmp_path / "renaissance").mkdir()
    (tmp_path / "renaissance").chmod(0o755)
    assert main(["stats"]) == 1
    assert capsys.readouterr().err.count("with mode 0700") == 2


@pytest.mark.parametrize(("output", "said"), [("| true", ""), ("> /dev/full", "No space left on device"), (">&-", "")])
def test_output_that_cannot_be_written_is_no_traceback(address: str, output: str, said: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    command = f'trap "" PIPE; "$0" -m dataserver stats --dataserver "$1" {output}'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable, address], env=environment, capture_output=True, text=True
    )
    assert "Exception ignored" not in done.stderr
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == bool(said)


def test_what_no_part_expects_is_one_line_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--data", f"mnist={tmp_path}/{'x' * 300}"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("dataserver: error: ")
