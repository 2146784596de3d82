"""What the lists of rollouts ask.

Every function states its query count, which does not grow with the number of devices.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from django.db.models import Count, Max, Prefetch, Q, QuerySet

from fleet.models import Enrolment, GateLook, Rollout, Stage, Update
from fleet.selectors.pages import BAD_ENDS
from fleet.states import Arm, RolloutState, UpdateState

SENT_BACK: Final = (
    RolloutState.ROLLING_BACK.value,
    RolloutState.ROLLED_BACK.value,
    RolloutState.FAILED.value,
)


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """One rollout in a list."""

    rollout: Rollout
    stages: tuple[Stage, ...]
    enrolled: int
    succeeded: int
    failed: int
    last_decision: str


def rollout_rows(*, state: str = "", text: str = "") -> QuerySet[Rollout]:
    """Return rollouts, newest first, for keyset paging by primary key. Two queries with stages."""
    rows = Rollout.objects.select_related("model", "version", "base_version", "group").defer("gate")
    rows = rows.prefetch_related(
        Prefetch("stages", queryset=Stage.objects.defer("ledger").order_by("index"))
    )
    if state:
        rows = rows.filter(state=state)
    if text:
        rows = rows.filter(
            Q(name__icontains=text) | Q(model__name__icontains=text) | Q(version__version=text)
        )
    return rows.order_by("-pk")


def rollouts_active() -> QuerySet[Rollout]:
    """Return rollouts that are under way or about to be. Two queries with stages."""
    waiting = (
        RolloutState.COMPILING,
        RolloutState.AWAITING_APPROVAL,
        RolloutState.READY,
        RolloutState.RUNNING,
        RolloutState.PAUSED,
        RolloutState.ROLLING_BACK,
    )
    return rollout_rows().filter(state__in=[state.value for state in waiting])


def rollouts_of_version(version_id: int, *, limit: int) -> Sequence[Rollout]:
    """Return the newest rollouts of a version, newest first. Two queries with stages."""
    return list(rollout_rows().filter(version_id=version_id)[:limit])


def versions_sent_back() -> frozenset[int]:
    """Return the versions whose newest rollout was rolled back or failed. One query."""
    newest = Rollout.objects.order_by().values("version_id").annotate(newest=Max("pk"))
    ended = Rollout.objects.filter(pk__in=newest.values("newest"), state__in=SENT_BACK)
    return frozenset(ended.values_list("version_id", flat=True))


def rollout_lines(rollouts: Sequence[Rollout]) -> tuple[RolloutRow, ...]:
    """Return what a list shows of each rollout, stages prefetched. Three queries."""
    ids = [rollout.pk for rollout in rollouts]
    updates = Update.objects.filter(rollout_id__in=ids, kind="install").order_by()
    counts: dict[int, Counter[str]] = {pk: Counter() for pk in ids}
    for pk, state, count in updates.values_list("rollout_id", "state").annotate(Count("pk")):
        counts[pk][state] += count
    treated = Enrolment.objects.filter(rollout_id__in=ids, arm=Arm.TREATMENT.value).order_by()
    enrolled = dict(treated.values_list("rollout_id").annotate(Count("device", distinct=True)))
    newest = GateLook.objects.filter(
        pk__in=GateLook.objects.filter(rollout_id__in=ids)
        .order_by()
        .values("rollout_id")
        .annotate(newest=Max("pk"))
        .values("newest")
    )
    decisions = dict(newest.values_list("rollout_id", "decision"))
    return tuple(
        RolloutRow(
            rollout=rollout,
            stages=tuple(rollout.stages.all()),
            enrolled=enrolled.get(rollout.pk, 0),
            succeeded=counts[rollout.pk][UpdateState.SUCCEEDED.value],
            failed=sum(counts[rollout.pk][state] for state in BAD_ENDS),
            last_decision=decisions.get(rollout.pk, ""),
        )
        for rollout in rollouts
    )


def rollout_state_counts() -> Mapping[str, int]:
    """Return how many rollouts are in each state. One query."""
    counts = dict(Rollout.objects.order_by().values_list("state").annotate(Count("pk")))
    return {state.value: counts.get(state.value, 0) for state in RolloutState}
