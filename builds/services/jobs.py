"""Build jobs: who may work on which, for how long, and what a failure means.

A worker takes a lease (`build_lease_next`), says that it lives (`build_heartbeat`), and ends with
`build_finish` (in `builds.services.bundles`) or `build_fail`. A lease that runs out frees the job
for somebody else; the late worker finds its lease gone (`LeaseLostError`) and writes nothing. Every
function that writes for a worker checks owner and state under the row's lock.
"""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from django.conf import settings
from django.db import transaction
from django.db.models import Exists, OuterRef, Q, QuerySet

from builds.common.audit import audit
from builds.common.auth import Actor, require
from builds.common.clock import Clock, SystemClock
from builds.common.enqueue import Task, enqueue
from builds.common.roles import Permission
from builds.common.transitions import apply_transition
from builds.errors import CompileFailure, LeaseLostError
from builds.models import (
    BuildJob,
    BuildLogLine,
    BuildTransition,
    Bundle,
    ModelVersion,
    Target,
)
from builds.services.version_states import version_accept, version_reconsider, version_refuse
from builds.states import (
    BUILD_FINAL,
    BUILD_TRANSITIONS,
    BUILD_WORKING,
    BuildEvent,
    BuildState,
)

OWNER_BYTES: Final = 6
MAX_LOG_TEXT: Final = 2_000
MAX_STAGE: Final = 64
BACKOFF_FACTOR: Final = 4
MAX_BACKOFF: Final = timedelta(minutes=5)
_FINAL: Final = [state.value for state in BUILD_FINAL]
WORKING: Final = [state.value for state in BUILD_WORKING]
CLEARED: Final = {"lease_owner": "", "lease_until": None}


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One line for a build's log."""

    at: datetime
    level: str
    text: str


def new_owner(host: str, pid: int) -> str:
    """Return a lease owner that no other worker, and no other lease of this one, has."""
    return f"{host[:80]}:{pid}:{secrets.token_hex(OWNER_BYTES)}"


def jobs_create(*, version: ModelVersion, targets: Iterable[Target]) -> list[BuildJob]:
    """Make the build jobs that `version` does not have yet, and tell the queue after commit."""
    made = []
    for target in targets:
        job, created = BuildJob.objects.get_or_create(version=version, target=target)
        if created:
            enqueue(Task.BUILD_RUN, job_id=job.pk)
            made.append(job)
    return made


def jobs_leasable(now: datetime) -> QuerySet[BuildJob]:
    """Return the queued jobs that may be worked on now, oldest first.

    A job waits for older versions of its model on the same target: their bundle is its base, and
    what it compiles must not depend on which worker was faster.
    """
    older = BuildJob.objects.filter(
        version__model=OuterRef("version__model"),
        target=OuterRef("target"),
        version__release_seq__lt=OuterRef("version__release_seq"),
    ).exclude(state__in=_FINAL)
    due = Q(not_before=None) | Q(not_before__lte=now)
    return (
        BuildJob.objects.filter(due, state=BuildState.QUEUED.value)
        .exclude(Exists(older))
        .order_by("pk")
    )


def build_lease_next(
    *, owner: str, job_id: int | None = None, clock: Clock | None = None
) -> BuildJob | None:
    """Take the lease of one job, of this one if `job_id` is given.

    The first lease also fixes the base bundle, so that every run has the same input.

    Returns:
        The job in state `leased`, or None when there is nothing to do (or somebody was faster).
    """
    now = (clock or SystemClock()).now()
    rows = jobs_leasable(now)
    if job_id is not None:
        rows = rows.filter(pk=job_id)
    with transaction.atomic():
        job = (
            rows.select_related("version__model", "target")
            .select_for_update(of=("self",), skip_locked=True)
            .first()
        )
        if job is None:
            return None
        first = job.attempt == 0
        apply_transition(
            job,
            table=BUILD_TRANSITIONS,
            event=BuildEvent.LEASE,
            log=BuildTransition,
            actor=owner,
            changes={
                "lease_owner": owner,
                "lease_until": now + _lease(),
                "attempt": job.attempt + 1,
                "stage": "leased",
                "progress": 0.0,
                "started_at": now if first else job.started_at,
                "base_bundle": base_bundle(job) if first else job.base_bundle,
            },
        )
    return job


def base_bundle(job: BuildJob) -> Bundle | None:
    """Return the bundle whose grids the job keeps: its base version's, or the newest older."""
    same_target = Bundle.objects.filter(target=job.target, version__model=job.version.model)
    if job.version.base_version_id is not None:
        return same_target.filter(version=job.version.base_version_id).first()
    older = same_target.filter(version__release_seq__lt=job.version.release_seq)
    return older.order_by("-version__release_seq").first()


def build_heartbeat(
    *,
    job: BuildJob,
    owner: str,
    stage: str,
    progress: float,
    lines: Sequence[LogEntry] = (),
    clock: Clock | None = None,
) -> None:
    """Extend the lease, note how far the work is, and keep log lines.

    Raises:
        LeaseLostError: The lease is somebody else's; stop working.
    """
    now = (clock or SystemClock()).now()
    with transaction.atomic():
        changed = BuildJob.objects.filter(pk=job.pk, lease_owner=owner, state__in=WORKING).update(
            lease_until=now + _lease(), stage=stage[:MAX_STAGE], progress=progress
        )
        if changed != 1:
            raise LeaseLostError(f"{job} is no longer leased to {owner}")
        log_append(job=job, lines=lines)


def log_append(*, job: BuildJob, lines: Sequence[LogEntry]) -> None:
    """Append lines to the log of a build."""
    BuildLogLine.objects.bulk_create(
        [
            BuildLogLine(job=job, at=line.at, level=line.level, text=line.text[:MAX_LOG_TEXT])
            for line in lines
        ]
    )


