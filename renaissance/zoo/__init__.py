"""Published image classifiers, written with the BluePrint; every one by name in ``models()``."""

from renaissance.zoo.classic import lenet5, nin, vgg11_bn, vgg16_bn
from renaissance.zoo.mobilenet import mobilenet_v2
from renaissance.zoo.registry import Entry, entry, model, models
from renaissance.zoo.resnet import resnet18, resnet34, resnet50

__all__ = [
    "Entry",
    "entry",
    "lenet5",
    "mobilenet_v2",
    "model",
    "models",
    "nin",
    "resnet18",
    "resnet34",
    "resnet50",
    "vgg11_bn",
    "vgg16_bn",
]
