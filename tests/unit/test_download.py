"""Downloads against a server that breaks off, lies, stalls and mocks: the published bytes or a clear error, never both.

Every test has its own local server, whose answers it scripts request by request.
"""

import errno
import io
import resource
import signal
import tarfile
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from renaissance.cli import main as cli
from renaissance.core.errors import DigestMismatch, FormatError, RenaissanceError, ValueRejected
from renaissance.data import catalogue, download, mirrors
from renaissance.data.catalogue import DatasetInfo, PublishedFile
from renaissance.data.download import DownloadFailed, fetch_dataset
from renaissance.data.formats import archive as archives
from renaissance.data.formats.archive import extract_archive
from renaissance.data.mirrors import MirrorsFailed, TransferOptions, fetch_file

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


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as made:
        yield made


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fetch(folder: Path, *servers: Server, file: PublishedFile = FILE, options: TransferOptions = QUICK) -> str:
    return fetch_file(file, folder, [one.url for one in servers], options)


# -- the way it should be -----------------------------------------------------------------------------------------


def test_a_file_is_fetched_with_its_bytes_and_nothing_else(server, tmp_path):
    seen: list[tuple[str, int, int]] = []
    folder = tmp_path / "made" / "here"
    source = fetch_file(FILE, folder, [server.url.rstrip("/")], QUICK, lambda *step: seen.append(step))
    assert source == server.url
    assert (folder / "file.gz").read_bytes() == DATA
    assert names(folder) == ["file.gz"]
    assert seen[-1] == ("file.gz", len(DATA), len(DATA))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert server.asked == [("/file.gz", None, None)]


def test_a_broken_transfer_goes_on_where_it_broke(server, tmp_path):
    tag = f'"{FILE.crc32:08x}"'
    server.script = [breaks_after(40_000, ETag=tag), hangs_up]
    fetch(tmp_path, server)
    assert (tmp_path / "file.gz").read_bytes() == DATA
    # The second answer was none at all; the third try asks for the rest of the same file.
    assert server.asked == [("/file.gz", None, None), *[("/file.gz", "bytes=40000-", tag)] * 2]


def test_a_part_of_an_earlier_run_is_continued(server, tmp_path):
    (tmp_path / "file.gz.part").write_bytes(DATA[:70_000])
    fetch(tmp_path, server)
    assert server.asked == [("/file.gz", "bytes=70000-", None)]
    assert (tmp_path / "file.gz").read_bytes() == DATA
    assert names(tmp_path) == ["file.gz"]


def test_a_complete_part_needs_no_server(server, tmp_path):
    (tmp_path / "file.gz.part").write_bytes(DATA)
    fetch(tmp_path, server)
    assert server.asked == []
    assert names(tmp_path) == ["file.gz"]


def test_redirections_are_followed_with_the_range(server, tmp_path):
    server.files["/elsewhere/x"] = DATA
    server.script = [says(302, Location="/elsewhere/x")]
    (tmp_path / "file.gz.part").write_bytes(DATA[:5])
    fetch(tmp_path, server)
    assert [path for path, _, _ in server.asked] == ["/file.gz", "/elsewhere/x"]
    assert server.asked[1][1] == "bytes=5-"
    assert (tmp_path / "file.gz").read_bytes() == DATA


# -- servers that are not what they should be ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(says(200, DATA), id="ignores the range"),
        pytest.param(says(200, DATA, announced=None), id="ignores the range and says no length"),
        pytest.param(says(206, DATA[9:], Content_Range=f"bytes 9-{len(DATA) - 1}/{len(DATA)}"), id="another range"),
        pytest.param(says(206, DATA[8000:]), id="says no range"),
        pytest.param(says(206, DATA, Content_Range=f"bytes {'9' * 8000}-9/*"), id="a range of many digits"),
        pytest.param(says(503), id="is busy once"),
    ],
)
def test_whatever_it_makes_of_a_range_the_bytes_are_right(server, tmp_path, answer):
    (tmp_path / "file.gz.part").write_bytes(DATA[:8000])
    server.script = [answer]
    fetch(tmp_path, server)
    assert (tmp_path / "file.gz").read_bytes() == DATA


