"""What people do to rollouts. Each action checks the role, moves the state, and is audited.

Lock order: the rollout's row first, then stages, updates and devices in ascending order, then the
fleet version, and the audit chain last.
"""

import secrets

from builds.common.audit import audit
from builds.common.auth import Actor, require
from builds.common.clock import Clock, SystemClock
from builds.common.enqueue import Task, enqueue
from builds.common.errors import InvalidInputError, NotFoundError
from builds.common.roles import Permission
from fleet.errors import ApprovalError, FirstInstallError
from fleet.gates import PROFILES, GateSpec, spec_from_json, spec_from_stored
from fleet.gates.profiles import FIRST_INSTALL_PROFILE
from fleet.models import Rollout, Stage
from fleet.services.endings import rollback_begin, rollout_move, stages_close, updates_withdraw
from fleet.services.plans import (
    RolloutRequest,
    begin,
    bundles_check,
    goals_require,
    network_require,
    subject_of,
)
from fleet.services.stages import next_stage_open, stage_move
from fleet.services.versions import fleet_atomic
from fleet.states import RolloutEvent, RolloutState, StageEvent, StageState

SALT_BYTES = 12
MAX_NAME = 100


@fleet_atomic()
def rollout_create(*, actor: Actor, request: RolloutRequest, clock: Clock | None = None) -> Rollout:
    """Make a rollout; it asks for missing bundles at once and is `ready` when all are there.

    Raises:
        ForbiddenError: The actor may not.
        NotFoundError: No such model, version or group.
        InvalidInputError: Stages or gate are impossible.
    """
    require(actor, Permission.ROLLOUT_EDIT)
    now = (clock or SystemClock()).now()
    spec = spec_from_json(request.gate, PROFILES)
    goals_require(request.goals)
    network_require(request)
    version, group = subject_of(request)
    rollout = Rollout.objects.create(
        model=version.model,
        version=version,
        group=group,
        name=(request.name or f"{version.model.name} {version.version}")[:MAX_NAME],
        salt=secrets.token_hex(SALT_BYTES),
        gate=spec.to_json(),
        is_first_install=spec.profile == FIRST_INSTALL_PROFILE,
        needs_approval=request.needs_approval,
        network_policy=request.network_policy.value,
        unmetered_wait_s=request.unmetered_wait_s,
        created_by=actor.name,
    )
    Stage.objects.bulk_create(
        [
            Stage(rollout=rollout, index=index, percent=goal.percent, count=goal.count)
            for index, goal in enumerate(request.goals)
        ]
    )
    rollout_move(rollout, RolloutEvent.SUBMIT, actor=actor.name, now=now)
    bundles_check(rollout, now=now)
    audit(
        actor=actor.name,
        action="rollout.create",
        obj=rollout,
        model=version.model.name,
        version=version.version,
        group=group.name,
        profile=spec.profile,
        network_policy=request.network_policy.value,
    )
    enqueue(Task.ROLLOUT_LOOK, rollout_id=rollout.pk)
    return rollout


@fleet_atomic()
def rollout_approve(*, actor: Actor, rollout_id: int, clock: Clock | None = None) -> Rollout:
    """Approve a rollout that somebody else made.

    Raises:
        ForbiddenError: The actor may not, or made the rollout (`ApprovalError`).
        IllegalTransitionError: It waits for no approval.
    """
    require(actor, Permission.ROLLOUT_APPROVE)
    rollout = locked(rollout_id)
    if rollout.created_by == actor.name:
        raise ApprovalError("whoever made a rollout may not approve it", hint="ask somebody else")
    now = (clock or SystemClock()).now()
    rollout_move(rollout, RolloutEvent.APPROVE, actor=actor.name, now=now)
    audit(actor=actor.name, action="rollout.approve", obj=rollout)
    enqueue(Task.ROLLOUT_LOOK, rollout_id=rollout.pk)
    return rollout


@fleet_atomic()
def rollout_start(*, actor: Actor, rollout_id: int, clock: Clock | None = None) -> Rollout:
    """Start a rollout, or note that it shall start as soon as it is ready.

    Raises:
        ForbiddenError: The actor may not.
        RolloutConflictError: Another rollout of the model is under way.
        EmptyStageError, NoControlError, FirstInstallError: Stages and devices do not fit.
        IllegalTransitionError: It has started before, or has ended.
    """
    require(actor, Permission.ROLLOUT_EDIT)
    rollout = locked(rollout_id)
    now = (clock or SystemClock()).now()
    if rollout.state in (RolloutState.COMPILING, RolloutState.AWAITING_APPROVAL):
        rollout.starts_by_itself = True
        rollout.save(update_fields=["starts_by_itself"])
        audit(actor=actor.name, action="rollout.start_when_ready", obj=rollout)
        return rollout
    begin(rollout, actor=actor.name, now=now)
    return rollout


@fleet_atomic()
def rollout_pause(
    *, actor: Actor, rollout_id: int, reason: str = "", clock: Clock | None = None
) -> Rollout:
    """Offer nothing new and promote nothing; what has begun goes on, and harm is still acted on."""
    return _simple(actor, rollout_id, RolloutEvent.PAUSE, reason, clock, Permission.ROLLOUT_HALT)


