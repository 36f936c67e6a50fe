"""Convolutions, dense, grouped and depthwise: one matrix product per group and place in the kernel.

Cross-correlation with zero padding; x [N,H,W,C], w [K,R,S,C/g], y [N,Ho,Wo,K]. Output channel k belongs to group
k div (K/g) and reads the C/g input channels of that group.
"""

from __future__ import annotations

import numpy as np

from renaissance.backend.reference.operands import F64, Op, Operands, activate


def correlate(x: F64, w: F64, stride: int, pad: int, groups: int) -> F64:
    """y[n,i,j,k] = sum over r, s, c of x[n, i stride + r - pad, j stride + s - pad, c] w[k,r,s,c]."""
    _, rows, columns, _ = w.shape
    size = [(x.shape[axis] + 2 * pad - w.shape[axis]) // stride + 1 for axis in (1, 2)]
    padded = _pad(x, pad)
    y = np.zeros((groups, x.shape[0] * size[0] * size[1], w.shape[0] // groups))
    for r in range(rows):
        for s in range(columns):
            y += _by_group(_window(padded, r, s, stride, size), groups) @ _kernel(w[:, r, s], groups)
    return _from_groups(y, (x.shape[0], *size, w.shape[0]))


def weight_gradient(dy: F64, x: F64, kernel: tuple[int, int], stride: int, pad: int, groups: int) -> F64:
    """dw[k,r,s,c] = sum over n, i, j of dy[n,i,j,k] x[n, i stride + r - pad, j stride + s - pad, c]."""
    padded, gradient = _pad(x, pad), _by_group(dy, groups)
    dw = np.empty((dy.shape[3], *kernel, x.shape[3] // groups))
    for r in range(kernel[0]):
        for s in range(kernel[1]):
            window = _by_group(_window(padded, r, s, stride, dy.shape[1:3]), groups)
            dw[:, r, s] = (gradient.transpose(0, 2, 1) @ window).reshape(dw[:, r, s].shape)
    return dw


def data_gradient(dy: F64, w: F64, shape: tuple[int, ...], stride: int, pad: int, groups: int) -> F64:
    """dx [N,H,W,C]: every dy goes back, times the weight, to the places that its output read."""
    n, height, width, channels = shape
    padded = np.zeros((n, height + 2 * pad, width + 2 * pad, channels))
    gradient = _by_group(dy, groups)
    for r in range(w.shape[1]):
        for s in range(w.shape[2]):
            part = gradient @ _kernel(w[:, r, s], groups).transpose(0, 2, 1)
            window = _window(padded, r, s, stride, dy.shape[1:3])
            window += _from_groups(part, window.shape)
    return padded[:, pad : pad + height, pad : pad + width]


def _pad(x: F64, pad: int) -> F64:
    return np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))


def _window(padded: F64, r: int, s: int, stride: int, size: tuple[int, ...] | list[int]) -> F64:
    """The view [N,Ho,Wo,C] of what place (r, s) of the kernel reads."""
    end = [(size[0] - 1) * stride + 1, (size[1] - 1) * stride + 1]
    return padded[:, r : r + end[0] : stride, s : s + end[1] : stride]


def _by_group(values: F64, groups: int) -> F64:
    """[N,H,W,C] as [groups, N H W, C/groups]."""
    return values.reshape(-1, groups, values.shape[3] // groups).transpose(1, 0, 2)


def _from_groups(values: F64, shape: tuple[int, ...]) -> F64:
    return values.transpose(1, 0, 2).reshape(shape)


def _kernel(w: F64, groups: int) -> F64:
    """One place of the weights, [K, C/g], as [groups, C/g, K/g]."""
    return w.reshape(groups, -1, w.shape[1]).transpose(0, 2, 1)


def _geometry(op: Operands) -> tuple[int, int, int]:
    stride, pad, groups = (int(op.node.attrs[name]) for name in ("stride", "pad", "groups"))
    return stride, pad, groups


def conv_fwd(op: Operands) -> None:
    """y = act(conv(x, w) + b); the bias may be absent."""
    x, w, *bias = op.node.inputs
    y = correlate(op.read(x), op.read(w), *_geometry(op))
    if bias:
        y += op.read(bias[0])
    op.write(op.node.outputs[0], activate(y, str(op.node.attrs["activation"])))


def conv_bwd_weight(op: Operands) -> None:
    """dw and (with a bias) db = sum of dy over samples and places, both overwritten."""
    dy, x = (op.read(i) for i in op.node.inputs)
    dw, *db = op.node.outputs
    kernel = op.shape(dw)[1:3]
    op.write(dw, weight_gradient(dy, x, (kernel[0], kernel[1]), *_geometry(op)))
    if db:
        op.write(db[0], dy.sum(axis=(0, 1, 2)))


def conv_bwd_data(op: Operands) -> None:
    dy, w = (op.read(i) for i in op.node.inputs)
    out = op.node.outputs[0]
    op.write(out, data_gradient(dy, w, op.shape(out), *_geometry(op)))


def conv_inf(op: Operands) -> None:
    """y = act((conv(x, w) + b) eq_scale + eq_bias + residual): convolution and folded batch norm."""
    x, w, scale, shift, *rest = (op.read(i) for i in op.node.inputs)
    y = correlate(x, w, *_geometry(op))
    if op.node.attrs["bias"]:
        y += rest.pop(0)
    y = y * scale + shift
    if op.node.attrs["residual"]:
        y += rest.pop(0)
    op.write(op.node.outputs[0], activate(y, str(op.node.attrs["activation"])))


OPS: dict[str, Op] = {
    "CONV_FWD": conv_fwd,
    "CONV_BWD_WEIGHT": conv_bwd_weight,
    "CONV_BWD_DATA": conv_bwd_data,
    "CONV_INF": conv_inf,
}
