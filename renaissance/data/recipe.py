"""A recipe: what is done to every sample of one set, as one validated, serialisable, hashable value.

Invariants: a Recipe that exists is in a possible order and names its channels and its resolution; two recipes with the
same fingerprint deliver the same bytes; the JSON form is canonical (sorted keys, shortest floats), so equal recipes
have equal text. docs/recipes.md is the definition of what the transforms do.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from renaissance.core.enums import NormMode
from renaissance.core.errors import ValueRejected
from renaissance.data import chain
from renaissance.data.chain import Op, Segment, hw
from renaissance.data.transforms import (
    MAX_SIZE,
    FusedNormalization,
    Pad,
    RandomErasing,
    RandomHorizontalFlip,
    Transform,
    transform_from_dict,
)

DECODE_MODES = ("scaled", "exact", "fast")
"""How stored JPEG pictures become pixels; the first is the default (docs/recipes.md, "Decode mode")."""
RECIPE_VERSION = 1
"""Raised whenever the bytes that an existing recipe delivers change; part of the fingerprint."""


@dataclass(frozen=True, slots=True)
class Normalization:
    """value = (pixel / 255 - mean) / std, per channel. ``name`` is the preset's, or "CUSTOM"."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    name: str = "CUSTOM"

    def __post_init__(self) -> None:
        for field in ("mean", "std"):
            given = getattr(self, field)
            if not isinstance(given, Sequence) or isinstance(given, str) or len(given) not in (1, 3):
                raise ValueRejected(f"normalization: {field} is {given!r}; expected 1 or 3 numbers, one per channel")
            try:
                values = tuple(float(v) + 0.0 for v in given)
            except (TypeError, ValueError, OverflowError):
                raise ValueRejected(f"normalization: {field} is {given!r}; expected 1 or 3 numbers") from None
            if not all(math.isfinite(v) for v in values):
                raise ValueRejected(f"normalization: {field} is {values!r}; expected finite numbers")
            object.__setattr__(self, field, values)
        if len(self.mean) != len(self.std):
            raise ValueRejected(f"normalization: {len(self.mean)} means but {len(self.std)} standard deviations")
        if min(self.std) < MIN_STD:
            raise ValueRejected(f"normalization: std is {self.std!r}; expected at least {MIN_STD:g}")
        if self.name != CUSTOM:
            modes = [mode.name for mode in NormMode]
            if self.name not in modes:
                raise ValueRejected(f"normalization: unknown preset {self.name!r}; expected one of: {', '.join(modes)}")
            if (self.mean, self.std) != _constants(NormMode[self.name], len(self.mean)):
                raise ValueRejected(f"normalization: {self.mean!r}, {self.std!r} are not the constants of {self.name}")

    @classmethod
    def preset(cls, mode: NormMode, color_channels: int) -> Normalization:
        """The preset for pictures of 1 or 3 channels; raises ValueRejected when it is made for the other number."""
        constants = _constants(mode, color_channels)
        if constants is None:
            needed = len(_PRESETS[mode][0])
            raise ValueRejected(
                f"normalization {mode.name} has constants for {needed} channel(s), the pictures have {color_channels}; "
                "give Normalization(mean, std) or another mode"
            )
        return cls(*constants, mode.name)

    @property
    def is_identity(self) -> bool:
        """True when the only thing done is the division by 255."""
        return not any(self.mean) and all(s == 1.0 for s in self.std)


CUSTOM = "CUSTOM"
MIN_STD = 1e-6
_PRESETS: Mapping[NormMode, tuple[tuple[float, ...], tuple[float, ...]]] = {
    NormMode.MNIST: ((0.1307,), (0.3081,)),
    NormMode.CIFAR: ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    NormMode.IMAGENET: ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    NormMode.MLPERF: ((123.68 / 255, 116.78 / 255, 103.94 / 255), (1 / 255, 1 / 255, 1 / 255)),
}
"""Mean and standard deviation on the 0..1 scale (spec/framework 1.2); NO_NORM fits any number of channels."""


