"""The commands: exit codes, one line for an error and never a traceback; what pack, inspect and verify promise."""

import gzip
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from renaissance.cli import main as cli
from renaissance.cli import pack as pack_command
from renaissance.cli.errors import TRACEBACK_VARIABLE
from renaissance.core.errors import RenaissanceError
from renaissance.data.formats.dts import read_dts, write_dts

REAL = Path(__file__).parents[2] / "data" / "mnist"


class Ran:
    """Exit code and output of one command line."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def error(self) -> str:
        """The one line on stderr of a command that failed."""
        assert self.code == 1
        lines = self.err.splitlines()
        assert len(lines) == 1
        assert lines[0].startswith("error: ")
        return lines[0]


@pytest.fixture
def run(capsys):
    def run(*arguments: object) -> Ran:
        code = cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """A folder with four tiny idx files under the names of MNIST's, extracted."""
    folder = tmp_path / "raw"
    folder.mkdir()
    for prefix, n in (("train", 6), ("t10k", 3)):
        pixels = np.random.default_rng(n).integers(0, 256, n * 784, dtype=np.uint8).tobytes()
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(struct.pack(">4I", 2051, n, 28, 28) + pixels)
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 2049, n) + bytes(range(n)))
    return folder


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


# ---------------------------------------------------------------------------------------------------- pack


def test_pack_writes_both_splits_and_then_leaves_them_alone(run, raw, tmp_path):
    output = tmp_path / "made" / "here"
    first = run("pack", "mnist", "--input", raw, "--output", output)
    assert first.code == 0
    assert [line.split(": ")[1].split(",")[0] for line in first.out.splitlines()] == [
        "packed 6 samples",
        "packed 3 samples",
    ]
    assert sorted(p.name for p in output.iterdir()) == ["mnist_test.dts", "mnist_train.dts"]
    assert read_dts(output / "mnist_test.dts", "mnist", "val")[1].tolist() == [0, 1, 2]
    before = {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in output.iterdir()}
    second = run("pack", "MNIST", "--input", raw, "--output", output)
    assert second.code == 0
    assert second.out.count("up to date") == 2
    assert {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in output.iterdir()} == before


def test_pack_takes_one_split(run, raw, tmp_path):
    assert run("pack", "mnist", "--input", raw, "--output", tmp_path, "--split", "val").code == 0
    assert [p.name for p in tmp_path.glob("*.dts")] == ["mnist_test.dts"]


def test_pack_replaces_other_content_only_by_force(run, raw, tmp_path):
    target = tmp_path / "mnist_test.dts"
    write_dts(target, "mnist", "val", np.array([5], dtype=np.uint8), np.zeros((1, 28, 28, 1), dtype=np.uint8))
    other = target.read_bytes()
    command = ("pack", "mnist", "--input", raw, "--output", tmp_path, "--split", "val")
    assert "mnist_test.dts: exists and holds other samples" in run(*command).error
    assert target.read_bytes() == other
    assert run(*command, "--force").code == 0
    assert len(read_dts(target)[1]) == 3


def test_pack_does_not_trust_a_damaged_target(run, raw, tmp_path):
    command = ("pack", "mnist", "--input", raw, "--output", tmp_path, "--split", "val")
    run(*command)
    target = tmp_path / "mnist_test.dts"
    good = target.read_bytes()
    flip(target, 1000)
    assert "--force replaces it" in run(*command).error
    assert run(*command, "--force").code == 0
    assert target.read_bytes() == good


def test_pack_of_a_file_with_the_existing_tools_sizes_is_up_to_date(run, raw, tmp_path):
    command = ("pack", "mnist", "--input", raw, "--output", tmp_path, "--split", "val")
    run(*command)
    target = tmp_path / "mnist_test.dts"
    data = bytearray(target.read_bytes())
    struct.pack_into("<Q", data, 72, 256 + 3 * 2353)
    struct.pack_into("<QI", data, 84, 3 * 2353, 3 * 2353)
    target.write_bytes(data)
    assert "up to date" in run(*command).out


