"""A plan in a process of its own, as a back end: what crashes there is an error here.

    start -> (script) -> ready -> request, reply ... -> pipe closed -> gone
    dead, hung or nonsense -> killed -> BackendCrashedError; the next call starts another one

Protocol and bounds: `compiler.contract.runner_frames`. The runner is `plan_runner`, with a bundle's
own kernels, or a freestanding program, on this machine or under an emulator. It ends when this
process does, because its pipe then ends. What it says on stderr is read as it comes: the beginning
is kept for the error that tells how it ended, the rest is dropped.
"""

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, ClassVar, Final

from compiler.contract.backend import Backend, BackendAbsentError, BackendCrashedError, BackendError
from compiler.contract.native_errors import raise_status
from compiler.contract.pipeline import ProgramSpec
from compiler.contract.plan import Plan
from compiler.contract.plan_format import Status
from compiler.contract.runner_frames import (
    NONE,
    REPLY,
    ProgramFrames,
    Reply,
    frames_of,
    keep_request,
    most_appended_rows,
    read_reply,
)
from compiler.contract.session import Buffer

TIMEOUT_S: Final = 60.0
START_TIMEOUT_S: Final = 120.0
_CHUNK_BYTES: Final = 1 << 16
_SHOWN_BYTES: Final = 300
_LEAVE_S: Final = 1.0
_MS: Final = 1_000
_PACKAGE_ROOT: Final = Path(__file__).resolve().parents[2]


