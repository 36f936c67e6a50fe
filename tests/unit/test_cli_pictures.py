"""The commands on pictures: pack imagenet, inspect and verify, from the command line to what they print."""

from pathlib import Path

import pytest
from picture_trees import encoded, grow_pictures, picture
from source_builders import packed, put, u32

from renaissance.cli import main as cli


@pytest.fixture
def run(capsys):
    def run(*arguments: object) -> tuple[int, str, str]:
        code = cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def pack(run, root: Path, output: Path, *options: object) -> tuple[int, str, str]:
    return run("pack", "imagenet", "--input", root, "--output", output, "--jobs", 1, *options)


def test_both_splits_are_packed_verified_and_inspected(run, tmp_path):
    grow_pictures(tmp_path, classes=2, each=3)
    grow_pictures(tmp_path, classes=2, each=1, split="val")
    code, out, err = pack(run, tmp_path, tmp_path / "out", "--level", "RAW", "--short-side", 20)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert "imagenet_train_raw.dts: packed 6 pictures of 2 classes in 1 blocks, 32 MiB, CRC-32 " in lines[0]
    assert "imagenet_val_raw.dts: packed 2 pictures of 2 classes in 1 blocks" in lines[1]
    assert "up to date, 6 pictures" in pack(run, tmp_path, tmp_path / "out", "--level", "RAW", "--short-side", 20)[1]
    assert "(short_side); --force replaces it" in pack(run, tmp_path, tmp_path / "out", "--level", "RAW")[2]

    code, out, _ = run("verify", tmp_path / "out", tmp_path, "--decode", "--jobs", 1)
    assert code == 0
    assert [line[:6] for line in out.splitlines()] == ["ok    "] * 4
    assert "folder tree, 6 pictures of 2 classes, all decoded" in out

    code, out, _ = run("inspect", tmp_path / "out" / "imagenet_val_raw.dts", tmp_path)
    assert code == 0
    assert "   20  compress level               100\n" in out
    assert "       classes       2: n00, n01\n" in out
    assert "       short_side    20\n" in out
    assert "val: folder tree, 2 pictures" in out
    assert "       pictures a class   3 to 3\n" in out


def test_pictures_that_are_left_out_are_listed(run, tmp_path):
    grow_pictures(tmp_path, classes=1, each=2)
    (tmp_path / "train" / "n00" / "bad.JPEG").write_bytes(b"GIF89a...")
    code, _, err = pack(run, tmp_path, tmp_path / "out", "--split", "train")
    assert code == 1
    assert "train/n00/bad.JPEG: the picture is a GIF file" in err
    code, out, _ = pack(run, tmp_path, tmp_path / "out", "--split", "train", "--on-corrupt", "skip", "--order", "file")
    assert code == 0
    assert "bad.JPEG: the picture is a GIF file" in out.splitlines()[1]
    assert out.splitlines()[1].startswith("left out ")
    assert out.splitlines()[2].endswith("imagenet_train_lv0.dts: 1 pictures left out")


def test_classes_come_from_a_list(run, tmp_path):
    grow_pictures(tmp_path, classes=1, each=1, split="val")
    (tmp_path / "list").write_text("a\nb\nn00\n")
    code, out, _ = pack(run, tmp_path, tmp_path / "out", "--split", "val", "--classes", tmp_path / "list")
    assert code == 0
    assert "1 pictures of 3 classes" in out


def test_missing_split_is_noticed_before_the_other_is_packed(run, tmp_path):
    grow_pictures(tmp_path, classes=1, each=1)
    code, out, err = pack(run, tmp_path, tmp_path / "out")
    assert (code, out) == (1, "")
    assert "val: no such folder; expected class folders in it" in err
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [("--level", 1), ("--jobs", 2), ("--no-resume",), ("--restart-windows", "on"), ("--seed", 0), ("--classes", "x")],
)
def test_options_of_pictures_are_refused_for_other_sets(run, tmp_path, options):
    code, _, err = run("pack", "mnist", "--input", tmp_path, "--output", tmp_path, *options)
    assert code == 1
    assert err.startswith(f"error: pack mnist: {options[0].replace('--no-', '--resume/--no-')[:8]}")
    assert "acts for imagenet only" in err


