"""``renaissance plan``: what it prints and writes, and how it refuses."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from renaissance import zoo
from renaissance.cli import main as cli
from renaissance.graph import build_arch_plan
from renaissance.graph.cost import model_cost

MODELS = """\
from renaissance.graph import BluePrint, conv, fc, gap_fc, relu, seq
import beside

net = BluePrint(seq(conv(beside.WIDTH, 3), relu(), gap_fc(7)))
layer = seq(fc(3))
width = 3

def make(classes):
    return seq(fc(classes))

def fails(classes):
    raise KeyError("x")
"""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("WIDTH = 6\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "ends.py").write_text("raise SystemExit(0)\n")
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    return path


def test_a_model_of_the_zoo_is_shown_with_its_cost(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "lenet5"]) == 0
    plan = build_arch_plan(zoo.model("lenet5"), zoo.entry("lenet5").input, 10)
    assert capsys.readouterr().out == f"{plan.text()}\n{model_cost(plan).text()}"
    assert cli.main(["plan", "nin", "--classes", "7", "--input", "16x16x3", "--show", "arch"]) == 0
    assert capsys.readouterr().out.startswith(
        "ArchPlan: 15 layers, input [1,16,16,3], 7 classes, first weights in conv1"
    )


def test_the_compiled_model_is_shown_and_drawn_as_asked(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [f"{models}:net", "--input", "8x8x3", "--batch", "4", "--dtype", "bf16", "--optimizer", "adamw"]
    assert cli.main(["plan", *given, "--show", "train,infer,memory,atlas"]) == 0
    out = capsys.readouterr().out
    heads = ["ComputationGraph train", "ComputationGraph infer", "MemoryPlan train_base", "GraphAtlas"]
    assert [out.index(head) for head in heads] == sorted(out.index(head) for head in heads)
    assert "RANGE_UPDATE_ADAMW" in out
    assert "[4,6,6,6]" in out

    assert cli.main(["plan", *given, "--dot", str(tmp_path / "g.dot"), "--svg", str(tmp_path / "g.svg")]) == 0
    assert capsys.readouterr().out == ""
    assert (tmp_path / "g.dot").read_text().startswith('digraph "train" {')
    ElementTree.parse(tmp_path / "g.svg")
    for draw in ("arch", "infer"):
        assert cli.main(["plan", *given[:3], "--draw", draw, "--svg", str(tmp_path / f"{draw}.svg")]) == 0
        ElementTree.parse(tmp_path / f"{draw}.svg")
    assert cli.main(["plan", f"{models}:make", "--input", "2x2x3", "--classes", "4"]) == 0
    assert cli.main(["plan", f"{models}:layer", "--input", "2x2x3"]) == 0
    assert "input [1,2,2,3], 3 classes" in capsys.readouterr().out


def test_what_cannot_be_done_is_said_in_one_line(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = models.parent
    cases = [
        (["lenet6"], "no model 'lenet6' in the zoo; expected one of: lenet5"),
        (["lenet5", "--classes", "0"], "--classes is 0"),
        (["lenet5", "--input", "4x4x1"], "layer conv1: kernel 5 does not fit the padded height 4"),
        (["lenet5", "--batch", "8"], "--batch acts on the compiled model; show or draw one of: train"),
        (["lenet5", "--optimizer", "adam", "--show", "arch"], "--optimizer acts on the compiled model"),
        (["lenet5", "--dtype", "bf16", "--draw", "arch", "--svg", str(tmp_path / "x.svg")], "--dtype acts on"),
        (["lenet5", "--draw", "arch"], "--draw says what --dot and --svg draw"),
        (["lenet5", "--dot", "x", "--svg", "x"], "--dot and --svg are both x"),
        (["lenet5", "--svg", str(tmp_path / "no" / "x.svg")], "x.svg: cannot be written"),
        (["lenet5", "--batch", "0", "--show", "train"], "train_batch is 0"),
        ([f"{models}"], "expected FILE.py:NAME"),
        ([f"{models}:net"], "give --input HxWxC"),
        ([f"{models}:nothing", "--input", "8x8x3"], "there is no 'nothing'; BluePrints in it: net, layer"),
        ([f"{models}:width", "--input", "8x8x3"], "models.py:width is 3; expected a BluePrint"),
        ([f"{models}:make", "--input", "8x8x3"], "is a function of the number of classes; give --classes"),
        ([f"{models}:fails", "--input", "8x8x3", "--classes", "3"], "models.py:fails(3): KeyError: 'x'"),
        ([f"{models}:net", "--input", "8x8x3", "--classes", "3"], "fc1: it gives 7 outputs, but the data set has 3"),
        ([f"{folder}/broken.py:net", "--input", "8x8x3"], "broken.py: ZeroDivisionError: division by zero"),
        ([f"{folder}/ends.py:net", "--input", "8x8x3"], "ends.py: SystemExit: 0"),
        ([f"{folder}/none.py:net", "--input", "8x8x3"], "none.py: no such file"),
    ]
    for arguments, message in cases:
        assert cli.main(["plan", *arguments]) == 1, arguments
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1, arguments
        assert message in lines[0]
    for wrong in (["--input", "8x8"], ["--input", "0x8x3"], ["--show", "arch,all"], ["--dtype", "int8"]):
        assert cli.main(["plan", "lenet5", *wrong]) == 2
    assert sorted(p.suffix for p in tmp_path.iterdir() if p.is_file()) == [".py"] * 4  # nothing was left behind
