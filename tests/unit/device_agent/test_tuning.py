"""Cells measured at load and kept at run time, on a plan whose calls take known ticks."""

from collections.abc import Callable, Mapping

import pytest

from compiler.contract.native_policy import PublishedPolicy
from compiler.contract.policy import CELLS, CallKind, Cell, Policy, Variant
from compiler.contract.selftest import SelfTestRun
from device_agent.runtime.adaptation import LEAST_WINDOWS, REST_S, WINDOWS
from device_agent.runtime.cells import (
    LEAST_ROUNDS,
    doubtful_choices,
    legal_choices,
    measure_cells,
    tables,
)
from device_agent.runtime.keeper import TRIAL_EVERY, WINDOW_ANSWERS, PolicyKeeper

SMALL, LARGE = Cell(CallKind.LINEAR, 0, 0, 6).index, Cell(CallKind.LINEAR, 4, 0, 6).index
GUARDED, PLAIN = Cell(CallKind.CHECKED, 2, 1, 6).index, Cell(CallKind.OTHER, 0, 0, 6).index
RUNS = (SelfTestRun("see", 0, {}, {}), SelfTestRun("step", 7, {}, {}))
A, B, C, U = Variant.SHARED, Variant.ALONE, Variant.COARSE, Variant.UNCHECKED
Cost = Callable[[int, Variant], int]


class Seat:
    """Publishes tables; the plan below reads the present one."""

    is_supported = True

    def __init__(self) -> None:
        self.present: PublishedPolicy | None = None
        self.made: list[PublishedPolicy] = []

    def publish(self, variants: bytes) -> PublishedPolicy:
        self.made.append(PublishedPolicy(variants, len(self.made) + 1))
        self.present = self.made[-1]
        return self.present

    def use(self, published: PublishedPolicy) -> None:
        assert published in self.made
        self.present = published


class Plan:
    """A plan whose cells take `cost(cell, variant)` ticks of a microsecond each."""

    def __init__(self, cost: Cost) -> None:
        self.cost, self.policy, self.threads = cost, Seat(), 2
        self.kv_length, self.now, self.runs = 0, 50.0, 0

    def run(self, program: str, inputs: Mapping[str, object]) -> Mapping[str, memoryview]:
        assert self.kv_length == (0 if program == "see" else 7)
        self.kv_length = 7
        present, self.runs = self.policy.present, self.runs + 1
        for at in (SMALL, LARGE, GUARDED, PLAIN):
            ticks = self.cost(at, Variant(present.variants[at]))
            present._meters[at].ticks += ticks
            present._meters[at].runs += 1
            self.now += ticks * 1e-6
        return {}

    def answer(self) -> None:
        self.kv_length = 0
        self.run("see", {})


def cost(at: int, variant: Variant) -> int:
    """Return ticks: small calls are fast alone, large ones coarse, the guarded one unchecked."""
    best = {SMALL: B, LARGE: C, GUARDED: U, PLAIN: A}[at]
    return 100 if variant is best else 130


def policy(*doubtful: int) -> Policy:
    doubts = bytearray(CELLS)
    for at in doubtful:
        doubts[at] = 1 << A | (1 << U if at == GUARDED else 1 << B | 1 << C)
    return Policy(bytes(CELLS), bytes(doubts))


def test_it_measures_the_cells_in_doubt_and_no_others() -> None:
    plan = Plan(cost)
    found = measure_cells(plan, policy(SMALL, GUARDED), RUNS, 0.05, lambda: plan.now)
    expected = bytearray(CELLS)
    expected[SMALL], expected[GUARDED] = B, U
    assert found.variants == bytes(expected) == plan.policy.present.variants
    assert found.gains == {SMALL: pytest.approx(1.3), GUARDED: pytest.approx(1.3)}
    assert found.rounds >= LEAST_ROUNDS
    assert found.seconds <= 0.05
    assert plan.kv_length == 0


def test_it_keeps_a_default_that_is_hardly_worse() -> None:
    plan = Plan(lambda _at, variant: 100 if variant is A else 98)
    found = measure_cells(plan, policy(SMALL, LARGE), RUNS, 0.05, lambda: plan.now)
    assert found.variants == bytes(CELLS)
    assert found.gains == {SMALL: 1.0, LARGE: 1.0}


def test_what_disturbs_a_round_does_not_decide() -> None:
    plan = Plan(cost)
    plan.cost = lambda at, variant: cost(at, variant) * (20 if plan.runs % 5 == 0 else 1)
    found = measure_cells(plan, policy(SMALL), RUNS, 0.5, lambda: plan.now)
    assert found.variants[SMALL] == B


