"""Packing a folder tree of pictures into one DTS file: every number in it is measured, none is a constant of ImageNet.

The file depends on the pictures, the options and the encoder's version, never on the number of processes or on how
often the run was killed: pictures are made in parallel, put into blocks in the export order by one writer, and the
blocks of an earlier run are kept only when they are what this one would write (``imagenet_part``). Memory is bounded by
one block and a window of pictures. docs/dts.md is the format.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from renaissance import __version__
from renaissance.core.errors import CorruptSample, FormatError, RenaissanceError, ValueRejected
from renaissance.data.formats.dts import DtsHeader
from renaissance.data.formats.imagenet import (
    EXTENSION_OFFSET,
    PictureLayout,
    align,
    imagenet_file_name,
    imagenet_header,
    pack_block,
    pack_extension,
    picture_level,
    read_extension,
    read_imagenet_header,
)
from renaissance.data.formats.imagenet_encode import (
    RESTART_TARGET,
    FileState,
    Made,
    Making,
    Refused,
    encoder_identity,
    make_chunk,
    make_from_file,
)
from renaissance.data.formats.imagenet_inputs import Fingerprint, Inputs
from renaissance.data.formats.imagenet_order import (
    LEGACY_SEED,
    ORDERS,
    PACKINGS,
    export_order,
    greedy_blocks,
    philox_shuffle,
    python_shuffle,
)
from renaissance.data.formats.imagenet_part import BlockRecord, PartFile, open_part, part_path
from renaissance.data.formats.processes import ProcessDied, check_jobs, in_order
from renaissance.data.sources.spec import printable

ON_CORRUPT = ("fail", "skip")
RAW_SHORT_SIDE = 256
CHUNK_PICTURES, CHUNK_BYTES = 16, 4 << 20
"""Pictures handed to a process at once: at most this many, fewer when their files are large."""
REVISION = 1
"""Changes when this code writes other bytes for the same options."""
LIBRARIES = ("writer", "encoder")
"""What the extension says of versions: a file stays up to date under other ones, an unfinished one does not."""

Outcome = tuple[Made | Refused, FileState]
Progress = Callable[[int, int], None]
"""Called with the pictures done and their total."""


@dataclass(frozen=True, slots=True)
class PackOptions:
    """How to pack. None means the level's own default, which ``settled`` fills in; an option that cannot act raises."""

    level: int | str = 0
    short_side: int | None = None
    """Level RAW only: pictures are scaled down to this short side, in pixels (256)."""
    order: str = "philox"
    seed: int | None = None
    """Order "philox" only (42)."""
    packing: str = "streaming"
    restart_windows: bool | None = None
    """Add restart markers, without loss, so that a crop decodes only its part: on for levels 1 to 3, off for 0."""
    on_corrupt: str = "fail"
    jobs: int = 1
    resume: bool = True
    replace: bool = False
    """Replace a target that holds something else."""
    layout: PictureLayout | None = None
    """Other sizes of header region and blocks, for tests: other tools read only the standard ones."""

    def settled(self) -> PackOptions:
        """These options with the defaults filled in. Raises ValueRejected."""
        level = picture_level(self.level)
        for name, value, allowed in (
            ("order", self.order, ORDERS),
            ("packing", self.packing, PACKINGS),
            ("on_corrupt", self.on_corrupt, ON_CORRUPT),
        ):
            if value not in allowed:
                raise ValueRejected(f"pack: {name} is {value!r}; expected one of: {', '.join(allowed)}")
        check_jobs(self.jobs)
        if self.short_side is not None and not level.raw:
            raise ValueRejected(f"pack: a short side is chosen for level RAW; level {level.name} has its own rule")
        if self.short_side is not None and not 1 <= self.short_side <= 65535:
            raise ValueRejected(f"pack: short side is {self.short_side}; expected 1 to 65535 pixels")
        if self.seed is not None and self.order != "philox":
            raise ValueRejected(f"pack: a seed acts in order philox; order {self.order} has none")
        if self.seed is not None and not 0 <= self.seed < 1 << 64:
            raise ValueRejected(f"pack: seed is {self.seed}; expected 0 to 2**64 - 1")
        if self.restart_windows and level.raw:
            raise ValueRejected("pack: level RAW stores pixels; restart windows exist in JPEG streams only")
        restart = level.code in (1, 2, 3) if self.restart_windows is None else self.restart_windows
        if self.packing == "greedy" and (level.code != 0 or restart or self.order == "file"):
            raise ValueRejected(
                "pack: greedy packing needs sizes that are known beforehand and an order that may change: level 0 "
                "without restart windows, order philox or python42"
            )
        layout = self.layout or PictureLayout.standard(level.name)
        if layout.level != level:
            raise ValueRejected(f"pack: the layout is one of level {layout.level.name}; expected level {level.name}")
        return PackOptions(
            level=level.name,
            short_side=(self.short_side or RAW_SHORT_SIDE) if level.raw else None,
            order=self.order,
            seed=LEGACY_SEED if self.seed is None and self.order == "philox" else self.seed,
            packing=self.packing,
            restart_windows=restart,
            on_corrupt=self.on_corrupt,
            jobs=self.jobs,
            resume=self.resume,
            replace=self.replace,
            layout=layout,
        )

    @property
    def making(self) -> Making:
        return Making(self.level, self.short_side or 0, bool(self.restart_windows))


