"""LeNet-5, Network in Network and VGG: plain chains of layers."""

from __future__ import annotations

from renaissance.graph.blueprint import (
    BluePrint,
    Layer,
    Seq,
    avgpool,
    bn,
    conv,
    dropout,
    fc,
    flatten,
    gap,
    maxpool,
    relu,
    seq,
    tanh_act,
)

VGG_WIDTHS = (64, 128, 256, 512, 512)
VGG_HIDDEN = 4096


def lenet5(num_classes: int = 10) -> BluePrint:
    """LeNet-5 for 32x32 grey images: Y. LeCun, L. Bottou, Y. Bengio, P. Haffner, "Gradient-based learning applied to
    document recognition", Proc. IEEE 86(11), 1998.

    In the form in common use: plain average pooling for the trained subsampling, all maps connected in the second
    convolution, and a softmax at the end instead of radial basis functions. 61,706 parameters.
    """
    return BluePrint(
        seq(
            seq(conv(6, 5, bias=True), tanh_act(), avgpool(2)),
            seq(conv(16, 5, bias=True), tanh_act(), avgpool(2)),
            seq(flatten(), fc(120), tanh_act(), fc(84), tanh_act(), fc(num_classes)),
        )
    )


def nin(num_classes: int = 10) -> BluePrint:
    """Network in Network for 32x32 colour images: M. Lin, Q. Chen, S. Yan, arXiv 1312.4400.

    The sizes are those of the authors' CIFAR-10 configuration. 966,986 parameters.
    """

    def mlpconv(widths: tuple[int, int, int], kernel: int, pad: int) -> Seq:
        first, second, third = widths
        return seq(
            seq(conv(first, kernel, 1, pad, bias=True), relu()),
            seq(conv(second, 1, bias=True), relu()),
            seq(conv(third, 1, bias=True), relu()),
        )

    return BluePrint(
        seq(
            seq(mlpconv((192, 160, 96), 5, 2), maxpool(3, 2, 1), dropout(0.5)),
            seq(mlpconv((192, 192, 192), 5, 2), avgpool(3, 2, 1), dropout(0.5)),
            seq(mlpconv((192, 192, num_classes), 3, 1), gap()),
        )
    )


def vgg11_bn(num_classes: int = 1000) -> BluePrint:
    """VGG-11 with batch normalisation for 224x224 images. 132,868,840 parameters. Source: ``vgg16_bn``."""
    return _vgg((1, 1, 2, 2, 2), num_classes)


def vgg16_bn(num_classes: int = 1000) -> BluePrint:
    """VGG-16 with batch normalisation for 224x224 images: K. Simonyan, A. Zisserman, "Very deep convolutional networks
    for large-scale image recognition", arXiv 1409.1556, configuration D, with the normalisation of S. Ioffe,
    C. Szegedy, arXiv 1502.03167, before every ReLU of a convolution. 138,365,992 parameters.
    """
    return _vgg((2, 2, 3, 3, 3), num_classes)


def _vgg(depths: tuple[int, ...], num_classes: int) -> BluePrint:
    groups: list[Layer] = []
    for width, depth in zip(VGG_WIDTHS, depths, strict=True):
        groups += [seq(conv(width, 3, 1, 1, bias=True), bn(), relu())] * depth + [maxpool(2, 2)]
    hidden = [seq(fc(VGG_HIDDEN), relu(), dropout(0.5))] * 2
    return BluePrint(seq(*groups, flatten(), *hidden, fc(num_classes)))
