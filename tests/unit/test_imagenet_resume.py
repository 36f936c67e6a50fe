"""Packing that is killed, disturbed or out of disk: continued to the same bytes, never half under its final name."""

import errno
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from picture_trees import encoded, grow_pictures, parsed, picture, small_layout

from renaissance.core.errors import CorruptSample, RenaissanceError
from renaissance.data.formats import imagenet_part
from renaissance.data.formats.imagenet_pack import PackOptions, PackResult, pack_imagenet

KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from picture_trees import small_layout
from renaissance.data.formats.imagenet_pack import PackOptions, pack_imagenet

def progress(done, total):
    if done == int(sys.argv[5]):
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        grandchildren = [p for c in children for p in Path(f"/proc/{c}/task/{c}/children").read_text().split()]
        print(*children, *grandchildren, flush=True)
        sys.stdin.read(1)
        for pid in grandchildren if sys.argv[7] == "workers" else [os.getpid()]:
            os.kill(int(pid), signal.SIGKILL)

if __name__ == "__main__":
    level, jobs = int(sys.argv[4]), int(sys.argv[6])
    options = PackOptions(level=level, jobs=jobs, restart_windows=False, layout=small_layout(level))
    pack_imagenet(Path(sys.argv[2]), Path(sys.argv[3]), "train", options, progress=progress)
