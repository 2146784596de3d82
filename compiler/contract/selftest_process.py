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
from compiler.contract.selftest import run_selftest

PASSED: Final = 0
FAILED: Final = 1
BROKEN: Final = 2
NOT_WEIGHTS: Final = frozenset(("plan", "kernels", "pipeline", "selftest"))


def main(directory: Path) -> int:
    """Load the bundle in `directory`, run its self-test, print the report."""
    files = {path.name: path for path in directory.iterdir()}
    try:
        weights = {
            name: path.read_bytes() for name, path in files.items() if name not in NOT_WEIGHTS
        }
        plan = NativePlan(files["kernels"], files["plan"].read_bytes(), weights)
        try:
            report = run_selftest(plan, files["selftest"].read_bytes())
        finally:
            plan.close()
    except (ContractError, OSError, KeyError) as error:
        sys.stderr.write(f"error: {error}\n")
        return BROKEN
    sys.stdout.write(json.dumps(report.to_json()) + "\n")
    return PASSED if report.passed else FAILED


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
