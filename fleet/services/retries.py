"""Try again where an update failed: a new attempt for each such device, by somebody's decision.

A device keeps its own list of bundles that failed there and refuses them until they expire; the
assignment of an attempt made here says `retry_failed`, which it obeys once.
"""

from collections.abc import Iterator
from typing import Final

from django.db.models import Exists, F, OuterRef, Q, QuerySet

from builds.common.audit import audit
from builds.common.auth import Actor, require
from builds.common.clock import Clock, SystemClock
from builds.common.enqueue import Task, enqueue
from builds.common.roles import Permission
from compiler.contract.protocol import OfferKind, UpdateState
from fleet.errors import RetryError
from fleet.models import Rollout, Update
from fleet.selectors.poll import INSTALL_STATES
from fleet.services.rollouts import locked
from fleet.services.versions import fleet_atomic, fleet_version_bump
from fleet.states import DeviceState

MAX_ATTEMPTS: Final = 10
BATCH: Final = 2_000
# A device that rejects a bundle as not for it will do so again; one that denies it may be told.
DENIED_CODE: Final = "agent.denied"
_FAILED: Final = (UpdateState.FAILED, UpdateState.ROLLED_BACK, UpdateState.TIMED_OUT)


@fleet_atomic()
def rollout_retry(
    *, actor: Actor, rollout_id: int, reason: str = "", clock: Clock | None = None
) -> Rollout:
    """Offer the version once more to every device on which it failed.

    Raises:
        ForbiddenError: The actor may not.
        RetryError: The rollout offers nothing now, or no device failed that may try again.
    """
    require(actor, Permission.ROLLOUT_EDIT)
    rollout = locked(rollout_id)
    if rollout.state not in INSTALL_STATES:
        raise RetryError(f"rollout {rollout_id} is {rollout.state}: it offers nothing")
    now = (clock or SystemClock()).now()
    attempts = [
        Update(
            device_id=failed.device_id,
            rollout=rollout,
            stage_id=failed.stage_id,
            bundle_id=failed.bundle_id,
            base_bundle_id=failed.base_bundle_id,
            delta_id=failed.delta_id,
            kind=OfferKind.INSTALL.value,
            attempt=failed.attempt + 1,
            is_offerable=True,
            retry_failed=True,
            queued_at=now,
        )
        for failed in retryable(rollout)
    ]
    if not attempts:
        raise RetryError(
            f"no device of rollout {rollout_id} failed that may try again",
            hint=f"each has at most {MAX_ATTEMPTS} attempts, and a newer update goes first",
        )
    Update.objects.bulk_create(attempts, batch_size=BATCH)
    fleet_version_bump()
    audit(
        actor=actor.name,
        action="rollout.retry",
        obj=rollout,
        reason=reason,
        devices=len(attempts),
    )
    enqueue(Task.ROLLOUT_LOOK, rollout_id=rollout.pk)
    return rollout


def retryable(rollout: Rollout) -> Iterator[Update]:
    """Return the installs of a rollout that failed last and may be tried again. One query."""
    failed = Q(state__in=[state.value for state in _FAILED]) | Q(
        state=UpdateState.REJECTED.value, code=DENIED_CODE
    )
    newer = Update.objects.filter(device_id=OuterRef("device_id"), pk__gt=OuterRef("pk"))
    rows: QuerySet[Update] = (
        Update.objects.filter(failed, rollout=rollout, kind=OfferKind.INSTALL.value)
        .filter(attempt__lt=MAX_ATTEMPTS, device__state=DeviceState.ACCEPTED.value)
        .exclude(Exists(newer))
        .exclude(device__running_bundle=F("bundle"))
        .order_by("device_id")
    )
    return rows.iterator(chunk_size=BATCH)
