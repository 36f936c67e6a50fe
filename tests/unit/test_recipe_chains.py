"""Chains of every transform: what is refused, which segments a list falls into, decode modes, other resolutions."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest

from renaissance.core.enums import NormMode
from renaissance.core.errors import ValueRejected
from renaissance.data.chain import MAX_TRANSFORMS
from renaissance.data.recipe import DECODE_MODES, Normalization, Recipe
from renaissance.data.resolution import ProgressiveResolution, SteppedResolution
from renaissance.data.transforms import (
    LISTABLE,
    CenterCrop,
    ColorJitter,
    DoNothing,
    FastRandomResizedCrop,
    GaussianBlur,
    GaussianNoise,
    Kind,
    Pad,
    RandomAutocontrast,
    RandomCrop,
    RandomErasing,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomScale,
    Resize,
    Transform,
    transform_from_dict,
)

EVERY: tuple[Transform, ...] = (
    RandomResizedCrop(40, (0.1, 0.9), (0.5, 2)),
    RandomHorizontalFlip(0.3),
    ColorJitter(0.1, 0.2, 0.3, 0.4),
    Pad(3, (1, 2, 3)),
    RandomRotation(12, 7),
    RandomScale(0.5, 1.5),
    GaussianBlur(0.3, 1.5),
    DoNothing(),
    Resize(32),
    CenterCrop(28),
    FastRandomResizedCrop(30),
    RandomAutocontrast(0.4),
    RandomGrayscale(0.2),
    GaussianNoise(1, 9, False),
    RandomErasing(0.2),
    RandomCrop(24),
)
TRAIN = Recipe.build(EVERY, NormMode.IMAGENET, 24)

BAD_VALUES = [
    (lambda: Resize(0), "Resize: size is 0"),
    (lambda: CenterCrop(8193), "CenterCrop: size is 8193; expected 1 to 8192"),
    (lambda: RandomResizedCrop(0), "RandomResizedCrop: size is 0"),
    (lambda: RandomResizedCrop(8, (0.0, 1.0)), "RandomResizedCrop: scale is"),
    (lambda: RandomResizedCrop(8, (0.5, 0.1)), "RandomResizedCrop: scale is (0.5, 0.1); expected 0 < smallest"),
    (lambda: RandomResizedCrop(8, (0.5, 1.1)), "RandomResizedCrop: scale is 1.1; expected 0 to 1"),
    (lambda: RandomResizedCrop(8, 0.5), "RandomResizedCrop: given (0.5,"),
    (lambda: RandomResizedCrop(8, 0.5, 1.0, 0.7), "RandomResizedCrop: given (0.5, 1.0, 0.7) after size"),
    (lambda: RandomResizedCrop(8, (0.5, 1.0), (1, 2), 3), "RandomResizedCrop: given (3,) after a pair"),
    (lambda: FastRandomResizedCrop(8, (0.5, 1.0), (0, 1)), "FastRandomResizedCrop: ratio is 0.0; expected 1e-06"),
    (lambda: FastRandomResizedCrop(8, ratio=1.5), "FastRandomResizedCrop: ratio is 1.5; expected two numbers"),
    (lambda: ColorJitter(-0.1), "ColorJitter: brightness is -0.1"),
    (lambda: ColorJitter(contrast=float("nan")), "ColorJitter: contrast is nan"),
    (lambda: ColorJitter(saturation="1"), "ColorJitter: saturation is '1'"),
    (lambda: ColorJitter(hue=0.6), "ColorJitter: hue is 0.6; expected 0 to 0.5"),
    (lambda: RandomGrayscale(1.5), "RandomGrayscale: p is 1.5"),
    (lambda: RandomAutocontrast(-1), "RandomAutocontrast: p is -1"),
    (lambda: GaussianBlur(0, 1), "GaussianBlur: sigma is (0.0, 1.0)"),
    (lambda: GaussianBlur(2, 1), "GaussianBlur: sigma is (2.0, 1.0)"),
    (lambda: GaussianNoise(sigma=-1), "GaussianNoise: sigma is -1"),
    (lambda: GaussianNoise(mean=256), "GaussianNoise: mean is 256"),
    (lambda: GaussianNoise(clip=1), "GaussianNoise: clip is 1; expected True or False"),
    (lambda: Recipe.build([], resolution=8, decode="quick"), "recipe: decode is 'quick'; expected one of: scaled, ex"),
    (lambda: ProgressiveResolution(0, 8, 2), "ProgressiveResolution: begin is 0"),
    (lambda: ProgressiveResolution(9, 8, 2), "ProgressiveResolution: begin 9 is above end 8"),
    (lambda: ProgressiveResolution(7, 8, 0), "ProgressiveResolution: epochs is 0"),
    (lambda: ProgressiveResolution(7, 8, 2).at(-1), "ProgressiveResolution: epoch is -1"),
    (lambda: SteppedResolution(()), "SteppedResolution: steps is ()"),
    (lambda: SteppedResolution((0, 8)), "SteppedResolution: steps is (0, 8); expected pairs"),  # type: ignore[arg-type]
    (lambda: SteppedResolution(((1, 8),)), "SteppedResolution: epochs are [1]; expected 0 first"),
    (lambda: SteppedResolution(((0, 8), (0, 9))), "SteppedResolution: epochs are [0, 0]"),
    (lambda: SteppedResolution(((0, 8), (3, 0))), "SteppedResolution: pixels of step 1 is 0"),
]
IMPOSSIBLE: list[tuple[list[object], int, str]] = [
    ([Resize(9)], 3, r"transform 0 \(Resize\) leaves 9x9 pixels, but the resolution is 8x8"),
    ([Resize(8), Pad(1)], 3, r"transform 1 \(Pad\) leaves 10x10"),
    ([DoNothing(), CenterCrop(7)], 3, r"transform 1 \(CenterCrop\) leaves 7x7"),
    (
        [Resize(8), ColorJitter(0.1)],
        1,
        r"transform 1 \(ColorJitter\) needs colour pictures of 3 channels, these have 1",
    ),
    ([RandomGrayscale(), Resize(8)], 1, r"transform 0 \(RandomGrayscale\) needs colour pictures"),
    ([Resize(8), RandomRotation(3), Pad(1, mode="edge"), RandomCrop(8)], 3, r"transform 2 \(Pad\): mode 'edge'"),
    ([Normalization((0.5,), (0.5,))], 1, r"transform 0 \(Normalization\) cannot be listed; give it as normalization"),
    ([Transform()], 3, r"transform 0 \(Transform\) is not a transform"),
    ([DoNothing()] * (MAX_TRANSFORMS + 1), 3, r"recipe: 257 transforms; at most 256"),
]


@pytest.mark.parametrize(("make", "message"), BAD_VALUES, ids=[m for _, m in BAD_VALUES])
def test_a_bad_value_is_refused_by_name(make: object, message: str) -> None:
    with pytest.raises(ValueRejected) as caught:
        make()  # type: ignore[operator]
    assert message in str(caught.value)


@pytest.mark.parametrize(("transforms", "channels", "message"), IMPOSSIBLE, ids=[m for _, _, m in IMPOSSIBLE])
def test_an_impossible_chain_is_refused_by_name(transforms: list[Transform], channels: int, message: str) -> None:
    with pytest.raises(ValueRejected, match=message):
        Recipe.build(transforms, NormMode.NO_NORM, 8, channels)


@pytest.mark.parametrize("transform", [t for t in EVERY if t.random], ids=lambda t: t.name)
def test_a_validation_recipe_takes_no_random_transform(transform: Transform) -> None:
    with pytest.raises(ValueRejected, match=rf"transform 1 \({transform.name}\) draws random numbers"):
        Recipe.build([DoNothing(), transform, Resize(8)], NormMode.NO_NORM, 8, validation=True)


def test_the_usual_validation_recipe_of_imagenet_is_accepted() -> None:
    recipe = Recipe.build([Resize(256), CenterCrop(224)], NormMode.IMAGENET, 224, validation=True)
    assert recipe.require_variable_sizes() == (0, Resize(256))


@pytest.mark.parametrize("transform", EVERY, ids=lambda t: t.name)
def test_json_gives_an_equal_transform_back(transform: Transform) -> None:
    again = transform_from_dict(json.loads(json.dumps(transform.to_dict())))
    assert again == transform
    assert type(again) is type(transform)
    assert hash(again) == hash(transform)


def test_the_page_lists_every_transform_with_its_arguments_and_defaults() -> None:
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    table = dict(re.findall(r"^\| (\w+) \|([^|]*)\|", page, re.MULTILINE))
    for name, cls in LISTABLE.items():
        assert name in table, f"docs/recipes.md does not list {name}"
        listed = re.sub(r"\([^()]*(one value|\")[^()]*\)", "", table[name])
        if listed.strip() == "the same":
            listed = table["RandomResizedCrop"]
        given = inspect.signature(cls).parameters.values()
        wanted = [p for p in given if p.kind is not inspect.Parameter.VAR_POSITIONAL]
        assert [word.split("=")[0].strip() for word in re.split(r",(?![^(]*\))", listed) if word.strip()] == [
            p.name for p in wanted
        ]
        for parameter in wanted:
            default = re.search(rf"\b{parameter.name}=((\([^)]*\))|[^,]+)", listed)
            assert (default is None) == (parameter.default is inspect.Parameter.empty), (name, parameter)
            if default is not None:
                assert eval(default[1], {}) == parameter.default, (name, parameter)  # the page's text, not input


def test_a_random_resized_crop_may_be_given_in_pairs_or_in_numbers() -> None:
    pairs = RandomResizedCrop(224, (0.08, 1.0), (3 / 4, 4 / 3))
    assert pairs == RandomResizedCrop() == RandomResizedCrop(224, 0.08, 1.0)
    assert pairs == RandomResizedCrop(224, 0.08, 1.0, 3 / 4, 4 / 3)
    assert pairs == RandomResizedCrop(size=224, scale=[0.08, 1.0], ratio=[3 / 4, 4 / 3])
    assert RandomResizedCrop(224, 0.2, 0.9) == RandomResizedCrop(224, (0.2, 0.9))
    assert pairs != FastRandomResizedCrop(), "another decode mode, other bytes"


def test_a_chain_falls_into_segments() -> None:
    parts = TRAIN.segments(90, 70)
    assert [part.kind for part in parts] == [
        Kind.RESIZE,
        Kind.PIXEL,
        Kind.GEOMETRIC,
        Kind.PIXEL,
        Kind.RESIZE,
        Kind.GEOMETRIC,
        Kind.RESIZE,
        Kind.PIXEL,
        Kind.PIXEL,
        Kind.PIXEL,
        Kind.GEOMETRIC,
    ]
    assert [[index for index, _ in part.ops] for part in parts] == [
        [0],
        [2],
        [3, 4, 5],
        [6],
        [8],
        [9],
        [10],
        [11],
        [12],
        [13],
        [15],
    ]
    assert parts[0].sizes == ((90, 70), (40, 40))
    assert parts[2].sizes == ((40, 40), (46, 46), (46, 46), (46, 46))
    assert parts[-1].out_size == (24, 24)


def test_record_only_and_empty_places_do_not_part_neighbours() -> None:
    chain = [Pad(2), RandomHorizontalFlip(), DoNothing(), RandomRotation(4), RandomErasing(0.5), RandomCrop(8)]
    (only,) = Recipe.build(chain, resolution=8).segments(8, 8)
    assert [index for index, _ in only.ops] == [0, 3, 5]
    assert Recipe.build([DoNothing(), RandomErasing(1)], resolution=8).segments(8, 8) == ()


def test_the_rest_after_the_first_stage_keeps_its_op_indices() -> None:
    index, first = TRAIN.require_variable_sizes()
    assert (index, first) == (0, EVERY[0])
    assert TRAIN.segments(40, 40, index + 1) == TRAIN.segments(90, 70)[1:]
    crop_first = Recipe.build([RandomErasing(0.1), RandomCrop(8), RandomRotation(9), Pad(1)], resolution=10)
    assert crop_first.require_variable_sizes() == (1, RandomCrop(8))
    assert [op for op, _ in crop_first.segments(8, 8, 2)[0].ops] == [2, 3]


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        ([Pad(2), RandomCrop(8)], r"transform 0 \(Pad\) comes first, but the pictures of this set vary in size"),
        ([DoNothing(), ColorJitter(), Resize(8)], r"transform 1 \(ColorJitter\) comes first"),
        ([RandomHorizontalFlip()], "no transform gives the pictures, which vary in size, one size"),
        ([], "no transform gives the pictures"),
    ],
)
def test_pictures_of_varying_size_need_a_crop_or_a_resize_first(chain: list[Transform], message: str) -> None:
    recipe = Recipe.build(chain, resolution=8)
    with pytest.raises(ValueRejected, match=message):
        recipe.require_variable_sizes()


def test_a_mode_that_cannot_follow_a_rotation_may_follow_it_in_the_next_segment() -> None:
    Recipe.build([RandomRotation(5), Resize(8), Pad(1, mode="edge"), RandomCrop(8)], resolution=8)
    scales = [RandomScale(1 / 64, 1), RandomScale(1 / 64, 1)]
    Recipe.build([*scales, RandomAutocontrast(), *scales], resolution=8)
    with pytest.raises(ValueRejected, match=r"transform 2 \(RandomScale\).* at most 4096 times"):
        Recipe.build([*scales, RandomScale(0.5, 1)], resolution=8)


def test_the_decode_mode_is_part_of_the_identity() -> None:
    recipes = {mode: Recipe.build([Resize(8)], resolution=8, decode=mode) for mode in DECODE_MODES}
    assert len({recipe.fingerprint() for recipe in recipes.values()}) == 3
    for mode, recipe in recipes.items():
        assert Recipe.from_json(recipe.to_json()) == recipe
        assert Recipe.from_json(recipe.to_json()).decode == mode
    assert "decode" not in json.loads(recipes["scaled"].to_json()), "recipes made before the mode keep their name"
    recipes["scaled"].require_stored_pixels()
    with pytest.raises(ValueRejected, match="decode is 'fast', but this set is stored as pixels"):
        recipes["fast"].require_stored_pixels()


def test_another_resolution_scales_every_sizing_transform() -> None:
    validation = Recipe.build([Resize(256), CenterCrop(224)], NormMode.IMAGENET, 224, decode="exact")
    half = validation.with_resolution(112)
    assert half == Recipe.build([Resize(128), CenterCrop(112)], NormMode.IMAGENET, 112, decode="exact")
    assert validation.with_resolution(111).transforms == (Resize(127), CenterCrop(111)), "126.86, half up"
    assert validation.with_resolution(224) is validation
    assert validation.with_resolution(1).transforms == (Resize(1), CenterCrop(1))
    padded = Recipe.build([Pad(4), RandomResizedCrop(28, 0.3, 0.9), RandomErasing(0.1), Pad(2)], resolution=32)
    assert padded.with_resolution(20).transforms[1] == RandomResizedCrop(16, 0.3, 0.9), "Pads behind it stay"
    with pytest.raises(ValueRejected, match=r"transform 1: RandomResizedCrop: size is 0"):
        padded.with_resolution(4)
    with pytest.raises(ValueRejected, match="no transform sets the size, so 28 cannot become 20"):
        Recipe.build([Pad(2)], resolution=28).with_resolution(20)


def test_schedules_of_the_resolution_follow_the_formula() -> None:
    ramp = ProgressiveResolution(128, 224, 5)
    assert [ramp.at(epoch) for epoch in (0, 1, 2, 4, 5, 6, 1000)] == [128, 147, 166, 204, 224, 224, 224]
    assert ramp.sizes() == (128, 147, 166, 185, 204, 224)
    assert ProgressiveResolution(5, 7, 2**31 - 1).sizes() == (5, 6, 7)
    assert all(
        ProgressiveResolution(3, 9, epochs).sizes()
        == tuple(sorted({ProgressiveResolution(3, 9, epochs).at(e) for e in range(epochs + 1)}))
        for epochs in range(1, 12)
    )
    steps = SteppedResolution(((0, 128), (3, 224), (8, 96)))
    assert [steps.at(epoch) for epoch in (0, 2, 3, 7, 8, 99)] == [128, 128, 224, 224, 96, 96]
    assert steps.sizes() == (96, 128, 224)
