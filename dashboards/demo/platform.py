"""Set-up of a fresh platform in the demo's own state folder, and its two processes."""

import fcntl
import json
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from dashboards.conf.env import ROOT, child_environment
from dashboards.demo.errors import DemoError
from dashboards.demo.processes import ProcessGroup

HOST: Final = "127.0.0.1"
WEB_THREADS: Final = 8
POLL_AFTER_S: Final = "1.0"
TICK_S: Final = "1.0"
CACHE: Final = "cache"
MARK: Final = ".sparsefleet-demo"


@dataclass(frozen=True, slots=True)
class Access:
    """Who may do what in the demo; shown once, random in every run."""

    admin_password: str
    manager_password: str
    ci_token: str
    manager_token: str


@contextmanager
def fresh_state(root: Path) -> Iterator[Path]:
    """Empty the demo's folder, hold it against a second demo, and yield the state folder.

    The compiler's cache is kept: it is content-addressed, so what an earlier run left there is
    either right or not found. A folder without the demo's mark is left alone.

    Raises:
        DemoError: The folder holds something else, or a demo is running in it.
    """
    mark = root / MARK
    if root.exists() and not mark.exists() and any(root.iterdir()):
        raise DemoError(
            f"{root} is not empty and was not made by the demo",
            hint="name a new folder with --state-dir; the demo empties its own",
        )
    root.mkdir(parents=True, exist_ok=True)
    with mark.open("a") as guard:
        try:
            fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DemoError(
                f"a demo is running in {root}",
                hint="stop it, or run a second one with --state-dir DIR --port N",
            ) from error
        state = root / "platform"
        state.mkdir(exist_ok=True)
        _clear(root, keep={state.name, MARK})
        _clear(state, keep={CACHE})
        yield state


def _clear(folder: Path, *, keep: Set[str]) -> None:
    for entry in folder.iterdir():
        if entry.name in keep:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def platform_environment(state: Path, probation_s: float) -> Mapping[str, str]:
    """Return the environment of the platform's processes: the embedded form, in a hurry."""
    return child_environment(
        SPARSEFLEET_STATE_DIR=str(state),
        SPARSEFLEET_DATABASE_URL="",
        SPARSEFLEET_BROKER_URL="",
        SPARSEFLEET_DEMO_KEYS="1",
        SPARSEFLEET_RELEASE_APPROVAL="automatic",
        SPARSEFLEET_POLL_AFTER_S=POLL_AFTER_S,
        SPARSEFLEET_TICK_S=TICK_S,
        SPARSEFLEET_PROBATION_S=str(probation_s),
        SPARSEFLEET_NO_BOOTSTRAP="1",
        PYTHONUNBUFFERED="1",
    )


def manage(*arguments: str) -> list[str]:
    """Return the command line of a management command."""
    return [sys.executable, str(ROOT / "manage.py"), *arguments]


def set_up(group: ProcessGroup) -> Access:
    """Make database, demo keys, users and tokens; all by the commands an operator would use."""
    group.run(manage("migrate", "--verbosity", "0"))
    group.run(manage("keys_init"))
    admin, manager = secrets.token_urlsafe(9), secrets.token_urlsafe(9)
    access = json.loads(
        group.run(
            manage(
                "bootstrap_access",
                "--json",
                "--password",
                f"admin={admin}",
                "--password",
                f"release-manager={manager}",
            )
        )
    )
    token = json.loads(
        group.run(
            manage("token_create", "--name", "release-desk", "--role", "release_manager", "--json")
        )
    )
    return Access(admin, manager, access["ci_token"], token["token"])


def claim_token(group: ProcessGroup, uses: int) -> str:
    """Make a claim token with which `uses` devices may enrol."""
    output = group.run(
        manage("claim_create", "--name", "demo", "--uses", str(uses), "--json"),
    )
    token: str = json.loads(output)["token"]
    return token


def start_web(group: ProcessGroup, port: int) -> str:
    """Start the web process and return its address."""
    group.start(
        "web",
        [
            Path(sys.executable).with_name("granian"),
            "--interface",
            "wsgi",
            "--host",
            HOST,
            "--port",
            str(port),
            "--workers",
            "1",
            "--blocking-threads",
            str(WEB_THREADS),
            "--no-ws",
            "--log-level",
            "warning",
            "dashboards.conf.wsgi:application",
        ],
    )
    return f"http://{HOST}:{port}"


def start_worker(group: ProcessGroup, state: Path) -> None:
    """Start one worker, with the tick inside."""
    group.start(
        "worker",
        [
            Path(sys.executable).with_name("celery"),
            "-A",
            "dashboards.conf.celery",
            "worker",
            "--beat",
            "--schedule",
            str(state / "beat-schedule"),
            "--pool",
            "threads",
            "--concurrency",
            "3",
            "--loglevel",
            "WARNING",
        ],
    )


def is_ready(base_url: str) -> bool | None:
    """Return True once the web process answers, else None."""
    try:
        return httpx.get(f"{base_url}/readyz", timeout=2.0).is_success or None
    except httpx.TransportError:
        return None
