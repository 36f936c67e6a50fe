"""ArchPlan of convolutional models: residual sums, merging, the kinds of batch normalisation, what is refused."""

import re

import pytest
from blueprint_strategies import Drawn, blueprints
from hypothesis import given, settings

from renaissance.core.errors import GraphError, ShapeError, ValueRejected
from renaissance.core.shape import Shape
from renaissance.graph import blueprint as bp
from renaissance.graph.arch_layers import LAYERS, MARKERS, ArchLayer, follow
from renaissance.graph.arch_plan import (
    ArchPlan,
    LayerKind,
    build_arch_plan,
    expand,
    infer_shapes,
    merge_activations,
    merge_conv_bn,
    normalize_flattens,
    normalize_identities,
)
from renaissance.graph.blueprint import BlockStyle, BluePrint, add2, bn, conv, fc, flatten, gap_fc, identity, relu, seq

IMAGE = Shape.of(8, 8, 4)


def plan_of(*layers: bp.Layer, sample: Shape = IMAGE, classes: int = 5) -> ArchPlan:
    return build_arch_plan(BluePrint(seq(*layers)), sample, classes)


def kinds(plan: ArchPlan) -> list[str]:
    return [layer.kind.name for layer in plan.layers]


def test_every_kind_of_layer_has_a_definition_and_its_number() -> None:
    assert set(LAYERS) == set(LayerKind)
    assert [kind.value for kind in LayerKind] == list(range(24))
    assert [len(bp.ActivationKind), len(BlockStyle)] == [8, 8]
    for kind in LayerKind:
        assert ("activation" in LAYERS[kind].attrs) == bool(LAYERS[kind].activations), kind


PLAN_TEXT = """\
ArchPlan: 20 layers, input [1,8,8,4], 5 classes, first weights in conv1
    0 CBR               conv1         [1,8,8,4] -> [1,8,8,16]          \
out=16 kernel=3 stride=1 pad=1 groups=1 bias=False momentum=0.1 eps=1e-05 activation=relu [FIRST]
    1 ADD2_START        add1.start    [1,8,8,16] -> [1,8,8,16]
    2 CBR               conv2         [1,8,8,16] -> [1,4,4,32]         \
out=32 kernel=1 stride=2 pad=0 groups=1 bias=False momentum=0.1 eps=1e-05 activation=none
    3 ADD2_SHORTCUT_END add1.shortcut [1,4,4,32] -> [1,8,8,16]
    4 CBR               conv3         [1,8,8,16] -> [1,4,4,32]         \
out=32 kernel=3 stride=2 pad=1 groups=1 bias=False momentum=0.1 eps=1e-05 activation=relu
    5 CBR               conv4         [1,4,4,32] -> [1,4,4,32]         \
out=32 kernel=3 stride=1 pad=1 groups=1 bias=False momentum=0.1 eps=1e-05 activation=none
    6 ADD2_END          add1          [1,4,4,32] -> [1,4,4,32]         activation=relu
    7 ADD2_START        add2.start    [1,4,4,32] -> [1,4,4,32]
    8 IDENTITY          identity1     [1,4,4,32] -> [1,4,4,32]
    9 ADD2_SHORTCUT_END add2.shortcut [1,4,4,32] -> [1,4,4,32]
   10 CBR               conv5         [1,4,4,32] -> [1,4,4,64]         \
out=64 kernel=1 stride=1 pad=0 groups=1 bias=False momentum=0.1 eps=1e-05 activation=relu6
   11 CBR               conv6         [1,4,4,64] -> [1,4,4,64]         \
out=64 kernel=3 stride=1 pad=1 groups=64 bias=False momentum=0.1 eps=1e-05 activation=relu6
   12 CBR               conv7         [1,4,4,64] -> [1,4,4,32]         \
out=32 kernel=1 stride=1 pad=0 groups=1 bias=False momentum=0.1 eps=1e-05 activation=none
   13 ADD2_END          add2          [1,4,4,32] -> [1,4,4,32]         activation=none
   14 CONV              conv8         [1,4,4,32] -> [1,2,2,7]          \
out=7 kernel=3 stride=1 pad=0 groups=1 bias=True activation=relu
   15 DROPOUT           dropout1      [1,2,2,7] -> [1,2,2,7]           p=0.5
   16 FLATTEN           flatten1      [1,2,2,7] -> [1,1,1,28]
   17 BN1D              bn8           [1,1,1,28] -> [1,1,1,28]         momentum=0.2 eps=0.001 activation=relu
   18 FC                fc1           [1,1,1,28] -> [1,1,1,5]          out=5 bias=True activation=none
   19 SOFTMAX_CE        loss          [1,1,1,5] -> [1,1,1,5]
"""


