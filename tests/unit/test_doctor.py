"""The doctor: every kind of trouble in a folder has one finding with its place, and a good folder has none."""

import io
import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from picture_trees import grow_pictures, small_layout
from PIL import Image
from source_builders import packed

from renaissance.cli import main as cli
from renaissance.core.errors import MissingFileError, ValueRejected
from renaissance.data import doctor
from renaissance.data.doctor import Options, Report, Severity, examine
from renaissance.data.doctor import machine as machine_checks
from renaissance.data.doctor.files import spread
from renaissance.data.doctor.rate import rate_per_core, usual_recipe
from renaissance.data.formats.dts import write_dts
from renaissance.data.formats.imagenet_pack import PackOptions, pack_imagenet

PROBLEM, WARNING, NOTE = Severity.PROBLEM, Severity.WARNING, Severity.NOTE


def picture(
    width: int = 40, height: int = 30, mode: str = "RGB", kind: str = "JPEG", seed: int = 0, **save: object
) -> bytes:
    """An encoded picture of noise."""
    shape = (height, width) if mode in ("L", "P", "I;16") else (height, width, len(mode))
    pixels = np.random.default_rng([seed, width]).integers(0, 256, shape, dtype=np.uint8)
    made = io.BytesIO()
    if mode == "I;16":
        Image.fromarray(pixels.astype(np.uint16) * 257).save(made, kind)
    elif mode == "P":
        Image.fromarray(pixels).convert("P").save(made, kind)
    else:
        Image.fromarray(pixels, mode).save(made, kind, **save)
    return made.getvalue()


