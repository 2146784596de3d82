"""How many threads answer: measured when a bundle starts, on its own self-test.

    runner + first run of the self-test -> seconds with 1, 2, 4 ... threads -> the fewest that are
    nearly as fast as the best

The engine calls it once per start. It takes `BUDGET_S` and two runs at most, and changes nothing
but the number of threads: the bits are the same with any. A model so large that one run spends the
budget has work to share; it gets every thread without being measured.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from compiler.contract.native_library import MAX_THREADS
from compiler.contract.selftest import SelfTestRun
from compiler.contract.session import PlanRunner
from device_agent.errors import ConfigurationError

BUDGET_S: Final = 0.05
ROUNDS: Final = 7
MAX_GAIN_GIVEN_UP: Final = 1.1
"""A thread more must be worth at least this; on a phone it costs energy."""


class ThreadedRunner(PlanRunner, Protocol):
    """A plan that can be given more or fewer threads."""

    threads: int


@dataclass(frozen=True, slots=True)
class ThreadChoice:
    """What was chosen and why.

    Attributes:
        threads: Threads of one run, the caller's among them.
        seconds: Median seconds of the measured run by number of threads; empty if not measured.
    """

    threads: int
    seconds: Mapping[int, float]


def require_threads(threads: object) -> None:
    """Require a number of threads that an answer may have; 0 = as many as help.

    Raises:
        ConfigurationError: It is out of range, or no whole number.
    """
    if isinstance(threads, bool) or not isinstance(threads, int) or not 0 <= threads <= MAX_THREADS:
        hint = f"a whole number: 0, as many as help, to {MAX_THREADS}"
        raise ConfigurationError(f"threads {threads!r}", hint=hint)


def counts(most: int) -> tuple[int, ...]:
    """Return the numbers worth measuring: powers of two below `most`, and `most`."""
    found = [1]
    while found[-1] * 2 < most:
        found.append(found[-1] * 2)
    return tuple(dict.fromkeys((*found, most)))


def choose(seconds: Mapping[int, Sequence[float]]) -> int:
    """Return the fewest threads whose median is within `MAX_GAIN_GIVEN_UP` of the best."""
    medians = {count: statistics.median(times) for count, times in seconds.items()}
    limit = min(medians.values()) * MAX_GAIN_GIVEN_UP
    return min(count for count, median in medians.items() if median <= limit)


def tune_threads(
    runner: ThreadedRunner,
    run: SelfTestRun,
    most: int,
    monotonic: Callable[[], float] = time.perf_counter,
    budget_s: float = BUDGET_S,
) -> ThreadChoice:
    """Measure, set `runner.threads`, and leave the key/value cache empty.

    Args:
        runner: A plan with an empty cache.
        run: What to run: the first run of a self-test vector, which needs no rows in the cache.
        most: Threads that may be used, at least 1.
        monotonic: Clock in seconds.
        budget_s: The most seconds it may take, but for two runs.

    Raises:
        ContractError: The plan ended with an error status.
    """

    def once() -> float:
        start = monotonic()
        runner.run(run.program, run.inputs)
        taken = monotonic() - start
        runner.kv_length = 0
        return taken

    if most == 1:
        return ThreadChoice(1, {})
    end = monotonic() + budget_s
    once()
    if monotonic() > end:
        runner.threads = most
        return ThreadChoice(most, {})
    seconds: dict[int, list[float]] = {}
    for count in counts(most):
        runner.threads = count
        once()  # wakes the threads
        seconds[count] = [once()]
        part_end = monotonic() + (end - monotonic()) / 2
        while len(seconds[count]) < ROUNDS and monotonic() < part_end:
            seconds[count].append(once())
    chosen = choose(seconds)
    runner.threads = chosen
    return ThreadChoice(chosen, {n: statistics.median(times) for n, times in seconds.items()})
