"""`InferenceGuard`: whatever goes wrong, the caller gets a record; nothing wrong passes as good.

    question -> attempt -> fault? -> the remedies of its kind, while the time lasts -> record

It stands where an `Answerer` stands and holds another one in custody: attempts run on a thread of
the guard, so that a native call that never returns costs that thread and its plan and not the
caller; see `custody`. Faults, remedies and answers are counted; `facts` says how often.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Protocol

from device_agent.runtime.answers import Answerer, AnswerRecord, Outcome, Question
from device_agent.runtime.custody import Custody, Holds, Opened, degraded_by
from device_agent.runtime.faults import (
    REMEDIES,
    FaultError,
    FaultKind,
    GivenUpError,
    Way,
    kind_of,
)

log = logging.getLogger("device_agent.runtime")

_MS: Final = 1e3


class Attempts(Answerer, Holds, Protocol):
    """An answerer that makes one attempt at a time, in a given way."""

    def answer(self, question: Question, way: Way = ..., limit_s: float = ...) -> AnswerRecord:
        """Make one attempt; what goes wrong is in the record."""


class InferenceGuard(Custody[Attempts]):
    """A bundle that answers whatever happens; used by one thread at a time."""

    def __init__(
        self,
        open_bundle: Callable[[], Opened[Attempts]],
        timeout_s: float,
        is_critical: Callable[[], bool] = lambda: False,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Load the bundle; see `Custody`."""
        super().__init__(open_bundle, timeout_s, is_critical, monotonic)
        self._view = b""
        self._seen_by: Attempts | None = None

    def understands(self, question: Question) -> bool:
        """Return whether the bundle can be asked this."""
        return self._last.understands(question)

    def answer(self, question: Question) -> AnswerRecord:
        """Answer; whatever goes wrong is in the record, and nothing is raised."""
        start = self._monotonic()
        if question.image and self.understands(question):
            self._view, self._seen_by = question.image, None
        met = self.between()
        if FaultKind.CORRUPT_WEIGHTS in met:
            self._seen_by = None  # the picture may have been seen with them
        way, found = self.first_way()
        met += found
        record = self._attempt(question, way, start)
        met += record.faults
        for remedy in REMEDIES[record.faults[0]] if record.faults else ():
            if self._left_s(start) <= 0 or not record.faults:
                break
            if self.prepare(remedy, start + self._timeout_s, met):
                way = remedy.way
                record = self._attempt(question, way, start)
                met += record.faults
        return self._judged(record, way, met, start)

    def _attempt(self, question: Question, way: Way, start: float) -> AnswerRecord:
        try:
            answerer = self.ready()
        except FaultError as error:
            return self._nothing(error.kind, str(error))
        if question.image in (b"", self._view) and self._seen_by is not answerer:
            question = replace(question, image=self._view)
        seen_by, self._seen_by = self._seen_by, None
        left_s = self._left_s(start)
        try:
            record = self.call(answerer, lambda: answerer.answer(question, way, left_s))
        except GivenUpError as error:
            return replace(self._nothing(error.kind, str(error)), outcome=Outcome.TIMEOUT)
        except Exception as error:
            log.exception("an answer ended in an error of our own")
            return self._nothing(kind_of(error), str(error) or type(error).__name__)
        if FaultKind.BAD_INPUT in record.faults:  # refused before anything was shown
            self._seen_by = seen_by
        elif not record.faults:
            self._seen_by = answerer
        return record

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
        reasons = degraded_by(record.reasons, met, way, failed=record.failed)
        self.counts.answered(met, reasons, failed=record.failed)
        return replace(
            record,
            latency_ms=latency_ms,
            faults=tuple(met),
            reasons=reasons,
            degraded=bool(reasons),
        )

    def _left_s(self, start: float) -> float:
        return self._timeout_s - (self._monotonic() - start)
