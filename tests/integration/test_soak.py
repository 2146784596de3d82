"""Very many answers while everything around them is disturbed: right or marked, and no leak."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from device_agent.runtime.faults import FaultKind
from tests.simulators.disturbances import DISTURBANCES

ROOT = Path(__file__).resolve().parents[2]
SEED = 1
FEW, MANY = 4_000, 1_000_000
MOST_GROWTH_KIB = 8 * 1024
"""Of resident memory over nine tenths of a million steps: Python's allocator takes a few MiB, one
at a time; of the thousands of plans that are built meanwhile forty would take as much."""
MOST_MORE_MAPS = 64
SHOWN = 3_000


def soaked(folder: Path, steps: int, tell: Callable[[str, object], None]) -> dict[str, Any]:
    """Run a campaign in a process of its own; return what happened, after what holds for any."""
    command = ("-m", "tests.simulators.soak", f"{folder}", f"{steps}", f"{SEED}")
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    again = f"again: python {' '.join(command)} [FIRST ANSWER]"
    assert done.returncode == 0, f"{done.stderr[-SHOWN:]}\n{again}"
    found: dict[str, Any] = json.loads(done.stdout)
    for name in ("seed", "steps", "answers", "degraded", "simulated", "seconds"):
        tell(name, found[name])
    assert found["steps"] >= steps
    looks = found["looks"]
    for exact in ("kernels", "descriptors", "threads"):
        assert {look[exact] for look in looks} == {looks[0][exact]}, exact
        assert found["closed"][exact] == found["empty"][exact], exact
    assert found["given_up"] == 0
    assert found["same"] > 0.9 * found["steps"]
    assert set(found["faults"]) <= set(FaultKind)
    return found


def test_it_answers_rightly_or_says_why_not(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    found = soaked(tmp_path, FEW, record_property)
    assert found["simulated"] >= 100
    assert len(found["faults"]) >= 10
    assert found["recovered"] > 0


@pytest.mark.full
def test_it_answers_rightly_or_says_why_not_a_million_times(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    found = soaked(tmp_path, MANY, record_property)
    assert found["simulated"] >= 10_000
    assert set(found["drawn"]) == set(DISTURBANCES)
    assert all(found["faults"][kind] >= 100 for kind in FaultKind)
    warm, last = found["looks"][2], found["looks"][-1]
    assert last["rss_kib"] - warm["rss_kib"] < MOST_GROWTH_KIB
    assert last["maps"] - warm["maps"] < MOST_MORE_MAPS
