"""Laws 7 and 8 at the daemon's door: each wrong request is one error that names the thing, and the daemon lives on."""

from __future__ import annotations

import json
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from conftest import LIMIT_SECONDS, TRAIN_SAMPLES, DaemonProcess, open_request, read_on, train_recipe
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dataserver.cli import main
from renaissance.core.enums import NormMode
from renaissance.core.errors import DataServerError, ProtocolError, ValueRejected
from renaissance.data import client, station
from renaissance.data.private_daemon import start_private_daemon
from renaissance.data.recipe import Recipe
from renaissance.data.station import TransferStation
from renaissance.data.transforms import RandomCrop, Resize


@pytest.fixture(scope="module")
def address(dts_folder: Path) -> Iterator[str]:
    with start_private_daemon({"mnist": dts_folder}, workers=1) as private:
        yield private.address


def edited_recipe(**changes: Any) -> str:
    return json.dumps({**json.loads(train_recipe().to_json()), **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch size is 0; expected 1 to 65536"),
        ({"batch_size": 65537}, "batch size is 65537; expected 1 to 65536"),
        ({"depth": 1}, "depth is 1; expected 2 to 64"),
        ({"depth": 65}, "depth is 65; expected 2 to 64"),
        ({"world_size": 0}, "world size is 0"),
        ({"rank": 2, "world_size": 2}, "rank is 2; expected 0 to 1"),
        ({"padded_channels": 4000}, "padded channels is 4000; expected 1 to 64"),
        ({"dataset": "cifar10"}, "data set 'cifar10' is not served here; this dataserver has: mnist"),
        ({"dataset": "/etc/passwd"}, "'/etc/passwd'"),
        ({"split": "test"}, "split is 'test'; expected one of: train, val"),
        ({"dtype": "fp64"}, "unknown dtype 'fp64'"),
        ({"dtype": "int32"}, "dtype is int32; a session delivers one of: uint8, fp32, fp16, bf16"),
        ({"start_batch": 13}, "start batch is 13; expected 0 to 12"),
        ({"start_epoch": 2**31}, "start epoch is 2147483648"),
        ({"batch_size": TRAIN_SAMPLES + 1, "drop_last": True}, "an epoch has no batch"),
        ({"recipe_json": "{"}, "not valid JSON"),
        ({"recipe_json": "x" * 70000}, "recipe has 70000 characters"),
        ({"recipe_json": edited_recipe(transforms=[{"type": "Sharpen"}])}, "transform 0: unknown transform 'Sharpen'"),
        ({"recipe_json": edited_recipe(resolution=8192, transforms=[]), "batch_size": 65536}, "memory-limit"),
        ({"split": "val"}, "draws random numbers"),
    ],
)
def test_bad_request_is_named_and_the_daemon_lives(address: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataServerError) as caught:
        client.open_session(address, open_request(**changes), LIMIT_SECONDS)
    assert message in str(caught.value)
    assert client.server_stats(address)["sessions"] == []


def test_impossible_values_are_refused_before_anything_is_sent(address: str) -> None:
    for changes in ({"batch_size": 0}, {"depth": 1}, {"seed": -1}, {"rank": 1}):
        options = {"dataset": "mnist", "split": "train", "recipe": train_recipe(), "seed": 1, "batch_size": 50}
        with pytest.raises(ValueRejected):
            TransferStation(address, **{**options, **changes})


def test_ring_over_the_memory_limit_is_refused(dts_folder: Path, socket_folder: Path) -> None:
    daemon = DaemonProcess(dts_folder, socket_folder / "ds", 1, "--memory-limit", "8M")
    try:
        with pytest.raises(DataServerError, match="--memory-limit"):
            client.open_session(daemon.address, open_request(batch_size=65536), LIMIT_SECONDS)
        client.open_session(daemon.address, open_request(), LIMIT_SECONDS)
        assert daemon.stop() == 0
    finally:
        daemon.close()


def test_row_over_the_memory_limit_is_refused_before_anything_of_its_size_is_allocated(
    dts_folder: Path, socket_folder: Path
) -> None:
    huge = Recipe.build([Resize(8192)], NormMode.NO_NORM, resolution=8192, color_channels=1)
    daemon = DaemonProcess(dts_folder, socket_folder / "ds", 1, "--memory-limit", "8M")
    try:
        before = peak_memory(daemon.process.pid)
        with pytest.raises(DataServerError, match=r"a ring of 4 slots of 1 samples takes .*--memory-limit"):
            client.open_session(daemon.address, open_request(batch_size=1, recipe_json=huge.to_json()), LIMIT_SECONDS)
        assert peak_memory(daemon.process.pid) - before < 8192 * 8192
    finally:
        daemon.close()


