"""Run a child and listen to it, without ever blocking for longer than a moment."""

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Final

from builds.compile_runner.protocol import EXIT_REPORTED, MAX_LINE, Event, Failure, decode
from builds.errors import CompileFailure

LISTEN_S: Final = 0.5
READ_BYTES: Final = 1 << 16
KILL_WAIT_S: Final = 10.0
_PR_SET_PDEATHSIG: Final = 1
# Looked up here: between fork and exec, a process with threads must not take the loader's lock.
_prctl: Final = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def listen(
    command: Sequence[str], *, job: bytes, folder: Path, time_limit_s: float
) -> Iterator[list[Event]]:
    """Run `command` with `job` on stdin; yield its events in batches until it ends well.

    A batch comes at least every half second, empty if nothing was said, so that the caller can say
    that it lives. Closing the iterator kills the child and everything it started.

    Raises:
        CompileFailure: The child reported a failure, crashed, was killed, or took too long.
    """
    deadline = time.monotonic() + time_limit_s
    reported: Failure | None = None
    with _started(command, job, folder) as (process, output):
        for batch in _batches(output):
            reported = next((item for item in batch if isinstance(item, Failure)), reported)
            yield batch
            if time.monotonic() > deadline:
                raise CompileFailure(
                    f"stopped after {time_limit_s:.0f} s",
                    failure_code="build.app.timeout",
                    hint="raise SPARSEFLEET_BUILD_TIME_LIMIT_S if the model is that large",
                    can_retry=True,
                )
        status = process.wait()
    if status != 0 or reported is not None:
        raise _failure(status, reported)


@contextlib.contextmanager
def _started(
    command: Sequence[str], job: bytes, folder: Path
) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    try:
        process = subprocess.Popen(  # noqa: S603 -- the command is a setting
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            start_new_session=True,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )
    except OSError as error:
        raise CompileFailure(
            f"the compiler could not be started: {error}",
            failure_code="build.app.start",
            hint="check SPARSEFLEET_COMPILE_COMMAND",
            can_retry=True,
        ) from error
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with process.stdin, contextlib.suppress(BrokenPipeError):
            process.stdin.write(job)
        yield process, process.stdout
    finally:
        _kill(process)
        process.stdout.close()


def _die_with_parent() -> None:
    # A worker that is killed with -9 cannot clean up: the kernel does it.
    assert _prctl is not None
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILL_WAIT_S)


def _batches(output: IO[bytes]) -> Iterator[list[Event]]:
    handle = output.fileno()
    os.set_blocking(handle, False)
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(handle, selectors.EVENT_READ)
        while True:
            if not selector.select(LISTEN_S):
                yield []
                continue
            data = os.read(handle, READ_BYTES)
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > MAX_LINE or not data:
                lines, rest = [*lines, rest], b""
            yield [decode(text) for text in map(_text, lines) if text]
            if not data:
                return


def _text(line: bytes) -> str:
    return line[:MAX_LINE].decode("utf-8", "replace").replace("\0", "").rstrip()


def _failure(status: int, reported: Failure | None) -> CompileFailure:
    if reported is not None:
        return CompileFailure(
            reported.message,
            failure_code=reported.code,
            hint=reported.hint,
            can_retry=reported.retryable,
        )
    if status < 0:
        return CompileFailure(
            f"the compiler was ended by signal {-status}",
            failure_code="build.app.killed",
            hint="it may have run out of memory",
            can_retry=True,
        )
    what = "without saying why" if status == EXIT_REPORTED else "unexpectedly"
    return CompileFailure(
        f"the compiler ended {what}, status {status}",
        failure_code="build.app.crash",
        hint="the log has its last words",
        can_retry=True,
    )