@fleet_atomic()
def rollout_resume(
    *, actor: Actor, rollout_id: int, reason: str = "", clock: Clock | None = None
) -> Rollout:
    """Go on with a paused rollout."""
    return _simple(actor, rollout_id, RolloutEvent.RESUME, reason, clock, Permission.ROLLOUT_EDIT)


def rollout_halt(
    *, actor: Actor, rollout_id: int, reason: str = "", clock: Clock | None = None
) -> Rollout:
    """Stop a rollout at once and for good: no offers, no downloads, open updates cancelled.

    The state is committed first, in a transaction of its own, because offers and downloads follow
    it; then the open updates are closed in batches. Should that be cut off, the tick finishes it.

    Raises:
        ForbiddenError: The actor may not.
        IllegalTransitionError: The rollout is not under way.
    """
    now = (clock or SystemClock()).now()
    with fleet_atomic():
        rollout = _simple(
            actor, rollout_id, RolloutEvent.HALT, reason, clock, Permission.ROLLOUT_HALT
        )
    updates_withdraw(rollout=rollout, reason=_text("halted", reason), now=now)
    with fleet_atomic():
        stages_close(
            locked(rollout_id), event=StageEvent.HOLD, reason=_text("halted", reason), now=now
        )
    return rollout


@fleet_atomic()
def rollout_cancel(
    *, actor: Actor, rollout_id: int, reason: str = "", clock: Clock | None = None
) -> Rollout:
    """Drop a rollout that has not started."""
    rollout = _simple(
        actor, rollout_id, RolloutEvent.CANCEL, reason, clock, Permission.ROLLOUT_EDIT
    )
    now = (clock or SystemClock()).now()
    stages_close(rollout, event=StageEvent.SKIP, reason=_text("cancelled", reason), now=now)
    return rollout


@fleet_atomic()
def rollout_rollback(
    *, actor: Actor, rollout_id: int, reason: str = "", clock: Clock | None = None
) -> Rollout:
    """Send every device that has the new version back to what it ran before.

    Raises:
        ForbiddenError: The actor may not.
        IllegalTransitionError: The rollout is not under way and was not stopped.
        FirstInstallError: There is nothing to go back to.
    """
    require(actor, Permission.ROLLOUT_HALT)
    rollout = locked(rollout_id)
    if rollout.is_first_install:
        raise FirstInstallError("a first version has nothing to go back to", hint="halt it")
    rollback_begin(
        rollout,
        event=RolloutEvent.ROLL_BACK,
        actor=actor.name,
        reason=_text(f"rolled back by {actor.name}", reason),
        now=(clock or SystemClock()).now(),
    )
    enqueue(Task.ROLLOUT_LOOK, rollout_id=rollout.pk)
    return rollout


@fleet_atomic()
def rollout_promote(
    *, actor: Actor, rollout_id: int, reason: str, clock: Clock | None = None
) -> Rollout:
    """Pass a held stage by hand. The evidence goes on; what was not shown stays in the record.

    Raises:
        ForbiddenError: The actor may not.
        InvalidInputError: No reason is given.
        NotFoundError: No stage of the rollout is held.
    """
    require(actor, Permission.ROLLOUT_EDIT)
    if not reason.strip():
        raise InvalidInputError("a reason is needed to pass a stage that the gate holds")
    now = (clock or SystemClock()).now()
    rollout = locked(rollout_id)
    stage = rollout.stages.filter(state=StageState.HELD.value).first()
    if stage is None or rollout.state != RolloutState.RUNNING:
        raise NotFoundError(f"rollout {rollout_id} has no held stage")
    text = f"passed by hand by {actor.name}: {reason}"
    stage_move(stage, StageEvent.SOAK, reason=text)
    stage_move(stage, StageEvent.PASS, reason=text, now=now)
    if next_stage_open(rollout, now=now) is None:
        rollout_move(rollout, RolloutEvent.COMPLETE, actor=actor.name, reason=text, now=now)
    audit(actor=actor.name, action="rollout.promote", obj=rollout, stage=stage.index, reason=reason)
    return rollout


def locked(rollout_id: int) -> Rollout:
    """Return a rollout with its row locked until the transaction ends.

    Raises:
        NotFoundError: No such rollout.
    """
    rollout = (
        Rollout.objects.select_for_update(of=("self",))
        .select_related("model", "version", "group")
        .filter(pk=rollout_id)
        .first()
    )
    if rollout is None:
        raise NotFoundError(f"no rollout {rollout_id}")
    return rollout


def gate_of(rollout: Rollout) -> GateSpec:
    """Return the gate specification that is stored with a rollout."""
    return spec_from_stored(rollout.gate, PROFILES)


def _simple(
    actor: Actor,
    rollout_id: int,
    event: RolloutEvent,
    reason: str,
    clock: Clock | None,
    permission: Permission,
) -> Rollout:
    require(actor, permission)
    rollout = locked(rollout_id)
    now = (clock or SystemClock()).now()
    changes = {"halted_at": now} if event == RolloutEvent.HALT else {}
    rollout_move(rollout, event, actor=actor.name, reason=reason, now=now, **changes)
    audit(actor=actor.name, action=f"rollout.{event.value}", obj=rollout, reason=reason)
    return rollout


def _text(what: str, reason: str) -> str:
    return f"{what}: {reason}" if reason else what
