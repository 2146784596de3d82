"""A thread that does one thing at a time for somebody who will not wait for ever.

A fork has no thread of its parent: there, the first call starts one.
"""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Final, Generic, TypeVar, cast

CLOSE_S: Final = 1.0
Result = TypeVar("Result")


class StuckError(Exception):
    """What was to be done does not end; its thread is left to it."""


@dataclass(slots=True)
class _Job(Generic[Result]):
    do: Callable[[], Result]
    late: Callable[[], None]
    lock: threading.Lock = field(default_factory=threading.Lock)
    done: threading.Event = field(default_factory=threading.Event)
    is_late: bool = False
    result: Result | None = None
    error: BaseException | None = None

    def run(self) -> bool:
        """Do it; return whether somebody still waited."""
        try:
            self.result = self.do()
        except BaseException as error:  # noqa: BLE001 -- raised again where it was asked for
            self.error = error
        with self.lock:
            self.done.set()
            is_late = self.is_late
        if is_late:
            self.late()
        return not is_late


_Jobs = SimpleQueue["_Job[object] | None"]


class Hand:
    """One thread, replaced when it is stuck; used by one caller at a time."""

    def __init__(self, name: str) -> None:
        """Start the thread now: later there may be no memory for one."""
        self._name = name
        self._jobs: _Jobs | None = None
        self._thread: threading.Thread
        self._pid: int
        self._start()

    def call(
        self, do: Callable[[], Result], limit_s: float, late: Callable[[], None] = lambda: None
    ) -> Result:
        """Return what `do` returns, or raise what it raises.

        Args:
            do: Runs on the thread.
            limit_s: How long is waited for, seconds.
            late: Called on the thread when `do` ends after that.

        Raises:
            StuckError: It did not end in time.
            MemoryError: The system gives no thread.
        """
        is_here = self._pid == os.getpid()
        jobs = self._jobs if self._jobs is not None and is_here else self._start()
        job = _Job(do, late)
        jobs.put(cast("_Job[object]", job))
        if not job.done.wait(limit_s):
            with job.lock:
                job.is_late = not job.done.is_set()
        if job.is_late:
            self._jobs = None
            raise StuckError(f"not finished after {limit_s:g} s")
        if job.error is not None:
            raise job.error
        return cast("Result", job.result)

    def close(self) -> None:
        """Let the thread go, and wait for it a little; one that is stuck ends when it can."""
        jobs, self._jobs = self._jobs, None
        if jobs is not None:
            jobs.put(None)
            self._thread.join(CLOSE_S)

    def _start(self) -> _Jobs:
        jobs: _Jobs = SimpleQueue()
        thread = threading.Thread(target=_serve, args=(jobs,), name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise MemoryError(f"no thread to answer on: {error}") from error
        self._jobs, self._thread, self._pid = jobs, thread, os.getpid()
        return jobs


def _serve(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        if not job.run():
            return
        del job  # it holds its result
