"""The answer to a poll, from the rows, one device at a time: slow, plain, and the reference.

`fleet.edge` answers the same from a snapshot; a property test holds the two together. The rules:

- An update is offered while it is open and its rollout lets it: installs of a running or succeeded
  rollout (a proven version still reaches devices that were away), and of a paused one if they have
  begun; rollbacks of a rollout that is or was rolled back. An install waits for its delta.
- Telemetry is tagged with the newest rollout under way that the device is enrolled in: treatment
  for good, control while its stage is the current one.
- A device that takes part polls five times as often.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from django.conf import settings

from builds.states import DeltaState
from compiler.contract.protocol import NetworkPolicy, Offer, OfferKind, PollAnswer
from fleet.models import Device, Enrolment, Stage, Update
from fleet.selectors.identity import quarantine_reason
from fleet.states import (
    OPEN_STATES,
    Arm,
    DeviceState,
    RolloutState,
    StageState,
    UpdateState,
)

BUSY_SHARE: Final = 0.2
BUSY_MIN_S: Final = 1.0
INSTALL_STATES: Final = frozenset((RolloutState.RUNNING, RolloutState.SUCCEEDED))
ROLLBACK_STATES: Final = frozenset((RolloutState.ROLLING_BACK, RolloutState.ROLLED_BACK))
TAGGED_STATES: Final = frozenset((RolloutState.RUNNING, RolloutState.PAUSED))
_OPEN: Final = sorted(state.value for state in OPEN_STATES)


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a device is told now, and why, for people."""

    answer: PollAnswer | None
    reasons: tuple[str, ...]


def is_offered(update: Update) -> bool:
    """Return whether an update may proceed. Needs `rollout` joined; no query."""
    if update.state not in _OPEN:
        return False
    begun = update.state != UpdateState.QUEUED
    state = RolloutState(update.rollout.state)
    if update.kind == OfferKind.ROLLBACK:
        return state in ROLLBACK_STATES
    if state == RolloutState.PAUSED:
        return begun
    return state in INSTALL_STATES and (begun or update.is_offerable)


def late_delta_offered(*, update_id: int, sha256: str) -> bool:
    """Return whether this is the delta of the update. One query; for deltas that became ready late.

    A delta that is decided after its update was released changes no answer to a poll, so a snapshot
    may not know it.
    """
    rows = Update.objects.filter(pk=update_id)
    return rows.filter(delta__state=DeltaState.READY.value, delta__sha256=sha256).exists()


def busy_poll_s(poll_after_s: float) -> float:
    """Return how long a device waits between polls while it takes part in a rollout, seconds."""
    return min(poll_after_s, max(BUSY_MIN_S, BUSY_SHARE * poll_after_s))


def device_poll_answer(*, device_pk: int) -> PollAnswer | None:
    """Return the answer, or None when the device is not a member. At most four queries."""
    device = Device.objects.filter(pk=device_pk, state=DeviceState.ACCEPTED.value).first()
    if device is None:
        return None
    update = _open_update(device_pk)
    offer = _offer(update) if update is not None and is_offered(update) else None
    enrolment = _tag(device_pk)
    poll_after_s = settings.SPARSEFLEET.poll_after_s
    return PollAnswer(
        poll_after_s=busy_poll_s(poll_after_s) if offer or enrolment else poll_after_s,
        offer=offer,
        rollout_id=enrolment.rollout_id if enrolment else None,
        stage=enrolment.stage.index if enrolment else None,
        arm=enrolment.arm if enrolment else "",
    )


