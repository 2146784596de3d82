"""How rollouts end: withdrawn updates, and the way back for devices that run the new bundle.

Withdrawing: what is not switched on yet is cancelled; offers vanish with the state of the rollout,
which is committed first. What is being switched on is not cancelled (too late), it is sent back.

The way back: every device that switched to the new bundle, or says that it runs it, gets an update
of kind `rollback` to the bundle it ran when it was enrolled. It is offered at once: a device still
has that bundle and fetches nothing. One that lost it uses the delta of the way back if that is
ready, and fetches whole sections if not. The rollout is `rolled_back` when all of them say that
they run it again. A device whose report was late is found by what it runs, even after that.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final

from django.db.models import F, Q, QuerySet

from builds.common.audit import audit
from builds.common.transitions import apply_transition
from builds.models import Delta
from compiler.contract.protocol import OfferKind, UpdateState
from fleet.models import (
    Rollout,
    RolloutTransition,
    Stage,
    Update,
    UpdateTransition,
)
from fleet.services.stages import delta_back, stage_move
from fleet.services.versions import fleet_atomic, fleet_version_bump
from fleet.states import (
    CANCELLABLE_STATES,
    OPEN_STATES,
    ROLLOUT_TRANSITIONS,
    STAGE_OPEN_STATES,
    UPDATE_TRANSITIONS,
    RolloutEvent,
    RolloutState,
    StageEvent,
    StageState,
    UpdateEvent,
)

MAX_ROLLBACK_ATTEMPTS: Final = 5
CANCEL_BATCH: Final = 500
STRAGGLERS_FOR: Final = timedelta(days=30)
_OPEN: Final = [state.value for state in OPEN_STATES]
_CANCELLABLE: Final = [state.value for state in CANCELLABLE_STATES]
_STAGE_OPEN: Final = [state.value for state in STAGE_OPEN_STATES]


def rollout_move(
    rollout: Rollout,
    event: RolloutEvent,
    *,
    actor: str,
    now: datetime,
    reason: str = "",
    **changes: object,
) -> RolloutState:
    """Move a rollout and let every process know; the end time is set by the way."""
    ended = {RolloutEvent.HALT, RolloutEvent.CANCEL, RolloutEvent.DRAINED, RolloutEvent.COMPLETE}
    if event in ended | {RolloutEvent.GIVE_UP, RolloutEvent.BUILD_FAILED}:
        changes["finished_at"] = now
        changes.setdefault("end_reason", reason)
    state = apply_transition(
        rollout,
        table=ROLLOUT_TRANSITIONS,
        event=event,
        log=RolloutTransition,
        actor=actor,
        reason=reason,
        changes=changes,
    )
    fleet_version_bump()
    return state


def stages_close(rollout: Rollout, *, event: StageEvent, reason: str, now: datetime) -> None:
    """End the open stage with `event`, skip the pending ones."""
    for stage in rollout.stages.filter(state__in=_STAGE_OPEN):
        if not (event == StageEvent.HOLD and stage.state == StageState.HELD):
            stage_move(stage, event, reason=reason, now=now)
    for stage in rollout.stages.filter(state=StageState.PENDING.value):
        stage_move(stage, StageEvent.SKIP, reason=reason, now=now)


def updates_withdraw(*, rollout: Rollout, reason: str, now: datetime) -> int:
    """Cancel what is not switched on yet, in batches; return how many. Safe to call again."""
    count = 0
    rows = Update.objects.filter(
        rollout=rollout, kind=OfferKind.INSTALL.value, state__in=_CANCELLABLE
    )
    while True:
        with fleet_atomic():
            batch = list(rows.select_for_update(of=("self",)).order_by("pk")[:CANCEL_BATCH])
            for update in batch:
                _end(update, UpdateEvent.CANCEL, reason, now)
            if batch:
                fleet_version_bump()
        if not batch:
            return count
        count += len(batch)


def rollback_begin(
    rollout: Rollout,
    *,
    event: RolloutEvent,
    actor: str,
    reason: str,
    now: datetime,
    stage: Stage | None = None,
) -> None:
    """Turn a rollout around, inside the caller's transaction, which holds its row.

    A first installation has nothing to go back to: it ends as failed.
    """
    stages_close(rollout, event=StageEvent.FAIL, reason=reason, now=now)
    turn = RolloutEvent.GIVE_UP if rollout.is_first_install else event
    text = f"{reason}; no device had a bundle to go back to" if turn != event else reason
    rollout_move(rollout, turn, actor=actor, reason=text, now=now, end_reason=text)
    updates_withdraw(rollout=rollout, reason=reason, now=now)
    sent = 0 if turn != event else rollbacks_send(rollout, now=now)
    audit(
        actor=actor,
        action=f"rollout.{turn.value}",
        obj=rollout,
        reason=reason,
        stage=stage.index if stage is not None else None,
        devices_sent_back=sent,
    )


def rollbacks_send(rollout: Rollout, *, now: datetime) -> int:
    """Queue the way back for every device that needs it and has none open; return how many."""
    sent = 0
    backs: dict[tuple[int | None, int], Delta | None] = {}
    for install in affected_installs(rollout).exclude(
        Q(device__running_bundle=F("base_bundle")) & ~Q(state__in=_OPEN)
    ):
        back = _last_rollback(install)
        if back is not None and (back.state in _OPEN or back.attempt >= MAX_ROLLBACK_ATTEMPTS):
            continue
        if install.base_bundle_id is None:
            continue
        _close_open(install, now)
        pair = install.base_bundle_id, install.bundle_id
        if pair not in backs:
            backs[pair] = delta_back(install)
        Update.objects.create(
            device_id=install.device_id,
            rollout=rollout,
            stage_id=install.stage_id,
            bundle_id=install.base_bundle_id,
            base_bundle_id=install.bundle_id,
            delta=backs[pair],
            kind=OfferKind.ROLLBACK.value,
            attempt=1 if back is None else back.attempt + 1,
            is_offerable=True,
            queued_at=now,
        )
        sent += 1
    if sent:
        fleet_version_bump()
    return sent


def affected_installs(rollout: Rollout) -> QuerySet[Update]:
    """Return the installs of devices that switched to the new bundle, or say that they run it."""
    touched = Q(activated_at__isnull=False) | Q(device__running_bundle=F("bundle"))
    newer = Update.objects.filter(kind=OfferKind.INSTALL.value, rollout_id__gt=rollout.pk)
    return (
        Update.objects.filter(touched, rollout=rollout, kind=OfferKind.INSTALL.value)
        .exclude(base_bundle=None)
        .exclude(device_id__in=newer.values("device_id"))
        .select_related("device", "base_bundle__version", "bundle__version")
        .defer("base_bundle__manifest", "bundle__manifest")
        .order_by("pk")
    )


def rollback_progress(rollout: Rollout) -> tuple[int, int, int]:
    """Return (affected, back on their bundle, given up). Three queries."""
    affected = affected_installs(rollout)
    open_backs = Update.objects.filter(
        rollout=rollout, kind=OfferKind.ROLLBACK.value, state__in=_OPEN
    )
    back = affected.filter(device__running_bundle=F("base_bundle")).exclude(
        device_id__in=open_backs.values("device_id")
    )
    lost = (
        Update.objects.filter(
            rollout=rollout, kind=OfferKind.ROLLBACK.value, attempt=MAX_ROLLBACK_ATTEMPTS
        )
        .exclude(state__in=[*_OPEN, UpdateState.SUCCEEDED.value])
        .count()
    )
    return affected.count(), back.exclude(state__in=_OPEN).count(), lost


def rollback_continue(rollout: Rollout, *, now: datetime) -> None:
    """Send back who still needs it; end the rollout when everybody is back."""
    updates_withdraw(rollout=rollout, reason="the rollout is rolled back", now=now)
    rollbacks_send(rollout, now=now)
    affected, back, lost = rollback_progress(rollout)
    if back == affected:
        reason = f"{affected} devices run their previous bundle again"
        rollout_move(
            rollout,
            RolloutEvent.DRAINED,
            actor="system",
            reason=reason,
            now=now,
            end_reason=rollout.end_reason,
        )
        audit(actor="system", action="rollout.drained", obj=rollout, devices=affected)
    elif lost and back + lost >= affected:
        reason = f"{lost} devices could not be sent back in {MAX_ROLLBACK_ATTEMPTS} attempts"
        rollout_move(rollout, RolloutEvent.GIVE_UP, actor="system", reason=reason, now=now)
        audit(actor="system", action="rollout.give_up", obj=rollout, devices=lost)


def _last_rollback(install: Update) -> Update | None:
    rows = Update.objects.filter(
        rollout_id=install.rollout_id, device_id=install.device_id, kind=OfferKind.ROLLBACK.value
    )
    return rows.order_by("-attempt").first()


def _close_open(install: Update, now: datetime) -> None:
    """Free the device's one place for an open update."""
    for update in Update.objects.filter(device_id=install.device_id, state__in=_OPEN):
        _end(update, UpdateEvent.SUPERSEDE, "the rollout is rolled back", now)


