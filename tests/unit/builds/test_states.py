"""The state tables: every pair is in the table or refused, and the printed diagrams are fresh."""

from itertools import product

import pytest
from django.core.management import call_command

from builds.common.errors import IllegalTransitionError
from builds.common.statemachine import next_state
from builds.states import (
    BUILD_FINAL,
    BUILD_TRANSITIONS,
    DELTA_FINAL,
    DELTA_TRANSITIONS,
    VERSION_TRANSITIONS,
    BuildEvent,
    BuildState,
    DeltaEvent,
    DeltaState,
    VersionEvent,
    VersionState,
)

MACHINES = [
    (VERSION_TRANSITIONS, VersionState, VersionEvent),
    (BUILD_TRANSITIONS, BuildState, BuildEvent),
    (DELTA_TRANSITIONS, DeltaState, DeltaEvent),
]


@pytest.mark.parametrize(("table", "states", "events"), MACHINES)
def test_it_allows_only_what_the_table_lists(table, states, events) -> None:
    for state, event in product(states, events):
        if (state, event) in table:
            assert next_state(table, state, event) is table[state, event]
        else:
            with pytest.raises(IllegalTransitionError):
                next_state(table, state, event)


@pytest.mark.parametrize(("table", "states", "events"), MACHINES)
def test_it_reaches_every_state_and_uses_every_event(table, states, events) -> None:
    start = next(iter(states))
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        for (old, _), new in table.items():
            if old is state and new not in seen:
                seen.add(new)
                todo.append(new)
    assert seen == set(states)
    assert {event for _, event in table} == set(events)


def test_it_leaves_a_final_state_only_by_a_persons_retry() -> None:
    assert {event for (state, event) in BUILD_TRANSITIONS if state in BUILD_FINAL} == {
        BuildEvent.RETRY
    }
    assert {event for (state, event) in DELTA_TRANSITIONS if state in DELTA_FINAL} == {
        DeltaEvent.RETRY
    }


def test_it_has_fresh_diagrams_of_every_table() -> None:
    call_command("states_print", "--check")
