"""Run the self-test of an installed bundle in a process of its own, so that a crash stays there.

    python -m device_agent.runtime.self_test_process STATE_DIR MANIFEST_SHA256 MANIFEST_BYTES \
        [MAX_WEIGHT_BYTES]

Prints the report as one JSON line. Exit status 0: every output has the expected bits; 1: one has
not; 2: the bundle does not load or run. A crash of native code ends the process by a signal.
"""

import json
import resource
import sys
from pathlib import Path
from typing import Final

from compiler.contract.canonical import require_sha256
from compiler.contract.errors import ContractError
from compiler.contract.selftest import run_selftest
from device_agent.errors import AgentError
from device_agent.runtime.bundle import load_bundle
from device_agent.runtime.weights import WeightPool
from device_agent.storage.disk import Disk
from device_agent.storage.objects import ObjectStore
from device_agent.storage.slots import Pointer

PASSED: Final = 0
FAILED: Final = 1
BROKEN: Final = 2
MAX_CPU_S: Final = 600


def main(state_dir: Path, manifest_sha256: str, size_bytes: int, budget_bytes: int = 0) -> int:
    """Load the bundle, run its self-test, print the report."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
    try:
        store = ObjectStore(Disk(), state_dir, max_bytes=0)
        pointer = Pointer(require_sha256(manifest_sha256, "manifest"), size_bytes, "", 0)
        bundle = load_bundle(store, pointer, WeightPool(budget_bytes))
        try:
            report = run_selftest(bundle.runner, bundle.self_test)
        finally:
            bundle.runner.close()
    except (ContractError, AgentError) as error:
        sys.stderr.write(f"error: {error} [{error.code}]\n")
        return BROKEN
    sys.stdout.write(json.dumps(report.to_json()) + "\n")
    return PASSED if report.passed else FAILED


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])))
