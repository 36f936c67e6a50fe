"""What launchers of every backend check before they build a call: a tensor's element type and size, and the windows of
convolutions and pools.

A kernel trusts its arguments, so what does not fit must end here, by name.
"""

from __future__ import annotations

from renaissance.backend.registry import label
from renaissance.core.dtype import DType
from renaissance.core.errors import DTypeError, ShapeError, ValueRejected
from renaissance.graph.computation_graph import Node
from renaissance.tensor.dtensor import DTensor


def of_size(node: Node, tensor: DTensor, numel: int) -> DTensor:
    """``tensor`` itself when it has ``numel`` elements; else ShapeError."""
    if tensor.shape.numel != numel:
        raise ShapeError(f"{label(node)}: tensor {tensor.name!r} is {tensor.shape}; expected {numel} elements")
    return tensor


def expect(node: Node, tensor: DTensor, dtype: DType, numel: int | None = None) -> DTensor:
    """``tensor`` itself when it has the dtype and (if given) ``numel`` elements; else a named error."""
    if tensor.dtype is not dtype:
        raise DTypeError(f"{label(node)}: tensor {tensor.name!r} is {tensor.dtype.name}; expected {dtype.name}")
    return tensor if numel is None else of_size(node, tensor, numel)


def convolution_of(node: Node, x: DTensor, w: DTensor, y: DTensor) -> tuple[int, int, int]:
    """(stride, padding, groups) of a node with x [N,H,W,C], w [K,R,S,C/groups] and y [N,Ho,Wo,K], or their gradients.

    Raises ShapeError when the tensors do not fit, ValueRejected for an attribute that is no such number.
    """
    stride, pad, groups = (_number(node, name) for name in ("stride", "pad", "groups"))
    n, h, width, c = x.shape.dims
    k, r, s, per_group = w.shape.dims
    if per_group * groups != c or k % groups or h + 2 * pad < r or width + 2 * pad < s:
        raise ShapeError(
            f"{label(node)}: weights {w.name!r} {w.shape} on {x.name!r} {x.shape}; expected [K,R,S,C/{groups}] with "
            f"K divisible by {groups} group(s) and a kernel no larger than the padded image"
        )
    high, wide = (h + 2 * pad - r) // stride + 1, (width + 2 * pad - s) // stride + 1
    if y.shape.dims != (n, high, wide, k):
        raise ShapeError(
            f"{label(node)}: tensor {y.name!r} is {y.shape}; expected [{n},{high},{wide},{k}] "
            f"(stride {stride}, pad {pad})"
        )
    return stride, pad, groups


def window_of(node: Node, large: DTensor, small: DTensor) -> tuple[int, int, int, int]:
    """(kernel height, kernel width, stride, padding) of a pooling node; GAP is one window over the image.

    Raises ShapeError when the window does not fit, a window could lie in the padding alone, or the small image is not
    floor((size + 2 pad - kernel) / stride) + 1.
    """
    if node.op.startswith("GAP"):
        kh, kw, stride, pad = large.shape.h, large.shape.w, 1, 0
    else:
        kh = kw = int(node.attrs["kernel"])
        stride, pad = int(node.attrs["stride"]), int(node.attrs["pad"])
    if kh < 1 or stride < 1 or not 0 <= pad < kh or large.shape.h + 2 * pad < kh or large.shape.w + 2 * pad < kw:
        raise ShapeError(
            f"{label(node)}: kernel {kh}, stride {stride}, pad {pad} on {large.name!r} {large.shape}; "
            "expected kernel and stride of at least 1, 0 <= pad < kernel, and a window that fits the padded image"
        )
    high = (large.shape.h + 2 * pad - kh) // stride + 1
    wide = (large.shape.w + 2 * pad - kw) // stride + 1
    expected = (large.shape.n, high, wide, large.shape.c)
    if small.shape.dims != expected:
        raise ShapeError(f"{label(node)}: {small.name!r} is {small.shape}; expected {list(expected)}")
    return kh, kw, stride, pad


def _number(node: Node, name: str) -> int:
    value = node.attrs[name]
    if not isinstance(value, int) or value < (0 if name == "pad" else 1):
        raise ValueRejected(f"{label(node)}: {name} {value!r}; expected an integer of at least {int(name != 'pad')}")
    return value
