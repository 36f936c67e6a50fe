"""Activations, sums, dropout, channel padding and the views of test-time augmentation; NaN passes through them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from renaissance.backend.reference.operands import F64, Op, Operands, activate, passed
from renaissance.core.philox import Domain, dropout_threshold, philox_array, purpose

LEAK = 0.01


def _sigmoid(x: F64) -> F64:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def _elu(x: F64) -> F64:
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


FORWARD: dict[str, Callable[[F64], F64]] = {
    "relu": lambda x: activate(x, "relu"),
    "relu6": lambda x: activate(x, "relu6"),
    "tanh": np.tanh,
    "sigmoid": _sigmoid,
    "silu": lambda x: x * _sigmoid(x),
    "leaky_relu": lambda x: np.where(x > 0, x, LEAK * x),
    "hardswish": lambda x: np.where(x <= -3, 0.0, np.where(x >= 3, x, x * (x + 3) / 6)),
    "elu": _elu,
}
DERIVATIVE: dict[str, Callable[[F64], F64]] = {
    "relu": lambda y: passed(y, "relu").astype(np.float64),
    "relu6": lambda y: passed(y, "relu6").astype(np.float64),
    "tanh": lambda y: 1 - y * y,
    "sigmoid": lambda y: y * (1 - y),
    "silu": lambda x: _sigmoid(x) * (1 + x * (1 - _sigmoid(x))),
    "leaky_relu": lambda y: np.where(y > 0, 1.0, LEAK),
    "hardswish": lambda x: np.where(x <= -3, 0.0, np.where(x >= 3, 1.0, (2 * x + 3) / 6)),
    "elu": lambda y: np.where(y > 0, 1.0, y + 1),
}
"""Derivative of each activation, from x for those of ``graph.ops.SAVES_INPUT``, else from y."""


def act_fwd(op: Operands) -> None:
    with np.errstate(invalid="ignore"):
        op.write(op.node.outputs[0], FORWARD[str(op.node.attrs["kind"])](op.read(op.node.inputs[0])))


def act_bwd(op: Operands) -> None:
    """dx = dy times the derivative; where that is 0, dx is 0 whatever dy is."""
    dy, saved = (op.read(i) for i in op.node.inputs)
    slope = DERIVATIVE[str(op.node.attrs["kind"])](saved)
    with np.errstate(invalid="ignore"):
        op.write(op.node.outputs[0], np.where(slope == 0, 0.0, dy * slope))


def add(op: Operands) -> None:
    """ADD_FWD and GRAD_SUM: y = act(a + b)."""
    a, b = (op.read(i) for i in op.node.inputs)
    with np.errstate(invalid="ignore"):
        op.write(op.node.outputs[0], activate(a + b, str(op.node.attrs.get("activation", "none"))))


def reshape(op: Operands) -> None:
    """FLATTEN_FWD and FLATTEN_BWD: the same logical elements in another shape."""
    op.write(op.node.outputs[0], op.read(op.node.inputs[0]))


def dropout_factor(count: int, p: float, layer: int, seed: int, step: int) -> F64:
    """[count]: 1/(1-p) for elements that are kept, else 0. Element e is kept when word e mod 4 of block e div 4 is at
    least p 2^32 (docs/random-numbers.md, domain 4)."""
    blocks = np.arange((count + 3) // 4)
    words = np.stack(philox_array(seed, blocks, purpose(Domain.DROPOUT, layer), step, 0), axis=1).reshape(-1)[:count]
    return np.where(words >= dropout_threshold(p), 1 / (1 - p), 0.0)


def dropout(op: Operands) -> None:
    """DROPOUT_FWD and DROPOUT_BWD: the mask is drawn again from seed, step and layer, never stored."""
    x_id, low, high, step = op.node.inputs
    x = op.read(x_id)
    words = [int(op.ints(i)[0]) & 0xFFFFFFFF for i in (low, high, step)]
    seed = words[0] | words[1] << 32
    factor = dropout_factor(x.size, op.attr("p", 0.0), int(op.node.attrs["layer"]), seed, words[2])
    with np.errstate(invalid="ignore"):
        op.write(op.node.outputs[0], x * factor.reshape(x.shape))


def channel_padding(op: Operands) -> None:
    """CHANNEL_PADDING_FWD and _BWD: channels that are new come in as zeros, channels that go are dropped."""
    x, y = op.read(op.node.inputs[0]), np.zeros(op.shape(op.node.outputs[0]))
    channels = min(x.shape[3], y.shape[3])
    y[..., :channels] = x[..., :channels]
    op.write(op.node.outputs[0], y)


def input_view(op: Operands) -> None:
    """y[h,w] = x[h + dy, w' + dx], w' mirrored with flip; outside the picture its edge is repeated."""
    x = op.read(op.node.inputs[0])
    rows = np.arange(x.shape[1]) + int(op.node.attrs["dy"])
    columns = np.arange(x.shape[2])
    if op.node.attrs["flip"]:
        columns = columns[::-1]
    columns = columns + int(op.node.attrs["dx"])
    op.write(op.node.outputs[0], x[:, _clamp(rows, x.shape[1])][:, :, _clamp(columns, x.shape[2])])


def _clamp(index: npt.NDArray[np.intp], size: int) -> npt.NDArray[np.intp]:
    return np.clip(index, 0, size - 1)


def mean_logits(op: Operands) -> None:
    """Mean over the views of one picture."""
    op.write(op.node.outputs[0], sum(op.read(i) for i in op.node.inputs) / len(op.node.inputs))


OPS: dict[str, Op] = {
    "ACT_FWD": act_fwd,
    "ACT_BWD": act_bwd,
    "ADD_FWD": add,
    "GRAD_SUM": add,
    "FLATTEN_FWD": reshape,
    "FLATTEN_BWD": reshape,
    "DROPOUT_FWD": dropout,
    "DROPOUT_BWD": dropout,
    "CHANNEL_PADDING_FWD": channel_padding,
    "CHANNEL_PADDING_BWD": channel_padding,
    "INPUT_VIEW": input_view,
    "MEAN_LOGITS": mean_logits,
}
