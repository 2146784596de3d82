"""Forked copies: a plain loop's results, errors and nothing left behind."""

import os
import signal

import pytest

from compiler.driver.forks import map_forked
from compiler.errors import SelfTestError


@pytest.mark.parametrize("workers", [1, 2, 3, 9])
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_it_gives_what_a_loop_gives_in_its_order(workers: int, count: int) -> None:
    assert map_forked(lambda item: f"{item}", range(count), workers) == [
        f"{item}" for item in range(count)
    ]


def test_it_works_in_other_processes_and_leaves_none() -> None:
    found = [int(text) for text in map_forked(lambda _: f"{os.getpid()}", range(4), 2)]
    assert found[0] == found[2] != found[1] == found[3]
    assert os.getpid() not in found
    for pid in set(found):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_it_raises_what_a_copy_raised() -> None:
    def refuse(item: int) -> str:
        if item == 2:
            raise ValueError("two is refused")
        return ""

    with pytest.raises(SelfTestError, match="ValueError: two is refused"):
        map_forked(refuse, range(4), 2)


def test_it_tells_that_a_copy_was_killed() -> None:
    def die(item: int) -> str:
        if item == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return ""

    with pytest.raises(SelfTestError, match="without a result"):
        map_forked(die, range(2), 2)


def test_it_carries_more_than_a_pipe_holds() -> None:
    found = map_forked(lambda item: f"{item}" * 300_000, range(3), 2)
    assert [len(data) for data in found] == [300_000] * 3
