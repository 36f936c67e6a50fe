"""Max, average and global average pooling over square windows; padding never wins and (unless asked) never counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from renaissance.backend.reference.operands import F64, Op, Operands

WIDEST_BYTE_KERNEL = 15
"""Largest kernel whose places are numbered in one byte of the index; beyond it they take two, the low one first."""


def _geometry(op: Operands) -> tuple[int, int, int]:
    kernel, stride, pad = (int(op.node.attrs[name]) for name in ("kernel", "stride", "pad"))
    return kernel, stride, pad


def _windows(x: F64, kernel: int, stride: int, pad: int, fill: float) -> F64:
    """[N,Ho,Wo,C,k*k]: the values of each window in scan order."""
    padded = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)), constant_values=fill)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (kernel, kernel), axis=(1, 2))
    windows = windows[:, ::stride, ::stride]
    return windows.reshape(*windows.shape[:4], kernel * kernel)


def _inside(shape: tuple[int, ...], kernel: int, stride: int, pad: int) -> npt.NDArray[np.bool_]:
    """[1,Ho,Wo,1,k*k]: which places of each window lie in the picture."""
    return _windows(np.ones((1, *shape[1:3], 1)), kernel, stride, pad, 0.0) > 0


def max_pool(x: F64, kernel: int, stride: int, pad: int) -> tuple[F64, npt.NDArray[np.intp]]:
    """(largest value, its place kh*k + kw) of each window: the first of equals in scan order; the first NaN wins."""
    windows = _windows(x, kernel, stride, pad, -np.inf)
    place = windows.argmax(axis=-1)  # NaN is the largest value to argmax
    inside = np.broadcast_to(_inside(x.shape, kernel, stride, pad), windows.shape)
    won_by_padding = ~np.take_along_axis(inside, place[..., None], axis=-1)[..., 0]  # every value is -Inf
    place = np.where(won_by_padding, inside.argmax(axis=-1), place)
    return np.take_along_axis(windows, place[..., None], axis=-1)[..., 0], place


def maxpool_fwd(op: Operands) -> None:
    kernel, stride, pad = _geometry(op)
    y, place = max_pool(op.read(op.node.inputs[0]), kernel, stride, pad)
    op.write(op.node.outputs[0], y)
    stored = _index(op, op.node.outputs[1], kernel)
    stored[...] = place.astype(stored.dtype)


def maxpool_inf(op: Operands) -> None:
    op.write(op.node.outputs[0], max_pool(op.read(op.node.inputs[0]), *_geometry(op))[0])


def maxpool_bwd(op: Operands) -> None:
    """Each dy goes to the place that won its window; overlapping windows add up."""
    kernel, stride, pad = _geometry(op)
    dy, place = op.read(op.node.inputs[0]), _index(op, op.node.inputs[1], kernel)
    parts = [np.where(place == i, dy, 0.0) for i in range(kernel * kernel)]
    op.write(op.node.outputs[0], _spread(parts, op.shape(op.node.outputs[0]), kernel, stride, pad))


def _index(op: Operands, tensor_id: int, kernel: int) -> npt.NDArray[Any]:
    """The index tensor as unsigned places [N,Ho,Wo,C] (a view)."""
    return op.raw(tensor_id).view(np.uint8 if kernel <= WIDEST_BYTE_KERNEL else "<u2")


def _spread(parts: list[F64], shape: tuple[int, ...], kernel: int, stride: int, pad: int) -> F64:
    """Sum of ``parts[kh*k+kw]`` [N,Ho,Wo,C] at the places of the picture that the windows read there."""
    n, height, width, channels = shape
    padded = np.zeros((n, height + 2 * pad, width + 2 * pad, channels))
    for i, part in enumerate(parts):
        r, s = divmod(i, kernel)
        end = [(size - 1) * stride + 1 for size in part.shape[1:3]]
        padded[:, r : r + end[0] : stride, s : s + end[1] : stride] += part
    return padded[:, pad : pad + height, pad : pad + width]


def _divisor(op: Operands, shape: tuple[int, ...]) -> F64:
    """[1,Ho,Wo,1]: cells of each window, those of the padding included or not."""
    inside = _inside(shape, *_geometry(op))
    if op.node.attrs["count_include_pad"]:
        return np.full(inside.shape[:4], float(inside.shape[4]))
    return np.asarray(inside.sum(axis=-1), np.float64)


def avgpool_fwd(op: Operands) -> None:
    x = op.read(op.node.inputs[0])
    op.write(op.node.outputs[0], _windows(x, *_geometry(op), 0.0).sum(axis=-1) / _divisor(op, x.shape))


def avgpool_bwd(op: Operands) -> None:
    kernel, stride, pad = _geometry(op)
    shape = op.shape(op.node.outputs[0])
    share = op.read(op.node.inputs[0]) / _divisor(op, shape)
    op.write(op.node.outputs[0], _spread([share] * kernel**2, shape, kernel, stride, pad))


def gap_fwd(op: Operands) -> None:
    op.write(op.node.outputs[0], op.read(op.node.inputs[0]).mean(axis=(1, 2), keepdims=True))


def gap_bwd(op: Operands) -> None:
    shape = op.shape(op.node.outputs[0])
    op.write(op.node.outputs[0], np.broadcast_to(op.read(op.node.inputs[0]) / (shape[1] * shape[2]), shape))


OPS: dict[str, Op] = {
    "MAXPOOL_FWD": maxpool_fwd,
    "MAXPOOL_INF": maxpool_inf,
    "MAXPOOL_BWD": maxpool_bwd,
    "AVGPOOL_FWD": avgpool_fwd,
    "AVGPOOL_BWD": avgpool_bwd,
    "GAP_FWD": gap_fwd,
    "GAP_BWD": gap_bwd,
}
