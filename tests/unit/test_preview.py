"""``renaissance preview``: the pictures it shows are those that a session delivers; text of transforms is never run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from picture_trees import grow_pictures, picture, small_layout
from PIL import Image

from renaissance.cli.main import main
from renaissance.core.dtype import DType
from renaissance.core.enums import NormMode
from renaissance.core.errors import ValueRejected
from renaissance.data.compile import compile_recipe
from renaissance.data.formats.dts import layout_of, write_dts
from renaissance.data.formats.imagenet_pack import PackOptions, pack_imagenet
from renaissance.data.pictures import compile_pictures
from renaissance.data.preview import Samples, preview
from renaissance.data.recipe import Recipe
from renaissance.data.sheet import Cell, SheetRow, contact_sheet
from renaissance.data.sources import Encoding
from renaissance.data.transform_text import transform_from_text, transform_to_text
from renaissance.data.transforms import (
    LISTABLE,
    ColorJitter,
    Pad,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
)

CROP = [RandomResizedCrop(16), RandomHorizontalFlip()]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tree")
    grow_pictures(root)
    return root


def mnist(folder: Path) -> np.ndarray:
    images = np.random.default_rng(1).integers(0, 256, (20, 28, 28, 1), np.uint8)
    write_dts(
        folder / layout_of("mnist").file_name("train"), "mnist", "train", np.arange(20, dtype=np.uint8) % 10, images
    )
    return images


def run(*arguments: object) -> int:
    return main([str(a) for a in arguments])


def test_small_images_are_those_of_a_normalised_session(tmp_path: Path) -> None:
    images = mnist(tmp_path)
    recipe = Recipe.build([Pad(2), RandomCrop(28)], NormMode.MNIST, resolution=28, color_channels=1)
    with Samples("mnist", tmp_path, "train") as samples:
        shown = list(preview(samples, recipe, [3, 19], seed=5, epochs=[0, 7]))
    compiled = compile_recipe(recipe, 28, 28, 1, DType.FP32)
    for one in shown:
        assert (one.stored == images[one.sample]).all()
        for made, epoch in zip(one.results, (0, 7), strict=True):
            out = np.zeros((1, compiled.row_bytes), np.uint8)
            zero, hashes = np.zeros(1, np.int64), np.zeros(1, np.uint64)
            compiled.process(images, np.array([one.sample]), np.array([one.sample]), 5, epoch, False, out, zero, hashes)
            values = out.view(np.float32).reshape(28, 28, 1)
            assert (np.rint((values * 0.3081 + 0.1307) * 255) == made).all()


@pytest.mark.parametrize("level", [None, 0, "RAW"])
def test_pictures_are_those_of_a_session_whatever_the_form(tree: Path, tmp_path: Path, level: int | str | None) -> None:
    folder = tree
    if level is not None:
        folder = tmp_path
        pack_imagenet(tree, folder, "train", PackOptions(level=level, order="file", layout=small_layout(level)))
    recipe = Recipe.build(CROP, NormMode.IMAGENET, resolution=16)
    plain = Recipe.build(CROP, resolution=16)
    made = compile_pictures(plain, DType.UINT8)
    row = np.zeros(made.row_bytes, np.uint8)
    with Samples("imagenet", folder, "train") as samples:
        (one,) = preview(samples, recipe, [11], seed=5, epochs=[2])
        encoding = Encoding.RAW if level == "RAW" else Encoding.PICTURES
        made.make(samples.stored(11), encoding, 11, 5, 2, False, row)
        assert one.stored is not None
        assert one.stored.shape == (37, 24 + 9 + 3, 3)
        assert samples.label_text(11) == ("label 1 n01" if level is None else "label 1")
    assert (one.results[0].reshape(-1) == row).all()


def test_sheet_has_the_same_bytes_every_time_and_other_draws_change_it(tree: Path, tmp_path: Path) -> None:
    chain = ["--transforms", "RandomResizedCrop(16)", "RandomHorizontalFlip"]
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        path = tmp_path / f"{name}.png"
        assert run("preview", "imagenet", tree, *chain, "--samples", "0,9", "--seed", seed, "-o", path) == 0
    a, b, c = ((tmp_path / f"{name}.png").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_sheet_shows_the_pixels_where_it_says(tmp_path: Path) -> None:
    pixels = np.asarray(picture(16, 16))
    sheet = contact_sheet(
        ["heading"], [SheetRow("title", [Cell(pixels, "stored"), Cell(pixels[:, ::-1], "epoch 0")])], 112
    )
    found = np.asarray(sheet)
    enlarged = pixels.repeat(7, 0).repeat(7, 1)
    places = [
        (y, x)
        for y in range(found.shape[0] - 111)
        for x in (16, 16 + 112 + 8)
        if (found[y, x : x + 112] == enlarged[0]).all() or (found[y, x : x + 112] == enlarged[0, ::-1]).all()
    ]
    (y, x), (y2, x2) = places[0], next(place for place in places if place[1] != places[0][1])
    assert y == y2
    assert (found[y : y + 112, x : x + 112] == enlarged).all()
    assert (found[y : y + 112, x2 : x2 + 112] == enlarged[:, ::-1]).all()


def test_damaged_picture_is_shown_as_such_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grow_pictures(tmp_path, classes=2, each=2)
    (tmp_path / "train/n01/n01_0.JPEG").write_bytes(b"no picture")
    code = run(
        *("preview", "imagenet", tmp_path, "--transforms", "RandomResizedCrop(16)"),
        *("--samples", "0,2", "-o", tmp_path / "s.png"),
    )
    assert code == 1
    assert "cannot be decoded" in capsys.readouterr().out
    Image.open(tmp_path / "s.png").verify()


def test_recipe_file_and_validation_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mnist(tmp_path)
    random = Recipe.build([RandomErasing(0.5)], NormMode.MNIST, resolution=28, color_channels=1)
    (tmp_path / "r.json").write_text(random.to_json())
    common = ["preview", "mnist", tmp_path, "--recipe", tmp_path / "r.json", "-o", tmp_path / "s.png"]
    assert run(*common, "--random", 2, "--draws", 2) == 0
    assert run(*common, "--samples", "20") == 1
    assert "sample 20 of mnist train does not exist; it has 20" in capsys.readouterr().err
    assert run(*common, "--samples", "1,x") == 1
    assert run(*common, "--decode", "fast") == 1
    assert run(*common, "--draws", 0) == 1
    assert run("preview", "mnist", tmp_path, "--transforms", "RandomCrop(28)", "--level", 0, "-o", "s.png") == 1
    errors = capsys.readouterr().err
    assert "only packed pictures have levels" in errors
    assert not Path("s.png").exists()


def test_pictures_need_a_crop_or_resize_first(tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("preview", "imagenet", tree, "--transforms", "ColorJitter(0.4)", "-o", tmp_path / "s.png") == 1
    assert "first transform must be a crop or a resize" in capsys.readouterr().err


@pytest.mark.parametrize("name", LISTABLE)
def test_every_transform_has_a_text_that_gives_it_back(name: str) -> None:
    given = {"RandomCrop": (32,), "RandomScale": (0.5, 2), "RandomErasing": (0.25,)}.get(name, ())
    transform = LISTABLE[name](*given)
    assert transform_from_text(transform_to_text(transform)) == transform
    if not given:
        assert transform_from_text(name) == transform


def test_numbers_pairs_and_fractions() -> None:
    expected = RandomResizedCrop(224, 0.08, 1.0, 3 / 4, 4 / 3)
    assert transform_from_text(" RandomResizedCrop(224, 0.08, 1.0, 3/4, 4/3) ") == expected
    assert transform_from_text("RandomResizedCrop(224, ratio=(3/4, 4/3))") == expected
    assert transform_from_text("ColorJitter(0.4, hue=1e-1)") == ColorJitter(0.4, hue=0.1)
    assert transform_from_text("Pad(4, mode='reflect')") == Pad(4, mode="reflect")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Crop(3)",
        "RandomCrop",
        "RandomCrop(28, 28)",
        "RandomCrop(width=28)",
        "RandomCrop(28",
        "RandomCrop(28); import os",
        "RandomCrop(__import__('os'))",
        "RandomCrop(exit())",
        "RandomCrop(7 ** 7)",
        "RandomCrop(28/0)",
        "RandomCrop(size)",
        "RandomCrop(*[28])",
        "RandomCrop(**{'size': 28})",
        "RandomCrop(28)(28)",
        "transforms.RandomCrop(28)",
        "RandomCrop({28})",
        "RandomCrop(2j)",
        "Pad(fill=" + "(" * 400,
        "Pad(" + "1/" * 450 + "1)",
        "RandomCrop(" + "9" * 900 + ")",
        "x" * 2000,
    ],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueRejected):
        transform_from_text(text)
