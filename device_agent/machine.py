"""The update machine: runs the step of the present state, journals what came of it, goes on.

The only place that catches broadly: whatever a step raises becomes an event of the table. What is
journalled in one line is one fact: the new state, what is known, and the reports it causes. Reports
wait in the journal until the server took or refused them.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from compiler.contract.canonical import Json
from compiler.contract.errors import ContractError
from compiler.contract.protocol import Offer, ReportFact, UpdateReport, UpdateState, parse_report
from device_agent.errors import AgentError, CrashLoopError, DiskFullError, ProtocolError
from device_agent.states import (
    MUST_FINISH,
    REPORTS,
    WIRE_STATES,
    Event,
    SlotFact,
    State,
    next_state,
    resumed_state,
)
from device_agent.storage.journal import Journal, Record
from device_agent.update.blame import speaks_against
from device_agent.update.context import UpdateContext, context_from_json, context_of

log = logging.getLogger("device_agent.update")

MAX_RESUMES: Final = 5
MAX_PENDING_REPORTS: Final = 256
COMPACT_BYTES: Final = 64 * 1024
# States that a start begins anew and that may bring the agent down each time.
_COUNTED: Final = frozenset((State.VERIFYING, State.APPLYING, State.STAGING, State.ACTIVATING))


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did."""

    event: Event
    context: UpdateContext


Step = Callable[[UpdateContext], StepResult | None]


@dataclass(frozen=True, slots=True)
class Facts:
    """What the machine asks the rest of the agent when it makes a report."""

    running_sha256: Callable[[], str]
    fetched_bytes: Callable[[UpdateContext], int]
    release_space: Callable[[UpdateContext], None]


