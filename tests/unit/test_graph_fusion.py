"""Each fusion on hand-made nodes: what it makes of them, and what it leaves alone. Tensors are small numbers."""

from graph_nodes import node

from renaissance.graph import GraphId, Node
from renaissance.graph.fusion import (
    fold_batch_norms,
    fuse_gradient_sums,
    fuse_relu_backward,
    fuse_residuals,
    mask_before_pools,
)

NORM = {"momentum": 0.1, "eps": 1e-5}
GEOMETRY = {"stride": 1, "pad": 1, "groups": 1}
VECTORS = (10, 11, 12, 13, 14)
"""gamma, beta, running mean and variance, batch_valid."""
SAVED = (20, 21, 22, 23)


def bn(index: int, x: int, y: int, activation: str = "none", *residual: int) -> Node:
    return node(index, "BN_FWD", (x, *VECTORS, *residual), (y, *SAVED), **NORM, activation=activation)


def bn_inf(index: int, x: int, y: int, activation: str = "none", *residual: int) -> Node:
    return node(index, "BN_INF", (x, 10, 11, *residual), (y,), activation=activation)


def add(index: int, a: int, b: int, y: int, activation: str = "relu", graph: GraphId = GraphId.DEEP_FWD_BWD) -> Node:
    return node(index, "ADD_FWD", (a, b), (y,), activation=activation, graph=graph)


def conv(index: int, x: int, y: int, activation: str = "none", *bias: int) -> Node:
    return node(index, "CONV_FWD", (x, 30, *bias), (y,), **GEOMETRY, activation=activation)


def bn_bwd(index: int, dy: int, dx: int, *more: int, dys: int = 1, residual: bool = False) -> Node:
    return node(
        index, "BN_BWD", (dy, 1, 10, 20, 21, 14, *more), (dx, 40, 41), activation="relu", dys=dys, residual=residual
    )


def test_the_batch_norm_before_a_sum_adds_the_other_term_and_takes_the_activation() -> None:
    assert fuse_residuals([bn(0, 1, 2), add(1, 9, 2, 3)]) == [bn(0, 1, 3, "relu", 9)]
    assert fuse_residuals([bn(0, 1, 2), add(1, 2, 9, 3, "none")]) == [bn(0, 1, 3, "none", 9)]
    assert fuse_residuals([bn_inf(0, 1, 2), add(1, 9, 2, 3)]) == [bn_inf(0, 1, 3, "relu", 9)]


def test_of_two_batch_norms_the_later_one_adds() -> None:
    shortcut, stem = bn(0, 1, 2), bn(1, 5, 6)
    assert fuse_residuals([shortcut, stem, add(2, 2, 6, 3)]) == [shortcut, bn(1, 5, 3, "relu", 2)]
    assert fuse_residuals([shortcut, stem, add(2, 6, 2, 3)]) == [shortcut, bn(1, 5, 3, "relu", 2)]


def test_the_fused_node_stands_where_the_sum_stood() -> None:
    """Its other term may be computed after the batch norm."""
    other = bn(1, 7, 9, "relu")
    assert fuse_residuals([bn(0, 1, 2), other, add(2, 2, 9, 3)]) == [other, bn(0, 1, 3, "relu", 9)]


def test_a_term_that_somebody_else_reads_or_that_has_an_activation_stays() -> None:
    reader = node(2, "ACT_FWD", (2,), (4,), kind="silu")
    for nodes in (
        [bn(0, 1, 2), add(1, 9, 2, 3), reader],
        [bn(0, 1, 2, "relu"), add(1, 9, 2, 3)],
        [bn(0, 1, 2, "none", 8), add(1, 9, 2, 3)],  # it has a residual already
        [bn(0, 1, 2), add(1, 2, 2, 3)],  # x + x
        [bn(0, 1, 2), add(1, 9, 2, 3, graph=GraphId.FIRST_LAYER_FWD_A)],
        [conv(0, 1, 2), add(1, 9, 2, 3)],
    ):
        assert fuse_residuals(nodes) == nodes


def folded(
    index: int, y: int, *more: int, activation: str = "relu", bias: bool = False, residual: bool = False
) -> Node:
    attrs = {**GEOMETRY, "activation": activation, "bias": bias, "residual": residual}
    return node(index, "CONV_INF", (1, 30, 10, 11, *more), (y,), **attrs)  # type: ignore[arg-type]


def test_a_batch_norm_is_folded_into_the_convolution_before_it() -> None:
    assert fold_batch_norms([conv(0, 1, 2), bn_inf(1, 2, 3, "relu")]) == [folded(0, 3)]
    assert fold_batch_norms([conv(0, 1, 2, "none", 31), bn_inf(1, 2, 3, "relu6")]) == [
        folded(0, 3, 31, activation="relu6", bias=True)
    ]
    assert fold_batch_norms([conv(0, 1, 2, "none", 31), bn_inf(1, 2, 3, "relu", 9)]) == [
        folded(0, 3, 31, 9, bias=True, residual=True)
    ]


def test_a_convolution_with_an_activation_or_another_reader_is_not_folded() -> None:
    for nodes in (
        [conv(0, 1, 2, "relu"), bn_inf(1, 2, 3)],
        [conv(0, 1, 2), bn_inf(1, 2, 3), add(2, 2, 9, 4)],
        [node(0, "FC_FWD", (1, 30), (2,), activation="none"), bn_inf(1, 2, 3)],
    ):
        assert fold_batch_norms(nodes) == nodes


