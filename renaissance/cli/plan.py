"""``renaissance plan``: what a model is compiled to, as text and as drawings, without training it.

MODEL is a name of the zoo, or FILE.py:NAME for a BluePrint (or a function of the number of classes that returns one) in
a Python file, which is run. ``arch`` and ``cost`` need the model only; ``train``, ``infer``, ``memory`` and ``atlas``
show the compiled model for a batch size, an element type and an optimizer.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from renaissance import zoo
from renaissance.cli.model_source import from_file
from renaissance.core.dtype import DType
from renaissance.core.enums import OptimizerKind
from renaissance.core.errors import ValueRejected
from renaissance.core.files import written_when_complete
from renaissance.core.shape import Shape
from renaissance.graph import BluePrint, CompiledModel, CompileRequest, build_arch_plan, compile_model
from renaissance.graph.arch_plan import ArchPlan, expand, infer_shapes
from renaissance.graph.cost import model_cost
from renaissance.graph.draw import graph_dot, graph_svg, plan_dot, plan_svg
from renaissance.graph.text import graph_text

BATCH, DTYPE, OPTIMIZER, DEVICE = 32, "fp32", "sgd_momentum", "cpu"
DEVICES = ("cpu", "cuda")
DTYPES: Mapping[str, DType | None] = {"fp32": None, "bf16": DType.BF16, "fp16": DType.FP16}
OPTIMIZERS = {kind.name.lower(): kind for kind in OptimizerKind}
PARTS = ("arch", "cost", "train", "infer", "memory", "atlas")
UNCOMPILED = frozenset({"arch", "cost"})
DRAWINGS = ("arch", "train", "infer")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("model", metavar="MODEL", help=f"FILE.py:NAME, or one of: {', '.join(zoo.models())}")
    parser.add_argument("--input", type=_size, metavar="HxWxC", help="size of a sample (default: the zoo model's)")
    parser.add_argument("--classes", type=int, metavar="N", help="number of classes (default: the model's)")
    parser.add_argument("--batch", type=int, metavar="N", help=f"samples of a batch (default: {BATCH})")
    parser.add_argument("--dtype", choices=DTYPES, help=f"element type of the products (default: {DTYPE})")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help=f"(default: {OPTIMIZER})")
    parser.add_argument("--device", choices=DEVICES, help=f"what it is compiled for (default: {DEVICE}); needs no GPU")
    parser.add_argument(
        "--show", type=_parts, metavar="PARTS", help=f"what to print, of {','.join(PARTS)} (default: arch,cost)"
    )
    parser.add_argument("--draw", choices=DRAWINGS, help="what --dot and --svg draw (default: train)")
    parser.add_argument("--dot", type=Path, metavar="FILE", help="write a drawing for Graphviz")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a drawing that a browser shows")


def run(arguments: argparse.Namespace) -> int:
    """Print the parts that were asked for and write the drawings."""
    drawn = _drawn(arguments)
    parts = arguments.show if arguments.show is not None else () if drawn else ("arch", "cost")
    compiles = bool(set(parts) - UNCOMPILED) or drawn in ("train", "infer")
    for option in ("batch", "dtype", "optimizer", "device"):
        if not compiles and getattr(arguments, option) is not None:
            acting = ", ".join(part for part in PARTS if part not in UNCOMPILED)
            raise ValueRejected(f"plan: --{option} acts on the compiled model; show or draw one of: {acting}")
    source = _source(arguments)
    arch_plan = build_arch_plan(source.blueprint, source.sample, source.num_classes)
    model = _compiled(arguments, source) if compiles else None
    print("\n".join(_text(part, arch_plan, model) for part in parts), end="")
    for path, draw in ((arguments.dot, _dot), (arguments.svg, _svg)):
        if path is not None and drawn is not None:
            with written_when_complete(path) as file:
                file.write(draw(drawn, arch_plan, model, arguments.model).encode())
    return 0


@dataclass(frozen=True, slots=True)
class _Source:
    blueprint: BluePrint
    sample: Shape
    num_classes: int


def _drawn(arguments: argparse.Namespace) -> str | None:
    """What to draw, or None."""
    if arguments.dot is None and arguments.svg is None:
        if arguments.draw is not None:
            raise ValueRejected("plan: --draw says what --dot and --svg draw; give one of them")
        return None
    if arguments.dot == arguments.svg:
        raise ValueRejected(f"plan: --dot and --svg are both {arguments.dot}; expected two files")
    return str(arguments.draw or "train")


def _compiled(arguments: argparse.Namespace, source: _Source) -> CompiledModel:
    batch = BATCH if arguments.batch is None else arguments.batch
    request = CompileRequest(
        height=source.sample.h,
        width=source.sample.w,
        channels=source.sample.c,
        num_classes=source.num_classes,
        train_batch=batch,
        val_batch=batch,
        half=DTYPES[arguments.dtype or DTYPE],
        optimizer=OPTIMIZERS[arguments.optimizer or OPTIMIZER],
        external_inputs=arguments.device != "cuda",
    )
    return compile_model(source.blueprint, request)


def _text(part: str, plan: ArchPlan, model: CompiledModel | None) -> str:
    if part == "arch":
        return plan.text()
    if part == "cost":
        return model_cost(plan).text()
    if model is None:
        raise ValueRejected(f"plan: {part} needs the compiled model")
    shown: Mapping[str, Callable[[], str]] = {
        "train": lambda: graph_text(model.training, model.plans[0]),
        "infer": lambda: graph_text(model.inference, model.plans[0]),
        "memory": model.plans[0].dump_layout,
        "atlas": model.atlas.text,
    }
    return shown[part]()


def _dot(drawn: str, plan: ArchPlan, model: CompiledModel | None, title: str) -> str:
    if model is None or drawn == "arch":
        return plan_dot(plan)
    return graph_dot(model.training if drawn == "train" else model.inference, model.plans[0])


def _svg(drawn: str, plan: ArchPlan, model: CompiledModel | None, title: str) -> str:
    if model is None or drawn == "arch":
        return plan_svg(plan, f"{title}: layers")
    if drawn == "train":
        return graph_svg(model.training, model.plans[0], f"{title}: one training step")
    return graph_svg(model.inference, model.plans[0], f"{title}: one validation step")


def _source(arguments: argparse.Namespace) -> _Source:
    name, classes = arguments.model, arguments.classes
    if classes is not None and classes < 1:
        raise ValueRejected(f"plan: --classes is {classes}; expected at least 1")
    if ":" in name or name.endswith(".py"):
        blueprint = from_file(name, classes)
        if arguments.input is None:
            raise ValueRejected(f"plan: {name} does not say how large a sample is; give --input HxWxC")
        if classes is None:
            classes = infer_shapes(expand(blueprint, arguments.input), arguments.input)[-1].output.numel
        return _Source(blueprint, arguments.input, classes)
    entry = zoo.entry(name)
    count = entry.num_classes if classes is None else classes
    return _Source(zoo.model(name, count), arguments.input or entry.input, count)


def _size(text: str) -> Shape:
    sizes = text.lower().split("x")
    if len(sizes) != 3 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r}: expected HEIGHTxWIDTHxCHANNELS, for example 224x224x3")
    return Shape.of(*map(int, sizes))


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}: expected some of {','.join(PARTS)}")
    return parts
