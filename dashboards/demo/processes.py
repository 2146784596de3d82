"""Child processes of the demo: started with a log file each, watched, and stopped together."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from dashboards.demo.errors import DemoError

STOP_GRACE_S: Final = 8.0
LOG_TAIL_LINES: Final = 12
LAST_PORT: Final = 65535


@dataclass(frozen=True, slots=True)
class Child:
    """One running process and where it writes."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path


class ProcessGroup:
    """Starts children, notices when one dies, and stops them all on exit."""

    def __init__(self, log_dir: Path, cwd: Path, environment: Mapping[str, str]) -> None:
        self._log_dir = log_dir
        self._cwd = cwd
        self._environment = dict(environment)
        self._children: list[Child] = []

    def __enter__(self) -> Self:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self, name: str, command: Sequence[str | Path], **environment: str) -> Child:
        """Start `command` in the background; its output goes to `<log_dir>/<name>.log`."""
        log = self._log_dir / f"{name}.log"
        with log.open("ab") as sink:
            process = subprocess.Popen(  # noqa: S603 -- our own commands
                [str(part) for part in command],
                cwd=self._cwd,
                env={**self._environment, **environment},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        child = Child(name, process, log)
        self._children.append(child)
        return child

    def run(self, command: Sequence[str | Path], *, hint: str = "") -> str:
        """Run `command` to its end and return its standard output.

        Raises:
            DemoError: It failed; the message carries the end of what it printed.
        """
        done = subprocess.run(  # noqa: S603 -- our own commands
            [str(part) for part in command],
            cwd=self._cwd,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-LOG_TAIL_LINES:])
            raise DemoError(
                f"`{' '.join(str(part) for part in command[-3:])}` failed:\n{tail}", hint=hint
            )
        return done.stdout

    def require_alive(self) -> None:
        """Raise when a child has ended.

        Raises:
            DemoError: Names the child and shows the end of its log.
        """
        for child in self._children:
            code = child.process.poll()
            if code is not None:
                raise DemoError(
                    f"{child.name} ended with status {code}:\n{tail_of(child.log)}",
                    hint=f"see {child.log}",
                )

    def stop(self) -> None:
        """Ask every child to stop, newest first; kill what does not within the grace."""
        for child in reversed(self._children):
            _signal(child, signal.SIGTERM)
        deadline = time.monotonic() + STOP_GRACE_S
        for child in reversed(self._children):
            try:
                child.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _signal(child, signal.SIGKILL)
                child.process.wait()
        self._children.clear()


def tail_of(log: Path) -> str:
    """Return the last lines of a log file."""
    return "\n".join(
        log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
    )


def require_free_port(host: str, port: int) -> None:
    """Raise when something already listens on `port`.

    Raises:
        DemoError: The port is busy, or no port; the hint names the option that changes it.
    """
    if not 0 < port <= LAST_PORT:
        raise DemoError(f"{port} is not a port", hint=f"--port takes a number up to {LAST_PORT}")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise DemoError(
                f"port {port} on {host} is busy ({error.strerror})",
                hint=f"stop what uses it, or choose another: manage.py demo --port {port + 1}",
            ) from error


def _signal(child: Child, number: signal.Signals) -> None:
    if child.process.poll() is not None:
        return
    try:
        # The whole session: a worker has children of its own.
        os.killpg(child.process.pid, number)
    except ProcessLookupError:
        return
