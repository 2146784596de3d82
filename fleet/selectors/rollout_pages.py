"""What the pages about rollouts ask.

Every function states its query count, which does not grow with the number of devices.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from django.db.models import Count, Prefetch, Q, QuerySet, Sum

from builds.common.errors import NotFoundError
from compiler.contract.telemetry import Sketch, sketch_from_json
from fleet.models import (
    Device,
    Enrolment,
    EnrolmentStats,
    GateLook,
    Rollout,
    RolloutTransition,
    Stage,
    StageTransition,
    Update,
)
from fleet.selectors.device_pages import LogEntry, seen_at
from fleet.selectors.pages import BAD_ENDS, Measured, measured_of
from fleet.states import OPEN_STATES, Arm, RolloutState, StageState, UpdateState

MAX_DEVICES = 50
MAX_LOG = 80
MAX_POINTS = 240
MAX_SKETCHES = 400
_OPEN = [state.value for state in OPEN_STATES]
_CURRENT = (StageState.RUNNING.value, StageState.SOAKING.value, StageState.HELD.value)


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """One rollout in a list."""

    rollout: Rollout
    stages: tuple[Stage, ...]
    enrolled: int
    succeeded: int
    failed: int
    last_decision: str


@dataclass(frozen=True, slots=True)
class StageCard:
    """One stage: its own new devices, and how far they are."""

    stage: Stage
    planned: int
    enrolled: int
    control: int
    succeeded: int
    failed: int
    open_count: int

    @property
    def is_current(self) -> bool:
        """Return whether the rollout is in this stage."""
        return self.stage.state in _CURRENT

    @property
    def size_text(self) -> str:
        """Return how the stage was defined."""
        if self.stage.is_release:
            return "control slice"
        if self.stage.percent is not None:
            return f"{self.stage.percent:g} %"
        return f"{self.stage.count} devices"


@dataclass(frozen=True, slots=True)
class ArmSums:
    """What counts for one arm of the comparison."""

    measured: Measured
    timed: int
    slow: int
    latency: Sketch

    @property
    def slow_ratio(self) -> float | None:
        """Return the share of timed answers that were slow, or None without any."""
        return self.slow / self.timed if self.timed else None


@dataclass(frozen=True, slots=True)
class RolloutTotals:
    """Devices of a rollout. `exposed`: those that ever switched to the new version."""

    treatment: int
    control: int
    exposed: int
    succeeded: int
    failed: int
    open_count: int
    silent: int
    returned: int
    returning: int


@dataclass(frozen=True, slots=True)
class RolloutDevice:
    """One device of a rollout, in its newest stage."""

    enrolment: Enrolment
    device: Device
    update: Update | None
    measured: Measured
    p95_ms: float | None
    seen_at: datetime | None


@dataclass(frozen=True, slots=True)
class LookPoint:
    """The numbers of one look; logarithms are natural."""

    at: datetime
    stage: int
    decision: str
    log_evidence: float
    log_install: float
    log_harm: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RolloutDetail:
    """All that the page of one rollout shows."""

    rollout: Rollout
    stages: tuple[StageCard, ...]
    totals: RolloutTotals
    arms: Mapping[str, ArmSums]
    slow_ms: float | None
    look_count: int
    points: tuple[LookPoint, ...]
    last_look: GateLook | None
    devices: tuple[RolloutDevice, ...]
    device_count: int
    log: tuple[LogEntry, ...]


def rollout_rows(*, state: str = "", text: str = "") -> QuerySet[Rollout]:
    """Return rollouts, newest first, for keyset paging by primary key. Two queries with stages."""
    rows = Rollout.objects.select_related("model", "version", "base_version", "group")
    rows = rows.prefetch_related(Prefetch("stages", queryset=Stage.objects.order_by("index")))
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


def rollout_page(*, rollout_id: int) -> RolloutDetail:
    """Return one rollout with all that its page shows. At most 18 queries.

    Raises:
        NotFoundError: No such rollout.
    """
    rollout = (
        Rollout.objects.select_related("model", "version", "base_version", "group")
        .filter(pk=rollout_id)
        .first()
    )
    if rollout is None:
        raise NotFoundError(f"there is no rollout {rollout_id}")
    look_ids = list(rollout.looks.order_by("pk").values_list("pk", flat=True))
    devices, device_count = _devices(rollout)
    arms, slow_ms = _arms(rollout)
    return RolloutDetail(
        rollout=rollout,
        stages=_stage_cards(rollout),
        totals=_totals(rollout),
        arms=arms,
        slow_ms=slow_ms,
        look_count=len(look_ids),
        points=_points(look_ids),
        last_look=GateLook.objects.select_related("stage").filter(pk__in=look_ids[-1:]).first(),
        devices=devices,
        device_count=device_count,
        log=_log(rollout),
    )


def thinned(keys: Sequence[int], limit: int) -> list[int]:
    """Return at most `limit` keys spread evenly over `keys`, first and last included. Pure."""
    if len(keys) <= limit:
        return list(keys)
    step = (len(keys) - 1) / (limit - 1)
    return [keys[round(index * step)] for index in range(limit)]
