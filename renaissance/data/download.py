"""Getting a data set from its mirrors: files that are there are checked, missing ones fetched, archives unpacked.

Every file is compared with the size and CRC-32 under which it was published, also one that was there before; a
mismatch is an error, never a warning. Without a network the error lists what is expected where, so that the files can
be brought by hand. ImageNet may not be passed on by anybody, so only its instructions are here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from renaissance.core.errors import DigestMismatch, RenaissanceError, ValueRejected
from renaissance.data.catalogue import DatasetInfo, PublishedFile, dataset_info
from renaissance.data.formats.archive import extract_archive
from renaissance.data.formats.cifar import CIFAR_LAYOUTS, find_cifar
from renaissance.data.formats.idx import check_published, find_raw
from renaissance.data.mirrors import MirrorsFailed, MirrorState, Progress, TransferOptions, check_mirrors, fetch_file


@dataclass(frozen=True, slots=True)
class Obtained:
    """A file of the set and how it came to be there: "present", "fetched" (``source``: the mirror) or "unpacked"."""

    path: Path
    how: str
    source: str = ""


class DownloadFailed(RenaissanceError):
    """Some files are missing and no mirror gave them; ``missing`` can be brought to ``folder`` by hand."""

    def __init__(
        self, info: DatasetInfo, folder: Path, missing: Sequence[PublishedFile], reasons: Sequence[str]
    ) -> None:
        self.folder, self.missing, self.reasons = folder, tuple(missing), tuple(reasons)
        names = ", ".join(f"{file.name} ({file.size} bytes, CRC-32 {file.crc32:08x})" for file in missing)
        super().__init__(
            f"{info.name}: {len(missing)} of {len(info.published)} files could not be fetched: "
            f"{' | '.join(dict.fromkeys(reasons))}. Without a network, bring them to {folder} by hand: {names}"
        )


def fetchable(name: str) -> DatasetInfo:
    """The data set of that name or alias. Raises ValueRejected for one that has no mirrors."""
    info = dataset_info(name)
    if not info.mirrors:
        raise ValueRejected(f"data set {info.name!r} cannot be downloaded by a program; {' '.join(by_hand(info.name))}")
    return info


def fetch_dataset(
    name: str,
    folder: Path,
    mirrors: Sequence[str] | None = None,
    options: TransferOptions | None = None,
    *,
    replace: bool = False,
    unpack: bool = True,
    on_progress: Progress | None = None,
) -> list[Obtained]:
    """Make ``folder`` (made if missing) hold the published files of a set; CIFAR's archive is unpacked beside it.

    ``mirrors`` (URLs of folders) replace the catalogue's. ``replace`` fetches again what is there with other bytes and
    unpacks again. A set that is complete in unpacked form is left as it is: nothing is published to compare it with.
    Raises ValueRejected for an unknown set or mirror, DigestMismatch for an existing file with other bytes (without
    ``replace``), DownloadFailed when files are missing in the end, RenaissanceError when the disk refuses.
    """
    info = fetchable(name)
    mirrors = check_mirrors(info.mirrors if mirrors is None else mirrors)
    state = MirrorState()
    obtained: list[Obtained] = []
    missing: list[PublishedFile] = []
    reasons: list[str] = []
    for published in info.published:
        found = None if replace and not _is_published(folder, published) else _existing(info, folder, published)
        if found is None:
            try:
                source = fetch_file(published, folder, mirrors, options, on_progress, state)
            except MirrorsFailed as failure:
                missing.append(published)
                reasons += failure.reasons
                continue
            found = Obtained(folder / published.name, "fetched", source)
        obtained.append(found)
    if missing:
        raise DownloadFailed(info, folder, missing, reasons)
    if unpack and info.name in CIFAR_LAYOUTS:
        obtained += _unpack(info, folder, replace)
    return obtained


def by_hand(name: str) -> list[str]:
    """What to do for a set that cannot be downloaded: one line each."""
    info = dataset_info(name)
    files = [f"  {file.name}  {file.size:,} bytes, CRC-32 {file.crc32:08x}" for file in info.published]
    return [
        "its owners give it only to those who register with them (image-net.org).",
        *files,
        "Unpack the training archive, then each of the archives in it into train/WNID/, and sort the validation "
        "pictures into val/WNID/ (WNID: the name of the class's training archive, such as n01440764).",
        f"Then `renaissance doctor {info.name} DIR` checks the tree, and `renaissance pack {info.name}` packs it.",
    ]


def _existing(info: DatasetInfo, folder: Path, published: PublishedFile) -> Obtained | None:
    path = folder / published.name
    if path.exists():
        if path.stat().st_size != published.size:
            raise DigestMismatch(
                f"{path}: is {path.stat().st_size} bytes long; published with {published.size}. Remove it, or give "
                "--force to replace it"
            )
        check_published(path, published)
        return Obtained(path, "present")
    if info.name in CIFAR_LAYOUTS:
        files = [find_cifar(folder, info.name, split) for split in ("train", "val")]
        return Obtained(files[0][0].parent, "present") if files[0] and files[1] else None
    unpacked = find_raw(folder, published.name.removesuffix(".gz"))
    return Obtained(unpacked, "present") if unpacked else None


def _is_published(folder: Path, published: PublishedFile) -> bool:
    try:
        check_published(folder / published.name, published)
    except RenaissanceError:
        return False
    return True


def _unpack(info: DatasetInfo, folder: Path, replace: bool) -> list[Obtained]:
    layout = CIFAR_LAYOUTS[info.name]
    complete = all(find_cifar(folder, info.name, split) for split in layout.files)
    if not (folder / layout.archive).exists() or (complete and not replace):
        return []
    files = extract_archive(folder / layout.archive, folder, layout.folder)
    return [Obtained(file, "unpacked") for file in files]
