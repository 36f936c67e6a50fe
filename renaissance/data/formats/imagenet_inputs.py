"""The source pictures of a packing run: their names, labels and sizes, and fingerprints that notice a change."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from renaissance.core.errors import FormatError, MissingFileError
from renaissance.data.formats.imagenet_encode import FileState, file_state
from renaissance.data.sources.spec import Arrays
from renaissance.data.sources.tree import open_tree

MAX_LIST_BYTES = 64 << 20
"""Of a list of classes; it need not be a regular file."""


class Inputs:
    """The pictures of one split in the tree's order; ``classes`` and ``file_names`` are the bytes of the names."""

    def __init__(self, root: Path, split: str, classes: Sequence[str] | None) -> None:
        listed = None if classes is None else [os.fsencode(name) for name in classes]
        if not Path(root).is_dir():
            raise MissingFileError(f"{root}: no such folder; expected a tree ROOT/{{train,val}}/<class>/*.JPEG")
        spec, arrays = open_tree(str(root), split, listed=listed)
        self.stored_bytes = spec.stored_bytes
        self.folder = os.path.join(os.fsencode(spec.files[0]), os.fsencode(split))
        self.split = split
        self.labels, self.sizes = arrays["labels"], arrays["sizes"]
        self.file_names = _pool(arrays, "name")
        self.classes = _pool(arrays, "class")
        self.count = len(self.file_names)

    def name(self, index: int) -> bytes:
        """class/file."""
        return self.classes[int(self.labels[index])] + b"/" + self.file_names[index]

    def path(self, index: int) -> str:
        return os.fsdecode(os.path.join(self.folder, self.name(index)))

    @property
    def names_hash(self) -> str:
        digest = hashlib.sha256()
        for index in range(self.count):
            digest.update(self.name(index) + b"\0")
        return digest.hexdigest()

    @property
    def source_hash(self) -> str:
        """SHA-256 of "class/file NUL size LF" of every picture in the tree's order."""
        digest = hashlib.sha256()
        for index, size in enumerate(self.sizes.tolist()):
            digest.update(b"%s\0%d\n" % (self.name(index), size))
        return digest.hexdigest()


def _pool(arrays: Arrays, what: str) -> list[bytes]:
    names, ends = arrays[f"{what}_names" if what == "class" else "names"].tobytes(), arrays[f"{what}_ends"].tolist()
    return [names[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def read_class_list(path: Path) -> tuple[str, ...]:
    """Class names from a text file: the first word of each line is a folder's name, its line the label from 0.

    Raises MissingFileError, and FormatError for an empty list, an empty line or a name that comes twice.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_LIST_BYTES + 1)
        lines = data.decode("utf-8-sig").splitlines()
    except FileNotFoundError as error:
        raise MissingFileError(f"{path}: no such file; expected a list of classes, one a line") from error
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: cannot be read as text: {error}") from error
    if len(data) > MAX_LIST_BYTES:
        raise FormatError(f"{path}: is longer than {MAX_LIST_BYTES} bytes; expected a list of classes, one a line")
    line_of: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words:
            raise FormatError(f"{path}: line {number} is empty; expected the name of a class folder on every line")
        if words[0] in line_of:
            raise FormatError(f"{path}: line {number}: class {words[0]!r} is also on line {line_of[words[0]]}")
        line_of[words[0]] = number
    if not line_of:
        raise FormatError(f"{path}: is empty; expected the name of a class folder on every line")
    return tuple(line_of)


class Fingerprint:
    """SHA-256 of (name, size, time) of the first pictures of the export order, growing."""

    def __init__(self, inputs: Inputs, order: Sequence[int]) -> None:
        self._inputs, self._order = inputs, order
        self._digest, self._end = hashlib.sha256(), 0
        self._at: dict[int, Any] = {}

    def of_first(self, end: int) -> str:
        """The fingerprint of the first ``end`` files as they are now; never asked for fewer than before."""
        for position in range(self._end, min(end, len(self._order))):
            self.add(position, file_state(self._inputs.path(self._order[position])))
        self._at[self._end] = self._digest.copy()
        return self._digest.hexdigest()

    def back_to(self, end: int) -> None:
        """Forget what was asked for beyond ``end``."""
        self._digest, self._end = (self._at[end].copy(), end) if end else (hashlib.sha256(), 0)

    def add(self, position: int, state: FileState) -> None:
        """The next file of the order."""
        self._digest.update(b"%s\0%d\0%d\n" % (self._inputs.name(self._order[position]), *state))
        self._end = position + 1

    @property
    def now(self) -> str:
        return self._digest.hexdigest()
