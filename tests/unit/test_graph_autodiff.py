"""The compiled training graph, interpreted in NumPy, has the gradient that the complex step gives.

The derivative of the loss along v is Im loss(w + ihv) / h with h far below rounding: exact to the last digits, and no
step over the kink of a ReLU as with finite differences.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from graph_models import Case, cases
from hypothesis import given, settings
from hypothesis import strategies as st

from renaissance.core.region import Region
from renaissance.graph import CompiledModel, Node, compile_model, train_program

Array = npt.NDArray[np.complex128]
STEP = 1e-30
Memory = dict[int, Array]


def rows(x: Array) -> Array:
    return x.reshape(len(x), -1)


def positive(x: Array) -> Array:
    return np.where(x.real > 0, x, 0)


def log_softmax(z: Array) -> Array:
    shifted = z - z.real.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def targets(m: Memory, node: Node, classes: int) -> Array:
    eps = float(m[node.inputs[2]].real)
    return (1 - eps) * np.eye(classes)[m[node.inputs[1]].real.astype(int)] + eps / classes


def fc_fwd(m: Memory, n: Node) -> list[Array]:
    y = rows(m[n.inputs[0]]) @ m[n.inputs[1]].T + (m[n.inputs[2]] if len(n.inputs) > 2 else 0.0)
    return [positive(y) if n.attrs["activation"] == "relu" else y]


def fc_bwd_data(m: Memory, n: Node) -> list[Array]:
    dx = m[n.inputs[0]] @ m[n.inputs[1]]
    return [np.where(rows(m[n.inputs[2]]).real > 0, dx, 0) if n.attrs["mask"] == "relu" else dx]


def softmax_fwd(m: Memory, n: Node) -> list[Array]:
    log_p = log_softmax(m[n.inputs[0]])
    partials = -(targets(m, n, log_p.shape[1]) * log_p).sum(axis=1)
    return [np.exp(log_p), partials, partials.sum() / m[n.inputs[3]]]


def softmax_bwd(m: Memory, n: Node) -> list[Array]:
    p = m[n.inputs[0]]
    return [(p - targets(m, n, p.shape[1])) * m[n.inputs[4]] / m[n.inputs[3]]]


def bwd_weight(m: Memory, n: Node) -> list[Array]:
    dy, x = m[n.inputs[0]], rows(m[n.inputs[1]])
    return [dy.T @ x, dy.sum(axis=0)]


KERNELS: dict[str, Callable[[Memory, Node], list[Array]]] = {
    "LABEL_COPY": lambda m, n: [m[n.inputs[0]]],
    "FLATTEN_FWD": lambda m, n: [rows(m[n.inputs[0]])],
    "FC_FWD": fc_fwd,
    "FC_BWD_WEIGHT": bwd_weight,
    "FC_BWD_DATA": fc_bwd_data,
    "RELU_FWD": lambda m, n: [positive(m[n.inputs[0]])],
    "RELU_BWD": lambda m, n: [np.where(rows(m[n.inputs[1]]).real > 0, rows(m[n.inputs[0]]), 0)],
    "SOFTMAX_CE_FWD": softmax_fwd,
    "SOFTMAX_CE_BWD": softmax_bwd,
}


def run(model: CompiledModel, m: Memory, slot: int) -> None:
    for node in model.training.program(train_program(slot)):
        if node.op in KERNELS:
            for tensor, value in zip(node.outputs, KERNELS[node.op](m, node), strict=False):
                m[tensor] = value


def start(model: CompiledModel, slot: int, seed: int) -> Memory:
    rng, request = np.random.default_rng(seed), model.request
    data = model.tensor(model.inputs[slot].data).shape
    m: Memory = {
        model.inputs[slot].label: rng.integers(0, request.num_classes, data.n).astype(np.complex128),
        model.inputs[slot].data: rng.normal(size=data.dims).astype(np.complex128),
    }
    m |= {i: np.array(complex(model.scalar_init[name])) for name, i in model.scalars.items()}
    m[model.scalar("label_smoothing")] = np.array(0.1 + 0j)
    m[model.scalar("batch_valid")] = np.array(complex(data.n))
    for p in model.parameters:
        is_bias = model.tensor(p.weight).region is Region.W_FC_BIAS
        value = rng.normal(size=p.shape.c if is_bias else (p.shape.n, p.shape.c)) / np.sqrt(p.shape.c)
        m[p.weight if p.half is None else p.half] = value
    return m


@settings(max_examples=40, deadline=None)
@given(case=cases(max_width=6, max_batch=5), slot=st.sampled_from([0, 1]), seed=st.integers(0, 2**32 - 1))
def test_gradients_of_the_compiled_graph_are_exact(case: Case, slot: int, seed: int) -> None:
    model = compile_model(case.blueprint, case.request)
    m = start(model, slot, seed)
    run(model, m, slot)
    scale = m[model.scalar("scaling")].real
    rng = np.random.default_rng(seed)
    for p in model.parameters:
        tensor = p.weight if p.half is None else p.half
        direction = rng.normal(size=m[tensor].shape)
        moved = m | {tensor: m[tensor] + 1j * STEP * direction}
        run(model, moved, slot)
        expected = moved[model.scalar("loss")].imag / STEP
        given_by_graph = (m[p.grad].real * direction).sum() / scale
        np.testing.assert_allclose(given_by_graph, expected, rtol=1e-9, atol=1e-12, err_msg=p.name)
