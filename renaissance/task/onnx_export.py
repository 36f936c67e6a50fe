"""ONNX export of a saved model: from its ArchPlan and tensors, layer by layer, in fp32.

The exported graph takes normalised images [N,C,S,S], S being the resolution of validation, and gives logits
[N,classes]; N is free. Batch norms stay layers of their own (a runtime folds them). Where a fully connected layer reads
pixels, they are put in our order (height, width, channel) first, so that its weights need no change.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import renaissance
from renaissance.core.errors import MissingKernelError, RenaissanceError
from renaissance.core.files import written_when_complete
from renaissance.graph.arch_plan import ArchLayer, LayerKind
from renaissance.task.models import SavedModel

OPSET = 17
IR_VERSION = 9
INSTALL = "install it with: pip install 'renaissance[onnx]'"
IMAGES, LOGITS = "images", "logits"


def export_onnx(saved: SavedModel, path: Path | str) -> None:
    """Write the model as ONNX; the file appears when it is complete.

    Raises RenaissanceError when the package onnx is missing, MissingKernelError for a layer that has no ONNX form.
    """
    model = to_onnx(saved)
    with written_when_complete(Path(path)) as file:
        file.write(model.SerializeToString())


def to_onnx(saved: SavedModel) -> Any:
    """The model as an ``onnx.ModelProto``, checked."""
    try:
        import onnx
    except ImportError:
        raise RenaissanceError(f"ONNX export needs the package onnx; {INSTALL}") from None
    writer = _Writer(onnx, saved)
    for layer in saved.arch_plan.layers:
        writer.layer(layer)
    helper, channels, side = onnx.helper, saved.arch_plan.input.c, saved.recipe.resolution
    float32 = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        writer.nodes,
        "renaissance",
        [helper.make_tensor_value_info(IMAGES, float32, ["N", channels, side, side])],
        [helper.make_tensor_value_info(LOGITS, float32, ["N", saved.arch_plan.num_classes])],
        writer.weights,
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="renaissance",
        producer_version=renaissance.__version__,
    )
    norm = saved.recipe.normalization
    facts = {"mean": norm.mean, "std": norm.std, "layout": "images are (pixel / 255 - mean) / std, [N,C,H,W]"}
    helper.set_model_props(model, {name: str(value) for name, value in facts.items()})
    onnx.checker.check_model(model, full_check=True)
    return model


class _Writer:
    """Collects nodes; ``self._x`` is the value that the next layer reads, ``self._flat`` whether it is [N,C]."""

    def __init__(self, onnx: Any, saved: SavedModel) -> None:
        self._onnx, self._tensors = onnx, saved.tensors
        self.nodes: list[Any] = []
        self.weights: list[Any] = []
        self._x, self._flat = IMAGES, False
        self._stack: list[tuple[str, bool]] = []
        self._count = 0

    def layer(self, layer: ArchLayer) -> None:
        """Append the nodes of one layer."""
        rule = _RULES.get(layer.kind)
        if rule is None:
            raise MissingKernelError(f"layer {layer.name}: ONNX export does not know {layer.kind.name}")
        rule(self, layer)

    # -- rules ----------------------------------------------------------------------------------------------------

    def convolution(self, layer: ArchLayer) -> None:
        attrs = layer.attrs
        kernel, stride, pad = (int(attrs[name]) for name in ("kernel", "stride", "pad"))
        inputs = [self._x, self._weight(f"{layer.name}.weight", lambda w: w.transpose(0, 3, 1, 2))]
        if attrs["bias"]:
            inputs.append(self._weight(f"{layer.name}.bias"))
        self._emit(
            "Conv", inputs, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[pad] * 4, group=attrs["groups"]
        )
        if layer.kind is LayerKind.CBR:
            self._normalise(f"{layer.name}.bn", layer)
        self._activate(str(attrs["activation"]))

    def batch_norm(self, layer: ArchLayer) -> None:
        self._normalise(layer.name, layer)
        self._activate(str(layer.attrs["activation"]))

    def _normalise(self, name: str, layer: ArchLayer) -> None:
        parts = ("weight", "bias", "running_mean", "running_var")
        inputs = [self._x, *(self._weight(f"{name}.{part}") for part in parts)]
        self._emit("BatchNormalization", inputs, epsilon=float(layer.attrs["eps"]))

    def fully_connected(self, layer: ArchLayer) -> None:
        self.flatten(layer)
        inputs = [self._x, self._weight(f"{layer.name}.weight")]
        if layer.attrs["bias"]:
            inputs.append(self._weight(f"{layer.name}.bias"))
        self._emit("Gemm", inputs, transB=1)
        self._activate(str(layer.attrs["activation"]))

    def flatten(self, layer: ArchLayer) -> None:
        if not self._flat:
            if layer.input.h * layer.input.w > 1:
                self._emit("Transpose", [self._x], perm=[0, 2, 3, 1])
            self._emit("Flatten", [self._x], axis=1)
            self._flat = True

    def activation(self, layer: ArchLayer) -> None:
        self._activate(layer.kind.name.lower())

    def _activate(self, kind: str) -> None:
        match kind:
            case "none":
                return
            case "relu6":
                limits = [self._constant("zero", 0.0), self._constant("six", 6.0)]
                self._emit("Clip", [self._x, *limits])
            case "silu":
                x = self._x
                self._emit("Sigmoid", [x])
                self._emit("Mul", [x, self._x])
            case "leaky_relu":
                self._emit("LeakyRelu", [self._x], alpha=0.01)
            case "elu":
                self._emit("Elu", [self._x], alpha=1.0)
            case _:
                names = {"relu": "Relu", "tanh": "Tanh", "sigmoid": "Sigmoid", "hardswish": "HardSwish"}
                self._emit(names[kind], [self._x])

    def pool(self, layer: ArchLayer) -> None:
        attrs = layer.attrs
        kernel, stride, pad = (int(attrs[name]) for name in ("kernel", "stride", "pad"))
        sizes = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4}
        if layer.kind is LayerKind.MAXPOOL:
            self._emit("MaxPool", [self._x], **sizes)
        else:
            self._emit("AveragePool", [self._x], **sizes, count_include_pad=int(attrs["count_include_pad"]))

    def global_average(self, layer: ArchLayer) -> None:
        self._emit("GlobalAveragePool", [self._x])

    def pad_channels(self, layer: ArchLayer) -> None:
        more = layer.output.c - layer.input.c
        if more:
            ends = [0, more] if self._flat else [0, more, 0, 0]
            pads = self._constant(f"{layer.name}.pads", [0] * len(ends) + ends, np.int64)
            self._emit("Pad", [self._x, pads])

    def nothing(self, layer: ArchLayer) -> None:
        """Identity, dropout and the loss are not part of an inference graph."""

    def residual_start(self, layer: ArchLayer) -> None:
        self._stack.append((self._x, self._flat))

    def residual_turn(self, layer: ArchLayer) -> None:
        """The shortcut is done: keep its result, go back to where it started."""
        shortcut, (self._x, self._flat) = (self._x, self._flat), self._stack.pop()
        self._stack.append(shortcut)

    def residual_end(self, layer: ArchLayer) -> None:
        self._emit("Add", [self._stack.pop()[0], self._x])
        self._activate(str(layer.attrs["activation"]))

    def loss(self, layer: ArchLayer) -> None:
        self.flatten(layer)
        self.nodes.append(self._onnx.helper.make_node("Identity", [self._x], [LOGITS]))

    # -- pieces ---------------------------------------------------------------------------------------------------

    def _emit(self, op: str, inputs: list[str], **attributes: Any) -> None:
        self._count += 1
        self._x = f"{op.lower()}{self._count}"
        self.nodes.append(self._onnx.helper.make_node(op, inputs, [self._x], name=self._x, **attributes))

    def _weight(self, name: str, change: Callable[[npt.NDArray[Any]], npt.NDArray[Any]] = lambda values: values) -> str:
        values = np.ascontiguousarray(change(self._tensors[name]))
        self.weights.append(self._onnx.numpy_helper.from_array(values, name))
        return name

    def _constant(self, name: str, value: Any, dtype: Any = np.float32) -> str:
        if all(known.name != name for known in self.weights):
            self.weights.append(self._onnx.numpy_helper.from_array(np.array(value, dtype), name))
        return name


_ACTIVATIONS = ("RELU", "TANH", "SILU", "RELU6", "LEAKY_RELU", "HARDSWISH", "ELU", "SIGMOID")
_RULES: dict[LayerKind, Callable[[_Writer, ArchLayer], None]] = {
    LayerKind.CONV: _Writer.convolution,
    LayerKind.CBR: _Writer.convolution,
    LayerKind.BN1D: _Writer.batch_norm,
    LayerKind.BN2D: _Writer.batch_norm,
    LayerKind.FC: _Writer.fully_connected,
    LayerKind.FLATTEN: _Writer.flatten,
    LayerKind.MAXPOOL: _Writer.pool,
    LayerKind.AVGPOOL: _Writer.pool,
    LayerKind.GAP: _Writer.global_average,
    LayerKind.CHANNEL_PADDING: _Writer.pad_channels,
    LayerKind.IDENTITY: _Writer.nothing,
    LayerKind.DROPOUT: _Writer.nothing,
    LayerKind.ADD2_START: _Writer.residual_start,
    LayerKind.ADD2_SHORTCUT_END: _Writer.residual_turn,
    LayerKind.ADD2_END: _Writer.residual_end,
    LayerKind.SOFTMAX_CE: _Writer.loss,
    **{LayerKind[name]: _Writer.activation for name in _ACTIVATIONS},
}
