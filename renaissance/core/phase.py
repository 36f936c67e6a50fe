"""The one-way phase machine PLANNING -> MEMORY_LOCKED -> COMPILED and its errors (spec/framework 1.3)."""

from __future__ import annotations

from renaissance.core.enums import Phase
from renaissance.core.errors import PhaseError


class PhaseMachine:
    """Holds the current phase of one task; ``require`` guards operations, ``advance`` moves one step on."""

    def __init__(self) -> None:
        self._phase = Phase.PLANNING

    @property
    def phase(self) -> Phase:
        return self._phase

    def require(self, operation: str, needed: Phase) -> None:
        """Raise PhaseError naming ``operation`` unless the current phase is ``needed``."""
        if self._phase is not needed:
            hint = {
                Phase.PLANNING: "call it before compile(); a compiled task cannot be changed, make a new one",
                Phase.MEMORY_LOCKED: "it belongs between finalize_memory() and compile()",
                Phase.COMPILED: "call compile() first",
            }[needed]
            raise PhaseError(f"{operation} needs phase {needed.name}, but the task is in {self._phase.name}: {hint}")

    def advance(self, operation: str, to: Phase) -> None:
        """Move to the next phase; any other transition raises PhaseError."""
        if to != self._phase + 1:
            raise PhaseError(
                f"{operation}: no transition from {self._phase.name} to {to.name}; phases only advance one step"
            )
        self._phase = to
