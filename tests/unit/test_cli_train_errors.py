"""``renaissance train`` without training: what a dry run shows, and one line for everything that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from renaissance.cli import main as cli
from renaissance.core.settings import GLOBAL_SETTING
from renaissance.data.preprocessor import PREPROCESSOR_SETTING

MNIST = Path(__file__).parents[2] / "data" / "mnist"
NETWORK = """\
from renaissance.graph import BluePrint, fc, seq, relu

def net(classes):
    return BluePrint(seq(fc(16), relu(), fc(classes)))
"""
FILE = """\
[settings]
manual_seed = 5
global_batch_size = 100
input_resolution = 28
[data]
dataset = ["mnist", "{mnist}"]
normalization = "MNIST"
[model]
file = "{folder}/net.py:net"
[optimizer]
kind = "AdamW"
[scheduler]
kind = "ConstantLR"
[task]
total_epochs = 3
"""


@pytest.fixture
def train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """The command on a file in a folder of its own, with settings of its own."""
    (tmp_path / "net.py").write_text(NETWORK)
    path = tmp_path / "run.toml"
    path.write_text(FILE.format(mnist=MNIST, folder=tmp_path))

    def train(*arguments: object, file: Path = path) -> tuple[int, str, str]:
        with GLOBAL_SETTING.scoped(), PREPROCESSOR_SETTING.scoped():
            code = cli.main(["train", str(file), *(str(a) for a in arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return train


def test_a_dry_run_shows_the_plan_and_leaves_nothing(train, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    code, out, err = train("--dry-run", "--output", tmp_path / "out", "--set", "task.total_epochs=4")
    assert code == 0
    assert out.startswith(
        f"dry run of 4 epochs on mnist in {MNIST}\ntrain      60000 samples, 600 steps of 100 an epoch\n"
    )
    assert err == ""
    assert not (tmp_path / "out").exists()
    assert train("--dry-run", "--set", "model.zoo=lenet5")[2].startswith("error: ")  # beside [model] file


def test_whatever_is_wrong_is_one_line(train, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    cases: list[tuple[tuple[object, ...], str]] = [
        (("--set", "task.total_epochs"), "--set task.total_epochs: expected SECTION.KEY=VALUE"),
        (("--set", "task.total_epoch=3"), "--set task.total_epoch is unknown; did you mean total_epochs?"),
        (("--set", "optimizer.kind=Adamw"), "--set optimizer.kind is 'Adamw'; did you mean AdamW?"),
        (("--set", 'optimizer.kind=["SGD"]'), "--set optimizer.kind is ['SGD']; did you mean SGD?"),
        (("--set", "task.total_epochs=1000000000000"), "expected at most 1000000"),
        (("--set", "task.grad_clip=1e-50"), "grad_clip is 1e-50; expected a number above 0"),
        (("--set", "settings.input_resolution=32"), "run.toml: [data]: "),
        (("--set", 'data.dataset=["mnist", "/nowhere"]'), "/nowhere: no such folder"),
        (("--set", "settings.use_gpu=0"), "--set settings.use_gpu: 0; expected text"),
        (
            ("--set", 'settings.use_gpu="99"'),
            "use_gpu: GPU 99 asked for, but ",
        ),
        (("--set", f"model.file={tmp_path}/net.py:nets"), "net.py: there is no 'nets'"),
        (("--set", f"model.file={tmp_path}/nets.py:net"), "nets.py: no such file"),
        (
            ("--set", "task.validate_every=5", "--set", "task.early_stop_by_top1=0.9", "--dry-run"),
            "needs a validated epoch",
        ),
        (("--resume", "--dry-run"), "output folder for resume(True)"),
        (("--set", "task.use_sema=1"), "--set task.use_sema: 1; expected true or false"),
    ]
    for arguments, message in cases:
        code, out, err = train(*arguments)
        assert (code, out) == (1, ""), arguments
        assert message in err
        assert err.count("\n") == 1
        assert "unexpected" not in err
    assert train(file=tmp_path / "x.toml")[2] == (
        f"error: {tmp_path / 'x.toml'}: no such file; expected a training configuration in TOML\n"
    )