def test_a_part_of_another_version_is_thrown_away(server, tmp_path):
    (tmp_path / "file.gz.part").write_bytes(b"old" * 1000)
    fetch(tmp_path, server)
    assert [wanted for _, wanted, _ in server.asked] == ["bytes=3000-", None]
    assert (tmp_path / "file.gz").read_bytes() == DATA


def test_a_file_that_changes_between_two_tries_starts_again(server, tmp_path):
    server.script = [breaks_after(40_000, b"\xff" * len(DATA), ETag='"other"')]
    fetch(tmp_path, server)
    assert server.asked[1] == ("/file.gz", "bytes=40000-", '"other"')  # the honest answer to that is the whole file
    assert len(server.asked) == 2
    assert (tmp_path / "file.gz").read_bytes() == DATA


def test_a_part_longer_than_the_file_is_thrown_away(server, tmp_path):
    (tmp_path / "file.gz.part").write_bytes(DATA + b"more")
    fetch(tmp_path, server)
    assert (tmp_path / "file.gz").read_bytes() == DATA


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (says(404), "answers 404"),
        (says(403), "answers 403"),
        (says(416, Content_Range="bytes */5"), "answers 416"),
        (says(204), "answers 204"),
        (
            says(200, b"<html>not here</html>", Content_Type="text/html"),
            "sends a page of 21 bytes; published with 102400",
        ),
        (says(200, b"<html>", announced=None, Content_Type="text/html; charset=utf-8"), "sends a page, not the file"),
        (says(200, b"<html" + DATA[5:]), "sent a web page with CRC-32 .*; published as"),
        (says(200, DATA[:-1] + b"!"), "sent a file with CRC-32 .*; published as"),
        (says(200, DATA[:-1]), "sends a file of 102399 bytes; published with 102400"),
        (says(200, DATA, announced=10), "sends a file of 10 bytes"),
        (says(200, DATA, announced=None, Content_Length="\u00b2"), "sends a file of '\u00b2' bytes"),
        (says(200, DATA, announced=None, Content_Length="1" * 5000), "sends a file of '1+' bytes"),
        (says(302, Location="http://[::1/file.gz"), "redirects to an impossible address"),
        (says(200, DATA + b"!", announced=None), "sends more than the 102400 bytes"),
        (says(200, DATA, Content_Encoding="gzip"), "with encoding 'gzip'"),
        (says(302, Location="ftp://127.0.0.1/file.gz"), "redirects to ftp"),
        (says(302, Location="file:///etc/passwd"), "redirects to file|not allowed"),
    ],
)
def test_a_mirror_without_the_file_is_passed_over(server, tmp_path, answer, reason):
    server.script = [answer] * 2
    with pytest.raises(MirrorsFailed, match=reason):
        fetch(tmp_path, server, options=TransferOptions(stall_seconds=5, attempts=1, pause_seconds=0))
    assert names(tmp_path) == []
    server.script = [answer]
    with serving() as second:
        assert fetch(tmp_path, server, second) == second.url
    assert (tmp_path / "file.gz").read_bytes() == DATA


@pytest.mark.parametrize("answer", [breaks_after(30_000), says(200, DATA[:30_000], announced=None)])
def test_a_mirror_that_always_breaks_off_keeps_what_it_gave(server, tmp_path, answer):
    server.script = [answer] * 9
    with pytest.raises(MirrorsFailed, match=r"broke off after 30000 of 102400 bytes, after 2 tries"):
        fetch(tmp_path, server)
    assert len(server.asked) == 3  # the first brought something new, the second and third did not
    assert names(tmp_path) == ["file.gz.part"]
    with serving() as second:
        fetch(tmp_path, server, second)
    assert (tmp_path / "file.gz").read_bytes() == DATA


