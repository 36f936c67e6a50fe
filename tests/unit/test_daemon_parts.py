"""Parts of the daemon without processes: the list of corrupt samples, rates, the token, who may listen where."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dataserver import metrics
from dataserver.corrupt import MAX_LISTED, MAX_TEXT_BYTES, CorruptLog
from dataserver.pool import WorkerSlot
from dataserver.rates import SECONDS, RateMeter
from dataserver.tcp import TcpAccess
from dataserver.top import ring_picture
from renaissance.core.dtype import DType
from renaissance.core.errors import ValueRejected
from renaissance.data import address, consumer_state
from renaissance.data.client import Access
from renaissance.data.making.spec import Load, LoadedSet, OnCorrupt, SessionSpec
from renaissance.data.protocol import RingLayout
from renaissance.data.sources import Encoding
from renaissance.data.wire import dataserver_pb2


def spec(samples: int = 1000, **changes: Any) -> SessionSpec:
    loaded = LoadedSet("mnist", "train", Load.FULLY, Encoding.PIXELS, samples, 10, 1, 1, 1, "made up")
    layout = RingLayout(2, 10, 1, 1, 1, 1, DType.UINT8)
    given = {"seed": 0, "shuffle": True, "rank": 0, "world_size": 1, "batches_per_epoch": 1, "layout": layout}
    given |= {"dataset_name": "mnist", "split": "train", "dataset": loaded, "recipe_json": "{}"}
    return SessionSpec(**{**given, "on_corrupt": OnCorrupt.SUBSTITUTE, **changes})


def report(sample: int, epoch: int = 0, substitute: int | None = 5) -> dict[str, Any]:
    action = "blank" if substitute is None else "substitute"
    text = f"file.dts, picture {sample}: cut off"
    return {"sample": sample, "epoch": epoch, "batch": 1, "text": text, "action": action, "substitute": substitute}


def test_a_report_that_comes_again_counts_once() -> None:
    log = CorruptLog(spec())
    for _ in range(3):
        assert log.note([report(4), report(7, substitute=None)]) is None
    assert log.note([report(4, epoch=1)]) is None
    assert (log.distinct, log.occurrences) == (2, 3)
    assert [(s.sample, s.epoch, s.substitute) for s in log.listed] == [(4, 0, 5), (7, 0, -1), (4, 1, 5)]
    assert log.summary() == (
        "sample 4 (epoch 0 batch 1, sample 5 in its place): file.dts, picture 4: cut off; "
        "sample 7 (epoch 0 batch 1, blank): file.dts, picture 7: cut off"
    )


@pytest.mark.parametrize(
    ("changes", "allowed", "named"),
    [
        ({"max_corrupt": 3}, 3, "max_corrupt is 3"),
        ({"max_corrupt": 0}, 0, "max_corrupt is 0"),
        ({"max_corrupt_share": 0.002}, 2, "max_corrupt_share 0.002 of 1000 samples allows 2"),
        ({"max_corrupt_share": 0.0}, 1, "max_corrupt_share 0 of 1000 samples allows 1"),
        ({}, 10, "max_corrupt_share 0.01 of 1000 samples allows 10"),
    ],
)
def test_too_many_corrupt_samples_are_a_failure_that_lists_the_first(
    changes: dict[str, Any], allowed: int, named: str
) -> None:
    log = CorruptLog(spec(**changes))
    for sample in range(allowed):
        assert log.note([report(sample), report(sample, epoch=1)]) is None
    failure = log.note([report(500)])
    assert failure is not None
    first = 0 if allowed else 500
    assert failure.startswith(f"{allowed + 1} samples are corrupt, {named}; sample {first} (epoch 0 batch 1")
    assert ("and 6 more" in failure) == (allowed == 10)


def test_the_list_of_corrupt_samples_is_bounded() -> None:
    log = CorruptLog(spec(samples=1 << 20, max_corrupt=1 << 20, max_corrupt_share=1.0))
    long = report(0) | {"text": "ä" * 5000}
    log.note([long, *(report(sample) for sample in range(1, MAX_LISTED + 500))])
    assert len(log.listed) == MAX_LISTED
    assert log.distinct == MAX_LISTED + 500
    assert len(log.listed[0].text.encode()) == MAX_TEXT_BYTES


def test_warning_at_the_end_of_a_run_names_each_sample_once(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [
        dataserver_pb2.CorruptSample(sample=s, epoch=e, batch=2, text="cut off", action="blank", substitute=-1)
        for e in range(2)
        for s in range(7)
    ]
    reply = dataserver_pb2.CorruptSamplesReply(samples=samples, distinct=7, occurrences=14)
    monkeypatch.setattr(consumer_state, "corrupt_samples", lambda *_: reply)
    messages: list[str] = []
    monkeypatch.setattr(consumer_state._log, "warning", lambda text, *values: messages.append(text % values))
    consumer_state.CorruptList("unix:/nowhere", 1, Access()).warn("mnist train", "blank", 14)
    named = "; ".join(f"sample {s} (epoch 0 batch 2): cut off" for s in range(5))
    assert messages == [f"mnist train: 7 corrupt samples (blank): {named}; and 2 more, see corrupt_samples()"]


def test_rates_are_of_the_last_seconds_only() -> None:
    now = 100.25
    meter = RateMeter(lambda: now)
    for _ in range(20):
        meter.add(2, 100)
        now += 0.5
    batches, samples = meter.per_second()
    assert 3.4 < batches < 4.1
    assert samples == pytest.approx(batches * 50)
    now += SECONDS + 1
    assert meter.per_second() == (0.0, 0.0)


def test_a_worker_that_never_listens_has_little_put_off_for_it() -> None:
    slot = WorkerSlot(0, -1)
    assert not slot.put(1, begin=True)  # no process: its successor is told what is open then
    slot.control = object()  # type: ignore[assignment]
    for session in range(1000):
        assert slot.put(session, begin=True)
        assert not slot.put(session, begin=False)
    assert len(slot.outbox) == 0
    assert slot.put(7, begin=False)  # of one it was told of


@pytest.mark.parametrize("text", ["a.b:80", "tcp:a.b:80", "127.0.0.1:80", "[::1]:80", "tcp:[::1]:80"])
def test_endpoints(text: str) -> None:
    host, port = address.tcp_endpoint(text)
    assert port == 80
    assert host in ("a.b", "127.0.0.1", "::1")


@pytest.mark.parametrize("text", ["", "a", "a:", ":80", "a:0", "a:65536", "a:-1", "::1:80", "a:8 0", "a:٣"])
def test_impossible_endpoints(text: str) -> None:
    with pytest.raises(ValueRejected, match="expected HOST:PORT"):
        address.tcp_endpoint(text)


def token_file(folder: Path, content: bytes = b"0123456789abcdef0123\n", mode: int = 0o600) -> Path:
    path = folder / "token"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_token_is_read_from_a_file_of_ones_own_only(tmp_path: Path) -> None:
    assert address.read_token(token_file(tmp_path)) == "0123456789abcdef0123"
    for mode in (0o644, 0o640, 0o660):
        with pytest.raises(ValueRejected, match="expected 0600"):
            address.read_token(token_file(tmp_path, mode=mode))
    for content in (b"", b"short", b"two words that are long", b"x" * 5000, b"\xff" * 40):
        with pytest.raises(ValueRejected, match="one line of 16 to 4096"):
            address.read_token(token_file(tmp_path, content))
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ValueRejected, match=str(path)):
            address.read_token(path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ValueRejected, match="not a regular file"):
        address.read_token(tmp_path / "pipe")


def test_tcp_without_protection_or_half_of_it_is_refused(tmp_path: Path) -> None:
    where, token = "tcp:127.0.0.1:7001", token_file(tmp_path)
    assert TcpAccess.of(None, None, None, None) is None
    with pytest.raises(ValueRejected, match="anybody could open sessions"):
        TcpAccess.of(where, None, None, None)
    with pytest.raises(ValueRejected, match="--tls-cert is given alone"):
        TcpAccess.of(where, token, None, None)
    with pytest.raises(ValueRejected, match="--token-file is given without"):
        TcpAccess.of(None, None, None, token)
    with pytest.raises(ValueRejected, match="expected a certificate in PEM form"):
        TcpAccess.of(where, token, token, None)
    access = TcpAccess.of(where, None, None, token)
    assert access is not None
    assert access.token == "0123456789abcdef0123"


def test_client_over_tcp_wants_a_token_or_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = token_file(tmp_path)
    with pytest.raises(ValueRejected, match="RENAISSANCE_TOKEN_FILE"):
        Access.of("tcp:127.0.0.1:7001")
    with pytest.raises(ValueRejected, match="token_file is given, but unix:/a is a Unix socket"):
        Access.of("unix:/a", token_file=token)
    with pytest.raises(ValueRejected, match="expected a certificate in PEM form"):
        Access.of("tcp:127.0.0.1:7001", tls_ca=token)
    monkeypatch.setenv("RENAISSANCE_TOKEN_FILE", str(token))
    assert Access.of("tcp:127.0.0.1:7001").token == "0123456789abcdef0123"
    assert Access.of("unix:/a").token is None


def test_picture_of_a_ring() -> None:
    assert ring_picture(2, 1, 3) == "##=..."


def trickle(connection: socket.socket) -> None:
    """A request that never ends: a byte now and then, each before any time limit on silence."""
    with suppress(OSError):
        connection.sendall(b"GET /")
        while True:
            connection.sendall(b"a")
            time.sleep(0.01)


@pytest.mark.parametrize("seconds", [0.2, 3600.0])
def test_request_that_never_ends_holds_up_neither_a_scrape_nor_the_end(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr(metrics, "REQUEST_SECONDS", seconds)
    server = metrics.MetricsServer("127.0.0.1", 0, dataserver_pb2.StatsReply)
    where = ("127.0.0.1", int(server.address.rpartition(":")[2].partition("/")[0]))
    with socket.create_connection(where) as slow:
        sender = threading.Thread(target=trickle, args=(slow,))
        sender.start()
        if seconds < 1:
            with socket.create_connection(where, timeout=10) as other:
                other.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
                assert other.recv(15) == b"HTTP/1.0 200 OK"
        else:
            wait_until(lambda: server._server._talking is not None)
        closer = threading.Thread(target=server.close, daemon=True)
        closer.start()
        closer.join(10)
        assert not closer.is_alive()
        sender.join(10)
    assert not sender.is_alive()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
