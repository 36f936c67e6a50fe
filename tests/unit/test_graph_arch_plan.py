"""ArchPlan: the standardising steps. Finding A14 of spec/framework: three kinds of MLP that upstream refuses."""

import pytest

from renaissance.core.errors import ShapeError, ValueRejected
from renaissance.core.shape import Shape
from renaissance.graph import BluePrint, build_arch_plan, fc, flatten, relu, seq
from renaissance.graph.arch_plan import LayerKind, append_loss, expand, merge_activations, normalize_flattens

IMAGE = Shape.of(28, 28, 1)
EXAMPLE = BluePrint(seq(fc(1024), relu(), fc(512), relu(), fc(256), relu(), fc(10)))
EXAMPLE_TEXT = """\
ArchPlan: 6 layers, input [1,28,28,1], 10 classes, first weights in fc1
    0 FLATTEN    flatten1     [1,28,28,1] -> [1,1,1,784]
    1 FC         fc1          [1,1,1,784] -> [1,1,1,1024]      out=1024 bias=True activation=relu [FIRST]
    2 FC         fc2          [1,1,1,1024] -> [1,1,1,512]      out=512 bias=True activation=relu
    3 FC         fc3          [1,1,1,512] -> [1,1,1,256]       out=256 bias=True activation=relu
    4 FC         fc4          [1,1,1,256] -> [1,1,1,10]        out=10 bias=True activation=none
    5 SOFTMAX_CE loss         [1,1,1,10] -> [1,1,1,10]
"""


def test_the_plan_of_the_example_is_this_text() -> None:
    assert build_arch_plan(EXAMPLE, IMAGE, 10).text() == EXAMPLE_TEXT


def test_an_explicit_leading_flatten_changes_nothing() -> None:
    explicit = BluePrint(seq(flatten(), EXAMPLE.root))
    assert build_arch_plan(explicit, IMAGE, 10) == build_arch_plan(EXAMPLE, IMAGE, 10)


@pytest.mark.parametrize(
    "sample", [Shape.of(4, 4, 8), Shape.of(1, 1, 784), Shape.of(5), Shape.of(1), Shape.of(7, 1, 3)]
)
def test_every_input_shape_works_with_and_without_a_written_flatten(sample: Shape) -> None:
    plain = build_arch_plan(BluePrint(seq(fc(12), relu(), fc(3))), sample, 3)
    written = build_arch_plan(
        BluePrint(seq(flatten(), fc(12), flatten(), relu(), flatten(), fc(3), flatten())), sample, 3
    )
    assert plain == written
    first = plain.layers[plain.first]
    assert (first.kind, first.input) == (LayerKind.FC, Shape.of(sample.numel))


def test_a_flatten_after_a_relu_on_the_image_is_kept_once() -> None:
    layers = normalize_flattens(append_loss(expand(BluePrint(seq(relu(), flatten(), relu(), fc(2))), IMAGE)), IMAGE)
    assert [layer.name for layer in layers] == ["relu1", "flatten1", "relu2", "fc1", "loss"]


def test_the_loss_is_appended_exactly_once() -> None:
    twice = append_loss(append_loss(expand(EXAMPLE, IMAGE)))
    assert [layer.kind for layer in twice].count(LayerKind.SOFTMAX_CE) == 1
    assert twice[-1].kind is LayerKind.SOFTMAX_CE


def test_only_the_first_relu_after_an_fc_is_merged() -> None:
    merged = merge_activations(expand(BluePrint(seq(relu(), fc(4), relu(), relu(), fc(2, bias=False))), IMAGE))
    assert [(x.name, x.attrs.get("activation")) for x in merged] == [
        ("relu1", None),
        ("fc1", "relu"),
        ("relu3", None),
        ("fc2", "none"),
    ]


def test_the_first_weight_bearing_layer_is_marked_once() -> None:
    plan = build_arch_plan(BluePrint(seq(relu(), fc(4), fc(2))), IMAGE, 2)
    assert [x.name for x in plan.layers if x.first] == ["fc1"]


def test_a_last_layer_that_does_not_fit_the_classes_is_named() -> None:
    with pytest.raises(ShapeError, match=r"fc2: it gives 11 outputs, but the data set has 10 classes.*fc\(10\)"):
        build_arch_plan(BluePrint(seq(fc(64), relu(), fc(11), relu())), IMAGE, 10)


def test_a_model_without_weights_is_refused() -> None:
    with pytest.raises(ValueRejected, match="no layer with weights"):
        build_arch_plan(BluePrint(seq(relu(), flatten())), Shape.of(10), 10)
