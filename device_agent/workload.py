"""The answering loop: asks the running bundle real questions at a steady rate, and counts.

Independent of the update loop: it takes whatever bundle sits in the host at that moment.
"""

import logging
import threading
from collections.abc import Callable
from typing import Final

from device_agent.errors import NoBundleError
from device_agent.runtime.answers import AnswerRecord
from device_agent.runtime.evaluation import QuestionSource
from device_agent.runtime.host import SessionHost

log = logging.getLogger("device_agent.workload")

IDLE_S: Final = 0.1
MAX_SKIPPED: Final = 1_000


class AnswerLoop:
    """Asks and counts, in a thread of its own."""

    def __init__(
        self,
        host: SessionHost,
        source: QuestionSource,
        rate_per_s: float,
        observers: tuple[Callable[[AnswerRecord], None], ...],
        monotonic: Callable[[], float],
    ) -> None:
        """Ask nothing yet.

        Args:
            host: Who answers.
            source: What is asked.
            rate_per_s: Questions per second, at most as many as can be answered.
            observers: Told about every answer.
            monotonic: Seconds.
        """
        self._host = host
        self._source = source
        self._period_s = 1.0 / rate_per_s
        self._observers = observers
        self._monotonic = monotonic
        self._asked_at: float | None = None
        self._asked: object = None
        self._replaced = threading.Event()

    def in_flight_s(self) -> float:
        """Return how long the answer in progress has taken, seconds; 0 for none."""
        asked_at = self._asked_at
        return 0.0 if asked_at is None else self._monotonic() - asked_at

    def leave(self) -> None:
        """End as soon as the answer in progress does: another loop has taken over."""
        self._replaced.set()

    def is_left_behind(self) -> bool:
        """Return whether the answer in progress belongs to a bundle that was replaced."""
        return self._asked_at is not None and self._asked is not self._host.seat

    def ask_once(self) -> bool:
        """Ask the next question that the bundle understands; return whether there was one."""
        for _ in range(MAX_SKIPPED):
            question = self._source.next()
            if self._host.understands(question):
                break
        else:
            return False
        self._asked = self._host.seat
        self._asked_at = self._monotonic()
        try:
            record = self._host.answer(question)
        except NoBundleError:
            return False
        finally:
            self._asked_at = None
        for observe in self._observers:
            observe(record)
        return True

    def run(self, stop: threading.Event) -> None:
        """Ask until `stop` is set."""
        due = self._monotonic()
        while not (stop.is_set() or self._replaced.is_set()):
            if not self._host.manifest_sha256 or not self.ask_once():
                stop.wait(IDLE_S)
                due = self._monotonic()
                continue
            due = max(due + self._period_s, self._monotonic() - self._period_s)
            stop.wait(max(0.0, due - self._monotonic()))
