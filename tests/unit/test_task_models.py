"""Saved models: what is written is read back, what is wrong is named, and every program that reads it agrees."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from renaissance.core.dtype import DType
from renaissance.core.enums import NormMode
from renaissance.core.errors import FormatError, MissingFileError, ShapeError, ValueRejected
from renaissance.core.machine import CorePlan
from renaissance.data.recipe import Recipe
from renaissance.graph import (
    BluePrint,
    CompileRequest,
    add2,
    avgpool,
    bn,
    cbr,
    channel_padding,
    compile_model,
    conv,
    conv_dw,
    dropout,
    elu,
    fc,
    gap,
    group_conv,
    hardswish,
    identity,
    leaky_relu,
    maxpool,
    relu,
    relu6,
    seq,
    sigmoid,
    silu,
    tanh_act,
)
from renaissance.task.engine import Engine
from renaissance.task.models import SavedModel, read_model, read_tensors, write_model
from renaissance.task.onnx_export import export_onnx
from renaissance.task.predict import Predictor, load_model

CLASSES, SIDE = 5, 12
RNG = np.random.default_rng(7)
EVERYTHING = BluePrint(
    seq(
        channel_padding(),
        cbr(8, 3, 1, 1),
        add2(identity(), seq(conv_dw(3, 1, 1), bn(), relu6(), conv(8, 1), bn())),
        relu(),
        add2(
            seq(conv(16, 1, 2), bn()),
            seq(group_conv(16, 4, 3, 2, 1), silu(), conv(16, 3, 1, 1, bias=True), hardswish()),
        ),
        maxpool(3, 2, 1),
        elu(),
        avgpool(3, 1, 1),
        leaky_relu(),
        fc(11),
        bn(),
        tanh_act(),
        dropout(0.5),
        fc(9, bias=False),
        sigmoid(),
        fc(CLASSES),
    )
)
POOLED = BluePrint(
    seq(
        cbr(8, 3, 1, 1),
        add2(seq(conv(8, 1), bn()), seq(cbr(8, 3, 1, 1), conv(8, 3, 1, 1), bn())),
        relu(),
        gap(),
        fc(CLASSES),
    )
)


def saved_model(blueprint: BluePrint = EVERYTHING, dtype: DType = DType.FP32) -> SavedModel:
    """A model with drawn weights and statistics that are not those of the start."""
    request = CompileRequest(height=SIDE, width=SIDE, channels=3, num_classes=CLASSES, train_batch=2, val_batch=2)
    compiled = compile_model(blueprint, request)
    engine = Engine(compiled, "reference", CorePlan.choose(), [], [])
    engine.initialize(3)
    tensors = {
        name: (values + RNG.uniform(0.1, 0.4, values.shape)).astype(np.float32) if values.ndim == 1 else values
        for name, values in read_tensors(compiled, engine).items()
    }
    recipe = Recipe.build((), NormMode.CIFAR, resolution=SIDE, color_channels=3)
    return SavedModel(compiled.arch_plan, recipe, dtype, "cifar_10", "main", tensors)


def pictures(count: int) -> np.ndarray:
    return RNG.integers(0, 256, (count, SIDE, SIDE, 3), np.uint8)


def test_a_saved_model_is_read_back_whole(tmp_path: Path) -> None:
    model = saved_model()
    write_model(tmp_path / "m.safetensors", model)
    read = read_model(tmp_path / "m.safetensors")
    assert replace(read, tensors={}) == replace(model, tensors={})
    assert read.tensors.keys() == model.tensors.keys()
    for name, values in model.tensors.items():
        np.testing.assert_array_equal(read.tensors[name], values)
    assert model.tensors["fc1.weight"].ndim == 2
    assert model.tensors["conv1.weight"].shape == (8, 3, 3, 8)
    assert model.tensors["conv1.bn.running_var"].shape == (8,)


@pytest.mark.parametrize("blueprint", [EVERYTHING, POOLED], ids=["everything", "pooled"])
def test_prediction_equals_the_reference_and_onnx_runtime(blueprint: BluePrint, tmp_path: Path) -> None:
    model, images = saved_model(blueprint), pictures(7)
    expected = Predictor(model, batch=7, backend="reference").predict(images)
    got = Predictor(model, batch=3, threads=2).predict(images)  # the last batch is a short one
    np.testing.assert_allclose(got.probabilities, expected.probabilities, rtol=2e-4, atol=1e-6)
    np.testing.assert_array_equal(got.labels, expected.labels)
    np.testing.assert_array_equal(got.labels, got.top(2)[:, 0])
    np.testing.assert_allclose(got.probabilities.sum(axis=1), 1, rtol=1e-5)
    half = Predictor(model, batch=4, dtype=DType.BF16).predict(images)
    np.testing.assert_allclose(half.probabilities, expected.probabilities, atol=0.03)

    export_onnx(model, tmp_path / "m.onnx")
    norm = model.recipe.normalization
    floats = ((images / 255.0 - np.array(norm.mean)) / np.array(norm.std)).astype(np.float32)
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"images": np.ascontiguousarray(floats.transpose(0, 3, 1, 2))})
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    np.testing.assert_allclose(odds / odds.sum(axis=1, keepdims=True), expected.probabilities, rtol=2e-4, atol=1e-6)
    np.testing.assert_allclose(Predictor(model, threads=1).predict(floats).probabilities, got.probabilities, atol=1e-6)


def test_what_is_wrong_with_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with pytest.raises(MissingFileError, match="no such file"):
        read_model(path)
    with pytest.raises(ValueRejected, match=r"expected a name that ends in \.safetensors"):
        write_model(tmp_path / "m.bin", saved_model(POOLED))
    write_model(path, saved_model(POOLED))
    whole = path.read_bytes()
    for cut in (0, 7, 100, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(FormatError, match=r"m\.safetensors: is not a safetensors file"):
            read_model(path)
    path.write_bytes(whole.replace(b"renaissance-model-1", b"renaissance-model-9"))
    with pytest.raises(FormatError, match="its metadata has format 'renaissance-model-9'"):
        read_model(path)
    model = saved_model(POOLED)
    write_model(path, replace(model, recipe=Recipe.build((), NormMode.MNIST, resolution=SIDE, color_channels=1)))
    with pytest.raises(FormatError, match="its recipe makes 1 channels, its first layer reads 3"):
        read_model(path)
    write_model(path, replace(model, dtype=DType.INT8))
    with pytest.raises(FormatError, match=r"m\.safetensors: metadata: dtype is INT8; expected FP32, BF16 or FP16"):
        read_model(path)
    broken = dict(model.tensors)
    del broken["fc1.bias"]
    write_model(path, replace(model, tensors=broken))
    with pytest.raises(FormatError, match=r"m\.safetensors: .*tensors missing"):
        load_model(path, batch=2, backend="reference")
    with pytest.raises(FormatError, match=r"tensors missing: \['fc1\.bias'\], unknown: \[\]"):
        Predictor(replace(model, tensors=broken), batch=2, backend="reference")
    with pytest.raises(FormatError, match=r"tensor fc1\.bias is \[4\]; expected \[5\]"):
        Predictor(replace(model, tensors={**model.tensors, "fc1.bias": np.zeros(4, np.float32)}), backend="reference")
    turned = {**model.tensors, "fc1.weight": np.ascontiguousarray(model.tensors["fc1.weight"].T)}
    with pytest.raises(FormatError, match=r"tensor fc1\.weight is \[8, 5\]; expected \[5, 8\]"):
        Predictor(replace(model, tensors=turned), backend="reference")


def test_what_cannot_be_predicted_is_refused() -> None:
    predictor = Predictor(saved_model(POOLED), batch=2, backend="reference")
    with pytest.raises(ShapeError, match=r"images are \[2, 3, 12, 12\]; expected \[N, 12, 12, 3\]"):
        predictor.predict(np.zeros((2, 3, SIDE, SIDE), np.uint8))
    with pytest.raises(ValueRejected, match="images are int64; expected uint8 pixels or normalised floats"):
        predictor.predict(np.zeros((2, SIDE, SIDE, 3), np.int64))
    assert predictor.predict(np.zeros((0, SIDE, SIDE, 3), np.uint8)).labels.shape == (0,)
    assert predictor.predict(np.full((1, SIDE, SIDE, 3), np.nan)).labels[0] == -1
