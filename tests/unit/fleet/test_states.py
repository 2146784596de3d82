"""Every pair of state and event is in the table or refused; ends absorb."""

from itertools import product

import pytest

from builds.common.errors import IllegalTransitionError
from builds.common.statemachine import next_state
from compiler.contract.protocol import TERMINAL_STATES, UpdateState
from fleet import states

TABLES = {
    "update": (states.UPDATE_TRANSITIONS, states.UpdateState, states.UpdateEvent),
    "rollout": (states.ROLLOUT_TRANSITIONS, states.RolloutState, states.RolloutEvent),
    "stage": (states.STAGE_TRANSITIONS, states.StageState, states.StageEvent),
    "device": (states.DEVICE_TRANSITIONS, states.DeviceState, states.DeviceEvent),
}


@pytest.mark.parametrize("name", TABLES)
def test_it_knows_or_refuses_every_pair(name):
    table, state_type, event_type = TABLES[name]
    known = 0
    for state, event in product(state_type, event_type):
        if (state, event) in table:
            assert next_state(table, state, event) == table[state, event]
            known += 1
        else:
            with pytest.raises(IllegalTransitionError):
                next_state(table, state, event)
    assert known == len(table)


@pytest.mark.parametrize("name", TABLES)
def test_it_reaches_every_state_and_uses_every_event(name):
    table, state_type, event_type = TABLES[name]
    start = next(iter(state_type))
    reached, frontier = {start}, [start]
    while frontier:
        here = frontier.pop()
        for (state, _), target in table.items():
            if state == here and target not in reached:
                reached.add(target)
                frontier.append(target)
    assert reached == set(state_type)
    assert {event for _, event in table} == set(event_type)


def test_it_never_leaves_a_terminal_update():
    assert not [state for state, _ in states.UPDATE_TRANSITIONS if state in TERMINAL_STATES]


def test_it_has_no_way_out_of_an_ended_rollout_but_the_way_back():
    ended = {"succeeded", "rolled_back", "failed", "stopped"}
    ways = [(s, e) for s, e in states.ROLLOUT_TRANSITIONS if s.value in ended]
    assert ways == [(states.RolloutState.STOPPED, states.RolloutEvent.ROLL_BACK)]


def test_it_jumps_over_lost_reports_but_never_back_over_an_activation():
    order = list(states.PROGRESS)
    for (state, event), target in states.UPDATE_TRANSITIONS.items():
        if state in order and target in order and order.index(target) < order.index(state):
            assert event == states.UpdateEvent.DOWNLOAD
            assert order.index(state) < order.index(UpdateState.ACTIVATING)


def test_it_cancels_nothing_that_is_being_switched_on():
    assert UpdateState.ACTIVATING not in states.CANCELLABLE_STATES
    assert UpdateState.PROBATION not in states.CANCELLABLE_STATES
    assert UpdateState.STAGED in states.CANCELLABLE_STATES
    cancellable = {s for s, e in states.UPDATE_TRANSITIONS if e == states.UpdateEvent.CANCEL}
    assert cancellable == states.CANCELLABLE_STATES


def test_it_has_an_event_for_every_state_a_device_may_report():
    reportable = set(states.REPORT_EVENTS)
    assert UpdateState.QUEUED not in reportable
    assert UpdateState.SUPERSEDED not in reportable
    assert {UpdateState.DOWNLOADING, UpdateState.SUCCEEDED, UpdateState.REJECTED} <= reportable
