"""Probation: the time in which a new bundle has to show that it runs.

It is about running at all: crashes, error statuses, answers that never come. Whether the model
became worse is for the fleet to decide, from many devices and a control; so slowness and cut-off
answers alone end probation only in the extreme.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from device_agent.config import AgentConfig
from device_agent.errors import UnfitError
from device_agent.runtime.answers import AnswerRecord, Outcome
from device_agent.runtime.faults import BY_BUNDLE

MIN_ANSWERS_FOR_ERRORS: Final = 5
MIN_ANSWERS_FOR_CUT_OFFS: Final = 20
STUCK_TIMEOUTS: Final = 3.0


@dataclass(slots=True)
class _Seen:
    manifest_sha256: str = ""
    since: float = 0.0
    outcomes: dict[Outcome, int] = field(default_factory=dict)

    @property
    def answers(self) -> int:
        return sum(self.outcomes.values())


class Probation:
    """Watches the answers of one bundle; safe for any number of threads."""

    def __init__(
        self,
        config: AgentConfig,
        monotonic: Callable[[], float],
        in_flight_s: Callable[[], float],
    ) -> None:
        """Watch nothing yet.

        Args:
            config: Limits.
            monotonic: Seconds.
            in_flight_s: How long the answer in progress has taken; 0 for none.
        """
        self._config = config
        self._monotonic = monotonic
        self._in_flight_s = in_flight_s
        self._lock = threading.Lock()
        self._seen = _Seen()

    def begin(self, manifest_sha256: str) -> None:
        """Watch a bundle from now on; going on with the same one changes nothing."""
        with self._lock:
            if self._seen.manifest_sha256 != manifest_sha256:
                self._seen = _Seen(manifest_sha256, self._monotonic())

    def end(self) -> None:
        """Watch nothing."""
        with self._lock:
            self._seen = _Seen()

    def record(self, record: AnswerRecord) -> None:
        """Note an answer; those of other bundles do not count.

        An answer that only a remedy gave counts as an error if the fault may be the bundle's.
        """
        with self._lock:
            if record.manifest_sha256 == self._seen.manifest_sha256:
                outcomes = self._seen.outcomes
                is_to_blame = BY_BUNDLE & {*record.faults} and not record.failed
                outcome = Outcome.ERROR if is_to_blame else record.outcome
                outcomes[outcome] = outcomes.get(outcome, 0) + 1

    def is_passed(self, duration_s: float) -> bool:
        """Return whether the bundle has shown enough; False = go on watching.

        Args:
            duration_s: How long it has to run.

        Raises:
            UnfitError: It fails; return to the bundle before.
        """
        config = self._config
        with self._lock:
            answers = self._seen.answers
            outcomes = dict(self._seen.outcomes)
            elapsed = self._monotonic() - self._seen.since
        _require_fit(outcomes, answers, config)
        if self._in_flight_s() > STUCK_TIMEOUTS * config.answer_timeout_s:
            raise UnfitError("an answer does not end")
        wanted = config.probation_answers if config.questions_per_s and duration_s else 0
        if answers < wanted and elapsed > max(config.probation_deadline_s, duration_s):
            raise UnfitError(f"{answers} answers in {elapsed:.0f} s, {wanted} are needed")
        return elapsed >= duration_s and answers >= wanted


def _require_fit(outcomes: dict[Outcome, int], answers: int, config: AgentConfig) -> None:
    errors = outcomes.get(Outcome.ERROR, 0) + outcomes.get(Outcome.TIMEOUT, 0)
    cut_off = outcomes.get(Outcome.CUT_OFF, 0)
    if answers >= MIN_ANSWERS_FOR_ERRORS and errors > config.probation_error_ratio * answers:
        raise UnfitError(f"{errors} of {answers} answers ended in an error or a timeout")
    if answers >= MIN_ANSWERS_FOR_CUT_OFFS and cut_off > config.probation_cutoff_ratio * answers:
        raise UnfitError(f"{cut_off} of {answers} answers were cut off")