def _end(update: Update, event: UpdateEvent, reason: str, now: datetime) -> None:
    apply_transition(
        update,
        table=UPDATE_TRANSITIONS,
        event=event,
        log=UpdateTransition,
        actor="system",
        reason=reason,
        changes={"finished_at": now},
    )


def updates_time_out(*, rollout: Rollout, timeout_s: float, now: datetime) -> int:
    """End updates that began and were not heard of for too long; return how many."""
    began = [
        state.value for state in OPEN_STATES - {UpdateState.QUEUED, UpdateState.AWAITING_CONSENT}
    ]
    rows = Update.objects.select_for_update(of=("self",)).filter(
        rollout=rollout, state__in=began, reported_at__lt=now - timedelta(seconds=timeout_s)
    )
    count = 0
    for update in rows:
        _end(update, UpdateEvent.TIME_OUT, f"no report for {timeout_s:.0f} s", now)
        count += 1
    if count:
        fleet_version_bump()
    return count


def rolled_back_lately(now: datetime) -> Iterable[int]:
    """Return rollouts whose stragglers are still looked for. One query."""
    rows = Rollout.objects.filter(
        state=RolloutState.ROLLED_BACK.value, finished_at__gte=now - STRAGGLERS_FOR
    )
    return rows.values_list("pk", flat=True)
