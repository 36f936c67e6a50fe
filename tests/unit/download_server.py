"""A server whose answers a test scripts request by request: honest ones, and those that break off, lie and stall."""

import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from renaissance.data.catalogue import PublishedFile
from renaissance.data.mirrors import TransferOptions, fetch_file

DATA = bytes(range(256)) * 400  # 102,400 bytes: longer than one read of the client
FILE = PublishedFile("file.gz", zlib.crc32(DATA), len(DATA))
QUICK = TransferOptions(stall_seconds=5, attempts=2, pause_seconds=0)

Answer = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "Server"

    def do_GET(self) -> None:  # the name that http.server calls
        self.server.asked.append((self.path, self.headers.get("Range"), self.headers.get("If-Range")))
        answer = self.server.script.pop(0) if self.server.script else honest
        self.close_connection = True
        answer(self)

    def head(self, status: int, length: int | None, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.send_header("Connection", "close")
        self.end_headers()

    def send(self, data: bytes) -> None:
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        """Keep the output of the tests clean."""


class Server(ThreadingHTTPServer):
    """Serves ``files`` by path; ``script`` overrides the next answers; ``asked`` remembers path, Range, If-Range."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {"/file.gz": DATA}
        self.script: list[Answer] = []
        self.asked: list[tuple[str, str | None, str | None]] = []
        self.release = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def handle_error(self, request: object, address: object) -> None:
        """A client that leaves early is what several tests are about."""


def honest(handler: Handler) -> None:
    data = handler.server.files.get(handler.path)
    if data is None:
        handler.head(404, 0)
        return
    wanted = handler.headers.get("Range")
    tag = f'"{zlib.crc32(data):08x}"'
    if wanted is None or handler.headers.get("If-Range", tag) != tag:
        handler.head(200, len(data), ETag=tag)
        handler.send(data)
        return
    start = int(wanted.removeprefix("bytes=").rstrip("-"))
    if start >= len(data):
        handler.head(416, 0, Content_Range=f"bytes */{len(data)}")
        return
    handler.head(206, len(data) - start, ETag=tag, Content_Range=f"bytes {start}-{len(data) - 1}/{len(data)}")
    handler.send(data[start:])


def breaks_after(count: int, data: bytes = DATA, **headers: str) -> Answer:
    """Announces all of ``data`` and sends ``count`` bytes."""

    def answer(handler: Handler) -> None:
        handler.head(200, len(data), **headers)
        handler.send(data[:count])

    return answer


def says(status: int, body: bytes = b"", announced: int | None = -1, **headers: str) -> Answer:
    def answer(handler: Handler) -> None:
        handler.head(status, len(body) if announced == -1 else announced, **headers)
        handler.send(body)

    return answer


def stalls_after(count: int) -> Answer:
    def answer(handler: Handler) -> None:
        handler.head(200, len(DATA))
        handler.send(DATA[:count])
        handler.wfile.flush()
        handler.server.release.wait(30)

    return answer


def hangs_up(handler: Handler) -> None:
    handler.connection.close()


@contextmanager
def serving() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.release.set()
            server.shutdown()
            thread.join()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fetch(folder: Path, *servers: Server, file: PublishedFile = FILE, options: TransferOptions = QUICK) -> str:
    return fetch_file(file, folder, [one.url for one in servers], options)
