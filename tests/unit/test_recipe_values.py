"""A recipe is a checked, serialisable, hashable value; what is impossible is refused by name."""

from __future__ import annotations

import dataclasses
import json
import random

import numpy as np
import pytest
from recipe_cases import MNIST_CHAIN, pictures, random_recipe, rows

from renaissance.core.dtype import DType
from renaissance.core.enums import NormMode
from renaissance.core.errors import DTypeError, RenaissanceError, ShapeError, ValueRejected
from renaissance.data.compile import compile_recipe
from renaissance.data.recipe import Normalization, Recipe
from renaissance.data.transforms import (
    LISTABLE,
    FusedNormalization,
    Pad,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomRotation,
    RandomScale,
    Transform,
)

MNIST = Recipe.build(MNIST_CHAIN, NormMode.MNIST, 28, 1)
IMPOSSIBLE: list[tuple[list[object], str]] = [
    ([RandomCrop(32)], r"transform 0 \(RandomCrop\) leaves 32x32 pixels, but the resolution is 28x28"),
    ([RandomCrop(28), Pad(2)], r"transform 1 \(Pad\) leaves 32x32"),
    ([RandomErasing(0.5), RandomCrop(28), RandomErasing(0.1)], r"transform 2 \(RandomErasing\) is already transform 0"),
    ([RandomHorizontalFlip(), RandomHorizontalFlip()], r"transform 1 \(RandomHorizontalFlip\) is already transform 0"),
    ([RandomRotation(5), Pad(2, mode="edge"), RandomCrop(28)], r"transform 1 \(Pad\): mode 'edge' cannot follow tra"),
    ([Pad(2, (1, 2, 3)), RandomCrop(28)], r"transform 0 \(Pad\): fill has 3 values; expected 1 or 1"),
    ([FusedNormalization((0.0,), (1.0,), None, None)], r"transform 0 \(FusedNormalization\) cannot be listed"),
    (["RandomCrop"], r"transform 0 \(str\) is not a transform"),
    (
        [RandomScale(1 / 64, 1), RandomScale(1 / 64, 1), RandomScale(0.5, 1)],
        r"transform 2 \(RandomScale\).* 8192 times",
    ),
]
BAD_VALUES = [
    (lambda: Pad(-1), "Pad: padding is -1"),
    (lambda: Pad(1.5), "Pad: padding is 1.5"),  # type: ignore[arg-type]
    (lambda: Pad(1, fill=256), "Pad: fill is 256"),
    (lambda: Pad(1, fill=(1, 2)), "Pad: fill has 2 values"),
    (lambda: Pad(1, mode="mirror"), "Pad: mode is 'mirror'; expected one of: constant, edge, reflect, symmetric"),
    (lambda: Pad(1, fill=3, mode="edge"), "Pad: fill is 3 in mode 'edge'"),
    (lambda: RandomCrop(0), "RandomCrop: size is 0"),
    (lambda: RandomCrop(True), "RandomCrop: size is True"),
    (lambda: RandomRotation(-1), "RandomRotation: degrees is -1"),
    (lambda: RandomRotation(float("nan")), "RandomRotation: degrees is nan"),
    (lambda: RandomRotation(np.ones(2)), "RandomRotation: degrees is array([1., 1.]); expected a number"),  # type: ignore[arg-type]
    (lambda: RandomRotation(10**400), "RandomRotation: degrees is inf"),
    (lambda: RandomScale(1.2, 0.8), "RandomScale: min_ratio 1.2 is above max_ratio 0.8"),
    (lambda: RandomScale(0, 1), "RandomScale: min_ratio is 0"),
    (lambda: RandomErasing(1.1), "RandomErasing: p is 1.1"),
    (lambda: RandomErasing(0.5, scale=(0.5, 0.2)), "RandomErasing: scale is"),
    (lambda: RandomErasing(0.5, ratio=(0, 1)), "RandomErasing: ratio is"),
    (lambda: RandomErasing(0.5, scale=0.3), "RandomErasing: scale is 0.3; expected two numbers"),  # type: ignore[arg-type]
    (lambda: RandomHorizontalFlip(-0.1), "RandomHorizontalFlip: p is -0.1"),
    (lambda: Normalization((0.5,), (0.0,)), "normalization: std is"),
    (lambda: Normalization((0.5, 0.5), (1.0, 1.0)), "normalization: mean is"),
    (lambda: Normalization((0.5,), (float("inf"),)), "normalization: std is"),
    (lambda: Normalization((0.5,), (1.0,), "MNIST"), "are not the constants of MNIST"),
    (lambda: Normalization.preset(NormMode.CIFAR, 1), "normalization CIFAR has constants for 3"),
    (lambda: Recipe.build([], NormMode.NO_NORM, 0, 1), "recipe: resolution is 0"),
    (lambda: Recipe.build([], NormMode.NO_NORM, 28, 2), "recipe: color_channels is 2"),
    (lambda: Recipe.build([], NormMode.NO_NORM, 28, True), "recipe: color_channels is True"),
    (
        lambda: Recipe.from_json(
            Recipe.build([], NormMode.MNIST, 28, 1).to_json().replace('channels":1', 'channels":1.0')
        ),
        "recipe: color_channels is 1.0",
    ),
    (lambda: Recipe.build([], Normalization((0.0,), (1.0,)), 28, 3), "recipe: normalization CUSTOM has 1 channel"),
]


