"""Any chain that is allowed: its text gives it back, and the kernels deliver the bytes of the oracle."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recipe_cases import SEED, expected, pictures, rows
from recipe_strategies import recipes, transforms

from renaissance.core.dtype import DType
from renaissance.core.enums import NormMode
from renaissance.core.errors import ValueRejected
from renaissance.data import reference
from renaissance.data.pictures import PictureRecipe
from renaissance.data.recipe import Recipe
from renaissance.data.sources.spec import Encoding
from renaissance.data.transforms import Pad, Transform, transform_from_dict

FEW = settings(deadline=None, max_examples=60, derandomize=True)
MANY = settings(deadline=None, max_examples=100, derandomize=True)
DTYPES = st.sampled_from([DType.FP32, DType.FP16, DType.BF16, DType.UINT8])


@MANY
@given(transform=transforms(3))
def test_any_transform_comes_back_from_its_json_form(transform: object) -> None:
    again = transform_from_dict(transform.to_dict())  # type: ignore[attr-defined]
    assert (type(again), again) == (type(transform), transform)
    assert repr(again) == repr(transform)


@MANY
@given(one=recipes(), other=recipes())
def test_texts_and_fingerprints_are_equal_exactly_when_recipes_are(one: Recipe, other: Recipe) -> None:
    again = Recipe.from_json(one.to_json())
    assert again == one
    assert hash(again) == hash(one)
    assert again.fingerprint() == one.fingerprint()
    assert (one.fingerprint() == other.fingerprint()) == (one == other)


@MANY
@given(recipe=recipes(), resolution=st.integers(1, 40))
def test_any_recipe_takes_another_resolution_or_refuses_it_by_name(recipe: Recipe, resolution: int) -> None:
    padding = 2 * sum(t.padding for t in behind_last_sizing(recipe) if isinstance(t, Pad))
    if resolution != recipe.resolution and resolution <= padding:
        with pytest.raises(ValueRejected, match="size is"):
            recipe.with_resolution(resolution)
        return
    other = recipe.with_resolution(resolution)
    assert other.resolution == resolution
    assert [t.name for t in other.transforms] == [t.name for t in recipe.transforms]
    assert other.segments(9, 13)[-1].out_size == (resolution, resolution)


@FEW
@given(
    recipe=recipes(),
    height=st.integers(1, 30),
    width=st.integers(1, 30),
    dtype=DTYPES,
    padding=st.sampled_from([0, 1, 5]),
)
def test_fixed_size_sources_give_the_bytes_of_the_oracle(
    recipe: Recipe, height: int, width: int, dtype: DType, padding: int
) -> None:
    recipe = deliverable(replace(recipe, decode="scaled"), dtype)
    images = pictures(3, height, width, recipe.color_channels)
    padded = recipe.color_channels + padding
    got, _ = rows(recipe, images, [2, 0, 1], dtype=dtype, padded=padded)
    np.testing.assert_array_equal(got, expected(recipe, images, [2, 0, 1], dtype, padded), err_msg=repr(recipe))


@FEW
@given(
    recipe=recipes(sizing_first=True),
    sizes=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=2, max_size=3),
    dtype=DTYPES,
)
def test_pictures_of_any_size_give_the_bytes_of_the_oracle(
    recipe: Recipe, sizes: list[tuple[int, int]], dtype: DType
) -> None:
    recipe = deliverable(recipe, dtype)
    compiled = PictureRecipe(recipe, dtype, 4)
    for sample, (height, width) in enumerate(sizes):
        image = pictures(1, height, width, 3)[0]
        row = np.full(compiled.row_bytes, 0xA5, np.uint8)
        compiled.make(raw(image), Encoding.RAW, sample, SEED, 3, False, row)
        want = reference.row(recipe, image, sample, SEED, 3, dtype, 4)
        np.testing.assert_array_equal(row, want, err_msg=f"{height}x{width}: {recipe!r}")


def behind_last_sizing(recipe: Recipe) -> tuple[Transform, ...]:
    return recipe.transforms[max(i for i, t in enumerate(recipe.transforms) if t.sizing) :]


def deliverable(recipe: Recipe, dtype: DType) -> Recipe:
    """uint8 delivers pixels as they are, so it takes no normalisation."""
    if dtype is not DType.UINT8:
        return recipe
    return Recipe.build(recipe.transforms, NormMode.NO_NORM, recipe.resolution, recipe.color_channels)


def raw(image: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The stored form of level RAW: u32 width, u32 height, pixels."""
    header = np.array([image.shape[1], image.shape[0]], "<u4").view(np.uint8)
    return np.concatenate([header, image.reshape(-1)])