def test_the_plan_of_a_residual_model_is_this_text() -> None:
    plan = plan_of(
        bp.cbr(16, 3, 1, 1),
        bp.block(32, BlockStyle.RESNET_3_3_DS),
        bp.mbconv(2, 32, 1),
        seq(conv(7, 3, bias=True), relu(), bp.dropout(0.5)),
        seq(flatten(), bn(0.2, 1e-3), relu(), fc(5)),
    )
    assert plan.text() == PLAN_TEXT


@pytest.mark.parametrize(
    ("style", "channels", "expected"),
    [
        # (kernel, stride, filters, groups, activation) of shortcut and stem; finding A3 of spec/framework: depthwise
        (BlockStyle.RESNET_3_3, (4,), ([], [(3, 1, 4, 1, "relu"), (3, 1, 4, 1, "none")], "relu")),
        (BlockStyle.RESNET_3_3, (6,), ([(1, 1, 6, 1, "none")], [(3, 1, 6, 1, "relu"), (3, 1, 6, 1, "none")], "relu")),
        (
            BlockStyle.RESNET_3_3_DS,
            (4,),
            ([(1, 2, 4, 1, "none")], [(3, 2, 4, 1, "relu"), (3, 1, 4, 1, "none")], "relu"),
        ),
        (
            BlockStyle.RESNET_1_3_1,
            (2, 4),
            ([], [(1, 1, 2, 1, "relu"), (3, 1, 2, 1, "relu"), (1, 1, 4, 1, "none")], "relu"),
        ),
        (
            BlockStyle.RESNET_1_3_1_DS,
            (2, 8),
            ([(1, 2, 8, 1, "none")], [(1, 1, 2, 1, "relu"), (3, 2, 2, 1, "relu"), (1, 1, 8, 1, "none")], "relu"),
        ),
        (BlockStyle.MB_E1_K3, (4,), ([], [(3, 1, 4, 4, "relu6"), (1, 1, 4, 1, "none")], "none")),
        (BlockStyle.MB_E1_K3, (6,), (None, [(3, 1, 4, 4, "relu6"), (1, 1, 6, 1, "none")], None)),
        (BlockStyle.MB_E1_K3_DS, (4,), (None, [(3, 2, 4, 4, "relu6"), (1, 1, 4, 1, "none")], None)),
        (
            BlockStyle.MB_E6_K3,
            (4,),
            ([], [(1, 1, 24, 1, "relu6"), (3, 1, 24, 24, "relu6"), (1, 1, 4, 1, "none")], "none"),
        ),
        (
            BlockStyle.MB_E6_K3_DS,
            (8,),
            (None, [(1, 1, 24, 1, "relu6"), (3, 2, 24, 24, "relu6"), (1, 1, 8, 1, "none")], None),
        ),
    ],
)
def test_a_block_of_each_style_consists_of(style, channels, expected) -> None:  # type: ignore[no-untyped-def]
    shortcut, stem, after = expected
    layers = plan_of(bn(), bp.block(*channels, style), gap_fc(5)).layers[1:-3]
    ends = [layer for layer in layers if layer.kind is LayerKind.ADD2_END]
    assert [end.attrs["activation"] for end in ends] == ([] if after is None else [after])
    middle = next((i for i, layer in enumerate(layers) if layer.kind is LayerKind.ADD2_SHORTCUT_END), -1)
    found = [[_conv_of(x) for x in part if x.kind is LayerKind.CBR] for part in (layers[: middle + 1], layers[middle:])]
    if after is None:
        assert [_conv_of(x) for x in layers] == stem
    else:
        assert found == [shortcut, stem]
        assert (layers[1].kind is LayerKind.IDENTITY) == (shortcut == [])


def _conv_of(layer: ArchLayer) -> tuple[object, ...]:
    return tuple(layer.attrs[key] for key in ("kernel", "stride", "out", "groups", "activation"))


