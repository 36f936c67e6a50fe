"""``renaissance replay``: makes batches of a digest file again, alone and without a dataserver, and compares.

Exit code 1 when a batch differs; the samples that can be to blame are listed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from renaissance.cli.preview import read_recipe
from renaissance.core.digest import chain_digest
from renaissance.core.dtype import DType
from renaissance.core.errors import FormatError, ValueRejected
from renaissance.core.files import opened_regular, written_when_complete
from renaissance.data.catalogue import SPLITS
from renaissance.data.compile import DELIVERED
from renaissance.data.digest_file import DigestHeader, EpochDigests, read_digests
from renaissance.data.protocol import CORRUPT_POLICIES, ORDERS
from renaissance.data.replay import Replay, ReplayedBatch, Wanted, as_pixels, decoder_differs, suspects
from renaissance.data.sheet import Cell, SheetRow, cell_size, contact_sheet, write_png

ON_A_ROW = 8
LISTED = 8
SAVED = (".png", ".npy")
SESSION = (
    *("dataset", "recipe", "batch_size", "split", "seed", "epoch", "dtype", "order", "rank", "world_size"),
    *("drop_last", "on_corrupt", "level"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "digests", nargs="*", type=Path, metavar="FILE", help="digest files; more epochs tell better which sample it is"
    )
    parser.add_argument("--folder", type=Path, required=True, metavar="DATA", help="folder with the files of the set")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--batch", type=int, nargs="+", metavar="K", help="batches to make, counted from 0")
    which.add_argument("--all", action="store_true", help="make every batch (the default)")
    parser.add_argument(
        "--save", type=Path, metavar="OUT", help="write the one batch: .npy as delivered, .png to look at"
    )
    parser.add_argument(
        "--against", type=Path, metavar="NPY", help="images of the one batch from elsewhere; names the rows that differ"
    )
    session = parser.add_argument_group("instead of digest files", "make a session's batches and print their digests")
    session.add_argument("--dataset", metavar="NAME", help="name of the data set")
    session.add_argument("--recipe", type=Path, metavar="JSON", help="a recipe in its JSON form")
    session.add_argument("--batch-size", type=int, metavar="N", help="of each rank")
    session.add_argument("--split", choices=SPLITS, help="default: train")
    session.add_argument("--seed", type=int, metavar="S", help="default: 0")
    session.add_argument("--epoch", type=int, metavar="E", help="default: 0")
    session.add_argument("--dtype", choices=[dtype.name.lower() for dtype in DELIVERED], help="default: fp32")
    session.add_argument("--order", choices=ORDERS, help="default: global")
    session.add_argument("--rank", type=int, metavar="R", help="default: 0")
    session.add_argument("--world-size", type=int, metavar="W", help="default: 1")
    session.add_argument("--drop-last", action="store_true", default=None, help="leave out the batch that is not full")
    session.add_argument("--on-corrupt", choices=CORRUPT_POLICIES, help="default: fail")
    session.add_argument("--level", metavar="L", help="which packed level of pictures: 0 to 3 or RAW")


def run(arguments: argparse.Namespace) -> int:
    """Replay every file; 1 when a batch differs."""
    if arguments.dataset is not None and not arguments.digests:
        return _make_only(arguments)
    _refuse(arguments, SESSION, "describes a session, and the digest file does that; drop one of the two")
    if not arguments.digests:
        raise ValueRejected("nothing to replay; give digest files, or --dataset, --recipe and --batch-size")
    one = len(arguments.digests) == 1 and arguments.batch is not None and len(arguments.batch) == 1
    for option in ("save", "against"):
        if getattr(arguments, option) is not None and not one:
            raise ValueRejected(f"--{option} is for one batch; give one digest file and one --batch")
    if arguments.save is not None and arguments.save.suffix not in SAVED:
        raise ValueRejected(f"--save {arguments.save}: expected a name that ends in {' or '.join(SAVED)}")
    different: list[list[int]] = []
    with ExitStack() as stack:
        for path in arguments.digests:
            wanted = read_digests(path)
            replay = stack.enter_context(Replay(wanted.header, arguments.folder))
            _print_header(path, wanted.header)
            wrong = _compare(replay, wanted, arguments)
            if wrong:
                different.append([sample for index in wrong for sample in replay.samples(index)])
        if different:
            _print_suspects(replay, different)
    return 1 if different else 0


def _refuse(arguments: argparse.Namespace, names: Sequence[str], why: str) -> None:
    for name in names:
        if getattr(arguments, name) is not None:
            raise ValueRejected(f"--{name.replace('_', '-')} {why}")


def _make_only(arguments: argparse.Namespace) -> int:
    """Without a digest file: print the digests of a session's batches."""
    _refuse(arguments, ("save", "against"), "is for a batch of a digest file; give one")
    for name in ("recipe", "batch_size"):
        if getattr(arguments, name) is None:
            raise ValueRejected(f"--dataset {arguments.dataset}: needs --{name.replace('_', '-')} too")
    given: dict[str, Any] = {"split": "train", "seed": 0}
    given |= {name: getattr(arguments, name) for name in SESSION if getattr(arguments, name) is not None}
    given["recipe"] = read_recipe(arguments.recipe)
    if "dtype" in given:
        given["dtype"] = DType.parse(given["dtype"])
    if "level" in given:
        given["level"] = int(given["level"]) if given["level"].isdecimal() else given["level"]
    header = Wanted(**given).header(arguments.folder)
    with Replay(header, arguments.folder) as replay:
        whole = arguments.batch is None
        made = []
        for index in range(header.batches_per_epoch) if whole else arguments.batch:
            batch = replay.batch(index)
            made.append(batch.digest)
            print(f"{index} {batch.digest.hex()}")
        if whole:
            print(f"epoch {chain_digest(made).hex()}")
    return 0


