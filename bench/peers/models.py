"""The models of the step benches in PyTorch, with the layers of ours."""

from __future__ import annotations

import torch
import torchvision
from torch import nn

CLASSES = {"cnn": 10, "resnet18": 10, "resnet50": 1000, "mobilenet_v2": 1000}


def build(name: str) -> nn.Module:
    """A model by the name the benches use."""
    if name == "cnn":
        layers: list[nn.Module] = []
        for inputs, outputs in ((1, 32), (32, 64)):
            conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
            layers += [conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        return nn.Sequential(
            *layers, nn.Flatten(), nn.Linear(64 * 7 * 7, 128), nn.ReLU(inplace=True), nn.Linear(128, 10)
        )
    if name == "resnet18":  # the stem for 32x32
        model = torchvision.models.resnet18(num_classes=10)
        model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
        return model
    return getattr(torchvision.models, name)(num_classes=CLASSES[name])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum 0.9 and decay 5e-4, in PyTorch's fused form."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, fused=True)
