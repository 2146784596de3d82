"""Packages of a lock file in a folder of their own, installed on first use.

They lie beside the packages of the running environment and are never mixed with them. The lock pins
every one by hash; where they cannot be had, the tests that need them are skipped and listed.
"""

import fcntl
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.plugins.engines import leave_out

ROOT = Path(__file__).resolve().parents[2]
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir")
LOCKED = ("--no-deps", "--only-binary", ":all:", "--require-hashes")


@dataclass(frozen=True)
class LockedPackages:
    """Packages that the tests use and that we do not depend on.

    Attributes:
        what: Names them in the list of what was not run.
        lock: Name of the lock file at the root of the repository.
        folder: Name of the folder in the running environment.
        timeout_s: Longest time for their arrival.
    """

    what: str
    lock: str
    folder: str
    timeout_s: int

    @property
    def target(self) -> Path:
        """Return the folder that holds the packages."""
        return Path(sys.prefix) / self.folder

    def need(self) -> Path:
        """Return the folder of the packages, or skip the test with the reason."""
        reason = _install(self)
        if reason:
            self.skip(reason)
        return self.target

    def skip(self, reason: str) -> None:
        """Skip the running test and list it with the command that would enable it."""
        command = f"pip install {' '.join(LOCKED)} -r {self.lock}"
        hint = f"{self.what}: {command} --target <environment>/{self.folder}"
        leave_out(hint)
        pytest.skip(f"{reason}; {hint}")


@cache
def _install(packages: LockedPackages) -> str:
    """Install the packages unless this lock file's are there; return why that failed, or ''."""
    target, wanted = packages.target, (ROOT / packages.lock).read_bytes()
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_suffix(".lock").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        stamp = target / "installed.lock"
        if stamp.exists() and stamp.read_bytes() == wanted:
            return ""
        folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{packages.folder}-"))
        try:
            reason = _pip(packages, folder)
            if not reason:
                (folder / stamp.name).write_bytes(wanted)
                shutil.rmtree(target, ignore_errors=True)
                folder.rename(target)
            return reason
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _pip(packages: LockedPackages, folder: Path) -> str:
    command = [sys.executable, *PIP, *LOCKED, "--no-compile"]
    command += ["-r", str(ROOT / packages.lock), "--target", str(folder)]
    limit = packages.timeout_s
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return f"the packages did not arrive within {limit} s"
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return "" if done.returncode == 0 else (lines[-1] if lines else "pip failed")
