"""``renaissance predict MODEL.safetensors PICTURE...``: what a saved model sees in pictures.

A picture is prepared as validation prepared its samples: by the recipe that the model was saved with.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from renaissance.core.dtype import DType
from renaissance.core.errors import FormatError, MissingFileError, RenaissanceError, ValueRejected
from renaissance.data.compile import compile_recipe
from renaissance.data.pictures import compile_pictures
from renaissance.data.recipe import Recipe
from renaissance.data.sources import Encoding
from renaissance.task.predict import load_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument("model", type=Path, help="file that save_model wrote (.safetensors)")
    parser.add_argument("pictures", type=Path, nargs="+", metavar="PICTURE", help="JPEG, PNG or any file Pillow reads")
    parser.add_argument("--top", type=int, default=5, help="classes to print per picture (default 5)")
    parser.add_argument("--classes", type=Path, help="text file with the name of class 0, 1, ... on a line each")
    parser.add_argument("--threads", type=int, help="compute threads (default: chosen from the cores)")
    parser.add_argument("--json", action="store_true", help="one JSON object per picture")


def run(arguments: argparse.Namespace) -> int:
    """Prints a line per picture."""
    predictor = load_model(arguments.model, batch=min(len(arguments.pictures), 32), threads=arguments.threads)
    classes = predictor.saved.arch_plan.num_classes
    names = class_names(arguments.classes, classes)
    count = min(arguments.top, classes)
    samples = np.stack([prepare(path, predictor.saved.recipe) for path in arguments.pictures])
    answer = predictor.predict(samples)
    for path, row, best in zip(arguments.pictures, answer.probabilities, answer.top(count), strict=True):
        found = [{"class": int(i), "name": names[i], "probability": round(float(row[i]), 6)} for i in best]
        if arguments.json:
            print(json.dumps({"picture": str(path), "top": found}))
        else:
            print(f"{path}: " + ", ".join(f"{f['name']} {f['probability']:.1%}" for f in found))
    return 0


def class_names(path: Path | None, classes: int) -> list[str]:
    """A name for every class: the lines of a file, or "class 0", "class 1", ..."""
    if path is None:
        return [f"class {i}" for i in range(classes)]
    if not path.is_file():
        raise MissingFileError(f"{path}: no such file")
    names = path.read_text("utf-8").splitlines()
    if len(names) != classes:
        raise ValueRejected(f"{path}: {len(names)} lines; expected {classes}, one per class of the model")
    return names


def prepare(path: Path, recipe: Recipe) -> npt.NDArray[np.float32]:
    """One picture as the recipe makes it: float32 [S,S,C]. Raises an error that names the file."""
    if not path.is_file():
        raise MissingFileError(f"{path}: no such file")
    try:
        return _prepared(path, recipe)
    except RenaissanceError as error:
        raise type(error)(f"{path}: {error}") from None
    except (UnidentifiedImageError, OSError) as error:
        raise FormatError(f"{path}: cannot be read as a picture: {error}") from None


def _takes_any_size(recipe: Recipe) -> bool:
    """Whether the recipe begins with a crop or resize, as those for photographs do."""
    try:
        recipe.require_variable_sizes()
    except ValueRejected:
        return False
    return True


def _prepared(path: Path, recipe: Recipe) -> npt.NDArray[np.float32]:
    channels, side = recipe.color_channels, recipe.resolution
    if channels == 3 and _takes_any_size(recipe):
        pictures = compile_pictures(recipe, DType.FP32)
        row = np.zeros(pictures.row_bytes, np.uint8)
        pictures.make(np.frombuffer(path.read_bytes(), np.uint8), Encoding.PICTURES, 0, 0, 0, True, row)
        return row.view(np.float32).reshape(side, side, channels)
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB" if channels == 3 else "L"), np.uint8)
    height, width = pixels.shape[:2]
    compiled = compile_recipe(recipe, height, width, channels, DType.FP32)
    out, first = np.zeros((1, compiled.row_bytes), np.uint8), np.zeros(1, np.int64)
    images = pixels.reshape(1, height, width, channels)
    compiled.process(images, first, first, 0, 0, True, out, first, np.zeros(1, np.uint64))
    return out.view(np.float32).reshape(side, side, channels)
