"""The output folder of a run: looked at before anything is started for the run, and its own while it trains.

Two runs that write into one folder would remove each other's checkpoints and mix their logs, so the second is refused.
The lock is on the folder itself: it leaves no file, and the system drops it with the process, however that ends.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from renaissance.core.errors import RenaissanceError, ValueRejected


def check_output(folder: Path, option: str = "output") -> None:
    """Raise ValueRejected when ``folder`` is a file, cannot be made or cannot be written into; makes nothing."""
    whole = folder.absolute()
    existing = next(path for path in (whole, *whole.parents) if os.path.exists(path))
    if not existing.is_dir():
        raise ValueRejected(f"{option} is {folder}, but {existing} is a file; give a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueRejected(f"{option} is {folder}, but {existing} cannot be written into; give a folder that can")


def check_file(file: Path, option: str) -> None:
    """As ``check_output`` for the folder that ``file`` will be written into; ``file`` itself must not be a folder."""
    if file.is_dir():
        raise ValueRejected(f"{option} is {file}, which is a folder; give the name of a file")
    check_output(file.parent, option)


def make_folder(folder: Path) -> None:
    """Make ``folder`` and its parents where they are missing. Raises RenaissanceError naming it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RenaissanceError(f"{folder}: the folder cannot be made: {error.strerror}") from error


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Make ``folder`` and keep other runs out of it while the block runs. Raises ValueRejected when one is in it."""
    make_folder(folder)
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueRejected(
                f"output is {folder}, where another run is writing; wait for its end, or give each run its own folder"
            ) from None
        except OSError:  # a network file system without locks: nothing to be had there
            pass
        yield
    finally:
        os.close(descriptor)
