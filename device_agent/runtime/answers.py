"""Questions and answers, as the rest of the agent sees them."""

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Final, Protocol

from compiler.contract.degrade import Rung
from compiler.contract.errors import ContractError
from compiler.contract.session import Session
from device_agent.errors import AnswerError, RequestError
from device_agent.runtime.assembly import Assembly
from device_agent.runtime.faults import AS_ASKED, FaultKind, Way, kind_of

log = logging.getLogger("device_agent.runtime")

_SECOND_MS: Final = 1_000.0


@dataclass(frozen=True, slots=True)
class Question:
    """One question.

    Attributes:
        image: u8 pixels of the picture it is about; empty for none.
        prompt: Name of the prompt around the words.
        words: Tokens of the question.
        expected: The right answer in tokens, or None when nobody knows.
    """

    image: bytes
    prompt: str
    words: tuple[str, ...]
    expected: tuple[str, ...] | None = None


class Outcome(StrEnum):
    """How an answer ended."""

    ENDED = "ended"  # by the model itself
    CUT_OFF = "cut_off"  # at the answer limit
    ERROR = "error"  # an error status of the plan
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """One answer and how it came about.

    Attributes:
        manifest_sha256: Bundle that answered.
        words: What it said.
        correct: Whether that is the right answer; None when nobody knows.
        latency_ms: From the picture to the last token, milliseconds.
        detail: Error text, if any.
        degraded: Whether the device did less for it than the bundle asks for.
        faults: What went wrong on the way, in order; an answer may still have come of it.
        reasons: Why it is degraded: kinds of faults, or signals of the rules in effect.
        drain: Percent that the battery lost per hour of answering, over the window that this answer
            ended; None if it ended none, or nothing counts.
    """

    manifest_sha256: str
    words: tuple[str, ...]
    outcome: Outcome
    correct: bool | None
    latency_ms: float
    detail: str = ""
    degraded: bool = False
    faults: tuple[FaultKind, ...] = ()
    reasons: tuple[str, ...] = ()
    drain: float | None = None

    @property
    def failed(self) -> bool:
        """Return whether the answer did not end by itself."""
        return self.outcome is not Outcome.ENDED


class Answerer(Protocol):
    """A bundle that answers; used by one thread at a time."""

    @property
    def manifest_sha256(self) -> str:
        """Return which bundle it is."""

    @property
    def facts(self) -> Mapping[str, object]:
        """Return what `status` shows of the running code."""

    def understands(self, question: Question) -> bool:
        """Return whether the model knows every word and the kind of picture."""

    def answer(self, question: Question) -> AnswerRecord:
        """Answer; errors of the plan are in the record."""

    def close(self) -> None:
        """Free the native memory."""


