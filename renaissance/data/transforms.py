"""Transforms as data: frozen values that say what happens to a picture; they hold no code and no random state.

Values are checked at construction (ValueRejected, naming transform and argument); the order of a chain is checked by
``Recipe.build``. docs/recipes.md defines what each transform does to the pixels, docs/random-numbers.md which draws it
uses. ``Kind`` says who carries a transform out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import ClassVar

from renaissance.core.errors import ValueRejected
from renaissance.data.transform_checks import fill, flag, integer, pair, real

PAD_MODES = ("constant", "edge", "reflect", "symmetric")
MAX_SIZE = 8192
"""Largest side of a picture or canvas in pixels; keeps 16.16 fixed-point coordinates inside 32 bits."""
MIN_SCALE = 2.0**-6
MAX_SCALE = 2.0**6
"""Bounds of RandomScale's ratios: beyond them a picture is a point or a single grey."""
MIN_RATIO, MAX_RATIO = 1e-6, 1e6
"""Bounds of every ratio of two sides."""
MAX_FACTOR = 100.0
"""Bound of ColorJitter's brightness, contrast and saturation: far above it only black and white are left."""
MAX_SIGMA = 64.0
"""Widest blur in pixels; its cost grows with the width."""
MAX_NOISE = 1000.0
"""Largest standard deviation of noise in grey steps."""

Pair = Sequence[float]


class Kind(IntEnum):
    """Who carries a transform out."""

    NOTHING = 0  # nobody: it only keeps its place in the list
    GEOMETRIC = 1  # one resampling pass together with its geometric neighbours
    RESIZE = 2  # a crop box resampled to a square
    PIXEL = 3  # uint8 to uint8 at its place in the list
    RECORD = 4  # FusedNormalization, on the finished picture


@dataclass(frozen=True, slots=True)
class Transform:
    """Base of everything a user can list in a recipe."""

    kind: ClassVar[Kind]
    random: ClassVar[bool] = False
    sizing: ClassVar[bool] = False
    """Whether the size it leaves (``size`` x ``size``) does not depend on the size it is given."""

    @property
    def name(self) -> str:
        return type(self).__name__

    def to_dict(self) -> dict[str, object]:
        """The JSON form: ``{"type": name, argument: value, ...}``."""
        plain: dict[str, object] = {"type": self.name}
        for field in fields(self):
            value = getattr(self, field.name)
            plain[field.name] = list(value) if isinstance(value, tuple) else value
        return plain


@dataclass(frozen=True, slots=True)
class Pad(Transform):
    """Adds ``padding`` pixels on all four sides, with the semantics of ``numpy.pad`` for each mode.

    ``fill`` (constant mode only) is one value for all channels or one per channel, 0 to 255.
    """

    kind: ClassVar[Kind] = Kind.GEOMETRIC
    padding: int = 0
    fill: int | Sequence[int] = 0
    mode: str = "constant"

    def __post_init__(self) -> None:
        _set(self, "padding", integer("Pad", "padding", self.padding, 0, MAX_SIZE))
        _set(self, "fill", fill("Pad", self.fill))
        if self.mode not in PAD_MODES:
            raise ValueRejected(f"Pad: mode is {self.mode!r}; expected one of: {', '.join(PAD_MODES)}")
        if self.mode != "constant" and any(self.fill_values):
            raise ValueRejected(f"Pad: fill is {self.fill!r} in mode {self.mode!r}; fill acts in constant mode only")

    @property
    def fill_values(self) -> tuple[int, ...]:
        return _as_tuple(self.fill)


@dataclass(frozen=True, slots=True)
class RandomCrop(Transform):
    """Cuts a ``size`` x ``size`` window at a uniformly drawn place.

    A picture smaller than the window is first padded with zeros on all sides by ``max(size - width, size - height)``.
    """

    kind: ClassVar[Kind] = Kind.GEOMETRIC
    random: ClassVar[bool] = True
    sizing: ClassVar[bool] = True
    size: int

    def __post_init__(self) -> None:
        _set(self, "size", integer("RandomCrop", "size", self.size, 1, MAX_SIZE))


@dataclass(frozen=True, slots=True)
class CenterCrop(Transform):
    """Cuts the ``size`` x ``size`` window at the centre; a smaller picture is centred in zeros, per axis."""

    kind: ClassVar[Kind] = Kind.GEOMETRIC
    sizing: ClassVar[bool] = True
    size: int = 224

    def __post_init__(self) -> None:
        _set(self, "size", integer("CenterCrop", "size", self.size, 1, MAX_SIZE))


@dataclass(frozen=True, slots=True)
class RandomRotation(Transform):
    """Turns about the true centre by an angle uniform in [-degrees, degrees]; the size stays, outside is ``fill``."""

    kind: ClassVar[Kind] = Kind.GEOMETRIC
    random: ClassVar[bool] = True
    degrees: float = 30.0
    fill: int | Sequence[int] = 0

    def __post_init__(self) -> None:
        _set(self, "degrees", real("RandomRotation", "degrees", self.degrees, 0.0, 360.0))
        _set(self, "fill", fill("RandomRotation", self.fill))

    @property
    def fill_values(self) -> tuple[int, ...]:
        return _as_tuple(self.fill)