"""
NAME = "imagenet_train_lv0.dts"


def pack(root: Path, output: Path, level: int = 0, **options) -> PackResult:
    output.mkdir(exist_ok=True)
    options = {"layout": small_layout(level), "restart_windows": False} | options
    return pack_imagenet(
        root, output, "train", PackOptions(level=level, **options), progress=options.pop("progress", None)
    )


class Stop(Exception):
    pass


def stopped(root: Path, output: Path, at: int, **options) -> int:
    """Pack until ``at`` pictures are done, then end as by an error; returns the blocks that are in the journal."""
    output.mkdir(exist_ok=True)

    def progress(done: int, total: int) -> None:
        if done == at:
            raise Stop

    settled = PackOptions(
        **({"level": 0, "layout": small_layout(options.get("level", 0)), "restart_windows": False} | options)
    )
    with pytest.raises(Stop):
        pack_imagenet(root, output, "train", settled, progress=progress)
    journal = output / f"imagenet_train_lv{settled.level}.dts.part.journal"
    return len(journal.read_text().splitlines()) - 1 if journal.exists() else 0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    grow_pictures(tmp_path, each=30)
    return tmp_path


@pytest.mark.parametrize(("level", "jobs", "at"), [(0, 1, 57), (1, 2, 32)])
def test_killed_run_is_continued_to_the_same_bytes_and_leaves_no_process(root, level, jobs, at):
    whole = pack(root, root / "whole", level).path
    output = root / "out"
    output.mkdir()
    arguments = [str(Path(__file__).parent), str(root), str(output), str(level), str(at), str(jobs), "packer"]
    script = root / "killed.py"
    script.write_text(KILLED)
    with subprocess.Popen(
        [sys.executable, script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) >= jobs if jobs > 1 else pids == []
        watched = [os.pidfd_open(pid) for pid in pids]
        process.stdin.write("x")
        process.stdin.close()
        assert process.wait() == -signal.SIGKILL
    for descriptor in watched:
        assert select.select([descriptor], [], [], 20)[0], "a process outlived the packer"
        os.close(descriptor)
    assert not (output / whole.name).exists()
    result = pack(root, output, level)
    assert result.kept_blocks > 0
    assert result.dropped_blocks == 0
    assert result.path.read_bytes() == whole.read_bytes()
    assert sorted(p.name for p in output.iterdir()) == [whole.name]


def test_killed_workers_end_the_run_with_one_error_that_says_what_to_do(root):
    output = root / "out"
    output.mkdir()
    (root / "killed.py").write_text(KILLED)
    arguments = [str(Path(__file__).parent), str(root), str(output), "1", "20", "2", "workers"]
    ran = subprocess.run(
        [sys.executable, root / "killed.py", *arguments], input="x", capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1
    assert "RenaissanceError: pack: a working process died (perhaps for lack of memory); try fewer --jobs" in ran.stderr
    assert not (output / "imagenet_train_lv1.dts").exists()
    assert pack(root, output, 1).kept_blocks > 0


@pytest.mark.parametrize("at", [1, 20, 45, 90])
def test_run_can_be_continued_from_any_picture(root, at):
    whole = pack(root, root / "whole").path.read_bytes()
    blocks = stopped(root, root / "out", at)
    assert not (root / "out" / NAME).exists()
    result = pack(root, root / "out")
    assert (result.kept_blocks, result.path.read_bytes()) == (blocks, whole)


def test_nothing_remains_of_a_run_without_a_block(root):
    stopped(root, root / "out", 2)
    assert list((root / "out").iterdir()) == []
    stopped(root, root / "out", 60, resume=False)
    assert list((root / "out").iterdir()) == []


def test_block_that_was_damaged_is_made_again_with_those_after_it(root):
    whole = pack(root, root / "whole").path.read_bytes()
    blocks = stopped(root, root / "out", 80)
    assert blocks > 3
    with (root / "out" / f"{NAME}.part").open("r+b") as file:
        file.seek(16384 + 2 * 16384 + 5000)
        file.write(b"?")
    result = pack(root, root / "out")
    assert (result.kept_blocks, result.dropped_blocks) == (2, blocks - 2)
    assert result.path.read_bytes() == whole


@pytest.mark.parametrize("cut", [1, 100])
def test_line_that_was_cut_does_not_count(root, cut):
    whole = pack(root, root / "whole").path.read_bytes()
    blocks = stopped(root, root / "out", 80)
    journal = root / "out" / f"{NAME}.part.journal"
    journal.write_bytes(journal.read_bytes()[:-cut])
    result = pack(root, root / "out")
    assert (result.kept_blocks, result.path.read_bytes()) == (blocks - 1, whole)


def test_lost_block_is_made_again(root):
    whole = pack(root, root / "whole").path.read_bytes()
    blocks = stopped(root, root / "out", 80)
    os.truncate(root / "out" / f"{NAME}.part", 16384 + 16384 * (blocks - 1) + 100)
    result = pack(root, root / "out")
    assert (result.kept_blocks, result.path.read_bytes()) == (blocks - 1, whole)


def test_block_of_a_changed_source_is_made_again_and_those_before_it_are_kept(root):
    blocks = stopped(root, root / "out", 80, order="file")
    changed = root / "train" / "n01" / "n01_0.JPEG"  # picture 30 of 90
    changed.write_bytes(encoded(picture(50, 50, seed=9)))
    whole = pack(root, root / "whole", order="file").path.read_bytes()
    result = pack(root, root / "out", order="file")
    assert 0 < result.kept_blocks < blocks
    assert result.kept_blocks + result.dropped_blocks == blocks
    assert result.path.read_bytes() == whole


def test_other_pictures_or_options_begin_anew(root):
    blocks = stopped(root, root / "out", 80, seed=1)
    assert pack(root, root / "out", seed=2).kept_blocks == 0
    (root / "out" / NAME).unlink()
    assert stopped(root, root / "out", 80, seed=1) == blocks
    (root / "train" / "n00" / "n00_0.JPEG").unlink()
    result = pack(root, root / "out", seed=1)
    assert (result.kept_blocks, result.dropped_blocks) == (0, blocks)
    assert result.header.num_samples == 89


def test_greedy_blocks_are_continued_only_with_the_same_sizes(root):
    whole = pack(root, root / "whole", packing="greedy").path.read_bytes()
    blocks = stopped(root, root / "out", 80, packing="greedy")
    kept = pack(root, root / "out", packing="greedy")
    assert (kept.kept_blocks, kept.path.read_bytes()) == (blocks, whole)
    kept.path.unlink()
    stopped(root, root / "out", 80, packing="greedy")
    (root / "train" / "n02" / "n02_5.JPEG").write_bytes(encoded(picture(9, 9)))
    assert pack(root, root / "out", packing="greedy").kept_blocks == 0


def test_other_versions_of_the_libraries_begin_anew(root, monkeypatch):
    blocks = stopped(root, root / "out", 80, level=1)
    assert blocks > 0
    monkeypatch.setattr("renaissance.data.formats.imagenet_pack.encoder_identity", lambda level: "another")
    result = pack(root, root / "out", 1)
    assert (result.kept_blocks, result.dropped_blocks) == (0, blocks)


def test_repaired_picture_costs_only_the_blocks_after_it(root):
    bad = root / "train" / "n02" / "n02_5.JPEG"  # its name sorts late
    good = bad.read_bytes()
    bad.write_bytes(b"not a picture")
    with pytest.raises(CorruptSample, match=r"n02_5\.JPEG"):
        pack(root, root / "out", order="file")
    bad.write_bytes(good)
    result = pack(root, root / "out", order="file")
    assert result.kept_blocks > 3
    assert result.path.read_bytes() == pack(root, root / "whole", order="file").path.read_bytes()


def test_left_out_pictures_are_known_after_a_kill(root):
    (root / "train" / "n00" / "n00_1.JPEG").write_bytes(b"not a picture")
    whole = pack(root, root / "whole", order="file", on_corrupt="skip")
    stopped(root, root / "out", 60, order="file", on_corrupt="skip")
    with pytest.raises(CorruptSample, match=r"n00_1\.JPEG: not a picture"):
        pack(root, root / "out", order="file")
    stopped(root, root / "out", 60, order="file", on_corrupt="skip")
    result = pack(root, root / "out", order="file", on_corrupt="skip")
    assert result.kept_blocks > 0
    assert [Path(path).name for path, _ in result.left_out] == ["n00_1.JPEG"]
    assert result.path.read_bytes() == whole.path.read_bytes()


def test_full_disk_says_what_to_do_and_costs_no_block(root, monkeypatch):
    whole = pack(root, root / "whole").path.read_bytes()
    real, written = imagenet_part._write, []

    def write(file, offset, data):
        written.append(offset)
        if len(written) > 7:
            real(file, offset, bytes(data)[:100])
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file, offset, data)

    with monkeypatch.context() as patch:
        patch.setattr(imagenet_part, "_write", write)
        with pytest.raises(RenaissanceError) as raised:
            pack(root, root / "out")
    message = str(raised.value)
    assert f"{NAME}: cannot be written: No space left on device; the disk is full: free some space" in message
    assert f"3 blocks are kept in {NAME}.part; the same command continues from there" in message
    assert not (root / "out" / NAME).exists()
    result = pack(root, root / "out")
    assert (result.kept_blocks, result.path.read_bytes()) == (3, whole)


def test_disk_that_is_too_small_is_refused_before_anything_is_written(root, monkeypatch):
    (root / "out").mkdir()
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    with pytest.raises(RenaissanceError, match=r"needs at least 0 MiB more and 0 MiB are free; free some space"):
        pack(root, root / "out")
    assert list((root / "out").iterdir()) == []


def test_two_packers_of_one_target_do_not_meet(root):
    errors = []

    def progress(done: int, total: int) -> None:
        if done == 5:
            with pytest.raises(RenaissanceError, match=r"another process is packing it") as raised:
                pack(root, root / "out")
            errors.append(raised)

    settled = PackOptions(layout=small_layout(0))
    (root / "out").mkdir()
    pack_imagenet(root, root / "out", "train", settled, progress=progress)
    assert len(errors) == 1
    assert parsed(root / "out" / NAME, 0).header["samples"] == 90


def test_source_that_changes_while_it_is_packed_is_noticed(root):
    victim = root / "train" / "n02" / "n02_9.JPEG"

    def progress(done: int, total: int) -> None:
        if done == 3:
            victim.write_bytes(encoded(picture(12, 12)))

    (root / "out").mkdir()
    with pytest.raises(RenaissanceError, match=r"n02_9\.JPEG: had \d+ bytes when packing began and has \d+ now"):
        pack_imagenet(root, root / "out", "train", PackOptions(order="file", layout=small_layout(0)), progress=progress)


def test_journal_is_never_trusted_beyond_its_form(root):
    whole = pack(root, root / "whole").path.read_bytes()
    for damage in (b"[]\n", b"{}\n", b'{"plan": 1}\n', b"\xff\xfe\n", b"[" * 100_000 + b"\n"):
        stopped(root, root / "out", 60)
        journal = root / "out" / f"{NAME}.part.journal"
        lines = journal.read_bytes().splitlines(keepends=True)
        record = json.loads(lines[1]) | {"left_out": [["x"]]}
        for changed in (
            [damage, *lines[1:]],
            [lines[0], damage, *lines[2:]],
            [lines[0], json.dumps(record).encode() + b"\n"],
        ):
            journal.write_bytes(b"".join(changed))
            result = pack(root, root / "out")
            assert (result.kept_blocks, result.path.read_bytes()) == (0, whole)
            result.path.unlink()
            stopped(root, root / "out", 60)