def turned(data: bytes, orientation: int) -> bytes:
    exif = b"Exif\0\0MM\0*\0\0\0\x08" + struct.pack(">HHHIHHI", 1, 0x0112, 3, 1, orientation, 0, 0)
    return data[:2] + b"\xff\xe1" + struct.pack(">H", 2 + len(exif)) + exif + data[2:]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A healthy tree of three classes."""
    for split, count in (("train", 4), ("val", 2)):
        for label, name in enumerate(("n01", "n02", "n03")):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                (folder / f"{i}.JPEG").write_bytes(picture(seed=100 * label + 10 * i + len(split)))
    return tmp_path


@pytest.fixture(autouse=True)
def _known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle machine with plenty of everything; the rate is not measured."""
    monkeypatch.setattr(machine_checks, "available_memory", lambda: 1 << 34)
    monkeypatch.setattr(machine_checks.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(machine_checks, "allowed_cpus", lambda: tuple(range(machine_checks.os.cpu_count() or 1)))
    monkeypatch.setattr(machine_checks, "cpu_quota", lambda: None)
    monkeypatch.setattr(machine_checks.resource, "getrlimit", lambda _: (4096, 4096))
    monkeypatch.setattr(doctor, "rate_per_core", lambda *_: 100.0)


def found(report: Report, text: str) -> list[tuple[Severity, str, int]]:
    return [(f.severity, f.subject, f.count) for f in report.findings if text in f"{f.text}; {f.advice}"]


def test_a_healthy_set_has_no_findings(root):
    report = examine("imagenet", root)
    assert report.findings == []
    train = report.facts["train"]
    assert (train["samples"], train["classes"], train["examined"], train["median_size"]) == (12, 3, 12, [40, 30])
    assert report.facts["memory"]["load"] == "fully"
    assert report.facts["rate"]["samples_per_second_and_core"] == 100


@pytest.mark.parametrize(
    ("data", "severity", "text"),
    [
        pytest.param(picture()[:-300], PROBLEM, "cannot be decoded", id="cut"),
        pytest.param(b"", PROBLEM, "cannot be decoded", id="empty"),
        pytest.param(b"GIF89a" + bytes(99), PROBLEM, "cannot be decoded", id="gif"),
        pytest.param(picture(kind="PNG"), NOTE, "are PNG under the name of a JPEG", id="png"),
        pytest.param(picture(mode="RGBA", kind="PNG"), NOTE, "have transparency", id="alpha"),
        pytest.param(picture(mode="P", kind="PNG"), NOTE, "have a palette", id="palette"),
        pytest.param(picture(mode="I;16", kind="PNG"), NOTE, "16 bits a value", id="16 bit"),
        pytest.param(picture(mode="L"), NOTE, "are grey", id="grey"),
        pytest.param(picture(mode="CMYK"), NOTE, "are CMYK", id="cmyk"),
        pytest.param(picture(progressive=True), NOTE, "are progressive JPEG", id="progressive"),
        pytest.param(turned(picture(), 6), WARNING, "have an Exif orientation", id="turned"),
        pytest.param(picture(1, 1), WARNING, "have a side of at most 16 pixels", id="tiny"),
        pytest.param(picture(400, 90), NOTE, "4 times as long as wide", id="long"),
        pytest.param(picture(4000, 3001, mode="L"), NOTE, "more than 12 megapixels", id="huge"),
    ],
)
def test_an_unusual_picture_is_named(root, data, severity, text):
    path = root / "train" / "n02" / "1.JPEG"
    path.write_bytes(data)
    report = examine("imagenet", root)
    assert found(report, text) == [(severity, "train", 1)]
    finding = next(f for f in report.findings if text in f.text)
    assert finding.text.startswith("1 of 12 ")
    assert finding.examples[0].startswith(str(path))


def test_a_turned_picture_that_is_upright_is_no_finding(root):
    (root / "train" / "n02" / "1.JPEG").write_bytes(turned(picture(), 1))
    assert examine("imagenet", root).findings == []


def test_examples_are_few_and_counts_are_whole_whatever_the_threads(root):
    for i in range(10, 40):
        (root / "train" / "n01" / f"{i}.JPEG").write_bytes(picture(mode="L", seed=i))
    one, many = (examine("imagenet", root, Options(threads=n)) for n in (1, 4))
    assert one.to_json()["findings"] == many.to_json()["findings"]
    finding = next(f for f in one.findings if "are grey" in f.text)
    assert (finding.count, len(finding.examples)) == (30, 5)


def test_a_sample_covers_the_whole_set():
    assert list(spread(10, 3)) == [0, 4, 9]
    assert list(spread(3, 10)) == [0, 1, 2]
    assert list(spread(1, 1)) == [0]


def test_what_would_not_be_read_is_said(root):
    (root / "train" / "n01" / "x.png").write_bytes(picture(kind="PNG"))
    (root / "train" / "n02" / "list.txt").touch()
    (root / "train" / "n03" / "more").mkdir()
    report = examine("imagenet", root)
    assert found(report, "pictures of other types are not read") == [(WARNING, "train", 1)]
    assert found(report, "other files are left alone: 1 .txt") == [(NOTE, "train", 1)]
    assert found(report, "folders inside class folders") == [(WARNING, "train", 1)]
    assert report.number_of(PROBLEM) == 0


def test_everything_wrong_with_a_tree_is_said_at_once(root):
    shutil.rmtree(root / "val" / "n01")
    (root / "val" / "n77").mkdir()
    (root / "val" / "loose.JPEG").write_bytes(picture())
    (root / "train" / "empty").mkdir()
    (root / "train" / "n01" / "link.JPEG").symlink_to(root / "train" / "n01" / "0.JPEG")
    report = examine("imagenet", root)
    assert found(report, "class folders without a picture") == [(PROBLEM, "train", 1), (WARNING, "val", 1)]
    assert found(report, "not among those of train") == [(PROBLEM, "val", 1)]
    assert found(report, "classes of train are missing") == [(WARNING, "val", 2)]  # n01 and empty
    assert found(report, "outside a class folder") == [(PROBLEM, "val", 1)]
    assert found(report, "links, which are not followed") == [(PROBLEM, "train", 1)]


def test_a_missing_split_is_a_problem_and_the_other_is_examined(root):
    shutil.rmtree(root / "val")
    report = examine("imagenet", root)
    assert [(f.severity, f.subject) for f in report.findings] == [(PROBLEM, "val")]
    assert report.facts["train"]["examined"] == 12


def test_a_tree_beside_packed_files_is_not_what_is_examined(root):
    for split in ("train", "val"):
        packed("RAW", split).write(root)
    (root / "train" / "empty").mkdir()
    report = examine("imagenet", root)
    assert (report.facts["train"]["format"], report.facts["train"]["level"]) == ("dts", "RAW")
    assert report.facts["train"]["examined"] == 8
    assert report.number_of(PROBLEM) == 0
    assert found(examine("imagenet", root, Options(format="raw")), "class folders without") == [(PROBLEM, "train", 1)]


def test_packed_splits_of_two_trees_are_not_of_one_set(root, tmp_path_factory):
    other, out = tmp_path_factory.mktemp("other"), tmp_path_factory.mktemp("out")
    grow_pictures(other, classes=3, each=1)
    grow_pictures(other, classes=3, each=1, split="val")
    layout = small_layout(0)
    for tree, split in ((root, "train"), (other, "val")):
        pack_imagenet(tree, out, split, PackOptions(layout=layout))
    report = examine("imagenet", out)
    assert found(report, "label 0 is class n00, in train it is class n01") == [(PROBLEM, "val", 1)]
    (out / "imagenet_val_lv0.dts").unlink()
    pack_imagenet(root, out, "val", PackOptions(layout=layout))
    assert examine("imagenet", out).number_of(PROBLEM) == 0


def test_a_damaged_packed_set_of_pictures_is_found_when_all_is_looked_at(root):
    path = packed("RAW", "train").write(root)
    packed("RAW", "val").write(root)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert examine("imagenet", root).number_of(PROBLEM) == 0
    assert found(examine("imagenet", root, Options(samples=None)), "CRC-32 of the body") == [(PROBLEM, "train", 1)]


def test_duplicates_are_found_inside_and_across_splits(root):
    shutil.copy(root / "train" / "n01" / "0.JPEG", root / "val" / "n01" / "again.JPEG")
    shutil.copy(root / "train" / "n01" / "0.JPEG", root / "train" / "n03" / "again.JPEG")
    report = examine("imagenet", root, Options(duplicates=True))
    assert found(report, "samples are also in train") == [(WARNING, "val", 1)]
    assert found(report, "repeat an earlier one") == [(NOTE, "train", 1)]
    example = next(f for f in report.findings if "also in train" in f.text).examples[0]
    assert example == f"{root}/train/n01/0.JPEG = {root}/val/n01/again.JPEG"
    assert found(examine("imagenet", root), "also in train") == []


# -- sets of small images -----------------------------------------------------------------------------------------


@pytest.fixture
def ten(tmp_path: Path) -> Path:
    """A packed CIFAR-10 whose validation set lacks class 9."""
    generator = np.random.default_rng(1)
    for split, classes in (("train", 10), ("val", 9)):
        labels = np.arange(3 * classes, dtype=np.uint8) % classes
        images = generator.integers(0, 256, (labels.size, 32, 32, 3), dtype=np.uint8)
        name = "cifar10_train.dts" if split == "train" else "cifar10_test.dts"
        write_dts(tmp_path / name, "cifar10", split, labels, images)
    return tmp_path


def test_classes_without_samples_are_named(ten):
    report = examine("cifar10", ten)
    assert found(report, "1 of 10 classes have no samples") == [(WARNING, "val", 1)]
    assert report.findings[0].examples == ("class 9",)
    assert report.facts["val"]["smallest_class"] == 0


def test_a_damaged_packed_file_is_a_problem(ten):
    data = bytearray((ten / "cifar10_train.dts").read_bytes())
    data[5000] ^= 1
    (ten / "cifar10_train.dts").write_bytes(data)
    report = examine("cifar10", ten)
    assert found(report, "CRC-32 of the body") == [(PROBLEM, "train", 1)]
    assert report.facts["val"]["samples"] == 27


def test_small_images_are_compared_too(ten):
    labels, images = np.arange(10, dtype=np.uint8), np.zeros((10, 32, 32, 3), np.uint8)
    write_dts(ten / "cifar10_train.dts", "cifar10", "train", labels, images)
    report = examine("cifar10", ten, Options(duplicates=True))
    assert found(report, "repeat an earlier one") == [(NOTE, "train", 9)]


# -- the machine --------------------------------------------------------------------------------------------------


def test_a_quota_is_said(root, monkeypatch):
    monkeypatch.setattr(machine_checks, "allowed_cpus", lambda: (0, 1, 2, 3))
    monkeypatch.setattr(machine_checks, "cpu_quota", lambda: 2.5)
    report = examine("imagenet", root)
    assert report.facts["cores"]["usable"] == 2
    assert found(report, "the cgroup allows 2.5 CPUs' worth of time on 4 CPUs")[0][:2] == (NOTE, "cores")


def test_few_open_files_and_a_busy_machine_are_said(root, monkeypatch):
    monkeypatch.setattr(machine_checks.resource, "getrlimit", lambda _: (256, 4096))
    monkeypatch.setattr(machine_checks.os, "getloadavg", lambda: (999.0, 0.0, 0.0))
    report = examine("imagenet", root)
    assert found(report, "may have 256 files open; ulimit -n 1024")
    assert found(report, "the machine is busy")


def test_memory_decides_how_to_load(root, ten, monkeypatch):
    # Two files each: the tree's 20 KB of pictures, or images of one size, which are always kept in memory.
    stored = examine("imagenet", root).facts["memory"]["set_bytes"]
    monkeypatch.setattr(machine_checks, "available_memory", lambda: 2 * stored)
    report = examine("imagenet", root)
    assert report.facts["memory"]["load"] == "partial"
    assert found(report, "would fit into memory") == [(NOTE, "memory", 1)]
    monkeypatch.setattr(machine_checks, "available_memory", lambda: 1000)
    assert found(examine("cifar10", ten), "load it partly") == [(PROBLEM, "memory", 1)]


@pytest.mark.parametrize(("wanted", "severity"), [(0.5, None), (0.9, WARNING), (1.5, PROBLEM)])
def test_the_rate_is_compared_with_what_is_wanted(root, wanted, severity):
    cores = examine("imagenet", root).facts["cores"]["usable"]
    report = examine("imagenet", root, Options(rate=wanted * 100 * cores))
    assert [f.severity for f in report.findings if f.subject == "rate"] == ([] if severity is None else [severity])
    assert report.facts["rate"]["headroom"] == round(1 / wanted, 2)


def test_a_rate_is_measured_on_the_set_itself(root, ten):
    report = Report("x", "y")
    for name, folder, size in (("imagenet", root, 24), ("cifar10", ten, 32)):
        splits = doctor.open_splits(doctor.dataset_info(name), folder, "auto", None, False, report)
        assert rate_per_core(splits[0], range(2), 24, seconds=0.01) > 0
        assert usual_recipe(splits[0], 24).resolution == size
        for stored in splits:
            stored.close()


def test_options_that_make_no_sense_are_refused(root):
    with pytest.raises(ValueRejected, match="samples is 0"):
        examine("imagenet", root, Options(samples=0))
    with pytest.raises(ValueRejected, match="rate is -1"):
        examine("imagenet", root, Options(rate=-1))
    with pytest.raises(MissingFileError, match="nowhere: no such folder"):
        examine("imagenet", root / "nowhere")


# -- the command --------------------------------------------------------------------------------------------------


def test_the_command_ends_with_the_verdict(root, capsys):
    assert cli.main(["doctor", "imagenet", str(root)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"imagenet in {root}"
    assert out[-1] == "0 problems, 0 warnings, 0 notes"
    (root / "val" / "n01" / "0.JPEG").write_bytes(b"no picture")
    assert cli.main(["doctor", "imagenet", str(root), "--all", "--rate", "1"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == "1 problem, 0 warnings, 0 notes"
    assert any(line.startswith("problem   val: 1 of 6 pictures cannot be decoded") for line in out)
    assert any(line.strip().startswith(f"{root}/val/n01/0.JPEG: not a picture") for line in out)


def test_the_command_speaks_json(root, capsys):
    assert cli.main(["doctor", "imagenet", str(root), "--json", "--sample", "2"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert (plain["dataset"], plain["problems"], plain["facts"]["train"]["examined"]) == ("imagenet", 0, 2)


@pytest.mark.parametrize(
    "arguments", [["--all", "--sample", "3"], ["--sample", "0"], ["--rate", "0"], ["--level", "9"]]
)
def test_the_command_refuses_contradictions(root, capsys, arguments):
    assert cli.main(["doctor", "imagenet", str(root), *arguments]) == 1
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("arguments", [["--all"], ["--sample", "0"], ["--resolution", "99"], ["--level", "0"]])
def test_options_of_pictures_are_refused_for_small_images(ten, capsys, arguments):
    assert cli.main(["doctor", "cifar10", str(ten), *arguments]) == 1
    assert capsys.readouterr().err.startswith("error: ")
