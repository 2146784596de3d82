"""A bundle in custody: watched between answers, called with a limit, built anew when that helps.

    Opened -(call, on a thread that is given up when it hangs)-> what the plan returned
    between answers: a slice of the weights is hashed, dead threads are replaced
    after a fault:   what the table of remedies says is prepared, or nothing helps

Both ways to answer stand on it: `guard.InferenceGuard` (whole questions, for the agent) and
`course.Course` (token by token, for `MoERuntime`). It walks no table and judges no answer; faults
are counted here, whoever met them. A native call that never returns costs its thread and its plan:
the plan is built anew from the verified sections, and the old one is closed if its call ever ends.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeVar

from compiler.contract.degrade import Rung
from compiler.contract.errors import ContractError
from device_agent.errors import AgentError
from device_agent.runtime.faults import (
    AS_ASKED,
    FaultError,
    FaultKind,
    GivenUpError,
    Remedy,
    Way,
)
from device_agent.runtime.hand import Hand, StuckError
from device_agent.runtime.scrubber import Scrubber

log = logging.getLogger("device_agent.runtime")

HARD_LIMIT: Final = 2.0
"""Times the limit of an answer after which its native call counts as stuck; below what probation
and the agent's supervision allow."""
MAX_STUCK: Final = 4
"""Plans that may hang in a native call: each keeps its context. Beyond, nothing is built anew."""
RESTART_S: Final = 60.0
"""Limit of loading a bundle again, seconds."""
CRITICAL: Final = Way(alone=True, fewest=True, prefetch=False)
"""How a machine answers that heat is about to switch off."""
Result = TypeVar("Result")


class Holds(Protocol):
    """A loaded bundle that somebody answers with."""

    @property
    def manifest_sha256(self) -> str:
        """Return which bundle it is."""

    @property
    def facts(self) -> Mapping[str, object]:
        """Return what `status` shows of the running code."""

    @property
    def rungs(self) -> frozenset[Rung]:
        """Rungs that it has."""

    @property
    def has_fallback(self) -> bool:
        """Whether it can do without routers here."""

    @property
    def lost_threads(self) -> int:
        """Lent threads that have died."""

    def close(self) -> None:
        """Free the native memory."""


HeldT = TypeVar("HeldT", bound=Holds)


@dataclass(frozen=True, slots=True)
class Opened(Generic[HeldT]):
    """A bundle that answers.

    Attributes:
        answerer: Makes the attempts.
        scrubber: Watches its weights; None where nobody can.
    """

    answerer: HeldT
    scrubber: Scrubber | None = None


@dataclass(slots=True)
class Counts:
    """What went wrong since the start.

    Attributes:
        faults: By kind, each attempt that ended in one, and each found between answers.
        degraded: By reason, the answers that were degraded, those that failed by a fault included.
        recovered: Answers that a remedy gave.
        restarts: Plans built anew.
        stuck: Native calls that did not return in time.
    """

    faults: Counter[FaultKind] = field(default_factory=Counter)
    degraded: Counter[str] = field(default_factory=Counter)
    recovered: int = 0
    restarts: int = 0
    stuck: int = 0

    def answered(self, met: Iterable[FaultKind], reasons: Iterable[str], *, failed: bool) -> None:
        """Count an answer: what it met, why it is degraded, and whether it came of it all."""
        met = tuple(met)
        self.faults.update(met)
        self.degraded.update(reasons)
        self.recovered += bool(met) and not failed

    def facts(self) -> dict[str, object]:
        """Return what `status` shows."""
        return {
            "faults": {kind.value: number for kind, number in sorted(self.faults.items())},
            "degraded": dict(sorted(self.degraded.items())),
            "recovered": self.recovered,
            "restarts": self.restarts,
            "stuck": self.stuck,
        }


def degraded_by(
    reasons: Iterable[str], met: Iterable[FaultKind], way: Way, *, failed: bool
) -> tuple[str, ...]:
    """Return why an answer is degraded, sorted; empty if it is not.

    Args:
        reasons: What the plan said: signals of rules, experts that were replaced.
        met: Faults on the way; they are reasons if the answer failed or has other bits for them.
        way: How it ran at last.
        failed: Whether it did not end by itself.
    """
    by_faults = {kind.value for kind in met if failed or way.changes_answers}
    return tuple(sorted({*reasons, *by_faults} - {FaultKind.BAD_INPUT.value}))


