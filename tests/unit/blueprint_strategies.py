"""Random BluePrints that fit together, of every kind of layer (no tests here)."""

from dataclasses import dataclass

from hypothesis import strategies as st

from renaissance.core.shape import Shape
from renaissance.graph import blueprint as bp
from renaissance.graph.arch_layers import follow, window_size
from renaissance.graph.arch_plan import expand

ACTIVATIONS = (bp.relu, bp.tanh_act, bp.silu, bp.relu6, bp.leaky_relu, bp.hardswish, bp.elu, bp.sigmoid)


@dataclass(frozen=True)
class Drawn:
    blueprint: bp.BluePrint
    sample: Shape
    num_classes: int


def output(layer: bp.Layer, shape: Shape) -> Shape:
    """What ``layer`` makes of ``shape``, by the expanding step."""
    return list(follow(expand(bp.BluePrint(layer), shape), shape))[-1][2]


@st.composite
def windows(draw: st.DrawFn, shape: Shape, pool: bool = False) -> tuple[int, int, int]:
    """(kernel, stride, pad) that fits the image."""
    kernel = draw(st.integers(1, 4))
    pad = draw(st.integers(0, kernel // 2))
    smallest = min(shape.h, shape.w) + 2 * pad
    kernel = min(kernel, smallest)
    return kernel, draw(st.integers(1, 3)), min(pad, kernel // 2) if pool else pad


@st.composite
def leaves(draw: st.DrawFn, shape: Shape, widest: int) -> bp.Layer:
    """Any layer but a residual sum; the shape may change."""
    width = draw(st.integers(1, widest))
    kernel, stride, pad = draw(windows(shape))
    pool = draw(windows(shape, pool=True))
    if window_size(min(shape.h, shape.w), *pool) < 1:
        pool = (1, 1, 0)
    divisors = [g for g in range(1, shape.c + 1) if shape.c % g == 0]
    groups = draw(st.sampled_from(divisors))
    return draw(
        st.sampled_from(
            [
                bp.conv(width, kernel, stride, pad, draw(st.booleans())),
                bp.conv_dw(kernel, stride, pad),
                bp.group_conv(groups * draw(st.integers(1, 3)), groups, kernel, stride, pad, draw(st.booleans())),
                bp.bn(),
                bp.cbr(width, kernel, stride, pad),
                draw(st.sampled_from(ACTIVATIONS))(),
                bp.relu(),
                bp.dropout(0.25),
                bp.maxpool(*pool),
                bp.avgpool(*pool, draw(st.booleans())),
                bp.gap(),
                bp.flatten(),
                bp.identity(),
                bp.channel_padding(),
                bp.fc(width, draw(st.booleans())),
                bp.mbconv(draw(st.sampled_from([1, 2, 6])), width, draw(st.integers(1, 2))),
                bp.block(width, draw(st.sampled_from([bp.BlockStyle.RESNET_3_3, bp.BlockStyle.RESNET_3_3_DS]))),
                bp.block(3, width, bp.BlockStyle.RESNET_1_3_1),
            ]
        )
    )


@st.composite
def keeping(draw: st.DrawFn, shape: Shape, depth: int) -> bp.Layer:
    """Layers that give back the shape they get, one of which does something; may hold a residual sum."""
    choices: list[bp.Layer] = [
        bp.seq(bp.conv(shape.c, 3, 1, 1), bp.bn()),
        bp.seq(bp.conv_dw(3, 1, 1), bp.relu6()),
        bp.bn(),
        bp.silu(),
        bp.maxpool(3, 1, 1),
    ]
    if depth > 0:
        choices.append(draw(sums(shape, depth - 1)))
    return bp.seq(draw(st.lists(st.sampled_from(choices), min_size=1, max_size=2)))


@st.composite
def sums(draw: st.DrawFn, shape: Shape, depth: int = 1) -> bp.Layer:
    """A residual sum that keeps the shape; nests ``depth`` deep."""
    shortcut = draw(st.sampled_from([bp.identity(), draw(keeping(shape, depth))]))
    return bp.seq(bp.add2(shortcut, draw(keeping(shape, depth))), draw(st.sampled_from([bp.relu(), bp.identity()])))


@st.composite
def blueprints(draw: st.DrawFn, longest: int = 6, widest: int = 12, largest_image: int = 9) -> Drawn:
    """A model with at most ``longest`` layers before its classifier; residual sums also at the very start."""
    size = st.integers(1, largest_image)
    sample = shape = Shape.of(draw(size), draw(size), draw(st.sampled_from([1, 3, 8])))
    layers: list[bp.Layer] = []
    for _ in range(draw(st.integers(0, longest))):
        layer = draw(sums(shape) if draw(st.integers(0, 3)) == 0 else leaves(shape, widest))
        layers.append(layer)
        shape = output(layer, shape)
    classes = draw(st.integers(1, 10))
    head = draw(st.sampled_from([bp.fc(classes), bp.gap_fc(classes), bp.seq(bp.conv(classes, 1), bp.gap())]))
    return Drawn(bp.BluePrint(bp.seq(*layers, head)), sample, classes)
