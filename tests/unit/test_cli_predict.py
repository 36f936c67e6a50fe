"""``renaissance predict`` and ``export``: pictures, models for other runtimes, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from PIL import Image
from test_task_models import CLASSES, POOLED, SIDE, saved_model

from renaissance.cli import main as cli
from renaissance.cli.predict import Preparation
from renaissance.core.dtype import DType
from renaissance.core.enums import NormMode
from renaissance.core.errors import FormatError, ValueRejected
from renaissance.data.pictures import compile_pictures
from renaissance.data.recipe import Recipe
from renaissance.data.sources import Encoding
from renaissance.data.transforms import CenterCrop, Resize
from renaissance.task.models import SavedModel, write_model
from renaissance.task.predict import load_model

PHOTOS = Recipe.build([Resize(16), CenterCrop(SIDE)], NormMode.IMAGENET, resolution=SIDE, color_channels=3)
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: object) -> tuple[int, str, str]:
        code = cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def photo_model() -> SavedModel:
    return replace(saved_model(POOLED), recipe=PHOTOS)


def photograph(width: int, height: int, seed: int) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height))


def test_pictures_are_classified_as_validation_would(run: Run, tmp_path: Path, photo_model: SavedModel) -> None:
    model = tmp_path / "m.safetensors"
    write_model(model, photo_model)
    files = [tmp_path / name for name in ("a.jpg", "b.png", "c.bmp", "d.webp")]
    for seed, file in enumerate(files):
        photograph(40 + 3 * seed, 33, seed).save(file)
    rows = [Preparation(PHOTOS).picture(file) for file in files]
    stored = compile_pictures(PHOTOS, DType.FP32)
    for file, row in zip(files[:2], rows, strict=False):  # the bytes of a data set's picture
        made = np.zeros(stored.row_bytes, np.uint8)
        stored.make(np.frombuffer(file.read_bytes(), np.uint8), Encoding.PICTURES, 7, 3, 2, True, made)
        assert made.tobytes() == row.tobytes()
    lossless = tmp_path / "c.png"
    Image.open(files[2]).save(lossless)
    assert np.array_equal(Preparation(PHOTOS).picture(lossless), rows[2])

    expected = load_model(model, batch=4).predict(np.stack(rows))
    code, out, err = run("predict", model, *files, "--json", "--top", 9)
    assert (code, err) == (0, "")
    for line, file, row in zip(out.splitlines(), files, expected.probabilities, strict=True):
        told = json.loads(line)
        assert told["picture"] == str(file)
        assert [found["class"] for found in told["top"]] == list(np.argsort(-row, kind="stable"))
        assert [found["probability"] for found in told["top"]] == [round(float(p), 6) for p in np.sort(row)[::-1]]

    names = tmp_path / "names.txt"
    names.write_text("".join(f"kind {i}\n" for i in range(CLASSES)))
    code, out, _ = run("predict", model, files[0], "--classes", names, "--top", 1, "--threads", 1)
    best = int(expected.labels[0])
    assert (code, out) == (0, f"{files[0]}: kind {best} {expected.probabilities[0, best]:.1%}\n")


def test_pictures_of_one_size_are_taken_as_they_are(run: Run, tmp_path: Path) -> None:
    model = saved_model(POOLED)
    write_model(tmp_path / "m.safetensors", model)
    picture = photograph(SIDE, SIDE, 1)
    picture.save(tmp_path / "a.png")
    pixels = np.asarray(picture)[None]
    norm = model.recipe.normalization
    row = Preparation(model.recipe).picture(tmp_path / "a.png")
    np.testing.assert_array_equal(row, ((pixels[0] / 255.0 - norm.mean) / norm.std).astype(np.float32))
    photograph(40, 30, 1).save(tmp_path / "wide.png")
    code, out, err = run("predict", tmp_path / "m.safetensors", tmp_path / "wide.png")
    assert (code, out) == (1, "")
    assert (
        f"error: {tmp_path / 'wide.png'}: the picture has 40 x 30 pixels, which the model's recipe does not take" in err
    )


def test_deep_pixels_keep_their_high_byte_or_are_refused(run: Run, tmp_path: Path) -> None:
    grey = Recipe.build([], NormMode.MNIST, resolution=SIDE, color_channels=1)
    preparation, pixels = Preparation(grey), np.arange(SIDE * SIDE, dtype=np.uint8).reshape(SIDE, SIDE)
    Image.fromarray(pixels).save(tmp_path / "8.png")
    Image.fromarray(pixels.astype(np.uint16) * 257).save(tmp_path / "16.png")
    assert np.array_equal(preparation.picture(tmp_path / "16.png"), preparation.picture(tmp_path / "8.png"))
    Image.fromarray(pixels.astype(np.float32)).save(tmp_path / "f.tiff")
    with pytest.raises(ValueRejected, match=r"f\.tiff: its pixels have 32 bits \(mode F\); expected 8 or 16"):
        preparation.picture(tmp_path / "f.tiff")
    (tmp_path / "bad.ppm").write_bytes(b"P5\n28x28\n255\n")
    with pytest.raises(FormatError, match=r"bad\.ppm: cannot be read as a picture: invalid literal"):
        preparation.picture(tmp_path / "bad.ppm")


def test_what_cannot_be_predicted_is_named(run: Run, tmp_path: Path, photo_model: SavedModel) -> None:
    model, photo, text, names = (tmp_path / n for n in ("m.safetensors", "a.jpg", "b.jpg", "names.txt"))
    write_model(model, photo_model)
    photograph(20, 20, 0).save(photo)
    text.write_text("no picture")
    (tmp_path / "cut.jpg").write_bytes(photo.read_bytes()[:200])
    names.write_text("one\ntwo\n")
    broken = tmp_path / "nan.safetensors"
    write_model(broken, replace(photo_model, tensors={k: v * np.nan for k, v in photo_model.tensors.items()}))
    cases: list[tuple[list[object], str]] = [
        ([tmp_path / "x.safetensors", photo], "x.safetensors: no such file; expected a model saved as .safetensors"),
        ([photo, photo], "a.jpg: is not a safetensors file"),
        ([model, tmp_path / "x.jpg"], "x.jpg: no such file"),
        ([model, text], "b.jpg: cannot be read as a picture"),
        ([model, tmp_path / "cut.jpg"], "cut.jpg: "),
        ([model, photo, "--top", 0], "--top is 0; expected at least 1"),
        ([model, photo, "--classes", names], "names.txt: 2 lines; expected 5, one per class of the model"),
        ([model, photo, "--classes", photo], "a.jpg: is not text in UTF-8"),
        ([model, photo, "--classes", tmp_path / "x.txt"], "x.txt: no such file"),
        ([model, photo, "--threads", 0], "threads"),
        ([broken, photo], "a.jpg: the model's numbers are not finite"),
    ]
    for arguments, message in cases:
        code, out, err = run("predict", *arguments)
        assert (code, out) == (1, ""), arguments
        assert err.startswith("error: ")
        assert message in err
        assert err.count("\n") == 1
        assert "unexpected" not in err


def test_an_exported_model_takes_the_resolution_of_validation(
    run: Run, tmp_path: Path, photo_model: SavedModel
) -> None:
    side = SIDE + 4  # validated larger than it was trained
    larger = replace(photo_model, recipe=Recipe.build([Resize(side)], NormMode.IMAGENET, side, 3, validation=True))
    write_model(tmp_path / "m.safetensors", larger)
    code, out, _ = run("export", tmp_path / "m.safetensors", tmp_path / "m.onnx")
    assert code == 0
    assert (
        out
        == f"{tmp_path / 'm.onnx'}: images [N,3,{side},{side}] float32, (pixel / 255 - mean) / std, to logits [N,5]\n"
    )
    images = np.random.default_rng(1).standard_normal((3, side, side, 3)).astype(np.float32)
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"images": np.ascontiguousarray(images.transpose(0, 3, 1, 2))})
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    expected = load_model(tmp_path / "m.safetensors").predict(images).probabilities
    np.testing.assert_allclose(odds / odds.sum(axis=1, keepdims=True), expected, rtol=2e-4, atol=1e-6)

    assert run("export", tmp_path / "m.safetensors", tmp_path / "m.pb")[2] == (
        f"error: export: {tmp_path / 'm.pb'}; expected a name that ends in .onnx\n"
    )
    assert "no such file" in run("export", tmp_path / "x.safetensors", tmp_path / "x.onnx")[2]
    assert not (tmp_path / "x.onnx").exists()
