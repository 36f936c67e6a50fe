"""Residual networks: K. He, X. Zhang, S. Ren, J. Sun, "Deep residual learning for image recognition",
arXiv 1512.03385.

The ImageNet form is that of table 1, with projections where a stage starts (option B) and the stride of a bottleneck in
its 3x3 convolution. The CIFAR form has the same stages behind one 3x3 convolution and no max pool, so that a 32x32
image enters the first stage whole; it is the one most CIFAR results of these networks are quoted for.
"""

from __future__ import annotations

from renaissance.graph.blueprint import BlockStyle, BluePrint, Layer, block, cbr, cbrp, gap_fc, repeat, seq

WIDTHS = (64, 128, 256, 512)
EXPANSION = 4
"""How much wider than its middle a bottleneck ends."""


def resnet18(num_classes: int = 1000, cifar: bool = False) -> BluePrint:
    """ResNet-18. 11,689,512 parameters; 11,173,962 with ``cifar`` and 10 classes."""
    return _resnet((2, 2, 2, 2), False, num_classes, cifar)


def resnet34(num_classes: int = 1000, cifar: bool = False) -> BluePrint:
    """ResNet-34. 21,797,672 parameters."""
    return _resnet((3, 4, 6, 3), False, num_classes, cifar)


def resnet50(num_classes: int = 1000, cifar: bool = False) -> BluePrint:
    """ResNet-50. 25,557,032 parameters."""
    return _resnet((3, 4, 6, 3), True, num_classes, cifar)


def _resnet(depths: tuple[int, ...], bottleneck: bool, num_classes: int, cifar: bool) -> BluePrint:
    stem = cbr(WIDTHS[0], 3, 1, 1) if cifar else cbrp(WIDTHS[0], 7, 2, 3, 3, 2, 1)
    stages: list[Layer] = []
    for stage, (width, depth) in enumerate(zip(WIDTHS, depths, strict=True)):
        first, other = (_block(width, bottleneck, halving) for halving in (stage > 0, False))
        stages.append(seq(first, repeat(other, depth - 1)))
    return BluePrint(seq(stem, *stages, gap_fc(num_classes)))


def _block(width: int, bottleneck: bool, halving: bool) -> Layer:
    if bottleneck:
        style = BlockStyle.RESNET_1_3_1_DS if halving else BlockStyle.RESNET_1_3_1
        return block(width, width * EXPANSION, style)
    return block(width, BlockStyle.RESNET_3_3_DS if halving else BlockStyle.RESNET_3_3)
