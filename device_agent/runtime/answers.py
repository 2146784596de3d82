"""Questions and answers, as the rest of the agent sees them."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from compiler.contract.bands import BandedRunner
from compiler.contract.degrade import Rung
from compiler.contract.errors import ContractError
from compiler.contract.pipeline import Pipeline
from compiler.contract.session import Buffer, PlanRunner, RunnerBefore, Session
from device_agent.errors import AnswerError
from device_agent.runtime.bundle import ClosableRunner, LoadedBundle
from device_agent.runtime.degrade_keeper import DegradeKeeper
from device_agent.runtime.keeper import PolicyKeeper

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
    """

    manifest_sha256: str
    words: tuple[str, ...]
    outcome: Outcome
    correct: bool | None
    latency_ms: float
    detail: str = ""
    degraded: bool = False

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
    """Answers with a loaded bundle: see the picture, ask, measure."""

    def __init__(
        self,
        bundle: LoadedBundle,
        timeout_s: float,
        monotonic: Callable[[], float] = time.perf_counter,
        facts: Mapping[str, object] | None = None,
        keeper: PolicyKeeper | None = None,
        degrade: DegradeKeeper | None = None,
    ) -> None:
        """Start a session; `keeper` and `degrade` see every answer and keep policy and rung.

        Raises:
            ContractError: The bundle does not answer in words.
        """
        self._sha256 = bundle.manifest_sha256
        self._facts = dict(facts or {})
        self._keeper = keeper
        self._degrade = degrade
        self._pipeline: Pipeline = bundle.pipeline
        self._native: ClosableRunner = bundle.runner
        self._runner = TimeoutRunner(bundle.runner, monotonic)
        self._banded = None if bundle.bands is None else BandedRunner(self._runner, bundle.bands)
        self._session = Session(self._banded or self._runner, bundle.pipeline)
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
            facts["degrade"] = self._degrade.facts()
        if self._banded is not None:
            facts["steps"] = dict(self._banded.ran)
        return facts

    def understands(self, question: Question) -> bool:
        """Return whether the model knows every word and the size of the picture."""
        tokens, image = self._pipeline.tokens, self._pipeline.image
        try:
            if tokens is not None:
                tokens.prompt(question.prompt, question.words)
        except ContractError:
            return False
        fits = image is not None and len(question.image) == image.size_bytes
        return tokens is not None and (fits or not question.image)

    def answer(self, question: Question) -> AnswerRecord:
        """Answer one question about one picture."""
        degraded = self._take_rung()
        start = self._monotonic()
        self._runner.deadline = start + self._timeout_s
        words: tuple[str, ...] = ()
        detail = ""
        try:
            words, outcome = self._ask(question)
        except TimeoutError:
            outcome, detail = Outcome.TIMEOUT, f"not finished after {self._timeout_s:g} s"
        except (ContractError, OSError) as error:
            outcome, detail = Outcome.ERROR, str(error)
        latency_ms = (self._monotonic() - start) * _SECOND_MS
        if self._keeper is not None:
            self._keeper.answered()
        if outcome is Outcome.ENDED and latency_ms > self._timeout_s * _SECOND_MS:
            outcome, detail = Outcome.TIMEOUT, f"took {latency_ms:.0f} ms"
        expected = question.expected
        correct = None if expected is None else outcome is Outcome.ENDED and words == expected
        record = AnswerRecord(self._sha256, words, outcome, correct, latency_ms, detail, degraded)
        if self._degrade is not None:
            self._degrade.answered(failed=record.failed)
        return record

    def _take_rung(self) -> bool:
        """Run the next answer on the present rung; return whether that is below NORMAL."""
        if self._degrade is None or self._banded is None:
            return False
        rung = self._degrade.rung()
        self._banded.fewest = rung >= Rung.FEWER_EXPERTS
        return rung is not Rung.NORMAL

    def _ask(self, question: Question) -> tuple[tuple[str, ...], Outcome]:
        tokens = self._pipeline.tokens
        if tokens is None:
            raise ContractError("this bundle does not answer in words")
        if question.image:
            self._session.see(question.image)
        answer = self._session.answer(tokens.prompt(question.prompt, question.words))
        outcome = Outcome.ENDED if answer.stopped else Outcome.CUT_OFF
        return tuple(tokens.words(answer.tokens)), outcome

    def close(self) -> None:
        """Free the native memory."""
        self._native.close()


def require_answered(record: AnswerRecord) -> AnswerRecord:
    """Return `record` unless the plan failed.

    Raises:
        AnswerError: An error status or a timeout.
    """
    if record.outcome in (Outcome.ERROR, Outcome.TIMEOUT):
        raise AnswerError(record.detail or record.outcome.value)
    return record