@pytest.mark.parametrize(("transforms", "message"), IMPOSSIBLE)
def test_an_impossible_chain_is_refused_by_name(transforms: list[Transform], message: str) -> None:
    with pytest.raises(ValueRejected, match=message):
        Recipe.build(transforms, NormMode.MNIST, 28, 1)


@pytest.mark.parametrize(("make", "message"), BAD_VALUES, ids=[m for _, m in BAD_VALUES])
def test_a_bad_value_is_refused_by_name(make: object, message: str) -> None:
    with pytest.raises(ValueRejected) as caught:
        make()  # type: ignore[operator]
    assert message in str(caught.value)


@pytest.mark.parametrize("transform", [RandomErasing(0.5), RandomHorizontalFlip(), RandomRotation(1), RandomCrop(28)])
def test_a_validation_recipe_takes_no_random_transform(transform: Transform) -> None:
    with pytest.raises(ValueRejected, match=rf"transform 1 \({transform.name}\) draws random numbers"):
        Recipe.build([Pad(0), transform], NormMode.MNIST, 28, 1, validation=True)
    random_one = Recipe.build([Pad(0), transform], NormMode.MNIST, 28, 1)
    with pytest.raises(ValueRejected, match=rf"transform 1 \({transform.name}\) draws random numbers"):
        rows(random_one, pictures(1, 28, 28, 1), [0], dtype=DType.FP32, validation=True)


def test_a_validation_recipe_may_pad() -> None:
    assert not Recipe.build([Pad(2)], NormMode.MNIST, 32, 1, validation=True).is_random


def test_the_size_of_the_sources_is_checked_when_compiling() -> None:
    with pytest.raises(ValueRejected, match=r"transform 0 \(Pad\) leaves 32x32 pixels from a 28x28 source"):
        compile_recipe(Recipe.build([Pad(2)], NormMode.MNIST, 28, 1), 28, 28, 1)
    with pytest.raises(ValueRejected, match="the chain leaves 20x30 pixels"):
        compile_recipe(Recipe.build([], NormMode.MNIST, 28, 1), 20, 30, 1)
    with pytest.raises(ShapeError, match="3 channels, the recipe 1"):
        compile_recipe(MNIST, 28, 28, 3)
    with pytest.raises(ShapeError, match="padded_channels is 0"):
        compile_recipe(MNIST, 28, 28, 1, DType.FP32, 0)


