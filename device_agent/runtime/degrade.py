"""The degrade engine: which rung of the ladder a device stands on now.

Pure: the caller gives the time and what was observed, and keeps the state. Rules that take effect
hold their rung until they let go; the device goes down at once and up one rung at a time. What is
unknown neither takes effect nor lets go: a sensor that falls silent changes nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Final

from compiler.contract.degrade import Rule, Rung
from compiler.contract.rule_language import COMPARE, RATE_WINDOW_S, All, Any, Comparison, Condition

RECOVERY_S: Final = 30.0
"""Least time on a rung before the next one up, seconds."""
SAMPLE_S: Final = 1.0
"""Least time between two samples of the counters, seconds."""
LEAST_SPAN_S: Final = 5.0
"""A rate is known once samples span this long, seconds."""
_Place = tuple[str, str, int]
_Value = Callable[[Comparison], float | None]


@dataclass(frozen=True, slots=True)
class Counter:
    """A total since the start.

    Attributes:
        own: How much of it degrading itself caused; a rule must not see its own doing.
    """

    total: int
    own: int = 0

    @property
    def foreign(self) -> int:
        """Return what degrading did not cause."""
        return self.total - self.own


@dataclass(frozen=True, slots=True)
class Observation:
    """What is known now: gauges in the units of `SIGNALS`, None or absent = unknown."""

    gauges: Mapping[str, float | None] = field(default_factory=dict)
    counters: Mapping[str, Counter] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    totals: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class DegradeState:
    """What the engine remembers between two steps.

    Attributes:
        rung: Where the device stands.
        moved_at: When it came there; None = it was never moved.
        held: Names of the rules in effect.
    """

    rung: Rung = Rung.NORMAL
    moved_at: float | None = None
    held: frozenset[str] = frozenset()
    acted_at: Mapping[str, float] = field(default_factory=dict)
    since: Mapping[_Place, float] = field(default_factory=dict)
    samples: tuple[_Sample, ...] = ()


@dataclass(frozen=True, slots=True)
class Move:
    """A change of rung and why: the rule that took effect, or empty when recovering."""

    before: Rung
    after: Rung
    rule: str


def degrade_step(
    state: DegradeState,
    rules: Sequence[Rule],
    rungs: Sequence[Rung],
    seen: Observation,
    now: float,
) -> tuple[DegradeState, Move | None]:
    """Return the next state, and the move that was made, if any.

    Args:
        state: From the step before.
        rules: In any order.
        rungs: Those that the bundle has, NORMAL among them; a rule goes to the first at or below
            its own, or to the lowest there is.
        seen: What is observed now.
        now: Monotonic seconds; the same clock at every step.
    """
    samples = _sampled(state.samples, seen, now)
    clock = _Lasting(_values(seen, samples), state.since, now)
    by_name = {rule.name: rule for rule in rules}
    fires = [rule for rule in rules if clock.holds(rule.name, "when", rule.when)]
    leaves = {rule.name for rule in rules if clock.holds(rule.name, "leave", rule.leave)}
    held = frozenset(name for name in state.held if name in by_name) - leaves
    state = replace(state, samples=samples, since=clock.since, held=held)
    ready = [
        rule
        for rule in fires
        if rule.name not in held
        and rule.name not in leaves
        and now - state.acted_at.get(rule.name, -float("inf")) >= rule.cooldown_s
    ]
    if ready:
        return _take_effect(state, max(ready, key=_urgency), rungs, now)
    return _recover(state, [by_name[name] for name in held], rungs, now)


class _Lasting:
    """Whether conditions hold at one step, and since when each of their comparisons does."""

    def __init__(self, values: _Value, before: Mapping[_Place, float], now: float) -> None:
        self._values, self._before, self._now = values, before, now
        self.since: dict[_Place, float] = {}

    def holds(self, rule: str, part: str, condition: Condition) -> bool:
        """Return whether a condition is known to hold, each comparison for as long as it says."""
        numbers = count()
        return _truth(condition, lambda one: self._one((rule, part, next(numbers)), one)) is True

    def _one(self, place: _Place, one: Comparison) -> bool | None:
        value = self._values(one)
        if value is None:
            return None
        if not COMPARE[one.comparator](value, one.limit):
            return False
        self.since[place] = self._before.get(place, self._now)
        return self._now - self.since[place] >= one.for_s


def _urgency(rule: Rule) -> tuple[int, Rung, str]:
    return rule.priority, rule.rung, rule.name


def _take_effect(
    state: DegradeState, rule: Rule, rungs: Sequence[Rung], now: float
) -> tuple[DegradeState, Move | None]:
    state = replace(
        state, held=state.held | {rule.name}, acted_at={**state.acted_at, rule.name: now}
    )
    return _move(state, max(state.rung, _there(rule.rung, rungs)), rule.name, now)


def _recover(
    state: DegradeState, held: Sequence[Rule], rungs: Sequence[Rung], now: float
) -> tuple[DegradeState, Move | None]:
    """Go up one rung if no held rule wants the present one and it was stood on long enough."""
    wanted = max((_there(rule.rung, rungs) for rule in held), default=Rung.NORMAL)
    rested = state.moved_at is None or now - state.moved_at >= RECOVERY_S
    if state.rung <= wanted or not rested:
        return state, None
    above = max((rung for rung in rungs if rung < state.rung), default=Rung.NORMAL)
    return _move(state, max(above, wanted), "", now)


def _move(
    state: DegradeState, rung: Rung, rule: str, now: float
) -> tuple[DegradeState, Move | None]:
    if rung == state.rung:
        return state, None
    return replace(state, rung=rung, moved_at=now), Move(state.rung, rung, rule)


def _there(rung: Rung, rungs: Sequence[Rung]) -> Rung:
    """Return the first rung at or below `rung` that the bundle has, else its lowest."""
    return min((one for one in rungs if one >= rung), default=max(rungs, default=Rung.NORMAL))


def _truth(condition: Condition, holds: Callable[[Comparison], bool | None]) -> bool | None:
    """Return whether a condition holds, None = unknown (Kleene). Every comparison is asked."""
    if isinstance(condition, Comparison):
        return holds(condition)
    parts = [_truth(part, holds) for part in condition.parts]
    decisive = isinstance(condition, Any)
    assert isinstance(condition, All | Any)
    if decisive in parts:
        return decisive
    return None if None in parts else not decisive


def _values(seen: Observation, samples: Sequence[_Sample]) -> Callable[[Comparison], float | None]:
    def value(one: Comparison) -> float | None:
        return _rate(one.name, samples) if one.is_rate else seen.gauges.get(one.name)

    return value


def _rate(name: str, samples: Sequence[_Sample]) -> float | None:
    """Return events per second over the samples; unknown while they span too little."""
    having = [sample for sample in samples if name in sample.totals]
    if not having or (span := having[-1].at - having[0].at) < LEAST_SPAN_S:
        return None
    return (having[-1].totals[name] - having[0].totals[name]) / span


def _sampled(samples: tuple[_Sample, ...], seen: Observation, now: float) -> tuple[_Sample, ...]:
    """Return the samples of the window with the present one; none before a counter that fell."""
    totals = {name: counter.foreign for name, counter in seen.counters.items()}
    last = samples[-1] if samples else None
    if last is not None:
        if any(totals.get(name, total) < total for name, total in last.totals.items()):
            samples = ()
        elif now - last.at < SAMPLE_S:
            return samples
    kept = tuple(sample for sample in samples if now - sample.at <= RATE_WINDOW_S)
    return (*kept, _Sample(now, totals))
