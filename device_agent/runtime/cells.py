"""Which cells of a policy a plan uses, and how they run best here: measured when a bundle starts.

    self-test runs under tables that differ in every doubtful cell -> the VM's meters, per cell
    -> the fastest variant of each

All cells are measured at once: table k runs every doubtful cell in its k-th candidate, and one run
of the self-test fills the meters of all of them. Tables take turns; what counts is the least that a
variant took in any round, because whatever disturbs a run makes it longer. Only cells that the
compiler's model leaves in doubt are measured, within the budget or not at all.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from compiler.contract.native_policy import PolicySeat, PublishedPolicy, readings_since
from compiler.contract.policy import LEGAL, Cell, Policy, Variant
from compiler.contract.selftest import SelfTestRun
from compiler.contract.session import PlanRunner

LEAST_ROUNDS: Final = 3
MOST_ROUNDS: Final = 9
MIN_GAIN: Final = 0.03
"""By how much a variant must beat the compiler's default to replace it."""
Choices = Mapping[int, tuple[Variant, ...]]
"""Variants to choose from by index of the cell, the present one among them."""


class PolicyRunner(PlanRunner, Protocol):
    """A plan that follows policies."""

    @property
    def threads(self) -> int:
        """Threads of a run."""

    @property
    def policy(self) -> PolicySeat:
        """Where its table is swapped."""


@dataclass(frozen=True, slots=True)
class CellsMeasured:
    """What was measured and chosen.

    Attributes:
        variants: The table to follow.
        used: Indices of the cells that the runs use.
        rounds: Turns of every table; 0 if nothing was measured.
        gains: Least ticks of the compiler's default over those of the chosen variant, by index of
            the cell.
        seconds: What it took.
    """

    variants: bytes
    used: tuple[int, ...]
    rounds: int
    gains: Mapping[int, float]
    seconds: float


def helpful(threads: int) -> tuple[Variant, ...]:
    """Return the variants that differ with so many threads."""
    alone = (Variant.SHARED, Variant.UNCHECKED)
    return tuple(Variant) if threads > 1 else alone


def legal_choices(cells: Sequence[int], threads: int) -> dict[int, tuple[Variant, ...]]:
    """Return all variants of the cells that differ with so many threads, if there are two."""
    able = helpful(threads)
    found = {at: tuple(v for v in LEGAL[Cell.at(at).kind] if v in able) for at in cells}
    return {at: choices for at, choices in found.items() if len(choices) > 1}


def doubtful_choices(
    policy: Policy, cells: Sequence[int], threads: int
) -> dict[int, tuple[Variant, ...]]:
    """Return the variants that the policy leaves in doubt, of the cells given."""
    able = helpful(threads)
    found = {at: tuple(v for v in policy.candidates(Cell.at(at)) if v in able) for at in cells}
    return {at: choices for at, choices in found.items() if len(choices) > 1}


def tables(variants: bytes, choices: Choices) -> tuple[bytes, ...]:
    """Return tables that together run every cell in each of its choices, equal ones once."""
    found = []
    for turn in range(max((len(each) for each in choices.values()), default=0)):
        table = bytearray(variants)
        for at, each in choices.items():
            table[at] = each[turn % len(each)]
        found.append(bytes(table))
    return tuple(dict.fromkeys(found))


def play(runner: PlanRunner, runs: Sequence[SelfTestRun]) -> None:
    """Make the runs of a self-test vector and leave the cache empty.

    Raises:
        ContractError: The plan ended with an error status.
    """
    for run in runs:
        runner.kv_length = min(run.kv_length, runner.kv_length)
        runner.run(run.program, run.inputs)
    runner.kv_length = 0


def measure_cells(
    runner: PolicyRunner,
    policy: Policy,
    runs: Sequence[SelfTestRun],
    budget_s: float,
    monotonic: Callable[[], float] = time.perf_counter,
) -> CellsMeasured:
    """Measure what the policy leaves in doubt; the best table stays published.

    Args:
        runner: A plan with an empty cache.
        policy: The bundle's.
        runs: The runs of one self-test vector.
        budget_s: The most seconds it may take, but for one turn of the runs.
        monotonic: Clock in seconds.

    Raises:
        ContractError: The plan ended with an error status.
    """
    start = monotonic()
    base = runner.policy.publish(policy.variants)
    play(runner, runs)
    once_s = monotonic() - start
    used = tuple(base.readings())
    choices = doubtful_choices(policy, used, runner.threads)
    trials = [runner.policy.publish(table) for table in tables(policy.variants, choices)]
    runner.policy.use(base)
    if not trials or LEAST_ROUNDS * len(trials) * once_s > budget_s:
        return CellsMeasured(policy.variants, used, 0, {}, monotonic() - start)
    least: dict[tuple[int, int], float] = {}
    rounds, round_s = 0, len(trials) * once_s
    while rounds < MOST_ROUNDS and monotonic() - start + round_s <= budget_s:
        began = monotonic()
        for trial in trials if rounds % 2 == 0 else reversed(trials):
            _measure(runner, runs, trial, choices, least)
        rounds, round_s = rounds + 1, monotonic() - began
    if rounds < LEAST_ROUNDS:  # the machine became slower meanwhile
        runner.policy.use(base)
        return CellsMeasured(policy.variants, used, 0, {}, monotonic() - start)
    chosen, gains = choose_cells(policy.variants, choices, least)
    runner.policy.publish(chosen)
    return CellsMeasured(chosen, used, rounds, gains, monotonic() - start)


def _measure(
    runner: PolicyRunner,
    runs: Sequence[SelfTestRun],
    trial: PublishedPolicy,
    choices: Choices,
    least: dict[tuple[int, int], float],
) -> None:
    runner.policy.use(trial)
    before = trial.readings()
    play(runner, runs)
    for at, (ticks, count) in readings_since(before, trial.readings()).items():
        if at in choices:
            key = at, trial.variants[at]
            least[key] = min(least.get(key, float("inf")), ticks / count)


def choose_cells(
    variants: bytes, choices: Choices, least: Mapping[tuple[int, int], float]
) -> tuple[bytes, dict[int, float]]:
    """Return the table of the fastest variants, and what each gains over the default."""
    table, gains = bytearray(variants), {}
    for at, each in choices.items():
        default = least[at, variants[at]]
        best = min(each, key=lambda variant: least[at, variant])
        gain = default / least[at, best]
        if gain > 1.0 + MIN_GAIN:
            table[at], gains[at] = best, gain
        else:
            gains[at] = 1.0
    return bytes(table), gains
