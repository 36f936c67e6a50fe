"""The one-way phase machine (spec/framework 1.3)."""

import pytest

from renaissance.core.enums import Phase
from renaissance.core.errors import PhaseError
from renaissance.core.phase import PhaseMachine


def machine_in(phase: Phase) -> PhaseMachine:
    machine = PhaseMachine()
    for step in list(Phase)[1 : phase + 1]:
        machine.advance("setup", step)
    return machine


def test_phases_advance_one_step_at_a_time() -> None:
    machine = PhaseMachine()
    assert machine.phase is Phase.PLANNING
    machine.advance("finalize_memory", Phase.MEMORY_LOCKED)
    machine.advance("compile", Phase.COMPILED)
    assert machine.phase is Phase.COMPILED


@pytest.mark.parametrize("current", list(Phase))
@pytest.mark.parametrize("wanted", list(Phase))
def test_every_other_transition_is_an_error(current: Phase, wanted: Phase) -> None:
    machine = machine_in(current)
    if wanted == current + 1:
        machine.advance("step", wanted)
        return
    with pytest.raises(PhaseError, match=f"step: no transition from {current.name} to {wanted.name}"):
        machine.advance("step", wanted)
    assert machine.phase is current


@pytest.mark.parametrize("current", list(Phase))
@pytest.mark.parametrize("needed", list(Phase))
def test_require_names_operation_and_both_phases(current: Phase, needed: Phase) -> None:
    machine = machine_in(current)
    if needed is current:
        machine.require("alloc", needed)
        return
    with pytest.raises(PhaseError, match=f"alloc needs phase {needed.name}, but the task is in {current.name}: "):
        machine.require("alloc", needed)


def test_phase_errors_are_value_errors_too() -> None:
    with pytest.raises(ValueError, match=r"run needs phase COMPILED.*call compile"):
        PhaseMachine().require("run", Phase.COMPILED)