def test_neighbours_merge_and_layers_across_a_marker_do_not() -> None:
    with_bias = merge_activations(merge_conv_bn(expand(BluePrint(seq(conv(4, 1, bias=True), bn(), bp.relu6())), IMAGE)))
    assert [(x.kind, x.name, x.attrs["bias"], x.attrs["activation"]) for x in with_bias] == [
        (LayerKind.CBR, "conv1", True, "relu6")
    ]
    cases = {
        "CONV RELU6": (conv(4, 1), bp.relu6()),
        "CONV": (conv(4, 1), relu()),
        "CONV BN2D": (conv(4, 1), relu(), bn(), relu()),
        "CBR TANH BN2D": (conv(4, 1), bn(), bp.tanh_act(), bn()),
        "BN2D RELU": (bn(), relu(), relu()),
        "MAXPOOL RELU": (bp.maxpool(2), relu()),
        "FC RELU6": (fc(3), bp.relu6()),
        "CONV ADD2_START RELU ADD2_SHORTCUT_END CONV ADD2_END BN2D": (
            conv(4, 1),
            add2(relu(), conv(4, 1)),
            bn(),
        ),
        "ADD2_START CONV ADD2_SHORTCUT_END BN2D ADD2_END RELU6": (add2(conv(4, 1), bn()), bp.relu6()),
        "ADD2_START IDENTITY ADD2_SHORTCUT_END BN2D ADD2_END RELU": (add2(identity(), bn()), relu(), relu()),
    }
    for expected, layers in cases.items():
        merged = merge_activations(merge_conv_bn(expand(BluePrint(seq(*layers)), IMAGE)))
        assert " ".join(x.kind.name for x in merged) == expected


def test_a_bn_is_one_dimensional_after_rows_and_two_dimensional_after_images() -> None:
    rows = (fc(4), flatten(), bp.gap(), seq(fc(4), relu(), bp.dropout(0.1), bn(), bp.channel_padding()))
    images = (relu(), conv(4, 1), bp.maxpool(2), seq(add2(identity(), bn()), bp.silu()))
    for before in rows:
        assert "BN2D" not in kinds(plan_of(before, bp.tanh_act(), bn(), fc(5))), before
    for before in images:
        assert "BN1D" not in kinds(plan_of(before, bp.tanh_act(), bn(), gap_fc(5))), before
    # in the stem, what counts came before the sum, not the end of the shortcut
    stem = plan_of(bp.gap(), add2(conv(4, 1), seq(bp.tanh_act(), bn())), fc(5))
    assert [k for k in kinds(stem) if k.startswith("BN")] == ["BN1D"]


def test_identities_remain_in_empty_shortcuts_only() -> None:
    plan = plan_of(
        identity(),
        conv(4, 1),
        add2(seq(identity(), flatten_of_nothing()), seq(identity(), conv(4, 1), identity())),
        add2(seq(identity(), relu()), conv(4, 1)),
        gap_fc(5),
        sample=Shape.of(1, 1, 4),
    )
    assert [k for k in kinds(plan) if k in ("IDENTITY", "ADD2_START")] == ["ADD2_START", "IDENTITY", "ADD2_START"]
    for stem in (identity(), flatten_of_nothing()):
        with pytest.raises(ValueRejected, match=r"layer add1: the stem of add2\(shortcut, stem\) has no layer"):
            plan_of(conv(4, 1), add2(relu(), stem), fc(5), sample=Shape.of(1, 1, 4))


def flatten_of_nothing() -> bp.Layer:
    return seq(flatten(), flatten())


