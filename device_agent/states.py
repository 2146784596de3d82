"""States of an update on a device: one enum, one table, and what each state tells the server.

Pure. `machine.py` is the only user. A step does its work, then the event is journalled, then the
next step begins; so a step must bear to be done again, and `RESUMES` says where to go on after the
power was cut in each state.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from compiler.contract.protocol import UpdateState


class State(StrEnum):
    """What the device is doing about an update."""

    IDLE = "idle"
    VERIFYING = "verifying"  # assignment, metadata, manifest
    DOWNLOADING = "downloading"
    APPLYING = "applying"  # the delta, into new objects
    STAGING = "staging"  # hash everything, then write the pointer of the other slot
    ACTIVATING = "activating"  # self-test in a child, load, switch
    PROBATION = "probation"  # runs, and may return by itself
    COMMITTING = "committing"
    ROLLING_BACK = "rolling_back"
    CLEANING = "cleaning"  # the outcome is known; drop what is no longer needed


class Event(StrEnum):
    """What happened."""

    OFFER = "offer"
    VERIFIED = "verified"
    ALREADY_RUNNING = "already_running"
    POSTPONED = "postponed"
    DOWNLOADED = "downloaded"
    APPLIED = "applied"
    DELTA_UNUSABLE = "delta_unusable"
    STAGED = "staged"
    INCOMPLETE = "incomplete"
    ACTIVATED = "activated"
    PASSED = "passed"
    COMMITTED = "committed"
    RESTORED = "restored"
    CLEANED = "cleaned"
    ERROR = "error"


_S, _E = State, Event
# fmt: off
TRANSITIONS: Final[Mapping[tuple[State, Event], State]] = MappingProxyType({
    (_S.IDLE,         _E.OFFER):           _S.VERIFYING,
    (_S.VERIFYING,    _E.VERIFIED):        _S.DOWNLOADING,
    (_S.VERIFYING,    _E.ALREADY_RUNNING): _S.COMMITTING,
    (_S.VERIFYING,    _E.POSTPONED):       _S.IDLE,  # nothing was begun; asked for again later
    (_S.VERIFYING,    _E.ERROR):           _S.CLEANING,
    (_S.DOWNLOADING,  _E.DOWNLOADED):      _S.APPLYING,
    (_S.DOWNLOADING,  _E.ERROR):           _S.CLEANING,
    (_S.APPLYING,     _E.APPLIED):         _S.STAGING,
    (_S.APPLYING,     _E.DELTA_UNUSABLE):  _S.DOWNLOADING,
    (_S.APPLYING,     _E.ERROR):           _S.CLEANING,
    (_S.STAGING,      _E.STAGED):          _S.ACTIVATING,
    (_S.STAGING,      _E.INCOMPLETE):      _S.DOWNLOADING,
    (_S.STAGING,      _E.ERROR):           _S.CLEANING,
    (_S.ACTIVATING,   _E.ACTIVATED):       _S.PROBATION,
    (_S.ACTIVATING,   _E.ERROR):           _S.ROLLING_BACK,
    (_S.PROBATION,    _E.PASSED):          _S.COMMITTING,
    (_S.PROBATION,    _E.ERROR):           _S.ROLLING_BACK,
    (_S.COMMITTING,   _E.COMMITTED):       _S.CLEANING,
    (_S.ROLLING_BACK, _E.RESTORED):        _S.CLEANING,
    (_S.CLEANING,     _E.CLEANED):         _S.IDLE,
})
# fmt: on

# Reported on entry. The last report of an update is its outcome, on entry to CLEANING.
REPORTS: Final[Mapping[State, tuple[UpdateState, ...]]] = MappingProxyType(
    {
        State.DOWNLOADING: (UpdateState.DOWNLOADING,),
        State.APPLYING: (UpdateState.DOWNLOADED, UpdateState.APPLYING),
        State.ACTIVATING: (UpdateState.STAGED, UpdateState.ACTIVATING),
        State.PROBATION: (UpdateState.PROBATION,),
    }
)

# What a report beside the table says where the device is: the last state that was reported.
WIRE_STATES: Final[Mapping[State, UpdateState]] = MappingProxyType(
    {
        **{state: reported[-1] for state, reported in REPORTS.items()},
        State.STAGING: UpdateState.APPLYING,
        State.COMMITTING: UpdateState.PROBATION,
    }
)

# Steps that an error cannot stop: they are tried again until they succeed.
MUST_FINISH: Final = frozenset((State.COMMITTING, State.ROLLING_BACK, State.CLEANING))
# States in which nothing of the update may run yet: the server may withdraw it until then.
CANCELLABLE: Final = frozenset((State.VERIFYING, State.DOWNLOADING, State.APPLYING, State.STAGING))


class SlotFact(StrEnum):
    """What the slot table says about the bundle of the update, at a start."""

    NOT_RUNNING = "not_running"
    ON_TRIAL = "on_trial"
    COMMITTED = "committed"


# State found in the journal, fact found in the slots -> state to go on in. Every pair that is not
# listed goes on in the state found.
# fmt: off
RESUMES: Final[Mapping[tuple[State, SlotFact], State]] = MappingProxyType({
    (_S.ACTIVATING,   SlotFact.ON_TRIAL):    _S.PROBATION,     # switched, not journalled
    (_S.PROBATION,    SlotFact.NOT_RUNNING): _S.ROLLING_BACK,  # the start gave it up
    (_S.PROBATION,    SlotFact.COMMITTED):   _S.COMMITTING,
})
# fmt: on


class IllegalEventError(Exception):
    """The table has no such row: a defect of the agent."""


def next_state(state: State, event: Event) -> State:
    """Return the state that `event` leads to from `state`.

    Raises:
        IllegalEventError: The pair is not in the table.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalEventError(
            f"{event.value!r} is not possible in state {state.value!r}"
        ) from None


def resumed_state(state: State, fact: SlotFact) -> State:
    """Return where to go on after a start."""
    return RESUMES.get((state, fact), state)


def mermaid() -> str:
    """Return the table as a Mermaid state diagram, for `docs/states/`."""
    lines = ["stateDiagram-v2"]
    lines += [
        f"    {a.value} --> {b.value}: {event.value}" for (a, event), b in TRANSITIONS.items()
    ]
    return "\n".join(lines) + "\n"
