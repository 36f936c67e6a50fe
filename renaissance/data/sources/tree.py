"""Folder trees of pictures: ``<root>/train/<class>/*.JPEG`` and ``<root>/val/<class>/*.JPEG``, any number of classes.

Classes are the folders of ``train`` in the order of the bytes of their names; ``val`` may have fewer, never others, so
that a number means the same class in both. Pictures are the files whose name ends in .jpg or .jpeg (any case), sorted
by the bytes of their names inside each class. Names are bytes throughout: no encoding is assumed.

In memory a picture costs 12 bytes (label i32, size u32, end of its name u32) and its name: 32 bytes a picture for
ImageNet's names, 41 MB for its 1,281,167 training pictures. A class costs 4 bytes and its name.

Scanning costs about 1 µs a file for the names and 2 µs more to ask for its size, which is one system call each; 1.3
million files open in about four seconds when the folders are in the page cache. Threads do not make that faster (the
interpreter lock changes hands for every call), but they do on a cold disk or a network file system, where each call
waits; so they are used only when the first folders turn out to be slow. No cache of the scan is kept: it would have to
ask for the size of every file to be as trustworthy, which is most of the work it would save.

Links are not followed below the root: scanning refuses them by name, and reading opens each step from the root relative
to the one before with O_NOFOLLOW, so that nothing outside the root is reached even by a tree that changes while served.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from renaissance.core.errors import CorruptSample, FormatError, MissingFileError, RenaissanceError
from renaissance.data.formats.imagenet import MAX_PICTURE_BYTES
from renaissance.data.sources.reading import OPEN_FILE, OPEN_FOLDER, check_room, raise_unreadable, read_fully
from renaissance.data.sources.spec import MAX_SAMPLES, Arrays, Encoding, SourceSpec, printable, sections_of

SUFFIXES = (b".jpg", b".jpeg")
MAX_POOL_BYTES = 2**32 - 1
"""Ends of names are u32."""

SLOW_FILE = 50e-6
"""Seconds a file, over the first folders, above which the disk and not the interpreter is what is waited for."""
PROBE_FOLDERS = 4
SLOW_THREADS = 16


@dataclass(frozen=True, slots=True)
class _Folder:
    """Pictures of one class: names joined without separators, their lengths and sizes."""

    pool: bytes
    lengths: npt.NDArray[np.uint32]
    sizes: npt.NDArray[np.uint32]


def open_tree(
    folder: str, split: str, name: str = "imagenet", measure: bool = True, listed: Sequence[bytes] | None = None
) -> tuple[SourceSpec, Arrays]:
    """Scan one split of the tree under ``folder``.

    ``listed`` are the names of all classes in the order of their numbers, which the folders of ``train`` are otherwise;
    the tree may then have any part of them.

    ``measure`` False leaves the sizes of the files unknown (0 in the index and in the spec) and saves two thirds of
    the time. Raises MissingFileError for a missing folder, and FormatError for a tree that is not one (no classes, a
    training class without pictures, a validation class that training does not have, a picture that is a link or no
    regular file, a file that is too large to be one), naming the place.
    """
    root = os.fsencode(os.path.realpath(folder))
    if listed is None:
        classes = _class_folders(root, b"train")
        own = classes if split == "train" else _known_classes(root, split, classes, "a folder of the training set")
    else:
        classes = list(listed)
        own = _known_classes(root, split, classes, "in the list of classes")
    paths = [os.path.join(root, os.fsencode(split), class_name) for class_name in own]
    scans = _scan(paths, measure)
    if split == "train" and (empty := next((p for p, s in zip(paths, scans, strict=True) if not s.sizes.size), None)):
        raise FormatError(f"{printable(empty)}: {_why_empty(empty)}")
    total = sum(scan.sizes.size for scan in scans)
    place = printable(os.path.join(root, os.fsencode(split)))
    if not total:
        raise FormatError(f"{place}: its {len(own)} class folders hold no .jpg or .jpeg files")
    if total > MAX_SAMPLES:
        raise FormatError(f"{place}: holds {total} pictures; at most {MAX_SAMPLES} can be numbered")
    return _indexed(root, split, name, classes, own, scans)


def _class_folders(root: bytes, split: bytes) -> list[bytes]:
    """Names of the class folders of a split, in the order of their bytes."""
    path = os.path.join(root, split)
    if os.path.islink(path):
        raise FormatError(f"{printable(path)}: {_LINK}")
    try:
        with os.scandir(path) as entries:
            names = sorted(entry.name for entry in entries if _is_class(entry))
    except FileNotFoundError as error:
        why = "its folders give the classes their numbers" if split == b"train" else "it holds the validation pictures"
        raise MissingFileError(f"{printable(path)}: no such folder; {why}") from error
    except NotADirectoryError as error:
        raise FormatError(f"{printable(path)}: is not a folder") from error
    except OSError as error:
        raise RenaissanceError(f"{printable(path)}: cannot be read: {error.strerror}") from error
    if not names:
        raise FormatError(f"{printable(path)}: holds no class folders; expected {printable(path)}/<class>/*.JPEG")
    return names


_LINK = "is a link; links are not followed inside a served folder. Copy or mount what it points to in its place"


def _is_class(entry: os.DirEntry[bytes]) -> bool:
    if entry.name.startswith(b"."):
        return False
    if entry.is_symlink() and entry.is_dir():
        raise FormatError(f"{printable(entry.path)}: {_LINK}")
    return entry.is_dir(follow_symlinks=False)


def _known_classes(root: bytes, split: str, classes: list[bytes], where: str) -> list[bytes]:
    own, known = _class_folders(root, os.fsencode(split)), set(classes)
    unknown = [name for name in own if name not in known]
    if unknown:
        raise FormatError(
            f"{printable(os.path.join(root, os.fsencode(split), unknown[0]))}: class {printable(unknown[0])} is not "
            f"{where}, which gives the classes their numbers ({len(unknown)} of {len(own)} classes are unknown)"
        )
    return own


def _scan(paths: list[bytes], measure: bool) -> list[_Folder]:
    begin = time.perf_counter()
    done = [_scan_folder(path, measure) for path in paths[:PROBE_FOLDERS]]
    files = sum(scan.sizes.size for scan in done) + len(done)
    rest = paths[PROBE_FOLDERS:]
    if time.perf_counter() - begin < SLOW_FILE * files:
        return done + [_scan_folder(path, measure) for path in rest]
    with ThreadPoolExecutor(SLOW_THREADS) as pool:
        return done + list(pool.map(lambda path: _scan_folder(path, measure), rest))


def _scan_folder(path: bytes, measure: bool) -> _Folder:
    names: list[bytes] = []
    try:
        descriptor = os.open(path, OPEN_FOLDER)
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    name = entry.name
                    if name.lower().endswith(SUFFIXES) and not name.startswith(b"."):
                        if not entry.is_file(follow_symlinks=False):
                            raise FormatError(_not_a_picture(entry))
                        names.append(name)
            names.sort()
            sizes = list(_sizes(path, descriptor, names)) if measure else [0] * len(names)
        finally:
            os.close(descriptor)
    except OSError as error:
        if isinstance(error, RenaissanceError):
            raise
        raise RenaissanceError(f"{printable(path)}: cannot be read: {error.strerror}") from error
    lengths = np.fromiter(map(len, names), np.uint32, len(names))
    return _Folder(b"".join(names), lengths, np.array(sizes, np.uint32))


def _sizes(path: bytes, descriptor: int, names: list[bytes]) -> Iterator[int]:
    # Relative to the open folder: half the work of the full path.
    for name in names:
        status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
        if status.st_size > MAX_PICTURE_BYTES:
            raise FormatError(
                f"{printable(os.path.join(path, name))}: is {status.st_size} bytes; expected a picture, of at most "
                f"{MAX_PICTURE_BYTES}; remove it"
            )
        yield status.st_size


def _not_a_picture(entry: os.DirEntry[bytes]) -> str:
    what = "is not a regular file; expected a picture, or another name"
    return f"{printable(entry.path)}: {_LINK if entry.is_symlink() else what}"


def _why_empty(path: bytes) -> str:
    why = "a class without .jpg or .jpeg files; remove the folder or fill it"
    with suppress(OSError), os.scandir(path) as entries:
        inner = next((entry for entry in entries if entry.is_dir() and not entry.name.startswith(b".")), None)
        if inner is not None:
            why += f" (it holds a folder {printable(inner.name)}: pictures must lie directly in their class)"
    return why


def _indexed(
    root: bytes, split: str, name: str, classes: list[bytes], own: list[bytes], scans: list[_Folder]
) -> tuple[SourceSpec, Arrays]:
    number = {class_name: label for label, class_name in enumerate(classes)}
    filled = [(number[class_name], scan) for class_name, scan in zip(own, scans, strict=True) if scan.sizes.size]
    counts = np.array([scan.sizes.size for _, scan in filled], np.int64)
    sizes = np.concatenate([scan.sizes for _, scan in filled])
    place = printable(os.path.join(root, os.fsencode(split)))
    arrays: Arrays = {
        "labels": np.repeat(np.array([label for label, _ in filled], np.int32), counts),
        "sizes": sizes,
        "name_ends": _ends(np.concatenate([scan.lengths for _, scan in filled]), place),
        "names": np.frombuffer(b"".join(scan.pool for _, scan in filled), np.uint8),
        "class_ends": _ends(np.fromiter(map(len, classes), np.uint32, len(classes)), place),
        "class_names": np.frombuffer(b"".join(classes), np.uint8),
    }
    sections, index_bytes = sections_of(arrays)
    spec = SourceSpec(
        name=name,
        split=split,
        format="raw",
        level=None,
        encoding=Encoding.PICTURES,
        num_classes=len(classes),
        samples=int(counts.sum()),
        height=0,
        width=0,
        channels=3,
        files=(os.fsdecode(root),),
        tree=True,
        source=place,
        stored_bytes=int(sizes.sum(dtype=np.uint64)),
        largest=int(sizes.max()),
        index_bytes=index_bytes,
        sections=sections,
    )
    return spec, arrays


def _ends(lengths: npt.NDArray[np.uint32], place: str) -> npt.NDArray[np.uint32]:
    ends = np.cumsum(lengths, dtype=np.uint64)
    if ends[-1] > MAX_POOL_BYTES:
        raise FormatError(f"{place}: names of files take {ends[-1]} bytes together; expected at most {MAX_POOL_BYTES}")
    return ends.astype(np.uint32)


class TreeReader:
    """Reads pictures of a tree; holds the split's folder and the class folder used last."""

    def __init__(self, spec: SourceSpec, arrays: Arrays) -> None:
        self._root, self._split = os.fsencode(spec.files[0]), os.fsencode(spec.split)
        self._measured = spec.largest > 0
        self._labels, self._sizes = arrays["labels"], arrays["sizes"]
        self._ends, self._names = arrays["name_ends"], arrays["names"]
        self._class_ends, self._class_names = arrays["class_ends"], arrays["class_names"]
        self._split_folder = self._class_folder = -1
        self._class = -1

    def read(self, sample: int, out: memoryview) -> int:
        """Bytes of a file; returns their count. CorruptSample when it is not what was scanned."""
        try:
            descriptor = os.open(self._file_name(sample), OPEN_FILE, dir_fd=self._folder_of(sample))
        except OSError as error:
            raise_unreadable(error, self.describe(sample))
        try:
            size = self._checked_size(sample, descriptor)
            if out.nbytes < size:
                check_room(out, size, self.describe(sample))
            done = read_fully(descriptor, out[:size], 0)
        except OSError as error:
            if isinstance(error, RenaissanceError):
                raise
            raise_unreadable(error, self.describe(sample))
        finally:
            os.close(descriptor)
        if done < size:
            raise CorruptSample(f"{self.describe(sample)}: ends after {done} of {size} bytes; it is being written to")
        return size

    def size(self, sample: int) -> int:
        """Bytes of a file as it is now."""
        try:
            name, folder = self._file_name(sample), self._folder_of(sample)
            return self._bounded(sample, os.stat(name, dir_fd=folder, follow_symlinks=False).st_size)
        except OSError as error:
            if isinstance(error, RenaissanceError):
                raise
            raise_unreadable(error, self.describe(sample))

    def _bounded(self, sample: int, size: int) -> int:
        """``size``, before memory is made for it. Raises CorruptSample."""
        if size > MAX_PICTURE_BYTES:
            raise CorruptSample(f"{self.describe(sample)}: is {size} bytes; a picture has at most {MAX_PICTURE_BYTES}")
        return size

    def _checked_size(self, sample: int, descriptor: int) -> int:
        status = os.fstat(descriptor)
        size, expected = status.st_size, int(self._sizes[sample])
        if not stat.S_ISREG(status.st_mode):
            raise CorruptSample(f"{self.describe(sample)}: is no longer a regular file")
        if size != expected and self._measured:
            raise CorruptSample(
                f"{self.describe(sample)}: is {size} bytes; it had {expected} when the set was opened. Open it again"
            )
        if not size:
            raise CorruptSample(f"{self.describe(sample)}: is empty")
        return self._bounded(sample, size)

    def _file_name(self, sample: int) -> bytes:
        begin = int(self._ends[sample - 1]) if sample else 0
        return self._names[begin : int(self._ends[sample])].tobytes()

    def class_names(self) -> list[str]:
        """Names of all classes in the order of their labels, with escapes for what cannot be printed."""
        return [printable(self._class_name(label)) for label in range(self._class_ends.size)]

    def _class_name(self, label: int) -> bytes:
        begin = int(self._class_ends[label - 1]) if label else 0
        return self._class_names[begin : int(self._class_ends[label])].tobytes()

    def _folder_of(self, sample: int) -> int:
        # Kept only for the class used last: a thousand descriptors in each worker would exceed the usual limit, and
        # opening a folder costs a few microseconds beside the millisecond of decoding a picture.
        label = int(self._labels[sample])
        if label != self._class:
            if self._split_folder < 0:
                self._split_folder = self._open_split()
            self._close_class()
            self._class_folder = os.open(self._class_name(label), OPEN_FOLDER, dir_fd=self._split_folder)
            self._class = label
        return self._class_folder

    def _open_split(self) -> int:
        root = os.open(self._root, OPEN_FOLDER)
        try:
            return os.open(self._split, OPEN_FOLDER, dir_fd=root)
        finally:
            os.close(root)

    def describe(self, sample: int) -> str:
        """Path of the file, with escapes for what cannot be printed."""
        class_name = self._class_name(int(self._labels[sample]))
        return printable(os.path.join(self._root, self._split, class_name, self._file_name(sample)))

    def _close_class(self) -> None:
        if self._class_folder >= 0:
            os.close(self._class_folder)
        self._class_folder = self._class = -1

    def close(self) -> None:
        """Close the folders; reading opens them again."""
        self._close_class()
        if self._split_folder >= 0:
            os.close(self._split_folder)
        self._split_folder = -1
