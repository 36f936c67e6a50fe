"""The BluePrint DSL: immutable layers, and every wrong argument named."""

import dataclasses

import pytest

from renaissance.core.errors import ValueRejected
from renaissance.core.shape import Shape
from renaissance.graph import BluePrint, fc, flatten, relu, seq
from renaissance.graph.arch_plan import LayerKind, expand

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
