"""Leases, dead workers and lost messages: what leased rows share, and the tick for build jobs."""

from datetime import datetime, timedelta
from typing import Final, TypeVar

from django.conf import settings
from django.db import models, transaction
from django.db.models import QuerySet

from builds.common.clock import Clock, SystemClock
from builds.common.enqueue import Task, enqueue
from builds.common.transitions import apply_transition
from builds.errors import LeaseLostError
from builds.models import BuildJob, BuildTransition
from builds.services.jobs import CLEARED, WORKING, jobs_leasable
from builds.states import BUILD_TRANSITIONS, BuildEvent

MAX_RINGS: Final = 32
Leased = TypeVar("Leased", bound=models.Model)


def leases_expire(*, clock: Clock | None = None) -> int:
    """Free the jobs whose worker has been silent for too long; return how many."""
    now = (clock or SystemClock()).now()
    count = 0
    for pk in BuildJob.objects.filter(state__in=WORKING, lease_until__lt=now).values_list(
        "pk", flat=True
    ):
        count += _lease_expire(pk, now)
    return count


@transaction.atomic
def _lease_expire(pk: int, now: datetime) -> int:
    job = (
        BuildJob.objects.select_for_update()
        .filter(pk=pk, state__in=WORKING, lease_until__lt=now)
        .first()
    )
    if job is None:
        return 0
    is_last = job.attempt >= settings.SPARSEFLEET.build_attempts
    changes: dict[str, object] = {**CLEARED, "rung_at": None, "stage": "waiting"}
    if is_last:
        changes |= {
            "error_code": "build.app.worker_lost",
            "error_message": f"{job.attempt} workers were lost while building",
            "error_hint": "look at the workers' memory and logs, then retry the build",
            "finished_at": now,
        }
    apply_transition(
        job,
        table=BUILD_TRANSITIONS,
        event=BuildEvent.FAIL_APP if is_last else BuildEvent.LEASE_EXPIRED,
        log=BuildTransition,
        actor="system",
        reason=f"no sign of life from {job.lease_owner}",
        changes=changes,
    )
    return 1


def jobs_ring(*, clock: Clock | None = None) -> list[int]:
    """Tell the queue about jobs that it was not told of lately; return the ids it seems deaf to.

    A job that stays queued although the queue was told `doorbell_patience_s` ago, while no worker
    is at work, means that messages get lost: the caller should do the job itself.
    """
    now = (clock or SystemClock()).now()
    overdue = rows_ring(jobs_leasable(now), Task.BUILD_RUN, "job_id", now)
    if overdue and BuildJob.objects.filter(state__in=WORKING).exists():
        return []
    return overdue


def jobs_ring_next(*, clock: Clock | None = None) -> None:
    """Tell the queue about the one job that waits longest, because a worker has become free."""
    now = (clock or SystemClock()).now()
    rows_ring(jobs_leasable(now)[:1], Task.BUILD_RUN, "job_id", now, is_patient=False)


# What every kind of leased row shares: builds, deltas, first looks at versions.


def lease_length() -> timedelta:
    """Return how long a lease lasts without a sign of life."""
    return timedelta(seconds=settings.SPARSEFLEET.build_lease_s)


def lease_extend(rows: QuerySet[Leased], owner: str, now: datetime) -> None:
    """Extend the lease of the one row in `rows` that `owner` holds.

    Raises:
        LeaseLostError: It is somebody else's; stop working.
    """
    if rows.filter(lease_owner=owner).update(lease_until=now + lease_length()) != 1:
        raise LeaseLostError(f"the lease is no longer held by {owner}")


def lease_require(rows: QuerySet[Leased], owner: str) -> Leased:
    """Return the one row in `rows`, locked, if `owner` holds its lease.

    Raises:
        LeaseLostError: It is somebody else's; write nothing.
    """
    row = rows.select_for_update().filter(lease_owner=owner).first()
    if row is None:
        raise LeaseLostError(f"the lease is no longer held by {owner}")
    return row


def rows_ring(
    rows: QuerySet[Leased], task: Task, argument: str, now: datetime, *, is_patient: bool = True
) -> list[int]:
    """Tell the queue about waiting rows; return the ids that it was told of long ago.

    Args:
        rows: What waits, longest first.
        task: Who does it.
        argument: Name of the task's argument.
        now: The time.
        is_patient: Leave a row alone that the queue was told of within `doorbell_patience_s`.
    """
    patience = timedelta(seconds=settings.SPARSEFLEET.doorbell_patience_s)
    overdue = []
    for pk, rung_at in list(rows.values_list("pk", "rung_at")[:MAX_RINGS]):
        if is_patient and rung_at is not None and now - rung_at < patience:
            continue
        with transaction.atomic():
            rows.model._default_manager.filter(pk=pk).update(rung_at=now)
            enqueue(task, **{argument: pk})
        if rung_at is not None:
            overdue.append(pk)
    return overdue
