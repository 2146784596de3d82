"""Run the self-test of a bundle in a process of its own, so that a crash stays there.

    python -m compiler.contract.selftest_process DIRECTORY

The directory holds one file per section, named by component. Prints the report as one JSON line.
Exit status 0: every output has the expected bits; 1: one has not; 2: the plan did not load or run.
A crash of native code ends the process by a signal, which the parent sees.
"""

import json
import sys
from pathlib import Path
from typing import Final

from compiler.contract.errors import ContractError
from compiler.contract.native import NativePlan
from compiler.contract.plan import parse_plan
from compiler.contract.schedule import parse_schedule
from compiler.contract.schedule_order import verify_schedule
from compiler.contract.selftest import run_selftest

PASSED: Final = 0
FAILED: Final = 1
BROKEN: Final = 2
NOT_WEIGHTS: Final = frozenset(
    (
        *("plan", "kernels", "pipeline", "selftest"),
        *("router_stats", "expert_groups", "schedule", "bands", "policy", "steering"),
        "substitutes",
    )
)


def load_plan(directory: Path) -> NativePlan:
    """Load the bundle in `directory`.

    Raises:
        ContractError: Plan, schedule, kernels or weights do not fit each other.
        OSError: A file is missing or cannot be read.
    """
    weights = {
        path.name: path.read_bytes() for path in directory.iterdir() if path.name not in NOT_WEIGHTS
    }
    schedule = directory / "schedule"
    plan_bytes = (directory / "plan").read_bytes()
    if schedule.exists():
        verify_schedule(parse_plan(plan_bytes), parse_schedule(schedule.read_bytes()))
    return NativePlan(directory / "kernels", plan_bytes, weights)


def main(directory: Path) -> int:
    """Load the bundle in `directory`, run its self-test, print the report."""
    try:
        with load_plan(directory) as plan:
            report = run_selftest(plan, (directory / "selftest").read_bytes())
    except (ContractError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return BROKEN
    sys.stdout.write(json.dumps(report.to_json()) + "\n")
    return PASSED if report.passed else FAILED


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