class ProcessBackend(Backend):
    """Runs a plan in a child."""

    name: ClassVar[str] = "process"

    def __init__(
        self,
        command: Sequence[str],
        plan: Plan,
        script: Callable[[], bytes] = bytes,
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Start nothing yet.

        Args:
            command: The runner, with an emulator before it where it needs one.
            plan: What it runs; says which programs there are and how long frames may be.
            script: Returns what a freestanding runner reads first; nothing for one that has its
                bundle.
            timeout_s: A call that takes longer ends the process.
        """
        super().__init__()
        self._command, self._plan, self._script = tuple(command), plan, script
        self._frames: Mapping[str, ProgramFrames] = frames_of(plan)
        self._timeout_s = timeout_s
        self._child: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._told = b""
        self._kv_length = 0
        self.starts = 0
        """How many processes were started."""

    @property
    def pid(self) -> int | None:
        """Number of the process, if one runs."""
        return None if self._child is None else self._child.pid

    @property
    def kv_length(self) -> int:
        """Rows in the key/value cache; 0 after a crash."""
        return self._kv_length

    @kv_length.setter
    def kv_length(self, length: int) -> None:
        """Forget every row from `length` on.

        Raises:
            BackendError: The number is negative.
            ContextLostError: These rows were overwritten, or the process that had them is gone.
            BackendCrashedError: As `execute`.
        """
        if length < 0:
            raise BackendError(f"cannot set the cache to {length} rows")
        if length > self._kv_length:
            raise_status(Status.CONTEXT_LOST, f"cache of {length} rows")
        if length != self._kv_length:
            self._ask(keep_request(length), 0, f"cache of {length} rows", range(length, length + 1))

    def _load(self) -> Mapping[str, ProgramSpec]:
        self._start()
        return {name: each.spec for name, each in self._frames.items()}

    def _execute(self, program: str, inputs: Mapping[str, Buffer]) -> Mapping[str, memoryview]:
        frames = self._frames[program]
        tokens = frames.tokens(inputs)
        request = frames.request(inputs, tokens)
        data = self._ask(request, frames.reply_bytes(tokens), f"program {program!r}")
        return frames.outputs_of(data, tokens)

    def _ask(self, request: bytes, reply_bytes: int, what: str, rows: range | None = None) -> bytes:
        """Return what follows an OK reply, after which the cache has one of `rows` rows.

        None: any that a run may leave. After an error it has as many as before.
        """
        if self._child is None:
            self._start()
        deadline = time.monotonic() + self._timeout_s
        if rows is None:
            most = self._kv_length + most_appended_rows(self._plan)
            rows = range(self._kv_length, most + 1)
        try:
            reply, data = self._exchange(request, reply_bytes, rows, deadline)
        except (OSError, EOFError, ValueError) as error:
            raise self._crashed(str(error) or "it ended") from error
        except BaseException:  # an interrupt between request and reply: what comes next is torn
            self._end()
            raise
        self._kv_length = reply.kv_length
        if reply.status != Status.OK:
            where = what if reply.failed_call == NONE else f"{what} call {reply.failed_call}"
            raise_status(reply.status, where)
        return data

    def _exchange(
        self, request: bytes, reply_bytes: int, rows: range, deadline: float
    ) -> tuple[Reply, bytes]:
        self._write(request, deadline)
        reply = read_reply(self._read(REPLY.size, deadline), reply_bytes)
        left = rows if reply.status == Status.OK else (self._kv_length,)
        if reply.kv_length not in left:
            raise ValueError(f"it says that its cache has {reply.kv_length} rows")
        return reply, self._read(reply.size_bytes, deadline)

    def _start(self) -> None:
        self._kv_length = 0
        self._told = b""
        script = self._script()
        try:
            self._child = subprocess.Popen(  # noqa: S603 -- as configured, without a shell
                self._command,
                cwd=_PACKAGE_ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,  # Ctrl-C is for us to pass on
            )
        except OSError as error:
            self._end()
            raise BackendAbsentError(
                f"the plan runner cannot be started: {error}",
                hint=f"is {self._command[0]} installed?",
            ) from error
        self.starts += 1
        self._errors = self._child.stderr
        for pipe in (self._child.stdin, self._child.stdout, self._child.stderr):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        try:
            reply, _ = self._exchange(script, 0, range(1), time.monotonic() + START_TIMEOUT_S)
        except (OSError, EOFError, ValueError) as error:
            raise self._crashed(f"it does not load the plan: {error}") from error
        except BaseException:  # as in `_ask`: the next call starts another one
            self._end()
            raise
        if reply.status != Status.OK:
            raise self._crashed(f"it does not load the plan: status {reply.status}")

    def _write(self, data: bytes, deadline: float) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        fd, view = self._child.stdin.fileno(), memoryview(data)
        while view:
            self._wait(fd, select.POLLOUT, deadline)
            with contextlib.suppress(BlockingIOError):
                view = view[os.write(fd, view[:_CHUNK_BYTES]) :]

    def _read(self, size: int, deadline: float) -> bytes:
        assert self._child is not None
        assert self._child.stdout is not None
        fd, data = self._child.stdout.fileno(), bytearray()
        while len(data) < size:
            self._wait(fd, select.POLLIN, deadline)
            with contextlib.suppress(BlockingIOError):
                part = os.read(fd, size - len(data))
                if not part:
                    raise EOFError("it ended")
                data += part
        return bytes(data)

    def _wait(self, fd: int, event: int, deadline: float) -> None:
        """Sleep until the pipe is ready."""
        while fd not in (ready := self._ready({fd: event}, deadline)):
            if not ready:
                raise TimeoutError("it did not answer in time")

    def _ready(self, wanted: Mapping[int, int], deadline: float) -> set[int]:
        """Sleep until a wanted pipe or stderr is ready; read a piece of stderr if that is.

        Returns:
            What is ready; nothing after the deadline.
        """
        poll, errors = select.poll(), self._errors
        for fd, event in wanted.items():
            poll.register(fd, event)
        if errors is not None:
            poll.register(errors, select.POLLIN)
        left_s = deadline - time.monotonic()
        ready = {fd for fd, _ in poll.poll(left_s * _MS)} if left_s > 0 else set()
        if errors is not None and errors.fileno() in ready:
            part = os.read(errors.fileno(), _CHUNK_BYTES)
            self._told += part[: _SHOWN_BYTES - len(self._told)]
            if not part:
                errors.close()
                self._errors = None
        return ready

    def _crashed(self, why: str) -> BackendCrashedError:
        """End the process and return the error that tells how it went."""
        status, told = self._end()
        if status is not None and status < 0:
            why = f"{why}; ended by {_signal_name(-status)}"
        elif status:
            why = f"{why}; exit status {status}"
        return BackendCrashedError(
            f"the plan runner is gone: {why}" + (f"; {told}" if told else ""),
            hint="the next call starts another one; its cache is empty",
        )

    def _end(self) -> tuple[int | None, str]:
        """Kill the process; return its status before that, if it had ended, and what it said."""
        child, self._child, self._kv_length = self._child, None, 0
        status = None
        if child is not None:
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()
            deadline = time.monotonic() + _LEAVE_S
            while self._errors is not None and self._ready({}, deadline):
                pass
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = child.wait(max(0.0, deadline - time.monotonic()))
            child.kill()
            child.wait()
        if self._errors is not None:
            self._errors.close()
            self._errors = None
        return status, self._told.decode("utf-8", "replace").strip()

    def _unload(self) -> None:
        self._end()


def _signal_name(number: int) -> str:
    """Return what a signal is called; most of the real-time ones have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
