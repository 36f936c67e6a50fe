"""Whole data sets fetched and unpacked, and the command that does it."""

import errno
import io
import tarfile
import zlib
from collections.abc import Iterator

import pytest
from download_server import QUICK, Server, names, serving

from renaissance.cli import main as cli
from renaissance.core.errors import DigestMismatch, FormatError, RenaissanceError, ValueRejected
from renaissance.data import catalogue, download
from renaissance.data.catalogue import DatasetInfo, PublishedFile
from renaissance.data.download import DownloadFailed, fetch_dataset
from renaissance.data.formats import archive as archives
from renaissance.data.formats.archive import extract_archive


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    with serving() as made:
        yield made


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