def _constants(mode: NormMode, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    if mode is NormMode.NO_NORM:
        return (0.0,) * channels, (1.0,) * channels
    mean, std = _PRESETS[mode]
    return (mean, std) if len(mean) == channels else None


@dataclass(frozen=True, slots=True)
class Recipe:
    """Transforms in order, the normalisation, the square output size in pixels, and how pictures are decoded."""

    transforms: tuple[Transform, ...]
    normalization: Normalization
    resolution: int
    color_channels: int
    decode: str = DECODE_MODES[0]

    def __post_init__(self) -> None:
        object.__setattr__(self, "transforms", tuple(self.transforms))
        if type(self.color_channels) is not int or self.color_channels not in (1, 3):  # 1.0 and True would be equal
            raise ValueRejected(f"recipe: color_channels is {self.color_channels!r}; expected 1 or 3")
        if isinstance(self.resolution, bool) or not isinstance(self.resolution, int):
            raise ValueRejected(f"recipe: resolution is {self.resolution!r}; expected a whole number of pixels")
        if not 1 <= self.resolution <= MAX_SIZE:
            raise ValueRejected(f"recipe: resolution is {self.resolution}; expected 1 to {MAX_SIZE} pixels")
        if len(self.normalization.mean) != self.color_channels:
            raise ValueRejected(
                f"recipe: normalization {self.normalization.name} has {len(self.normalization.mean)} channel(s), "
                f"the pictures have {self.color_channels}"
            )
        if self.decode not in DECODE_MODES:
            raise ValueRejected(f"recipe: decode is {self.decode!r}; expected one of: {', '.join(DECODE_MODES)}")
        chain.check_order(self.transforms, self.color_channels)
        side = chain.fixed_size(self.transforms)
        if side is not None and side != self.resolution:
            raise self._wrong_size(hw((side, side)) + " pixels")

    @classmethod
    def build(
        cls,
        transforms: Sequence[Transform] = (),
        normalization: NormMode | Normalization = NormMode.NO_NORM,
        resolution: int = 0,
        color_channels: int = 3,
        validation: bool = False,
        decode: str = DECODE_MODES[0],
    ) -> Recipe:
        """Check values and order and return the recipe; ``validation=True`` also refuses random transforms.

        Raises ValueRejected naming the transform and its index in the list.
        """
        if color_channels not in (1, 3):
            raise ValueRejected(f"recipe: color_channels is {color_channels!r}; expected 1 or 3")
        if isinstance(normalization, NormMode):
            normalization = Normalization.preset(normalization, color_channels)
        recipe = cls(tuple(transforms), normalization, resolution, color_channels, decode)
        if validation:
            recipe.require_deterministic()
        return recipe

    @property
    def is_random(self) -> bool:
        """True when some transform draws random numbers."""
        return any(t.random for t in self.transforms)

    @property
    def fused_normalization(self) -> FusedNormalization:
        """What the last pass does: the record-only transforms and the normalisation."""
        flip = [(i, t) for i, t in enumerate(self.transforms) if isinstance(t, RandomHorizontalFlip)]
        erase = [(i, t) for i, t in enumerate(self.transforms) if isinstance(t, RandomErasing)]
        norm = self.normalization
        return FusedNormalization(norm.mean, norm.std, flip[0] if flip else None, erase[0] if erase else None)

    def require_deterministic(self) -> None:
        """Raise ValueRejected naming the first random transform; a validation recipe has none."""
        for index, transform in enumerate(self.transforms):
            if transform.random:
                raise ValueRejected(
                    f"transform {index} ({transform.name}) draws random numbers; "
                    "a validation recipe takes deterministic transforms only, remove it"
                )

    def require_stored_pixels(self) -> None:
        """Raise ValueRejected when the recipe sets how pictures are decoded; sets stored as pixels have nothing to."""
        if self.decode != DECODE_MODES[0]:
            raise ValueRejected(
                f"recipe: decode is {self.decode!r}, but this set is stored as pixels and nothing is decoded; "
                f"leave it at {DECODE_MODES[0]!r}"
            )

    def require_variable_sizes(self) -> Op:
        """(op index, transform) of the first stage, which makes pictures of any size one size.

        Raises ValueRejected when the first transform is not a crop or resize (spec/data 5.3).
        """
        return chain.first_stage(self.transforms)

    def segments(self, height: int, width: int, start: int = 0) -> tuple[Segment, ...]:
        """What is carried out in one go, in order, from place ``start`` of the list on, for pictures of that size.

        After a first stage at op index i that leaves S x S, the rest is ``segments(S, S, i + 1)``. Raises ValueRejected
        when a transform does not fit or the last size is not the recipe's resolution.
        """
        parts = chain.segments(self.transforms, height, width, start)
        last = parts[-1].out_size if parts else (height, width)
        if last != (self.resolution, self.resolution):
            raise self._wrong_size(f"{hw(last)} pixels from a {hw((height, width))} source")
        return parts

    def with_resolution(self, resolution: int) -> Recipe:
        """The same recipe for ``resolution`` x ``resolution`` output (docs/recipes.md, "Another resolution").

        Raises ValueRejected without a sizing transform, or when the Pads behind the last one leave no room.
        """
        if resolution == self.resolution:
            return self
        transforms = list(self.transforms)
        sizing = [index for index, transform in enumerate(transforms) if transform.sizing]
        if not sizing:
            raise ValueRejected(
                f"recipe: no transform sets the size, so {self.resolution} cannot become {resolution}; "
                "add a crop or a resize"
            )
        padding = 2 * sum(t.padding for t in transforms[sizing[-1] :] if isinstance(t, Pad))
        for index in sizing:
            old = chain.square_side(transforms[index])
            new = max(1, (2 * old * resolution + self.resolution) // (2 * self.resolution))
            if index == sizing[-1]:
                new = resolution - padding
            transforms[index] = _resized(index, transforms[index], new)
        return replace(self, transforms=tuple(transforms), resolution=resolution)

    def _wrong_size(self, leaves: str) -> ValueRejected:
        return ValueRejected(
            f"recipe: {chain.last_sizing_name(self.transforms)} leaves {leaves}, but the resolution is "
            f"{hw((self.resolution, self.resolution))}; end with RandomCrop({self.resolution}) or change the resolution"
        )

    def to_json(self) -> str:
        """Canonical text; ``from_json`` gives an equal recipe back."""
        plain: dict[str, object] = {
            "version": RECIPE_VERSION,
            "transforms": [t.to_dict() for t in self.transforms],
            "normalization": {
                "mean": list(self.normalization.mean),
                "std": list(self.normalization.std),
                "name": self.normalization.name,
            },
            "resolution": self.resolution,
            "color_channels": self.color_channels,
        }
        if self.decode != DECODE_MODES[0]:  # left out otherwise, so that recipes made before the mode keep their name
            plain["decode"] = self.decode
        return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """Rebuild and check a recipe; raises ValueRejected naming what is wrong (and the transform's index)."""
        try:
            plain = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueRejected(f"recipe: not valid JSON: {error}") from None
        expected = {"version", "transforms", "normalization", "resolution", "color_channels"}
        if not isinstance(plain, dict) or set(plain) - {"decode"} != expected:
            found = ", ".join(sorted(plain)) if isinstance(plain, dict) else type(plain).__name__
            raise ValueRejected(f"recipe: expected the keys {', '.join(sorted(expected))}; found {found}")
        if plain["version"] != RECIPE_VERSION:
            raise ValueRejected(f"recipe: version is {plain['version']!r}; this program knows {RECIPE_VERSION}")
        norm = plain["normalization"]
        if not isinstance(norm, dict) or set(norm) != {"mean", "std", "name"}:
            raise ValueRejected(f"recipe: normalization is {norm!r}; expected an object with mean, std and name")
        if not isinstance(plain["transforms"], list):
            raise ValueRejected(f"recipe: transforms is {plain['transforms']!r}; expected a list")
        transforms = []
        for index, item in enumerate(plain["transforms"]):
            try:
                transforms.append(transform_from_dict(item))
            except ValueRejected as error:
                raise ValueRejected(f"transform {index}: {error}") from None
        normalization = Normalization(norm["mean"], norm["std"], norm["name"])
        decode = plain.get("decode", DECODE_MODES[0])
        return cls(tuple(transforms), normalization, plain["resolution"], plain["color_channels"], decode)

    def fingerprint(self) -> str:
        """SHA-256 (hex) of the canonical text."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def _resized(index: int, transform: Transform, size: int) -> Transform:
    arguments = {field.name: getattr(transform, field.name) for field in fields(transform)}
    try:
        return type(transform)(**{**arguments, "size": size})
    except ValueRejected as error:
        raise ValueRejected(f"transform {index}: {error}") from None
