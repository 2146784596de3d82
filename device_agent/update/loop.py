"""One turn of the update loop: report, poll, work, and say how long to wait."""

import itertools
import logging
import random
from collections.abc import Callable
from typing import Final

from compiler.contract.protocol import PollAnswer, ReportFact
from device_agent.api import DeviceApi
from device_agent.clock import Clock
from device_agent.config import AgentConfig
from device_agent.errors import AgentError, RefusedError, SupersededError, UnauthorizedError
from device_agent.machine import UpdateMachine, describe
from device_agent.runtime.host import SessionHost
from device_agent.states import State
from device_agent.telemetry.counters import Counters, tags_of
from device_agent.update.watch import OfferWatch

log = logging.getLogger("device_agent.update")

POLL_JITTER: Final = 0.1
PROBATION_TURN_S: Final = 0.25
RETRY_TURN_S: Final = 2.0
POSTPONED_S: Final = 300.0  # between two questions for an update that has to wait


class Poller:
    """Polls, tags telemetry with what the answer says, and spreads the fleet over time."""

    def __init__(
        self,
        api: DeviceApi,
        host: SessionHost,
        counters: Counters,
        config: AgentConfig,
        clock: Clock,
    ) -> None:
        self._api = api
        self._host = host
        self._counters = counters
        self._poll_s = config.poll_s
        self._numbers = itertools.count(1)
        self.watch = OfferWatch(self.poll, self.interval_s, clock)

    def poll(self) -> PollAnswer:
        """Ask the server what to do."""
        answer = self._api.poll(
            self._host.manifest_sha256, f"{self._counters.boot_id}.{next(self._numbers)}"
        )
        self._counters.tag(tags_of(answer))
        return answer

    def interval_s(self, answer: PollAnswer) -> float:
        """Return the time until the next poll, with jitter."""
        jitter = random.uniform(1.0 - POLL_JITTER, 1.0)  # noqa: S311 -- spreads the fleet
        return (self._poll_s or answer.poll_after_s) * jitter


class UpdateLoop:
    """Drives the machine; belongs to one thread."""

    def __init__(
        self,
        machine: UpdateMachine,
        poller: Poller,
        api: DeviceApi,
        clock: Clock,
        unix_time: Callable[[], int],
    ) -> None:
        self._machine = machine
        self._unix_time = unix_time
        self._poller = poller
        self._watch = poller.watch
        self._api = api
        self._clock = clock
        self._asks_again_at = 0.0
        self._failed_polls = 0
        self._problem = ""

    def turn(self) -> float:
        """Poll if it is time, do what can be done, and return how long to wait, seconds.

        Raises:
            AgentError: The disk does not take the journal; wait and call again.
        """
        machine = self._machine
        self._tell()
        self._flush_reports()
        if machine.state in (State.IDLE, State.PROBATION) and self._watch.due():
            self._look_for_work()
        while machine.advance():
            self._tell()
            self._flush_reports()
        if machine.state is State.IDLE:
            return self._watch.wait_s()
        if machine.state is State.PROBATION:
            return PROBATION_TURN_S
        return RETRY_TURN_S

    def _look_for_work(self) -> None:
        try:
            answer = self._poller.poll()
        except AgentError as error:
            self._failed_polls += 1
            self._watch.failed(self._failed_polls)
            self._note(describe(error))
            return
        self._failed_polls = 0
        self._note("")
        self._watch.answered(answer)
        self._take(answer)

    def _take(self, answer: PollAnswer) -> None:
        """Begin, go on with, or leave an update, as the answer says."""
        machine, offer = self._machine, answer.offer
        if offer is None:
            # Withdrawn when it ran already: it comes to its end, and the server is told.
            machine.tell(ReportFact.TOO_LATE, "the update was withdrawn after it was switched on")
            return
        same = machine.context is not None and machine.context.is_for(offer)
        if machine.state is State.PROBATION:
            if not same:
                machine.fail(SupersededError("the server offers something else now"))
        elif same and machine.context is not None and machine.context.outcome is not None:
            machine.repeat_outcome()
        elif not same or self._clock.monotonic() >= self._asks_again_at:
            log.info("update %d: offered %s %s", offer.update_id, offer.kind.value, offer.version)
            self._asks_again_at = self._clock.monotonic() + POSTPONED_S
            machine.start(offer)

    def _tell(self) -> None:
        """Say, once each, that objects are patched in place, and that a deadline has passed."""
        context = self._machine.context
        if context is None:
            return
        if context.in_place:
            self._machine.tell(ReportFact.IN_PLACE, context.note)
        deadline = context.confirm_deadline
        if deadline and self._unix_time() > deadline:
            self._machine.tell(
                ReportFact.UNCONFIRMED, f"in state {self._machine.state.value!r} at the deadline"
            )

    def _flush_reports(self) -> None:
        """Send the reports that wait, in order; what the server refuses is dropped."""
        done = 0
        for report in self._machine.pending:
            try:
                self._api.report(report)
            except UnauthorizedError:
                break
            except RefusedError as error:
                log.warning("report %r refused: %s", report.state.value, error)
            except AgentError as error:
                self._note(describe(error))
                break
            done += 1
        self._machine.sent(done)

    def _note(self, problem: str) -> None:
        """Log a lasting problem once, and its end once."""
        if problem != self._problem:
            if problem:
                log.warning("server: %s", problem)
            else:
                log.info("server: reachable again")
        self._problem = problem
