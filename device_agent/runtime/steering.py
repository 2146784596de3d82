"""How routers are steered here and now: a pure rule from the machine's state to a record.

    pressure, temperature, battery, rung -(next_steering)-> state, Steering

Without pressure the coefficients are the bundle's `always`: sure tokens take one expert. As memory
gets short, absent experts are pulled down by `clamp((pressure - 0.5) * 2, 0, 1)` of the bundle's
greatest pull, in eighths; where not all experts fit, and in heat or on a low battery, because each
load costs time and energy, in full.
Above a pressure of 0.7 nothing absent is loaded. On a rung with fewer experts a token takes one.
Each of these is left at another value than it is entered at, so that none flutters. Heat acts on
pull and number of experts: a constant taken from all logits would change nothing.
"""

from dataclasses import dataclass, replace
from typing import Final

from compiler.contract.steering import Steering
from compiler.contract.steering_points import SteeringPoints

LEVELS: Final = 8
STAY: Final = 0.75
"""A level is left when the pressure is so many levels away from it."""
FIRST_PRESSURE: Final = 0.5
SMOOTHING: Final = 0.5
"""Weight of the newest pressure in its mean."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """A state that is entered at one value and left at another."""

    enter: float
    leave: float

    def holds(self, before: bool, value: float | None) -> bool:
        """Return whether it holds at `value`; a silent sensor leaves it as it was."""
        if value is None:
            return before
        up = self.enter > self.leave
        bound = self.leave if before else self.enter
        return value > bound if up else value < bound


HOT_C: Final = Threshold(85.0, 80.0)
"""Of the hottest zone, the die's."""
BATTERY: Final = Threshold(15.0, 20.0)
"""Percent."""
NO_LOADS: Final = Threshold(0.7, 0.65)
"""Pressure above which absent experts are not loaded."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a decision goes by; None = no sensor says.

    Attributes:
        pressure: Share of the memory that is taken, 0 to 1.
        temperature: Degrees Celsius.
        battery: Percent.
        fewer: Whether a rung asks for the fewest experts.
        paged: Whether experts come as they are needed, because not all of them fit.
    """

    pressure: float | None = None
    temperature: float | None = None
    battery: float | None = None
    fewer: bool = False
    paged: bool = False


@dataclass(frozen=True, slots=True)
class SteerState:
    """Where a device stands.

    Attributes:
        pressure: Mean pressure; None before the first one.
        level: Eighths of the greatest pull.
        is_hot, is_low, is_full: Heat, battery and memory are beyond their thresholds.
    """

    pressure: float | None = None
    level: int = 0
    is_hot: bool = False
    is_low: bool = False
    is_full: bool = False


def next_steering(
    points: SteeringPoints, state: SteerState, seen: Machine
) -> tuple[SteerState, Steering]:
    """Return the state and the record to follow, without a bias; pure.

    Args:
        points: The bundle's `steering` section.
        state: The state before.
        seen: What the sensors say now.
    """
    pressure = _mean(state.pressure, seen.pressure)
    after = SteerState(
        pressure,
        state.level if pressure is None else _level(state.level, pressure),
        HOT_C.holds(state.is_hot, seen.temperature),
        BATTERY.holds(state.is_low, seen.battery),
        NO_LOADS.holds(state.is_full, pressure),
    )
    level = LEVELS if after.is_hot or after.is_low or seen.paged else after.level
    chosen = points.points[points.pressed if level else points.always]
    record = chosen.steering(level / LEVELS)
    return after, replace(record, max_k=int(seen.fewer), may_load=not after.is_full)


def _mean(before: float | None, value: float | None) -> float | None:
    if value is None or before is None:
        return before if value is None else value
    return before + (value - before) * SMOOTHING


def _level(before: int, pressure: float) -> int:
    """Return the eighths of the pull: the nearest, or the present one while it is near."""
    wanted = min(1.0, max(0.0, (pressure - FIRST_PRESSURE) * 2)) * LEVELS
    return before if abs(wanted - before) < STAY else round(wanted)
