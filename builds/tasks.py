"""Celery tasks of this app: each says "look at row N" or "look at everything".

Losing any of these messages is harmless: the tick looks again, and beat sends the next tick.
"""

from celery import shared_task
from django.conf import settings

from builds.common.enqueue import Task
from builds.compile_runner.slot import build_in_slot, check_in_slot, delta_in_slot
from builds.services.upkeep import everything_due

# The runner stops the compiler itself; this only ends a runner that hangs. Messages of work that
# takes longer than the broker's visibility timeout come again and find the lease taken.
TIME_LIMIT_S = int(settings.SPARSEFLEET.build_time_limit_s) + 300


@shared_task(name=Task.BUILDS_TICK.value, time_limit=TIME_LIMIT_S)
def tick() -> None:
    """Free dead leases, ring the queue, renew metadata; do one job here if the queue is deaf."""
    due = everything_due()
    if due.check_id is not None:
        check_in_slot(due.check_id)
    if due.build_id is not None:
        build_in_slot(due.build_id)
    if due.delta_id is not None:
        delta_in_slot(due.delta_id)


@shared_task(name=Task.BUILD_RUN.value, time_limit=TIME_LIMIT_S)
def build_run(job_id: int) -> None:
    """Run one build job, if nobody else does and this worker is free."""
    build_in_slot(job_id)


@shared_task(name=Task.DELTA_BUILD.value, time_limit=TIME_LIMIT_S)
def delta_build(delta_id: int) -> None:
    """Make one delta, if nobody else does and this worker is free."""
    delta_in_slot(delta_id)


@shared_task(name=Task.VERSION_CHECK.value, time_limit=TIME_LIMIT_S)
def version_check(check_id: int) -> None:
    """Take a first look at one version, if nobody else does and this worker is free."""
    check_in_slot(check_id)
