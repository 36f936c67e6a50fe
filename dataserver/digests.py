"""Digest files: one for every session and epoch that was delivered from its first batch.

Written in a thread of its own, so that a slow disk delays no batch. A file of the same name tells about the same bytes:
when its digests are others, both are kept and the daemon says so.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from queue import SimpleQueue

from dataserver.session import Session
from renaissance.core.errors import MissingFileError, RenaissanceError, ValueRejected
from renaissance.core.log import get_logger
from renaissance.data.digest_file import DigestHeader, read_digests, write_digests
from renaissance.data.making.spec import SessionSpec
from renaissance.data.recipe import Recipe

DIFFERENT = ".differs"
"""Appended to the name of a file whose digests are not those of the file that was there."""

STOP_SECONDS = 5.0
"""So long the daemon waits at its end for digest files that are still to be written."""

_log = get_logger("dataserver.digests")


class DigestFolder:
    """Owns the thread; ``close()`` writes what is pending and ends it."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueRejected when nothing can be written there. No thread yet: the workers are forked first."""
        if not folder.is_dir():
            raise MissingFileError(f"--digest-folder {folder}: no such folder; make it first")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ValueRejected(f"--digest-folder {folder}: may not be written")
        self._folder = folder
        self._queue: SimpleQueue[tuple[DigestHeader, list[bytes]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.written = self.failed = 0

    def add(self, session: Session, epoch: int, batches: list[bytes]) -> None:
        """Write one epoch soon."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dataserver-digests", daemon=True)
            self._thread.start()
        self._queue.put((digest_header(session.spec, session.decoder, epoch), batches))

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(STOP_SECONDS)
            if self._thread.is_alive():
                _log.error("%s: does not answer; %d digest files are lost", self._folder, max(1, self._queue.qsize()))
            self._thread = None

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self._write(*item)
            except (RenaissanceError, OSError) as error:
                self.failed += 1
                _log.error("%s", error)

    def _write(self, header: DigestHeader, batches: list[bytes]) -> None:
        path = self._folder / header.file_name()
        try:
            if read_digests(path).batches == tuple(batches):
                return
        except MissingFileError:
            write_digests(path, header, batches)
            self.written += 1
            return
        different = path.with_name(path.name + DIFFERENT)
        write_digests(different, header, batches)
        raise RenaissanceError(
            f"{path}: epoch {header.epoch} of {header.dataset} {header.split} was delivered with other bytes before; "
            f"the new digests are in {different.name}"
        )


def digest_header(spec: SessionSpec, decoder: str, epoch: int) -> DigestHeader:
    """Everything that decides the bytes of one epoch of a session."""
    data, layout = spec.dataset, spec.layout
    return DigestHeader(
        dataset=spec.dataset_name,
        split=spec.split,
        num_samples=data.samples,
        stored_format=stored_format(spec),
        encoding=str(data.encoding),
        level=stored_level(spec),
        recipe=spec.recipe_json,
        recipe_fingerprint=Recipe.from_json(spec.recipe_json).fingerprint(),
        decoder=decoder,
        seed=spec.seed,
        shuffle=spec.shuffle,
        order=spec.order,
        batch_size=layout.batch_size,
        dtype=layout.dtype.name.lower(),
        height=layout.height,
        width=layout.width,
        channels=layout.channels,
        padded_channels=layout.padded_channels,
        rank=spec.rank,
        world_size=spec.world_size,
        batches_per_epoch=spec.batches_per_epoch,
        on_corrupt=str(spec.on_corrupt),
        epoch=epoch,
    )


def stored_format(spec: SessionSpec) -> str:
    """ "dts" or "raw": the form of the files, which decides no byte of a set that is pixels."""
    source = spec.dataset.source
    return "" if source is None else str(source.format)


def stored_level(spec: SessionSpec) -> str:
    """The packed level, "" for sets without levels."""
    source = spec.dataset.source
    return "" if source is None or source.level is None else str(source.level)