def test_the_first_layer_in_a_residual_sum_gets_a_copy_of_the_input_before_the_outermost_sum() -> None:
    inner = add2(identity(), conv(4, 3, 1, 1))
    cases: list[tuple[list[str], tuple[bp.Layer, ...]]] = [
        (["IDENTITY", "ADD2_START"], (inner, gap_fc(5))),
        (["IDENTITY", "ADD2_START", "RELU"], (add2(relu(), add2(bp.silu(), inner)), gap_fc(5))),
        (["RELU", "IDENTITY", "ADD2_START"], (relu(), add2(conv(4, 1), relu()), gap_fc(5))),
        (
            ["ADD2_START", "RELU", "ADD2_SHORTCUT_END", "SILU", "ADD2_END", "CONV"],
            (add2(relu(), bp.silu()), conv(4, 1), gap_fc(5)),
        ),
    ]
    for expected, layers in cases:
        plan = plan_of(*layers)
        assert kinds(plan)[: len(expected)] == expected
        assert [i for i, layer in enumerate(plan.layers) if layer.first] == [plan.first]
        assert plan.layers[plan.first].kind.name == ("CONV" if expected[-1] == "CONV" else "IDENTITY")
        # the part that exists once per slot holds no open sum
        opened = [k for k in kinds(plan)[: plan.first + 1] if k in ("ADD2_START", "ADD2_END")]
        assert opened.count("ADD2_START") == opened.count("ADD2_END")
    assert (
        plan_of(inner, gap_fc(5)).text().startswith("ArchPlan: 9 layers, input [1,8,8,4], 5 classes, input copied by i")
    )


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((conv(4, 9), gap_fc(5)), r"layer conv1: kernel 9 does not fit the padded height 8 \+ 2 \* 0 of its input"),
        ((bp.maxpool(2), bp.maxpool(2), bp.maxpool(4), fc(5)), r"layer maxpool3: kernel 4 .* height 2"),
        (
            (bp.group_conv(6, 3, 1), gap_fc(5)),
            r"layer conv1: 3 groups must divide the 4 input channels and the 6 filters",
        ),
        ((add2(identity(), conv(8, 1)), fc(5)), r"layer add1: the shortcut gives \[1,8,8,4\], the stem \[1,8,8,8\]"),
        (
            (add2(identity(), add2(relu(), bp.gap())), fc(5)),
            r"layer add2: the shortcut gives \[1,8,8,4\], the stem \[1,1",
        ),
        ((conv(5, 1), bp.gap(), fc(4)), r"last layer fc1: it gives 4 outputs, but the data set has 5 classes"),
    ],
)
def test_layers_that_do_not_fit_are_named(layers: tuple[bp.Layer, ...], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        plan_of(*layers)


def test_markers_that_do_not_match_are_a_fault() -> None:
    start, middle, end = (ArchLayer(kind, kind.name.lower()) for kind in sorted(MARKERS))
    for wrong in ([end], [start, end], [start, middle], [middle], [start, middle, middle]):
        with pytest.raises(GraphError, match=r"missing|without the marker"):
            list(follow(wrong, IMAGE))


def test_an_image_block_is_flattened_before_every_layer_that_reads_rows() -> None:
    plan = plan_of(conv(8, 3), bp.maxpool(3), fc(7), relu(), fc(5))
    assert kinds(plan) == ["CONV", "MAXPOOL", "FLATTEN", "FC", "FC", "SOFTMAX_CE"]
    assert kinds(plan_of(conv(5, 8))) == ["CONV", "SOFTMAX_CE"]
    with pytest.raises(ShapeError, match="conv1: it gives 20 outputs"):
        plan_of(conv(5, 7))


@settings(max_examples=60, deadline=None)
@given(blueprints())
def test_any_model_that_fits_together_has_a_plan_that_keeps_the_rules(drawn: Drawn) -> None:
    plan = build_arch_plan(drawn.blueprint, drawn.sample, drawn.num_classes)
    names = [layer.name for layer in plan.layers]
    assert len(set(names)) == len(names)
    assert infer_shapes(plan.layers, plan.input) == plan.layers  # a plan is read back by the rules that made it
    assert normalize_flattens(plan.layers, plan.input) == plan.layers
    assert merge_activations(merge_conv_bn(plan.layers)) == plan.layers
    assert [layer for layer in plan.layers if layer.first] == [plan.layers[plan.first]]
    weights_before = [x for x in plan.layers[: plan.first] if LAYERS[x.kind].has_weights]
    assert weights_before == []
    if plan.layers[plan.first].kind is not LayerKind.IDENTITY:
        assert infer_shapes(normalize_identities(plan.layers), plan.input) == plan.layers
    written = BluePrint(seq(drawn.blueprint, flatten()))
    assert build_arch_plan(written, drawn.sample, drawn.num_classes) == plan
    assert re.search(r"\[FIRST\]", plan.text())
