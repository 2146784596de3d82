"""Forked copies: a plain loop's results, errors and nothing left behind."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[4]


def called(name: str) -> Any:
    command = [sys.executable, "-m", "tests.factories.forking", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_gives_what_a_loop_gives_in_its_order() -> None:
    expected = [[f"{item}" for item in range(count)] for count in (0, 1, 2, 7)]
    assert called("order") == expected * 4


def test_it_works_in_other_processes_and_leaves_none() -> None:
    answer = called("processes")
    found = answer["found"]
    assert found[0] == found[2] != found[1] == found[3]
    assert answer["mine"] not in found
    assert answer["alive"] == []


def test_it_raises_what_a_copy_raised() -> None:
    assert called("refused") == "ValueError: two is refused"


def test_it_tells_that_a_copy_was_killed() -> None:
    assert "ended without a result" in called("killed")


def test_it_carries_more_than_a_pipe_holds() -> None:
    assert called("long") == [300_000] * 3


def test_it_forks_nothing_in_a_process_of_several_threads() -> None:
    assert called("threads") is True
