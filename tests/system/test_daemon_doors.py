"""The daemon's doors: sockets of its user alone, TCP with a token or TLS only, data on the same machine only."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from conftest import LIMIT_SECONDS, DaemonProcess, open_request, train_recipe
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dataserver.cli import main
from dataserver.tcp import TcpAccess
from renaissance.core.errors import DataServerError, ValueRejected
from renaissance.data import client, handshake
from renaissance.data.client import Access
from renaissance.data.protocol import PROTOCOL_VERSION
from renaissance.data.station import TransferStation

TOKEN = "correct horse battery staple".replace(" ", "-")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_token(path: Path, token: str = TOKEN) -> Path:
    path.write_text(token + "\n")
    path.chmod(0o600)
    return path


def open_train(address: str, **changes: Any) -> TransferStation:
    options = {"dataset": "mnist", "split": "train", "recipe": train_recipe(), "seed": 11, "batch_size": 50}
    return TransferStation(address, **{**options, **changes})


class TcpDaemon:
    def __init__(self, dts_folder: Path, folder: Path, *options: str) -> None:
        self.address = f"tcp:127.0.0.1:{free_port()}"
        self.process = DaemonProcess(dts_folder, folder / "ds", 1, "--listen", self.address, *options)
        assert "address" in self.process.answer, self.process.answer


@pytest.fixture(scope="module")
def token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_token(tmp_path_factory.mktemp("token") / "token")


@pytest.fixture(scope="module")
def tcp(dts_folder: Path, tmp_path_factory: pytest.TempPathFactory, token: Path) -> Iterator[TcpDaemon]:
    daemon = TcpDaemon(dts_folder, tmp_path_factory.mktemp("s"), "--token-file", str(token))
    yield daemon
    assert daemon.process.stop() == 0
    daemon.process.assert_gone()


def test_a_station_over_tcp_gets_its_batches_through_shared_memory(tcp: TcpDaemon, token: Path) -> None:
    with open_train(tcp.address, token_file=token) as remote, open_train(tcp.process.address) as local:
        assert remote.acquire(3, 2).digest == local.acquire(3, 2).digest


def test_token_may_come_from_the_environment(
    tcp: TcpDaemon, token: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RENAISSANCE_TOKEN_FILE", str(token))
    open_train(tcp.address).close()
    assert main(["stats", "--dataserver", tcp.address]) == 0
    assert "data sets: mnist" in capsys.readouterr().out


@pytest.mark.parametrize("said", [[], [("authorization", "Bearer x")], [("authorization", f"Basic {TOKEN}")],
                                  [("authorization", f"Bearer {TOKEN}x")], [("authorization", f"Bearer {TOKEN[:-1]}")],
                                  [("authorization", f"Bearer {TOKEN}"), ("authorization", "Bearer y")]])  # fmt: skip
def test_every_call_over_tcp_needs_the_token(tcp: TcpDaemon, said: list[tuple[str, str]]) -> None:
    from renaissance.data.wire import dataserver_pb2 as pb
    from renaissance.data.wire import dataserver_pb2_grpc

    with grpc.insecure_channel(tcp.address.removeprefix("tcp:")) as channel:
        stub = dataserver_pb2_grpc.DataServerStub(channel)
        calls = [
            (stub.ServerInfo, pb.ServerInfoRequest()),
            (stub.OpenSession, open_request()),
            (stub.CloseSession, pb.CloseSessionRequest(session=1)),
            (stub.CorruptSamples, pb.CorruptSamplesRequest(session=1)),
            (stub.Stats, pb.StatsRequest()),
            (health_pb2_grpc.HealthStub(channel).Check, health_pb2.HealthCheckRequest()),
        ]
        for method, request in calls:
            with pytest.raises(grpc.RpcError) as caught:
                method(request, metadata=said, timeout=LIMIT_SECONDS)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert client.server_stats(tcp.process.address)["sessions"] == []


def test_wrong_token_is_one_clear_error(tcp: TcpDaemon, tmp_path: Path) -> None:
    with pytest.raises(DataServerError, match=r"wrong or missing token.*--token-file"):
        open_train(tcp.address, token_file=write_token(tmp_path / "other", "x" * 32))
    with pytest.raises(ValueRejected, match="a Unix socket, which needs none"):
        open_train(tcp.process.address, token_file=tmp_path / "other")


def test_consumer_on_another_machine_is_told_why_it_gets_no_data(
    tcp: TcpDaemon, token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "machine_identity", lambda: "another")
    with pytest.raises(DataServerError, match="runs on another machine"):
        open_train(tcp.address, token_file=token)
    assert client.server_stats(tcp.process.address)["sessions"] == []
    assert client.server_stats(tcp.address, access=Access.of(tcp.address, token))["datasets"] == ["mnist"]


def test_connections_over_tcp_are_bounded_and_the_unix_socket_is_not_affected(tcp: TcpDaemon) -> None:
    host, port = "127.0.0.1", int(tcp.address.rpartition(":")[2])
    before = len(os.listdir(f"/proc/{tcp.process.process.pid}/fd"))
    strangers = [socket.create_connection((host, port), LIMIT_SECONDS) for _ in range(150)]
    try:
        with open_train(tcp.process.address) as local:
            local.acquire(0, 0).release()
        assert len(os.listdir(f"/proc/{tcp.process.process.pid}/fd")) - before < 120
    finally:
        for stranger in strangers:
            stranger.close()


def test_port_that_is_taken_is_an_error_and_nothing_is_left(dts_folder: Path, socket_folder: Path, token: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp:127.0.0.1:{taken.getsockname()[1]}"
        daemon = DaemonProcess(dts_folder, socket_folder / "ds", 1, "--listen", address, "--token-file", str(token))
        assert f"{address}: cannot listen" in daemon.answer["error"]
        daemon.close()
    assert not list(socket_folder.iterdir())


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """(certificate, key) of 127.0.0.1, which signs itself."""
    cert, key = folder / f"{name}.pem", folder / f"{name}-key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=here"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    return cert, key


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_tls_and_token_together(dts_folder: Path, socket_folder: Path, tmp_path: Path, token: Path) -> None:
    cert, key = make_certificate(tmp_path, "here")
    other, other_key = make_certificate(tmp_path, "other")
    with pytest.raises(ValueRejected, match=f"--tls-key {other_key}: is not a usable key of --tls-cert {cert} "):
        TcpAccess.of("tcp:127.0.0.1:7001", cert, other_key, None)
    options = ["--tls-cert", str(cert), "--tls-key", str(key), "--token-file", str(token)]
    daemon = TcpDaemon(dts_folder, socket_folder, *options)
    try:
        with open_train(daemon.address, token_file=token, tls_ca=cert) as station_:
            station_.acquire(0, 0).release()
        with pytest.raises(DataServerError, match="wrong or missing token"):
            open_train(daemon.address, tls_ca=cert)
        with pytest.raises(DataServerError, match="hung up; give tls_ca if it is a dataserver with TLS"):
            open_train(daemon.address, token_file=token, timeout=LIMIT_SECONDS)
        with pytest.raises(DataServerError, match="not the owner of a certificate that tls_ca signed"):
            open_train(daemon.address, token_file=token, tls_ca=other, timeout=LIMIT_SECONDS)
        assert daemon.process.stop() == 0
        daemon.process.assert_gone()
    finally:
        daemon.process.close()


def test_sockets_are_of_their_user_alone(tcp: TcpDaemon) -> None:
    for path in (tcp.process.path, Path(f"{tcp.process.path}.data")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_data_socket_refuses_other_users_whatever_the_mode(tcp: TcpDaemon) -> None:
    """Modes can be changed by mistake; the kernel's word on who connects cannot."""
    path = Path(f"{tcp.process.path}.data")
    reply = client.open_session(tcp.process.address, open_request(), LIMIT_SECONDS)
    code = (
        "import os, socket, sys\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "stranger.connect(sys.argv[1])\n"
        "try: stranger.send(sys.argv[2].encode())\n"
        "except BrokenPipeError: pass\n"
        "try: print(stranger.recv(4096).decode())\n"
        "except ConnectionResetError: print(stranger.recv(4096).decode())\n"
    )
    closed = [p for p in path.parents if not p.stat().st_mode & 0o001]
    modes = {p: stat.S_IMODE(p.stat().st_mode) for p in [path, *closed]}
    hello = json.dumps({"version": PROTOCOL_VERSION, "token": reply.token})
    try:
        for p, mode in modes.items():
            p.chmod(mode | (0o666 if p == path else 0o001))
        done = subprocess.run([sys.executable, "-c", code, path, hello], capture_output=True, text=True, timeout=20)
    finally:
        for p, mode in modes.items():
            p.chmod(mode)
        client.close_session(tcp.process.address, reply.session)
    assert "a process of user 65534 asked for data of user 0; refused" in done.stdout, done.stderr
