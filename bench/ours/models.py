"""The models of the step benches, by the names the peers use."""

from __future__ import annotations

from renaissance.graph import BluePrint, bn, conv, fc, maxpool, relu, seq
from renaissance.zoo import model

CLASSES = {"cnn": 10, "resnet18": 10, "resnet50": 1000, "mobilenet_v2": 1000}


def classes(name: str) -> int:
    return CLASSES[name]


def blueprint(name: str) -> BluePrint:
    if name == "cnn":
        blocks = [(conv(out, 3, 1, 1), bn(), relu(), maxpool(2, 2, 0)) for out in (32, 64)]
        return BluePrint(seq(*(layer for block in blocks for layer in block), fc(128), relu(), fc(10)))
    return model("resnet18_cifar" if name == "resnet18" else name, num_classes=CLASSES[name])
