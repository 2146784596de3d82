"""The degrade engine over time: down at once, up one rung at a time, never by its own doing."""

from collections.abc import Sequence
from random import Random

import pytest

from compiler.contract.degrade import Rule, Rung, parse_rules, rules_bytes
from device_agent.runtime.degrade import (
    RECOVERY_S,
    Counter,
    DegradeState,
    Move,
    Observation,
    degrade_step,
)

ALL = tuple(Rung)


def rule(name: str = "hot", **changes: object) -> Rule:
    row = {
        "name": name,
        "when": "temperature > 55 C",
        "leave": "temperature < 50 C",
        "rung": "fewer_experts",
        "priority": 5,
        "cooldown_s": 60,
        **changes,
    }
    return parse_rules(rules_bytes([row]))[0]


FAULTY = rule(when="rate(faults) > 1", leave="rate(faults) < 0.5", cooldown_s=0)


def gauge(**values: float | None) -> Observation:
    return Observation(gauges=values)


def run(
    rules: Sequence[Rule],
    seen: Sequence[Observation],
    rungs: Sequence[Rung] = ALL,
    every: float = 1.0,
) -> list[tuple[float, Move]]:
    """Return the moves, with their times, of a second-by-second trace."""
    state, moves = DegradeState(), []
    for at, observation in enumerate(seen):
        state, move = degrade_step(state, rules, rungs, observation, at * every)
        if move is not None:
            moves.append((at * every, move))
    return moves


def test_it_goes_down_at_once_and_up_one_rung_at_a_time() -> None:
    trace = [gauge(temperature=60)] * 5 + [gauge(temperature=40)] * 120
    assert run([rule()], trace) == [
        (0, Move(Rung.NORMAL, Rung.FEWER_EXPERTS, "hot")),
        (RECOVERY_S, Move(Rung.FEWER_EXPERTS, Rung.FEWER_BITS, "")),
        (2 * RECOVERY_S, Move(Rung.FEWER_BITS, Rung.NO_PREFETCH, "")),
        (3 * RECOVERY_S, Move(Rung.NO_PREFETCH, Rung.NORMAL, "")),
    ]


def test_between_the_two_limits_nothing_moves() -> None:
    random = Random(3)
    noise = [gauge(temperature=random.uniform(50, 55)) for _ in range(600)]
    assert run([rule()], noise) == []
    held = run([rule()], [gauge(temperature=56), *noise])
    assert held == [(0, Move(Rung.NORMAL, Rung.FEWER_EXPERTS, "hot"))]


def test_a_condition_must_last() -> None:
    lasting = rule(when="temperature > 55 C for 10 s")
    broken = ([gauge(temperature=60)] * 9 + [gauge(temperature=54)]) * 20
    assert run([lasting], broken) == []
    assert run([lasting], [gauge(temperature=60)] * 12)[0][0] == 10


def test_it_waits_before_it_acts_again() -> None:
    trace = ([gauge(temperature=60)] + [gauge(temperature=40)] * 44) * 4
    times = [at for at, move in run([rule(cooldown_s=100)], trace) if move.rule]
    assert times == [0, 135]


def test_of_several_the_most_urgent_acts_and_one_a_time() -> None:
    rules = [
        rule("hot", priority=1, rung="no_prefetch"),
        rule(
            "full",
            when="memory_pressure > 90 %",
            leave="memory_pressure < 70 %",
            rung="shared_only",
            priority=9,
        ),
    ]
    trace = [gauge(temperature=60, memory_pressure=95)] * 3
    assert run(rules, trace) == [(0, Move(Rung.NORMAL, Rung.SHARED_ONLY, "full"))]
    state = DegradeState()
    for at, expected in ((0.0, {"full"}), (1.0, {"full", "hot"})):
        state, _ = degrade_step(state, rules, ALL, trace[0], at)
        assert state.held == expected


