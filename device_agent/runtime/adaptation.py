"""Whether a cell of the policy should run otherwise from now on, by the latencies that were seen.

    (state of the cell, latencies of a window, time) -> next state          pure; reads no clock

Each variant has an average: plain over its first windows, then exponentially weighted, so that an
old device, a hot one and a charged one are each judged by what they do now. A reading of more than
`MAX_JUMP` times its average counts as that much: a run that was preempted says nothing of the
variant. A challenger takes over when its average has been `MARGIN` better than the present one's
for `WINDOWS` windows in a row, and the cell has not switched within `REST_S`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from compiler.contract.policy import Variant

MARGIN: Final = 0.08
WINDOWS: Final = 3
REST_S: Final = 60.0
WEIGHT: Final = 0.1
"""Of the newest window in an average."""
MAX_JUMP: Final = 1.5
LEAST_WINDOWS: Final = 5
"""A variant is compared when it was seen in so many windows."""


@dataclass(frozen=True, slots=True)
class Average:
    """What a variant took lately, in ticks a run, over so many windows."""

    ticks: float
    windows: int

    def seen(self, ticks: float) -> "Average":
        """Return it after another window."""
        weight = max(WEIGHT, 1.0 / (self.windows + 1))
        step = min(ticks, MAX_JUMP * self.ticks) - self.ticks
        return Average(self.ticks + weight * step, self.windows + 1)


@dataclass(frozen=True, slots=True)
class CellState:
    """What is known of one cell.

    Attributes:
        variant: How it runs.
        averages: By variant.
        challenger: Who was better in the last windows, None if nobody.
        streak: In how many windows running.
        switched_at_s: When it last switched, seconds of any steady clock; None for never.
    """

    variant: Variant
    averages: Mapping[Variant, Average] = field(default_factory=dict)
    challenger: Variant | None = None
    streak: int = 0
    switched_at_s: float | None = None


def adapt(state: CellState, window: Mapping[Variant, float], at_s: float) -> CellState:
    """Return the state of a cell after a window.

    Args:
        state: Before it.
        window: Mean ticks of a run, by variant, of those that ran.
        at_s: When it ended, seconds; never before the last one.
    """
    averages = dict(state.averages)
    for variant, ticks in window.items():
        known = averages.get(variant)
        averages[variant] = Average(ticks, 1) if known is None else known.seen(ticks)
    state = replace(state, averages=MappingProxyType(averages))
    if state.variant not in window or len(window) == 1:
        return state  # nothing was compared
    better = _better(state)
    if better is None:
        return replace(state, challenger=None, streak=0)
    streak = state.streak + 1 if better is state.challenger else 1
    is_rested = state.switched_at_s is None or at_s - state.switched_at_s >= REST_S
    if streak < WINDOWS or not is_rested:
        return replace(state, challenger=better, streak=streak)
    return replace(state, variant=better, challenger=None, streak=0, switched_at_s=at_s)


def _better(state: CellState) -> Variant | None:
    """Return the best variant if it is so much better than the present one."""
    able = {v: each for v, each in state.averages.items() if each.windows >= LEAST_WINDOWS}
    present = able.get(state.variant)
    if present is None:
        return None
    best = min(able, key=lambda variant: able[variant].ticks)
    return best if able[best].ticks <= (1.0 - MARGIN) * present.ticks else None
