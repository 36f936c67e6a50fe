"""The zoo's models by name, with the images they are made for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from renaissance.core.errors import ValueRejected
from renaissance.core.shape import INT32_MAX, Shape
from renaissance.graph.blueprint import BluePrint
from renaissance.zoo.classic import lenet5, nin, vgg11_bn, vgg16_bn
from renaissance.zoo.mobilenet import mobilenet_v2
from renaissance.zoo.resnet import resnet18, resnet34, resnet50

GREY_32, COLOUR_32, COLOUR_224 = Shape.of(32, 32, 1), Shape.of(32, 32, 3), Shape.of(224, 224, 3)


@dataclass(frozen=True, slots=True)
class Entry:
    """One model: how it is made for a number of classes, and its usual input ([1,H,W,C]) and number of classes."""

    name: str
    make: Callable[[int], BluePrint]
    input: Shape
    num_classes: int


def _cifar(make: Callable[..., BluePrint]) -> Callable[[int], BluePrint]:
    return functools.partial(make, cifar=True)


ENTRIES = (
    Entry("lenet5", lenet5, GREY_32, 10),
    Entry("nin", nin, COLOUR_32, 10),
    Entry("vgg11_bn", vgg11_bn, COLOUR_224, 1000),
    Entry("vgg16_bn", vgg16_bn, COLOUR_224, 1000),
    Entry("resnet18", resnet18, COLOUR_224, 1000),
    Entry("resnet34", resnet34, COLOUR_224, 1000),
    Entry("resnet50", resnet50, COLOUR_224, 1000),
    Entry("mobilenet_v2", mobilenet_v2, COLOUR_224, 1000),
    Entry("resnet18_cifar", _cifar(resnet18), COLOUR_32, 10),
    Entry("resnet34_cifar", _cifar(resnet34), COLOUR_32, 10),
    Entry("resnet50_cifar", _cifar(resnet50), COLOUR_32, 10),
    Entry("mobilenet_v2_cifar", _cifar(mobilenet_v2), COLOUR_32, 10),
)
_BY_NAME = {entry.name: entry for entry in ENTRIES}


def models() -> tuple[str, ...]:
    """The names ``model`` takes."""
    return tuple(_BY_NAME)


def entry(name: str) -> Entry:
    """The entry of a name; raises ValueRejected with the known names."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise ValueRejected(f"no model {name!r} in the zoo; expected one of: {', '.join(_BY_NAME)}") from None


def model(name: str, num_classes: int | None = None) -> BluePrint:
    """The model of a name for a number of classes, by default that of the data set it was published for.

    Raises ValueRejected for an unknown name or a number below 1.
    """
    found = entry(name)
    classes = found.num_classes if num_classes is None else num_classes
    if isinstance(classes, bool) or not isinstance(classes, int) or not 1 <= classes <= INT32_MAX:
        raise ValueRejected(f"zoo.model({name!r}, {classes!r}): expected at least 1 class")
    return found.make(classes)
