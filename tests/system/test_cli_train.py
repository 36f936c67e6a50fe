"""``renaissance train`` as a process: ended and resumed it gives the digests of a straight run; its model answers as
the task does."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import picture_sets as sets
import pytest
from PIL import Image
from training_support import (
    COLD_START,
    ROOT,
    VAL,
    children,
    cut_mnist,
    is_alive,
    settings,
    small_task,
    wait_until,
)

from renaissance import GLOBAL_SETTING, PREPROCESSOR_SETTING, BluePrint, fc, relu, seq
from renaissance.cli import main as cli
from renaissance.cli.predict import Preparation
from renaissance.core.errors import PhaseError, ValueRejected
from renaissance.data.formats import open_dataset
from renaissance.data.private_daemon import start_private_daemon
from renaissance.graph import bn, conv, dropout, gap, maxpool
from renaissance.task import DeepLearningTask, read_result
from renaissance.task.models import read_model
from renaissance.task.predict import load_model

NETWORK = """\
from renaissance.graph import BluePrint, bn, conv, fc, gap, maxpool, relu, seq

def net(classes):
    return BluePrint(seq(conv(8, 3, p=1), bn(), relu(), maxpool(4), gap(), fc(classes)))
"""
CONFIG = """\
[settings]
amp = true
manual_seed = 7
global_batch_size = 50
input_resolution = 28
[data]
dataset = ["mnist", "{folder}"]
normalization = "MNIST"
train_transforms = [{{ Pad = 2 }}, {{ RandomCrop = 28 }}]
[model]
file = "{folder}/net.py:net"
[optimizer]
kind = "SGD"
nesterov = true
[scheduler]
kind = "CosineAnnealingLR"
base_lr = 0.05
step_by_batch = true
[task]
total_epochs = 5
use_ema = 0.9
checkpoint_every = {{ steps = 2 }}
learning_curves = false
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cut_mnist(tmp_path_factory.mktemp("mnist"))


def train(*arguments: object) -> int:
    """The command in this process, with settings of its own."""
    with GLOBAL_SETTING.scoped(), PREPROCESSOR_SETTING.scoped():
        return cli.main(["train", *map(str, arguments)])


def test_a_run_ended_by_a_signal_goes_on_where_it_was(data: Path, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    (data / "net.py").write_text(NETWORK)
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.format(folder=data))
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    best = tmp_path / "best.safetensors"
    assert train(config, "--output", straight, "--set", f"task.save_best_model={best}") == 0
    result = read_result(straight)
    told = capsys.readouterr().out
    assert f"data digest     {result['data_digest']}\nweight digest   {result['weight_digest']}\n" in told

    run = [sys.executable, "-m", "renaissance.cli.main", "train", str(config), "--output", str(broken)]
    process = subprocess.Popen(run, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        wait_until((broken / "checkpoints" / "latest").exists, "a checkpoint", COLD_START)
        family = children(process.pid)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + signal.SIGTERM
    wait_until(lambda: not any(map(is_alive, family)), "the daemon's end")
    assert family
    assert not (broken / "result.json").exists()
    assert train(config, "--output", broken, "--resume") == 0
    assert "resume " in capsys.readouterr().out
    for name in ("data_digest", "weight_digest", "ema_digest"):
        assert read_result(broken)[name] == result[name]

    picture = tmp_path / "digit.png"
    pixels = open_dataset("mnist", data, "val").images[3]
    Image.fromarray(pixels[:, :, 0]).save(picture)
    assert cli.main(["predict", str(best), str(picture), "--json", "--top", "10"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    expected = load_model(best).predict(pixels[None])
    assert [found["class"] for found in json.loads(line)["top"]] == expected.top(10)[0].tolist()


def test_a_saved_model_answers_as_its_task(data: Path, tmp_path: Path) -> None:
    stored = open_dataset("mnist", data, "val")
    images, labels = np.asarray(stored.images), np.asarray(stored.labels)
    network = seq(conv(8, 3, p=1), bn(), relu(), maxpool(2), conv(16, 3, 2), bn(), relu(), dropout(0.2), gap(), fc(10))
    with settings(data):
        with pytest.raises(PhaseError, match=r"compile\(\) first"):
            DeepLearningTask().predict(images)
        plain = small_task(1)
        with plain.compile(), pytest.raises(ValueRejected, match="this task keeps no moving averages"):
            plain.save_model(tmp_path / "x.safetensors", ema=True)
        task = small_task(2).model(BluePrint(network)).use_ema(0.8)
        task.compile()
        before = task.predict(images[:5])
        result = task.run()
    assert not np.array_equal(task.predict(images[:5]).probabilities, before.probabilities)
    files = {ema: tmp_path / f"{ema}.safetensors" for ema in (False, True)}
    answers = {}
    for ema, file in files.items():
        task.save_model(file, ema=ema)
        saved = read_model(file)
        assert saved.weights == ("ema" if ema else "main")
        for parameter in task.compiled.parameters:
            assert parameter.ema is not None
            kept = task.engine.read(parameter.ema if ema else parameter.weight)
            assert np.array_equal(saved.tensors[parameter.name].ravel(), kept.ravel())
        told = answers[ema] = task.predict(images, ema=ema)
        loaded = load_model(file, batch=task.compiled.request.val_batch).predict(images)
        assert np.array_equal(told.probabilities, loaded.probabilities)
        assert np.array_equal(told.labels, loaded.labels)
        other = load_model(file, batch=7, threads=1).predict(images)
        np.testing.assert_allclose(other.probabilities, told.probabilities, rtol=0.02, atol=1e-3)
    assert not np.array_equal(answers[False].probabilities, answers[True].probabilities)
    last = result.history[-1]
    assert last.top1 == pytest.approx(np.mean(answers[False].labels == labels), abs=0.5 / VAL)
    assert last.ema_top1 == pytest.approx(np.mean(answers[True].labels == labels), abs=0.5 / VAL)


def test_a_picture_is_prepared_as_the_dataserver_does(tmp_path: Path) -> None:
    sets.make_tree(tmp_path)
    preparation = Preparation(sets.VAL_RECIPE)
    files = sorted((tmp_path / "val").glob("*/*"), key=lambda path: (path.parent.name, path.name))
    with (
        start_private_daemon({"imagenet": tmp_path}, workers=1) as daemon,
        sets.open_pictures(
            daemon.address, split="val", recipe=sets.VAL_RECIPE, shuffle=False, batch_size=32
        ) as station,
    ):
        batch = station.acquire(0, 0)
        assert batch.valid == len(files)
        for row, file in zip(batch.images, files, strict=False):
            assert row.tobytes() == preparation.picture(file).tobytes()
        batch.release()
