"""BluePrint: the model as the user writes it, a tree of immutable layers.

    BluePrint(seq(conv(32, 3, p=1), bn(), relu(), maxpool(2, 2, 0), gap(), fc(10)))

A layer is a description without shapes; the same object may appear in several places and is a new layer each time.
Every factory checks its arguments and raises ValueRejected that names the factory, the argument and what it expects.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import overload

from renaissance.core.dtype import FP32_SMALLEST_NORMAL
from renaissance.core.errors import ValueRejected
from renaissance.core.shape import INT32_MAX

LARGEST_KERNEL = 256
"""A max pool stores which cell of its window won in at most two bytes: 256 * 256 cells."""
BN_MOMENTUM, BN_EPS = 0.1, 1e-5
"""Defaults of ``bn``; the normalisations inside blocks always use them."""


class ActivationKind(IntEnum):
    """Elementwise functions. The slope of LEAKY_RELU is 0.01, alpha of ELU is 1."""

    RELU = 0
    TANH = 1
    SILU = 2
    RELU6 = 3
    LEAKY_RELU = 4
    HARDSWISH = 5
    ELU = 6
    SIGMOID = 7


class BlockStyle(IntEnum):
    """Styles of ``block``. RESNET_1_3_1 is the bottleneck, RESNET_3_3 the basic block of He et al., arXiv 1512.03385
    (the stride sits in the 3x3); MB_E1 and MB_E6 are the inverted residuals of Sandler et al., arXiv 1801.04381, that
    widen by 1 or 6. ``_DS`` halves height and width."""

    RESNET_1_3_1 = 0
    RESNET_1_3_1_DS = 1
    RESNET_3_3 = 2
    RESNET_3_3_DS = 3
    MB_E1_K3 = 4
    MB_E1_K3_DS = 5
    MB_E6_K3 = 6
    MB_E6_K3_DS = 7


BOTTLENECKS = frozenset({BlockStyle.RESNET_1_3_1, BlockStyle.RESNET_1_3_1_DS})
_MOBILE = {
    BlockStyle.MB_E1_K3: (1, 1),
    BlockStyle.MB_E1_K3_DS: (1, 2),
    BlockStyle.MB_E6_K3: (6, 1),
    BlockStyle.MB_E6_K3_DS: (6, 2),
}


@dataclass(frozen=True, slots=True)
class Fc:
    """Fully connected layer: y = x·Wᵀ + b over all values of a sample."""

    out: int
    bias: bool


@dataclass(frozen=True, slots=True)
class Conv:
    """Square convolution. ``out`` and ``groups`` None: depthwise, one filter per input channel."""

    out: int | None
    kernel: int
    stride: int
    pad: int
    groups: int | None
    bias: bool


@dataclass(frozen=True, slots=True)
class Bn:
    """Batch normalisation over all axes but the channels."""

    momentum: float
    eps: float


@dataclass(frozen=True, slots=True)
class Activation:
    kind: ActivationKind


@dataclass(frozen=True, slots=True)
class Dropout:
    """In training a value is 0 with probability ``p`` and otherwise divided by 1 - p."""

    p: float


@dataclass(frozen=True, slots=True)
class Flatten:
    """[N,H,W,C] -> [N,1,1,H*W*C]."""


@dataclass(frozen=True, slots=True)
class ChannelPadding:
    """Zero channels up to a multiple of 8."""


@dataclass(frozen=True, slots=True)
class MaxPool:
    kernel: int
    stride: int
    pad: int


@dataclass(frozen=True, slots=True)
class AvgPool:
    kernel: int
    stride: int
    pad: int
    count_include_pad: bool


@dataclass(frozen=True, slots=True)
class Gap:
    """[N,H,W,C] -> [N,1,1,C], the mean of every channel."""


@dataclass(frozen=True, slots=True)
class Identity:
    """y = x."""


@dataclass(frozen=True, slots=True)
class Seq:
    """Layers one after the other."""

    layers: tuple[Layer, ...]


@dataclass(frozen=True, slots=True)
class Add2:
    """shortcut(x) + stem(x)."""

    shortcut: Layer
    stem: Layer


@dataclass(frozen=True, slots=True)
class Repeat:
    """``body`` ``times`` times, each with weights of its own."""

    body: Layer
    times: int


@dataclass(frozen=True, slots=True)
class ResNetBlock:
    """Residual block; ``mid`` None is the basic block, otherwise the width of the bottleneck."""

    mid: int | None
    out: int
    stride: int


@dataclass(frozen=True, slots=True)
class MbConv:
    """Inverted residual with a depthwise 3x3, ReLU6 and a linear bottleneck."""

    expand: int
    out: int
    stride: int


Layer = (
    Fc
    | Conv
    | Bn
    | Activation
    | Dropout
    | Flatten
    | ChannelPadding
    | MaxPool
    | AvgPool
    | Gap
    | Identity
    | Seq
    | Add2
    | Repeat
    | ResNetBlock
    | MbConv
)


def conv(out: int, k: int, s: int = 1, p: int = 0, bias: bool = False) -> Conv:
    """Convolution with ``out`` filters of k x k, stride ``s`` and ``p`` rows of zeros on each side."""
    where = f"conv({out!r}, {k!r}, s={s!r}, p={p!r}, bias={bias!r})"
    _count(where, "out is the number of filters", out)
    return Conv(out, *_window(where, k, s, p), 1, _flag(where, "bias", bias))


def conv_dw(k: int, s: int = 1, p: int = 0, bias: bool = False) -> Conv:
    """Depthwise convolution: one k x k filter for each input channel."""
    where = f"conv_dw({k!r}, s={s!r}, p={p!r}, bias={bias!r})"
    return Conv(None, *_window(where, k, s, p), None, _flag(where, "bias", bias))


def group_conv(out: int, groups: int, k: int, s: int = 1, p: int = 0, bias: bool = False) -> Conv:
    """Convolution in ``groups`` groups of channels; groups must divide the input channels and ``out``."""
    where = f"group_conv({out!r}, {groups!r}, {k!r}, s={s!r}, p={p!r}, bias={bias!r})"
    _count(where, "out is the number of filters", out)
    _count(where, "groups is the number of channel groups", groups)
    if out % groups:
        raise ValueRejected(f"{where}: groups must divide out; {out} = {out // groups} * {groups} + {out % groups}")
    return Conv(out, *_window(where, k, s, p), groups, _flag(where, "bias", bias))


def bn(momentum: float = BN_MOMENTUM, eps: float = BN_EPS) -> Bn:
    """Batch normalisation; running = (1 - momentum) * running + momentum * batch. Anywhere in a model."""
    where = f"bn(momentum={momentum!r}, eps={eps!r})"
    return Bn(
        _number(where, "momentum is the weight of the newest batch", momentum, 0.0, 1.0),
        _number(where, "eps is added to the variance", eps, FP32_SMALLEST_NORMAL, float(INT32_MAX)),
    )


def relu() -> Activation:
    """max(x, 0)."""
    return Activation(ActivationKind.RELU)


def tanh_act() -> Activation:
    """tanh(x)."""
    return Activation(ActivationKind.TANH)


def silu() -> Activation:
    """x * sigmoid(x)."""
    return Activation(ActivationKind.SILU)


def relu6() -> Activation:
    """min(max(x, 0), 6)."""
    return Activation(ActivationKind.RELU6)


def leaky_relu() -> Activation:
    """x for x > 0, else 0.01 x."""
    return Activation(ActivationKind.LEAKY_RELU)


def hardswish() -> Activation:
    """x * min(max(x + 3, 0), 6) / 6."""
    return Activation(ActivationKind.HARDSWISH)


def elu() -> Activation:
    """x for x > 0, else exp(x) - 1."""
    return Activation(ActivationKind.ELU)


def sigmoid() -> Activation:
    """1 / (1 + exp(-x))."""
    return Activation(ActivationKind.SIGMOID)


def dropout(p: float) -> Dropout:
    """Inverted dropout with probability 0 <= p < 1; does nothing in validation."""
    value = _number(f"dropout({p!r})", "p is the probability of a zero", p, 0.0, 1.0)
    if value == 1.0:
        raise ValueRejected("dropout(1.0): p is the probability of a zero; with 1 nothing is left, expected p < 1")
    return Dropout(value)


def flatten() -> Flatten:
    """All values of a sample as one row; allowed anywhere, needed nowhere (the compiler adds it before an fc)."""
    return Flatten()


def channel_padding() -> ChannelPadding:
    """Zero channels up to a multiple of 8."""
    return ChannelPadding()


def maxpool(k: int, s: int | None = None, p: int = 0) -> MaxPool:
    """Maximum over windows of k x k; ``s`` defaults to ``k``. Cells of the padding never win."""
    where = f"maxpool({k!r}, s={s!r}, p={p!r})"
    return MaxPool(*_pool_window(where, k, s, p))


def avgpool(k: int, s: int | None = None, p: int = 0, count_include_pad: bool = True) -> AvgPool:
    """Mean over windows of k x k; ``s`` defaults to ``k``. The padding counts as zeros, or not at all."""
    where = f"avgpool({k!r}, s={s!r}, p={p!r}, count_include_pad={count_include_pad!r})"
    return AvgPool(*_pool_window(where, k, s, p), _flag(where, "count_include_pad", count_include_pad))


def gap() -> Gap:
    """Global average pooling."""
    return Gap()


def fc(out: int, bias: bool = True) -> Fc:
    """Fully connected layer with ``out`` outputs; reads all values of a sample as one row."""
    _count(f"fc({out!r})", "out is the number of outputs", out)
    return Fc(out, _flag(f"fc({out})", "bias", bias))


def identity() -> Identity:
    """No layer at all: the shortcut of ``add2`` that passes its input on."""
    return Identity()


def seq(*layers: Layer | BluePrint | list[Layer] | tuple[Layer, ...]) -> Seq:
    """Layers in order, as arguments or as one list; nests. Refuses to be empty."""
    given = tuple(layers[0]) if len(layers) == 1 and isinstance(layers[0], list | tuple) else layers
    if not given:
        raise ValueRejected("seq(): expected at least one layer, for example seq(fc(10))")
    return Seq(tuple(_layer(x, f"seq(): item {i}") for i, x in enumerate(given)))


def add2(shortcut: Layer | BluePrint, stem: Layer | BluePrint) -> Add2:
    """shortcut(x) + stem(x); both must give the same shape, the stem must have a layer. Nests."""
    return Add2(_layer(shortcut, "add2(): shortcut"), _layer(stem, "add2(): stem"))


def repeat(body: Layer | BluePrint, times: int) -> Repeat:
    """``body`` written ``times`` times in a row, each with weights of its own."""
    _count(f"repeat(..., {times!r})", "times is how often the body is written", times)
    return Repeat(_layer(body, "repeat(): body"), times)


def cbr(out: int, k: int, s: int = 1, p: int = 0, momentum: float = BN_MOMENTUM, eps: float = BN_EPS) -> Seq:
    """Convolution without bias, batch normalisation, ReLU."""
    return seq(conv(out, k, s, p), bn(momentum, eps), relu())


conv_bn_relu = cbr


def cbrp(out: int, k: int, s: int, p: int, pool_k: int, pool_s: int, pool_p: int) -> Seq:
    """``cbr(out, k, s, p)`` and ``maxpool(pool_k, pool_s, pool_p)``."""
    return seq(cbr(out, k, s, p), maxpool(pool_k, pool_s, pool_p))


def gap_fc(out: int, bias: bool = True) -> Seq:
    """Global average pooling and a fully connected layer: the head of most convolutional models."""
    return seq(gap(), fc(out, bias))


@overload
def block(out: int, style: BlockStyle, /) -> ResNetBlock | MbConv: ...
@overload
def block(mid: int, out: int, style: BlockStyle, /) -> ResNetBlock | MbConv: ...
def block(*arguments: int) -> ResNetBlock | MbConv:
    """``block(mid, out, style)`` for the bottlenecks RESNET_1_3_1 and RESNET_1_3_1_DS, ``block(out, style)`` otherwise.

    ResNet blocks end with a ReLU after the sum; a projection (1x1 convolution and BN) stands in the shortcut when the
    channels differ or the stride is 2. Inverted residuals: ``mbconv``.
    """
    where = f"block({', '.join(str(getattr(a, 'name', a)) for a in arguments)})"
    if not arguments or not isinstance(arguments[-1], BlockStyle):
        known = ", ".join(s.name for s in BlockStyle)
        raise ValueRejected(f"{where}: the last argument is the style; expected a BlockStyle, one of: {known}")
    *channels, style = arguments
    expected = 2 if style in BOTTLENECKS else 1
    if len(channels) != expected:
        form = "block(mid, out, style)" if expected == 2 else "block(out, style)"
        raise ValueRejected(f"{where}: {BlockStyle(style).name} is written {form}")
    for value in channels:
        _count(where, "mid and out are numbers of channels", value)
    if style in _MOBILE:
        expand, stride = _MOBILE[BlockStyle(style)]
        return MbConv(expand, channels[0], stride)
    downsampling = style in (BlockStyle.RESNET_1_3_1_DS, BlockStyle.RESNET_3_3_DS)
    return ResNetBlock(channels[0] if expected == 2 else None, channels[-1], 2 if downsampling else 1)


def mbconv(expand: int, out: int, stride: int) -> MbConv:
    """Inverted residual: 1x1 to ``expand`` times the channels (none for 1), depthwise 3x3 with ``stride`` (1 or 2),
    both with BN and ReLU6, then 1x1 to ``out`` with BN alone; added to the input when stride is 1 and shapes agree."""
    where = f"mbconv({expand!r}, {out!r}, {stride!r})"
    _count(where, "expand is how much wider the middle is", expand)
    _count(where, "out is a number of channels", out)
    _count(where, "stride is that of the depthwise convolution", stride, 1, 2)
    return MbConv(expand, out, stride)


@dataclass(frozen=True, slots=True, init=False)
class BluePrint:
    """A whole model: one layer, usually a ``seq``. Raises ValueRejected for anything that is not a layer."""

    root: Layer

    def __init__(self, layer: Layer | BluePrint) -> None:
        object.__setattr__(self, "root", _layer(layer, "BluePrint()"))


def _layer(value: object, where: str) -> Layer:
    if isinstance(value, BluePrint):
        return value.root
    if isinstance(value, Layer):
        return value
    if callable(value):
        raise ValueRejected(f"{where} is the function {getattr(value, '__name__', value)!r}; expected a layer: call it")
    raise ValueRejected(f"{where} is {value!r}; expected a layer: fc(...), conv(...), relu(), seq(...) or another")


def _count(where: str, meaning: str, value: object, low: int = 1, high: int = INT32_MAX) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        limit = f"an integer of at least {low}" if high == INT32_MAX else f"an integer from {low} to {high}"
        raise ValueRejected(f"{where}: {meaning}; expected {limit}, not {value!r}")
    return int(value)


def _flag(where: str, name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueRejected(f"{where}: {name} is {value!r}; expected True or False")
    return value


def _number(where: str, meaning: str, value: object, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueRejected(f"{where}: {meaning}; expected a finite number, not {value!r}")
    if not low <= value <= high:
        raise ValueRejected(f"{where}: {meaning}; expected {low} to {high}, not {value!r}")
    return float(value)


def _window(where: str, k: int, s: int, p: int) -> tuple[int, int, int]:
    _count(where, "k is the size of the kernel", k)
    _count(where, "s is the stride", s)
    _count(where, "p is the padding on each side", p, 0)
    return k, s, p


def _pool_window(where: str, k: int, s: int | None, p: int) -> tuple[int, int, int]:
    _count(where, "k is the size of the window", k, 1, LARGEST_KERNEL)
    window = _window(where, k, k if s is None else s, p)
    if p > k // 2:
        raise ValueRejected(f"{where}: p is the padding on each side; expected at most half of k, {k // 2}, not {p}")
    return window
