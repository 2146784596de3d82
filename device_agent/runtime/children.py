"""Run a module of the agent in a process of its own, and wait for it to end."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_PACKAGE_ROOT: Final = Path(__file__).resolve().parents[2]


def run_module(
    module: str, arguments: Sequence[str], timeout_s: float
) -> "subprocess.CompletedProcess[bytes]":
    """Run `python -B -m MODULE ARGUMENTS` with nothing to read; the child writes no byte code.

    Raises:
        subprocess.TimeoutExpired: It did not end in time, and was killed.
        OSError: It cannot be started.
    """
    return subprocess.run(  # noqa: S603 -- our own module
        [sys.executable, "-B", "-m", module, *arguments],
        cwd=_PACKAGE_ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=timeout_s,
        check=False,
    )
