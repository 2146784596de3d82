"""Rules that a linter cannot see: who may write a state, read the environment, run a process."""

import re
import subprocess
import sys
from pathlib import Path

from celery import current_app
from django.conf import settings

from builds.common.enqueue import Task

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("compiler", "builds", "fleet", "dashboards", "device_agent")


def files_matching(
    pattern: str, *, allowed: tuple[str, ...], packages: tuple[str, ...] = PACKAGES
) -> list[str]:
    found = []
    for package in packages:
        for path in (ROOT / package).rglob("*.py"):
            name = str(path.relative_to(ROOT))
            if name in allowed or "/migrations/" in name:
                continue
            if re.search(pattern, path.read_text(encoding="utf-8")):
                found.append(name)
    return found


def test_it_reads_the_environment_in_two_places_only() -> None:
    allowed = (
        "dashboards/conf/env.py",
        "dashboards/conf/celery.py",
        "dashboards/conf/wsgi.py",
        "device_agent/config.py",
    )
    assert files_matching(r"os\.environ\b(?!\s*\|)|os\.getenv", allowed=allowed) == []


def test_it_changes_states_through_the_one_door() -> None:
    # `.update(state=...)` and `x.state = ...` are how a state would be written past the table.
    pattern = r"\.update\([^)]*\bstate=|\.state = "
    allowed = ("builds/common/transitions.py",)
    assert (
        files_matching(pattern, allowed=allowed, packages=("builds", "fleet", "dashboards")) == []
    )


def test_it_registers_every_task() -> None:
    import dashboards.conf.celery

    dashboards.conf.celery.app.loader.import_default_modules()
    assert {task.value for task in Task} <= set(current_app.tasks)


def test_it_keeps_the_import_contracts() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports"))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_it_starts_processes_of_the_compiler_in_one_place() -> None:
    # `vet` talks to its child line by line, which waiting for the end cannot; `forks` starts no
    # program, it copies a child process that measures.
    allowed = (
        "compiler/emitters/processes.py",
        "compiler/driver/vet.py",
        "compiler/driver/forks.py",
    )
    pattern = r"\b(import subprocess|os\.(fork|exec|spawn|system|popen)|multiprocessing)"
    assert files_matching(pattern, allowed=allowed, packages=("compiler",)) == []


def test_it_has_no_archive_format_in_the_update_path() -> None:
    pattern = r"^\s*(import|from) (tarfile|zipfile|pickle|shelve|marshal)\b"
    found = []
    for package in ("device_agent", "compiler/contract", "compiler/delta"):
        for path in (ROOT / package).rglob("*.py"):
            if re.search(pattern, path.read_text(encoding="utf-8"), re.MULTILINE):
                found.append(str(path.relative_to(ROOT)))
    assert found == []


def test_it_runs_on_the_embedded_defaults() -> None:
    assert settings.CELERY_TASK_ACKS_LATE
    assert settings.CELERY_TASK_IGNORE_RESULT
