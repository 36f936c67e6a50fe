"""The order of a chain: which lists are possible, which sizes lie between, and the segments they fall into.

A segment is what is carried out in one go (docs/recipes.md, "The chain"): neighbouring geometric transforms, a resize,
or a pixel op. Record-only transforms and DoNothing belong to none; op indices are places in the user's list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from renaissance.core.errors import ValueRejected
from renaissance.data.transforms import (
    LISTABLE,
    MAX_SIZE,
    ColorJitter,
    FusedNormalization,
    Kind,
    Pad,
    RandomGrayscale,
    RandomRotation,
    RandomScale,
    Transform,
)

MAX_REACH = 4096.0
"""How far all scales of a segment may shrink a picture together; keeps coordinates exact in float64."""
MAX_TRANSFORMS = 256
"""Longest list; op indices have 16 bits, and a recipe may come over the network."""

Size = tuple[int, int]
"""(height, width) in pixels."""
Op = tuple[int, Transform]
"""(op index, transform)."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Transforms carried out in one go, and the sizes between them."""

    kind: Kind  # GEOMETRIC, RESIZE or PIXEL
    ops: tuple[Op, ...]  # in order; exactly one for RESIZE and PIXEL
    sizes: tuple[Size, ...]  # before the first op and after each: len(ops) + 1

    @property
    def in_size(self) -> Size:
        return self.sizes[0]

    @property
    def out_size(self) -> Size:
        return self.sizes[-1]


def acting(transforms: Sequence[Transform], start: int = 0) -> Iterator[Op]:
    """The transforms with a segment, from place ``start`` of the list on."""
    for index in range(start, len(transforms)):
        if transforms[index].kind not in (Kind.RECORD, Kind.NOTHING):
            yield index, transforms[index]


def segments(transforms: Sequence[Transform], height: int, width: int, start: int = 0) -> tuple[Segment, ...]:
    """The chain from place ``start`` on, for pictures of that size; raises ValueRejected for a canvas too large."""
    done: list[Segment] = []
    size = (height, width)
    for index, transform in acting(transforms, start):
        after = size_after(index, transform, size)
        last = done[-1] if done else None
        if last is not None and last.kind is transform.kind is Kind.GEOMETRIC:
            done[-1] = Segment(Kind.GEOMETRIC, (*last.ops, (index, transform)), (*last.sizes, after))
        else:
            done.append(Segment(transform.kind, ((index, transform),), (size, after)))
        size = after
    return tuple(done)


def size_after(index: int, transform: Transform, size: Size) -> Size:
    """(height, width) that transform ``index`` makes of ``size``; raises ValueRejected for a canvas too large."""
    if transform.sizing:
        side = square_side(transform)
        return side, side
    if not isinstance(transform, Pad):
        return size
    padded = size[0] + 2 * transform.padding, size[1] + 2 * transform.padding
    if max(padded) > MAX_SIZE:
        raise ValueRejected(f"{place(index, transform)}: makes {hw(padded)} pixels; at most {MAX_SIZE} a side")
    return padded


def square_side(transform: Transform) -> int:
    """The ``size`` of a sizing transform."""
    side: int = transform.size  # type: ignore[attr-defined]  # every sizing transform has one
    return side


def fixed_size(transforms: Sequence[Transform]) -> int | None:
    """The side that the chain leaves, when that does not depend on the sources; None otherwise."""
    side: int | None = None
    for _, transform in acting(transforms):
        if transform.sizing:
            side = square_side(transform)
        elif isinstance(transform, Pad) and side is not None:
            side += 2 * transform.padding
    return side


def check_order(transforms: Sequence[object], color_channels: int) -> None:
    """Raise ValueRejected, naming the transform and its place, for a list that is impossible for any source."""
    if len(transforms) > MAX_TRANSFORMS:
        raise ValueRejected(f"recipe: {len(transforms)} transforms; at most {MAX_TRANSFORMS}")
    checked = [_checked_type(index, transform) for index, transform in enumerate(transforms)]
    recorded: dict[type[Transform], int] = {}
    resampled_by = ""
    reach = 1.0
    for index, transform in enumerate(checked):
        where = place(index, transform)
        if transform.kind is Kind.RECORD:
            if type(transform) in recorded:
                raise ValueRejected(f"{where} is already transform {recorded[type(transform)]}; list it once")
            recorded[type(transform)] = index
        elif transform.kind in (Kind.RESIZE, Kind.PIXEL):
            resampled_by, reach = "", 1.0
        _check_channels(where, transform, color_channels)
        if isinstance(transform, RandomRotation | RandomScale):
            resampled_by = resampled_by or where
        if isinstance(transform, RandomScale):
            reach /= min(transform.min_ratio, 1.0)
            if reach > MAX_REACH:
                raise ValueRejected(
                    f"{where}: the scales so far can shrink the picture {reach:g} times; at most {MAX_REACH:g} times"
                )
        if isinstance(transform, Pad) and transform.mode != "constant" and resampled_by:
            raise ValueRejected(
                f"{where}: mode {transform.mode!r} cannot follow {resampled_by}; geometry is one resampling pass, "
                "put the Pad before the first rotation or scale or use constant mode"
            )


def first_stage(transforms: Sequence[Transform]) -> Op:
    """The transform that makes pictures of any size one size; raises ValueRejected when the first one does not."""
    advice = "start with RandomResizedCrop, Resize, CenterCrop or RandomCrop"
    for index, transform in acting(transforms):
        if not transform.sizing:
            raise ValueRejected(
                f"{place(index, transform)} comes first, but the pictures of this set vary in size and it leaves "
                f"their size as it is; {advice}"
            )
        return index, transform
    raise ValueRejected(f"recipe: no transform gives the pictures, which vary in size, one size; {advice}")


def last_sizing_name(transforms: Sequence[Transform]) -> str:
    """The transform that an error about the last size should name."""
    for index, transform in reversed(list(acting(transforms))):
        if transform.sizing or isinstance(transform, Pad):
            return place(index, transform)
    return "the chain"


def place(index: int, transform: object) -> str:
    return f"transform {index} ({type(transform).__name__})"


def hw(size: Size) -> str:
    return f"{size[0]}x{size[1]}"


def _checked_type(index: int, transform: object) -> Transform:
    if isinstance(transform, FusedNormalization):
        raise ValueRejected(
            f"{place(index, transform)} cannot be listed; it is always the last operation, set normalization instead"
        )
    if type(transform).__name__ == "Normalization":
        raise ValueRejected(f"{place(index, transform)} cannot be listed; give it as normalization")
    if not isinstance(transform, Transform) or LISTABLE.get(transform.name) is not type(transform):
        raise ValueRejected(
            f"{place(index, transform)} is not a transform; expected values such as Pad(2) or RandomCrop(28)"
        )
    return transform


def _check_channels(where: str, transform: Transform, channels: int) -> None:
    if isinstance(transform, Pad | RandomRotation) and len(transform.fill_values) not in (1, channels):
        raise ValueRejected(f"{where}: fill has {len(transform.fill_values)} values; expected 1 or {channels}")
    if isinstance(transform, ColorJitter | RandomGrayscale) and channels != 3:
        raise ValueRejected(f"{where} needs colour pictures of 3 channels, these have {channels}; remove it")
