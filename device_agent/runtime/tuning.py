"""How a bundle runs on this device: threads and policy, measured when it starts, kept afterwards.

    all threads lent -> the cells that the compiler leaves in doubt, measured at once
                     -> the fewest threads that are nearly as fast as the best, under that policy
                     -> a keeper, which goes on comparing real answers

Both measurements together take `BUDGET_S` and a few runs at most, at the frequency that the device
has just then. None of it changes a bit of what is answered. A FIXED policy is followed and left
alone: a choice by time would tell what was computed.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from compiler.contract.native_library import MAX_THREADS
from compiler.contract.policy import Cell, Flags, Variant
from compiler.contract.selftest import SelfTestRun, parse_selftest
from device_agent.runtime.affinity import AUTO, cpus_for
from device_agent.runtime.bundle import LoadedBundle
from device_agent.runtime.cells import (
    CellsMeasured,
    legal_choices,
    measure_cells,
)
from device_agent.runtime.keeper import PolicyKeeper
from device_agent.runtime.threads import BUDGET_S, ThreadChoice, tune_threads

CELLS_SHARE: Final = 0.6
"""Of the budget that cells may take; threads get the rest."""
_MS: Final = 1e3


@dataclass(frozen=True, slots=True)
class Tuned:
    """What was found.

    Attributes:
        facts: What `status` shows of it.
        keeper: Keeps the policy from here on; None if there is nothing to choose.
    """

    facts: Mapping[str, object]
    keeper: PolicyKeeper | None


def tune(
    bundle: LoadedBundle,
    threads: int,
    cpus: str = AUTO,
    monotonic: Callable[[], float] = time.perf_counter,
) -> Tuned:
    """Give a bundle's plan its threads and its policy.

    Args:
        bundle: Loaded, its cache empty.
        threads: Threads of a run; 0 = as many as help, at most one per core.
        cpus: Where lent threads run: `auto`, `off` or a list of cores.
        monotonic: Clock in seconds.

    Raises:
        ContractError: The self-test section is malformed, or the plan ended with an error status.
    """
    runner, policy = bundle.runner, bundle.policy
    runs = parse_selftest(bundle.self_test).vectors[0].runs
    allowed = frozenset(os.sched_getaffinity(0))
    runner.cpus = cpus_for(cpus, allowed)
    most = threads or min(len(runner.cpus or allowed), MAX_THREADS)
    start = monotonic()
    cells = None
    if runner.policy.is_supported:
        if policy.is_fixed:
            runner.policy.publish(policy.variants)
        else:
            runner.threads = most
            cells = measure_cells(runner, policy, runs, CELLS_SHARE * BUDGET_S, monotonic)
    choice = _threads(bundle, runs[0], threads, most, BUDGET_S - (monotonic() - start), monotonic)
    keeper = None if cells is None else _keeper(bundle, cells, monotonic)
    tuned_ms = (monotonic() - start) * _MS
    facts = {**_thread_facts(bundle, choice), "tuned_ms": round(tuned_ms, 3)}
    if cells is not None:
        facts["policy"] = _policy_facts(bundle, cells)
    return Tuned(facts, keeper)


def _threads(
    bundle: LoadedBundle,
    run: SelfTestRun,
    threads: int,
    most: int,
    budget_s: float,
    monotonic: Callable[[], float],
) -> ThreadChoice:
    if threads:
        bundle.runner.threads = threads
        return ThreadChoice(threads, {})
    bundle.runner.threads = 1
    return tune_threads(bundle.runner, run, most, monotonic, max(0.0, budget_s))


def _thread_facts(bundle: LoadedBundle, choice: ThreadChoice) -> dict[str, object]:
    return {
        "threads": bundle.runner.threads,
        "threads_measured_ms": {n: round(s * _MS, 3) for n, s in choice.seconds.items()},
        "cpus": sorted(bundle.runner.cpus) or "any",
        "weight_bytes": bundle.runner.weight_bytes,
        "huge_weight_bytes": bundle.runner.huge_weight_bytes,
        **bundle.budget,
    }


def _policy_facts(bundle: LoadedBundle, cells: CellsMeasured) -> dict[str, object]:
    changed = {
        Cell.at(at).name: f"{Variant(cells.variants[at]).name}, {gain:.2f} times as fast"
        for at, gain in cells.gains.items()
        if cells.variants[at] != bundle.policy.variants[at]
    }
    return {
        "modelled_for_target": bool(bundle.policy.flags & Flags.MEASURED),
        "cells_measured": len(cells.gains),
        "rounds": cells.rounds,
        "measured_ms": round(cells.seconds * _MS, 3),
        "changed": changed,
    }


def _keeper(
    bundle: LoadedBundle, cells: CellsMeasured, monotonic: Callable[[], float]
) -> PolicyKeeper | None:
    """Return who keeps the policy of the cells that the self-test's runs use."""
    choices = legal_choices(cells.used, bundle.runner.threads)
    if not choices:
        return None
    return PolicyKeeper(bundle.runner.policy, cells.variants, choices, monotonic)