def device_explain(*, device_pk: int) -> Explanation:
    """Return what a device is told and why. At most eight queries."""
    device = (
        Device.objects.select_related("model", "target", "running_bundle__version")
        .filter(pk=device_pk)
        .first()
    )
    if device is None:
        return Explanation(None, ("there is no such device",))
    answer = device_poll_answer(device_pk=device_pk)
    if answer is None:
        reasons = [f"the device is {device.state}: it gets no answer at all"]
        if device.state == DeviceState.QUARANTINED:
            reasons.append(quarantine_reason(device))
        return Explanation(None, tuple(filter(None, reasons)))
    update = _open_update(device_pk)
    reasons = [_running_text(device)]
    reasons += [_update_text(update)] if update else _no_update_texts(device)
    if answer.arm:
        reasons.append(
            f"its telemetry counts as {answer.arm} in stage {(answer.stage or 0) + 1} "
            f"of rollout {answer.rollout_id}"
        )
    return Explanation(answer, tuple(reasons))


def _open_update(device_pk: int) -> Update | None:
    rows = Update.objects.select_related("rollout", "bundle__version", "delta")
    return rows.filter(device_id=device_pk, state__in=_OPEN).first()


def _offer(update: Update) -> Offer:
    return Offer(
        update_id=update.pk,
        attempt=update.attempt,
        kind=OfferKind(update.kind),
        version=update.bundle.version.version,
        manifest_sha256=update.bundle.manifest_sha256,
    )


def _tag(device_pk: int) -> Enrolment | None:
    rows = Enrolment.objects.select_related("stage").filter(
        device_id=device_pk, rollout__state__in=[state.value for state in TAGGED_STATES]
    )
    enrolment = rows.order_by("-rollout_id", "-stage__index").first()
    if enrolment is None or enrolment.arm == Arm.TREATMENT:
        return enrolment
    later = Stage.objects.filter(rollout_id=enrolment.rollout_id, index__gt=enrolment.stage.index)
    return None if later.exclude(state=StageState.PENDING.value).exists() else enrolment


def _running_text(device: Device) -> str:
    if device.running_bundle is not None:
        return f"it runs version {device.running_bundle.version.version} for {device.target.name}"
    if device.running_manifest_sha256:
        return f"it runs {device.running_manifest_sha256[:12]}, which was not built here"
    return "it runs nothing yet"


def _update_text(update: Update) -> str:
    what = f"update {update.pk} ({update.kind} of {update.bundle.version.version})"
    if is_offered(update) and update.waits_for and update.state == UpdateState.QUEUED:
        return f"{what} waits: {update.waits_for}{_until(update)}"
    if is_offered(update):
        return f"{what} is offered; the device says it is {update.state}"
    if update.rollout.state in INSTALL_STATES and not update.is_offerable:
        state = "" if update.delta is None else f", which is {update.delta.state}"
        return f"{what} waits for its delta{state}"
    return f"{what} is not offered: rollout {update.rollout_id} is {update.rollout.state}"


def _until(update: Update) -> str:
    rollout = update.rollout
    if rollout.network_policy != NetworkPolicy.WAIT_UNMETERED:
        return ""
    end = update.queued_at + timedelta(seconds=rollout.unmetered_wait_s)
    return f", until {end:%Y-%m-%d %H:%M} UTC"


def _no_update_texts(device: Device) -> list[str]:
    enrolment = (
        Enrolment.objects.select_related("rollout__version", "stage")
        .filter(device=device)
        .order_by("-rollout_id", "-stage__index")
        .first()
    )
    if enrolment is None:
        return ["it was in no rollout so far"]
    name = f"rollout {enrolment.rollout_id} of {enrolment.rollout.version.version}"
    if enrolment.arm == Arm.CONTROL and enrolment.rollout.state in TAGGED_STATES:
        return [f"{name} keeps it on the old version, to compare with (control)"]
    last = (
        Update.objects.filter(device=device, rollout_id=enrolment.rollout_id)
        .order_by("-pk")
        .first()
    )
    if last is None:
        return [f"{name} had it as {enrolment.arm} and is {enrolment.rollout.state}"]
    ending = f": {last.code} {last.message}".rstrip() if last.code else ""
    return [f"its last update (of {name}) ended as {last.state}{ending}"]