@dataclass(frozen=True, slots=True)
class PackResult:
    """What came of it. ``left_out`` are the pictures that could not be packed: their path and why."""

    path: Path
    header: DtsHeader
    left_out: tuple[tuple[str, str], ...] = ()
    kept_blocks: int = 0
    """Blocks taken over from an earlier run that was ended."""
    dropped_blocks: int = 0
    """Blocks of an earlier run that were made again: options or source files have changed since."""
    up_to_date: bool = False
    """Nothing was done: the target already holds these pictures, packed with these options."""


def pack_imagenet(
    root: Path,
    output: Path,
    split: str,
    options: PackOptions,
    classes: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> PackResult:
    """Pack one split of the tree below ``root`` (ROOT/{train,val}/<class>/*.JPEG) into ``output``.

    ``classes``, when given, are the names of all class folders in the order of their labels; else the folders of
    ROOT/train are. The file appears under its name (``imagenet_file_name``) only when it is complete. Raises
    MissingFileError and FormatError for a tree that is not one, CorruptSample for a picture that cannot be packed
    (policy "fail"), ValueRejected for options, and RenaissanceError when the target exists and holds something else or
    the system refuses.
    """
    options = options.settled()
    assert options.layout is not None
    inputs = Inputs(root, split, classes)
    target = Path(output) / imagenet_file_name(split, options.level)
    description = _described(inputs, options)
    if os.path.lexists(target) and not options.replace:
        return _existing(target, split, options, description)
    order, starts = _arranged(inputs, options)
    _check_space(target, inputs, options)
    plan = description | {"names": inputs.names_hash}
    if options.packing == "streaming":
        del plan["source"]  # sizes are compared picture by picture, so that one new file keeps the blocks before it
    with open_part(target, options.layout, options.resume) as part:
        fingerprint = Fingerprint(inputs, order)
        if options.resume:
            part.restore(plan, fingerprint.of_first)
        else:
            part.start(plan)
        kept = len(part.records)
        writer = _Writer(part, inputs, order, starts, options, fingerprint)
        writer.run(progress)
        header = _finished(part, split, inputs, options, description)
    return PackResult(target, header, writer.left_out(), kept, part.dropped)


def _described(inputs: Inputs, options: PackOptions) -> dict[str, Any]:
    """The content of the extension: all that decides the bytes of the file."""
    assert options.layout is not None
    layout = options.layout
    description: dict[str, Any] = {
        "writer": f"renaissance {__version__}",
        "revision": REVISION,
        "level": options.level,
        "split": inputs.split,
        "classes": [printable(name) for name in inputs.classes],
        "source": {"sha256": inputs.source_hash, "pictures": inputs.count, "bytes": inputs.stored_bytes},
        "order": {"name": options.order, "seed": options.seed, "packing": options.packing},
        "encoder": encoder_identity(layout.level),
        "restart": {"target": RESTART_TARGET} if options.restart_windows else None,
        "short_side": options.short_side,
        "layout": [layout.header_bytes, layout.block_bytes, layout.block_header_bytes],
        "left_out": 0,
    }
    try:
        pack_extension(description | {"left_out": inputs.count}, layout.header_bytes)
    except ValueRejected:
        description["classes"] = None  # a million long names: everything else still has room
        pack_extension(description | {"left_out": inputs.count}, layout.header_bytes)
    return description


def _existing(target: Path, split: str, options: PackOptions, description: dict[str, Any]) -> PackResult:
    try:
        header, problems = read_imagenet_header(target, split, options.level)
        found = None if problems else read_extension(target, header)
    except FormatError as error:
        raise RenaissanceError(f"{error}. The existing file is not usable; --force replaces it") from error
    if problems:
        raise RenaissanceError(f"{target}: {problems[0]}. The existing file is not usable; --force replaces it")
    if found is None:
        raise RenaissanceError(f"{target}: exists and does not say what it was packed from; --force replaces it")
    other = [k for k, value in description.items() if k not in (*LIBRARIES, "left_out") and found.get(k) != value]
    if found.get("left_out") and options.on_corrupt == "fail":
        other.append(f"{found['left_out']} pictures are left out")
    if other:
        raise RenaissanceError(f"{target}: exists and was packed differently ({', '.join(other)}); --force replaces it")
    return PackResult(target, header, up_to_date=True)


def _arranged(inputs: Inputs, options: PackOptions) -> tuple[list[int], frozenset[int] | None]:
    """The export order, and the positions at which a new block begins (None: where the last one is full)."""
    assert options.layout is not None
    order = export_order(options.order, options.seed or 0, inputs.file_names, inputs.split)
    if options.packing == "streaming":
        return order.tolist(), None
    aligned = (inputs.sizes.astype(np.int64) + 63) // 64 * 64
    fitting = order[aligned[order] <= options.layout.capacity]
    shuffles = tuple(
        python_shuffle if options.order == "python42" else _philox_round(options.seed or 0, inputs.split, round)
        for round in (1, 2)
    )
    blocks = greedy_blocks(
        aligned, fitting, (shuffles[0], shuffles[1]), options.layout.capacity, options.layout.picture_cap
    )
    ends = np.cumsum([block.size for block in blocks]).tolist()
    # The ones that fit no block come last, to be refused by the writer like in every packing.
    too_large = order[aligned[order] > options.layout.capacity]
    return np.concatenate([*blocks, too_large]).tolist(), frozenset(ends[:-1])


def _philox_round(seed: int, split: str, round: int) -> Callable[[Any], Any]:
    return lambda items: philox_shuffle(items, seed, split, round)


def _check_space(target: Path, inputs: Inputs, options: PackOptions) -> None:
    assert options.layout is not None
    if options.layout.level.code != 0:
        return  # the size of re-encoded pictures is not known before
    try:
        free = shutil.disk_usage(target.parent).free
    except OSError as error:
        raise RenaissanceError(f"{target.parent}: cannot be written to: {error.strerror}") from error
    part, layout = part_path(target), options.layout
    blocks = max(-(-inputs.stored_bytes // layout.capacity), -(-inputs.count // layout.picture_cap))
    needed = blocks * layout.block_bytes - (part.stat().st_blocks * 512 if part.exists() else 0)
    if free < needed:
        raise RenaissanceError(
            f"{target}: needs at least {needed / 2**20:.0f} MiB more and {free / 2**20:.0f} MiB are free; free some "
            f"space, choose another output folder, or a level that takes less"
        )


@dataclass(slots=True)
class _OpenBlock:
    """The block being filled."""

    pictures: list[bytes] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    used: int = 0
    largest_area: int = 0
    source_bytes: int = 0
    left_out: list[tuple[int, str]] = field(default_factory=list)


class _Writer:
    """Puts pictures into blocks in the export order and the blocks into the part file."""

    def __init__(
        self,
        part: PartFile,
        inputs: Inputs,
        order: Sequence[int],
        starts: frozenset[int] | None,
        options: PackOptions,
        fingerprint: Fingerprint,
    ) -> None:
        assert options.layout is not None
        self._part, self._inputs, self._order, self._starts = part, inputs, order, starts
        self._layout: PictureLayout = options.layout
        self._options, self._fingerprint = options, fingerprint
        self._block = _OpenBlock()

    def run(self, progress: Progress | None) -> None:
        """Write the blocks that are missing."""
        done = self._part.records[-1].end if self._part.records else 0
        self._fingerprint.back_to(done)
        for record in self._part.records:
            for position, reason in record.left_out:
                self._judge(position, reason)
        total = len(self._order)
        if progress is not None:
            progress(done, total)
        for position, (outcome, state) in enumerate(_outcomes(self._inputs, self._order, done, self._options), done):
            self._take(position, outcome, state)
            if progress is not None:
                progress(position + 1, total)
        self._close(total)

    def _take(self, position: int, outcome: Made | Refused, state: FileState) -> None:
        index = self._order[position]
        if state[0] not in (-1, int(self._inputs.sizes[index])):
            raise RenaissanceError(
                f"{self._inputs.path(index)}: had {self._inputs.sizes[index]} bytes when packing began and has "
                f"{state[0]} now; leave the tree alone while it is packed, and run the same command again"
            )
        if isinstance(outcome, Made) and align(len(outcome.stored)) > self._layout.capacity:
            outcome = Refused(
                f"takes {len(outcome.stored)} bytes at level {self._options.level}; a block holds "
                f"{self._layout.capacity}"
            )
        if self._begins_block(position, outcome):
            self._close(position)
        self._fingerprint.add(position, state)
        block = self._block
        if isinstance(outcome, Refused):
            self._judge(position, outcome.reason)
            block.left_out.append((position, outcome.reason))
            return
        block.pictures.append(outcome.stored)
        block.labels.append(int(self._inputs.labels[index]))
        block.used += align(len(outcome.stored))
        block.largest_area = max(block.largest_area, outcome.width * outcome.height)
        block.source_bytes += state[0]

    def _begins_block(self, position: int, outcome: Made | Refused) -> bool:
        if self._starts is not None:
            return position in self._starts
        block, layout = self._block, self._layout
        return isinstance(outcome, Made) and (
            block.used + align(len(outcome.stored)) > layout.capacity or len(block.pictures) >= layout.picture_cap
        )

    def _judge(self, position: int, reason: str) -> None:
        if self._options.on_corrupt == "fail":
            raise CorruptSample(
                f"{printable(os.fsencode(self._inputs.path(self._order[position])))}: {reason}. Repair or remove the "
                f"file, or pack with --on-corrupt skip, which leaves such pictures out and lists them"
            )

    def _close(self, end: int) -> None:
        block = self._block
        if not block.pictures:
            return  # what was left out stays with the next block that has pictures
        data = pack_block(self._layout, len(self._part.records), block.pictures, block.labels)
        record = BlockRecord(
            end=end,
            pictures=len(block.pictures),
            crc32=0,
            largest_area=block.largest_area,
            source_bytes=block.source_bytes,
            inputs=self._fingerprint.now,
            left_out=tuple(block.left_out),
        )
        self._part.append(data, record)
        self._block = _OpenBlock()

    def left_out(self) -> tuple[tuple[str, str], ...]:
        """Path and reason of every picture that is not in the file."""
        pairs = [pair for record in self._part.records for pair in record.left_out] + self._block.left_out
        return tuple((self._inputs.path(self._order[position]), reason) for position, reason in pairs)


def _finished(
    part: PartFile, split: str, inputs: Inputs, options: PackOptions, description: dict[str, Any]
) -> DtsHeader:
    assert options.layout is not None
    records = part.records
    samples = sum(record.pictures for record in records)
    if not samples:
        raise FormatError(f"{os.fsdecode(inputs.folder)}: not one of its {inputs.count} pictures can be packed")
    layout = options.layout
    header = imagenet_header(
        layout,
        split,
        num_classes=len(inputs.classes),
        num_samples=samples,
        blocks=len(records),
        largest_area=max(record.largest_area for record in records),
        most_pictures=max(record.pictures for record in records),
        compression_ratio=float(np.float32(layout.block_offset(len(records)) / sum(r.source_bytes for r in records))),
        body_crc32=part.body_crc32,
    )
    extension = pack_extension(description | {"left_out": inputs.count - samples}, layout.header_bytes)
    part.finish(header.pack(), extension, EXTENSION_OFFSET)
    return header


def _outcomes(inputs: Inputs, order: Sequence[int], start: int, options: PackOptions) -> Iterator[Outcome]:
    """What became of each picture from position ``start`` of the order on, in order."""
    if options.jobs == 1:
        for index in order[start:]:
            yield make_from_file(inputs.path(index), options.making)
        return
    work = ((paths, options.making) for paths in _chunks(inputs, order, start))
    try:
        for outcomes in in_order(make_chunk, work, options.jobs):
            yield from outcomes
    except ProcessDied as error:
        raise RenaissanceError(f"pack: {error}. The same command continues after the last complete block") from error


def _chunks(inputs: Inputs, order: Sequence[int], start: int) -> Iterator[list[str]]:
    chunk: list[str] = []
    size = 0
    for position in range(start, len(order)):
        chunk.append(inputs.path(order[position]))
        size += int(inputs.sizes[order[position]])
        if len(chunk) >= CHUNK_PICTURES or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
