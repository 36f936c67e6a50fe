"""The zoo: sizes equal the published ones, and every model compiles to a plan for its usual input."""

from pathlib import Path

import pytest

from renaissance import graph, zoo
from renaissance.core.errors import ValueRejected
from renaissance.core.shape import Shape
from renaissance.graph import blueprint as bp
from renaissance.graph import build_arch_plan
from renaissance.graph.arch_plan import ArchPlan, LayerKind
from renaissance.graph.cost import model_cost

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

# name: parameters, multiply-adds of one sample. Parameters and G multiply-adds (rounded to 3 places) of the ImageNet
# models as torchvision publishes them with its weights; resnet18_cifar and nin as their CIFAR-10 authors count them;
# lenet5: 61,706 is what the layers of the paper have when all maps are connected.
PUBLISHED = {
    "vgg11_bn": (132_868_840, 7.609),
    "vgg16_bn": (138_365_992, 15.47),
    "resnet18": (11_689_512, 1.814),
    "resnet34": (21_797_672, 3.664),
    "resnet50": (25_557_032, 4.089),
    "mobilenet_v2": (3_504_872, 0.301),
}
PUBLISHED_PARAMETERS = {
    "lenet5": 61_706,
    "nin": 966_986,
    "resnet18_cifar": 11_173_962,
    "resnet34_cifar": 21_282_122,
    "resnet50_cifar": 23_520_842,
    "mobilenet_v2_cifar": 2_236_682,
}
EXACT_MACS = {
    # derived by hand: 28*28*6*25 + 10*10*16*150 + 400*120 + 120*84 + 84*10
    "lenet5": 416_520,
    "vgg16_bn": 15_470_264_320,
    "resnet18": 1_814_073_344,
    "resnet34": 3_663_761_408,
    "resnet50": 4_089_184_256,
    "mobilenet_v2": 300_774_272,
    "resnet18_cifar": 555_422_720,
}


def plan_of(name: str) -> ArchPlan:
    entry = zoo.entry(name)
    return build_arch_plan(zoo.model(name), entry.input, entry.num_classes)


def test_sizes_are_the_published_ones() -> None:
    assert set(zoo.models()) == set(PUBLISHED) | set(PUBLISHED_PARAMETERS)
    for name in zoo.models():
        cost = model_cost(plan_of(name))
        if name in PUBLISHED:
            assert (cost.parameters, round(cost.macs / 1e9, 3)) == PUBLISHED[name], name
        else:
            assert cost.parameters == PUBLISHED_PARAMETERS[name], name
        assert cost.macs == EXACT_MACS.get(name, cost.macs), name
        # a training step does the products three times, but no data gradient for the first layer
        first = next(layer for layer in cost.layers if layer.first)
        assert cost.training_flops == 6 * cost.macs - 2 * first.macs, name


def test_the_page_lists_every_model_with_its_size() -> None:
    page = PAGE.read_text()
    for name in zoo.models():
        entry, cost = zoo.entry(name), model_cost(plan_of(name))
        size = f"{entry.input.h}x{entry.input.w}x{entry.input.c}"
        assert f"| `{name}` | {size} | {entry.num_classes} | {cost.parameters:,} | {cost.macs:,} |" in page


def test_the_page_names_every_factory_and_its_example_compiles() -> None:
    page = PAGE.read_text()
    factories = [
        name for name in bp.__dict__ if name.islower() and callable(getattr(bp, name)) and name in graph.__all__
    ]
    assert len(factories) > 28
    assert [name for name in factories if f"`{name}`" not in page] == []
    example = page.split("```python\n")[1].split("```")[0]
    names: dict[str, object] = {}
    exec(example, names)
    assert build_arch_plan(names["net"], Shape.of(32, 32, 3), 10).layers[0].name == "conv1"  # type: ignore[arg-type]


def test_a_model_is_made_for_any_number_of_classes() -> None:
    for name in zoo.models():
        layers = build_arch_plan(zoo.model(name, 7), zoo.entry(name).input, 7).layers
        assert layers[-1].input == Shape.of(7), name


def test_mobilenet_is_the_published_one() -> None:
    """Finding A3 of spec/framework: upstream's blocks are dense, with ReLU, and widen also by 1."""
    layers = plan_of("mobilenet_v2").layers
    convs = [layer for layer in layers if layer.kind is LayerKind.CBR]
    depthwise = [layer for layer in convs if layer.attrs["kernel"] == 3][1:]  # the first is the dense one of the stem
    assert len(depthwise) == 17
    assert all(layer.attrs["groups"] == layer.input.c == layer.output.c for layer in depthwise)
    assert len(convs) == 1 + 17 * 3 - 1 + 1  # the first block has no widening convolution
    assert {layer.attrs["activation"] for layer in depthwise} == {"relu6"}
    ends = [layer for layer in layers if layer.kind is LayerKind.ADD2_END]
    assert (len(ends), {end.attrs["activation"] for end in ends}) == (10, {"none"})
    small = plan_of("mobilenet_v2_cifar").layers
    assert next(layer for layer in small if layer.kind is LayerKind.GAP).input == Shape.of(4, 4, 1280)


def test_a_name_or_number_that_is_wrong_is_refused() -> None:
    with pytest.raises(ValueRejected, match=r"no model 'resnet19' in the zoo; expected one of: lenet5, nin"):
        zoo.model("resnet19")
    for classes in (0, True, "10", 2.0):
        with pytest.raises(ValueRejected, match="at least 1 class"):
            zoo.model("nin", classes)  # type: ignore[arg-type]


def test_the_cost_of_lenet_is_this_text() -> None:
    assert model_cost(plan_of("lenet5")).text() == COST


COST = """\
Cost of one sample: 61,706 parameters (and 0 running statistics), 416,520 multiply-adds forward, \
2,263,920 floating-point operations a training step
  layer     parameters  multiply-adds  outputs
  conv1            156        117,600    4,704
  tanh1              0              0    4,704
  avgpool1           0              0    1,176
  conv2          2,416        240,000    1,600
  tanh2              0              0    1,600
  avgpool2           0              0      400
  fc1           48,120         48,000      120
  tanh3              0              0      120
  fc2           10,164         10,080       84
  tanh4              0              0       84
  fc3              850            840       10
  sum           61,706        416,520   14,602
"""