def test_a_rule_in_effect_stops_the_way_up() -> None:
    rules = [
        rule("hot", rung="no_prefetch"),
        rule(
            "full",
            when="memory_pressure > 90 %",
            leave="memory_pressure < 70 %",
            rung="shared_only",
        ),
    ]
    trace = [gauge(temperature=60, memory_pressure=95)] * 2
    trace += [gauge(temperature=60, memory_pressure=10)] * 300
    assert [move.after for _, move in run(rules, trace)] == [
        Rung.SHARED_ONLY,
        Rung.FEWER_EXPERTS,
        Rung.FEWER_BITS,
        Rung.NO_PREFETCH,
    ]


@pytest.mark.parametrize("silent", [gauge(), gauge(temperature=None)])
def test_what_is_unknown_changes_nothing(silent: Observation) -> None:
    assert run([rule()], [silent] * 100) == []
    held = run([rule()], [gauge(temperature=60)] + [silent] * 300)
    assert [move.after for _, move in held] == [Rung.FEWER_EXPERTS]


def test_unknown_beside_known_is_decided_where_it_can_be() -> None:
    either = rule(when="temperature > 55 C or memory_pressure > 90 %")
    both = rule(when="temperature > 55 C and memory_pressure > 90 %")
    seen = [gauge(memory_pressure=95)]
    assert len(run([either], seen)) == 1
    assert run([both], seen) == []


class TestRates:
    def trace(self, totals: Sequence[int], owns: Sequence[int] = ()) -> list[Observation]:
        owns = owns or [0] * len(totals)
        return [
            Observation(counters={"faults": Counter(total, own)})
            for total, own in zip(totals, owns, strict=True)
        ]

    def test_it_sees_events_per_second_not_totals(self) -> None:
        assert run([FAULTY], self.trace([1_000_000] * 200)) == []
        moves = run([FAULTY], self.trace([2 * at for at in range(20)]))
        assert [at for at, _ in moves] == [5]

    def test_it_forgets_what_is_over(self) -> None:
        totals = [2 * min(at, 30) for at in range(400)]
        moves = run([FAULTY], self.trace(totals))
        assert moves[0][1].after is Rung.FEWER_EXPERTS
        assert moves[-1][1].after is Rung.NORMAL
        assert moves[1][0] > 30

    def test_its_own_doing_does_not_count(self) -> None:
        totals = [3 * at for at in range(60)]
        assert run([FAULTY], self.trace(totals, owns=totals)) == []

    def test_a_counter_that_begins_again_is_no_rate(self) -> None:
        totals = [at % 7 for at in range(100)]
        assert run([FAULTY], self.trace(totals)) == []

    def test_many_steps_a_second_keep_few_samples(self) -> None:
        state = DegradeState()
        for at in range(2_000):
            seen = Observation(counters={"faults": Counter(at)})
            state, _ = degrade_step(state, [FAULTY], ALL, seen, at * 0.1)
        assert len(state.samples) <= 62
        assert state.rung is Rung.FEWER_EXPERTS


class TestLadder:
    @pytest.mark.parametrize(
        ("rungs", "after"),
        [
            ((Rung.NORMAL, Rung.FEWER_EXPERTS, Rung.NARROW_DENSE), Rung.FEWER_EXPERTS),
            ((Rung.NORMAL, Rung.NARROW_DENSE), Rung.NARROW_DENSE),
            ((Rung.NORMAL, Rung.NO_PREFETCH), Rung.NO_PREFETCH),
        ],
    )
    def test_a_rung_that_a_bundle_lacks_is_passed(
        self, rungs: tuple[Rung, ...], after: Rung
    ) -> None:
        moves = run([rule()], [gauge(temperature=60)] + [gauge(temperature=40)] * 100, rungs)
        assert [move.after for _, move in moves] == [after, Rung.NORMAL]

    def test_a_bundle_without_a_ladder_stays(self) -> None:
        assert run([rule()], [gauge(temperature=60)] * 50, (Rung.NORMAL,)) == []


def test_rules_that_are_gone_hold_nothing() -> None:
    state, _ = degrade_step(DegradeState(), [rule()], ALL, gauge(temperature=60), 0.0)
    for at in range(1, 200):
        state, _ = degrade_step(state, [], ALL, gauge(temperature=60), float(at))
    assert (state.rung, state.held) == (Rung.NORMAL, frozenset())
