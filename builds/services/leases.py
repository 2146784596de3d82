"""Dead workers and lost messages: what the tick does about build jobs."""

from datetime import datetime, timedelta
from typing import Final

from django.conf import settings
from django.db import transaction

from builds.common.clock import Clock, SystemClock
from builds.common.enqueue import Task, enqueue
from builds.common.transitions import apply_transition
from builds.models import BuildJob, BuildTransition
from builds.services.jobs import CLEARED, WORKING, jobs_leasable
from builds.states import BUILD_TRANSITIONS, BuildEvent

MAX_RINGS: Final = 32


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
    patience = timedelta(seconds=settings.SPARSEFLEET.doorbell_patience_s)
    ids = jobs_leasable(now).values_list("pk", "rung_at")[:MAX_RINGS]
    overdue = []
    for pk, rung_at in ids:
        if rung_at is not None and now - rung_at < patience:
            continue
        with transaction.atomic():
            BuildJob.objects.filter(pk=pk).update(rung_at=now)
            enqueue(Task.BUILD_RUN, job_id=pk)
        if rung_at is not None:
            overdue.append(pk)
    if overdue and BuildJob.objects.filter(state__in=WORKING).exists():
        return []
    return overdue


def jobs_ring_next(*, clock: Clock | None = None) -> None:
    """Tell the queue about the one job that waits longest, because a worker has become free."""
    now = (clock or SystemClock()).now()
    pk = jobs_leasable(now).values_list("pk", flat=True).first()
    if pk is not None:
        with transaction.atomic():
            BuildJob.objects.filter(pk=pk).update(rung_at=now)
            enqueue(Task.BUILD_RUN, job_id=pk)