def test_an_error_page_does_not_cost_the_part(server, tmp_path):
    (tmp_path / "file.gz.part").write_bytes(DATA[:90_000])
    server.script = [says(200, b"<html>log in</html>", Content_Type="text/html"), says(404), says(500), says(500)]
    for _ in range(3):
        with pytest.raises(MirrorsFailed):
            fetch(tmp_path, server)
    assert (tmp_path / "file.gz.part").read_bytes() == DATA[:90_000]


@pytest.mark.parametrize("answer", [stalls_after(0), stalls_after(20_000)])
def test_a_stall_ends_and_the_next_mirror_takes_over(server, tmp_path, answer):
    server.script = [answer] * 3
    with serving() as second:
        options = TransferOptions(stall_seconds=0.1, attempts=1, pause_seconds=0)
        assert fetch(tmp_path, server, second, options=options) == second.url
    assert second.asked[0][1] in (None, "bytes=20000-")
    assert (tmp_path / "file.gz").read_bytes() == DATA


def test_endless_redirections_end(server, tmp_path):
    server.script = [says(302, Location="/file.gz")] * 20
    with pytest.raises(MirrorsFailed, match="answers 302"):
        fetch(tmp_path, server)
    assert len(server.asked) <= mirrors.MAX_REDIRECTS + 1


def test_a_secure_mirror_cannot_redirect_to_an_insecure_one():
    request = mirrors.urllib.request.Request("https://host/file.gz")
    with pytest.raises(mirrors.urllib.error.HTTPError, match="which is not https") as caught:
        mirrors._Redirects().redirect_request(request, io.BytesIO(), 302, "Found", {}, "http://host/file.gz")
    caught.value.close()


@pytest.mark.parametrize("url", ["file:///etc/", "ftp://host/", "host/mnist", "https://", ""])
def test_only_web_addresses_are_mirrors(tmp_path, url):
    with pytest.raises(ValueRejected, match="expected the http or https address"):
        fetch_file(FILE, tmp_path, [url])


# -- this machine -------------------------------------------------------------------------------------------------


class Usage:
    def __init__(self, free: int) -> None:
        self.free = free


def test_a_full_disk_is_named_before_anything_is_asked(server, tmp_path, monkeypatch):
    monkeypatch.setattr(mirrors.shutil, "disk_usage", lambda _: Usage(10))
    with pytest.raises(RenaissanceError, match="102400 bytes are missing, and the disk has room for 10"):
        fetch(tmp_path, server)
    assert server.asked == []


def test_a_disk_that_fills_up_ends_it_and_keeps_the_part(server, tmp_path):
    old, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, old[1]))
    try:
        with (
            serving() as second,
            pytest.raises(RenaissanceError, match=r"file\.gz\.part: cannot be written: .*is kept"),
        ):
            fetch(tmp_path, server, second)
        assert second.asked == []  # another mirror does not make room
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "file.gz.part").stat().st_size == 50_000
    fetch(tmp_path, server)
    assert server.asked[-1][1] == "bytes=50000-"
    assert (tmp_path / "file.gz").read_bytes() == DATA


def test_no_folder_can_be_made(server, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RenaissanceError, match="cannot be written"):
        fetch(tmp_path / "file", server)


def test_two_at_once_do_not_write_one_file(server, tmp_path):
    errors: list[str] = []

    def second(*_: object) -> None:
        if not errors:
            with pytest.raises(RenaissanceError, match="another process is fetching this file") as caught:
                fetch(tmp_path, server)
            errors.append(str(caught.value))

    fetch_file(FILE, tmp_path, [server.url], QUICK, second)
    assert errors
    assert (tmp_path / "file.gz").read_bytes() == DATA


def test_an_interrupted_transfer_leaves_no_file_under_the_final_name(server, tmp_path):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_file(FILE, tmp_path, [server.url], QUICK, interrupt)
    assert names(tmp_path) == ["file.gz.part"]