@transaction.atomic
def build_advance(*, job: BuildJob, owner: str, event: BuildEvent, stage: str) -> None:
    """Move a leased job to its next working state.

    Raises:
        LeaseLostError: The lease is somebody else's; stop working.
    """
    build_owned(job=job, owner=owner)
    apply_transition(
        job,
        table=BUILD_TRANSITIONS,
        event=event,
        log=BuildTransition,
        actor=owner,
        changes={"stage": stage},
    )


def build_owned(*, job: BuildJob, owner: str) -> None:
    """Lock the row of a job and check that `owner` has its lease; `job` is read again.

    Raises:
        LeaseLostError: Somebody else has it, or nobody.
    """
    row = BuildJob.objects.select_for_update().filter(pk=job.pk, lease_owner=owner).first()
    if row is None or row.state not in WORKING:
        raise LeaseLostError(f"{job} is no longer leased to {owner}")
    job.refresh_from_db(fields=["state", "attempt", "lease_owner", "lease_until"])


@transaction.atomic
def version_read(*, job: BuildJob) -> None:
    """Note that the compiler could read the submission of this job."""
    version_accept(version_id=job.version_id, actor=job.lease_owner)


@transaction.atomic
def build_fail(
    *, job: BuildJob, owner: str, failure: CompileFailure, clock: Clock | None = None
) -> BuildState:
    """End this run: the submitter's fault is final; ours is tried again, later and later.

    The submitter's fault also makes the version invalid and ends its other waiting jobs.

    Returns:
        The new state: `failed_user`, `queued` (another try) or `failed_app`.

    Raises:
        LeaseLostError: The lease is somebody else's; nothing was written.
    """
    now = (clock or SystemClock()).now()
    build_owned(job=job, owner=owner)
    event = _failure_event(failure, job.attempt)
    changes: dict[str, object] = {**_error_columns(failure), **CLEARED}
    if event is BuildEvent.TRY_AGAIN:
        changes |= {"not_before": now + backoff(job.attempt), "rung_at": None, "stage": "waiting"}
    else:
        changes |= {"finished_at": now}
    state = apply_transition(
        job,
        table=BUILD_TRANSITIONS,
        event=event,
        log=BuildTransition,
        actor=owner,
        reason=f"{failure.failure_code}: {failure}",
        changes=changes,
    )
    if state is BuildState.FAILED_USER:
        _refuse_version(job, failure, owner, now)
    if state is not BuildState.QUEUED:
        audit(actor=owner, action="build.fail", obj=job, code=failure.failure_code)
    return state


def _refuse_version(job: BuildJob, failure: CompileFailure, owner: str, now: datetime) -> None:
    version = ModelVersion.objects.select_for_update().get(pk=job.version_id)
    version_refuse(
        version=version,
        actor=owner,
        code=failure.failure_code,
        message=str(failure),
        hint=failure.hint,
    )
    waiting_refuse(version=version, failure=failure, actor=owner, by=f"build {job.pk}", now=now)


@transaction.atomic
def waiting_refuse(
    *, version: ModelVersion, failure: CompileFailure, actor: str, by: str, now: datetime
) -> None:
    """End the waiting jobs of a version that was refused; the caller has locked the version."""
    waiting = BuildJob.objects.select_for_update().filter(
        version=version, state=BuildState.QUEUED.value
    )
    for other in waiting.order_by("pk"):
        apply_transition(
            other,
            table=BUILD_TRANSITIONS,
            event=BuildEvent.FAIL_USER,
            log=BuildTransition,
            actor=actor,
            reason=f"the version was refused by {by}",
            changes={**_error_columns(failure), "finished_at": now},
        )


@transaction.atomic
def build_retry(*, actor: Actor, job: BuildJob) -> BuildJob:
    """Queue a failed build again, with all its attempts; an invalid version is looked at again.

    Raises:
        ForbiddenError: The actor may not.
        IllegalTransitionError: The build has not failed.
    """
    require(actor, Permission.BUILD_RETRY)
    apply_transition(
        job,
        table=BUILD_TRANSITIONS,
        event=BuildEvent.RETRY,
        log=BuildTransition,
        actor=actor.name,
        changes={
            "attempt": 0,
            "not_before": None,
            "rung_at": None,
            "finished_at": None,
            "error_code": "",
            "error_message": "",
            "error_hint": "",
            "stage": "",
            "progress": 0.0,
        },
    )
    version_reconsider(
        version=ModelVersion.objects.select_for_update().get(pk=job.version_id), actor=actor.name
    )
    enqueue(Task.BUILD_RUN, job_id=job.pk)
    audit(actor=actor.name, action="build.retry", obj=job)
    return job


def backoff(attempt: int) -> timedelta:
    """Return how long to wait after the `attempt`-th run failed through our fault."""
    seconds = settings.SPARSEFLEET.build_backoff_s * BACKOFF_FACTOR ** (attempt - 1)
    return min(timedelta(seconds=seconds), MAX_BACKOFF)


def _failure_event(failure: CompileFailure, attempt: int) -> BuildEvent:
    if failure.is_user_fault:
        return BuildEvent.FAIL_USER
    if failure.can_retry and attempt < settings.SPARSEFLEET.build_attempts:
        return BuildEvent.TRY_AGAIN
    return BuildEvent.FAIL_APP


def _error_columns(failure: CompileFailure) -> dict[str, object]:
    return {
        "error_code": failure.failure_code[:64],
        "error_message": str(failure),
        "error_hint": failure.hint,
    }


def _lease() -> timedelta:
    return timedelta(seconds=settings.SPARSEFLEET.build_lease_s)