def _print_header(path: Path, header: DigestHeader) -> None:
    ranks = f", rank {header.rank} of {header.world_size}" if header.world_size > 1 else ""
    print(
        f"{path}: {header.dataset} {header.split}, seed {header.seed}, epoch {header.epoch}, "
        f"{header.batches_per_epoch} batches of {header.batch_size}{ranks}"
    )
    if other := decoder_differs(header):
        print(f"  decoded by {header.decoder}, here by {other}: pictures may differ in their last bits")


def _compare(replay: Replay, wanted: EpochDigests, arguments: argparse.Namespace) -> list[int]:
    """Make and compare the batches asked for; returns those that differ."""
    chosen = range(len(wanted.batches)) if arguments.batch is None else arguments.batch
    wrong = []
    for index in tqdm(chosen, disable=True if arguments.batch else None, leave=False, unit="batch"):
        made = replay.batch(index)
        same = made.digest == wanted.batches[index]
        if not same:
            wrong.append(index)
        if not same or arguments.batch is not None:
            tail = "the same" if same else f"the file says {wanted.batches[index].hex()}"
            tqdm.write(f"  batch {index}: {made.digest.hex()}, {tail}")
        for damage in made.damaged:
            tqdm.write(f"  batch {index}, sample {damage['sample']} ({damage['action']}): {damage['text']}")
        if arguments.against is not None:
            _print_rows(replay, made, arguments.against)
        if arguments.save is not None:
            _save(replay, made, arguments.save, arguments.folder)
    print(f"  {len(chosen) - len(wrong)} of {len(chosen)} batches are the same")
    return wrong


def _print_suspects(replay: Replay, different: Sequence[Sequence[int]]) -> None:
    found = suspects(different)
    epochs = "" if len(different) == 1 else f" of {len(different)} epochs"
    print(f"one of {len(found)} samples has changed, or more; they are in the batches{epochs} that differ:")
    for sample in found[:LISTED]:
        print(f"  sample {sample}: {replay.describe(sample)}")
    if len(found) > LISTED:
        print(f"  and {len(found) - LISTED} more; digest files of other epochs, or --against, tell which")


def _print_rows(replay: Replay, made: ReplayedBatch, path: Path) -> None:
    ours, theirs = replay.images(made), _read_array(path)
    if theirs.shape != ours.shape or theirs.dtype.itemsize != ours.dtype.itemsize:
        raise ValueRejected(
            f"--against {path}: {theirs.dtype} {theirs.shape}; expected {ours.dtype} {ours.shape}, one whole batch"
        )
    same = made.rows == np.ascontiguousarray(theirs).view(np.uint8).reshape(made.rows.shape)
    for row in np.flatnonzero(~same.all(axis=1)).tolist():
        sample = int(made.ids[row])
        where = "an empty row" if sample < 0 else f"sample {sample}: {replay.describe(sample)}"
        print(f"  row {row} differs from {path} in {int((~same[row]).sum())} bytes; {where}")


def _read_array(path: Path) -> npt.NDArray[Any]:
    with opened_regular(path) as (file, _):
        try:
            array: npt.NDArray[Any] = np.load(file, allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise FormatError(f"{path}: is no array as numpy.save writes it: {error}") from None
    return array


def _save(replay: Replay, made: ReplayedBatch, path: Path, folder: Path) -> None:
    if path.suffix == ".npy":
        with written_when_complete(path) as file:
            np.save(file, replay.images(made))
        return
    header = as_pixels(replay.header)
    with Replay(header, folder) as plain:
        images = plain.images(plain.batch(made.index)).astype(np.uint8)
    cells = [Cell(images[row], f"{row}: {made.ids[row]}, label {made.labels[row]}") for row in range(made.valid)]
    rows = [SheetRow("", cells[first : first + ON_A_ROW]) for first in range(0, len(cells), ON_A_ROW)]
    heading = [
        f"{header.dataset} {header.split}, seed {header.seed}, epoch {header.epoch}, batch {made.index}",
        "row: sample, label",
    ]
    write_png(path, contact_sheet(heading, rows, cell_size(header.height)))
