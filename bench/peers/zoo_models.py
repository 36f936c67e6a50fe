"""The models of the zoo in PyTorch, written independently of ours (torchvision's where it has them), with our weights.

Activations are [N,C,H,W] here and [N,H,W,C] in ours. A dropout layer multiplies by factors that are given to it, so
that both sides drop the same elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torchvision
from torch import nn


class GivenDropout(nn.Module):
    def __init__(self, factors: np.ndarray) -> None:
        super().__init__()
        self.factors = torch.from_numpy(factors)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factors = self.factors.permute(0, 3, 1, 2) if x.ndim == 4 else self.factors.flatten(1)
        return x * factors.to(x.dtype)


def build(name: str, classes: int, size: int) -> nn.Module:
    """The model of the zoo called ``name`` for square images of ``size`` pixels."""
    base = name.removesuffix("_cifar")
    if name == "lenet5":
        return _lenet5(classes)
    if name == "nin":
        return _nin(classes)
    model = getattr(torchvision.models, base)(num_classes=classes)
    if base.startswith("vgg"):
        model.avgpool = nn.Identity()
        model.classifier[0] = nn.Linear(512 * (size // 32) ** 2, 4096)
    if name.endswith("_cifar") and base.startswith("resnet"):
        model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    if name == "mobilenet_v2_cifar":
        model.features[0][0].stride = (1, 1)
        model.features[2].conv[1][0].stride = (1, 1)
    return model


def _lenet5(classes: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, classes)),
    )


def _nin(classes: int) -> nn.Module:
    def mlpconv(inputs: int, widths: Sequence[int], kernel: int) -> list[nn.Module]:
        layers: list[nn.Module] = []
        for width, k in zip(widths, (kernel, 1, 1), strict=True):
            layers += [nn.Conv2d(inputs, width, k, padding=k // 2), nn.ReLU()]
            inputs = width
        return layers

    return nn.Sequential(
        *(*mlpconv(3, (192, 160, 96), 5), nn.MaxPool2d(3, 2, 1), nn.Dropout(0.5)),
        *(*mlpconv(96, (192, 192, 192), 5), nn.AvgPool2d(3, 2, 1), nn.Dropout(0.5)),
        *(*mlpconv(192, (192, 192, classes), 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    )


def give_dropout(module: nn.Module, factors: Sequence[np.ndarray]) -> None:
    """Put a multiplication by ``factors`` [N,H,W,C] in the place of every dropout layer, in order; raises ValueError
    when there are more or fewer."""
    found = [
        (parent, name)
        for parent in module.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Dropout)
    ]
    for (parent, name), factor in zip(found, factors, strict=True):
        setattr(parent, name, GivenDropout(factor))


def leaves(module: nn.Module) -> Iterator[nn.Module]:
    """Modules with parameters in the order of ours: in a residual block the shortcut comes first."""
    children = list(module.children())
    shortcut = getattr(module, "downsample", None)
    if isinstance(shortcut, nn.Module):
        children = [shortcut, *(c for c in children if c is not shortcut)]
    if not children and next(module.parameters(recurse=False), None) is not None:
        yield module
    for child in children:
        yield from leaves(child)


class Parameters:
    """The parameters of a model one by one as ours are: name of the kind, and arrays in our layout [N,H,W,C]."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = list(leaves(model))
        self.of: list[tuple[nn.Module, torch.Tensor]] = [(m, p) for m in self.modules for p in m.parameters()]

    def load(self, values: Sequence[np.ndarray]) -> None:
        """Copy our parameters in; raises ValueError where number or shapes disagree."""
        if len(values) != len(self.of):
            raise ValueError(f"ours has {len(values)} parameters, PyTorch's {len(self.of)}")
        channels = 0
        for (module, parameter), value in zip(self.of, values, strict=True):
            if isinstance(module, nn.Conv2d):
                channels = module.out_channels
            with torch.no_grad():
                parameter.copy_(torch.from_numpy(_theirs(module, value, channels).reshape(parameter.shape)))
            if isinstance(module, nn.Linear) and value.shape[0] > 1:
                module.places = value.shape[3] // channels if value.shape[3] % channels == 0 else 1
                module.channels = channels
                channels = module.out_features

    def gradients(self) -> list[np.ndarray]:
        """The gradients in our layout, as float64."""
        result = []
        for module, parameter in self.of:
            assert parameter.grad is not None
            grad = parameter.grad.double().numpy()
            if isinstance(module, nn.Conv2d) and grad.ndim == 4:
                grad = grad.transpose(0, 2, 3, 1)
            elif isinstance(module, nn.Linear) and grad.ndim == 2:
                grad = grad.reshape(len(grad), module.channels, module.places).transpose(0, 2, 1)
            result.append(grad)
        return result

    def statistics(self) -> list[np.ndarray]:
        """Running mean and variance of every batch norm, in order."""
        norms = [m for m in self.modules if isinstance(m, nn.BatchNorm2d)]
        return [s.double().numpy() for m in norms for s in (m.running_mean, m.running_var) if s is not None]


def _theirs(module: nn.Module, value: np.ndarray, channels: int) -> np.ndarray:
    """One of our parameters in PyTorch's order. ``channels``: of the layer whose pixels a linear layer reads."""
    if isinstance(module, nn.Conv2d) and value.shape[0] > 1:
        return value.transpose(0, 3, 1, 2).copy()
    if isinstance(module, nn.Linear) and value.shape[0] > 1 and value.shape[3] % channels == 0:
        return value.reshape(len(value), -1, channels).transpose(0, 2, 1).copy()
    return value.copy()
