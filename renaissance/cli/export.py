"""``renaissance export MODEL.safetensors OUT.onnx``: a saved model for other runtimes."""

from __future__ import annotations

import argparse
from pathlib import Path

from renaissance.core.errors import ValueRejected
from renaissance.task.models import read_model
from renaissance.task.onnx_export import export_onnx


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument("model", type=Path, help="file that save_model wrote (.safetensors)")
    parser.add_argument("output", type=Path, help="ONNX file to write")


def run(arguments: argparse.Namespace) -> int:
    """Writes the file and says what its input is."""
    if arguments.output.suffix != ".onnx":
        raise ValueRejected(f"export: {arguments.output}; expected a name that ends in .onnx")
    saved = read_model(arguments.model)
    export_onnx(saved, arguments.output)
    side = saved.recipe.resolution
    print(
        f"{arguments.output}: images [N,{saved.arch_plan.input.c},{side},{side}] float32, (pixel / 255 - mean) / std, "
        f"to logits [N,{saved.arch_plan.num_classes}]"
    )
    return 0
