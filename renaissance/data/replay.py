"""Making a batch again alone, from a digest file and a data folder, without a dataserver, to compare its digest.

It runs what a worker runs (``renaissance.data.making``), as a single worker that owns every row. Law 1 says that the
bytes depend on the header of the digest file and the stored samples alone, so a difference is a changed sample, another
decoder, or a defect.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from renaissance.core.digest import batch_digest
from renaissance.core.dtype import DType
from renaissance.core.enums import NormMode
from renaissance.core.errors import FormatError, ValueRejected
from renaissance.data.catalogue import check_split, dataset_info
from renaissance.data.digest_file import DigestHeader
from renaissance.data.formats.opening import open_dataset
from renaissance.data.making.makers import open_maker
from renaissance.data.making.policy import ShareOfBatch
from renaissance.data.making.spec import LoadedSet, OnCorrupt, SessionSpec
from renaissance.data.order import batches_per_epoch
from renaissance.data.protocol import (
    CORRUPT_POLICIES,
    MAX_BATCH_SIZE,
    MAX_EPOCH,
    MAX_PADDED_CHANNELS,
    MAX_WORLD_SIZE,
    MIN_DEPTH,
    ORDERS,
    RingLayout,
    check_choice,
    check_range,
)
from renaissance.data.recipe import Normalization, Recipe
from renaissance.data.sources import Encoding, Source

READ_AHEAD = 4 << 20
"""Bytes; one batch is often all that is wanted, and what is read beyond it is in vain."""


@dataclass(frozen=True, slots=True, eq=False)
class ReplayedBatch:
    """One batch as a session delivers it."""

    index: int
    valid: int  # rows that hold a sample
    ids: npt.NDArray[np.int64]  # [B] sample ids by the order of the epoch, -1 = empty
    labels: npt.NDArray[np.int32]  # [B]
    rows: npt.NDArray[np.uint8]  # [B, row bytes]
    hashes: npt.NDArray[np.uint64]  # [B]
    digest: bytes
    damaged: tuple[dict[str, object], ...]  # samples that could not be decoded, as the policy settled them


class Replay:
    """One epoch of one session on a data folder. A context manager; not for two threads at once."""

    def __init__(self, header: DigestHeader, folder: Path) -> None:
        """Open the set and compile the recipe.

        Raises ValueRejected when the header says what cannot be or the folder holds another set, MissingFileError for
        missing files, and what the readers raise for damaged ones.
        """
        self.header = header
        recipe = _checked_recipe(header)
        self._loaded, self._data = _load(header, folder)
        self.spec = _spec_of(header, self._loaded, recipe)
        self._ready = threading.Event()
        rows = np.arange(header.batch_size, dtype=np.int64)
        self._rows = rows
        self._maker, self._tables, self._policy = open_maker(self.spec, self._data, rows, self._ready.set)
        self._describing = None if self._loaded.source is None else Source.attach(self._loaded.source, self._data)
        self._next = -1  # the batch at which the maker stands

    def batch(self, index: int) -> ReplayedBatch:
        """Make one batch; in order is fastest. Raises CorruptSample as the session's policy does."""
        spec, epoch = self.spec, self.header.epoch
        check_range("batch", index, 0, spec.batches_per_epoch - 1)
        if index != self._next:
            self._maker.restart(epoch, index)
        self._next = -1
        ids, labels = self._tables.epoch(epoch)
        size = spec.layout.batch_size
        share = ShareOfBatch(
            epoch=epoch,
            index=index,
            ids=ids[index],
            rows=self._rows,
            out=np.zeros((size, spec.layout.row_bytes), np.uint8),
            hashes=np.zeros(size, np.uint64),
            labels=labels[index].copy(),
        )
        made = 0
        while made < size:
            self._ready.clear()
            step = self._maker.make(share, made)
            if not step:
                self._ready.wait()
            made += step
        self._next = index + 1
        valid = spec.valid_rows(index)
        digest = batch_digest(epoch, index, share.labels[:valid], share.hashes[:valid])
        damaged = tuple(self._policy.take_reports())
        return ReplayedBatch(index, valid, share.ids, share.labels, share.out, share.hashes, digest, damaged)

    def samples(self, index: int) -> list[int]:
        """Sample ids of one batch, without making it."""
        ids, _ = self._tables.epoch(self.header.epoch)
        return [int(sample) for sample in ids[index] if sample >= 0]

    def images(self, batch: ReplayedBatch) -> npt.NDArray[np.generic]:
        """The rows as [B,S,S,C] of the session's type; bf16 as its bit patterns, uint16."""
        layout = self.spec.layout
        kind = {DType.UINT8: np.uint8, DType.FP32: np.float32, DType.FP16: np.float16, DType.BF16: np.uint16}
        shape = layout.batch_size, layout.height, layout.width, layout.padded_channels
        return batch.rows.view(kind[layout.dtype]).reshape(shape)

    def describe(self, sample: int) -> str:
        """Where a sample lies: the path of a picture, or the file and the number in it."""
        if self._describing is None:
            return f"{self._loaded.origin}, image {sample}"
        return self._describing.describe(sample)

    def close(self) -> None:
        """Close the files and end the reading threads."""
        self._maker.close()
        if self._describing is not None:
            self._describing.close()

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a session was asked for, when there is no digest file; the defaults are those of a TransferStation."""

    dataset: str
    split: str
    recipe: Recipe
    seed: int
    batch_size: int
    epoch: int = 0
    dtype: DType = DType.FP32
    shuffle: bool | None = None  # None: True for "train"
    order: str = "global"
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False
    padded_channels: int | None = None  # None: those of the recipe
    on_corrupt: str = "fail"
    level: int | str | None = None

    def header(self, folder: Path) -> DigestHeader:
        """The header that a daemon serving ``folder`` writes for such a session. Raises what the readers raise."""
        info, recipe = dataset_info(self.dataset), self.recipe
        check_range("batch size", self.batch_size, 1, MAX_BATCH_SIZE)
        check_range("world size", self.world_size, 1, MAX_WORLD_SIZE)
        if info.pixels:
            if self.level is not None:
                raise ValueRejected(f"level {self.level!r} of data set {info.name!r}: only packed pictures have levels")
            samples, encoding, stored, level = len(open_dataset(info.name, folder, self.split)), Encoding.PIXELS, "", ""
        else:
            with Source.open(info.name, folder, self.split, "auto", self.level, measure=False) as source:
                spec = source.spec
            samples, encoding, stored = spec.samples, spec.encoding, spec.format
            level = "" if spec.level is None else str(spec.level)
        return DigestHeader(
            dataset=info.name,
            split=self.split,
            num_samples=samples,
            stored_format=stored,
            encoding=str(encoding),
            level=level,
            recipe=recipe.to_json(),
            recipe_fingerprint=recipe.fingerprint(),
            decoder=_decoder() if encoding is Encoding.PICTURES else "",
            seed=self.seed,
            shuffle=self.split == "train" if self.shuffle is None else self.shuffle,
            order=self.order,
            batch_size=self.batch_size,
            dtype=self.dtype.name.lower(),
            height=recipe.resolution,
            width=recipe.resolution,
            channels=recipe.color_channels,
            padded_channels=self.padded_channels or recipe.color_channels,
            rank=self.rank,
            world_size=self.world_size,
            batches_per_epoch=batches_per_epoch(samples, self.batch_size, self.world_size, self.drop_last),
            on_corrupt=self.on_corrupt,
            epoch=self.epoch,
        )


def as_pixels(header: DigestHeader) -> DigestHeader:
    """The header of the same epoch delivered as uint8 without normalisation: the same draws, to be looked at."""
    recipe = Recipe.from_json(header.recipe)
    plain = replace(recipe, normalization=Normalization.preset(NormMode.NO_NORM, recipe.color_channels))
    return replace(
        header,
        recipe=plain.to_json(),
        recipe_fingerprint=plain.fingerprint(),
        dtype="uint8",
        padded_channels=recipe.color_channels,
    )


def decoder_differs(header: DigestHeader) -> str:
    """The decoders at hand, when they are not those that made the file; "" when they are, or nothing is decoded."""
    if not header.decoder:
        return ""
    here = _decoder()
    return "" if here == header.decoder else here


def _decoder() -> str:
    from renaissance.data.jpeg import decoder_identity

    return decoder_identity()


def suspects(different: Sequence[Iterable[int]]) -> list[int]:
    """The samples that explain most of the differences.

    ``different``: for each epoch that differs the samples of its batches that do. Every epoch holds each sample once,
    so one that has changed is in all of them, except where a crop left the change out.
    """
    counts = Counter(sample for samples in different for sample in set(samples))
    most = max(counts.values(), default=0)
    return sorted(sample for sample, count in counts.items() if count == most)


def _checked_recipe(header: DigestHeader) -> Recipe:
    check_split(header.split)
    check_range("seed", header.seed, 0, 2**64 - 1)
    check_range("batch size", header.batch_size, 1, MAX_BATCH_SIZE)
    check_range("world size", header.world_size, 1, MAX_WORLD_SIZE)
    check_range("rank", header.rank, 0, header.world_size - 1)
    check_range("epoch", header.epoch, 0, MAX_EPOCH)
    check_range("padded channels", header.padded_channels, 1, MAX_PADDED_CHANNELS)
    check_choice("order", header.order, ORDERS)
    check_choice("on_corrupt", header.on_corrupt, CORRUPT_POLICIES)
    recipe = Recipe.from_json(header.recipe)
    if recipe.fingerprint() != header.recipe_fingerprint:
        raise FormatError(
            f"recipe of the digest file: its fingerprint is {recipe.fingerprint()}, the header says "
            f"{header.recipe_fingerprint}; the file was changed, or is of another version of this program"
        )
    side = recipe.resolution, recipe.resolution, recipe.color_channels
    if (header.height, header.width, header.channels) != side:
        raise FormatError(
            f"header of the digest file: pictures of {header.height}x{header.width}x{header.channels}, but its recipe "
            f"makes {side[0]}x{side[1]}x{side[2]}"
        )
    if header.split == "val":
        recipe.require_deterministic()
    return recipe


def _load(header: DigestHeader, folder: Path) -> tuple[LoadedSet, memoryview]:
    """The set as one worker maps it: small images whole, of any other the index."""
    info = dataset_info(header.dataset)
    if info.pixels and not header.stored_format:
        data = open_dataset(info.name, folder, header.split)
        loaded = LoadedSet.of_pixels(data)
        buffer = memoryview(bytearray(loaded.total_bytes))

        def write(offset: int, part: memoryview) -> None:
            plain = part.cast("B")
            buffer[offset : offset + plain.nbytes] = plain

        loaded.write_pixels(data, write)
    else:
        level = int(header.level) if header.level.isdecimal() else header.level or None
        with Source.open(info.name, folder, header.split, header.stored_format or "auto", level) as source:
            loaded = LoadedSet.of_source(source)
            buffer = memoryview(bytearray(loaded.total_bytes))
            source.write_index(buffer)
    found = (str(loaded.encoding), loaded.samples)
    if found != (header.encoding, header.num_samples):
        raise ValueRejected(
            f"{loaded.origin}: {loaded.samples} samples stored as {loaded.encoding}; the digests are of "
            f"{header.num_samples} stored as {header.encoding}. Give the folder that was served"
        )
    return loaded, buffer


def _spec_of(header: DigestHeader, loaded: LoadedSet, recipe: Recipe) -> SessionSpec:
    counts = [
        batches_per_epoch(loaded.samples, header.batch_size, header.world_size, drop_last)
        for drop_last in (False, True)
    ]
    if header.batches_per_epoch not in counts:
        raise FormatError(
            f"header of the digest file: {header.batches_per_epoch} batches an epoch; {loaded.samples} samples in "
            f"batches of {header.batch_size} for {header.world_size} ranks make {counts[0]}, or {counts[1]} full ones"
        )
    if header.order == "blocks" and not loaded.blocks:
        raise ValueRejected(f"{loaded.origin}: has no blocks, and the digests are of an epoch in the order of blocks")
    layout = RingLayout(
        depth=MIN_DEPTH,
        batch_size=header.batch_size,
        height=header.height,
        width=header.width,
        channels=header.channels,
        padded_channels=header.padded_channels,
        dtype=DType.parse(header.dtype),
    )
    return SessionSpec(
        dataset_name=loaded.name,
        split=header.split,
        dataset=loaded,
        recipe_json=recipe.to_json(),
        seed=header.seed,
        shuffle=header.shuffle,
        rank=header.rank,
        world_size=header.world_size,
        batches_per_epoch=header.batches_per_epoch,
        layout=layout,
        order=header.order,
        on_corrupt=OnCorrupt(header.on_corrupt),
        read_ahead=READ_AHEAD,
    )