@dataclass(frozen=True, slots=True)
class RandomScale(Transform):
    """Stretches about the centre; the horizontal and the vertical ratio are independent, each uniform in
    [min_ratio, max_ratio]; the size stays, outside is 0.
    """

    kind: ClassVar[Kind] = Kind.GEOMETRIC
    random: ClassVar[bool] = True
    min_ratio: float
    max_ratio: float

    def __post_init__(self) -> None:
        low = real("RandomScale", "min_ratio", self.min_ratio, MIN_SCALE, MAX_SCALE)
        high = real("RandomScale", "max_ratio", self.max_ratio, MIN_SCALE, MAX_SCALE)
        if low > high:
            raise ValueRejected(f"RandomScale: min_ratio {low!r} is above max_ratio {high!r}; give the smaller first")
        _set(self, "min_ratio", low)
        _set(self, "max_ratio", high)


@dataclass(frozen=True, slots=True)
class Resize(Transform):
    """The centred square of the picture, resampled (antialiased bilinear) to ``size`` x ``size``."""

    kind: ClassVar[Kind] = Kind.RESIZE
    sizing: ClassVar[bool] = True
    size: int = 224

    def __post_init__(self) -> None:
        _set(self, "size", integer("Resize", "size", self.size, 1, MAX_SIZE))


@dataclass(frozen=True, slots=True, init=False)
class RandomResizedCrop(Transform):
    """A drawn box, resampled (antialiased bilinear) to ``size`` x ``size``.

    ``scale``: smallest and largest share of the picture's area, uniform; ``ratio``: smallest and largest width to
    height, log-uniform. Both may also be given as plain numbers: ``RandomResizedCrop(224, 0.08, 1.0)`` or
    ``RandomResizedCrop(224, 0.08, 1.0, 3/4, 4/3)``.
    """

    kind: ClassVar[Kind] = Kind.RESIZE
    random: ClassVar[bool] = True
    sizing: ClassVar[bool] = True
    size: int
    scale: Pair
    ratio: Pair

    def __init__(
        self,
        size: int = 224,
        scale: Pair | float = (0.08, 1.0),
        ratio: Pair | float = (3 / 4, 4 / 3),
        *ratios: float,
    ) -> None:
        if not isinstance(scale, Sequence):
            numbers = (scale, ratio, *ratios)
            if len(numbers) not in (2, 4) or any(isinstance(n, Sequence) for n in numbers):
                raise ValueRejected(
                    f"{self.name}: given {numbers!r} after size; expected smallest and largest scale, "
                    "or these and smallest and largest ratio, or two pairs"
                )
            scale, ratio = numbers[:2], numbers[2:] or (3 / 4, 4 / 3)  # type: ignore[assignment]
        elif ratios:
            raise ValueRejected(f"{self.name}: given {ratios!r} after a pair for scale; expected a pair for ratio")
        _set(self, "size", integer(self.name, "size", size, 1, MAX_SIZE))
        _set(self, "scale", pair(self.name, "scale", scale, 1.0))
        _set(self, "ratio", pair(self.name, "ratio", ratio, MAX_RATIO, MIN_RATIO))


@dataclass(frozen=True, slots=True, init=False)
class FastRandomResizedCrop(RandomResizedCrop):
    """RandomResizedCrop, same draws and box, of pictures that are decoded in mode "fast"."""


@dataclass(frozen=True, slots=True)
class ColorJitter(Transform):
    """Brightness, contrast, saturation and hue by drawn factors in a drawn order; those with argument 0 stay.

    The first three are factors uniform in [max(0, 1 - argument), 1 + argument]; ``hue`` is the largest turn of the
    colour circle either way, at most 0.5.
    """

    kind: ClassVar[Kind] = Kind.PIXEL
    random: ClassVar[bool] = True
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0

    def __post_init__(self) -> None:
        for argument in ("brightness", "contrast", "saturation"):
            _set(self, argument, real("ColorJitter", argument, getattr(self, argument), 0.0, MAX_FACTOR))
        _set(self, "hue", real("ColorJitter", "hue", self.hue, 0.0, 0.5))


@dataclass(frozen=True, slots=True)
class RandomGrayscale(Transform):
    """With probability ``p`` replaces every channel by the luma."""

    kind: ClassVar[Kind] = Kind.PIXEL
    random: ClassVar[bool] = True
    p: float = 0.1

    def __post_init__(self) -> None:
        _set(self, "p", real("RandomGrayscale", "p", self.p, 0.0, 1.0))


@dataclass(frozen=True, slots=True)
class RandomAutocontrast(Transform):
    """With probability ``p`` stretches every channel to 0 to 255."""

    kind: ClassVar[Kind] = Kind.PIXEL
    random: ClassVar[bool] = True
    p: float = 0.5

    def __post_init__(self) -> None:
        _set(self, "p", real("RandomAutocontrast", "p", self.p, 0.0, 1.0))


