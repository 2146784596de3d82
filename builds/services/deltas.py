"""Deltas: how a device that runs one bundle gets to another with few bytes.

`delta_request` is what the fleet calls for each pair that devices really need. A worker takes the
lease, the codec runs in a process of its own, and a delta that would save too little is not kept:
the device downloads whole sections then. The way back is a pair of its own, asked for beside the
way there.

The queue is bounded (see `builds.services.delta_queue`): what does not fit is `deferred`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from django.conf import settings
from django.db import transaction
from django.db.models import Q, QuerySet

from builds.common.audit import audit
from builds.common.clock import Clock, SystemClock
from builds.common.enqueue import Task
from builds.common.errors import InvalidInputError
from builds.common.transitions import apply_transition
from builds.errors import CompileFailure
from builds.models import Bundle, Delta, DeltaTransition
from builds.services.blobs import blob_keep
from builds.services.content_keys import content_key_of, delta_seal
from builds.services.delta_queue import delta_enter, deltas_admit
from builds.services.jobs import CLEARED, backoff
from builds.services.leases import lease_extend, lease_length, lease_require, rows_ring
from builds.states import DELTA_TRANSITIONS, DeltaEvent, DeltaState
from compiler.contract.canonical import sha256_hex

WORKER_LOST: Final = {
    "error_code": "build.app.worker_lost",
    "error_message": "every worker that tried was lost",
    "error_hint": "look at the workers' memory and logs",
}


@dataclass(frozen=True, slots=True)
class DeltaOutput:
    """What the codec made.

    Attributes:
        path: The delta file.
        full_bytes: What a device with the base would download without it.
        bsdiff4_bytes: What one bsdiff4 patch would have needed; None when it was not measured.
        report: Costs per section, JSON.
    """

    path: Path
    full_bytes: int
    bsdiff4_bytes: int | None
    report: Mapping[str, Any]


@transaction.atomic
def delta_request(base: Bundle, new: Bundle, *, is_urgent: bool = False) -> Delta:
    """Return the delta of this pair, queued now if there is none; a failed one is tried again.

    Args:
        base: What devices run.
        new: What they shall run.
        is_urgent: Devices wait for it: it comes before others, and is never less urgent than it
            was.

    Returns:
        The delta. It is `deferred`, with a code and a hint, if the queue is full.

    Raises:
        InvalidInputError: The pair is not two versions of one model for one target.
    """
    same_line = base.version.model_id == new.version.model_id and base.target_id == new.target_id
    if base.pk == new.pk or not same_line:
        raise InvalidInputError("a delta leads between two versions of one model and target")
    delta, created = Delta.objects.get_or_create(
        base=base, new=new, defaults={"is_urgent": is_urgent}
    )
    if is_urgent and not delta.is_urgent:
        delta.is_urgent = True
        delta.save(update_fields=["is_urgent"])
    if delta.state == DeltaState.FAILED.value:
        apply_transition(
            delta,
            table=DELTA_TRANSITIONS,
            event=DeltaEvent.RETRY,
            log=DeltaTransition,
            actor="system",
            changes={"attempt": 0, "not_before": None, "rung_at": None, "error_code": ""},
        )
        created = True
    if created or delta.state == DeltaState.DEFERRED.value:
        delta_enter(delta)
    return delta


def delta_lease_next(
    *, owner: str, delta_id: int | None = None, clock: Clock | None = None
) -> Delta | None:
    """Take the lease of one delta, or return None when there is nothing to do."""
    now = (clock or SystemClock()).now()
    rows = _leasable(now)
    if delta_id is not None:
        rows = rows.filter(pk=delta_id)
    with transaction.atomic():
        delta = rows.select_for_update(skip_locked=True).first()
        if delta is None:
            return None
        apply_transition(
            delta,
            table=DELTA_TRANSITIONS,
            event=DeltaEvent.START,
            log=DeltaTransition,
            actor=owner,
            changes={
                "lease_owner": owner,
                "lease_until": now + lease_length(),
                "attempt": delta.attempt + 1,
                "started_at": delta.started_at or now,
            },
        )
    return delta


def delta_heartbeat(*, delta: Delta, owner: str, clock: Clock | None = None) -> None:
    """Extend the lease.

    Raises:
        LeaseLostError: It is somebody else's; stop working.
    """
    now = (clock or SystemClock()).now()
    lease_extend(_held(delta), owner, now)


def delta_finish(
    *, delta: Delta, owner: str, output: DeltaOutput, clock: Clock | None = None
) -> Delta:
    """Keep a delta that is worth it; note one that is too large.

    Raises:
        LeaseLostError: The lease is somebody else's; nothing was written.
    """
    size = output.path.stat().st_size
    is_worth_it = size <= settings.SPARSEFLEET.delta_max_ratio * output.full_bytes
    kept = _keep(delta, output.path) if is_worth_it else {"size_bytes": size}
    with transaction.atomic():
        lease_require(_held(delta), owner)
        apply_transition(
            delta,
            table=DELTA_TRANSITIONS,
            event=DeltaEvent.FINISH if is_worth_it else DeltaEvent.EXCEED,
            log=DeltaTransition,
            actor=owner,
            changes={
                **CLEARED,
                **kept,
                "bsdiff4_bytes": output.bsdiff4_bytes,
                "report": {**output.report, "full_bytes": output.full_bytes},
                "error_code": "",
                "error_message": "",
                "error_hint": "",
                "finished_at": (clock or SystemClock()).now(),
            },
        )
        audit(actor=owner, action="delta.finish", obj=delta, size_bytes=size, kept=is_worth_it)
    return delta


def _keep(delta: Delta, path: Path) -> dict[str, object]:
    """Keep a delta, sealed if the bundle that it leads to is; return what the row says of it."""
    size, sha256 = path.stat().st_size, sha256_hex(path.read_bytes())
    key = content_key_of(delta.new.version) if delta.new.is_sealed else None
    if key is None:
        blob_keep(path=path, sha256=sha256)
        return {"sha256": sha256, "size_bytes": size}
    sealed = delta_seal(key, path, sha256)
    return {
        "sha256": sealed.sha256,
        "size_bytes": sealed.size_bytes,
        "plain_sha256": sha256,
        "plain_bytes": size,
    }


@transaction.atomic
def delta_fail(
    *, delta: Delta, owner: str, failure: CompileFailure, clock: Clock | None = None
) -> None:
    """End this run; what may succeed later is tried again, with the backoff of builds.

    Raises:
        LeaseLostError: The lease is somebody else's; nothing was written.
    """
    now = (clock or SystemClock()).now()
    lease_require(_held(delta), owner)
    again = failure.can_retry and delta.attempt < settings.SPARSEFLEET.build_attempts
    apply_transition(
        delta,
        table=DELTA_TRANSITIONS,
        event=DeltaEvent.TRY_AGAIN if again else DeltaEvent.FAIL,
        log=DeltaTransition,
        actor=owner,
        reason=f"{failure.failure_code}: {failure}",
        changes={
            **CLEARED,
            "rung_at": None,
            "not_before": now + backoff(delta.attempt) if again else None,
            "finished_at": None if again else now,
            "error_code": failure.failure_code[:64],
            "error_message": str(failure),
            "error_hint": failure.hint,
        },
    )


def delta_leases_expire(*, clock: Clock | None = None) -> int:
    """Free the deltas whose worker has been silent for too long; return how many."""
    now = (clock or SystemClock()).now()
    count = 0
    stale = Delta.objects.filter(state=DeltaState.BUILDING.value, lease_until__lt=now)
    for pk in stale.values_list("pk", flat=True):
        with transaction.atomic():
            delta = stale.select_for_update().filter(pk=pk).first()
            if delta is None:
                continue
            is_last = delta.attempt >= settings.SPARSEFLEET.build_attempts
            apply_transition(
                delta,
                table=DELTA_TRANSITIONS,
                event=DeltaEvent.FAIL if is_last else DeltaEvent.LEASE_EXPIRED,
                log=DeltaTransition,
                actor="system",
                reason=f"no sign of life from {delta.lease_owner}",
                changes={**CLEARED, "rung_at": None, **(WORKER_LOST if is_last else {})},
            )
            count += 1
    return count


def deltas_ring(*, clock: Clock | None = None) -> list[int]:
    """Tell the queue about waiting deltas; return the ids it seems deaf to (as for builds)."""
    now = (clock or SystemClock()).now()
    overdue = rows_ring(_leasable(now), Task.DELTA_BUILD, "delta_id", now)
    if overdue and Delta.objects.filter(state=DeltaState.BUILDING.value).exists():
        return []
    return overdue


def deltas_ring_next(*, clock: Clock | None = None) -> None:
    """Fill the queue, and tell it about the delta that is next: a worker has become free."""
    deltas_admit()
    now = (clock or SystemClock()).now()
    rows_ring(_leasable(now)[:1], Task.DELTA_BUILD, "delta_id", now, is_patient=False)


def _leasable(now: datetime) -> QuerySet[Delta]:
    due = Q(not_before=None) | Q(not_before__lte=now)
    return Delta.objects.filter(due, state=DeltaState.QUEUED.value).order_by("-is_urgent", "pk")


def _held(delta: Delta) -> QuerySet[Delta]:
    return Delta.objects.filter(pk=delta.pk, state=DeltaState.BUILDING.value)
