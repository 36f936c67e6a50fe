"""Drawings: well-formed, complete, without overlaps, and the same bytes for the same model."""

import re
from collections import Counter
from xml.etree import ElementTree

from blueprint_strategies import Drawn, blueprints
from hypothesis import given, settings

from renaissance.core.shape import Shape
from renaissance.graph import BluePrint, CompileRequest, build_arch_plan, compile_model, graph_dot, plan_dot, seq
from renaissance.graph import blueprint as bp
from renaissance.graph.draw import BACKWARD, FORWARD, graph_picture, graph_svg, layer_edges, plan_picture, plan_svg
from renaissance.graph.picture import EdgeStyle, Picture, lanes
from renaissance.graph.svg import svg

RESIDUAL = BluePrint(
    seq(
        bp.cbr(8, 3, 1, 1),
        bp.block(16, bp.BlockStyle.RESNET_3_3_DS),
        bp.add2(bp.silu(), bp.mbconv(2, 16, 1)),
        bp.maxpool(2),
        bp.gap_fc(5),
    )
)
REQUEST = CompileRequest(height=8, width=8, channels=3, num_classes=5, train_batch=4, val_batch=4)
MODEL = compile_model(RESIDUAL, REQUEST)
TRAIN = graph_picture(MODEL.training, MODEL.plans[0], "one step")


def titles(text: str) -> list[str]:
    """The hints of all boxes; parsing fails unless the text is well-formed."""
    return [element.text or "" for element in ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}title")]


def assert_boxes_stand_apart(picture: Picture) -> None:
    places = Counter((box.column, box.row, box.lane) for box in picture.boxes)
    assert set(places.values()) == {1}
    keys = {box.key for box in picture.boxes}
    assert all({edge.source, edge.target} <= keys for edge in picture.edges)


def test_a_drawing_is_well_formed_whatever_its_title_says() -> None:
    for text in (
        graph_svg(MODEL.training, MODEL.plans[0], 'a "<&>" \x00\ud800 model'),
        graph_svg(MODEL.inference, MODEL.plans[0], "]]>"),
        plan_svg(MODEL.arch_plan, "<svg>"),
    ):
        assert titles(text)
        assert text.encode() == text.encode("utf-8")
    assert 'a "&lt;&amp;&gt;"  model' in graph_svg(MODEL.training, MODEL.plans[0], 'a "<&>" \x00\ud800 model')


def test_every_node_of_a_step_is_a_box_or_a_line_of_a_list() -> None:
    text = svg(TRAIN)
    drawn = {box.key for box in TRAIN.boxes}
    listed = "\n".join(line for panel in TRAIN.panels for line in panel.lines)
    other_slot = [n.index for n in MODEL.training.nodes if n.graph.name.endswith("_B")]
    for node in MODEL.training.nodes:
        assert node.index in drawn or f"#{node.index} {node.op}" in listed or node.index in other_slot
    assert len(titles(text)) == len(drawn)
    assert text.count("marker-end") == len(TRAIN.edges)


def test_the_forward_pass_runs_down_and_the_backward_pass_up_beside_it() -> None:
    assert_boxes_stand_apart(TRAIN)
    boxes = {box.key: box for box in TRAIN.boxes}
    assert {box.column for box in TRAIN.boxes} == {FORWARD, BACKWARD}
    for edge in TRAIN.edges:
        source, target = boxes[edge.source], boxes[edge.target]
        if edge.style is EdgeStyle.SAVED:
            assert (source.column, target.column) == (FORWARD, BACKWARD)
        elif source.column == FORWARD:
            assert source.row < target.row
        else:
            assert source.row > target.row
    row_of = {box.detail.split(" [")[0]: box.row for box in TRAIN.boxes}
    for i in range(1, 8):  # a weight gradient stands in the row of its convolution
        assert row_of[f"conv{i}.weight.grad"] == row_of[f"conv{i}.y"]
    bands = {(band.label, band.column): (band.first_row, band.last_row) for band in TRAIN.bands}
    assert bands["FIRST_LAYER_FWD_A", FORWARD] == (0, 0)
    assert bands["DEEP_FWD_BWD", FORWARD][1] == TRAIN.rows - 1


def test_a_shortcut_stands_beside_the_stem_in_a_lane_that_its_edge_has_for_itself() -> None:
    #   0 -> 1 -> 2 -> 3 -> 5, a shortcut 0 -> 4 -> 5, and a shorter one 1 -> 6 -> 3
    edges = [(0, 1), (1, 2), (2, 3), (3, 5), (0, 4), (4, 5), (1, 6), (6, 3)]
    rows = {0: 0, 1: 1, 4: 1, 2: 2, 6: 2, 3: 3, 5: 4}
    assert lanes([0, 1, 4, 2, 6, 3, 5], rows, edges) == {0: 0, 1: 0, 4: 1, 2: 0, 6: 2, 3: 0, 5: 0}


def test_the_edges_of_a_plan_lead_around_its_markers() -> None:
    plan = build_arch_plan(
        BluePrint(seq(bp.conv(4, 1), bp.add2(bp.identity(), bp.add2(bp.silu(), bp.elu())), bp.gap_fc(3))),
        Shape.of(4, 4, 2),
        3,
    )
    names = [layer.name for layer in plan.layers]
    assert [(names[a], names[b]) for a, b in layer_edges(plan)] == [
        ("conv1", "silu1"),
        ("conv1", "elu1"),
        ("silu1", "add2"),
        ("elu1", "add2"),
        ("conv1", "add1"),
        ("add2", "add1"),
        ("add1", "gap1"),
        ("gap1", "fc1"),
        ("fc1", "loss"),
    ]
    dot = plan_dot(plan)
    assert dot.count(" -> ") == 9
    assert re.search(r'l\d+ \[label="add1 ADD2_END"\]', dot)


@settings(max_examples=30, deadline=None)
@given(blueprints())
def test_the_layers_of_any_model_are_drawn_apart_and_downwards(drawn: Drawn) -> None:
    picture = plan_picture(build_arch_plan(drawn.blueprint, drawn.sample, drawn.num_classes))
    assert_boxes_stand_apart(picture)
    rows = {box.key: box.row for box in picture.boxes}
    assert all(rows[edge.source] < rows[edge.target] for edge in picture.edges)
    ElementTree.fromstring(svg(picture))


def test_drawing_twice_gives_the_same_bytes() -> None:
    again = compile_model(RESIDUAL, REQUEST)
    assert graph_svg(again.training, again.plans[0]) == graph_svg(MODEL.training, MODEL.plans[0])
    assert graph_dot(again.inference, again.plans[0]) == graph_dot(MODEL.inference, MODEL.plans[0])
