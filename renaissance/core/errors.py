"""The errors of the project: one base class, so that a command can print one line and no traceback.

Every message names the thing (file, record, layer, option), what was expected, what was given and what to do.
Each class also derives from the closest built-in, so that code which knows only Python's own types still works.
"""

from __future__ import annotations


class RenaissanceError(Exception):
    """Base of every error this project raises on purpose."""


class ValueRejected(RenaissanceError, ValueError):
    """A setting, argument or option has a value that is not allowed."""


class ShapeError(RenaissanceError, ValueError):
    """Shapes do not fit together; the message names the layer and both shapes."""


class DTypeError(RenaissanceError, TypeError):
    """An element type is not supported or does not match."""


class PhaseError(RenaissanceError, ValueError):
    """An operation was called in the wrong phase (PLANNING, MEMORY_LOCKED, COMPILED)."""


class FormatError(RenaissanceError, ValueError):
    """A file is not what it claims to be; the message names file, offset, expected and found."""


class CorruptSample(FormatError):
    """One stored sample cannot be read or decoded; the others can. A session's policy says what becomes of it."""


class MissingFileError(RenaissanceError, FileNotFoundError):
    """A file or folder that is needed does not exist."""

    def __str__(self) -> str:  # OSError would print errno tuples
        return str(self.args[0]) if self.args else ""


class DeviceError(RenaissanceError, RuntimeError):
    """A device or native library is missing, unusable or failed."""


class MissingKernelError(RenaissanceError, NotImplementedError):
    """An op has no kernel for the chosen backend; raised at compile time, never at run time."""


class GraphError(RenaissanceError, ValueError):
    """A computation graph breaks one of its rules (order, single definition, types, missing edge)."""


class MemoryPlanError(RenaissanceError, ValueError):
    """A memory plan breaks one of its invariants (alignment, order, overlap, adjacency)."""


class DataServerError(RenaissanceError, ConnectionError):
    """The dataserver cannot be reached, refused the session, or died."""


class ProtocolError(DataServerError):
    """Client and dataserver speak different protocol versions or sent something impossible."""


class DigestMismatch(RenaissanceError, ValueError):
    """Delivered or stored bytes do not have the digest they should have."""


class CheckpointError(RenaissanceError, ValueError):
    """A checkpoint does not belong to this run; the message prints both values."""


def without_frames(error: Exception) -> Exception:
    """The same error, and those that it came from, without their tracebacks, for one that is kept instead of raised.

    A frame keeps its variables alive, and (in CPython from 3.11 on) its callers' frames with theirs: mappings of shared
    memory among them, and often the error itself.
    """
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            left += [one.__cause__, one.__context__]
    return error
