"""The passes on hand-made node lists, where chains of layers do not reach."""

from graph_nodes import node, one

from renaissance.core.region import ZERO_GRAD_SPAN, Region, Span
from renaissance.graph import GraphId
from renaissance.graph.dependence import data_predecessors, effects
from renaissance.graph.passes import clear_spans, eliminate_dead, mirror_inputs, order_nodes

FEATURE, GRAD, SCALAR = Region.F_FEATURE_FP32, Region.G_FC_WEIGHT, Region.S_SCALAR_FP32


def test_nodes_whose_values_nobody_reads_go_away_with_what_only_they_read() -> None:
    regions = (FEATURE, FEATURE, FEATURE, FEATURE, GRAD, SCALAR)
    a, b = node(0, "ACT_FWD", (0,), (1,), kind="relu"), node(1, "ACT_FWD", (1,), (2,), kind="relu")
    kept = node(2, "ACT_FWD", (0,), (3,), kind="relu")
    assert eliminate_dead([a, b, kept], regions, keep={3}) == [kept]
    assert eliminate_dead([a, b, kept], regions, keep={2}) == [a, b]
    gradient = node(3, "FC_BWD_WEIGHT", (0, 1), (4,))
    assert eliminate_dead([gradient], regions, keep=()) == []
    check = node(4, "RANGE_CHECK_NAN", (5,), (5,), spans_in=(one(GRAD),), clip=0.0)
    assert eliminate_dead([gradient, check], regions, keep=()) == [gradient, check]


def test_only_what_is_read_before_it_is_overwritten_is_cleared() -> None:
    regions = (GRAD, Region.G_FIRST_CONV, Region.R_RESULT, Region.G_BN_BIAS, FEATURE, SCALAR)
    overwrite = node(0, "FC_BWD_WEIGHT", (4, 4), (0,))
    check = node(1, "RANGE_CHECK_NAN", (5,), (5,), spans_in=(Span(Region.G_BN_BIAS, Region.G_DEEP_CONV),), clip=0.0)
    assert clear_spans([overwrite, check], regions, ZERO_GRAD_SPAN) == (
        one(Region.G_BN_BIAS),
        one(Region.G_FIRST_CONV),
    )
    adjacent = (Region.G_BN_BIAS, Region.G_BN_WEIGHT, GRAD, SCALAR, SCALAR, SCALAR)
    assert clear_spans([check], adjacent, ZERO_GRAD_SPAN) == (
        Span(Region.G_BN_BIAS, Region.G_BN_WEIGHT),
        one(GRAD),
    )


def test_slot_b_gets_its_own_copy_of_every_graph_that_depends_on_the_slot() -> None:
    first = node(0, "ACT_FWD", (0,), (2,), kind="relu", graph=GraphId.FIRST_LAYER_FWD_A)
    deep = node(1, "ACT_FWD", (2,), (3,), kind="relu")
    copies = order_nodes(mirror_inputs([first, deep], {0: 1}), "train")
    assert [(n.graph, n.inputs, n.index) for n in copies] == [
        (GraphId.FIRST_LAYER_FWD_A, (0,), 0),
        (GraphId.FIRST_LAYER_FWD_B, (1,), 1),
        (GraphId.DEEP_FWD_BWD, (2,), 2),
    ]


def test_data_edges_do_not_depend_on_the_order_of_the_nodes() -> None:
    regions = (FEATURE, FEATURE, FEATURE, GRAD, SCALAR)
    a, b = node(0, "ACT_FWD", (0,), (1,), kind="relu"), node(1, "ACT_FWD", (1,), (2,), kind="relu")
    w = node(2, "FC_BWD_WEIGHT", (2, 1), (3,))
    check = node(3, "RANGE_CHECK_NAN", (4,), (4,), spans_in=(one(GRAD),), clip=0.0)
    expected = {0: set(), 1: {0}, 2: {0, 1}, 3: {2}}
    assert data_predecessors([a, b, w, check], regions) == expected
    assert data_predecessors([check, b, w, a], regions) == expected


def test_effects_follow_the_roles_of_the_op_table() -> None:
    m, v, w, a, g = (Region[f"{s}_FC_WEIGHT"] for s in "MVWAG")
    spans = {"spans_in": (one(g), one(m), one(v)), "spans_out": (one(w), one(a))}
    update = effects(node(0, "RANGE_UPDATE_ADAMW", range(9), (), decay=True, **spans))  # type: ignore[arg-type]
    assert update.read_regions == {g, m, v, w}
    assert update.written_regions == {m, v, w, a}
    accumulate = effects(node(0, "ACCUM_METRICS", (1, 2, 3, 4), (5, 6, 7, 8)))
    assert accumulate.read_tensors == {1, 2, 3, 4, 5, 6, 7, 8}
