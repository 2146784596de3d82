#!/usr/bin/env python3
"""Entry point of the platform; standard library only until the virtual environment exists.

`python3 manage.py demo` and `python3 manage.py test` build `.venv` from the hashed lock by
themselves, then run inside it.
Set SPARSEFLEET_VENV to keep the environment elsewhere, SPARSEFLEET_NO_BOOTSTRAP=1 to use the
running interpreter as it is.
"""

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
LOCKS = {"run": ROOT / "requirements.lock", "test": ROOT / "requirements-dev.lock"}
MINIMUM_PYTHON = (3, 11)


def fail(message: str, hint: str = "") -> None:
    """Print an error with a hint and exit with status 1."""
    print(f"error: {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
    raise SystemExit(1)


def stamp_of(lock: Path) -> str:
    """Return what the stamp file must hold for `lock` to count as installed."""
    return hashlib.sha256(lock.read_bytes()).hexdigest()


def bootstrap(kind: str, venv: Path) -> Path:
    """Make `venv` hold the packages of the lock of this kind; return its interpreter.

    The test lock is a superset of the run lock, so an environment stamped for tests serves both.
    Two commands started at
    once wait for each other.
    """
    python = venv / "bin" / "python"
    lock = LOCKS[kind]

    def installed() -> bool:
        names = {"run": ("run", "test"), "test": ("test",)}[kind]
        return python.exists() and any(
            (venv / f".lock-{name}").exists()
            and (venv / f".lock-{name}").read_text() == stamp_of(LOCKS[name])
            for name in names
        )

    if installed():
        return python
    venv.mkdir(parents=True, exist_ok=True)
    with (venv / ".bootstrap").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if installed():
            return python
        if not (venv / "bin" / "pip").exists():
            print(f"creating the virtual environment {venv.name} ...", flush=True)
            if subprocess.run([sys.executable, "-m", "venv", str(venv)], check=False).returncode:
                fail(
                    "cannot create a virtual environment", "on Debian: apt-get install python3-venv"
                )
        print(f"installing locked packages ({lock.name}), once, about a minute ...", flush=True)
        install(python, lock)
        (venv / f".lock-{kind}").write_text(stamp_of(lock))
    return python


def install(python: Path, lock: Path) -> None:
    """Install `lock` with uv when it can be had (several times faster), else with pip.

    Both check the hashes.
    """
    hashed = ["--require-hashes", "-r", str(lock)]
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    uv = [str(python), "-m", "uv", "pip", "install", "-q", "--python", str(python)]
    has_uv = subprocess.run([*pip, "uv"], check=False, capture_output=True).returncode == 0
    if has_uv and subprocess.run([*uv, *hashed], check=False).returncode == 0:
        return
    if subprocess.run([*pip, *hashed], check=False).returncode:
        fail(
            "the locked packages could not be installed",
            "check that the package index can be reached, then run again",
        )


def keep_bytecode(venv: Path) -> None:
    """Let this process' children keep compiled modules, inside the environment's own folder.

    Without it every one of the demo's processes would compile Django anew where
    PYTHONDONTWRITEBYTECODE is set. Whoever set it wanted a clean source tree, and keeps it.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.setdefault("PYTHONPYCACHEPREFIX", str(venv / "pycache"))


def main() -> None:
    """Enter the virtual environment, then hand over to Django's command line."""
    if sys.version_info < MINIMUM_PYTHON:
        needed = ".".join(map(str, MINIMUM_PYTHON))
        fail(f"Python {needed} or newer is needed, this is {sys.version.split()[0]}")
    venv = Path(os.environ.get("SPARSEFLEET_VENV", ROOT / ".venv"))
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if not os.environ.get("SPARSEFLEET_NO_BOOTSTRAP"):
        python = bootstrap("test" if command == "test" else "run", venv)
        keep_bytecode(venv)
        if Path(sys.prefix).resolve() != venv.resolve():
            os.execv(python, [str(python), str(ROOT / "manage.py"), *sys.argv[1:]])
    os.chdir(ROOT)
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "dashboards.conf.settings")
    from django.core.management import execute_from_command_line
    from pydantic import ValidationError

    from builds.common.errors import ApplicationError

    try:
        execute_from_command_line(sys.argv)
    except ApplicationError as error:
        fail(str(error), error.hint)
    except ValidationError as error:
        wrong = error.errors()[0]
        name = "_".join(str(part) for part in wrong["loc"]).upper()
        fail(f"setting SPARSEFLEET_{name.removeprefix('SPARSEFLEET_')}: {wrong['msg']}")


if __name__ == "__main__":
    main()
