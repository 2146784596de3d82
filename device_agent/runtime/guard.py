"""`InferenceGuard`: whatever goes wrong, the caller gets a record; nothing wrong passes as good.

    question -> attempt -> fault? -> the remedies of its kind, while the time lasts -> record
                             |
      between two answers: a slice of the weights is hashed, dead threads are replaced

It stands where an `Answerer` stands and holds another one. Attempts run on a thread of the guard,
so that a native call that never returns costs that thread and its plan and not the caller: the plan
is built anew from the verified sections, and the old one is closed if its call ever ends. Faults,
remedies and answers are counted; `facts` says how often.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from compiler.contract.degrade import Rung
from compiler.contract.errors import ContractError
from device_agent.errors import AgentError
from device_agent.runtime.answers import Answerer, AnswerRecord, Outcome, Question
from device_agent.runtime.faults import AS_ASKED, REMEDIES, FaultKind, Remedy, Way, kind_of
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
_MS: Final = 1e3


class Attempts(Answerer, Protocol):
    """An answerer that makes one attempt at a time, in a given way."""

    @property
    def rungs(self) -> frozenset[Rung]:
        """Rungs that it has."""

    @property
    def lost_threads(self) -> int:
        """Lent threads that have died."""

    def answer(self, question: Question, way: Way = ..., limit_s: float = ...) -> AnswerRecord:
        """Make one attempt; what goes wrong is in the record."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A bundle that answers.

    Attributes:
        answerer: Makes the attempts.
        scrubber: Watches its weights; None where nobody can.
    """

    answerer: Attempts
    scrubber: Scrubber | None = None


@dataclass(slots=True)
class Counts:
    """What the guard saw since the start.

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

    def facts(self) -> dict[str, object]:
        """Return what `status` shows."""
        return {
            "faults": {kind.value: number for kind, number in sorted(self.faults.items())},
            "degraded": dict(sorted(self.degraded.items())),
            "recovered": self.recovered,
            "restarts": self.restarts,
            "stuck": self.stuck,
        }


