"""Hypothesis strategies: any transform, and any chain that is allowed."""

from __future__ import annotations

from hypothesis import strategies as st

from renaissance.core.enums import NormMode
from renaissance.data.chain import fixed_size
from renaissance.data.recipe import DECODE_MODES, Normalization, Recipe
from renaissance.data.transforms import (
    PAD_MODES,
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
)

SIDE = st.integers(1, 24)
CHANCE = st.sampled_from([0.0, 0.5, 1.0])


def rising(low: float, high: float) -> st.SearchStrategy[tuple[float, float]]:
    return st.tuples(st.floats(low, high), st.floats(low, high)).map(lambda pair: (min(pair), max(pair)))


def fills(channels: int) -> st.SearchStrategy[int | tuple[int, ...]]:
    value = st.integers(0, 255)
    return st.one_of(st.just(0), value, st.tuples(*[value] * channels))


def transforms(channels: int) -> st.SearchStrategy[Transform]:
    """Any one transform for pictures of that many channels."""
    resized_crops = [
        st.builds(cls, SIDE, rising(0.05, 1.0), rising(0.3, 3.0)) for cls in (RandomResizedCrop, FastRandomResizedCrop)
    ]
    amount = st.sampled_from([0.0, 0.2, 0.8, 3.0])
    colour: list[st.SearchStrategy[Transform]] = [
        st.builds(ColorJitter, amount, amount, amount, st.sampled_from([0.0, 0.1, 0.5])),
        st.builds(RandomGrayscale, CHANCE),
    ]
    return st.one_of(
        st.builds(Pad, st.integers(0, 4), fills(channels)),
        st.builds(Pad, st.integers(0, 4), st.just(0), st.sampled_from(PAD_MODES)),
        st.builds(RandomCrop, SIDE),
        st.builds(CenterCrop, SIDE),
        st.builds(RandomRotation, st.sampled_from([0, 5, 20, 90, 360]), fills(channels)),
        rising(0.3, 2.0).map(lambda ratios: RandomScale(*ratios)),
        st.builds(Resize, SIDE),
        *resized_crops,
        st.builds(RandomAutocontrast, CHANCE),
        rising(0.1, 6.0).map(lambda sigmas: GaussianBlur(*sigmas)),
        st.builds(GaussianNoise, st.sampled_from([0.0, -3.5]), st.sampled_from([0.0, 0.7, 30.0]), st.booleans()),
        st.builds(DoNothing),
        st.builds(RandomHorizontalFlip, CHANCE),
        st.builds(RandomErasing, CHANCE),
        *(colour if channels == 3 else []),
    )


@st.composite
def recipes(draw: st.DrawFn, sizing_first: bool = False) -> Recipe:
    """Any recipe with a size of its own; what could not follow in a drawn list is left out of it."""
    channels = 3 if sizing_first else draw(st.sampled_from([1, 3]))
    sizing = st.one_of(
        st.builds(Resize, SIDE),
        st.builds(CenterCrop, SIDE),
        st.builds(RandomCrop, SIDE),
        st.builds(RandomResizedCrop, SIDE, rising(0.05, 1.0), rising(0.3, 3.0)),
    )
    drawn = draw(st.lists(transforms(channels), max_size=6))
    drawn = [*([draw(sizing)] if sizing_first else []), *drawn, draw(sizing)]
    chain: list[Transform] = []
    resampled = False
    for transform in drawn:
        if transform.kind in (Kind.RESIZE, Kind.PIXEL):
            resampled = False
        if isinstance(transform, Pad) and transform.mode != "constant" and resampled:
            continue
        if transform.kind is Kind.RECORD and any(type(transform) is type(before) for before in chain):
            continue
        resampled = resampled or isinstance(transform, RandomRotation | RandomScale)
        chain.append(transform)
    side = fixed_size(chain)
    assert side is not None
    normalization = draw(st.sampled_from([NormMode.NO_NORM, Normalization((0.2,) * channels, (0.3,) * channels)]))
    return Recipe.build(chain, normalization, side, channels, decode=draw(st.sampled_from(DECODE_MODES)))
