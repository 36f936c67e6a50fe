"""``renaissance fetch``: the published files of a data set, from its mirrors into a folder.

Can run before every training: what is there is checked and left alone. An interrupted transfer goes on where it ended.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from renaissance.core.errors import RenaissanceError, ValueRejected
from renaissance.data.catalogue import CATALOGUE, SPLITS, dataset_info
from renaissance.data.download import DownloadFailed, by_hand, fetch_dataset
from renaissance.data.mirrors import STALL_SECONDS, TransferOptions
from renaissance.data.sources.packed import packed_levels


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("dataset", metavar="NAME", help=f"name of the data set: {', '.join(CATALOGUE)}")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder to write to (default: data/NAME)")
    parser.add_argument(
        "--mirror",
        action="append",
        metavar="URL",
        dest="mirrors",
        help="address of a folder with the files, used instead of the known ones; may be given several times",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=STALL_SECONDS,
        metavar="S",
        help="seconds without a single byte before the connection is given up (default: %(default)g)",
    )
    parser.add_argument("--force", action="store_true", help="replace existing files that are not the published ones")
    parser.add_argument("--no-unpack", action="store_true", help="leave a .tar.gz packed; it can be read like that too")


def run(arguments: argparse.Namespace) -> int:
    """Fetch, and print one line for each file; for a set that cannot be fetched, print what to do instead."""
    info = dataset_info(arguments.dataset)
    if not 0 < arguments.timeout < 86400:
        raise ValueRejected(f"--timeout is {arguments.timeout:g}; expected seconds, above 0 and below a day")
    folder = arguments.output if arguments.output is not None else Path("data") / info.name
    if not info.mirrors:
        if all((folder / split).is_dir() or packed_levels(str(folder), split) for split in SPLITS):
            print(f"{folder}: holds both splits; `renaissance doctor {info.name} {folder}` examines them")
            return 0
        print(f"{info.name}: {chr(10).join(by_hand(info.name))}")
        raise RenaissanceError(f"{info.name} cannot be downloaded by a program; bring it to {folder} as said above")
    with _Bar() as bar:
        try:
            obtained = fetch_dataset(
                info.name,
                folder,
                arguments.mirrors,
                TransferOptions(stall_seconds=arguments.timeout),
                replace=arguments.force,
                unpack=not arguments.no_unpack,
                on_progress=bar.show,
            )
        except DownloadFailed as failure:
            bar.close()
            _print_missing(failure)
            raise RenaissanceError(f"{info.name}: {len(failure.missing)} files are missing; see above") from failure
    for file in obtained:
        how = f"fetched from {file.source}" if file.source else file.how
        print(f"{file.path}: {how}")
    return 0


def _print_missing(failure: DownloadFailed) -> None:
    for reason in dict.fromkeys(failure.reasons):
        print(reason, file=sys.stderr)
    print(f"Files that {failure.folder} must hold; bring them there by any way you have:", file=sys.stderr)
    for file in failure.missing:
        print(f"  {file.name}  {file.size} bytes, CRC-32 {file.crc32:08x}", file=sys.stderr)


class _Bar:
    """One progress bar at a time, drawn only on a terminal."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None
        self._file = ""

    def show(self, file: str, done: int, size: int) -> None:
        if self._bar is None or file != self._file:
            self.close()
            self._file = file
            self._bar = tqdm(total=size, initial=done, desc=file, unit="B", unit_scale=True, disable=None, leave=False)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
