"""The BluePrint DSL: immutable layers, and every wrong argument named."""

import dataclasses
from collections.abc import Callable

import pytest

from renaissance.core.errors import ValueRejected
from renaissance.core.shape import Shape
from renaissance.graph import BluePrint, blueprint, fc, flatten, relu, seq
from renaissance.graph.arch_plan import LayerKind, expand
from renaissance.graph.blueprint import BlockStyle

IMAGE = Shape.of(28, 28, 1)


def test_layers_are_values_and_cannot_be_changed() -> None:
    assert fc(10) == fc(10, bias=True)
    assert fc(10) != fc(10, bias=False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        fc(10).out = 3  # type: ignore[misc]


def test_nested_seqs_and_lists_read_in_order() -> None:
    nested = BluePrint(seq(flatten(), seq(fc(4), seq(relu())), seq([relu(), fc(2)])))
    kinds = [layer.kind for layer in expand(nested, IMAGE)]
    assert kinds == [LayerKind.FLATTEN, LayerKind.FC, LayerKind.RELU, LayerKind.RELU, LayerKind.FC]
    assert [layer.name for layer in expand(nested, IMAGE)] == ["flatten1", "fc1", "relu1", "relu2", "fc2"]


def test_the_same_layer_object_twice_is_two_layers() -> None:
    shared = fc(8)
    assert [layer.name for layer in expand(BluePrint(seq(shared, shared)), IMAGE)] == ["fc1", "fc2"]


def test_a_blueprint_of_a_blueprint_is_the_same_model() -> None:
    model = BluePrint(seq(fc(3)))
    assert BluePrint(model) == model
    assert BluePrint(fc(3)).root == fc(3)


@pytest.mark.parametrize("out", [0, -1, 2**31, 1.5, "10", True, None])
def test_fc_rejects_an_impossible_number_of_outputs(out: object) -> None:
    with pytest.raises(ValueRejected, match="at least 1"):
        fc(out)  # type: ignore[arg-type]


def test_fc_rejects_a_bias_that_is_not_a_boolean() -> None:
    with pytest.raises(ValueRejected, match="bias"):
        fc(3, bias=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("layers", [(), ([],)])
def test_an_empty_seq_is_rejected(layers: tuple[object, ...]) -> None:
    with pytest.raises(ValueRejected, match="at least one layer"):
        seq(*layers)  # type: ignore[arg-type]


def test_something_that_is_not_a_layer_is_named_with_its_place() -> None:
    with pytest.raises(ValueRejected, match="item 1"):
        seq(fc(3), relu)  # type: ignore[arg-type]
    with pytest.raises(ValueRejected, match="expected a layer"):
        BluePrint(None)  # type: ignore[arg-type]


def test_every_factory_gives_the_layer_it_is_named_after() -> None:
    b = blueprint
    assert b.conv(8, 3) == b.Conv(out=8, kernel=3, stride=1, pad=0, groups=1, bias=False)
    assert b.conv(8, 3, 2, 1, bias=True) == b.Conv(8, 3, 2, 1, 1, True)
    assert b.conv_dw(3, 2, 1) == b.Conv(None, 3, 2, 1, None, False)
    assert b.group_conv(8, 4, 3, 2, 1, True) == b.Conv(8, 3, 2, 1, 4, True)
    assert b.bn() == b.Bn(0.1, 1e-5)
    assert b.maxpool(3, 2, 1) == b.MaxPool(3, 2, 1)
    assert b.maxpool(3) == b.MaxPool(3, 3, 0)  # windows side by side, as other frameworks do
    assert b.avgpool(2, 1, 1, False) == b.AvgPool(2, 1, 1, False)
    assert b.avgpool(2).count_include_pad  # finding A16 of spec/framework
    assert b.cbr(8, 3, 1, 1) == b.seq(b.conv(8, 3, 1, 1), b.bn(), b.relu()) == b.conv_bn_relu(8, 3, 1, 1)
    assert b.cbrp(8, 3, 1, 1, 3, 2, 1) == b.seq(b.cbr(8, 3, 1, 1), b.maxpool(3, 2, 1))
    assert b.gap_fc(10) == b.seq(b.gap(), b.fc(10))
    assert b.block(16, BlockStyle.MB_E6_K3_DS) == b.mbconv(6, 16, 2)
    assert b.block(16, BlockStyle.MB_E1_K3) == b.mbconv(1, 16, 1)
    assert b.block(16, BlockStyle.RESNET_3_3_DS) == b.ResNetBlock(None, 16, 2)
    assert b.block(4, 16, BlockStyle.RESNET_1_3_1) == b.ResNetBlock(4, 16, 1)
    assert b.add2(BluePrint(relu()), b.seq(b.tanh_act())) == b.Add2(relu(), b.Seq((b.tanh_act(),)))
    assert len(expand(BluePrint(b.repeat(b.seq(relu(), fc(3)), 4)), IMAGE)) == 8
    functions = (b.relu, b.tanh_act, b.silu, b.relu6, b.leaky_relu, b.hardswish, b.elu, b.sigmoid)
    assert [f().kind for f in functions] == list(b.ActivationKind)


def test_every_wrong_argument_is_named_with_what_was_expected() -> None:
    b = blueprint
    cases: list[tuple[str, Callable[[], object]]] = [
        (r"conv\(0, 3.*number of filters; expected an integer of at least 1, not 0", lambda: b.conv(0, 3)),
        (r"size of the kernel; expected an integer of at least 1, not 0", lambda: b.conv(8, 0)),
        (r"s is the stride; .* not 0", lambda: b.conv_dw(3, 0)),
        (r"p is the padding on each side; expected an integer of at least 0, not -1", lambda: b.conv(8, 3, 1, -1)),
        (r"bias is None; expected True or False", lambda: b.conv(8, 3, bias=None)),  # type: ignore[arg-type]
        (r"size of the kernel; .* not True", lambda: b.conv_dw(True)),
        (r"group_conv\(8, 3.*groups must divide out; 8 = 2 \* 3 \+ 2", lambda: b.group_conv(8, 3, 1)),
        (r"number of channel groups", lambda: b.group_conv(8, 0, 1)),
        (r"momentum is the weight of the newest batch; expected 0.0 to 1.0, not 1.5", lambda: b.bn(1.5)),
        (r"eps is added to the variance; expected .* not 0.0", lambda: b.bn(eps=0.0)),
        (r"expected a finite number, not nan", lambda: b.bn(float("nan"))),
        (r"expected a finite number, not True", lambda: b.bn(True)),
        (r"dropout\(1.0\).* expected p < 1", lambda: b.dropout(1)),
        (r"dropout\(-0.5\).* expected 0.0 to 1.0", lambda: b.dropout(-0.5)),
        (r"dropout\('x'\)", lambda: b.dropout("x")),  # type: ignore[arg-type]
        (r"maxpool\(257.*from 1 to 256, not 257", lambda: b.maxpool(257)),  # finding A16: upstream stops at 11
        (r"expected at most half of k, 1, not 2", lambda: b.maxpool(3, 2, 2)),
        (r"expected at most half of k, 0, not 1", lambda: b.avgpool(1, 1, 1)),
        (r"count_include_pad is 0", lambda: b.avgpool(2, 2, 0, 0)),  # type: ignore[arg-type]
        (r"repeat\(..., 0\): times", lambda: b.repeat(relu(), 0)),
        (r"repeat\(\): body is 3", lambda: b.repeat(3, 2)),  # type: ignore[arg-type]
        (r"add2\(\): stem is None", lambda: b.add2(relu(), None)),  # type: ignore[arg-type]
        (r"add2\(\): shortcut is the function 'identity'", lambda: b.add2(b.identity, relu())),  # type: ignore[arg-type]
        (r"block\(\): the last argument is the style; .*RESNET_1_3_1", lambda: b.block()),  # type: ignore[call-overload]
        (r"block\(3, 4\): the last", lambda: b.block(3, 4)),  # type: ignore[call-overload]
        (r"RESNET_3_3 is written block\(out, style\)", lambda: b.block(3, 4, BlockStyle.RESNET_3_3)),
        (r"RESNET_1_3_1_DS is written block\(mid, out, style\)", lambda: b.block(3, BlockStyle.RESNET_1_3_1_DS)),
        (r"block\(0, MB_E1_K3\): mid and out are numbers of channels", lambda: b.block(0, BlockStyle.MB_E1_K3)),
        (r"mbconv\(0, 8, 1\): expand", lambda: b.mbconv(0, 8, 1)),
        (r"mbconv\(1, 8, 3\): stride .* from 1 to 2, not 3", lambda: b.mbconv(1, 8, 3)),
        (r"number of outputs", lambda: b.gap_fc(0)),
        (r"seq\(\): item 0 is the function 'relu'; expected a layer: call it", lambda: seq(relu)),  # type: ignore[arg-type]
    ]
    for message, call in cases:
        with pytest.raises(ValueRejected, match=message):
            call()
