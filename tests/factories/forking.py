"""Calls of `map_forked` in a process of one thread, which a test worker is not; prints JSON.

python -m tests.factories.forking NAME
"""

import json
import os
import signal
import sys
import threading

from compiler.driver.forks import map_forked
from compiler.errors import SelfTestError


def order() -> object:
    return [
        map_forked(lambda item: f"{item}", range(count), workers)
        for workers in (1, 2, 3, 9)
        for count in (0, 1, 2, 7)
    ]


def processes() -> object:
    found = [int(text) for text in map_forked(lambda _: f"{os.getpid()}", range(4), 2)]
    alive = []
    for pid in set(found):
        try:
            os.kill(pid, 0)
            alive.append(pid)
        except ProcessLookupError:
            continue
    return {"mine": os.getpid(), "found": found, "alive": alive}


def refused() -> object:
    def refuse(item: int) -> str:
        if item == 2:
            raise ValueError("two is refused")
        return ""

    return message(lambda: map_forked(refuse, range(4), 2))


def killed() -> object:
    mine = os.getpid()

    def die(item: int) -> str:
        assert os.getpid() != mine
        if item == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return ""

    return message(lambda: map_forked(die, range(2), 2))


def long() -> object:
    return [len(text) for text in map_forked(lambda item: f"{item}" * 300_000, range(3), 2)]


def threads() -> object:
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    try:
        found = set(map_forked(lambda _: f"{os.getpid()}", range(4), 2))
    finally:
        stop.set()
        other.join()
    return found == {f"{os.getpid()}"}


def message(call) -> str:
    try:
        call()
    except SelfTestError as error:
        return str(error)
    return "nothing was raised"


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()))
