"""What a recipe does to given samples, as pictures: stored beside augmented, for a person to look at.

The augmented pictures are those that a session delivers as uint8 without normalisation, from the same compiled recipe:
the draws do not depend on the normalisation, so they are the pixels that any session with this recipe and seed sees.
Values that RandomErasing sets to 0 after normalisation are black here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from renaissance.core.dtype import DType
from renaissance.core.enums import NormMode
from renaissance.core.errors import CorruptSample, ValueRejected
from renaissance.data.catalogue import DatasetInfo, dataset_info
from renaissance.data.compile import compile_recipe
from renaissance.data.formats.opening import open_dataset
from renaissance.data.jpeg import Decoder, read_header
from renaissance.data.order import epoch_order
from renaissance.data.pictures import CHANNELS, RAW_HEADER, compile_pictures, raw_size
from renaissance.data.recipe import Normalization, Recipe
from renaissance.data.sheet import Cell, SheetRow
from renaissance.data.sources import Encoding, Source
from renaissance.data.transform_text import transform_to_text

MAX_SAMPLES, MAX_DRAWS = 1000, 100
Pixels = npt.NDArray[np.uint8]

Make = Callable[[Pixels, int, int], Pixels]
"""(stored bytes, sample id, epoch) -> uint8[S,S,C]."""


class Samples:
    """One split of a data set, sample by sample, in whatever form it is stored. A context manager."""

    def __init__(
        self, name: str, folder: Path, split: str, format: str = "auto", level: int | str | None = None
    ) -> None:
        """Small images are read whole, pictures one by one. Raises what ``open_dataset`` and ``Source.open`` raise."""
        info = dataset_info(name)
        self.name, self.split = info.name, split
        self._info: DatasetInfo = info
        self._resources = ExitStack()
        self._decoder = Decoder()
        self.class_names: list[str] | None = None
        if info.pixels:
            if level is not None:
                raise ValueRejected(f"level {level!r} of data set {info.name!r}: only packed pictures have levels")
            data = open_dataset(info.name, folder, split, format)
            self.labels, self._images, self.source = data.labels, data.images, data.source
            self.encoding, self.form = Encoding.PIXELS, data.format
        else:
            source = self._resources.enter_context(Source.open(info.name, folder, split, format, level, measure=False))
            self._source, self.labels, self.source = source, source.labels, source.spec.source
            self.encoding, self.class_names = source.spec.encoding, source.class_names()
            self.form = "folder tree" if source.spec.tree else f"dts level {source.spec.level}"

    def __len__(self) -> int:
        return int(self.labels.size)

    def check(self, sample: int) -> None:
        """Raise ValueRejected for a sample that does not exist."""
        if not 0 <= sample < len(self):
            raise ValueRejected(
                f"sample {sample} of {self.name} {self.split} does not exist; it has {len(self)}, from 0"
            )

    def stored(self, sample: int) -> Pixels:
        """The stored bytes, uint8[n]. Raises CorruptSample naming the file."""
        if self.encoding is Encoding.PIXELS:
            image: Pixels = self._images[sample]
            return image.reshape(-1)
        return np.frombuffer(self._source.read(sample), np.uint8)

    def pixels(self, stored: Pixels) -> Pixels:
        """The whole picture in its stored size, uint8[h,w,C]. Raises CorruptSample, which does not name the file."""
        if self.encoding is Encoding.PIXELS:
            shape = self._info.height, self._info.width, self._info.channels
            return stored.reshape(shape)
        if self.encoding is Encoding.RAW:
            width, height = raw_size(stored)
            return stored[RAW_HEADER:].reshape(height, width, CHANNELS)
        return self._decoder.decode(stored, read_header(stored)).pixels.copy()

    def describe(self, sample: int) -> str:
        """Where it lies: the path of a picture, or the file and the number in it."""
        if self.encoding is Encoding.PIXELS:
            return f"{self.source}, image {sample}"
        return self._source.describe(sample)

    def label_text(self, sample: int) -> str:
        """ "label 3", with the name of the class where the files have names."""
        label = int(self.labels[sample])
        return f"label {label}" + (f" {self.class_names[label]}" if self.class_names else "")

    def first_of_epoch(self, seed: int, epoch: int, count: int) -> list[int]:
        """The samples that a shuffled session with this seed delivers first in that epoch."""
        order = epoch_order(seed, epoch, len(self), shuffle=True, validation=self.split == "val")
        return [int(sample) for sample in order[:count]]

    def default_side(self) -> int:
        """Resolution of a chain without a crop or resize; raises ValueRejected where sizes vary."""
        if self.encoding is not Encoding.PIXELS:
            raise ValueRejected(
                f"{self.name} has pictures of any size, so the first transform must be a crop or a resize, such as "
                "RandomResizedCrop(224)"
            )
        return self._info.height

    @property
    def channels(self) -> int:
        return self._info.channels

    def __enter__(self) -> Samples:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._resources.close()


@dataclass(frozen=True, slots=True, eq=False)
class Previewed:
    """One sample before and after; ``stored`` is None and ``damage`` says why where it cannot be decoded."""

    sample: int
    stored: Pixels | None  # uint8[h,w,C]
    results: tuple[Pixels, ...]  # uint8[S,S,C] for each epoch asked for
    damage: str = ""


def without_normalization(recipe: Recipe) -> Recipe:
    """The same recipe with the pixels as they are: what uint8 can deliver."""
    plain = Normalization.preset(NormMode.NO_NORM, recipe.color_channels)
    return replace(recipe, normalization=plain)


def preview(
    samples: Samples, recipe: Recipe, chosen: Sequence[int], seed: int, epochs: Sequence[int]
) -> Iterator[Previewed]:
    """Each chosen sample as stored, and as the recipe makes it in each of ``epochs``; damaged ones say so.

    Raises ValueRejected for samples that do not exist, a random recipe for "val", and a recipe that does not fit.
    """
    if not 1 <= len(chosen) <= MAX_SAMPLES or not 1 <= len(epochs) <= MAX_DRAWS:
        raise ValueRejected(
            f"preview of {len(chosen)} samples in {len(epochs)} draws; expected 1 to {MAX_SAMPLES} samples and 1 to "
            f"{MAX_DRAWS} draws"
        )
    for sample in chosen:
        samples.check(sample)
    if samples.split == "val":
        recipe.require_deterministic()
    make = _maker(samples, without_normalization(recipe), seed)
    for sample in chosen:
        try:
            stored = samples.stored(sample)
            whole = samples.pixels(stored)
            results = tuple(make(stored, sample, epoch) for epoch in epochs)
        except CorruptSample as error:
            yield Previewed(sample, None, (), str(error))
            continue
        yield Previewed(sample, whole, results)


def _maker(samples: Samples, recipe: Recipe, seed: int) -> Make:
    validation = samples.split == "val"
    shape = recipe.resolution, recipe.resolution, recipe.color_channels
    if samples.encoding is not Encoding.PIXELS:
        pictures = compile_pictures(recipe, DType.UINT8)

        def make_picture(stored: Pixels, sample: int, epoch: int) -> Pixels:
            row = np.empty(pictures.row_bytes, np.uint8)
            pictures.make(stored, samples.encoding, sample, seed, epoch, validation, row)
            return row.reshape(shape)

        return make_picture
    info = samples._info
    compiled = compile_recipe(recipe, info.height, info.width, info.channels, DType.UINT8)
    zero, hashes = np.zeros(1, np.int64), np.zeros(1, np.uint64)

    def make_pixels(stored: Pixels, sample: int, epoch: int) -> Pixels:
        image = samples.pixels(stored)[None].copy()
        out = np.empty((1, compiled.row_bytes), np.uint8)
        compiled.process(image, zero, np.array([sample]), seed, epoch, validation, out, zero, hashes)
        return out.reshape(shape)

    return make_pixels


def sheet_row(samples: Samples, shown: Previewed, epochs: Sequence[int]) -> SheetRow:
    """One row of a contact sheet."""
    title = f"sample {shown.sample}, {samples.label_text(shown.sample)}, {samples.describe(shown.sample)}"
    if shown.stored is None:
        return SheetRow(f"{title}: {shown.damage}", [Cell(None, "cannot be decoded")])
    height, width = shown.stored.shape[:2]
    cells = [Cell(shown.stored, f"stored {width}x{height}")]
    cells += [Cell(made, f"epoch {epoch}") for made, epoch in zip(shown.results, epochs, strict=True)]
    return SheetRow(title, cells)


def recipe_text(recipe: Recipe, encoding: Encoding) -> str:
    """The transforms as ``transform_from_text`` reads them, then what they leave."""
    chain = ", ".join(transform_to_text(t) for t in recipe.transforms) or "no transforms"
    decode = f", decode {recipe.decode}" if encoding is Encoding.PICTURES else ""
    return f"{chain}; {recipe.resolution}x{recipe.resolution}{decode}; recipe {recipe.fingerprint()[:16]}"
