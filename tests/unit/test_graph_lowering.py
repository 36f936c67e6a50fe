"""What layers become: residual sums, the two input slots, inference with folded batch norm, averaged weights and views,
resolutions that differ, a first layer that can be frozen."""

from collections import Counter

import pytest
from graph_models import example_request

from renaissance.core.dtype import DType
from renaissance.core.enums import TTA, InitKind, OptimizerKind
from renaissance.core.errors import ShapeError, ValueRejected
from renaissance.core.region import Region
from renaissance.core.shape import Shape
from renaissance.graph import (
    BluePrint,
    CompiledModel,
    GraphId,
    Node,
    Variant,
    compile_model,
    train_program,
    val_program,
)
from renaissance.graph import blueprint as bp
from renaissance.graph.arch_layers import LAYERS, LayerKind
from renaissance.graph.lowering import LOWERING
from renaissance.graph.ops import named_inputs
from renaissance.tensor.init import Initializer

RESNET = bp.seq(
    bp.cbr(8, 3, 1, 1),
    bp.block(8, bp.BlockStyle.RESNET_3_3),
    bp.block(16, bp.BlockStyle.RESNET_3_3_DS),
    bp.gap_fc(10),
)


def compiled(layer: bp.Layer, **changes: object) -> CompiledModel:
    facts = {"height": 16, "width": 16, "channels": 3, "train_batch": 8, "val_batch": 8, **changes}
    return compile_model(BluePrint(layer), example_request(**facts))


def ops(nodes: tuple[Node, ...]) -> list[str]:
    return [n.op for n in nodes]


def names(model: CompiledModel, ids: tuple[int, ...]) -> list[str]:
    return [model.tensor(i).name for i in ids]


def test_every_kind_of_layer_has_a_lowering() -> None:
    assert set(LOWERING) == set(LAYERS) - {LayerKind.SOFTMAX_CE} == set(LayerKind) - {LayerKind.SOFTMAX_CE}


def test_a_residual_network_is_one_pass_per_sum_forward_and_backward() -> None:
    model = compiled(RESNET)
    step = Counter(ops(model.training.program(train_program(0))))
    assert "ADD_FWD" not in step
    assert step["CONV_FWD"] == step["BN_FWD"] == step["BN_BWD"] == step["CONV_BWD_WEIGHT"] == 6
    assert step["CONV_BWD_DATA"] == 5  # nobody wants the gradient of the input
    assert "GRAD_SUM" not in step  # all sums of gradients are read by a batch norm
    backward = [n for n in model.training.nodes if n.op == "BN_BWD"]
    assert sum(n.attrs["dys"] == 2 for n in backward) == 2
    assert sum(n.attrs["residual"] is True for n in backward) == 2


def test_only_the_first_convolution_depends_on_the_input_slot() -> None:
    model = compiled(RESNET)
    assert ops(model.training.bucket(GraphId.FIRST_LAYER_FWD_B)) == ["LABEL_COPY", "CONV_FWD"]
    assert ops(model.training.bucket(GraphId.FIRST_LAYER_BWD_B)) == ["CONV_BWD_WEIGHT"]
    (first,) = [p for p in model.parameters if model.tensor(p.weight).region is Region.W_FIRST_CONV]
    assert (first.name, first.shape) == ("conv1.weight", Shape(8, 3, 3, 3))


def test_a_sum_over_the_input_itself_copies_it_out_of_the_slot() -> None:
    model = compiled(bp.seq(bp.add2(bp.identity(), bp.conv(3, 3, 1, 1)), bp.gap_fc(10)))
    assert ops(model.training.bucket(GraphId.FIRST_LAYER_FWD_A)) == ["LABEL_COPY", "INPUT_VIEW"]
    assert not model.training.bucket(GraphId.FIRST_LAYER_BWD_A)
    assert "INPUT_VIEW" not in model.inference.ops


def test_inference_is_one_node_per_convolution_and_prepares_its_folded_parameters() -> None:
    model = compiled(RESNET)
    validation = model.inference.bucket(GraphId.INF_MAIN_A)
    assert ops(validation) == ["LABEL_COPY", *["CONV_INF"] * 6, "GAP_FWD", "FC_FWD", "SOFTMAX_CE_INF"]
    assert [n.attrs["residual"] for n in validation if n.op == "CONV_INF"].count(True) == 2
    folding = model.inference.bucket(GraphId.UPDATE_BN_INF_PARAMS)
    assert ops(folding) == ["BN_UPDATE_EQ_PARAMS"] * 6
    for norm, node in zip(model.batch_norms, folding, strict=True):
        assert node.inputs == (norm.gamma, norm.beta, norm.prev_mean, norm.prev_var)
        assert node.outputs == (norm.eq_scale, norm.eq_bias)