def peak_memory(pid: int) -> int:
    """Bytes that a process has had resident at most."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def test_data_set_over_the_memory_limit_is_not_loaded(dts_folder: Path, socket_folder: Path) -> None:
    daemon = DaemonProcess(dts_folder, socket_folder / "ds", 1, "--memory-limit", "200K")
    try:
        for _ in range(2):
            with pytest.raises(DataServerError, match=r"mnist train takes \d+ bytes.*--memory-limit"):
                client.open_session(daemon.address, open_request(batch_size=1), LIMIT_SECONDS)
        assert client.server_stats(daemon.address)["dataset_bytes"] == 0
        assert daemon.stop() == 0
    finally:
        daemon.close()


def test_other_protocol_version_is_named_by_both_numbers(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(station, "PROTOCOL_VERSION", 7)
    with pytest.raises(ProtocolError, match="the dataserver speaks protocol version 2, this client version 7"):
        TransferStation(address, dataset="mnist", split="train", recipe=train_recipe(), seed=1, batch_size=50)


def test_nobody_listening_is_an_error_at_once(socket_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = f"unix:{socket_folder}/none"
    with pytest.raises(DataServerError, match=f"no dataserver at {nowhere}: no such socket"):
        TransferStation(nowhere, dataset="mnist", split="train", recipe=train_recipe(), seed=1, batch_size=50)
    assert main(["stats", "--dataserver", nowhere]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"dataserver: error: no dataserver at {nowhere}")
    dead = socket_folder / "dead"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(dead))
    with pytest.raises(DataServerError, match="nobody listens there any more"):
        client.server_stats(f"unix:{dead}")


@pytest.mark.parametrize(
    "address", ["tcp:localhost", "tcp:h:0", "tcp:::1:80", "localhost:50051", "unix:", "unix:" + "x" * 200]
)
def test_addresses_that_cannot_be_are_named(address: str) -> None:
    with pytest.raises(ValueRejected, match="address"):
        client.server_stats(address)


def test_health_service_says_serving(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "renaissance.dataserver.v1.DataServer"):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=LIMIT_SECONDS)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_stats_command_shows_sessions_and_workers(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with TransferStation(
        address, dataset="mnist", split="train", recipe=train_recipe(), seed=3, batch_size=50
    ) as station:
        station.acquire(0, 0).release()
        assert main(["stats", "--dataserver", address, "--json"]) == 0
        stats = json.loads(capsys.readouterr().out)
        assert main(["stats", "--dataserver", address]) == 0
        text = capsys.readouterr().out
    assert [s["dataset"] for s in stats["sessions"]] == ["mnist"]
    assert stats["sessions"][0]["seed"] == 3
    assert stats["sessions"][0]["batches"] >= 1
    assert stats["sessions"][0]["recipe"] == train_recipe().fingerprint()
    assert len(stats["workers"]) == 1
    assert "1 sessions open" in text
    assert "mnist train, batch 50 fp32 x 4 slots" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no data set to serve"),
        (["--data", "mnist"], "expected NAME=FOLDER"),
        (["--data", "mnist=/nowhere"], "/nowhere: no such folder"),
        (["--data", "nist=."], "'nist'"),
        (["--data", "mnist=.", "--workers", "0"], "workers is 0"),
        (["--data", "mnist=.", "--listen", "tcp:1"], "expected HOST:PORT"),
        (["--data", "mnist=.", "--listen", "tcp:127.0.0.1:1"], "anybody could open sessions; give --token-file"),
        (["--data", "mnist=.", "--tls-key", "k"], "--tls-key is given without --listen tcp"),
        (["--data", "mnist=.", "--listen", "unix:/a", "--listen", "unix:/b"], "at most one"),
        (["--data", "mnist=.", "--digest-folder", "/nowhere"], "/nowhere: no such folder"),
        (["--data", "mnist=.", "--metrics", "x"], "expected HOST:PORT"),
        (["--data", "mnist=.", "--level", "0"], "level"),
        (["--data", "mnist=.", "--read-ahead", "1M"], "--read-ahead is given, but all data are held in memory"),
        (["--data", "mnist=.", "--affinity", "0-x"], "CPU list '0-x'"),
        (["--data", "mnist=.", "--affinity", "8191"], "not allowed for this process: 8191"),
        (["--data", "mnist=.", "--affinity", "0-99999999999"], "99999999999 is no CPU"),
        (["--data", "mnist=.", "--nice", "20"], "--nice is 20"),
    ],
)
def test_bad_serve_options_are_one_line_and_no_traceback(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--log-level", "ERROR", *arguments]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]


def test_private_daemon_that_cannot_start_says_why() -> None:
    with pytest.raises(DataServerError, match=r"cannot start: /nowhere: no such folder"):
        start_private_daemon({"mnist": Path("/nowhere")}, workers=1)


def test_damaged_data_file_is_named_to_the_client(tmp_path: Path, dts_folder: Path) -> None:
    for source in dts_folder.iterdir():
        content = bytearray(source.read_bytes())
        content[-1] ^= 1
        (tmp_path / source.name).write_bytes(content)
    with start_private_daemon({"mnist": tmp_path}, workers=1) as private:
        with pytest.raises(DataServerError, match=str(tmp_path)):
            client.open_session(private.address, open_request(), LIMIT_SECONDS)
        assert client.server_stats(private.address)["sessions"] == []


def open_and_read(address: str, **options: Any) -> None:
    """A session may fail before or after its consumer has connected; both say why."""
    with TransferStation(address, **options) as station:
        read_on(station)


def test_worker_that_keeps_dying_fails_the_session_not_the_daemon(dts_folder: Path, socket_folder: Path) -> None:
    """Faults are planted by seed before the daemon forks: one kills the worker at its share, one raises."""
    code = (
        "import os, signal, sys\n"
        "from renaissance.data.making import tables as worker\n"
        "real = worker.epoch_order\n"
        "def deadly(seed, *rest, **options):\n"
        "    if seed == 666: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    if seed == 667: raise RuntimeError('planted')\n"
        "    return real(seed, *rest, **options)\n"
        "worker.epoch_order = deadly\n"
        "from dataserver.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    address = f"unix:{socket_folder}/ds"
    command = [sys.executable, "-c", code, "serve", "--data", f"mnist={dts_folder}", "--listen", address]
    with subprocess.Popen([*command, "--workers", "2"], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert any("serving" in line for line in process.stderr)
            options = {"dataset": "mnist", "split": "train", "recipe": train_recipe(), "batch_size": 50}
            with (
                TransferStation(address, seed=1, **options) as healthy,
                TransferStation(address, seed=666, **options) as doomed,
            ):
                with pytest.raises(DataServerError, match=r"worker \d died \d times at the same batch .*SIGKILL"):
                    doomed.acquire(0, 0)
                for _ in healthy.epoch(0):
                    pass
                assert healthy.epoch_digest(0)
            with pytest.raises(DataServerError, match=r"gave up .* epoch 0 batch 0: RuntimeError: planted"):
                open_and_read(address, seed=667, **options)
            process.terminate()
            process.communicate(timeout=LIMIT_SECONDS)
            assert process.returncode == 0
        finally:
            process.kill()


def test_workers_that_cannot_start_end_the_daemon_with_one_error(dts_folder: Path, socket_folder: Path) -> None:
    code = (
        "import os, sys\n"
        "from dataserver import worker\n"
        "worker._Worker.run = lambda self: os._exit(3)\n"
        "from dataserver.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    serve = ["serve", "--data", f"mnist={dts_folder}", "--listen", f"unix:{socket_folder}/ds", "--workers", "2"]
    done = subprocess.run([sys.executable, "-c", code, *serve], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert re.search(r"error: .*worker \d died 6 times before it could start \(exit code 3\)", done.stderr)
    assert "Traceback" not in done.stderr
    assert not list(socket_folder.iterdir())


@pytest.mark.parametrize(
    "greeting",
    [
        b"hello",
        b"[]",
        b'{"version": 2}',
        b'{"version": 2, "token": "guess"}',
        b'{"version": 9, "token": ""}',
        b'{"version": Infinity, "token": ""}',
        b'{"version": NaN, "token": ""}',
        b"[" * 60000,
    ],
)
def test_strangers_on_the_data_socket_get_an_error(address: str, greeting: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.settimeout(LIMIT_SECONDS)
        stranger.connect(address.removeprefix("unix:") + ".data")
        stranger.send(greeting)
        message, fds, _, _ = socket.recv_fds(stranger, 4096, 10)
        assert "error" in json.loads(message)
        assert fds == []
        assert stranger.recv(1) == b""


@pytest.mark.parametrize(
    "message",
    [
        b"x",
        struct.pack("<4s4Q", b"SEEK", 1, 0, 0, 0),  # the generation it is at
        struct.pack("<4s4Q", b"SEEK", 1 << 24, 0, 0, 0),
        struct.pack("<4s4Q", b"SEEK", 2, 0, 0, 10**6),
        struct.pack("<4s4Q", b"SEEK", 2, 1 << 50, 0, 0),
        struct.pack("<4s4Q", b"SEEK", 2, 0, 1 << 31, 0),
    ],
)
def test_impossible_jump_fails_the_session_only(address: str, message: bytes) -> None:
    options = {"dataset": "mnist", "split": "train", "recipe": train_recipe(), "batch_size": 50}
    with TransferStation(address, seed=1, **options) as broken, TransferStation(address, seed=2, **options) as healthy:
        broken._socket.send(message)
        with pytest.raises(DataServerError, match="gave up this session"):
            read_on(broken)
        for _ in healthy.epoch(0):
            pass


def test_recipe_that_does_not_fit_the_images_is_named(address: str) -> None:
    recipe = Recipe.build([RandomCrop(32)], NormMode.CIFAR, resolution=32, color_channels=3)
    with pytest.raises(DataServerError, match="channels"):
        TransferStation(address, dataset="mnist", split="train", recipe=recipe, seed=1, batch_size=50)
