"""What a device makes of its state: records with hysteresis, kept by a clock."""

from dataclasses import replace

import pytest

from compiler.contract.steering import Steering
from compiler.contract.steering_points import Point, SteeringPoints
from device_agent.config import AgentConfig
from device_agent.errors import ConfigurationError
from device_agent.runtime.steering import Machine, SteerState, next_steering

NOTHING = Point(mean_k=2000, misses=500)
ALWAYS = Point(margin=800, mean_k=1800, misses=450, worse=1, better=2)
PRESSED = Point(pull=400, margin=800, mean_k=1800, misses=200, worse=2, better=2)
POINTS = SteeringPoints(1000, 900, 500, 500, 5_000, 10_000, 1, 2, (NOTHING, ALWAYS, PRESSED))


def settle(seen: Machine, state: SteerState | None = None) -> tuple[SteerState, Steering]:
    """Return where a device comes to when nothing changes any more."""
    state = state or SteerState()
    for _ in range(20):
        state, record = next_steering(POINTS, state, seen)
    assert next_steering(POINTS, state, seen)[1] == record
    return state, record


def test_without_sensors_it_follows_what_is_always_allowed() -> None:
    assert settle(Machine())[1] == Steering(margin=0.8)
    assert settle(Machine(pressure=0.3))[1] == Steering(margin=0.8)


@pytest.mark.parametrize(
    ("pressure", "pull"), [(0.5, 0.0), (0.625, 0.1), (0.75, 0.2), (0.875, 0.3), (1.0, 0.4)]
)
def test_it_pulls_by_the_pressure(pressure: float, pull: float) -> None:
    assert settle(Machine(pressure=pressure))[1].pull == pytest.approx(pull)


def test_a_pressure_that_trembles_changes_nothing() -> None:
    state, record = settle(Machine(pressure=0.8))
    for at in range(40):
        state, found = next_steering(POINTS, state, Machine(pressure=0.8 + 0.03 * (-1) ** at))
        assert found == record


def test_pressure_is_a_mean() -> None:
    state, _ = settle(Machine(pressure=0.2))
    state, record = next_steering(POINTS, state, Machine(pressure=1.0))
    assert record.pull < 0.4
    assert record.may_load
    assert not settle(Machine(pressure=1.0), state)[1].may_load


def test_above_a_bound_nothing_is_loaded_until_well_below_it() -> None:
    state, record = settle(Machine(pressure=0.69))
    assert record.may_load
    state, record = settle(Machine(pressure=0.71), state)
    assert not record.may_load
    state, record = settle(Machine(pressure=0.66), state)
    assert not record.may_load
    _, record = settle(Machine(pressure=0.64), state)
    assert record.may_load


@pytest.mark.parametrize(
    ("name", "enter", "between", "leave"),
    [("temperature", 86.0, 82.0, 79.0), ("battery", 14.0, 18.0, 21.0)],
)
def test_heat_and_a_low_battery_pull_in_full(
    name: str, enter: float, between: float, leave: float
) -> None:
    def at(value: float | None, state: SteerState) -> tuple[SteerState, Steering]:
        return next_steering(POINTS, state, replace(Machine(), **{name: value}))

    state, record = at(between, SteerState())
    assert record.pull == 0
    state, record = at(enter, state)
    assert record.pull == pytest.approx(0.4)
    state, record = at(between, state)
    assert record.pull == pytest.approx(0.4)
    state, record = at(None, state)
    assert record.pull == pytest.approx(0.4)
    state, record = at(leave, state)
    assert record.pull == 0


def test_where_not_all_experts_fit_it_pulls_in_full_and_loads() -> None:
    record = settle(Machine(pressure=0.3, paged=True))[1]
    assert record.pull == pytest.approx(0.4)
    assert record.may_load


def test_a_rung_takes_one_expert() -> None:
    assert settle(Machine(fewer=True))[1].max_k == 1
    assert settle(Machine())[1].max_k == 0


def test_it_can_be_switched_off() -> None:
    assert AgentConfig().steering == "auto"
    assert AgentConfig(steering="off").steering == "off"
    with pytest.raises(ConfigurationError, match="steering"):
        AgentConfig(steering="on")