def test_verify_names_what_is_wrong_with_a_packed_file(run, tmp_path):
    good = encoded(picture(9, 9))
    file = packed(0)
    file.blocks = [[(good, 0)] * 2, [(good, 1), (b"not a picture", 2)]]
    path = file.write(tmp_path)
    code, out, err = run("verify", path)
    assert code == 1
    assert "DTS, 4 pictures of 5 classes, CRC-32" in out
    assert "1 pictures cannot be used" in out
    assert "lv0.dts, picture 3 (block 1, offset 13248): not a picture: it begins with" in out
    assert "1 of 1 files failed" in err

    put(path, 4096 + 8, u32(21))
    assert "CRC-32 of the body" in run("verify", path)[1]
    put(path, 3000, b"!")
    assert "offset 3000: reserved byte is 33; expected 0" in run("verify", path)[1]
    path.rename(tmp_path / "imagenet_val_lv0.dts")
    assert "this is the other split" in run("verify", tmp_path)[1]


def test_number_of_processes_changes_no_word_of_verify(run, tmp_path, monkeypatch):
    monkeypatch.setattr("renaissance.data.formats.imagenet_verify.CHUNK", 4)
    grow_pictures(tmp_path, classes=1, each=35)
    for number in (0, 3, 34):
        (tmp_path / "train" / "n00" / f"n00_{number}.JPEG").write_bytes(b"no")
    one = run("verify", tmp_path, "--decode", "--jobs", 1)
    assert one == run("verify", tmp_path, "--decode", "--jobs", 2)
    assert "3 pictures cannot be used" in one[1]
    assert "verify: --jobs acts together with --decode" in run("verify", tmp_path, "--jobs", 2)[2]
    assert "jobs is 0; expected 1 to 256" in run("verify", tmp_path, "--decode", "--jobs", 0)[2]


def test_only_decoding_finds_damage_behind_the_header_of_a_picture(run, tmp_path):
    whole = encoded(picture(90, 90), quality=95)
    file = packed(0)
    file.blocks = [[(whole, 0), (whole[: len(whole) // 2], 1)]]
    path = file.write(tmp_path)
    assert run("verify", path)[0] == 0
    code, out, _ = run("verify", path, "--decode", "--jobs", 1)
    assert code == 1
    assert "picture 1 (block 0" in out


@pytest.mark.parametrize(
    ("offset", "word", "message"),
    [
        (16, 0, "offset 16: is training set is 0; expected 1"),
        (24, 1, "offset 24: validation set preprocessed is 1; expected 0"),
        (28, 1025, "offset 28: number of classes is 1025; expected 1;"),
        (104, 7, "offset 104: largest picture area is 7; expected "),
        (108, 3, "offset 108: most pictures in one block is 3; expected 2;"),
        (112, 0x3F800000, "offset 112: compression ratio is 1.0; expected "),
    ],
)
def test_numbers_without_a_checksum_are_compared_in_our_own_files(run, tmp_path, offset, word, message):
    grow_pictures(tmp_path, classes=1, each=2)
    pack(run, tmp_path, tmp_path / "out", "--split", "train")
    path = (tmp_path / "out" / "imagenet_train_lv0.dts").rename(tmp_path / "renamed.dts")
    put(path, offset, u32(word))
    code, out, _ = run("verify", path)
    assert code == 1
    assert message in out


def test_every_bad_picture_of_a_tree_is_found(run, tmp_path):
    grow_pictures(tmp_path, classes=1, each=3)
    for number in range(25):
        (tmp_path / "train" / "n00" / f"bad{number}.jpg").write_bytes(b"no")
    code, out, _ = run("verify", tmp_path)
    assert code == 1
    assert "28 pictures of 1 classes; 25 pictures cannot be used" in out
    assert out.count("train/n00/bad") == 20
    assert "and 5 more" in out


def test_damaged_extension_is_a_problem_that_inspect_shows(run, tmp_path):
    grow_pictures(tmp_path, classes=1, each=1)
    pack(run, tmp_path, tmp_path / "out", "--split", "train")
    path = tmp_path / "out" / "imagenet_train_lv0.dts"
    put(path, 4120, b"\0")
    code, out, _ = run("inspect", path)
    assert code == 1
    assert "  problem: offset 4096: extension: CRC-32" in out
    assert "offset 4096: extension: CRC-32" in run("verify", path)[1]