@dataclass(frozen=True, slots=True)
class GaussianBlur(Transform):
    """Blurs with a standard deviation (pixels) uniform in [sigma_min, sigma_max]; below 0.38 nothing changes."""

    kind: ClassVar[Kind] = Kind.PIXEL
    random: ClassVar[bool] = True
    sigma_min: float = 0.1
    sigma_max: float = 2.0

    def __post_init__(self) -> None:
        low, high = pair("GaussianBlur", "sigma", (self.sigma_min, self.sigma_max), MAX_SIGMA)
        _set(self, "sigma_min", low)
        _set(self, "sigma_max", high)


@dataclass(frozen=True, slots=True)
class GaussianNoise(Transform):
    """Adds a normal number of its own, in grey steps, to every value; clipped to 0 to 255, or modulo 256."""

    kind: ClassVar[Kind] = Kind.PIXEL
    random: ClassVar[bool] = True
    mean: float = 0.0
    sigma: float = 25.5
    clip: bool = True

    def __post_init__(self) -> None:
        _set(self, "mean", real("GaussianNoise", "mean", self.mean, -255.0, 255.0))
        _set(self, "sigma", real("GaussianNoise", "sigma", self.sigma, 0.0, MAX_NOISE))
        _set(self, "clip", flag("GaussianNoise", "clip", self.clip))


@dataclass(frozen=True, slots=True)
class RandomErasing(Transform):
    """With probability ``p`` sets one rectangle of the finished picture to 0 after normalisation (record only).

    ``scale``: smallest and largest share of the area; ``ratio``: smallest and largest height to width, log-uniform.
    """

    kind: ClassVar[Kind] = Kind.RECORD
    random: ClassVar[bool] = True
    p: float
    scale: Pair = (0.02, 0.33)
    ratio: Pair = (0.3, 3.3)

    def __post_init__(self) -> None:
        _set(self, "p", real("RandomErasing", "p", self.p, 0.0, 1.0))
        _set(self, "scale", pair("RandomErasing", "scale", self.scale, 1.0))
        _set(self, "ratio", pair("RandomErasing", "ratio", self.ratio, MAX_RATIO, MIN_RATIO))


@dataclass(frozen=True, slots=True)
class RandomHorizontalFlip(Transform):
    """With probability ``p`` mirrors left and right (record only)."""

    kind: ClassVar[Kind] = Kind.RECORD
    random: ClassVar[bool] = True
    p: float = 0.5

    def __post_init__(self) -> None:
        _set(self, "p", real("RandomHorizontalFlip", "p", self.p, 0.0, 1.0))


@dataclass(frozen=True, slots=True)
class DoNothing(Transform):
    """Keeps a place in the list, so that the draws of the transforms behind it do not move."""

    kind: ClassVar[Kind] = Kind.NOTHING


@dataclass(frozen=True, slots=True)
class FusedNormalization:
    """The last operation of every chain, never listed by the user: flip, normalise, erase, cast and channel padding
    in one pass over the output. ``flip`` and ``erase`` are (op index, transform) or None.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    flip: tuple[int, RandomHorizontalFlip] | None
    erase: tuple[int, RandomErasing] | None


LISTABLE: dict[str, type[Transform]] = {
    cls.__name__: cls
    for cls in (
        Pad,
        RandomCrop,
        CenterCrop,
        RandomRotation,
        RandomScale,
        Resize,
        RandomResizedCrop,
        FastRandomResizedCrop,
        ColorJitter,
        RandomGrayscale,
        RandomAutocontrast,
        GaussianBlur,
        GaussianNoise,
        RandomErasing,
        RandomHorizontalFlip,
        DoNothing,
    )
}
"""Every transform a recipe may list, by name; the JSON form uses these names."""


def transform_from_dict(plain: object) -> Transform:
    """Rebuild a transform from ``Transform.to_dict``; raises ValueRejected for an unknown type or argument."""
    if not isinstance(plain, dict) or not isinstance(plain.get("type"), str):
        raise ValueRejected(f'expected an object with a "type", given {plain!r}')
    name = plain["type"]
    cls = LISTABLE.get(name)
    if cls is None:
        raise ValueRejected(f"unknown transform {name!r}; expected one of: {', '.join(LISTABLE)}")
    arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in plain.items()}
    del arguments["type"]
    known = [field.name for field in fields(cls)]
    for key in arguments:
        if key not in known:
            raise ValueRejected(f"{name}: unknown argument {key!r}; expected: {', '.join(known)}")
    for field in known:
        if field not in arguments:
            raise ValueRejected(f"{name}: argument {field!r} is missing; expected: {', '.join(known)}")
    return cls(**arguments)


def _set(instance: Transform, field: str, value: object) -> None:
    object.__setattr__(instance, field, value)


def _as_tuple(fill: int | Sequence[int]) -> tuple[int, ...]:
    return (fill,) if isinstance(fill, int) else tuple(fill)
