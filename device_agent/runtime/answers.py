"""Questions and answers, as the rest of the agent sees them."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Final, Protocol

from compiler.contract.bands import BandedRunner
from compiler.contract.degrade import Rung
from compiler.contract.errors import ContractError
from compiler.contract.pager import PagerSwitch
from compiler.contract.pipeline import Pipeline
from compiler.contract.policy import PLAIN
from compiler.contract.session import Buffer, PlanRunner, RunnerBefore, Session
from device_agent.errors import AnswerError, RequestError
from device_agent.runtime.bundle import ClosableRunner, LoadedBundle
from device_agent.runtime.degrade_keeper import DegradeKeeper, rungs_of
from device_agent.runtime.energy import EnergyMeter, Work
from device_agent.runtime.faults import AS_ASKED, FaultKind, Way, kind_of
from device_agent.runtime.keeper import PolicyKeeper
from device_agent.runtime.residency import Residency
from device_agent.runtime.rungs import take_rung
from device_agent.runtime.sentinel import SentinelRunner
from device_agent.runtime.steering_keeper import SteeringKeeper
from device_agent.runtime.work import WorkRunner

log = logging.getLogger("device_agent.runtime")

SUBSTITUTED: Final = "substituted"
"""Why an answer is degraded that did without an expert which might not be loaded."""
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


class TimeoutRunner(RunnerBefore):
    """A plan that stops between two native calls when the answer takes too long."""

    def __init__(self, runner: PlanRunner, monotonic: Callable[[], float]) -> None:
        super().__init__(runner)
        self._monotonic = monotonic
        self.deadline = float("inf")

    def run(self, program: str, inputs: Mapping[str, Buffer]) -> Mapping[str, memoryview]:
        """Run one program.

        Raises:
            TimeoutError: The deadline has passed.
            ContractError: The plan ended with an error status.
        """
        if self._monotonic() > self.deadline:
            raise TimeoutError
        return self._runner.run(program, inputs)


class BundleAnswerer:
    """Answers with a loaded bundle: see the picture, ask, measure. One attempt each time."""

    def __init__(
        self,
        bundle: LoadedBundle,
        timeout_s: float,
        monotonic: Callable[[], float] = time.perf_counter,
        facts: Mapping[str, object] | None = None,
        keeper: PolicyKeeper | None = None,
        degrade: DegradeKeeper | None = None,
        pager: PagerSwitch | Residency | None = None,
        energy: EnergyMeter | None = None,
        steering: SteeringKeeper | None = None,
    ) -> None:
        """Start a session; `keeper` and `degrade` see every answer and keep policy and rung.

        Args:
            bundle: What answers.
            timeout_s: Limit of one answer, seconds.
            monotonic: Clock in seconds.
            facts: For `status`.
            keeper: Of the policy.
            degrade: Of the rung.
            pager: Where experts come from, if they are paged; already told to the plan.
            energy: Says what answers cost.
            steering: Of the bundle's routers.

        Raises:
            ContractError: The bundle does not answer in words.
        """
        self._sha256 = bundle.manifest_sha256
        self._facts = dict(facts or {})
        self._keeper = keeper
        self._degrade = degrade
        self._pager = pager
        self._energy = energy
        self._steering = steering
        self._pipeline: Pipeline = bundle.pipeline
        self._ladder = bundle.ladder
        self._native: ClosableRunner = bundle.runner
        nearest: PlanRunner = bundle.runner if steering is None else steering.runner
        self._runner = TimeoutRunner(nearest, monotonic)
        self._work = WorkRunner(self._runner, bundle.pipeline, bundle.work)
        watched = SentinelRunner(self._work, bundle.pipeline)
        self._bands = bundle.bands
        self._banded = None if bundle.bands is None else BandedRunner(watched, bundle.bands)
        self._session = Session(self._banded or watched, bundle.pipeline)
        self._timeout_s = timeout_s
        self._monotonic = monotonic

    @property
    def manifest_sha256(self) -> str:
        """Return which bundle it is."""
        return self._sha256

    @property
    def facts(self) -> Mapping[str, object]:
        """Return what `status` shows of the running code."""
        facts = dict(self._facts)
        if self._keeper is not None:
            facts["policy_now"] = self._keeper.facts()
        if self._degrade is not None:
            facts["rung"] = int(self._degrade.present)
            facts["rules_revision"] = self._degrade.revision
            facts["degrade"] = {
                **self._degrade.facts(),
                "planned_bytes": {rung.name.lower(): size for rung, size in self._ladder.items()},
            }
        if self._banded is not None:
            facts["steps"] = dict(self._banded.ran)
        if self._energy is not None:
            facts["energy"] = self._energy.facts()
            facts |= self._energy.gauges()
        if isinstance(self._pager, Residency):
            facts.update(self._pager.facts())
        if self._steering is not None:
            facts |= {"steering": self._steering.facts(), **self._steering.gauges()}
        return facts

    @property
    def lost_threads(self) -> int:
        """Lent threads that have died."""
        return self._native.lost_threads

    @property
    def rungs(self) -> frozenset[Rung]:
        """Return the rungs that this bundle has here; a way beyond them changes nothing."""
        return frozenset(rungs_of(self._bands, is_paged=self._pager is not None))

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
        reasons = self._take_rung(way)
        if self._energy is not None:
            self._energy.begin()
        start = self._monotonic()
        limit_s = min(limit_s, self._timeout_s)
        self._runner.deadline = start + limit_s
        words, outcome, detail, fault = self._attempt(question, way)
        if self._steering is not None and self._steering.answered():
            reasons = (*reasons, SUBSTITUTED)
        latency_ms = (self._monotonic() - start) * _SECOND_MS
        if self._keeper is not None:
            self._keeper.answered()
        weight_bytes, operations = self._work.take()
        if self._energy is not None:
            self._energy.answered(Work(latency_ms / _SECOND_MS, weight_bytes, operations))
        if outcome is Outcome.ENDED and latency_ms > limit_s * _SECOND_MS:
            outcome, detail, fault = Outcome.TIMEOUT, f"took {latency_ms:.0f} ms", FaultKind.TIMEOUT
        if fault is FaultKind.TIMEOUT:
            outcome = Outcome.TIMEOUT
            detail = detail or f"not finished after {limit_s:g} s"
        expected = question.expected
        correct = None if expected is None else outcome is Outcome.ENDED and words == expected
        faults = () if fault is None else (fault,)
        record = AnswerRecord(
            self._sha256,
            words,
            outcome,
            correct,
            latency_ms,
            detail,
            bool(reasons),
            faults,
            reasons,
        )
        if self._degrade is not None and fault is not FaultKind.BAD_INPUT:
            self._degrade.answered(failed=record.failed, latency_ms=latency_ms)
        return record

    def close(self) -> None:
        """Free the native memory; what was learned of experts is kept."""
        if isinstance(self._pager, Residency):
            self._pager.keep()
        self._native.close()

    def _attempt(
        self, question: Question, way: Way
    ) -> tuple[tuple[str, ...], Outcome, str, FaultKind | None]:
        try:
            self._require_understood(question)
            with self._alone() if way.alone else nullcontext():
                return *self._ask(question), "", None
        except Exception as error:  # named by kind; nothing passes to the caller
            fault = kind_of(error)
            if fault is FaultKind.CRASH and not isinstance(error, ContractError):
                log.exception("an answer ended in an error of our own")
            return (), Outcome.ERROR, str(error) or type(error).__name__, fault

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Run on the caller's thread and by the plain policy; afterwards as before."""
        threads, present = self._native.threads, None
        if self._native.policy.is_supported:
            present = self._native.policy.present
            self._native.policy.publish(PLAIN.variants)
        self._native.threads = 1
        try:
            yield
        finally:
            self._native.threads = threads
            if present is not None:
                self._native.policy.use(present)

    def _take_rung(self, way: Way) -> tuple[str, ...]:
        """Run the next answer on the present rung or by `way`; return why, if that changes it."""
        rung = Rung.NORMAL if self._degrade is None else self._degrade.rung()
        take_rung(rung, self._banded, self._pager, self._steering, way)
        return self._degrade.reasons() if self._degrade and rung.changes_answers else ()

    def _require_understood(self, question: Question) -> None:
        tokens, image = self._pipeline.tokens, self._pipeline.image
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
        tokens = self._pipeline.tokens
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
