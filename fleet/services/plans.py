"""From a request to a running rollout: bundles, sizes of stages, the first stage.

All functions that write run inside the caller's transaction, which holds the rollout's row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from django.db import transaction

from builds.common.audit import audit
from builds.common.auth import SYSTEM
from builds.common.enqueue import Task, enqueue
from builds.common.errors import ApplicationError, InvalidInputError, NotFoundError
from builds.models import BuildJob, Bundle, Model, ModelVersion
from builds.services.targets import build_request
from builds.states import BuildState, VersionState
from compiler.contract.protocol import NetworkPolicy
from fleet.cohorts import MAX_STAGES, Goal, stage_sizes
from fleet.errors import FirstInstallError, RolloutConflictError
from fleet.gates import PROFILES, spec_from_json
from fleet.gates.profiles import FIRST_INSTALL_PROFILE
from fleet.models import Group, Rollout, Stage
from fleet.networks import DEFAULT_WAIT_S, MAX_WAIT_S
from fleet.services.endings import rollout_move
from fleet.services.members import Members, group_devices, rollout_members
from fleet.services.stages import deltas_request, next_stage_open
from fleet.states import ROLLOUT_ACTIVE_STATES, RolloutEvent, RolloutState

_ACTIVE = [state.value for state in ROLLOUT_ACTIVE_STATES]


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """What somebody wants to release, to whom, in which steps, and what has to be shown."""

    model: str
    version: str
    group: str
    goals: Sequence[Goal]
    gate: Mapping[str, object]
    name: str = ""
    needs_approval: bool = False
    network_policy: NetworkPolicy = NetworkPolicy.ANY
    unmetered_wait_s: float = DEFAULT_WAIT_S


@dataclass(frozen=True, slots=True)
class StagePreview:
    """What a stage would be if the rollout started now: treatment devices up to it."""

    total: int
    is_release: bool


def subject_of(request: RolloutRequest) -> tuple[ModelVersion, Group]:
    """Return the version and the group that a request names.

    Raises:
        NotFoundError: No such model, version or group.
        InvalidInputError: The version is invalid.
    """
    model = Model.objects.filter(name=request.model).first()
    if model is None:
        raise NotFoundError(f"no model {request.model!r}")
    version = (
        ModelVersion.objects.select_related("model")
        .filter(model=model, version=request.version)
        .first()
    )
    if version is None:
        raise NotFoundError(f"no version {request.version!r} of {request.model!r}")
    if version.state == VersionState.INVALID:
        raise InvalidInputError(
            f"version {version.version} is invalid: {version.error_message}",
            hint=version.error_hint,
        )
    group = Group.objects.filter(model=model, name=request.group).first()
    if group is None:
        raise NotFoundError(f"no group {request.group!r} for model {request.model!r}")
    return version, group


def goals_require(goals: Sequence[Goal]) -> None:
    """Check the stages that somebody asked for.

    Raises:
        InvalidInputError: None or too many, or a stage without a size.
    """
    if not 1 <= len(goals) <= MAX_STAGES:
        raise InvalidInputError(f"a rollout needs 1..{MAX_STAGES} stages")
    for goal in goals:
        if (goal.percent is None) == (goal.count is None):
            raise InvalidInputError("a stage needs either percent or count")
        if goal.percent is not None and not 0 < goal.percent <= 100:
            raise InvalidInputError("percent must be above 0 and at most 100")
        if goal.count is not None and goal.count < 1:
            raise InvalidInputError("count must be at least 1")


def network_require(request: RolloutRequest) -> None:
    """Check how long a rollout may wait for unmetered networks.

    Raises:
        InvalidInputError: It is no time between 0 and a year.
    """
    if not 0 <= request.unmetered_wait_s <= MAX_WAIT_S:
        raise InvalidInputError(
            f"unmetered_wait_s {request.unmetered_wait_s:g}",
            hint=f"seconds from 0 to {MAX_WAIT_S:.0f}",
        )


def bundles_check(rollout: Rollout, *, now: datetime) -> None:
    """Move a compiling rollout on when its bundles are published; ask for those that are not.

    Inside the caller's transaction, which holds the rollout's row.
    """
    if rollout.state != RolloutState.COMPILING:
        return
    targets = {device.target_id: device.target for device in group_devices(rollout.group)}
    have = Bundle.objects.filter(
        version=rollout.version, target_id__in=targets, published_at__isnull=False
    )
    missing = targets.keys() - set(have.values_list("target_id", flat=True))
    for target_id in sorted(missing):
        job = build_request(version=rollout.version, target=targets[target_id])
        if job.state in (BuildState.FAILED_USER, BuildState.FAILED_APP):
            _build_failed(rollout, job, now)
            return
    if not missing and rollout.version.state != VersionState.INVALID:
        rollout_move(
            rollout,
            RolloutEvent.BUNDLES_READY,
            actor="system",
            now=now,
            reason=f"{len(targets)} targets",
        )
        if not rollout.needs_approval:
            rollout_move(rollout, RolloutEvent.WAIVE_APPROVAL, actor="system", now=now)


def begin(rollout: Rollout, *, actor: str, now: datetime) -> None:
    """Fix the stages' sizes, ask for deltas, open the first stage. Holds the rollout's row."""
    other = Rollout.objects.filter(model_id=rollout.model_id, state__in=_ACTIVE)
    busy = other.exclude(pk=rollout.pk).first()
    if busy is not None:
        raise RolloutConflictError(
            f"rollout {busy.pk} of this model is {busy.state}",
            hint="evidence of two rollouts at once cannot be told apart: wait, or halt it",
        )
    members = rollout_members(rollout)
    _require_comparison(rollout, members)
    _fix_sizes(rollout, members)
    _note_base(rollout, members)
    rollout_move(rollout, RolloutEvent.START, actor=actor, now=now, started_at=now)
    deltas_request(members)
    next_stage_open(rollout, now=now)
    audit(
        actor=actor,
        action="rollout.start",
        obj=rollout,
        devices=len(members.by_id),
        left_out=dict(members.left_out),
    )
    enqueue(Task.ROLLOUT_LOOK, rollout_id=rollout.pk)


def begin_if_wanted(rollout: Rollout, *, now: datetime) -> None:
    """Start a ready rollout that shall start by itself; note why when that is not possible."""
    if rollout.state != RolloutState.READY or not rollout.starts_by_itself:
        return
    try:
        with transaction.atomic():
            begin(rollout, actor=SYSTEM.name, now=now)
    except RolloutConflictError:
        return  # wait for the other one
    except ApplicationError as error:
        rollout.refresh_from_db()
        rollout.starts_by_itself = False
        rollout.end_reason = f"could not start: {error}"
        rollout.save(update_fields=["starts_by_itself", "end_reason"])


def rollout_preview(
    *, model: str, version: str, group: str, goals: Sequence[Goal], gate: Mapping[str, object]
) -> tuple[tuple[StagePreview, ...], Members]:
    """Return the stages that a rollout would have if it started now; changes nothing.

    Raises:
        ApplicationError: What `rollout_create` and `rollout_start` would raise.
    """
    spec = spec_from_json(gate, PROFILES)
    goals_require(goals)
    request = RolloutRequest(model, version, group, goals, gate)
    found, saved_group = subject_of(request)
    draft = Rollout(
        model=found.model,
        version=found,
        group=saved_group,
        gate=spec.to_json(),
        is_first_install=spec.profile == FIRST_INSTALL_PROFILE,
    )
    members = rollout_members(draft)
    _require_comparison(draft, members)
    sizes = stage_sizes(goals, members.candidates, compare=not draft.is_first_install)
    return tuple(StagePreview(size.total, size.is_release) for size in sizes), members


def _require_comparison(rollout: Rollout, members: Members) -> None:
    runs = sum(member.device.running_bundle_id is not None for member in members.by_id.values())
    if rollout.is_first_install and runs:
        raise FirstInstallError(
            f"{runs} devices run a version already, so the new one can and must be compared",
            hint="choose another gate profile, e.g. default",
        )
    if not rollout.is_first_install and members.by_id and not runs:
        raise FirstInstallError(
            "no device runs anything yet, so there is nothing to compare with",
            hint=f"use the gate profile {FIRST_INSTALL_PROFILE!r} with one stage of 100 %",
        )


def _fix_sizes(rollout: Rollout, members: Members) -> None:
    stages = list(rollout.stages.order_by("index"))
    goals = [Goal(stage.percent, stage.count) for stage in stages]
    if rollout.is_first_install and not (len(goals) == 1 and goals[0].is_everyone):
        raise FirstInstallError("a first installation has exactly one stage, of 100 %")
    sizes = stage_sizes(goals, members.candidates, compare=not rollout.is_first_install)
    for stage, size in zip(stages, sizes, strict=False):
        stage.treatment_target = size.total
        stage.is_release = size.is_release
        stage.save(update_fields=["treatment_target", "is_release"])
    for index in range(len(stages), len(sizes)):
        Stage.objects.create(
            rollout=rollout,
            index=index,
            percent=100.0,
            treatment_target=sizes[index].total,
            is_release=sizes[index].is_release,
        )


def _note_base(rollout: Rollout, members: Members) -> None:
    """Remember which version most of the devices run, for people."""
    versions: dict[int, int] = {}
    for member in members.by_id.values():
        if member.device.running_bundle is not None:
            pk = member.device.running_bundle.version_id
            versions[pk] = versions.get(pk, 0) + 1
    if versions:
        rollout.base_version_id = max(versions, key=lambda pk: (versions[pk], pk))
        rollout.save(update_fields=["base_version"])


def _build_failed(rollout: Rollout, job: BuildJob, now: datetime) -> None:
    reason = f"build {job.pk} failed: {job.error_code} {job.error_message}"
    rollout_move(rollout, RolloutEvent.BUILD_FAILED, actor="system", reason=reason, now=now)
    audit(actor="system", action="rollout.build_failed", obj=rollout, build=job.pk)
