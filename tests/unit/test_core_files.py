"""Files appear whole or not at all, and what is no file is refused without waiting."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from renaissance.core import files as core_files
from renaissance.core.errors import FormatError, MissingFileError, RenaissanceError
from renaissance.core.files import opened_regular, written_when_complete


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_final_name_appears_only_when_the_file_is_complete(tmp_path):
    path = tmp_path / "result"
    with written_when_complete(path) as file:
        file.write(b"half")
        file.flush()
        assert not path.exists()
        file.write(b" and half")
    assert path.read_bytes() == b"half and half"
    assert names(tmp_path) == ["result"]


@pytest.mark.parametrize("error", [ValueError("wrong"), KeyboardInterrupt()])
def test_an_error_leaves_the_old_file_and_no_other(tmp_path, error):
    path = tmp_path / "result"
    path.write_bytes(b"old")

    def interrupted() -> None:
        with written_when_complete(path) as file:
            file.write(b"new")
            raise error

    with pytest.raises(type(error)):
        interrupted()
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["result"]


def test_permissions_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        with written_when_complete(tmp_path / "result") as file:
            file.write(b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "result").stat().st_mode & 0o777 == 0o640


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from renaissance.core.errors import RenaissanceError
from renaissance.core.files import written_when_complete
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write itself must fail, as on a full disk
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    with written_when_complete(Path(sys.argv[1])) as file:
        file.write(bytes(1 << 20))
except RenaissanceError as error:
    print(error)
"""


def test_no_room_for_the_file_is_named_and_nothing_is_left(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path / "result")], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"{tmp_path / 'result'}: cannot be written: File too large")
    assert names(tmp_path) == []


KILLED = """
import sys
from pathlib import Path
from renaissance.core.files import written_when_complete
with written_when_complete(Path(sys.argv[1])) as file:
    file.write(bytes(1 << 16))
    file.flush()
    print("half", flush=True)
    sys.stdin.read()
"""


def test_a_killed_writer_leaves_no_half_file_under_the_final_name(tmp_path):
    path = tmp_path / "result"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"half\n"
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    assert not path.exists()
    if core_files._nameless(tmp_path) is not None:
        assert names(tmp_path) == []


def test_a_file_system_without_nameless_files_gets_a_hidden_sibling(tmp_path, monkeypatch):
    monkeypatch.setattr(core_files, "_nameless", lambda folder: None)
    path = tmp_path / "result"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), written_when_complete(path):
        1 / (len(names(tmp_path)) - 2)
    assert (names(tmp_path), path.read_bytes()) == (["result"], b"old")
    with written_when_complete(path) as file:
        file.write(b"new")
    assert (names(tmp_path), path.read_bytes()) == (["result"], b"new")


def test_a_file_that_cannot_be_linked_is_copied(tmp_path, monkeypatch):
    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with written_when_complete(tmp_path / "result") as file:
        file.write(b"new")
    assert (names(tmp_path), (tmp_path / "result").read_bytes()) == (["result"], b"new")


def test_unwritable_places_are_named(tmp_path):
    for path in (tmp_path / "missing" / "result", Path("/proc/result")):
        with pytest.raises(RenaissanceError, match=f"{path}: cannot be written"), written_when_complete(path):
            pass
    (tmp_path / "folder").mkdir()
    with pytest.raises(RenaissanceError, match="folder: cannot be written"), written_when_complete(tmp_path / "folder"):
        pass
    assert names(tmp_path) == ["folder"]


def test_opening_gives_the_size(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(b"12345")
    with opened_regular(path) as (file, size):
        assert (file.read(), size) == (b"12345", 5)


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    cases = [
        (tmp_path / "none", MissingFileError, "no such file"),
        (tmp_path / "pipe", FormatError, "not a regular file"),
        (tmp_path, FormatError, "is a folder"),
        (Path("/dev/null"), FormatError, "not a regular file"),
    ]
    for path, kind, message in cases:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(kind, match=message), opened_regular(path):
            pass
        assert len(os.listdir("/proc/self/fd")) == before


def test_errors_of_the_reader_pass_through_unchanged(tmp_path):
    path = tmp_path / "data"
    path.touch()
    with pytest.raises(MissingFileError, match="another"), opened_regular(path):
        raise MissingFileError("another")
    with pytest.raises(RenaissanceError, match="data: cannot be read: Input/output error"), opened_regular(path):
        raise OSError(5, "Input/output error")
