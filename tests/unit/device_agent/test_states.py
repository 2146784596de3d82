from itertools import product
from pathlib import Path

import pytest

from compiler.contract.protocol import UpdateState
from device_agent.states import (
    CANCELLABLE,
    MUST_FINISH,
    REPORTS,
    TRANSITIONS,
    Event,
    IllegalEventError,
    SlotFact,
    State,
    mermaid,
    next_state,
    resumed_state,
)
from fleet.states import REPORT_EVENTS

RUNBOOK = Path(__file__).resolve().parents[3] / "docs" / "runbooks" / "agent.md"


@pytest.mark.parametrize(("state", "event"), list(product(State, Event)))
def test_it_follows_the_table_or_refuses(state: State, event: Event) -> None:
    if (state, event) in TRANSITIONS:
        assert next_state(state, event) is TRANSITIONS[state, event]
    else:
        with pytest.raises(IllegalEventError):
            next_state(state, event)


def test_it_comes_back_to_idle_from_everywhere() -> None:
    reached = {State.IDLE}
    while True:
        more = {state for (state, _), target in TRANSITIONS.items() if target in reached} - reached
        if not more:
            break
        reached |= more
    assert reached == set(State)


def test_it_can_stop_every_state_that_must_not_finish() -> None:
    stoppable = {state for state, event in TRANSITIONS if event is Event.ERROR}
    assert stoppable == set(State) - MUST_FINISH - {State.IDLE}


def test_it_rolls_back_exactly_after_the_point_of_no_return() -> None:
    for state in CANCELLABLE:
        assert TRANSITIONS[state, Event.ERROR] is State.CLEANING
    for state in (State.ACTIVATING, State.PROBATION):
        assert TRANSITIONS[state, Event.ERROR] is State.ROLLING_BACK


def test_it_reports_only_states_that_a_device_may_report() -> None:
    for states in REPORTS.values():
        assert set(states) <= set(REPORT_EVENTS)
    assert UpdateState.SUCCEEDED in REPORT_EVENTS


@pytest.mark.parametrize(("state", "fact"), list(product(State, SlotFact)))
def test_it_resumes_where_the_slots_say(state: State, fact: SlotFact) -> None:
    expected = {
        (State.ACTIVATING, SlotFact.ON_TRIAL): State.PROBATION,
        (State.PROBATION, SlotFact.NOT_RUNNING): State.ROLLING_BACK,
        (State.PROBATION, SlotFact.COMMITTED): State.COMMITTING,
    }.get((state, fact), state)
    assert resumed_state(state, fact) is expected


def test_it_has_its_diagram_in_the_runbook() -> None:
    assert mermaid() in RUNBOOK.read_text(encoding="utf-8")
