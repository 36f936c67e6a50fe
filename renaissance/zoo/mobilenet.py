"""MobileNetV2: M. Sandler, A. Howard, M. Zhu, A. Zhmoginov, L.-C. Chen, "MobileNetV2: Inverted residuals and linear
bottlenecks", arXiv 1801.04381."""

from __future__ import annotations

from renaissance.graph.blueprint import BluePrint, Layer, Seq, bn, conv, dropout, fc, gap, mbconv, relu6, seq

STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""Table 2: expansion, channels, number of blocks, stride of the first block."""
CIFAR_STRIDES = (1, 1, 2, 2, 1, 2, 1)
"""Three halvings of a 32x32 image instead of the five that turn 224 into 7."""
FIRST, LAST, DROPOUT = 32, 1280, 0.2


def mobilenet_v2(num_classes: int = 1000, cifar: bool = False) -> BluePrint:
    """MobileNetV2 of width 1 with a dropout of 0.2 before the classifier. 3,504,872 parameters.

    ``cifar``: for 32x32 images; stride 1 in the first convolution and the second stage. The weights have the same
    shapes.
    """
    blocks: list[Layer] = []
    for (expand, out, depth, stride), small in zip(STAGES, CIFAR_STRIDES, strict=True):
        blocks.append(mbconv(expand, out, small if cifar else stride))
        blocks += [mbconv(expand, out, 1)] * (depth - 1)
    classifier = seq(gap(), dropout(DROPOUT), fc(num_classes))
    return BluePrint(seq(_cbr6(FIRST, 3, 1 if cifar else 2), *blocks, _cbr6(LAST, 1, 1), classifier))


def _cbr6(out: int, kernel: int, stride: int) -> Seq:
    return seq(conv(out, kernel, stride, kernel // 2), bn(), relu6())