def test_it_measures_nothing_that_does_not_fit_the_budget() -> None:
    plan = Plan(lambda _at, _variant: 4_000)
    found = measure_cells(plan, policy(SMALL, LARGE), RUNS, 0.05, lambda: plan.now)
    assert (found.rounds, found.gains, found.variants) == (0, {}, bytes(CELLS))
    assert plan.now - 50.0 < 0.05
    assert plan.policy.present.variants == bytes(CELLS)


def test_it_ends_within_the_budget_when_the_machine_slows_down() -> None:
    plan = Plan(cost)
    plan.cost = lambda at, variant: cost(at, variant) * (1 if plan.runs < 8 else 12)
    found = measure_cells(plan, policy(SMALL), RUNS, 0.02, lambda: plan.now)
    assert found.rounds == 0
    assert found.variants == bytes(CELLS) == plan.policy.present.variants
    assert plan.now - 50.0 < 0.02 + 3 * 2 * 4 * 130 * 12e-6


def test_it_measures_nothing_without_doubts_or_other_threads() -> None:
    plan = Plan(cost)
    assert measure_cells(plan, policy(), RUNS, 0.05, lambda: plan.now).rounds == 0
    assert doubtful_choices(policy(SMALL, GUARDED), (SMALL, GUARDED), 1) == {GUARDED: (A, U)}
    assert legal_choices((SMALL, LARGE, GUARDED, PLAIN), 1) == {GUARDED: (A, U)}
    assert set(legal_choices((SMALL, GUARDED, PLAIN), 2)) == {SMALL, GUARDED}


def test_its_tables_show_every_choice() -> None:
    choices = {SMALL: (A, B, C), GUARDED: (A, U)}
    found = tables(bytes(CELLS), choices)
    assert {(table[SMALL], table[GUARDED]) for table in found} == {(A, A), (B, U), (C, A)}
    assert all(not any(table[at] for at in (LARGE, PLAIN)) for table in found)
    assert tables(bytes(CELLS), {}) == ()


def kept(plan: Plan) -> PolicyKeeper:
    choices = legal_choices((SMALL, LARGE, GUARDED, PLAIN), plan.threads)
    return PolicyKeeper(plan.policy, bytes(CELLS), choices, lambda: plan.now)


def ask(plan: Plan, keeper: PolicyKeeper, answers: int, every_s: float = 1.0) -> list[bytes]:
    """Answer so often; return the tables that were followed."""
    followed = []
    for _ in range(answers):
        followed.append(plan.policy.present.variants)
        plan.answer()
        plan.now += every_s
        keeper.answered()
    return followed


def test_it_moves_every_cell_to_its_fastest_variant() -> None:
    plan = Plan(cost)
    keeper = kept(plan)
    followed = ask(plan, keeper, WINDOW_ANSWERS * (LEAST_WINDOWS + WINDOWS))
    assert [keeper.variants[at] for at in (SMALL, LARGE, GUARDED, PLAIN)] == [B, C, U, A]
    assert keeper.switches == 3
    assert sum(table == bytes(CELLS) for table in followed) > len(followed) * 0.7
    names = keeper.facts()["cells"]
    assert names[Cell.at(SMALL).name] == "ALONE"
    assert Cell.at(PLAIN).name not in names


def test_one_answer_in_eight_is_a_trial() -> None:
    plan = Plan(lambda _at, _variant: 100)
    keeper = kept(plan)
    followed = ask(plan, keeper, 5 * WINDOW_ANSWERS)
    trials = [at for at, table in enumerate(followed) if table != bytes(CELLS)]
    assert [at % TRIAL_EVERY for at in trials] == [TRIAL_EVERY - 1] * len(trials)
    assert len(trials) == len(followed) // TRIAL_EVERY
    assert {followed[at][SMALL] for at in trials} == {B, C}
    assert keeper.switches == 0


def test_it_switches_a_cell_at_most_once_a_minute() -> None:
    plan = Plan(cost)
    plan.cost = lambda at, v: 200 if (v is A) == (plan.now // 20 % 2 == 0) else 50
    keeper = kept(plan)
    ask(plan, keeper, 100 * WINDOW_ANSWERS, every_s=0.05)
    minutes = (plan.now - 50.0) / REST_S
    assert keeper.switches <= 3 * (minutes + 1)


def test_a_plan_without_choices_is_left_alone() -> None:
    plan = Plan(cost)
    keeper = PolicyKeeper(plan.policy, bytes(CELLS), {}, lambda: plan.now)
    ask(plan, keeper, 100)
    assert len(plan.policy.made) == 1
    assert keeper.facts() == {"cells": {}, "switches": 0}