def test_uint8_needs_no_norm_and_other_types_are_refused() -> None:
    with pytest.raises(ValueRejected, match="uint8 delivers pixels as they are, but normalization is MNIST"):
        compile_recipe(MNIST, 28, 28, 1, DType.UINT8)
    with pytest.raises(DTypeError, match="cannot be delivered as INT32"):
        compile_recipe(MNIST, 28, 28, 1, DType.INT32)


def test_process_checks_what_it_is_given() -> None:
    compiled = compile_recipe(MNIST, 28, 28, 1)
    images = pictures(3, 28, 28, 1)
    out, hashes = np.zeros((2, compiled.row_bytes), np.uint8), np.zeros(2, np.uint64)
    ids, at = np.array([0, 3]), np.array([0, 1])
    with pytest.raises(ValueRejected, match="position 1 asks for picture 3 of 3"):
        compiled.process(images, ids, ids, 1, 0, False, out, at, hashes)
    assert not out.any(), "nothing may be written when a position is out of range"
    with pytest.raises(ValueRejected, match=r"position 0 .* in row 2 of 2"):
        compiled.process(images, np.array([0]), np.array([7]), 1, 0, False, out, np.array([2]), hashes)
    with pytest.raises(ValueRejected, match=r"position 1 .* as sample -1 in row 1"):
        compiled.process(images, at, np.array([0, -1]), 1, 0, False, out, at, hashes)
    with pytest.raises(ShapeError, match=r"images are \(3, 28, 28\)"):
        compiled.process(images[..., 0], at, at, 1, 0, False, out, at, hashes)
    with pytest.raises(ShapeError, match="out is"):
        compiled.process(images, at, at, 1, 0, False, out[:, :-1], at, hashes)
    with pytest.raises(DTypeError, match="rows is int32"):
        compiled.process(images, at, at, 1, 0, False, out, at.astype(np.int32), hashes)
    with pytest.raises(DTypeError, match="out is uint8; expected a contiguous"):
        compiled.process(images, at, at, 1, 0, False, np.zeros((4, compiled.row_bytes), np.uint8)[::2], at, hashes)
    with pytest.raises(ValueRejected, match="seed is -1"):
        compiled.process(images, at, at, -1, 0, False, out, at, hashes)
    with pytest.raises(ValueError, match="epoch is -1"):
        compiled.process(images, at, at, 1, -1, False, out, at, hashes)


@pytest.mark.parametrize("case", range(20))
def test_json_gives_an_equal_recipe_back(case: int) -> None:
    recipe = random_recipe(random.Random(case), 3, 12, normalized=True)
    again = Recipe.from_json(recipe.to_json())
    assert again == recipe
    assert hash(again) == hash(recipe)
    assert again.to_json() == recipe.to_json()
    assert again.fingerprint() == recipe.fingerprint()


def test_every_listable_transform_is_exported_by_its_name() -> None:
    assert sorted(LISTABLE) == [
        "CenterCrop",
        "ColorJitter",
        "DoNothing",
        "FastRandomResizedCrop",
        "GaussianBlur",
        "GaussianNoise",
        "Pad",
        "RandomAutocontrast",
        "RandomCrop",
        "RandomErasing",
        "RandomGrayscale",
        "RandomHorizontalFlip",
        "RandomResizedCrop",
        "RandomRotation",
        "RandomScale",
        "Resize",
    ]


