"""Opening stages: enrolments, updates and deltas in one transaction, before any offer leaves."""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Final

from django.db.models import Q

from builds.common.transitions import apply_transition
from builds.models import Bundle, Delta
from builds.services.delta_queue import deltas_rank
from builds.services.deltas import delta_request
from builds.states import DELTA_FINAL
from compiler.contract.protocol import OfferKind
from fleet.cohorts import Cohort, EmptyStageError, StageSize, exposure_order, form_stage
from fleet.models import (
    Enrolment,
    EnrolmentStats,
    Rollout,
    Stage,
    StageTransition,
    Update,
    UpdateTransition,
)
from fleet.services.baselines import Usual, usual_of
from fleet.services.ledgers import ledger_open
from fleet.services.members import Member, Members, rollout_members
from fleet.services.versions import fleet_version_bump
from fleet.states import (
    OPEN_STATES,
    STAGE_TRANSITIONS,
    UPDATE_TRANSITIONS,
    Arm,
    RolloutState,
    StageEvent,
    StageState,
    UpdateEvent,
    UpdateState,
)

BATCH: Final = 5_000
SYSTEM: Final = "system"
_OPEN: Final = [state.value for state in OPEN_STATES]
_FINAL: Final = [state.value for state in DELTA_FINAL]
_UNDER_WAY: Final = (RolloutState.RUNNING.value, RolloutState.ROLLING_BACK.value)


def stage_move(
    stage: Stage, event: StageEvent, *, reason: str, now: datetime | None = None
) -> None:
    """Move a stage; `now` is given when the stage ends with it."""
    changes: dict[str, object] = {"reason": reason}
    if now is not None:
        changes["decided_at"] = now
    apply_transition(
        stage,
        table=STAGE_TRANSITIONS,
        event=event,
        log=StageTransition,
        actor=SYSTEM,
        reason=reason,
        changes=changes,
    )


def next_stage_open(rollout: Rollout, *, now: datetime) -> Stage | None:
    """Open the next pending stage that still has devices; None when there is none left.

    Inside the caller's transaction, which holds the rollout's row.
    """
    for stage in rollout.stages.filter(state=StageState.PENDING.value).order_by("index"):
        try:
            _open(rollout, stage, now)
        except EmptyStageError as error:
            stage_move(stage, StageEvent.SKIP, reason=str(error), now=now)
            continue
        return stage
    return None


def deltas_request(members: Members) -> dict[tuple[int, int], Delta]:
    """Ask for the deltas that the members need; (base, new) -> delta. Four queries per pair.

    The ways back are asked for beside them, to be built when no device waits for a delta: whoever
    has to go back and lost what it ran before needs one at once.
    """
    pairs: dict[tuple[int, int], tuple[Bundle, Bundle]] = {}
    for member in members.by_id.values():
        base = member.device.running_bundle
        if base is not None and _has_delta(base, member.bundle):
            pairs[base.pk, member.bundle.pk] = (base, member.bundle)
    there = {key: delta_request(*pair, is_urgent=True) for key, pair in pairs.items()}
    for base, new in pairs.values():
        delta_request(new, base)
    return there


def delta_back(install: Update) -> Delta | None:
    """Return the delta for the way back of an install, asked for now if it never was.

    Needs `base_bundle` and `bundle` joined with their versions; None if there is no such pair.
    """
    base, new = install.base_bundle, install.bundle
    if base is None or not _has_delta(base, new):
        return None
    return delta_request(new, base, is_urgent=True)


def deltas_prefer() -> None:
    """Have those deltas built first that devices of rollouts under way wait for. Four queries."""
    waiting = Update.objects.filter(
        state__in=_OPEN, rollout__state__in=_UNDER_WAY, delta__isnull=False
    )
    deltas_rank(waiting.exclude(delta__state__in=_FINAL).values_list("delta_id", flat=True))


def rollouts_waiting() -> Iterable[int]:
    """Return succeeded rollouts with installs that still wait for their delta. One query."""
    rows = Update.objects.filter(
        kind=OfferKind.INSTALL.value, state=UpdateState.QUEUED.value, is_offerable=False
    )
    rows = rows.filter(rollout__state=RolloutState.SUCCEEDED.value)
    return rows.order_by().values_list("rollout_id", flat=True).distinct()


def offers_release(rollout: Rollout, *, wait_s: float, now: datetime) -> int:
    """Offer installs whose delta is decided, or that have waited long enough. 1 or 3 queries."""
    waiting = Update.objects.filter(
        rollout=rollout, kind=OfferKind.INSTALL.value, state=UpdateState.QUEUED.value
    ).filter(is_offerable=False)
    due = waiting.filter(
        Q(delta__state__in=_FINAL)
        | Q(delta=None)
        | Q(queued_at__lte=now - timedelta(seconds=wait_s))
    )
    pks = list(due.values_list("pk", flat=True))
    if not pks:
        return 0
    released = Update.objects.filter(pk__in=pks).update(is_offerable=True)
    fleet_version_bump()
    return released


