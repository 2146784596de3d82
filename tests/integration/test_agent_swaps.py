"""Plans and kernels swapped under load: the same answers, one copy of the weights, no leak."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FEW, MANY = 100, 1_000
MOST_GROWTH_KIB = 8 * 1024
"""Of resident memory over all swaps: less than one bundle takes."""
MOST_MORE_MAPS = 16
"""A library that stayed mapped would add three a swap; the heap comes and goes by a few."""


def swap(count: int, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.factories.plan_swapping", f"{count}", f"{folder}"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["swaps"] == count
    assert found["different_answers"] == 1, "every output byte of every run is the same"
    assert found["bundles"] == 2
    assert found["asked"] > count // 20
    assert found["weights_in_memory"] == [1], "both bundles read the same weights"
    before, after = found["before"], found["after"]
    for exact in ("kernels", "descriptors", "threads"):
        assert after[exact] == before[exact], exact
    assert after["maps"] - before["maps"] < MOST_MORE_MAPS
    assert after["rss_kib"] - before["rss_kib"] < MOST_GROWTH_KIB
    assert found["closed"]["kernels"] == 0
    assert found["closed"]["threads"] == 1


def test_it_swaps_plans_while_another_thread_asks(tmp_path: Path) -> None:
    swap(FEW, tmp_path)


@pytest.mark.full
def test_it_swaps_a_thousand_plans(tmp_path: Path) -> None:
    swap(MANY, tmp_path)
