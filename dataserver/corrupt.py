"""What a session could not read or decode: counted, listed, and limited by number and by share of the set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from renaissance.data.making.spec import OnCorrupt, SessionSpec

MAX_LISTED = 4096
MAX_TEXT_BYTES = 300
NAMED_IN_A_MESSAGE = 5


@dataclass(frozen=True, slots=True)
class CorruptSample:
    """One sample that could not be delivered at one place."""

    sample: int
    epoch: int
    batch: int
    text: str  # file, record, offset and what is wrong
    action: str  # "substitute", "blank" or "fail"
    substitute: int  # the sample that took its place, -1 for none

    def __str__(self) -> str:
        became = f"sample {self.substitute} in its place" if self.substitute >= 0 else self.action
        return f"sample {self.sample} (epoch {self.epoch} batch {self.batch}, {became}): {self.text}"


class CorruptLog:
    """The corrupt samples of one session. A restarted worker reports its last ones again; each counts once."""

    def __init__(self, spec: SessionSpec) -> None:
        self._spec = spec
        self._listed: dict[tuple[int, int], CorruptSample] = {}
        self._distinct: set[int] = set()
        self.occurrences = 0

    @property
    def distinct(self) -> int:
        return len(self._distinct)

    @property
    def listed(self) -> list[CorruptSample]:
        """In the order in which they were met; the first MAX_LISTED."""
        return list(self._listed.values())

    def note(self, reports: Iterable[Mapping[str, Any]]) -> str | None:
        """Add a worker's reports. Returns why the session must end when too many samples are corrupt by now."""
        for report in reports:
            key = int(report["epoch"]), int(report["sample"])
            if key in self._listed:
                continue
            self.occurrences += 1
            self._distinct.add(key[1])
            if len(self._listed) < MAX_LISTED:
                substitute = report["substitute"]
                self._listed[key] = CorruptSample(
                    sample=key[1],
                    epoch=key[0],
                    batch=int(report["batch"]),
                    text=str(report["text"]).encode(errors="replace")[:MAX_TEXT_BYTES].decode(errors="ignore"),
                    action=str(report["action"]),
                    substitute=-1 if substitute is None else int(substitute),
                )
            if report["action"] == OnCorrupt.FAIL:
                continue  # the worker's own error, which names the sample, ends the session
            if self.distinct > self._spec.corrupt_limit:  # the set never grows beyond what the limit allows, plus one
                return self._too_many()
        return None

    def _too_many(self) -> str:
        spec, samples = self._spec, self._spec.dataset.samples
        limit = f"max_corrupt is {spec.max_corrupt}"
        if spec.corrupt_limit < spec.max_corrupt:
            limit = f"max_corrupt_share {spec.max_corrupt_share:g} of {samples} samples allows {spec.corrupt_limit}"
        return f"{self.distinct} samples are corrupt, {limit}; {self.summary()}"

    def summary(self) -> str:
        """The first few, for a message."""
        first: dict[int, CorruptSample] = {}
        for entry in self._listed.values():
            if len(first) == NAMED_IN_A_MESSAGE:
                break
            first.setdefault(entry.sample, entry)
        rest = self.distinct - len(first)
        more = f"; and {rest} more" if rest else ""
        return "; ".join(map(str, first.values())) + more