class UpdateMachine:
    """State, context and reports of the update in progress; belongs to one thread."""

    def __init__(self, journal: Journal, steps: Mapping[State, Step], facts: Facts) -> None:
        """Read the journal.

        Args:
            journal: Of this device.
            steps: One per state but IDLE. A step returns None while it waits.
            facts: See `Facts`.
        """
        self._journal = journal
        self._steps = steps
        self._facts = facts
        self._state = State.IDLE
        self._context: UpdateContext | None = None
        self._pending: list[UpdateReport] = []
        for record in journal.open():
            self._replay(record)

    @property
    def state(self) -> State:
        """Return what the device is doing."""
        return self._state

    @property
    def context(self) -> UpdateContext | None:
        """Return the update in progress, or the last one in state IDLE."""
        return self._context

    @property
    def pending(self) -> tuple[UpdateReport, ...]:
        """Return the reports that the server has not taken yet, oldest first."""
        return tuple(self._pending)

    def resume(self, fact: SlotFact, error: AgentError | None = None) -> None:
        """Decide where to go on after a start.

        Args:
            fact: What the slots say about the bundle of the update.
            error: Why a start of a bundle on trial was given up, if it was.
        """
        context = self._context
        if self._state is State.IDLE or context is None:
            return
        if error is not None and self._state in (State.ACTIVATING, State.PROBATION):
            is_denied = speaks_against(error, self._state, context)
            self._move(Event.ERROR, context.failed(error, ran=True, is_denied=is_denied))
            return
        state = resumed_state(self._state, fact)
        if state is not self._state:
            self._enter(state, "resume", context, _reported(state, context))
        elif state in _COUNTED:
            counted = replace(context, resumes=context.resumes + 1)
            self._enter(state, "resume", counted, ())
            if counted.resumes > MAX_RESUMES:
                self.fail(CrashLoopError(f"{counted.resumes} starts in state {state.value!r}"))

    def start(self, offer: Offer) -> None:
        """Begin the update of an offer; the machine must be idle."""
        self._move(Event.OFFER, replace(context_of(offer), seq=0))

    def repeat_outcome(self) -> None:
        """Report the outcome of the last update again: the server still offers it."""
        context = self._context
        if context is None or context.outcome is None or self._pending:
            return
        self._enter(self._state, "repeat", context, (context.outcome,))

    def tell(self, fact: ReportFact, message: str) -> None:
        """Report a fact about the update in progress, once; nothing while there is none."""
        context, state = self._context, WIRE_STATES.get(self._state)
        if context is None or state is None or context.has_told(fact):
            return
        self._enter(self._state, fact.value, context.telling(fact), (state,), (fact, message))

    def fail(self, error: AgentError) -> None:
        """Stop the update in a state in which the table lets an error stop it."""
        if self._context is not None:
            self._move(Event.ERROR, self._failed(self._context, error))

    def advance(self) -> bool:
        """Run one step.

        Returns:
            Whether the state changed; False when idle, waiting, or to be tried again later.

        Raises:
            AgentError: The journal could not be written; nothing changed, call again later.
        """
        if self._state is State.IDLE or self._context is None:
            return False
        context = self._context
        try:
            result = self._steps[self._state](context)
        except Exception as error:  # noqa: BLE001 -- the one place that turns anything into an event
            failure = as_agent_error(error)
            log.warning("%s: %s", self._state.value, describe(failure))
            if self._state in MUST_FINISH:
                return False
            if isinstance(failure, DiskFullError):
                self._facts.release_space(context)
            self._move(Event.ERROR, self._failed(context, failure))
            return True
        if result is None:
            return False
        self._move(result.event, result.context)
        return True

    def sent(self, count: int) -> None:
        """Forget the `count` oldest reports: the server took or refused them."""
        if count:
            self._journal.append({"t": "sent", "count": count})
            del self._pending[:count]

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()

    def _failed(self, context: UpdateContext, error: AgentError) -> UpdateContext:
        return context.failed(
            error,
            ran=self._state is State.PROBATION,
            is_denied=speaks_against(error, self._state, context),
        )

    def _move(self, event: Event, context: UpdateContext) -> None:
        state = next_state(self._state, event)
        self._enter(state, event.value, replace(context, resumes=0), _reported(state, context))

    def _enter(
        self,
        state: State,
        event: str,
        context: UpdateContext,
        states: Sequence[UpdateState],
        said: tuple[ReportFact, str] = (ReportFact.NONE, ""),
    ) -> None:
        """Journal a state with the reports it causes, then adopt it."""
        context = replace(context, seq=context.seq + len(states))
        fresh = self._reports(states, context, said)
        pending = [*self._pending, *fresh][-MAX_PENDING_REPORTS:]
        if self._journal.size_bytes > COMPACT_BYTES:
            self._journal.replace([_record(state, event, context, pending)])
        else:
            self._journal.append(_record(state, event, context, fresh))
        if state is not self._state:
            outcome = f" ({describe_outcome(context)})" if state is State.CLEANING else ""
            log.info("update %d: %s -> %s%s", context.update_id, self._state, state, outcome)
        self._state, self._context, self._pending = state, context, pending

    def _reports(
        self, states: Sequence[UpdateState], context: UpdateContext, said: tuple[ReportFact, str]
    ) -> list[UpdateReport]:
        first = context.seq - len(states) + 1
        final = context.outcome
        ending = (context.end_fact, context.message)
        return [
            UpdateReport(
                update_id=context.update_id,
                attempt=context.attempt,
                seq=first + position,
                state=state,
                running_manifest_sha256=self._facts.running_sha256(),
                downloaded_bytes=self._facts.fetched_bytes(context),
                code=context.code if state == final else "",
                message=message,
                fact=fact,
            )
            for position, state in enumerate(states)
            for fact, message in (ending if state == final else said,)
        ]

    def _replay(self, record: Record) -> None:
        if record.get("t") == "sent":
            count = record.get("count")
            del self._pending[: count if isinstance(count, int) else 0]
            return
        try:
            context = record.get("context")
            if isinstance(context, Mapping):
                self._context = context_from_json(context)
            self._state = State(str(record.get("state")))
            reports = record.get("reports")
            if isinstance(reports, list):
                self._pending += [parse_report(str(item).encode()) for item in reports]
        except (ContractError, ValueError):
            log.warning("journal: a record of another format was passed over")


def _record(
    state: State, event: str, context: UpdateContext, reports: Iterable[UpdateReport]
) -> dict[str, Json]:
    return {
        "t": "state",
        "state": state.value,
        "event": event,
        "context": context.to_json(),
        "reports": [report.to_bytes().decode("utf-8") for report in reports],
    }


def _reported(state: State, context: UpdateContext) -> tuple[UpdateState, ...]:
    if state is State.CLEANING and context.outcome is not None:
        return (context.outcome,)
    return REPORTS.get(state, ())


def as_agent_error(error: Exception) -> AgentError:
    """Return `error` as one of ours; a contract error keeps its code in the text."""
    if isinstance(error, AgentError):
        return error
    if isinstance(error, ContractError):
        return ProtocolError(f"{error.code}: {error}", hint=error.hint)
    log.error("unexpected error", exc_info=error)
    return AgentError(f"unexpected: {type(error).__name__}: {error}")


def describe(error: AgentError) -> str:
    """Return an error in one line."""
    return f"{error} [{error.code}]"


def describe_outcome(context: UpdateContext) -> str:
    """Return how an update ended, in one line."""
    outcome = context.outcome.value if context.outcome is not None else "no outcome"
    return f"{outcome}: {context.message} [{context.code}]" if context.code else outcome
