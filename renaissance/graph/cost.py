"""What a model costs: parameters, multiply-adds and activations of every layer, from the ArchPlan.

A multiply-add is one product with its sum, counted for convolutions and fully connected layers only, as published
counts do ("GFLOPS" of most papers and of torchvision are these). A forward pass takes two floating-point operations
each; a training step three times that, less the data gradient of the first layer, which nobody asks for.
"""

from __future__ import annotations

from dataclasses import dataclass

from renaissance.graph.arch_layers import MARKERS, ArchLayer, LayerKind
from renaissance.graph.arch_plan import ArchPlan

BN_KINDS = frozenset({LayerKind.CBR, LayerKind.BN1D, LayerKind.BN2D})
CONV_KINDS = frozenset({LayerKind.CONV, LayerKind.CBR})


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Of one layer and one sample. ``parameters`` are trained; ``statistics`` are the running means and variances."""

    name: str
    parameters: int = 0
    statistics: int = 0
    macs: int = 0
    outputs: int = 0
    """Values the layer gives (0 for a marker): what a training step keeps, when nothing is planned away."""
    first: bool = False
    """True for the first layer with weights: there is nothing to differentiate before it."""


@dataclass(frozen=True, slots=True)
class ModelCost:
    layers: tuple[LayerCost, ...]

    @property
    def parameters(self) -> int:
        """Trained values."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def statistics(self) -> int:
        """Running means and variances of the batch normalisations."""
        return sum(layer.statistics for layer in self.layers)

    @property
    def macs(self) -> int:
        """Multiply-adds of a forward pass of one sample."""
        return sum(layer.macs for layer in self.layers)

    @property
    def training_flops(self) -> int:
        """Floating-point operations of the products in a training step, for one sample."""
        return sum(2 * layer.macs * (2 if layer.first else 3) for layer in self.layers)

    @property
    def outputs(self) -> int:
        """Values all layers give for one sample."""
        return sum(layer.outputs for layer in self.layers)

    def text(self) -> str:
        """Stable text: one row per layer that costs something, and the sums."""
        rows = [("layer", "parameters", "multiply-adds", "outputs")]
        rows += [
            (layer.name, f"{layer.parameters:,}", f"{layer.macs:,}", f"{layer.outputs:,}")
            for layer in self.layers
            if layer.parameters or layer.macs or layer.outputs
        ]
        rows.append(("sum", f"{self.parameters:,}", f"{self.macs:,}", f"{self.outputs:,}"))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = [
            f"Cost of one sample: {self.parameters:,} parameters (and {self.statistics:,} running statistics), "
            f"{self.macs:,} multiply-adds forward, {self.training_flops:,} floating-point operations a training step"
        ]
        lines += ["  " + f"{r[0]:<{widths[0]}}" + "".join(f"  {r[i]:>{widths[i]}}" for i in (1, 2, 3)) for r in rows]
        return "\n".join(lines) + "\n"


def layer_cost(layer: ArchLayer) -> LayerCost:
    """Cost of one layer of a plan (its shapes must be known)."""
    parameters = macs = statistics = 0
    outputs = layer.output.numel if layer.kind is LayerKind.ADD2_END or layer.kind not in MARKERS else 0
    if layer.kind in CONV_KINDS or layer.kind is LayerKind.FC:
        out = int(layer.attrs["out"])
        fan_in = layer.input.c
        if layer.kind in CONV_KINDS:
            fan_in = int(layer.attrs["kernel"]) ** 2 * (layer.input.c // int(layer.attrs["groups"]))
        parameters += out * fan_in + (out if layer.attrs["bias"] else 0)
        macs = out * fan_in * layer.output.h * layer.output.w
    if layer.kind in BN_KINDS:
        parameters += 2 * layer.output.c
        statistics = 2 * layer.output.c
    if layer.kind in (LayerKind.IDENTITY, LayerKind.FLATTEN, LayerKind.SOFTMAX_CE):
        outputs = 0
    return LayerCost(layer.name, parameters, statistics, macs, outputs, layer.first)


def model_cost(plan: ArchPlan) -> ModelCost:
    """Cost of every layer of the plan, in order."""
    return ModelCost(tuple(layer_cost(layer) for layer in plan.layers))
