"""State tables of the fleet: update, rollout, stage and device. Pure: no ORM, no clock.

Each kind has one enum of states, one of events and one table;
`builds.common.statemachine.next_state` reads it and `builds.common.transitions.apply_transition` is
the only writer. The enum of update states is part of the device protocol.

Reports of a device may be lost, so an update may jump forward over states whose report never came.
Two steps back exist, because the agent takes them: a delta that does not apply is fetched whole
(`applying -> downloading`), and a bundle that fails after it was switched on is restored
(`rolled_back`).
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from compiler.contract.protocol import TERMINAL_STATES, UpdateState

__all__ = [
    "ACTIVATED_STATES",
    "CANCELLABLE_STATES",
    "DEVICE_TRANSITIONS",
    "OPEN_STATES",
    "PROGRESS",
    "REPORT_EVENTS",
    "ROLLOUT_ACTIVE_STATES",
    "ROLLOUT_TRANSITIONS",
    "STAGE_OPEN_STATES",
    "STAGE_TRANSITIONS",
    "TERMINAL_STATES",
    "UPDATE_TRANSITIONS",
    "AlertKind",
    "Arm",
    "DeviceEvent",
    "DeviceState",
    "RolloutEvent",
    "RolloutState",
    "StageEvent",
    "StageState",
    "UpdateEvent",
    "UpdateState",
]


class Arm(StrEnum):
    """Side of the comparison that a device is on."""

    TREATMENT = "treatment"
    CONTROL = "control"


class UpdateEvent(StrEnum):
    """What can happen to an update."""

    OFFER = "offer"
    ASK_CONSENT = "ask_consent"
    DOWNLOAD = "download"
    DOWNLOADED = "downloaded"
    APPLY = "apply"
    STAGE = "stage"
    ACTIVATE = "activate"
    PROBATION = "probation"
    SUCCEED = "succeed"
    FAIL = "fail"
    ROLL_BACK = "roll_back"
    REJECT = "reject"
    TIME_OUT = "time_out"
    CANCEL = "cancel"
    SUPERSEDE = "supersede"
    REMOVE = "remove"
    SKIP = "skip"


_U = UpdateState
_UE = UpdateEvent

# The way through, in order, and the event that a report of each state stands for.
PROGRESS: Final[tuple[UpdateState, ...]] = (
    _U.QUEUED,
    _U.OFFERED,
    _U.AWAITING_CONSENT,
    _U.DOWNLOADING,
    _U.DOWNLOADED,
    _U.APPLYING,
    _U.STAGED,
    _U.ACTIVATING,
    _U.PROBATION,
    _U.SUCCEEDED,
)
_FORWARD: Final[Mapping[UpdateState, UpdateEvent]] = MappingProxyType(
    {
        _U.OFFERED: _UE.OFFER,
        _U.AWAITING_CONSENT: _UE.ASK_CONSENT,
        _U.DOWNLOADING: _UE.DOWNLOAD,
        _U.DOWNLOADED: _UE.DOWNLOADED,
        _U.APPLYING: _UE.APPLY,
        _U.STAGED: _UE.STAGE,
        _U.ACTIVATING: _UE.ACTIVATE,
        _U.PROBATION: _UE.PROBATION,
        _U.SUCCEEDED: _UE.SUCCEED,
    }
)
REPORT_EVENTS: Final[Mapping[UpdateState, UpdateEvent]] = MappingProxyType(
    {
        **{state: event for state, event in _FORWARD.items() if state != _U.OFFERED},
        _U.FAILED: _UE.FAIL,
        _U.ROLLED_BACK: _UE.ROLL_BACK,
        _U.REJECTED: _UE.REJECT,
        _U.CANCELLED: _UE.CANCEL,
    }
)
OPEN_STATES: Final = frozenset(PROGRESS[:-1])
CANCELLABLE_STATES: Final = frozenset(PROGRESS[: PROGRESS.index(_U.ACTIVATING)])
ACTIVATED_STATES: Final = frozenset((_U.ACTIVATING, _U.PROBATION, _U.SUCCEEDED, _U.ROLLED_BACK))


def _update_table() -> dict[tuple[UpdateState, UpdateEvent], UpdateState]:
    table: dict[tuple[UpdateState, UpdateEvent], UpdateState] = {}
    for position, state in enumerate(PROGRESS[:-1]):
        for later in PROGRESS[position + 1 :]:
            table[state, _FORWARD[later]] = later
        table[state, _UE.REJECT] = _U.REJECTED
        table[state, _UE.TIME_OUT] = _U.TIMED_OUT
        table[state, _UE.SUPERSEDE] = _U.SUPERSEDED
        table[state, _UE.REMOVE] = _U.REMOVED
        table[state, _UE.ROLL_BACK] = _U.ROLLED_BACK
        table[state, _UE.FAIL] = _U.FAILED
        if state in CANCELLABLE_STATES:
            table[state, _UE.CANCEL] = _U.CANCELLED
    table[_U.PROBATION, _UE.FAIL] = _U.ROLLED_BACK  # it ran, so something was restored
    table[_U.QUEUED, _UE.SKIP] = _U.SKIPPED
    for back in (_U.DOWNLOADED, _U.APPLYING, _U.STAGED):
        table[back, _UE.DOWNLOAD] = _U.DOWNLOADING
    return table


UPDATE_TRANSITIONS: Final[Mapping[tuple[UpdateState, UpdateEvent], UpdateState]] = MappingProxyType(
    _update_table()
)


class RolloutState(StrEnum):
    """State of a gray release."""

    DRAFT = "draft"
    COMPILING = "compiling"
    AWAITING_APPROVAL = "awaiting_approval"
    READY = "ready"
    RUNNING = "running"
    PAUSED = "paused"
    ROLLING_BACK = "rolling_back"
    SUCCEEDED = "succeeded"
    STOPPED = "stopped"
    ROLLED_BACK = "rolled_back"
    FAILED = "failed"


class RolloutEvent(StrEnum):
    """What can happen to a rollout."""

    SUBMIT = "submit"
    BUNDLES_READY = "bundles_ready"
    BUILD_FAILED = "build_failed"
    APPROVE = "approve"
    WAIVE_APPROVAL = "waive_approval"
    START = "start"
    PAUSE = "pause"
    RESUME = "resume"
    HALT = "halt"
    CANCEL = "cancel"
    GATE_FAILED = "gate_failed"
    ROLL_BACK = "roll_back"
    DRAINED = "drained"
    GIVE_UP = "give_up"
    COMPLETE = "complete"


_R = RolloutState
_RE = RolloutEvent
# fmt: off
_RolloutTable = Mapping[tuple[RolloutState, RolloutEvent], RolloutState]
ROLLOUT_TRANSITIONS: Final[_RolloutTable] = MappingProxyType({
    (_R.DRAFT,             _RE.SUBMIT):         _R.COMPILING,
    (_R.DRAFT,             _RE.CANCEL):         _R.STOPPED,
    (_R.COMPILING,         _RE.BUNDLES_READY):  _R.AWAITING_APPROVAL,
    (_R.COMPILING,         _RE.BUILD_FAILED):   _R.FAILED,
    (_R.COMPILING,         _RE.CANCEL):         _R.STOPPED,
    (_R.AWAITING_APPROVAL, _RE.APPROVE):        _R.READY,
    (_R.AWAITING_APPROVAL, _RE.WAIVE_APPROVAL): _R.READY,
    (_R.AWAITING_APPROVAL, _RE.CANCEL):         _R.STOPPED,
    (_R.READY,             _RE.START):          _R.RUNNING,
    (_R.READY,             _RE.CANCEL):         _R.STOPPED,
    (_R.RUNNING,           _RE.PAUSE):          _R.PAUSED,
    (_R.RUNNING,           _RE.HALT):           _R.STOPPED,
    (_R.RUNNING,           _RE.GATE_FAILED):    _R.ROLLING_BACK,
    (_R.RUNNING,           _RE.ROLL_BACK):      _R.ROLLING_BACK,
    (_R.RUNNING,           _RE.GIVE_UP):        _R.FAILED,
    (_R.RUNNING,           _RE.COMPLETE):       _R.SUCCEEDED,
    (_R.PAUSED,            _RE.RESUME):         _R.RUNNING,
    (_R.PAUSED,            _RE.HALT):           _R.STOPPED,
    (_R.PAUSED,            _RE.GATE_FAILED):    _R.ROLLING_BACK,
    (_R.PAUSED,            _RE.ROLL_BACK):      _R.ROLLING_BACK,
    (_R.PAUSED,            _RE.GIVE_UP):        _R.FAILED,
    (_R.STOPPED,           _RE.ROLL_BACK):      _R.ROLLING_BACK,
    (_R.ROLLING_BACK,      _RE.DRAINED):        _R.ROLLED_BACK,
    (_R.ROLLING_BACK,      _RE.GIVE_UP):        _R.FAILED,
})
# fmt: on
ROLLOUT_ACTIVE_STATES: Final = frozenset((_R.RUNNING, _R.PAUSED, _R.ROLLING_BACK))


class StageState(StrEnum):
    """State of one stage of a rollout."""

    PENDING = "pending"
    RUNNING = "running"
    SOAKING = "soaking"
    PASSED = "passed"
    HELD = "held"
    FAILED = "failed"
    SKIPPED = "skipped"


class StageEvent(StrEnum):
    """What can happen to a stage."""

    OPEN = "open"
    SOAK = "soak"
    PASS = "pass"  # noqa: S105 -- a verdict, not a secret
    HOLD = "hold"
    FAIL = "fail"
    SKIP = "skip"


_S = StageState
_SE = StageEvent
# fmt: off
_StageTable = Mapping[tuple[StageState, StageEvent], StageState]
STAGE_TRANSITIONS: Final[_StageTable] = MappingProxyType({
    (_S.PENDING, _SE.OPEN): _S.RUNNING,
    (_S.PENDING, _SE.SKIP): _S.SKIPPED,
    (_S.RUNNING, _SE.SOAK): _S.SOAKING,
    (_S.RUNNING, _SE.HOLD): _S.HELD,
    (_S.RUNNING, _SE.FAIL): _S.FAILED,
    (_S.RUNNING, _SE.SKIP): _S.SKIPPED,
    (_S.SOAKING, _SE.PASS): _S.PASSED,
    (_S.SOAKING, _SE.HOLD): _S.HELD,
    (_S.SOAKING, _SE.FAIL): _S.FAILED,
    (_S.SOAKING, _SE.SKIP): _S.SKIPPED,
    (_S.HELD,    _SE.SOAK): _S.SOAKING,
    (_S.HELD,    _SE.FAIL): _S.FAILED,
    (_S.HELD,    _SE.SKIP): _S.SKIPPED,
})
# fmt: on
STAGE_OPEN_STATES: Final = frozenset((_S.RUNNING, _S.SOAKING, _S.HELD))


class DeviceState(StrEnum):
    """State of a device's membership in the fleet."""

    PENDING = "pending"
    ACCEPTED = "accepted"
    REJECTED = "rejected"
    QUARANTINED = "quarantined"
    RETIRED = "retired"


class DeviceEvent(StrEnum):
    """What can happen to a device's membership."""

    ACCEPT = "accept"
    REJECT = "reject"
    QUARANTINE = "quarantine"
    RELEASE = "release"
    RETIRE = "retire"


_D = DeviceState
_DE = DeviceEvent
# fmt: off
_DeviceTable = Mapping[tuple[DeviceState, DeviceEvent], DeviceState]
DEVICE_TRANSITIONS: Final[_DeviceTable] = MappingProxyType({
    (_D.PENDING,     _DE.ACCEPT):     _D.ACCEPTED,
    (_D.PENDING,     _DE.REJECT):     _D.REJECTED,
    (_D.REJECTED,    _DE.ACCEPT):     _D.ACCEPTED,
    (_D.ACCEPTED,    _DE.QUARANTINE): _D.QUARANTINED,
    (_D.ACCEPTED,    _DE.RETIRE):     _D.RETIRED,
    (_D.QUARANTINED, _DE.RELEASE):    _D.ACCEPTED,
    (_D.QUARANTINED, _DE.RETIRE):     _D.RETIRED,
})
# fmt: on


class AlertKind(StrEnum):
    """What an alert about an identity is about."""

    SECOND_KEY = "second_key"
    CLONE = "clone"