def test_a_folded_convolution_adds_the_residual() -> None:
    conv_bn = folded(0, 2, activation="none")
    assert fuse_residuals([conv_bn, add(1, 9, 2, 3)]) == [folded(0, 3, 9, residual=True)]
    biased = folded(0, 2, 31, activation="none", bias=True)
    assert fuse_residuals([biased, add(1, 9, 2, 3)]) == [folded(0, 3, 31, 9, bias=True, residual=True)]
    full = folded(0, 2, 9, activation="none", residual=True)
    assert fuse_residuals([full, add(1, 8, 2, 3)]) == [full, add(1, 8, 2, 3)]


def test_a_sum_of_gradients_goes_into_the_batch_norm_that_alone_reads_it() -> None:
    total = node(0, "GRAD_SUM", (50, 51), (52,))
    assert fuse_gradient_sums([total, bn_bwd(1, 52, 60, 3)]) == [bn_bwd(1, 50, 60, 3, 51, dys=2)]
    residual = bn_bwd(1, 52, 60, 3, residual=True)
    assert fuse_gradient_sums([total, residual]) == [bn_bwd(1, 50, 60, 3, 51, dys=2, residual=True)]


def test_only_one_sum_fits_and_only_as_the_gradient() -> None:
    first, second = node(0, "GRAD_SUM", (50, 51), (52,)), node(1, "GRAD_SUM", (52, 53), (54,))
    assert fuse_gradient_sums([first, second, bn_bwd(2, 54, 60, 3)]) == [first, bn_bwd(2, 52, 60, 3, 53, dys=2)]
    shared = node(2, "GRAD_SUM", (52, 55), (56,))
    for nodes in (
        [first, bn_bwd(1, 52, 60, 3), shared],
        [first, bn_bwd(1, 49, 60, 52)],
        [first, bn_bwd(1, 52, 60, 3, 49, dys=2)],
    ):
        assert fuse_gradient_sums(nodes) == nodes


def test_a_mask_is_fused_only_into_a_gradient_that_nobody_else_reads() -> None:
    data = node(0, "FC_BWD_DATA", (1, 2), (3,), mask="none")
    relu = node(1, "ACT_BWD", (3, 4), (5,), kind="relu")
    other = node(2, "FC_BWD_WEIGHT", (3, 6), (7,))
    assert fuse_relu_backward([data, relu]) == [node(0, "FC_BWD_DATA", (1, 2, 4), (5,), mask="relu")]
    for nodes in (
        [data, relu, other],
        [data, node(1, "ACT_BWD", (6, 3), (5,), kind="relu")],  # reads it as the output of the relu
        [data, node(1, "ACT_BWD", (3, 4), (5,), kind="silu")],
    ):
        assert fuse_relu_backward(nodes) == nodes


POOL = {"kernel": 3, "stride": 2, "pad": 1}
FORWARD = node(0, "MAXPOOL_FWD", (3,), (5, 6), **POOL)
"""x 3 -> y 5, index 6"""


def pool_bwd(index: int, dy: int, dx: int, **geometry: int) -> Node:
    return node(index, "MAXPOOL_BWD", (dy, 6), (dx,), **{**POOL, **geometry})


def act_bwd(index: int, dy: int, saved: int, dx: int, kind: str) -> Node:
    return node(index, "ACT_BWD", (dy, saved), (dx,), kind=kind)


def masked(*nodes: Node) -> list[Node]:
    return mask_before_pools([FORWARD, *nodes], {5: 70}.__getitem__)[1:]


def test_a_gradient_is_masked_by_the_output_of_a_pool_before_it_is_spread() -> None:
    for kind in ("relu", "relu6", "leaky_relu", "tanh"):
        plain = pool_bwd(1, 50, 51), act_bwd(2, 51, 3, 52, kind)
        assert masked(*plain) == [act_bwd(1, 50, 5, 70, kind), pool_bwd(1, 70, 52)]
    norm = pool_bwd(1, 50, 51), bn_bwd(2, 51, 60, 3)
    bare = node(2, "BN_BWD", (51, 1, 10, 20, 21, 14), (60, 40, 41), activation="none", dys=1, residual=False)
    assert masked(*norm) == [act_bwd(1, 50, 5, 70, "relu"), pool_bwd(1, 70, 51), bare]


def test_a_mask_by_something_else_or_a_pool_of_stride_1_stays() -> None:
    for nodes in (
        [pool_bwd(1, 50, 51), act_bwd(2, 51, 9, 52, "relu")],
        [pool_bwd(1, 50, 51), act_bwd(2, 51, 3, 52, "silu")],  # its derivative follows from the input
        [pool_bwd(1, 50, 51, stride=1), act_bwd(2, 51, 3, 52, "relu")],
        [pool_bwd(1, 50, 51), act_bwd(2, 51, 3, 52, "relu"), node(3, "GRAD_SUM", (51, 53), (54,))],
        [pool_bwd(1, 50, 51), bn_bwd(2, 51, 60, 9)],
        [pool_bwd(1, 50, 51), bn_bwd(2, 51, 60, 3, 49, dys=2)],
    ):
        assert masked(*nodes) == nodes
