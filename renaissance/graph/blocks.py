"""What the blocks of the BluePrint consist of, given the number of channels that come in."""

from __future__ import annotations

from renaissance.graph.blueprint import (
    Layer,
    MbConv,
    ResNetBlock,
    add2,
    bn,
    cbr,
    conv,
    conv_dw,
    identity,
    relu,
    relu6,
    seq,
)


def resnet_block(block: ResNetBlock, channels: int) -> Layer:
    """Basic block or bottleneck; He et al., arXiv 1512.03385, figure 5 and option B for the shortcuts.

    The stride of a bottleneck is that of its 3x3, as in every published set of weights since Facebook's ("v1.5"): in
    the first 1x1 it would drop three quarters of the input.
    """
    out, stride = block.out, block.stride
    if block.mid is None:
        stem = seq(cbr(out, 3, stride, 1), conv(out, 3, 1, 1), bn())
    else:
        stem = seq(cbr(block.mid, 1), cbr(block.mid, 3, stride, 1), conv(out, 1), bn())
    same = channels == out and stride == 1
    return seq(add2(identity() if same else seq(conv(out, 1, stride), bn()), stem), relu())


def mobile_block(block: MbConv, channels: int) -> Layer:
    """Inverted residual with a linear bottleneck; Sandler et al., arXiv 1801.04381, section 3 and table 1."""
    wide = channels * block.expand
    widening: list[Layer] = [conv(wide, 1), bn(), relu6()] if block.expand > 1 else []
    stem = seq(*widening, conv_dw(3, block.stride, 1), bn(), relu6(), conv(block.out, 1), bn())
    return add2(identity(), stem) if block.stride == 1 and block.out == channels else stem