def test_pack_names_what_it_cannot_do(run, raw, tmp_path):
    def error(dataset: str, source: Path, output: Path) -> str:
        return run("pack", dataset, "--input", source, "--output", output).error

    assert "unknown data set 'fashion'; expected one of: mnist" in error("fashion", raw, tmp_path)
    assert "train: no such folder; expected class folders in it" in error("imagenet", raw, tmp_path)
    assert "nowhere: no such folder; --input is the one" in error("mnist", tmp_path / "nowhere", tmp_path)
    assert "no train-images-idx3-ubyte" in error("mnist", tmp_path, tmp_path)
    (tmp_path / "occupied").write_text("")
    assert "occupied: cannot be made" in error("mnist", raw, tmp_path / "occupied")
    (raw / "train-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 2049, 6) + bytes([0, 1, 2, 3, 4, 10]))
    assert "record 5 (offset 13): label is 10; expected 0 to 9" in error("mnist", raw, tmp_path)
    assert not list(tmp_path.glob("*.dts"))


# ------------------------------------------------------------------------------------------------- inspect


def test_inspect_prints_a_dts_header_as_stable_text(run, raw, tmp_path):
    run("pack", "mnist", "--input", raw, "--output", tmp_path, "--split", "val")
    path = tmp_path / "mnist_test.dts"
    ran = run("inspect", path)
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert lines[0] == f"{path}: DTS, 2611 bytes"
    assert len(lines) == 1 + 29
    assert lines[1] == "    0  magic                        '.DTS'"
    assert lines[13] == "   52  number of samples            3"
    assert lines[-1] == f"  140  CRC-32 of the body           {read_dts(path)[0].body_crc32:08x}"


def test_inspect_lists_every_problem_of_a_header(run, raw, tmp_path):
    run("pack", "mnist", "--input", raw, "--output", tmp_path, "--split", "val")
    path = tmp_path / "mnist_test.dts"
    flip(path, 28)
    flip(path, 36)
    ran = run("inspect", path)
    assert ran.code == 1
    assert [line for line in ran.out.splitlines() if "problem" in line] == [
        "  problem: offset 28: number of classes is 26; expected 10; pack it again",
        "  problem: offset 36: image width is 12; expected 28; pack it again",
    ]


def test_inspect_prints_idx_headers_compressed_or_not(run, raw, tmp_path):
    plain = raw / "t10k-images-idx3-ubyte"
    packed = tmp_path / "images.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes(), mtime=0))
    ran = run("inspect", plain, packed, raw / "t10k-labels-idx1-ubyte")
    assert ran.code == 0
    fields = [
        "    0  magic           2051",
        "    4  count           3",
        "    8  rows            28",
        "   12  columns         28",
        "       unpacked bytes  2368",
    ]
    labels = ["    0  magic           2049", "    4  count           3", "       unpacked bytes  11"]
    assert ran.out.splitlines() == [
        f"{plain}: idx images, 2368 bytes",
        *fields,
        "",
        f"{packed}: idx images, gzip, {packed.stat().st_size} bytes",
        *fields,
        "",
        f"{raw / 't10k-labels-idx1-ubyte'}: idx labels, 11 bytes",
        *labels,
    ]


def test_inspect_names_files_that_have_no_header(run, tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("hello, world")
    assert "empty: is empty" in run("inspect", tmp_path / "empty").error
    assert "text: offset 0: idx magic" in run("inspect", tmp_path / "text").error
    assert "none: no such file" in run("inspect", tmp_path / "none").error
    assert "no data file with a known name" in run("inspect", tmp_path).error


def test_inspect_of_a_folder_prints_every_file_with_a_known_name(run, raw, tmp_path):
    binary = tmp_path / "cifar-10-batches-bin"
    binary.mkdir()
    (binary / "data_batch_1.bin").write_bytes(bytes(2 * 3073))
    (tmp_path / "cifar-100-binary.tar.gz").write_bytes(b"not looked at")
    run("pack", "mnist", "--input", raw, "--output", tmp_path, "--split", "val")
    assert run("inspect", tmp_path).out.split("\n\n") == [
        run("inspect", tmp_path / "mnist_test.dts").out.rstrip(),
        f"{binary / 'data_batch_1.bin'}: cifar10 train, 6146 bytes\n"
        "       records         2\n       record bytes    3073",
        f"{tmp_path / 'cifar-100-binary.tar.gz'}: archive, 13 bytes; its members have no header, `renaissance verify` "
        "reads them\n",
    ]
    (binary / "data_batch_1.bin").write_bytes(bytes(3000))
    assert "expected records of 3073 bytes" in run("inspect", tmp_path).error


# -------------------------------------------------------------------------------------------------- verify


def test_verify_accepts_the_published_files(run):
    ran = run("verify", REAL / "t10k-images-idx3-ubyte.gz", REAL / "t10k-labels-idx1-ubyte.gz")
    assert ran.code == 0
    assert [line.split(": ")[1] for line in ran.out.splitlines()] == [
        "idx, 10000 images, as published (CRC-32 df9322ee)",
        "idx, 10000 labels, as published (CRC-32 5c1cf43b)",
    ]


def test_verify_lists_each_failure_and_still_checks_the_rest(run, raw):
    run("pack", "mnist", "--input", raw, "--output", raw)
    assert run("verify", raw).code == 0
    flip(raw / "mnist_train.dts", 3000)
    (raw / "t10k-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 2049, 3) + bytes([1, 2]))
    shutil.copy(REAL / "t10k-labels-idx1-ubyte.gz", raw)
    flip(raw / "t10k-labels-idx1-ubyte.gz", 4)  # the time stamp: still a good gzip file, but not the published one
    ran = run("verify", raw)
    assert ran.error == "error: 3 of 7 files failed"
    lines = {line.split(": ")[0].split("/")[-1]: line for line in ran.out.splitlines()}
    failed = {name: line for name, line in lines.items() if line.startswith("FAIL")}
    assert set(failed) == {"mnist_train.dts", "t10k-labels-idx1-ubyte", "t10k-labels-idx1-ubyte.gz"}
    assert "CRC-32 of the body" in failed["mnist_train.dts"]
    assert "is 10 bytes long" in failed["t10k-labels-idx1-ubyte"]
    assert "published as 5c1cf43b" in failed["t10k-labels-idx1-ubyte.gz"]


def test_verify_holds_a_file_to_the_promise_of_its_name(run, raw):
    run("pack", "mnist", "--input", raw, "--output", raw)
    shutil.copy(raw / "mnist_train.dts", raw / "mnist_test.dts")
    ran = run("verify", raw / "mnist_test.dts")
    assert ran.code == 1
    assert "is training set is 1; expected 0; this is the other split" in ran.out


def test_verify_notices_counts_that_do_not_fit_together(run, raw):
    (raw / "t10k-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 2049, 2) + bytes(2))
    ran = run("verify", raw)
    assert ran.code == 1
    assert "3 images but 2 labels" in ran.out


def test_verify_names_what_is_not_there(run, tmp_path):
    assert "no data file with a known name" in run("verify", tmp_path).error
    ran = run("verify", tmp_path / "none.dts")
    assert ran.code == 1
    assert "none.dts: no such file" in ran.out


# -------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "arguments",
    [[], ["fly"], ["pack"], ["pack", "mnist"], ["verify"], ["inspect"], ["verify", "--fast", "x"], ["--pack"]],
)
def test_wrong_arguments_exit_with_2_and_the_usage(run, arguments):
    ran = run(*arguments)
    assert ran.code == 2
    assert ran.err.startswith("usage: renaissance")
    assert "Traceback" not in ran.err


def test_options_cannot_be_abbreviated(run, raw, tmp_path):
    assert run("pack", "mnist", "--in", raw, "--output", tmp_path).code == 2


def test_help_and_version_exit_with_0(run):
    for arguments in (["--help"], ["--version"], *([command.name, "--help"] for command in cli.COMMANDS)):
        ran = run(*arguments)
        assert ran.code == 0
        assert ran.out


def raising(monkeypatch, error: BaseException) -> None:
    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr(pack_command, "run", fail)


PACK = ("pack", "mnist", "--input", "x", "--output", "y")


def test_an_error_is_one_line_whatever_its_text(run, monkeypatch):
    raising(monkeypatch, RenaissanceError("first line\n  second line"))
    assert run(*PACK).error == "error: first line second line"
    raising(monkeypatch, OSError(28, "No space left on device", "/data/x"))
    assert run(*PACK).error == "error: [Errno 28] No space left on device: '/data/x'"


def test_a_mistake_of_ours_is_one_line_too_and_says_how_to_see_more(run, monkeypatch):
    monkeypatch.delenv(TRACEBACK_VARIABLE, raising=False)
    raising(monkeypatch, ZeroDivisionError("division by zero"))
    assert run(*PACK).error == (
        "error: unexpected ZeroDivisionError: division by zero; RENAISSANCE_TRACEBACK=1 shows where"
    )
    monkeypatch.setenv(TRACEBACK_VARIABLE, "1")
    ran = run(*PACK)
    assert ran.code == 1
    assert "Traceback" in ran.err


def test_interrupt_exits_with_130(run, monkeypatch):
    raising(monkeypatch, KeyboardInterrupt())
    ran = run(*PACK)
    assert (ran.code, ran.out, ran.err) == (130, "", "")


TERMINATED = """
import os, signal, sys, tempfile
from renaissance.cli import inspect, main
def run(arguments):
    with tempfile.TemporaryDirectory(dir=sys.argv[1]):
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
inspect.run = run
sys.exit(main.main(["inspect", "x"]))
"""


def test_a_terminated_command_cleans_up(tmp_path):
    done = subprocess.run([sys.executable, "-c", TERMINATED, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr, list(tmp_path.iterdir())) == (143, "", [])


def test_the_process_exits_with_the_code_and_without_a_traceback(tmp_path):
    command = [sys.executable, "-m", "renaissance.cli.main"]
    done = subprocess.run([*command, "inspect", str(tmp_path / "none")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: {tmp_path / 'none'}: no such file\n"


def test_a_reader_that_has_gone_is_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "renaissance.cli.main", "inspect", str(REAL / "t10k-labels-idx1-ubyte.gz")],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_one_error(raw):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}  # the buffer is written at the end
    command = [sys.executable, "-m", "renaissance.cli.main", "inspect", *map(str, sorted(raw.iterdir()))]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["error: [Errno 28] No space left on device"]