def test_dropout_and_pool_indices_are_for_training_only() -> None:
    layers = bp.seq(bp.conv(8, 3), bp.maxpool(2), bp.dropout(0.25), bp.relu(), bp.dropout(0.5), bp.gap_fc(10))
    model = compiled(layers)
    assert {"MAXPOOL_FWD", "DROPOUT_FWD", "DROPOUT_ADVANCE"} <= model.training.ops
    assert not {"MAXPOOL_FWD", "DROPOUT_FWD"} & model.inference.ops
    dropouts = [n for n in model.training.nodes if n.op == "DROPOUT_FWD"]
    assert [(n.attrs["p"], n.attrs["layer"]) for n in dropouts] == [(0.25, 0), (0.5, 1)]
    assert names(model, dropouts[0].inputs[1:]) == ["seed_low", "seed_high", "dropout_step"]


def test_averaged_weights_are_validated_by_the_same_nodes_with_other_parameters() -> None:
    model = compiled(RESNET, ema=True)
    main = model.inference.program(val_program(0))
    averaged = model.inference.program(val_program(0, ema=True))
    assert [(n.op, n.attrs, n.outputs) for n in main] == [(n.op, n.attrs, n.outputs) for n in averaged]
    pairs = {p.half if p.half is not None else p.weight: p.ema_half if p.ema_half is not None else p.ema
             for p in model.parameters}  # fmt: skip
    for a, b in zip(main, averaged, strict=True):
        assert tuple(pairs.get(i, i) for i in a.inputs) == b.inputs
    folding = [n for n in model.inference.bucket(GraphId.CAST_EMA_FP32_TO_FP16) if n.op == "BN_UPDATE_EQ_PARAMS"]
    assert [n.inputs[:2] for n in folding] == [(b.ema_gamma, b.ema_beta) for b in model.batch_norms]


@pytest.mark.parametrize(("tta", "views"), [(TTA.DISABLED, 1), (TTA.LR, 2), (TTA.SHIFT_1PX, 5)])
def test_views_run_the_network_once_each_and_share_its_weights(tta: TTA, views: int) -> None:
    model = compiled(RESNET, tta=tta)
    validation = model.inference.bucket(GraphId.INF_MAIN_B)
    count = Counter(ops(validation))
    assert (count["CONV_INF"], count["FC_FWD"]) == (6 * views, views)
    assert count["INPUT_VIEW"] == views - 1
    assert count["MEAN_LOGITS"] == (views > 1)
    shifts = {(n.attrs["flip"], n.attrs["dy"], n.attrs["dx"]) for n in validation if n.op == "INPUT_VIEW"}
    shifted = {(False, -1, 0), (False, 1, 0), (False, 0, -1), (False, 0, 1)}
    assert shifts == {TTA.DISABLED: set(), TTA.LR: {(True, 0, 0)}, TTA.SHIFT_1PX: shifted}[tta]
    assert len({named_inputs(n)["w"] for n in validation if n.op == "CONV_INF"}) == 6
    assert all(n.inputs[0] == model.inputs[1].data for n in validation if n.op == "INPUT_VIEW")


def test_resolutions_really_differ_and_share_every_offset() -> None:
    model = compiled(RESNET, train_end_size=(24, 20), val_size=(32, 32), train_last=3, val_last=5)
    image = [model.tensor(model.inputs[0].data, v).shape for v in Variant]
    sizes = [(8, 16, 16), (3, 16, 16), (8, 24, 20), (3, 24, 20), (8, 32, 32), (5, 32, 32)]
    assert image == [Shape(*size, 3) for size in sizes]
    (last,) = [i for n in model.training.nodes if n.op == "GAP_FWD" for i in n.inputs]
    assert [model.tensor(last, v).shape for v in list(Variant)[:4]] == [
        Shape(8, 8, 8, 16), Shape(3, 8, 8, 16), Shape(8, 12, 10, 16), Shape(3, 12, 10, 16)
    ]  # fmt: skip
    assert len({model.tensor(last, v).offset for v in Variant}) == 1
    deep = [model.atlas.entry(v, GraphId.DEEP_FWD_BWD).captured for v in list(Variant)[:4]]
    assert len(set(deep)) == 4