class InferenceGuard:
    """A bundle that answers whatever happens; used by one thread at a time."""

    def __init__(
        self,
        open_bundle: Callable[[], Opened],
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
        self._opened: Opened | None = open_bundle()
        self._last = self._opened.answerer
        self._hand = Hand("answer")
        self._view = b""
        self._seen_by: Attempts | None = None
        self._hanging = 0
        self.counts = Counts()

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

    def understands(self, question: Question) -> bool:
        """Return whether the bundle can be asked this."""
        return self._last.understands(question)

    def answer(self, question: Question) -> AnswerRecord:
        """Answer; whatever goes wrong is in the record, and nothing is raised."""
        start = self._monotonic()
        if question.image and self.understands(question):
            self._view, self._seen_by = question.image, None
        before = self._between()
        way = AS_ASKED
        if self._is_critical():
            before.append(FaultKind.THERMAL)
            way = CRITICAL
        record = self._attempt(question, way, start)
        met = [*before, *record.faults]
        for remedy in REMEDIES[record.faults[0]] if record.faults else ():
            if self._left_s(start) <= 0 or not record.faults:
                break
            if self._prepare(remedy, start, met):
                way = remedy.way
                record = self._attempt(question, way, start)
                met += record.faults
        return self._judged(record, way, met, start)

    def close(self) -> None:
        """Free the native memory."""
        opened, self._opened = self._opened, None
        self._hand.close()
        if opened is not None:
            opened.answerer.close()

    def _between(self) -> list[FaultKind]:
        """Look after the plan before an answer; return what was found."""
        found = []
        opened = self._opened
        if opened is not None and opened.scrubber is not None and opened.scrubber.answered():
            found.append(FaultKind.CORRUPT_WEIGHTS)
            self._seen_by = None  # the picture may have been seen with them
        if opened is not None and opened.answerer.lost_threads:
            found.append(FaultKind.DEAD_WORKER)
            self._restart()
        return found

    def _prepare(self, remedy: Remedy, start: float, met: list[FaultKind]) -> bool:
        """Do what a remedy does before its attempt; return whether an attempt is worth making."""
        opened = self._opened
        if remedy.check:
            scrubber = None if opened is None else opened.scrubber
            until = start + self._timeout_s
            found = 0 if scrubber is None else scrubber.check_all(until, self._monotonic)
            met += [FaultKind.CORRUPT_WEIGHTS] if found else []
            if not found and remedy.way == AS_ASKED:
                return False
        if remedy.restart:
            self._restart()
        opened = self._opened
        has = opened.answerer.rungs if opened is not None else frozenset()
        return not remedy.way.fewest or Rung.FEWER_EXPERTS in has

    def _attempt(self, question: Question, way: Way, start: float) -> AnswerRecord:
        if self._opened is None:
            self._restart()
        opened = self._opened
        if opened is None:
            return self._nothing(FaultKind.CRASH, "the bundle does not load again")
        if opened.scrubber is not None and not opened.scrubber.repair():
            names = ", ".join(sorted(opened.scrubber.damaged))
            return self._nothing(FaultKind.CORRUPT_WEIGHTS, f"damaged weights: {names}")
        answerer = opened.answerer
        if question.image in (b"", self._view) and self._seen_by is not answerer:
            question = replace(question, image=self._view)
        seen_by, self._seen_by = self._seen_by, None
        left_s = self._left_s(start)
        try:
            record = self._hand.call(
                lambda: answerer.answer(question, way, left_s),
                HARD_LIMIT * self._timeout_s,
                lambda: self._came_back(answerer),
            )
        except StuckError as error:
            return self._given_up(answerer, str(error))
        except Exception as error:
            log.exception("an answer ended in an error of our own")
            return self._nothing(kind_of(error), str(error) or type(error).__name__)
        if FaultKind.BAD_INPUT in record.faults:  # refused before anything was shown
            self._seen_by = seen_by
        elif not record.faults:
            self._seen_by = answerer
        return record

    def _given_up(self, answerer: Attempts, detail: str) -> AnswerRecord:
        """Leave a plan whose call does not return; the next attempt builds another one."""
        self._opened = None
        self._hanging += 1
        self.counts.stuck += 1
        kind = FaultKind.DEAD_WORKER if answerer.lost_threads else FaultKind.TIMEOUT
        return replace(self._nothing(kind, detail), outcome=Outcome.TIMEOUT)

    def _came_back(self, answerer: Attempts) -> None:
        """Close a plan whose call returned after all; runs on the thread that was stuck."""
        self._hanging -= 1
        answerer.close()

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

    def _last_look(self, old: Opened) -> None:
        """Hash the weights of a plan that goes: answers that they spoilt are still counted."""
        if old.scrubber is not None:
            until = self._monotonic() + self._timeout_s
            if found := old.scrubber.check_all(until, self._monotonic):
                self.counts.faults[FaultKind.CORRUPT_WEIGHTS] += found

    def _nothing(self, kind: FaultKind, detail: str) -> AnswerRecord:
        """Return the record of an attempt without an answer."""
        return AnswerRecord(
            self.manifest_sha256, (), Outcome.ERROR, None, 0.0, detail, faults=(kind,)
        )

    def _judged(
        self, record: AnswerRecord, way: Way, met: list[FaultKind], start: float
    ) -> AnswerRecord:
        """Return the record of the whole answer, and count it."""
        latency_ms = (self._monotonic() - start) * _MS if met else record.latency_ms
        is_late = not record.failed and latency_ms > self._timeout_s * _MS
        if is_late:
            met.append(FaultKind.TIMEOUT)
            record = replace(
                record, outcome=Outcome.TIMEOUT, correct=None, detail="remedies took too long"
            )
        failed_by = {kind.value for kind in met if record.failed or way.fewest}
        reasons = tuple(sorted({*record.reasons, *failed_by} - {FaultKind.BAD_INPUT.value}))
        self.counts.faults.update(met)
        self.counts.degraded.update(reasons)
        self.counts.recovered += bool(met) and not record.failed
        return replace(
            record,
            latency_ms=latency_ms,
            faults=tuple(met),
            reasons=reasons,
            degraded=bool(reasons),
        )

    def _left_s(self, start: float) -> float:
        return self._timeout_s - (self._monotonic() - start)