# -- whole sets ---------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch, server: Server) -> DatasetInfo:
    """MNIST with two tiny published files, on the server."""
    server.files = {"/a.gz": b"first file", "/b.gz": b"second"}
    published = tuple(PublishedFile(n.strip("/"), zlib.crc32(d), len(d)) for n, d in server.files.items())
    info = DatasetInfo("mnist", catalogue.MNIST.type, 10, 28, 28, 1, published=published, mirrors=(server.url,))
    monkeypatch.setattr(download, "dataset_info", lambda _: info)
    return info


def test_what_is_there_is_checked_and_left_alone(pair, server, tmp_path):
    (tmp_path / "a.gz").write_bytes(b"first file")
    got = fetch_dataset("mnist", tmp_path, options=QUICK)
    assert [(one.path.name, one.how) for one in got] == [("a.gz", "present"), ("b.gz", "fetched")]
    assert [path for path, _, _ in server.asked] == ["/b.gz"]
    assert [one.how for one in fetch_dataset("mnist", tmp_path, options=QUICK)] == ["present", "present"]


@pytest.mark.parametrize(("data", "message"), [(b"first FILE", "CRC-32 is"), (b"first", "is 5 bytes long; published")])
def test_an_existing_file_with_other_bytes_is_an_error_unless_forced(pair, tmp_path, data, message):
    (tmp_path / "a.gz").write_bytes(data)
    with pytest.raises(DigestMismatch, match=message):
        fetch_dataset("mnist", tmp_path, options=QUICK)
    assert (tmp_path / "a.gz").read_bytes() == data
    fetch_dataset("mnist", tmp_path, options=QUICK, replace=True)
    assert (tmp_path / "a.gz").read_bytes() == b"first file"


def test_a_forced_fetch_that_fails_keeps_the_old_file(pair, server, tmp_path):
    (tmp_path / "a.gz").write_bytes(b"first FILE")
    server.files = {}
    with pytest.raises(DownloadFailed):
        fetch_dataset("mnist", tmp_path, options=QUICK, replace=True)
    assert (tmp_path / "a.gz").read_bytes() == b"first FILE"


def test_without_a_network_the_error_lists_what_to_bring(pair, server, tmp_path):
    with serving() as closed:
        pass
    with pytest.raises(DownloadFailed, match=r"2 of 2 files could not be fetched: .*no connection") as caught:
        fetch_dataset("mnist", tmp_path, [closed.url], QUICK)
    assert all(f"{f.name} ({f.size} bytes, CRC-32 {f.crc32:08x})" in str(caught.value) for f in pair.published)
    assert str(tmp_path) in str(caught.value)
    assert caught.value.missing == pair.published
    assert names(tmp_path) == []


def test_one_missing_file_does_not_keep_the_others_away(pair, server, tmp_path):
    del server.files["/a.gz"]
    with pytest.raises(DownloadFailed, match="1 of 2 files"):
        fetch_dataset("mnist", tmp_path, options=QUICK)
    assert names(tmp_path) == ["b.gz"]


CIFAR = {f"cifar-10-batches-bin/data_batch_{i}.bin": bytes(3073) for i in range(1, 6)}
CIFAR["cifar-10-batches-bin/test_batch.bin"] = b"\x09" * 3073