def test_an_fc_over_pixels_says_what_to_do_about_resolutions() -> None:
    flat = bp.seq(bp.conv(8, 3, 1, 1), bp.flatten(), bp.fc(10))
    with pytest.raises(ShapeError, match=r"layer fc1 reads a different number.*TRAIN_LOWRES 4608.*put a gap\(\)"):
        compiled(flat, train_end_size=(24, 24))
    with pytest.raises(ShapeError, match=r"layer bn1 normalises a different number.*VAL_BASE 288.*put a gap\(\)"):
        compiled(bp.seq(bp.conv(8, 3, 4), bp.flatten(), bp.bn(), bp.fc(10)), val_size=(24, 24))
    with pytest.raises(ShapeError, match=r"layer conv2 \(VAL_BASE\): CONV_FWD: input \[8,2,2,4\] with pad 0.*5x5"):
        compiled(bp.seq(bp.conv(4, 5, 2), bp.conv(4, 5), bp.gap_fc(10)), val_size=(8, 8))


def test_a_flatten_is_a_copy_only_where_a_layer_looks_at_the_shape() -> None:
    image = bp.seq(bp.conv(8, 3, 4), bp.flatten(), bp.relu(), bp.dropout(0.1), bp.fc(10))
    assert "FLATTEN_FWD" not in compiled(image).training.ops
    rows = compiled(bp.seq(bp.conv(8, 3, 4), bp.flatten(), bp.bn(), bp.fc(10)))
    (norm,) = rows.batch_norms
    assert rows.tensor(norm.gamma).shape == Shape.of(8 * 4 * 4)  # one-dimensional: a channel per value
    assert {"FLATTEN_FWD", "FLATTEN_BWD"} <= rows.training.ops


def test_a_frozen_step_leaves_out_the_first_layer_and_still_has_defined_gradients() -> None:
    model = compiled(RESNET, freeze_first_layer=True, optimizer=OptimizerKind.SGD_MOMENTUM)
    frozen = model.training.program(train_program(1, frozen=True))
    assert sum(n.op == "CONV_BWD_WEIGHT" for n in frozen) == 5
    (first,) = [n for n in frozen if n.op == "RANGE_UPDATE_MOMENTUM" and n.spans_out[0].first is Region.W_FIRST_CONV]
    assert "skip_first" in names(model, first.inputs)
    cleared = {r for n in model.training.bucket(GraphId.ZERO_GRAD) for s in n.spans_out for r in s.regions}
    assert Region.G_FIRST_CONV in cleared  # the NaN check reads it
    with pytest.raises(ValueRejected, match=r"freeze_first_layer: the first layer trains fc1.weight, fc1.bias"):
        compiled(bp.fc(10), freeze_first_layer=True)


def test_the_last_batch_norm_of_a_block_may_start_as_zero() -> None:
    model = compiled(RESNET, initializer=Initializer().bn(InitKind.ZERO_GAMMA))
    zero = [p.name for p in model.parameters if p.init.kind is InitKind.ZERO_GAMMA]
    assert zero == ["conv3.bn.weight", "conv6.bn.weight"]


def test_biases_of_convolutions_lie_with_those_of_fcs_and_do_not_decay() -> None:
    model = compiled(
        bp.seq(bp.conv(8, 3, bias=True), bp.relu(), bp.conv(4, 3), bp.bn(), bp.gap_fc(10)), half=DType.FP16
    )
    region = {p.name: model.tensor(p.weight).region for p in model.parameters}
    assert region == {
        "conv1.weight": Region.W_FIRST_CONV,
        "conv1.bias": Region.W_FC_BIAS,
        "conv2.weight": Region.W_DEEP_CONV,
        "conv2.bn.weight": Region.W_BN_WEIGHT,
        "conv2.bn.bias": Region.W_BN_BIAS,
        "fc1.weight": Region.W_FC_WEIGHT,
        "fc1.bias": Region.W_FC_BIAS,
    }
    assert [p.name for p in model.parameters if p.decay] == ["conv1.weight", "conv2.weight", "fc1.weight"]
    assert [p.half is not None for p in model.parameters] == [p.decay for p in model.parameters]
