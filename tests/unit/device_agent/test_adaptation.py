"""When a cell moves to another variant: traces of latencies, no clock."""

import random
from collections.abc import Callable, Iterator
from itertools import pairwise

from compiler.contract.policy import Variant
from device_agent.runtime.adaptation import (
    LEAST_WINDOWS,
    MARGIN,
    REST_S,
    WINDOWS,
    CellState,
    adapt,
)

A, B, C = Variant.SHARED, Variant.ALONE, Variant.COARSE
WINDOW_S = 10.0
Truth = Callable[[int], dict[Variant, float]]


def trace(
    truth: Truth, windows: int, noise: float = 0.0, seed: int = 0, step_s: float = WINDOW_S
) -> Iterator[CellState]:
    """Yield the states of a cell that begins as A, window by window."""
    source, state = random.Random(seed), CellState(A)
    for at in range(windows):
        seen = {v: ticks * source.lognormvariate(0.0, noise) for v, ticks in truth(at).items()}
        state = adapt(state, seen, at * step_s)
        yield state


def switches(states: list[CellState]) -> list[int]:
    """Return the windows in which the variant changed."""
    variants = [A, *(state.variant for state in states)]
    return [at for at in range(len(states)) if variants[at] is not variants[at + 1]]


def test_it_moves_to_what_is_clearly_better_and_stays() -> None:
    states = list(trace(lambda _: {A: 100.0, B: 80.0}, 200))
    assert switches(states) == [LEAST_WINDOWS + WINDOWS - 2]
    assert states[-1].variant is B


def test_it_leaves_what_is_better_by_less_than_the_margin() -> None:
    worse = 100.0 * (1.0 - MARGIN) + 0.1
    assert switches(list(trace(lambda _: {A: 100.0, B: worse}, 500))) == []


def test_it_takes_the_best_of_several() -> None:
    states = list(trace(lambda _: {A: 100.0, B: 85.0, C: 60.0}, 50))
    assert [states[-1].variant, len(switches(states))] == [C, 1]


def test_it_does_not_flap_between_equals_on_a_noisy_trace() -> None:
    for seed in range(20):
        states = list(trace(lambda _: {A: 100.0, B: 100.0}, 2_000, 0.1, seed))
        assert len(switches(states)) <= 6, "of 2,000 windows"


def test_it_switches_at_most_once_a_minute_on_the_wildest_trace() -> None:
    def wild(at: int) -> dict[Variant, float]:
        return {A: 100.0, B: 20.0} if at // 12 % 2 else {A: 20.0, B: 100.0}

    for noise in (0.0, 0.5):
        found = switches(list(trace(wild, 3_000, noise, 3, step_s=1.0)))
        assert len(found) > 10
        assert all(after - before >= REST_S for before, after in pairwise(found))


def test_it_follows_a_change_of_the_device() -> None:
    def throttled(at: int) -> dict[Variant, float]:
        return {A: 100.0, B: 130.0} if at < 100 else {A: 200.0, B: 120.0}

    found = switches(list(trace(throttled, 300, 0.05, 1)))
    assert len(found) == 1
    assert 100 < found[0] < 120


def test_one_preempted_window_changes_nothing() -> None:
    def spiky(at: int) -> dict[Variant, float]:
        return {A: 10_000.0 if at % 40 == 39 else 100.0, B: 97.0}

    assert switches(list(trace(spiky, 1_000))) == []


def test_a_window_that_compares_nothing_ends_no_streak_and_counts_for_none() -> None:
    *_, ready = trace(lambda _: {A: 100.0, B: 80.0}, LEAST_WINDOWS)
    assert (ready.challenger, ready.streak) == (B, 1)
    for window in ({A: 100.0}, {B: 80.0}, {}):
        same = adapt(ready, window, 1_000.0)
        assert (same.variant, same.challenger, same.streak) == (A, B, 1)


def test_a_new_challenger_begins_a_streak_of_its_own() -> None:
    def truth(at: int) -> dict[Variant, float]:
        return (
            {A: 100.0, B: 80.0, C: 81.0}
            if at < LEAST_WINDOWS + 1
            else {A: 100.0, B: 120.0, C: 10.0}
        )

    states = list(trace(truth, LEAST_WINDOWS + 2))
    assert (states[-2].challenger, states[-2].streak) == (B, 2)
    assert (states[-1].challenger, states[-1].streak) == (C, 1)
    assert states[-1].variant is A


def test_it_is_a_function_of_its_arguments() -> None:
    state = CellState(A)
    window = {A: 100.0, B: 50.0}
    assert adapt(state, window, 5.0) == adapt(state, window, 5.0)
    assert state == CellState(A)
