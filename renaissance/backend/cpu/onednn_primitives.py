"""Convolution primitives of oneDNN on this project's layouts: activations NHWC, weights KRSC.

oneDNN names the sizes of an operand in the order N, C, H, W (weights: groups, K per group, C per group, R, S) whatever
its layout; the layout is a matter of strides. A group dimension is written only for more than one group.
"""

from __future__ import annotations

from ctypes import c_int
from dataclasses import dataclass

from renaissance.backend.cpu.onednn import (
    FORWARD_INFERENCE,
    FORWARD_TRAINING,
    MemoryDesc,
    OneDnn,
    PostOps,
    Primitive,
    dims_array,
)
from renaissance.core.dtype import DType

_DIRECT = 1
STRIDED = "brgconv_strided"
"""What oneDNN 3.2 takes for data gradients of stride 2. With few channels per group (depthwise has one) it needs twenty
times as long as the next one in its list."""
FEW_CHANNELS = 16


@dataclass(frozen=True, slots=True)
class ConvShape:
    """Sizes of one convolution. ``pad`` is added on all four sides; what of the input no window reaches is unread."""

    n: int
    h: int
    w: int
    c: int
    k: int
    """Output channels."""
    r: int
    """Height of the kernel."""
    s: int
    """Width of the kernel."""
    stride: int
    pad: int
    groups: int
    ho: int
    wo: int

    @property
    def macs(self) -> int:
        """Multiply-accumulates of each of the three products, those with padding included."""
        return self.n * self.ho * self.wo * self.k * self.r * self.s * (self.c // self.groups)

    @property
    def inputs(self) -> int:
        """Elements of x."""
        return self.n * self.h * self.w * self.c

    @property
    def outputs(self) -> int:
        """Elements of y."""
        return self.n * self.ho * self.wo * self.k

    @property
    def weights(self) -> int:
        """Elements of the weights."""
        return self.k * self.r * self.s * (self.c // self.groups)

    def __str__(self) -> str:
        groups = f" g{self.groups}" if self.groups > 1 else ""
        return f"{self.n}x{self.h}x{self.w}x{self.c} k{self.k} {self.r}x{self.s} s{self.stride} p{self.pad}{groups}"


def image_desc(dnn: OneDnn, n: int, h: int, w: int, c: int, dtype: DType) -> MemoryDesc:
    """An NHWC tensor."""
    return dnn.desc((n, c, h, w), dtype, (h * w * c, 1, w * c, c))


def weights_dims(shape: ConvShape) -> tuple[int, ...]:
    """Sizes of the weights as oneDNN names them."""
    per_group = (shape.k // shape.groups, shape.c // shape.groups, shape.r, shape.s)
    return per_group if shape.groups == 1 else (shape.groups, *per_group)


def weights_desc(dnn: OneDnn, shape: ConvShape, dtype: DType) -> MemoryDesc:
    """KRSC weights."""
    c = shape.c // shape.groups
    one = shape.r * shape.s * c
    strides: tuple[int, ...] = (one, 1, shape.s * c, c)
    if shape.groups > 1:
        strides = (shape.k // shape.groups * one, *strides)
    return dnn.desc(weights_dims(shape), dtype, strides)


class ConvPrimitives:
    """The primitives of one shape. ``dtype`` is that of activations and weights."""

    def __init__(self, dnn: OneDnn, shape: ConvShape, dtype: DType) -> None:
        self.dnn, self.shape, self.dtype = dnn, shape, dtype
        self.x = image_desc(dnn, shape.n, shape.h, shape.w, shape.c, dtype)
        self.y = image_desc(dnn, shape.n, shape.ho, shape.wo, shape.k, dtype)
        self.w = weights_desc(dnn, shape, dtype)
        self.dw = weights_desc(dnn, shape, DType.FP32)
        self.b = dnn.desc((shape.k,), DType.FP32)

    def forward(self, *, bias: bool, post: PostOps | None = None, training: bool = True) -> Primitive:
        """y = post(conv(x, w) + b); the primitive chooses the layout of the weights."""
        return self.dnn.primitive(
            "dnnl_convolution_forward_primitive_desc_create",
            (self.x, self.dnn.any_desc(weights_dims(self.shape), self.dtype), self.b if bias else None, self.y),
            post=post,
            before=[c_int(FORWARD_TRAINING if training else FORWARD_INFERENCE), c_int(_DIRECT)],
            after=self._geometry(),
        )

    def backward_data(self, forward: Primitive) -> Primitive:
        """dx from dy; the primitive chooses the layout of the weights."""
        narrow = self.shape.c // self.shape.groups < FEW_CHANNELS
        return self.dnn.primitive(
            "dnnl_convolution_backward_data_primitive_desc_create",
            (self.x, self.dnn.any_desc(weights_dims(self.shape), self.dtype), self.y),
            before=[c_int(_DIRECT)],
            after=self._geometry(),
            hint=forward,
            avoid=STRIDED if narrow else "",
        )

    def backward_weights(self, forward: Primitive, *, bias: bool) -> Primitive:
        """dw (FP32, the primitive chooses the layout) and db from x and dy."""
        return self.dnn.primitive(
            "dnnl_convolution_backward_weights_primitive_desc_create",
            (self.x, self.dnn.any_desc(weights_dims(self.shape), DType.FP32), self.b if bias else None, self.y),
            before=[c_int(_DIRECT)],
            after=self._geometry(),
            hint=forward,
        )

    def _geometry(self) -> list[object]:
        """Strides, dilations, padding before and after (the library rounds the output size down, as we do)."""
        pad = (self.shape.pad, self.shape.pad)
        return [dims_array(pair) for pair in ((self.shape.stride, self.shape.stride), (0, 0), pad, pad)]
