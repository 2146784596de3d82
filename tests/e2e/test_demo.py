"""The main job as a user starts it: `manage.py demo --once`, with every real process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.engines import free_port

ROOT = Path(__file__).resolve().parents[2]


def users_environment() -> dict[str, str]:
    """Return this environment without what the tests' own settings put there."""
    mine = ("SPARSEFLEET_", "DJANGO_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(mine)}
    return {**kept, "SPARSEFLEET_NO_BOOTSTRAP": "1"}


def test_its_first_commands_share_one_state(tmp_path: Path) -> None:
    environment = {
        **users_environment(),
        "SPARSEFLEET_STATE_DIR": str(tmp_path),
        "SPARSEFLEET_DEMO_KEYS": "1",
    }
    for command in (["migrate", "--verbosity", "0"], ["keys_init"]):
        done = subprocess.run(
            [sys.executable, str(ROOT / "manage.py"), *command],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_it_plays_the_main_job(tmp_path: Path) -> None:
    summary = tmp_path / "summary.json"
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "manage.py"),
            "demo",
            "--once",
            *("--port", str(free_port())),
            *("--state-dir", str(tmp_path / "demo")),
            *("--json", str(summary)),
        ],
        cwd=ROOT,
        env=users_environment(),
        capture_output=True,
        text=True,
        timeout=1_200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(summary.read_text())
    assert document["ok"]
    assert 1 <= document["figures"]["devices_exposed_by_bad_version"] <= 4
    for sizes in document["figures"]["deltas"].values():
        assert sizes["size_bytes"] < sizes["bsdiff4_bytes"] < sizes["full_bytes"]
