"""``renaissance predict MODEL.safetensors PICTURE...``: what a saved model sees in pictures.

A picture is prepared as validation prepared its samples: by the recipe that the model was saved with.
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Iterator, Sequence
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
from renaissance.task.predict import Predictor, load_model

BATCH = 32
"""Pictures that are in memory at a time."""
DECODED_AS_TRAINED = (b"\xff\xd8", b"\x89PNG")
"""How files begin that are decoded as a data set's are: JPEG and PNG. Pillow decodes whatever else there is."""
UNREADABLE = (UnidentifiedImageError, OSError, Image.DecompressionBombError, ValueError, SyntaxError, struct.error)
"""What Pillow raises for damaged files, by kind of file."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument("model", type=Path, help="file that save_model wrote (.safetensors)")
    parser.add_argument("pictures", type=Path, nargs="+", metavar="PICTURE", help="JPEG, PNG or any file Pillow reads")
    parser.add_argument("--top", type=int, default=5, help="classes to print per picture (default 5)")
    parser.add_argument("--classes", type=Path, help="text file with the name of class 0, 1, ... on a line each")
    parser.add_argument("--threads", type=int, help="compute threads (default: chosen from the cores)")
    parser.add_argument("--gpu", type=int, metavar="N", help="predict on this GPU instead of the CPU")
    parser.add_argument("--json", action="store_true", help="one JSON object per picture")


def run(arguments: argparse.Namespace) -> int:
    """Prints a line per picture."""
    if arguments.top < 1:
        raise ValueRejected(f"--top is {arguments.top}; expected at least 1")
    batch = min(len(arguments.pictures), BATCH)
    predictor = load_model(arguments.model, batch=batch, threads=arguments.threads, gpu=arguments.gpu)
    names = class_names(arguments.classes, predictor.saved.arch_plan.num_classes)
    for path, row in _probabilities(predictor, arguments.pictures):
        best = np.argsort(-row, kind="stable")[: arguments.top]
        if arguments.json:
            found = [{"class": int(i), "name": names[i], "probability": round(float(row[i]), 6)} for i in best]
            print(json.dumps({"picture": str(path), "top": found}))
        else:
            print(f"{path}: " + ", ".join(f"{names[i]} {row[i]:.1%}" for i in best))
    return 0


def _probabilities(predictor: Predictor, paths: Sequence[Path]) -> Iterator[tuple[Path, npt.NDArray[np.float32]]]:
    """(picture, probability of every class), batch by batch."""
    preparation = Preparation(predictor.saved.recipe)
    for start in range(0, len(paths), BATCH):
        part = paths[start : start + BATCH]
        answer = predictor.predict(np.stack([preparation.picture(path) for path in part]))
        for path, label, row in zip(part, answer.labels, answer.probabilities, strict=True):
            if label < 0:
                raise FormatError(f"{path}: the model's numbers are not finite; expected weights of a sound training")
            yield path, row


def class_names(path: Path | None, classes: int) -> list[str]:
    """A name for every class: the lines of a file, or "class 0", "class 1", ..."""
    if path is None:
        return [f"class {i}" for i in range(classes)]
    if not path.is_file():
        raise MissingFileError(f"{path}: no such file")
    try:
        names = path.read_text("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: is not text in UTF-8: {error}") from None
    if len(names) != classes:
        raise ValueRejected(f"{path}: {len(names)} lines; expected {classes}, one per class of the model")
    return names


class Preparation:
    """Pictures as a recipe makes them for validation."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        any_size = recipe.color_channels == 3 and _takes_any_size(recipe)
        self._pictures = compile_pictures(recipe, DType.FP32) if any_size else None

    def picture(self, path: Path) -> npt.NDArray[np.float32]:
        """One picture, float32 [S,S,C]. Raises an error that names the file."""
        if not path.is_file():
            raise MissingFileError(f"{path}: no such file")
        side, channels = self._recipe.resolution, self._recipe.color_channels
        try:
            row = self._fixed_size(path) if self._pictures is None else self._any_size(path)
        except RenaissanceError as error:
            raise type(error)(f"{path}: {error}") from None
        except UNREADABLE as error:
            raise FormatError(f"{path}: cannot be read as a picture: {error}") from None
        return row.view(np.float32).reshape(side, side, channels)

    def _any_size(self, path: Path) -> npt.NDArray[np.uint8]:
        """As photographs of a data set."""
        assert self._pictures is not None
        stored, encoding = path.read_bytes(), Encoding.PICTURES
        if not stored.startswith(DECODED_AS_TRAINED):
            pixels, encoding = self._pixels(path), Encoding.RAW
            stored = struct.pack("<II", pixels.shape[1], pixels.shape[0]) + pixels.tobytes()
        row = np.zeros(self._pictures.row_bytes, np.uint8)
        self._pictures.make(np.frombuffer(stored, np.uint8), encoding, 0, 0, 0, True, row)
        return row

    def _fixed_size(self, path: Path) -> npt.NDArray[np.uint8]:
        """As the images of a data set of one size."""
        pixels = self._pixels(path)
        height, width, channels = pixels.shape
        try:
            compiled = compile_recipe(self._recipe, height, width, channels, DType.FP32)
        except ValueRejected as error:
            raise ValueRejected(
                f"the picture has {width} x {height} pixels, which the model's recipe does not take; give one of the"
                f" size that it was trained on ({error})"
            ) from None
        out, first = np.zeros((1, compiled.row_bytes), np.uint8), np.zeros(1, np.int64)
        compiled.process(pixels[None], first, first, 0, 0, True, out, first, np.zeros(1, np.uint64))
        return out

    def _pixels(self, path: Path) -> npt.NDArray[np.uint8]:
        with Image.open(path) as picture:
            if picture.mode in ("I", "F"):
                raise ValueRejected(f"its pixels have 32 bits (mode {picture.mode}); expected 8 or 16")
            grey_16 = picture.mode.startswith("I;16")
            # The high byte, as a data set's are read (docs/jpeg.md): convert() clips at 255.
            eight = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8)) if grey_16 else picture
            pixels = np.asarray(eight.convert("RGB" if self._recipe.color_channels == 3 else "L"), np.uint8)
        return pixels.reshape(*pixels.shape[:2], self._recipe.color_channels)


def _takes_any_size(recipe: Recipe) -> bool:
    """Whether the recipe begins with a crop or resize, as those for photographs do."""
    try:
        recipe.require_variable_sizes()
    except ValueRejected:
        return False
    return True
