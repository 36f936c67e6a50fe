"""ArchPlan as JSON. Finding A21 of spec/framework: upstream's reader lacks six activations that its writer writes."""

import json
from pathlib import Path

import pytest
from blueprint_strategies import Drawn, blueprints
from hypothesis import given, settings

from renaissance.core.errors import FormatError
from renaissance.core.shape import Shape
from renaissance.graph import blueprint as bp
from renaissance.graph.arch_json import from_json, to_json
from renaissance.graph.arch_plan import ArchPlan, LayerKind, build_arch_plan

EVERY_KIND = bp.BluePrint(
    bp.seq(
        bp.add2(bp.identity(), bp.conv(3, 3, 1, 1)),
        bp.cbr(4, 3, 1, 1),
        bp.seq(
            bp.bn(),
            bp.tanh_act(),
            bp.silu(),
            bp.relu6(),
            bp.leaky_relu(),
            bp.hardswish(),
            bp.elu(),
            bp.sigmoid(),
            bp.relu(),
        ),
        bp.add2(bp.conv(4, 1), bp.bn(0.25, 1e-3)),
        bp.maxpool(3, 2, 1),
        bp.avgpool(2, 1, 0, count_include_pad=False),
        bp.channel_padding(),
        bp.flatten(),
        bp.bn(),
        bp.dropout(0.1),
        bp.conv(6, 1),
        bp.gap(),
        bp.fc(5),
    )
)


def every_kind() -> ArchPlan:
    return build_arch_plan(EVERY_KIND, Shape.of(9, 9, 3), 5)


def test_every_kind_of_layer_comes_back() -> None:
    plan = every_kind()
    assert {layer.kind for layer in plan.layers} == set(LayerKind)
    text = to_json(plan)
    assert from_json(text) == plan
    assert to_json(from_json(text)) == text
    assert json.loads(text)["layers"][0] == {
        "kind": "IDENTITY",
        "name": "identity1",
        "attrs": {},
        "input": [1, 9, 9, 3],
        "output": [1, 9, 9, 3],
        "first": True,
    }


@settings(max_examples=30, deadline=None)
@given(blueprints())
def test_any_plan_comes_back(drawn: Drawn) -> None:
    plan = build_arch_plan(drawn.blueprint, drawn.sample, drawn.num_classes)
    assert from_json(to_json(plan)) == plan


def _edited(path: list[object], value: object) -> str:
    data = json.loads(to_json(every_kind()))
    target = data
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return json.dumps(data)


CBR = 6
"""Index of the CBR; the layers before it are the copy of the input and the sum around it."""


CHANGES: list[tuple[list[object], object, str]] = [
    (["format"], "ArchPlan-9", "format is 'ArchPlan-9'; expected 'ArchPlan-1'"),
    (["num_classes"], 6, "fc1: it gives 5 outputs, but the data set has 6"),
    (["num_classes"], True, "num_classes is True"),
    (["input"], [2, 9, 9, 3], "one sample"),
    (["input"], [1, 9, 3], "four sizes"),
    (["layers"], [], "at least one layer"),
    (["layers", 0], 7, r"layers\[0\] has 7; expected the entries kind, name"),
    (["layers", 0, "more"], 1, r"layers\[0\] has the entries .*more"),
    (["layers", CBR, "kind"], "CBRX", r"layers\[6\].kind is 'CBRX'; expected one of FC"),
    (["layers", CBR, "kind"], [], r"layers\[6\].kind is \[\]"),
    (["layers", CBR, "kind"], "CONV", r"layers\[6\].attrs has the entries .*momentum"),
    (["layers", CBR, "name"], "fc1", "two layers have the name 'fc1'"),
    (["layers", CBR, "name"], "", r"layers\[6\].name is ''"),
    (["layers", CBR, "first"], True, r"marked first are \['identity1', 'conv2'\]; expected \['identity1'\]"),
    (["layers", 0, "first"], False, r"marked first are \[\]"),
    (["layers", 0, "first"], 1, "true or false"),
    (["layers", CBR, "attrs", "stride"], 0, r"attrs.stride is 0; expected a number from 1"),
    (["layers", CBR, "attrs", "stride"], 1.0, "a value of type int"),
    (["layers", CBR, "attrs", "bias"], 1, "a value of type bool"),
    (["layers", CBR, "attrs", "kernel"], 10**400, r"attrs.kernel is 1000+; expected a number"),
    (["layers", CBR, "attrs", "kernel"], 30, r"layer conv2: kernel 30 does not fit"),
    (["layers", CBR, "attrs", "eps"], 0.0, "attrs.eps is 0.0"),
    (["layers", CBR, "attrs", "momentum"], float("nan"), "attrs.momentum is nan"),
    (["layers", CBR, "attrs", "activation"], "tanh", "one of none, relu, relu6"),
    (["layers", CBR, "output"], [1, 9, 9, 8], r"shapes are .* expected \[1,9,9,3\] -> \[1,9,9,4\]"),
    (["layers", -1, "kind"], "RELU", "ends with its only SOFTMAX_CE"),
    (["layers", 1, "kind"], "SIGMOID", "without the marker before it"),
]


def test_a_plan_that_was_changed_is_refused_and_the_place_named() -> None:
    for path, value, message in CHANGES:
        with pytest.raises(FormatError, match="^plan.json.*" + message):
            from_json(_edited(path, value), "plan.json")


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "null", "[]", '"x"', "1" * 5000])
def test_text_that_is_no_plan_is_refused_by_name(text: str) -> None:
    with pytest.raises(FormatError, match=r"^plan\.json"):
        from_json(text, str(Path("plan.json")))
