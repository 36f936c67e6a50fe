"""Downloads against a server that breaks off, lies, stalls and mocks: the published bytes or a clear error, never both.

Every test has its own local server, whose answers it scripts request by request.
"""

import io
import resource
import signal
from collections.abc import Iterator

import pytest
from download_server import DATA, FILE, QUICK, Server, breaks_after, fetch, hangs_up, names, says, serving, stalls_after

from renaissance.core.errors import RenaissanceError, ValueRejected
from renaissance.data import mirrors
from renaissance.data.mirrors import MirrorsFailed, TransferOptions, fetch_file


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    with serving() as made:
        yield made


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
