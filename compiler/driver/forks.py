"""Run a function over several items in forked copies of this process, one per core.

For child processes of the compiler that have one thread and much to measure, such as the trial of
entropy bands: a copy has its own caches and native memory, so nothing has to be shared or locked.
The results are texts, those of a plain loop in its order. A copy that is killed, or whose function
raises, is an error here.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from compiler.errors import SelfTestError

Item = TypeVar("Item")


def map_forked(
    function: Callable[[Item], str], items: Iterable[Item], workers: int | None = None
) -> list[str]:
    """Return `[function(item) for item in items]`, computed by forked processes.

    Args:
        function: Any function that returns a text.
        items: Each is given to one call.
        workers: Processes; as many as cores if not given. With one, or in a process of several
            threads, which a fork would lose, nothing is forked.

    Raises:
        SelfTestError: A process was killed, or the function raised in it: the message says what.
    """
    todo = list(items)
    count = min(len(todo), workers or len(os.sched_getaffinity(0)))
    if count < 2 or threading.active_count() > 1:
        return [function(item) for item in todo]
    children = [_start(function, todo[at::count]) for at in range(count)]
    try:
        parts = [_collect(child) for child in children]
    finally:
        for pid, descriptor in children:
            os.close(descriptor)
            _end(pid)
    return [parts[at % count][at // count] for at in range(len(todo))]


def _start(function: Callable[[Item], str], items: list[Item]) -> tuple[int, int]:
    """Fork; return the process and where its results can be read."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    try:
        os.close(reading)
        try:
            document: object = [function(item) for item in items]
        except Exception as error:  # noqa: BLE001 - whatever it is, the parent raises it
            document = {"error": f"{type(error).__name__}: {error}"}
        with os.fdopen(writing, "w", encoding="utf-8") as out:
            json.dump(document, out)
    finally:
        os._exit(0)


def _collect(child: tuple[int, int]) -> list[str]:
    with os.fdopen(os.dup(child[1]), encoding="utf-8") as results:
        text = results.read()
    try:
        found = json.loads(text)
    except ValueError:  # empty or cut off
        raise SelfTestError(f"process {child[0]} ended without a result") from None
    if isinstance(found, dict):
        raise SelfTestError(str(found["error"]))
    return [str(item) for item in found]


def _end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    os.waitpid(pid, 0)
