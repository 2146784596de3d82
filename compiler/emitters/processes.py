"""Start another program and wait for it: the only place of the compiler that does.

The C compiler, an emulator and our own children (the native self-test, the scout, the profiler) all
start here: no shell, a named folder, a time limit; foreign programs get their own environment.
"""

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from compiler.errors import ToolchainError

ROOT: Final = Path(__file__).parents[2]


class TookTooLongError(ToolchainError):
    """A program did not end within its time limit and was killed."""

    code: ClassVar[str] = "build.app.toolchain_timeout"


@dataclass(frozen=True, slots=True)
class Finished:
    """How a program ended.

    Attributes:
        status: Exit status, negative for the number of the signal that ended it.
    """

    status: int
    output: bytes
    errors: bytes

    @property
    def signal_name(self) -> str:
        """Name of the signal that ended the program, or an empty string."""
        return signal.Signals(-self.status).name if self.status < 0 else ""

    def error_text(self, limit: int) -> str:
        """Return the last `limit` characters of the standard error."""
        return self.errors.decode("utf-8", "replace")[-limit:]


def run_command(
    command: Sequence[str],
    *,
    folder: Path,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    standard_input: bytes = b"",
) -> Finished:
    """Run a program to its end.

    Args:
        command: Program and arguments.
        folder: Its working directory.
        timeout_s: Seconds after which it is killed.
        environment: All of its environment; without one it inherits ours.
        standard_input: What it reads.

    Raises:
        TookTooLongError: It was killed after `timeout_s`.
        ToolchainError: It could not be started.
    """
    try:
        done = subprocess.run(  # noqa: S603 - our own programs with fixed arguments
            list(command),
            cwd=folder,
            env=None if environment is None else dict(environment),
            input=standard_input,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TookTooLongError(f"{command[0]} took more than {timeout_s:g} s") from error
    except OSError as error:
        raise ToolchainError(
            f"{command[0]} could not be started: {error}",
            hint="is the package ziglang (or the emulator) installed?",
        ) from error
    return Finished(done.returncode, done.stdout, done.stderr)


def run_module(module: str, arguments: Sequence[str], *, timeout_s: float) -> Finished:
    """Run one of our own modules in a fresh interpreter of the same kind.

    Raises:
        TookTooLongError: It was killed after `timeout_s`.
        ToolchainError: It could not be started.
    """
    command = [sys.executable, "-m", module, *arguments]
    return run_command(command, folder=ROOT, timeout_s=timeout_s)