class Custody(Generic[HeldT]):
    """One bundle, kept able to answer; used by one thread at a time."""

    def __init__(
        self,
        open_bundle: Callable[[], Opened[HeldT]],
        timeout_s: float,
        is_critical: Callable[[], bool] = lambda: False,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Load the bundle.

        Args:
            open_bundle: Loads it, and again after a fault that only that cures.
            timeout_s: Limit of one answer, remedies included, seconds.
            is_critical: Whether the machine is about to be switched off by heat.
            monotonic: Clock in seconds.

        Raises:
            AgentError: It does not load.
            ContractError: It does not answer in words.
        """
        self._open, self._timeout_s = open_bundle, timeout_s
        self._is_critical, self._monotonic = is_critical, monotonic
        self._opened: Opened[HeldT] | None = open_bundle()
        self._last = self._opened.answerer
        self._hand = Hand("answer")
        self._hanging = 0
        self.counts = Counts()

    @property
    def latest(self) -> HeldT:
        """Return what was loaded last, be it closed by now."""
        return self._last

    @property
    def manifest_sha256(self) -> str:
        """Return which bundle it is."""
        return self._last.manifest_sha256

    @property
    def facts(self) -> Mapping[str, object]:
        """Return what `status` shows of the running code, and of what went wrong."""
        guard = self.counts.facts()
        opened = self._opened
        if opened is not None and opened.scrubber is not None:
            guard["weights"] = opened.scrubber.facts()
        return {**self._last.facts, "guard": guard}

    def close(self) -> None:
        """Free the native memory."""
        opened, self._opened = self._opened, None
        self._hand.close()
        if opened is not None:
            opened.answerer.close()

    def between(self) -> list[FaultKind]:
        """Look after the plan before an answer; return what was found."""
        found = []
        opened = self._opened
        if opened is not None and opened.scrubber is not None and opened.scrubber.answered():
            found.append(FaultKind.CORRUPT_WEIGHTS)
        if opened is not None and opened.answerer.lost_threads:
            found.append(FaultKind.DEAD_WORKER)
            self._restart()
        return found

    def first_way(self) -> tuple[Way, list[FaultKind]]:
        """Return how an answer begins, and the fault that says so."""
        return (CRITICAL, [FaultKind.THERMAL]) if self._is_critical() else (AS_ASKED, [])

    def prepare(self, remedy: Remedy, until: float, met: list[FaultKind]) -> bool:
        """Do what a remedy does before its attempt; return whether an attempt is worth making.

        Args:
            remedy: From the table.
            until: When to stop looking at weights, by the clock.
            met: Gets what is found.
        """
        opened = self._opened
        if remedy.check:
            scrubber = None if opened is None else opened.scrubber
            found = 0 if scrubber is None else scrubber.check_all(until, self._monotonic)
            met += [FaultKind.CORRUPT_WEIGHTS] if found else []
            if not found and remedy.way == AS_ASKED:
                return False
        if remedy.restart:
            self._restart()
        opened = self._opened
        if remedy.way.dense and (opened is None or not opened.answerer.has_fallback):
            return False
        has = opened.answerer.rungs if opened is not None else frozenset()
        return not remedy.way.fewest or Rung.FEWER_EXPERTS in has

    def ready(self) -> HeldT:
        """Return what an attempt can be made on, its weights as signed.

        Raises:
            FaultError: There is none: it does not load again, or weights stay damaged.
        """
        if self._opened is None:
            self._restart()
        opened = self._opened
        if opened is None:
            raise FaultError(FaultKind.CRASH, "the bundle does not load again")
        if opened.scrubber is not None and not opened.scrubber.repair():
            names = ", ".join(sorted(opened.scrubber.damaged))
            raise FaultError(FaultKind.CORRUPT_WEIGHTS, f"damaged weights: {names}")
        return opened.answerer

    def until(self) -> float:
        """Return when an answer that began now would be late, by the clock."""
        return self._monotonic() + self._timeout_s

    def has(self, held: HeldT) -> bool:
        """Return whether that is what an attempt would be made on now."""
        return self._opened is not None and self._opened.answerer is held

    def call(self, held: HeldT, do: Callable[[], Result]) -> Result:
        """Return what `do` returns, or raise what it raises; it uses `held` and may hang.

        Raises:
            GivenUpError: It did not end in time; `held` is left to it, and closed if it does.
        """
        limit_s = HARD_LIMIT * self._timeout_s
        try:
            return self._hand.call(do, limit_s, lambda: self._came_back(held))
        except StuckError as error:
            self._opened = None
            self._hanging += 1
            self.counts.stuck += 1
            kind = FaultKind.DEAD_WORKER if held.lost_threads else FaultKind.TIMEOUT
            raise GivenUpError(kind, str(error)) from error

    def _came_back(self, held: HeldT) -> None:
        """Close a plan whose call returned after all; runs on the thread that was stuck."""
        self._hanging -= 1
        held.close()

    def _restart(self) -> None:
        """Build the plan anew; without one if that fails, until the next attempt."""
        old, self._opened = self._opened, None
        if self._hanging > MAX_STUCK:
            log.warning("%d plans hang in native calls; none is built anew", self._hanging)
            return
        self.counts.restarts += 1
        try:
            if old is not None:
                self._last_look(old)
                self._hand.call(old.answerer.close, RESTART_S)
            self._opened = self._hand.call(self._open, RESTART_S)
            self._last = self._opened.answerer
        except (AgentError, ContractError, OSError, MemoryError, StuckError) as error:
            log.warning("the bundle does not load again: %s", error)

    def _last_look(self, old: Opened[HeldT]) -> None:
        """Hash the weights of a plan that goes: answers that they spoilt are still counted."""
        if old.scrubber is not None:
            until = self._monotonic() + self._timeout_s
            if found := old.scrubber.check_all(until, self._monotonic):
                self.counts.faults[FaultKind.CORRUPT_WEIGHTS] += found