JSON_DAMAGE = [
    (lambda p: p["transforms"].append({"type": "Solarize"}), "transform 5: unknown transform 'Solarize'; expected one"),
    (lambda p: p["transforms"][1].update(size=-3), "transform 1: RandomCrop: size is -3"),
    (lambda p: p["transforms"][1].update(colour=1), "transform 1: RandomCrop: unknown argument 'colour'"),
    (lambda p: p["transforms"][0].pop("mode"), "transform 0: Pad: argument 'mode' is missing"),
    (lambda p: p["transforms"][0].pop("type"), 'transform 0: expected an object with a "type"'),
    (lambda p: p["transforms"][0].update(fill=[[1]]), "transform 0: Pad: fill is (1,)"),
    (lambda p: p.update(transforms=3), "transforms is 3; expected a list"),
    (lambda p: p.update(version=99), "version is 99; this program knows 1"),
    (lambda p: p.update(extra=1), "expected the keys"),
    (lambda p: p.update(resolution="28"), "resolution is '28'"),
    (lambda p: p["normalization"].update(name="IMAGENET"), "are not the constants of IMAGENET"),
    (lambda p: p["normalization"].update(mean="0.1"), "mean is '0.1'"),
    (lambda p: p["normalization"].pop("std"), "expected an object with mean, std and name"),
]


@pytest.mark.parametrize(("damage", "message"), JSON_DAMAGE, ids=[m for _, m in JSON_DAMAGE])
def test_damaged_json_is_refused_by_name(damage: object, message: str) -> None:
    plain = json.loads(MNIST.to_json())
    damage(plain)  # type: ignore[operator]
    with pytest.raises(RenaissanceError) as caught:
        Recipe.from_json(json.dumps(plain))
    assert message in str(caught.value).replace("[1]", "(1,)")


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 100_000])
def test_text_that_is_no_recipe_is_refused(text: str) -> None:
    with pytest.raises(ValueRejected, match="recipe: "):
        Recipe.from_json(text)


def test_fingerprints_are_stable() -> None:
    assert MNIST.fingerprint() == "3c43aca7efda75dee356a5806fd617f6bda591c358cedb4a984c2d54f133bca5"
    assert (
        Recipe.build([], NormMode.CIFAR, 32, 3).fingerprint()
        == "0a40938b39fc742608e09620c9444cc460a2ae0ae10624ef1c5a14cda9c528b9"
    )


def test_fingerprints_differ_for_every_argument() -> None:
    base = [
        Pad(2),
        RandomCrop(28),
        RandomRotation(20),
        RandomScale(0.8, 1.2),
        RandomErasing(0.5),
        RandomHorizontalFlip(),
    ]
    seen = {Recipe.build(base, NormMode.MNIST, 28, 1).fingerprint()}
    others: list[list[Transform]] = [base[1:], [*base[::-1][:4], Pad(2), RandomCrop(28)]]
    changes = {
        0: [Pad(3), Pad(2, 1), Pad(2, mode="edge")],
        2: [RandomRotation(21), RandomRotation(20, 1)],
        3: [RandomScale(0.7, 1.2), RandomScale(0.8, 1.3)],
        4: [RandomErasing(0.4), RandomErasing(0.5, (0.03, 0.33)), RandomErasing(0.5, ratio=(0.3, 3.4))],
        5: [RandomHorizontalFlip(0.4)],
    }
    for index, transforms in changes.items():
        others += [[*base[:index], transform, *base[index + 1 :]] for transform in transforms]
    for chain in others:
        seen.add(Recipe.build(chain, NormMode.MNIST, 28, 1).fingerprint())
    seen.add(Recipe.build(base, NormMode.NO_NORM, 28, 1).fingerprint())
    seen.add(Recipe.build([*base[:1], RandomCrop(27), *base[2:]], NormMode.MNIST, 27, 1).fingerprint())
    assert len(seen) == 3 + len(others)


def test_equal_values_written_differently_are_one_recipe() -> None:
    a = Recipe.build([RandomRotation(20), Pad(0, [4])], NormMode.MNIST, 28, 1)
    b = Recipe.build([RandomRotation(20.0), Pad(np.int64(0), 4)], NormMode.MNIST, 28, 1)  # type: ignore[arg-type]
    assert a == b
    assert a.fingerprint() == b.fingerprint()


def test_recipes_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        MNIST.resolution = 3  # type: ignore[misc]
