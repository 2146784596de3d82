"""A platform of its own for tests that need several processes: database file, queue, keys, workers.

Everything runs the way production runs it: `manage.py`, `celery worker`, settings from the
environment alone. Questions to it are short scripts in a fresh interpreter.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FAKE_CHILD = f"{sys.executable} -m tests.simulators.compiler_child"
WAIT_STEP_S = 0.25
SETUP = "import json, django; django.setup()\n"


class Platform:
    """One installation in `folder`."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder = folder
        base = {k: v for k, v in os.environ.items() if not k.startswith("SPARSEFLEET_")}
        self.env = {
            **base,
            "SPARSEFLEET_STATE_DIR": str(folder),
            "SPARSEFLEET_NO_BOOTSTRAP": "1",
            "SPARSEFLEET_DEBUG": "1",  # keys are files
            "SPARSEFLEET_RELEASE_APPROVAL": "automatic",
            "DJANGO_SETTINGS_MODULE": "dashboards.conf.settings",
            "PYTHONWARNINGS": "ignore",
            **{f"SPARSEFLEET_{name.upper()}": value for name, value in settings.items()},
        }

    def manage(self, *arguments: str) -> str:
        """Run a management command; return what it printed."""
        done = subprocess.run(
            [sys.executable, "manage.py", *arguments],
            cwd=ROOT,
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def install(self) -> "Platform":
        """Make the database and the keys."""
        self.manage("migrate", "--skip-checks", "-v", "0")
        self.manage("keys_init", "--skip-checks")
        return self

    def script(self, code: str) -> list[str]:
        """Return the command that runs `code` with Django set up."""
        return [sys.executable, "-c", SETUP + textwrap.dedent(code)]

    def ask(self, code: str) -> Any:
        """Run `code`, which prints one JSON value last; return the value."""
        done = subprocess.run(
            [sys.executable, "-"],
            input=SETUP + textwrap.dedent(code),
            cwd=ROOT,
            env={**self.env, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.strip().splitlines()[-1])

    @contextlib.contextmanager
    def running(self, command: list[str], name: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run a process of this platform in its own group; kill the group at the end."""
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=self.env, stdout=log, stderr=log, start_new_session=True
            )
            try:
                yield process
            finally:
                kill_group(process)

    def worker(self, name: str, *options: str) -> "contextlib.AbstractContextManager[Any]":
        """Run a Celery worker."""
        command = [sys.executable, "-m", "celery", "-A", "dashboards.conf.celery", "worker"]
        command += ["-l", "INFO", "-n", f"{name}@test", "--without-gossip", "--without-mingle"]
        return self.running([*command, *options], name)

    def log(self, name: str) -> str:
        """Return what a process wrote."""
        return (self.folder / f"{name}.log").read_text(errors="replace")


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and everything it started, at once."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)


def wait_until(question: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Ask until the answer is yes."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if question():
            return
        time.sleep(WAIT_STEP_S)
    raise AssertionError(f"not within {timeout_s} s: {what}")


SUBMIT = """
from tests.factories.builds import make_files, make_model, make_target, make_version
from builds.services.jobs import jobs_create
from builds.states import VersionState
jobs = []
for script, model, target, *pipeline in {wanted!r}:
    version = make_version(make_model(model), state=VersionState.SUBMITTED)
    extra = {{"pipeline__json": pipeline[0]}} if pipeline else {{}}
    version.files = make_files(model__onnx=script, **extra)
    version.save()
    jobs += jobs_create(version=version, targets=[make_target(target)])
print(json.dumps([job.pk for job in jobs]))
"""
STATES = """
from builds.models import BuildJob
rows = BuildJob.objects.values_list("pk", "state", "attempt", "error_message")
print(json.dumps({str(pk): row for pk, *row in rows}))
"""


def submit(platform: Platform, *wanted: tuple[Any, ...]) -> list[int]:
    """Submit versions as (model.onnx, model, target[, pipeline.json]); return the job ids."""
    ids: list[int] = platform.ask(SUBMIT.format(wanted=list(wanted)))
    return ids