def _open(rollout: Rollout, stage: Stage, now: datetime) -> None:
    members = rollout_members(rollout)
    compare = not rollout.is_first_install
    total = stage.treatment_target or 0
    if stage.is_release:
        total = max(total, len(members.by_id))
    cohort = form_stage(
        exposure_order(members.candidates, rollout.salt),
        StageSize(total, stage.is_release),
        treated=members.treated,
        control_max=int(rollout.gate["control_max"]),
        compare=compare,
    )
    deltas = deltas_request(members)
    _enrol(rollout, stage, members, cohort, now)
    _queue_updates(rollout, stage, [members.by_id[name] for name in cohort.treatment], deltas, now)
    _restratify(rollout, cohort.strata)
    earlier = rollout.stages.filter(index__lt=stage.index, opened_at__isnull=False)
    previous = earlier.order_by("index").last()
    harm = previous.ledger["harm"] if previous is not None else {}
    apply_transition(
        stage,
        table=STAGE_TRANSITIONS,
        event=StageEvent.OPEN,
        log=StageTransition,
        actor=SYSTEM,
        reason=f"{len(cohort.treatment)} devices, {len(cohort.control)} in control",
        changes={"opened_at": now, "ledger": ledger_open(stage, harm=harm).to_json()},
    )
    fleet_version_bump()


def _enrol(rollout: Rollout, stage: Stage, members: Members, cohort: Cohort, now: datetime) -> None:
    arms = dict.fromkeys(cohort.control, Arm.CONTROL)
    arms |= dict.fromkeys(cohort.treatment, Arm.TREATMENT)
    chosen = {name: members.by_id[name] for name in arms}
    quantile = float(rollout.gate["slow_quantile"])
    usual = usual_of(chosen.values(), quantile=quantile)
    rows = Enrolment.objects.bulk_create(
        [
            _enrolment(rollout, stage, member, arms[name], cohort.strata[name], usual, now)
            for name, member in chosen.items()
        ],
        batch_size=BATCH,
    )
    EnrolmentStats.objects.bulk_create(
        [EnrolmentStats(enrolment=row) for row in rows], batch_size=BATCH
    )


def _enrolment(
    rollout: Rollout,
    stage: Stage,
    member: Member,
    arm: Arm,
    stratum: str,
    usual: Mapping[int, Usual],
    now: datetime,
) -> Enrolment:
    slow, drain = usual[member.device.pk].slow, usual[member.device.pk].drain
    is_new = arm == Arm.TREATMENT
    counted = member.bundle.manifest_sha256 if is_new else member.device.running_manifest_sha256
    return Enrolment(
        rollout=rollout,
        stage=stage,
        device=member.device,
        arm=arm.value,
        stratum=stratum,
        bundle_sha256=counted,
        slow_ms=slow.above,
        thirsty_above=drain.above,
        baseline={
            "running": member.device.running_manifest_sha256,
            "own_answers": slow.own,
            "pool_answers": slow.pool,
            "own_windows": drain.own,
            "pool_windows": drain.pool,
        },
        at=now,
    )


def _queue_updates(
    rollout: Rollout,
    stage: Stage,
    members: Iterable[Member],
    deltas: Mapping[tuple[int, int], Delta],
    now: datetime,
) -> None:
    members = list(members)
    pks = [member.device.pk for member in members]
    for older in Update.objects.filter(device_id__in=pks, state__in=_OPEN).order_by("pk"):
        apply_transition(
            older,
            table=UPDATE_TRANSITIONS,
            event=UpdateEvent.SUPERSEDE,
            log=UpdateTransition,
            actor=SYSTEM,
            reason=f"by rollout {rollout.pk}",
            changes={"finished_at": now},
        )
    rows = []
    for member in members:
        base = member.device.running_bundle
        delta = deltas.get((base.pk, member.bundle.pk)) if base is not None else None
        rows.append(
            Update(
                device=member.device,
                rollout=rollout,
                stage=stage,
                bundle=member.bundle,
                base_bundle=base,
                delta=delta,
                kind=OfferKind.INSTALL.value,
                is_offerable=delta is None or delta.state in DELTA_FINAL,
                queued_at=now,
            )
        )
    Update.objects.bulk_create(rows, batch_size=BATCH)


def _restratify(rollout: Rollout, strata: Mapping[str, str]) -> None:
    """Compare treated devices where this stage has control; one UPDATE per stratum that moves."""
    moves: dict[str, list[int]] = {}
    rows = Enrolment.objects.filter(rollout=rollout, arm=Arm.TREATMENT.value)
    for pk, device_id, stratum in rows.values_list("pk", "device__device_id", "stratum"):
        wanted = strata.get(device_id, stratum)
        if wanted != stratum:
            moves.setdefault(wanted, []).append(pk)
    for stratum, pks in moves.items():
        Enrolment.objects.filter(pk__in=pks).update(stratum=stratum)


def _has_delta(base: Bundle, new: Bundle) -> bool:
    same_line = base.target_id == new.target_id
    return same_line and base.pk != new.pk
