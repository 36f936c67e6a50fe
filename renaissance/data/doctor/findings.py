"""What an examination found, as plain data: the command prints it, other programs read it as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

EXAMPLES = 5
"""Places named with a finding; more are counted."""


class Severity(StrEnum):
    """How bad a finding is. A problem ends or falsifies a run, a warning may, a note is good to know."""

    PROBLEM = "problem"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing worth saying: what it is about, what was found, what to do, how many times and where."""

    severity: Severity
    subject: str  # "train", "val", "memory", ...
    text: str
    advice: str = ""
    count: int = 1
    examples: tuple[str, ...] = ()


@dataclass(slots=True)
class Report:
    """Facts by subject, and findings in the order in which they were made."""

    dataset: str
    folder: str
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def add(
        self,
        severity: Severity,
        subject: str,
        text: str,
        advice: str = "",
        examples: Iterable[str] = (),
        count: int | None = None,
    ) -> None:
        """Add a finding; ``examples`` are any number of places, ``count`` is how many there are (None: those given)."""
        places = tuple(examples)
        number = count if count is not None else max(1, len(places))
        self.findings.append(Finding(severity, subject, text, advice, number, places[:EXAMPLES]))

    def number_of(self, severity: Severity) -> int:
        """Findings of that severity."""
        return sum(finding.severity is severity for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "dataset": self.dataset,
            "folder": self.folder,
            "facts": self.facts,
            "findings": [asdict(finding) for finding in self.findings],
            "problems": self.number_of(Severity.PROBLEM),
            "warnings": self.number_of(Severity.WARNING),
        }