class BundleAnswerer:
    """Answers with a loaded bundle: see the picture, ask, measure. One attempt each time."""

    def __init__(self, assembly: Assembly, timeout_s: float) -> None:
        """Start a session.

        Args:
            assembly: What answers; closed with this.
            timeout_s: Limit of one answer, seconds.

        Raises:
            ContractError: The bundle does not answer in words.
        """
        self._assembly = assembly
        self._session = Session(assembly.runner, assembly.pipeline)
        self._timeout_s = timeout_s

    @property
    def manifest_sha256(self) -> str:
        """Return which bundle it is."""
        return self._assembly.manifest_sha256

    @property
    def facts(self) -> Mapping[str, object]:
        """Return what `status` shows of the running code."""
        return self._assembly.facts

    @property
    def lost_threads(self) -> int:
        """Lent threads that have died."""
        return self._assembly.lost_threads

    @property
    def rungs(self) -> frozenset[Rung]:
        """Return the rungs that this bundle has here; a way beyond them changes nothing."""
        return self._assembly.rungs

    @property
    def has_fallback(self) -> bool:
        """Return whether this bundle can do without routers here."""
        return self._assembly.has_fallback

    def understands(self, question: Question) -> bool:
        """Return whether the model knows every word and the size of the picture."""
        try:
            self._require_understood(question)
        except RequestError:
            return False
        return True

    def answer(self, question: Question, way: Way = AS_ASKED, limit_s: float = inf) -> AnswerRecord:
        """Answer one question about one picture; what goes wrong is in the record.

        Args:
            question: What is asked.
            way: How this attempt runs.
            limit_s: Stop earlier than the time of an answer says, seconds.
        """
        monotonic = self._assembly.monotonic
        limit_s = min(limit_s, self._timeout_s)
        start = monotonic()
        reasons = self._assembly.begin(way, start + limit_s)
        if self._assembly.is_stale:
            self._session.look_again()
        words, outcome, detail, fault = self._attempt(question, way)
        seconds = monotonic() - start
        ending = self._assembly.ended(seconds)
        reasons += ending.reasons
        latency_ms = seconds * _SECOND_MS
        if outcome is Outcome.ENDED and latency_ms > limit_s * _SECOND_MS:
            outcome, detail, fault = Outcome.TIMEOUT, f"took {latency_ms:.0f} ms", FaultKind.TIMEOUT
        if fault is FaultKind.TIMEOUT:
            outcome = Outcome.TIMEOUT
            detail = detail or f"not finished after {limit_s:g} s"
        expected = question.expected
        correct = None if expected is None else outcome is Outcome.ENDED and words == expected
        faults = () if fault is None else (fault,)
        record = AnswerRecord(
            self.manifest_sha256,
            words,
            outcome,
            correct,
            latency_ms,
            detail,
            bool(reasons),
            faults,
            reasons,
            ending.drain,
        )
        if fault is not FaultKind.BAD_INPUT:
            self._assembly.judged(failed=record.failed, latency_ms=latency_ms)
        return record

    def close(self) -> None:
        """Free the native memory; what was learned of experts is kept."""
        self._assembly.close()

    def _attempt(
        self, question: Question, way: Way
    ) -> tuple[tuple[str, ...], Outcome, str, FaultKind | None]:
        try:
            self._require_understood(question)
            with self._assembly.alone() if way.alone else nullcontext():
                return *self._ask(question), "", None
        except Exception as error:  # named by kind; nothing passes to the caller
            fault = kind_of(error)
            if fault is FaultKind.CRASH and not isinstance(error, ContractError):
                log.exception("an answer ended in an error of our own")
            return (), Outcome.ERROR, str(error) or type(error).__name__, fault

    def _require_understood(self, question: Question) -> None:
        tokens, image = self._assembly.pipeline.tokens, self._assembly.pipeline.image
        if tokens is None:
            raise RequestError("this bundle does not answer in words")
        try:
            tokens.prompt(question.prompt, question.words)
        except ContractError as error:
            raise RequestError(str(error), hint=error.hint) from error
        wanted = 0 if image is None else image.size_bytes
        if len(question.image) not in (0, wanted):
            raise RequestError(f"a picture of {len(question.image)} bytes, expected {wanted}")

    def _ask(self, question: Question) -> tuple[tuple[str, ...], Outcome]:
        tokens = self._assembly.pipeline.tokens
        assert tokens is not None
        if question.image:
            self._session.see(question.image)
        answer = self._session.answer(tokens.prompt(question.prompt, question.words))
        outcome = Outcome.ENDED if answer.stopped else Outcome.CUT_OFF
        return tuple(tokens.words(answer.tokens)), outcome


def require_answered(record: AnswerRecord) -> AnswerRecord:
    """Return `record` unless the plan failed.

    Raises:
        RequestError: The question is not one for this bundle.
        AnswerError: An error status or a timeout.
    """
    if FaultKind.BAD_INPUT in record.faults:
        raise RequestError(record.detail)
    if record.outcome in (Outcome.ERROR, Outcome.TIMEOUT):
        raise AnswerError(record.detail or record.outcome.value)
    return record