def packed(files: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return made.getvalue()


@pytest.fixture
def ten(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    """CIFAR-10 with one sample a file, on the server."""
    data = packed(CIFAR)
    server.files = {"/cifar-10-binary.tar.gz": data}
    published = (PublishedFile("cifar-10-binary.tar.gz", zlib.crc32(data), len(data)),)
    info = DatasetInfo("cifar10", catalogue.CIFAR_10.type, 10, 32, 32, 3, published=published, mirrors=(server.url,))
    monkeypatch.setattr(download, "dataset_info", lambda _: info)


@pytest.mark.usefixtures("ten")
def test_an_archive_is_unpacked_once(server, tmp_path):
    got = fetch_dataset("cifar10", tmp_path, options=QUICK)
    assert [one.how for one in got] == ["fetched"] + ["unpacked"] * 6
    assert names(tmp_path / "cifar-10-batches-bin") == sorted(name.split("/")[1] for name in CIFAR)
    assert (tmp_path / "cifar-10-batches-bin" / "test_batch.bin").read_bytes() == b"\x09" * 3073
    assert [one.how for one in fetch_dataset("cifar10", tmp_path, options=QUICK)] == ["present"]
    (tmp_path / "cifar-10-binary.tar.gz").unlink()  # the files alone will do
    assert [one.how for one in fetch_dataset("cifar10", tmp_path, options=QUICK)] == ["present"]
    assert len(server.asked) == 1


@pytest.mark.usefixtures("ten")
def test_an_archive_can_stay_packed(tmp_path):
    assert [one.how for one in fetch_dataset("cifar10", tmp_path, options=QUICK, unpack=False)] == ["fetched"]
    assert names(tmp_path) == ["cifar-10-binary.tar.gz"]


@pytest.mark.parametrize("name", ["../evil.bin", "/tmp/evil.bin", "cifar-10-batches-bin/../../evil.bin", "other/x.bin"])
def test_an_archive_cannot_write_elsewhere(tmp_path, name):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "x.tar.gz").write_bytes(packed(CIFAR | {name: b"evil"}))
    with pytest.raises(FormatError, match=r"evil\.bin.* lies outside|was not expected"):
        extract_archive(folder / "x.tar.gz", folder, "cifar-10-batches-bin")
    assert names(folder) == ["x.tar.gz"]
    assert names(tmp_path) == ["data"]


def test_unpacking_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    place = tmp_path / "cifar-10-batches-bin"
    place.mkdir()
    (place / "test_batch.bin").write_bytes(b"old")
    (tmp_path / "x.tar.gz").write_bytes(packed(CIFAR))

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(archives.os, "fsync", full)
    with pytest.raises(RenaissanceError, match="cannot be written: No space left"):
        extract_archive(tmp_path / "x.tar.gz", tmp_path, place.name)
    assert names(tmp_path) == ["cifar-10-batches-bin", "x.tar.gz"]
    assert (place / "test_batch.bin").read_bytes() == b"old"


# -- the command --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("pair")
def test_the_command_says_where_files_came_from(server, tmp_path, capsys):
    assert cli.main(["fetch", "mnist", "--output", str(tmp_path), "--mirror", server.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{tmp_path / name}: fetched from {server.url}" for name in ("a.gz", "b.gz")]


@pytest.mark.usefixtures("pair")
def test_the_command_lists_what_is_missing(server, tmp_path, capsys):
    server.files = {}
    assert cli.main(["fetch", "mnist", "--output", str(tmp_path), "--timeout", "5"]) == 1
    err = capsys.readouterr().err
    assert "answers 404" in err
    assert f"  b.gz  6 bytes, CRC-32 {zlib.crc32(b'second'):08x}" in err.splitlines()
    assert err.splitlines()[-1].startswith("error: mnist: 2 files are missing")


def test_imagenet_is_explained_not_fetched(tmp_path, capsys):
    assert cli.main(["fetch", "imagenet", "--output", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "ILSVRC2012_img_val.tar  6,744,924,160 bytes, CRC-32 7c951e53" in out
    assert "val/WNID/" in out
    assert names(tmp_path) == []
    (tmp_path / "train").mkdir()
    (tmp_path / "val").mkdir()
    assert cli.main(["fetch", "imagenet", "--output", str(tmp_path)]) == 0
    assert "holds both splits" in capsys.readouterr().out
    with pytest.raises(ValueRejected, match="cannot be downloaded by a program"):
        fetch_dataset("imagenet", tmp_path)


@pytest.mark.parametrize("arguments", [["--timeout", "0"], ["--timeout", "nan"], ["--mirror", "nowhere"]])
def test_the_command_refuses_bad_options(tmp_path, capsys, arguments):
    assert cli.main(["fetch", "mnist", "--output", str(tmp_path / "x"), *arguments]) == 1
    assert capsys.readouterr().err.startswith("error: ")
