from collections.abc import Mapping

import pytest

from compiler.contract.selftest import SelfTestRun
from device_agent.runtime.threads import BUDGET_S, choose, counts, tune_threads

RUN = SelfTestRun("see", 0, {"image": b"x"}, {})


class Plan:
    """A plan whose run takes a known time by number of threads."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        self.seconds = seconds
        self.threads = 1
        self.kv_length = 0
        self.now = 100.0

    def run(self, program: str, inputs: Mapping[str, object]) -> Mapping[str, memoryview]:
        assert (program, inputs) == ("see", RUN.inputs)
        assert self.kv_length == 0, "a run of the self-test starts with an empty cache"
        self.kv_length = 7
        self.now += self.seconds[self.threads]
        return {}


@pytest.mark.parametrize(
    ("most", "expected"),
    [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (4, (1, 2, 4)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))],
)
def test_it_measures_powers_of_two_and_all(most: int, expected: tuple[int, ...]) -> None:
    assert counts(most) == expected


def test_it_takes_the_fewest_threads_that_are_nearly_the_fastest() -> None:
    assert choose({1: [1.0], 2: [0.55], 4: [0.51], 8: [0.5]}) == 2
    assert choose({1: [1.0], 2: [1.2], 4: [3.0]}) == 1
    assert choose({1: [1.05, 9.0, 1.0], 2: [1.0, 1.0, 0.99]}) == 1


@pytest.mark.parametrize(
    ("seconds", "threads"),
    [({1: 1e-3, 2: 0.6e-3}, 2), ({1: 1e-4, 2: 2e-4}, 1), ({1: 5e-4, 2: 4.8e-4}, 1)],
)
def test_it_chooses_by_time_within_its_budget(seconds: Mapping[int, float], threads: int) -> None:
    plan = Plan(seconds)
    choice = tune_threads(plan, RUN, 2, lambda: plan.now)
    assert choice.threads == plan.threads == threads
    assert choice.seconds == pytest.approx(seconds)
    assert plan.kv_length == 0
    assert plan.now - 100.0 < BUDGET_S + 4 * max(seconds.values())


def test_it_does_not_measure_what_takes_long() -> None:
    plan = Plan({1: 0.4, 8: 0.1})
    choice = tune_threads(plan, RUN, 8, lambda: plan.now)
    assert (choice.threads, choice.seconds) == (8, {})
    assert plan.now == pytest.approx(100.4)


def test_it_measures_nothing_where_there_is_no_choice() -> None:
    plan = Plan({1: 0.001})
    assert tune_threads(plan, RUN, 1, lambda: plan.now).threads == 1
    assert plan.now == 100.0
