"""Buttons of a rollout or a device: which exist, which are legal now, why the others are not. Pure.

Legal is what the state table and the role say; the page asks both, so a button never promises what
the service refuses.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from builds.common.auth import Actor
from builds.common.roles import Permission, roles_with
from dashboards.badges import badge_of
from fleet.models import Rollout
from fleet.states import (
    DEVICE_TRANSITIONS,
    ROLLOUT_TRANSITIONS,
    DeviceEvent,
    DeviceState,
    RolloutEvent,
    RolloutState,
)


@dataclass(frozen=True, slots=True)
class ActionRow:
    """One button: the event it stands for and the permission it needs."""

    name: str
    label: str
    event: StrEnum
    needs: Permission
    css: str = ""


@dataclass(frozen=True, slots=True)
class Button:
    """One button as the page shows it; `reason` says why it is disabled."""

    name: str
    label: str
    css: str
    url: str
    is_enabled: bool
    reason: str


_P, _RE, _DE, _S = Permission, RolloutEvent, DeviceEvent, RolloutState
ROLLOUT_ACTIONS: Final[Mapping[str, ActionRow]] = {
    row.name: row
    for row in (
        ActionRow("approve", "Approve", _RE.APPROVE, _P.ROLLOUT_APPROVE, "primary"),
        ActionRow("start", "Start", _RE.START, _P.ROLLOUT_EDIT, "primary"),
        ActionRow("pause", "Pause", _RE.PAUSE, _P.ROLLOUT_HALT),
        ActionRow("resume", "Resume", _RE.RESUME, _P.ROLLOUT_EDIT),
        ActionRow("rollback", "Roll back", _RE.ROLL_BACK, _P.ROLLOUT_HALT),
        ActionRow("cancel", "Cancel", _RE.CANCEL, _P.ROLLOUT_EDIT),
        ActionRow("halt", "Halt", _RE.HALT, _P.ROLLOUT_HALT, "danger"),
    )
}
DEVICE_ACTIONS: Final[Mapping[str, ActionRow]] = {
    row.name: row
    for row in (
        ActionRow("accept", "Accept", _DE.ACCEPT, _P.DEVICE_ADMIT, "primary"),
        ActionRow("reject", "Reject", _DE.REJECT, _P.DEVICE_ADMIT),
        ActionRow("release", "Release", _DE.RELEASE, _P.DEVICE_ADMIT, "primary"),
        ActionRow("quarantine", "Quarantine", _DE.QUARANTINE, _P.DEVICE_ADMIT),
        ActionRow("retire", "Retire", _DE.RETIRE, _P.DEVICE_ADMIT),
    )
}
# Halt is always the last one, so that it never moves.
_BEFORE: Final = ("approve", "start", "cancel", "halt")
_UNDER_WAY: Final = ("pause", "resume", "rollback", "halt")
_NOT_READY: Final = frozenset((_S.COMPILING, _S.AWAITING_APPROVAL))
_NOT_STARTED: Final = _NOT_READY | {_S.DRAFT, _S.READY}


def rollout_buttons(rollout: Rollout, actor: Actor, url: str) -> tuple[Button, ...]:
    """Return the buttons of a rollout; `url` is its own address."""
    state = RolloutState(rollout.state)
    names = _BEFORE if state in _NOT_STARTED else _UNDER_WAY
    return tuple(
        _rollout_button(ROLLOUT_ACTIONS[name], rollout, state, actor, url) for name in names
    )


def device_buttons(state: str, actor: Actor, url: str) -> tuple[Button, ...]:
    """Return the buttons of a device that its state allows; `url` is its own address."""
    return tuple(
        _button(row, url, _role_reason(row, actor))
        for row in DEVICE_ACTIONS.values()
        if (DeviceState(state), row.event) in DEVICE_TRANSITIONS
    )


def roles_text(permission: Permission) -> str:
    """Return the roles that have a permission, in words."""
    return " or ".join(role.value.replace("_", " ") for role in roles_with(permission))


def _rollout_button(
    row: ActionRow, rollout: Rollout, state: RolloutState, actor: Actor, url: str
) -> Button:
    reason = _role_reason(row, actor) or _own_reason(row, rollout, state, actor)
    if row.name == "start" and state in _NOT_READY:
        # The service notes the wish, and the rollout starts by itself.
        return _button(replace(row, label="Start when ready"), url, reason)
    return _button(row, url, reason or _state_reason(row, state))


def _button(row: ActionRow, url: str, reason: str) -> Button:
    return Button(row.name, row.label, row.css, f"{url}/{row.name}", not reason, reason)


def _role_reason(row: ActionRow, actor: Actor) -> str:
    return "" if actor.may(row.needs) else f"Needs the role {roles_text(row.needs)}"


def _own_reason(row: ActionRow, rollout: Rollout, state: RolloutState, actor: Actor) -> str:
    if row.name == "approve" and rollout.created_by == actor.name:
        return "Whoever made a rollout may not approve it"
    if row.name == "rollback" and rollout.is_first_install:
        return "A first version has nothing to go back to: halt it"
    if row.name == "start" and state in _NOT_READY and rollout.starts_by_itself:
        return "It starts by itself as soon as it is ready"
    return ""


def _state_reason(row: ActionRow, state: RolloutState) -> str:
    if (state, row.event) in ROLLOUT_TRANSITIONS:
        return ""
    allowed = [
        badge_of(old).word.lower() for old, event in ROLLOUT_TRANSITIONS if event == row.event
    ]
    return f"Not possible while {badge_of(state).word.lower()}, only while {' or '.join(allowed)}"
