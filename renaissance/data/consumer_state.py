"""What a consumer can take away from a station: where it is, as a few integers, and what was corrupt."""

from __future__ import annotations

from collections.abc import Mapping

from renaissance.core.errors import DataServerError, ValueRejected
from renaissance.core.log import get_logger
from renaissance.data.batch import CorruptEntry
from renaissance.data.client import DEFAULT_TIMEOUT, PROBE_SECONDS, Access, corrupt_samples

STATE_VERSION = 1
NAMED_IN_A_WARNING = 5
_log = get_logger("data.station")


def start_of(state: Mapping[str, int], given: Mapping[str, int], start: tuple[int, int]) -> tuple[int, int]:
    """(epoch, batch) of a station's state. Raises ValueRejected when it belongs to another stream."""
    if start != (0, 0):
        raise ValueRejected("state and start_epoch or start_batch are both given; the state already says where")
    expected = {"version", "epoch", "batch", *given}
    if set(state) != expected or not all(type(value) is int for value in state.values()):
        raise ValueRejected(f"state is {dict(state)!r}; expected whole numbers under: {', '.join(sorted(expected))}")
    for name, value in {"version": STATE_VERSION, **given}.items():
        if state[name] != value:
            raise ValueRejected(f"state: {name} is {state[name]}, this station has {value}; it is of another stream")
    return state["epoch"], state["batch"]


class CorruptList:
    """The corrupt samples of one session, fetched from the dataserver when there are new ones."""

    def __init__(self, address: str, session: int, access: Access) -> None:
        self._address, self._session, self._access = address, session, access
        self._entries: list[CorruptEntry] = []
        self._complete = 0  # occurrences that the list has seen

    def update(self, count: int, timeout: float = DEFAULT_TIMEOUT) -> list[CorruptEntry]:
        """All of them, now that there are ``count`` occurrences. Raises DataServerError when nobody can be asked."""
        if count > self._complete:
            reply = corrupt_samples(self._address, self._session, timeout, self._access)
            self._entries = [
                CorruptEntry(s.sample, s.epoch, s.batch, s.text, s.action, None if s.substitute < 0 else s.substitute)
                for s in reply.samples
            ]
            self._complete = reply.occurrences
        return list(self._entries)

    def warn(self, what: str, policy: str, count: int) -> None:
        """At the end of a run nobody has to ask. Does not wait long for a dataserver that does not answer."""
        try:
            entries = self.update(count, PROBE_SECONDS)
        except DataServerError as error:
            _log.warning("%s: samples were corrupt %d times; their list is lost: %s", what, count, error)
            return
        samples: dict[int, CorruptEntry] = {}
        for entry in entries:
            samples.setdefault(entry.sample, entry)
        named = list(samples.values())[:NAMED_IN_A_WARNING]
        first = "; ".join(f"sample {e.sample} (epoch {e.epoch} batch {e.batch}): {e.text}" for e in named)
        rest = len(samples) - len(named)
        more = f"; and {rest} more, see corrupt_samples()" if rest else ""
        _log.warning("%s: %d corrupt samples (%s): %s%s", what, len(samples), policy, first, more)
