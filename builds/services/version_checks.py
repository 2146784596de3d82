"""The first look at a version: can the compiler read it at all?

A build looks too, but only when a target is active, and only after the builds of older versions,
one of which may wait for the lease of a dead worker to run out. The look waits for nobody. The row
of `VersionCheck` is the work that waits; it goes when it is done.
"""

from datetime import datetime

from django.conf import settings
from django.db import transaction
from django.db.models import Q, QuerySet

from builds.common.clock import Clock, SystemClock
from builds.common.enqueue import Task, enqueue
from builds.errors import CompileFailure
from builds.models import ModelVersion, VersionCheck
from builds.services.jobs import backoff, waiting_refuse
from builds.services.leases import lease_extend, lease_length, lease_require, rows_ring
from builds.services.version_states import version_accept, version_refuse
from builds.states import VersionState


def check_create(*, version: ModelVersion) -> VersionCheck:
    """Queue the first look at a version, inside the caller's transaction."""
    check, created = VersionCheck.objects.get_or_create(version=version)
    if created:
        enqueue(Task.VERSION_CHECK, check_id=check.pk)
    return check


def check_lease_next(
    *, owner: str, check_id: int | None = None, clock: Clock | None = None
) -> VersionCheck | None:
    """Take the lease of one check, or return None when there is nothing to do."""
    now = (clock or SystemClock()).now()
    rows = _leasable(now)
    if check_id is not None:
        rows = rows.filter(pk=check_id)
    with transaction.atomic():
        check = rows.select_for_update(skip_locked=True).first()
        if check is None:
            return None
        check.lease_owner = owner
        check.lease_until = now + lease_length()
        check.attempt += 1
        check.save(update_fields=["lease_owner", "lease_until", "attempt"])
    return check


def check_heartbeat(*, check: VersionCheck, owner: str, clock: Clock | None = None) -> None:
    """Extend the lease.

    Raises:
        LeaseLostError: It is somebody else's; stop working.
    """
    now = (clock or SystemClock()).now()
    lease_extend(_held(check), owner, now)


@transaction.atomic
def check_accept(*, check: VersionCheck, owner: str) -> None:
    """Note that the version can be read.

    Raises:
        LeaseLostError: The lease is somebody else's; nothing was written.
    """
    lease_require(_held(check), owner).delete()
    version_accept(version_id=check.version_id, actor=owner)


@transaction.atomic
def check_fail(
    *, check: VersionCheck, owner: str, failure: CompileFailure, clock: Clock | None = None
) -> None:
    """Refuse the version if it is at fault; otherwise look again later, a few times.

    Raises:
        LeaseLostError: The lease is somebody else's; nothing was written.
    """
    now = (clock or SystemClock()).now()
    row = lease_require(_held(check), owner)
    version = ModelVersion.objects.select_for_update().get(pk=check.version_id)
    error = (failure.failure_code[:64], str(failure), failure.hint)
    if failure.is_user_fault:
        row.delete()
        version_refuse(version=version, actor=owner, code=error[0], message=error[1], hint=error[2])
        waiting_refuse(
            version=version, failure=failure, actor=owner, by="the first look at it", now=now
        )
    elif failure.can_retry and check.attempt < settings.SPARSEFLEET.build_attempts:
        row.lease_owner, row.lease_until, row.rung_at = "", None, None
        row.not_before = now + backoff(check.attempt)
        row.save()
    else:  # the version stays as it is: a build will look again
        row.delete()
        if version.state != VersionState.SUBMITTED.value:
            return
        version.error_code, version.error_message, version.error_hint = error
        version.save(update_fields=["error_code", "error_message", "error_hint"])


def checks_ring(*, clock: Clock | None = None) -> list[int]:
    """Tell the queue about waiting checks; return the ids it seems deaf to (as for builds)."""
    now = (clock or SystemClock()).now()
    return rows_ring(_leasable(now), Task.VERSION_CHECK, "check_id", now)


def checks_ring_next(*, clock: Clock | None = None) -> None:
    """Tell the queue about the check that waits longest, because a worker has become free."""
    now = (clock or SystemClock()).now()
    rows_ring(_leasable(now)[:1], Task.VERSION_CHECK, "check_id", now, is_patient=False)


def _leasable(now: datetime) -> QuerySet[VersionCheck]:
    due = Q(not_before=None) | Q(not_before__lte=now)
    free = Q(lease_until=None) | Q(lease_until__lt=now)
    return VersionCheck.objects.filter(due, free).order_by("pk")


def _held(check: VersionCheck) -> QuerySet[VersionCheck]:
    return VersionCheck.objects.filter(pk=check.pk)
