"""The queue of deltas: how many may wait, who waits outside, and who comes first.

    queued | building  at most `delta_queue_limit`; urgent ones are built first
    deferred           waits outside, says so, and is admitted when there is room

An urgent delta takes the place of the youngest one in the queue that is not urgent. Called by
`builds.services.deltas` when a delta is asked for and when a worker has become free, by the tick,
and by the fleet, which knows for which deltas devices wait (`deltas_rank`). Two requests at the
same time may go past the limit by one each; nothing else grows with them.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from django.conf import settings
from django.db import transaction
from django.db.models import QuerySet

from builds.common.enqueue import Task, enqueue
from builds.common.transitions import apply_transition
from builds.models import Delta, DeltaTransition
from builds.states import DELTA_TRANSITIONS, DeltaEvent, DeltaState

QUEUE_FULL: Final = "build.app.delta_queue_full"
_HINT: Final = (
    "it is built when there is room, devices fetch whole sections meanwhile: add workers, or raise "
    "SPARSEFLEET_DELTA_QUEUE_LIMIT"
)
_IN_QUEUE: Final = (DeltaState.QUEUED.value, DeltaState.BUILDING.value)
_WAITING: Final = (DeltaState.QUEUED.value, DeltaState.DEFERRED.value)


def delta_enter(delta: Delta) -> None:
    """Let a queued or deferred delta into the queue, or defer it; the caller has a transaction."""
    others = Delta.objects.filter(state__in=_IN_QUEUE).exclude(pk=delta.pk)
    if others.count() >= settings.SPARSEFLEET.delta_queue_limit:
        youngest = others.filter(state=DeltaState.QUEUED.value, is_urgent=False).order_by("-pk")
        victim = youngest.select_for_update().first() if delta.is_urgent else delta
        if victim is not None and victim.pk != delta.pk:
            _defer(victim)
        else:
            _defer(delta)
            return
    _admit(delta)
    enqueue(Task.DELTA_BUILD, delta_id=delta.pk)


@transaction.atomic
def deltas_admit() -> int:
    """Let deferred deltas into the queue as far as there is room; return how many. Two queries."""
    room = settings.SPARSEFLEET.delta_queue_limit
    room -= Delta.objects.filter(state__in=_IN_QUEUE).count()
    if room <= 0:
        return 0
    outside = _deferred().order_by("-is_urgent", "pk")
    admitted = list(outside.select_for_update(skip_locked=True)[:room])
    for delta in admitted:
        _admit(delta)
        enqueue(Task.DELTA_BUILD, delta_id=delta.pk)
    return len(admitted)


@transaction.atomic
def deltas_rank(urgent: Iterable[int]) -> None:
    """Make these deltas urgent and no other of those that wait. Three queries.

    Args:
        urgent: Ids of the deltas that devices of a rollout under way wait for.
    """
    wanted = set(urgent)
    waiting = Delta.objects.filter(state__in=_WAITING)
    rows = list(waiting.values_list("pk", "is_urgent"))
    for is_urgent in (True, False):
        moved = [pk for pk, was in rows if was != is_urgent and (pk in wanted) == is_urgent]
        if moved:
            waiting.filter(pk__in=moved).update(is_urgent=is_urgent)


def _deferred() -> QuerySet[Delta]:
    return Delta.objects.filter(state=DeltaState.DEFERRED.value)


def _defer(delta: Delta) -> None:
    if delta.state == DeltaState.DEFERRED.value:
        return
    limit = settings.SPARSEFLEET.delta_queue_limit
    message = f"{limit} deltas wait or are built, which is the limit: this one waits outside"
    _move(
        delta,
        DeltaEvent.DEFER,
        message,
        {"error_code": QUEUE_FULL, "error_message": message, "error_hint": _HINT, "rung_at": None},
    )


def _admit(delta: Delta) -> None:
    if delta.state == DeltaState.DEFERRED.value:
        cleared = {"error_code": "", "error_message": "", "error_hint": ""}
        _move(delta, DeltaEvent.ADMIT, "there is room in the queue", cleared)


def _move(delta: Delta, event: DeltaEvent, reason: str, changes: Mapping[str, object]) -> None:
    apply_transition(
        delta,
        table=DELTA_TRANSITIONS,
        event=event,
        log=DeltaTransition,
        actor="system",
        reason=reason,
        changes=changes,
    )
