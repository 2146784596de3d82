"""An agent at work: three threads that do not wait for each other.

    update     poll, fetch, install      answer     ask and count      upload     telemetry, status

An update never stops the answering; a server that is away stops neither. A native call that never
returns holds one answering thread; once its bundle was replaced, a new thread takes over.
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from device_agent.agent import Agent
from device_agent.clock import Clock
from device_agent.errors import AgentError
from device_agent.machine import describe
from device_agent.runtime.evaluation import QuestionSource, load_evaluation
from device_agent.status import write_live
from device_agent.update.loop import UpdateLoop
from device_agent.update.probation import STUCK_TIMEOUTS
from device_agent.workload import AnswerLoop

log = logging.getLogger("device_agent")

ERROR_WAIT_S: Final = 5.0
JOIN_S: Final = 5.0
SUPERVISE_S: Final = 0.5


class StopRequestedError(BaseException):
    """The agent shall end: leaves every step at once; the next start takes it up."""


class StoppableClock:
    """A clock whose waits end when the agent shall stop, even a wait of no time."""

    def __init__(self, clock: Clock, stop: threading.Event) -> None:
        self._stop = stop
        self.now = clock.now
        self.monotonic = clock.monotonic

    def sleep(self, seconds: float) -> None:
        """Wait.

        Raises:
            StopRequestedError: The agent shall end.
        """
        if self._stop.wait(seconds):
            raise StopRequestedError


class AgentService:
    """The threads of one agent."""

    def __init__(self, agent: Agent, stop: threading.Event) -> None:
        self._agent = agent
        self._stop = stop
        self._threads: dict[str, threading.Thread] = {}
        self._source: QuestionSource | None = None
        self._answers: AnswerLoop | None = None

    def start(self) -> None:
        """Boot and start the threads.

        Raises:
            NotEnrolledError: Enrol first.
            EvaluationSetError: The questions cannot be read.
        """
        config = self._agent.config
        if config.evaluation and config.questions_per_s:
            evaluation = load_evaluation(Path(config.evaluation))
            self._source = QuestionSource(evaluation, self._agent.key.thumbprint)
        loop = self._agent.boot()
        self._agent.in_flight_s = self._in_flight_s
        self._start_answering()
        self._run("update", lambda: self._update(loop))
        self._run("upload", self._upload)

    def join(self) -> None:
        """Wait for the threads to end after `stop` was set, then close the agent."""
        end = self._agent.ports.clock.monotonic() + JOIN_S
        for thread in self._threads.values():
            thread.join(max(0.0, end - self._agent.ports.clock.monotonic()))
        self._agent.close()

    def supervise(self) -> None:
        """Give the answering to a new thread if the old one hangs in a bundle that is gone."""
        answers = self._answers
        limit = STUCK_TIMEOUTS * self._agent.config.answer_timeout_s
        if answers is not None and answers.in_flight_s() > limit and answers.is_left_behind():
            log.warning("an answer of an earlier bundle does not end; a new thread takes over")
            answers.leave()
            self._start_answering()

    def _in_flight_s(self) -> float:
        return 0.0 if self._answers is None else self._answers.in_flight_s()

    def _start_answering(self) -> None:
        agent = self._agent
        if self._source is None:
            return
        loop = AnswerLoop(
            agent.host,
            self._source,
            agent.config.questions_per_s,
            (agent.counters.record, agent.probation.record),
            agent.ports.clock.monotonic,
        )
        self._answers = loop
        self._run("answer", lambda: loop.run(self._stop))

    def _update(self, loop: UpdateLoop) -> None:
        while not self._stop.is_set():
            try:
                wait_s = loop.turn()
            except AgentError as error:
                log.warning("the update loop waits: %s", describe(error))
                wait_s = ERROR_WAIT_S
            self._stop.wait(wait_s)

    def _upload(self) -> None:
        while not self._stop.wait(self._agent.config.telemetry_s):
            self._upload_once()
        self._upload_once()

    def _upload_once(self) -> None:
        agent = self._agent
        try:
            if agent.rules is not None:
                agent.rules.turn()
            agent.uploader.run_once()
            write_live(agent.config, self._live())
        except (AgentError, OSError) as error:
            log.warning("telemetry: %s", error)

    def _live(self) -> dict[str, object]:
        agent = self._agent
        state = agent.machine.state.value if agent.machine is not None else ""
        return {
            "update_state": state,
            "running_manifest_sha256": agent.host.manifest_sha256,
            "runtime": dict(agent.host.facts),
            "spool_dropped": agent.spool.dropped,
            "clock_skew_s": round(agent.api.clock_skew_s, 1),
            **agent.counters.summary(),
        }

    def _run(self, name: str, target: Callable[[], None]) -> None:
        def body() -> None:
            try:
                target()
            except StopRequestedError:
                return
            except Exception:
                log.exception("the %s thread ended", name)
                self._stop.set()

        label = f"{self._agent.config.display_name}-{name}"
        thread = threading.Thread(target=body, name=label, daemon=True)
        self._threads[name] = thread  # in place of one that hangs
        thread.start()
