"""Prometheus metrics, on request: read from the daemon at the moment of the scrape, so that nothing is counted twice.

One thread answers one scrape after the other, each within a few seconds, so a flood of them costs the daemon little.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from socketserver import BaseServer
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from renaissance.core.errors import DataServerError, RenaissanceError
from renaissance.core.log import get_logger
from renaissance.data.address import tcp_endpoint
from renaissance.data.client import plain

REQUEST_SECONDS = 5.0
"""So long a scrape may take, from its first byte to its last."""
PREFIX = "dataserver_"
_SLOT_STATES = ("prepared", "held", "free")
_log = get_logger("dataserver.metrics")


def metrics_endpoint(text: str) -> tuple[str, int]:
    """(host, port) of ``PORT`` (on 127.0.0.1) or ``HOST:PORT``; port 0 takes a free one.

    Raises ValueRejected for anything else, RenaissanceError when prometheus-client is not installed.
    """
    host, port = tcp_endpoint(text if ":" in text else f"127.0.0.1:{text}", lowest_port=0)
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise RenaissanceError("--metrics needs prometheus-client: pip install 'renaissance[metrics]'") from None
    return host, port


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *arguments: Any) -> None:
        _log.debug(format, *arguments)

    def handle(self) -> None:
        try:
            super().handle()
        except OSError as error:  # slow, or gone
            _log.debug("scrape from %s: %s", self.client_address, error)


class _Server(WSGIServer):
    allow_reuse_address = True
    _talking: socket.socket | None = None
    _stopping = False

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return not self._stopping

    def finish_request(self, request: Any, client_address: Any) -> None:
        # A limit for the whole request: who sends a byte now and then would keep the one thread for days.
        limit = threading.Timer(REQUEST_SECONDS, _hang_up, (request,))
        limit.daemon = True
        limit.start()
        self._talking = request
        try:
            super().finish_request(request, client_address)
        finally:
            self._talking = None
            limit.cancel()

    def stop(self) -> None:
        """End ``serve_forever`` at once, whoever is talking."""
        self._stopping = True
        if self._talking is not None:
            _hang_up(self._talking)
        self.shutdown()

    def server_bind(self) -> None:
        # WSGIServer would look the host's name up, which may take long.
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.exception("scrape from %s failed", client_address)


class _Server6(_Server):
    address_family = socket.AF_INET6


class MetricsServer:
    """Answers GET /metrics until ``close()``."""

    def __init__(self, host: str, port: int, stats: Callable[[], Any]) -> None:
        """``stats()`` gives a StatsReply from any thread. Raises DataServerError when the port cannot be bound."""
        from prometheus_client import CollectorRegistry, make_wsgi_app

        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(stats))
        family = _Server6 if ":" in host else _Server
        try:
            self._server = family((host, port), _Handler)
        except OSError as error:
            raise DataServerError(f"--metrics {host}:{port}: cannot listen: {error.strerror}") from None
        self._server.set_app(make_wsgi_app(registry))
        self._thread = threading.Thread(target=_serve, args=(self._server,), name="dataserver-metrics", daemon=True)
        self._thread.start()
        self.address = f"http://{host if ':' not in host else f'[{host}]'}:{self._server.server_port}/metrics"
        if not _is_loopback(host):
            _log.warning("%s: anybody who can reach this port can read the metrics", self.address)
        _log.info("metrics at %s", self.address)

    def close(self) -> None:
        self._server.stop()
        self._thread.join()
        self._server.server_close()


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):  # closed by now
        connection.shutdown(socket.SHUT_RDWR)


def _serve(server: BaseServer) -> None:
    server.serve_forever(poll_interval=0.1)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Collector:
    def __init__(self, stats: Callable[[], Any]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Any]:
        """Metric families, at the moment of the scrape."""
        try:
            stats = plain(self._stats())
        except DataServerError:  # stopping
            return
        yield from _totals(stats)
        yield from _workers(stats["workers"])
        yield from _sessions(stats["sessions"])
        loading = [([s["dataset"], s["split"]], s) for s in stats["loading"]]
        for key, text in (("done_bytes", "Loaded so far"), ("total_bytes", "To load in all, 0: not known yet")):
            yield _gauge(f"loading_{key}", text, ("dataset", "split"), loading, key)


def _totals(stats: dict[str, Any]) -> Iterator[Any]:
    gauges = {
        "uptime_seconds": ("uptime_seconds", "Since the daemon was started"),
        "dataset_bytes": ("dataset_bytes", "Memory of loaded data sets"),
        "ring_bytes": ("ring_bytes", "Memory of the rings of open sessions"),
    }
    counters = {
        "sessions_opened": ("sessions_opened", "Sessions opened"),
        "sessions_failed": ("sessions_failed", "Sessions that ended with an error"),
        "batches": ("batches", "Batches delivered"),
        "samples": ("samples", "Samples delivered"),
        "corrupt_samples": ("corrupt_occurrences", "Samples that could not be read or decoded, by epoch"),
        "digest_files": ("digest_files", "Digest files written"),
        "digest_failures": ("digest_failures", "Digest files that could not be written or differ from an earlier one"),
    }
    for name, (key, text) in gauges.items():
        yield _gauge(name, text, (), [([], stats)], key)
    for name, (key, text) in counters.items():
        yield _counter(name, text, (), [([], stats)], key)
    yield _gauge("sessions", "Open sessions", (), [([], {"count": len(stats["sessions"])})], "count")
    processes = [(["daemon", ""], stats), *((["worker", str(w["worker"])], w) for w in stats["workers"])]
    for key, text in (("rss_bytes", "Resident, with what is shared"), ("own_bytes", "Resident and not shared")):
        yield _gauge(f"process_{key}", text, ("process", "worker"), processes, key)


def _workers(workers: list[dict[str, Any]]) -> Iterator[Any]:
    rows = [([str(w["worker"])], w | {"running": int(bool(w["pid"]))}) for w in workers]
    yield _gauge("worker_up", "1 while the worker's process is there", ("worker",), rows, "running")
    yield _gauge("worker_age_seconds", "Since the worker's process was started", ("worker",), rows, "age_seconds")
    yield _counter("worker_restarts", "Processes that took over from a dead one", ("worker",), rows, "restarts")


def _sessions(sessions: list[dict[str, Any]]) -> Iterator[Any]:
    names = ("session", "dataset", "split", "rank")
    rows = [([str(s["session"]), s["dataset"], s["split"], str(s["rank"])], s) for s in sessions]
    for name, text in (("batches", "Batches delivered"), ("samples", "Samples delivered")):
        yield _counter(f"session_{name}", text, names, rows, name)
    yield _gauge("session_epoch", "Epoch that is prepared", names, rows, "epoch")
    yield _gauge("session_corrupt_samples", "Different samples that could not be delivered", names, rows, "corrupt")
    slots = [([*labels, state], s) for labels, s in rows for state in _SLOT_STATES]
    yield _gauge("session_slots", "Slots of the ring by state", (*names, "state"), slots, lambda s, n: s[n[-1]])
    waits = [([*labels, who], s) for labels, s in rows for who in ("consumer", "workers", "members")]
    yield _gauge(
        "session_waits", "1 while the stream waits for this side", (*names, "for"), waits,
        lambda s, n: int(s["waits_for"] == n[-1]),
    )  # fmt: skip
    members = [([*labels, str(m["member"])], m) for labels, s in rows for m in s["members"]]
    text = "Time that a consumer was blocked because a batch was not ready"
    yield _counter("session_wait_seconds", text, (*names, "member"), members, "wait_seconds")


Rows = Iterable[tuple[list[str], dict[str, Any]]]
Value = str | Callable[[dict[str, Any], list[str]], float]


def _gauge(name: str, text: str, labels: tuple[str, ...], rows: Rows, value: Value) -> Any:
    from prometheus_client.core import GaugeMetricFamily

    return _fill(GaugeMetricFamily(PREFIX + name, text, labels=labels), rows, value)


def _counter(name: str, text: str, labels: tuple[str, ...], rows: Rows, value: Value) -> Any:
    from prometheus_client.core import CounterMetricFamily

    return _fill(CounterMetricFamily(PREFIX + name, text, labels=labels), rows, value)


def _fill(family: Any, rows: Rows, value: Value) -> Any:
    for labels, row in rows:
        family.add_metric(labels, row[value] if isinstance(value, str) else value(row, labels))
    return family
