"""Take the time of every call of a plan, one by one, in a process that may crash.

    python -m compiler.driver.profile DIRECTORY

The directory holds one file per section, named by component. Each program is brought into the state
of its first run in the self-test (the one with fewest tokens) and run call by call, in order, many
times over. Prints `seconds` per call in JSON: the median of the rounds less the median of an empty
range of calls, and never less than the clock can tell. The figures say where the time of this
machine goes, not how fast a device is. Before that the whole self-test runs once, for `checks`: by
program and call, how often a run-time check held and how often it did not.
"""

import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from time import get_clock_info, perf_counter
from typing import Final

from compiler.contract.errors import ContractError
from compiler.contract.native import NativePlan
from compiler.contract.selftest import SelfTest, SelfTestRun, parse_selftest
from compiler.contract.selftest_process import load_plan

ROUNDS: Final = 15
MAX_SECONDS: Final = 2.0
"""Per program: a large model is measured in fewer rounds."""
CLOCK_STEP_S: Final = get_clock_info("perf_counter").resolution
Seconds = Mapping[str, list[float]]


def profile(plan: NativePlan, selftest: SelfTest, rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Return seconds per call of each program that the self-test runs.

    Args:
        plan: The loaded plan.
        selftest: Where inputs and cache states come from.
        rounds: The most rounds.

    Raises:
        ContractError: A run fails, or the kernels cannot run single calls.
    """
    found: dict[str, list[float]] = {}
    for vector_at, run_at in representatives(selftest).values():
        runs = selftest.vectors[vector_at].runs
        for run in runs[:run_at]:
            plan.kv_length = run.kv_length
            plan.run(run.program, run.inputs)
        plan.kv_length = runs[run_at].kv_length
        found[runs[run_at].program] = _profile_run(plan, runs[run_at], rounds)
    return found


def representatives(selftest: SelfTest) -> dict[str, tuple[int, int]]:
    """Return, by program, (vector, run) of the first run with the smallest inputs."""
    best: dict[str, tuple[int, int, int]] = {}
    for at, vector in enumerate(selftest.vectors):
        for number, run in enumerate(vector.runs):
            size = sum(len(data) for data in run.inputs.values())
            if run.program not in best or size < best[run.program][0]:
                best[run.program] = (size, at, number)
    return {program: (vector, run) for program, (_, vector, run) in best.items()}


def _profile_run(plan: NativePlan, run: SelfTestRun, rounds: int) -> list[float]:
    calls = next(len(p.calls) for p in plan.plan.programs if p.name == run.program)
    taken: list[list[float]] = [[] for _ in range(calls)]
    empty: list[list[float]] = [[] for _ in range(calls)]
    start = perf_counter()
    for turn in range(rounds + 1):
        tokens = plan.run_calls(run.program, run.inputs, 0, 0, 0)
        for at in range(calls):
            before = perf_counter()
            plan.run_calls(run.program, None, at, 0, tokens)
            between = perf_counter()
            plan.run_calls(run.program, None, at, 1, tokens)
            if turn:  # the first round only warms up
                taken[at].append(perf_counter() - between)
                empty[at].append(between - before)
        if turn and perf_counter() - start > MAX_SECONDS:
            break
    return [
        max(CLOCK_STEP_S, statistics.median(busy) - statistics.median(idle))
        for busy, idle in zip(taken, empty, strict=True)
    ]


def count_checks(plan: NativePlan, selftest: SelfTest) -> dict[str, dict[str, tuple[int, int]]]:
    """Run every vector of the self-test; return how often each run-time check held and did not.

    Raises:
        ContractError: A run fails.
    """
    for vector in selftest.vectors:
        for run in vector.runs:
            plan.kv_length = run.kv_length
            plan.run(run.program, run.inputs)
    return {
        program.name: {str(at): counts for at, counts in plan.check_counts(program.name).items()}
        for program in plan.plan.programs
    }


def main(directory: Path) -> int:
    """Print the times of the bundle in `directory`."""
    try:
        selftest = parse_selftest((directory / "selftest").read_bytes())
        with load_plan(directory) as plan:
            checks = count_checks(plan, selftest)
            found = {"seconds": profile(plan, selftest), "checks": checks}
    except (ContractError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
