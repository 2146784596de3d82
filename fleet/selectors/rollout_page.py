"""What the page of one rollout asks.

Every function states its query count, which does not grow with the number of devices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from statistics import median

from django.db.models import Count, Q, Sum

from builds.common.errors import NotFoundError
from compiler.contract.telemetry import Sketch, sketch_from_row
from fleet.gates.spec import Metric
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
from fleet.selectors.pages import BAD_ENDS, Measured, measured_of, sum_of
from fleet.states import OPEN_STATES, Arm, StageState, UpdateState

MAX_DEVICES = 50
WHOLE = 100.0
MAX_LOG = 80
MAX_POINTS = 240
MAX_SKETCHES = 400
IDLE_ACTIONS = ("", "wait")
_OPEN = [state.value for state in OPEN_STATES]
_CURRENT = (StageState.RUNNING.value, StageState.SOAKING.value, StageState.HELD.value)


@dataclass(frozen=True, slots=True)
class StageCard:
    """One stage: its own new devices, and how far they are.

    `returned` counts those that a rollback sent back to their previous bundle, `returning` those
    still on the way; `keeps_control`: a control slice stays out until the last stage.
    """

    stage: Stage
    planned: int
    enrolled: int
    control: int
    succeeded: int
    failed: int
    open_count: int
    returned: int = 0
    returning: int = 0
    keeps_control: bool = False

    @property
    def taken_back(self) -> int:
        """Return how many devices got the version and were told to give it up again."""
        return self.returned + self.returning

    @property
    def kept(self) -> int:
        """Return how many devices of the stage run the version still."""
        return 0 if self.taken_back else self.succeeded

    @property
    def bad(self) -> int:
        """Return how many devices failed to update or had to go back."""
        return self.failed + self.taken_back

    @property
    def is_current(self) -> bool:
        """Return whether the rollout is in this stage."""
        return self.stage.state in _CURRENT

    @property
    def size_text(self) -> str:
        """Return how the stage was defined."""
        if self.stage.is_release:
            return "the control slice, after the verdict"
        if self.stage.percent is None:
            return f"{self.stage.count} devices"
        is_all = self.stage.percent >= WHOLE and self.keeps_control
        return f"{self.stage.percent:g} %{' except control' if is_all else ''}"


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


def rollout_find(*, rollout_id: int) -> Rollout:
    """Return one rollout with model, versions and group joined. One query.

    Raises:
        NotFoundError: No such rollout.
    """
    rows = Rollout.objects.select_related("model", "version", "base_version", "group")
    rollout = rows.filter(pk=rollout_id).first()
    if rollout is None:
        raise NotFoundError(f"there is no rollout {rollout_id}")
    return rollout


def rollout_page(*, rollout_id: int) -> RolloutDetail:
    """Return one rollout with all that its page shows. At most 19 queries.

    Raises:
        NotFoundError: No such rollout.
    """
    rollout = rollout_find(rollout_id=rollout_id)
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
        last_look=GateLook.objects.select_related("stage")
        .defer("stage__ledger")
        .filter(pk__in=look_ids[-1:])
        .first(),
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


def _stage_cards(rollout: Rollout) -> tuple[StageCard, ...]:
    enrolled: dict[tuple[int, str], int] = {}
    members = Enrolment.objects.filter(rollout=rollout).order_by()
    for stage_id, arm, count in members.values_list("stage_id", "arm").annotate(Count("pk")):
        enrolled[stage_id, arm] = count
    states: dict[tuple[int, str], dict[str, int]] = {}
    updates = Update.objects.filter(rollout=rollout).order_by()
    by_state = updates.values_list("stage_id", "kind", "state").annotate(Count("pk"))
    for stage_id, kind, state, count in by_state:
        states.setdefault((stage_id, kind), {})[state] = count
    cards = []
    before = 0
    stages = list(Stage.objects.filter(rollout=rollout).defer("ledger").order_by("index"))
    keeps_control = any(stage.is_release for stage in stages)
    for stage in stages:
        up_to = stage.treatment_target if stage.treatment_target is not None else before
        counts = states.get((stage.pk, "install"), {})
        back = states.get((stage.pk, "rollback"), {})
        treated = enrolled.get((stage.pk, Arm.TREATMENT.value), 0)
        cards.append(
            StageCard(
                stage=stage,
                planned=max(up_to - before, treated),
                enrolled=treated,
                control=enrolled.get((stage.pk, Arm.CONTROL.value), 0),
                succeeded=counts.get(UpdateState.SUCCEEDED.value, 0),
                failed=sum(counts.get(state, 0) for state in BAD_ENDS),
                open_count=sum(counts.get(state, 0) for state in _OPEN),
                returned=back.get(UpdateState.SUCCEEDED.value, 0),
                returning=sum(back.get(state, 0) for state in _OPEN),
                keeps_control=keeps_control,
            )
        )
        before = max(before, up_to)
    return tuple(cards)


def _totals(rollout: Rollout) -> RolloutTotals:
    arms = Enrolment.objects.filter(rollout=rollout).aggregate(
        treatment=Count("device", distinct=True, filter=Q(arm=Arm.TREATMENT.value)),
        control=Count("device", distinct=True, filter=Q(arm=Arm.CONTROL.value)),
        silent=Count(
            "device", distinct=True, filter=Q(arm=Arm.TREATMENT.value, silent_at__isnull=False)
        ),
    )
    install, back = Q(kind="install"), Q(kind="rollback")
    updates = Update.objects.filter(rollout=rollout).aggregate(
        exposed=Count("device", distinct=True, filter=install & Q(activated_at__isnull=False)),
        succeeded=Count("pk", filter=install & Q(state=UpdateState.SUCCEEDED.value)),
        failed=Count("pk", filter=install & Q(state__in=BAD_ENDS)),
        open_count=Count("pk", filter=install & Q(state__in=_OPEN)),
        returned=Count("pk", filter=back & Q(state=UpdateState.SUCCEEDED.value)),
        returning=Count("pk", filter=back & Q(state__in=_OPEN)),
    )
    return RolloutTotals(**arms, **updates)


def _arms(rollout: Rollout) -> tuple[Mapping[str, ArmSums], float | None]:
    """Return the sums of each arm, and the median of the slow thresholds. Three queries."""
    names = ("answers", "failures", "scored", "correct", "timed", "slow")
    stats = EnrolmentStats.objects.filter(enrolment__rollout=rollout)
    rows = stats.order_by().values("enrolment__arm").annotate(*(Sum(name) for name in names))
    sums: dict[str, Mapping[str, object]] = {row["enrolment__arm"]: row for row in rows}
    sketches = {arm.value: Sketch() for arm in Arm}
    limits: list[float] = []
    newest = stats.order_by("-pk").values_list("enrolment__arm", "enrolment__slow_ms", "latency")
    for arm, slow_ms, latency in newest[: 2 * MAX_SKETCHES]:
        sketches[arm].merge(sketch_from_row(latency))
        if slow_ms is not None:
            limits.append(slow_ms)
    arms = {
        arm.value: ArmSums(
            measured=measured_of(sums.get(arm.value, {})),
            timed=sum_of(sums.get(arm.value, {}), "timed"),
            slow=sum_of(sums.get(arm.value, {}), "slow"),
            latency=sketches[arm.value],
        )
        for arm in Arm
    }
    return arms, median(limits) if limits else None


def _points(look_ids: Sequence[int]) -> tuple[LookPoint, ...]:
    """Return the numbers of evenly spread looks; the database reads them out of the verdicts."""
    keys = [f"verdict__metrics__{metric.value}__log_harm" for metric in Metric]
    looks = GateLook.objects.filter(pk__in=thinned(look_ids, MAX_POINTS)).order_by("pk")
    rows = looks.values_list(
        "at", "stage__index", "decision", "log_evidence", "verdict__log_install", *keys
    )
    return tuple(
        LookPoint(
            at=at,
            stage=stage,
            decision=decision,
            log_evidence=log_evidence,
            log_install=log_install,
            log_harm={
                metric.value: value
                for metric, value in zip(Metric, harms, strict=True)
                if value is not None
            },
        )
        for at, stage, decision, log_evidence, log_install, *harms in rows
    )


def _devices(rollout: Rollout) -> tuple[tuple[RolloutDevice, ...], int]:
    """Return devices in their newest stage, those with a bad end first, and how many there are."""
    members = Enrolment.objects.filter(rollout=rollout)
    bad = Update.objects.filter(rollout=rollout, state__in=BAD_ENDS).order_by("-pk")
    hurt = list(dict.fromkeys(bad.values_list("device_id", flat=True)[:MAX_DEVICES]))
    others = members.exclude(device_id__in=hurt).order_by("-pk")
    chosen = hurt + list(
        dict.fromkeys(others.values_list("device_id", flat=True)[: 4 * MAX_DEVICES])
    )
    chosen = chosen[:MAX_DEVICES]
    newest: dict[int, Enrolment] = {}
    joined = (
        members.filter(device_id__in=chosen)
        .select_related(
            "stage",
            "stats",
            "device__target",
            "device__heartbeat",
            "device__running_bundle__version",
        )
        .defer(
            "stage__ledger", "baseline", "device__public_key", "device__running_bundle__manifest"
        )
    )
    for enrolment in joined.order_by("stage__index", "pk"):
        newest[enrolment.device_id] = enrolment
    updates: dict[int, Update] = {}
    for update in Update.objects.filter(rollout=rollout, device_id__in=chosen).order_by("pk"):
        updates[update.device_id] = update
    rows = tuple(_device_row(newest[pk], updates.get(pk)) for pk in chosen if pk in newest)
    count = members.order_by().aggregate(count=Count("device", distinct=True))["count"]
    return rows, count


def _device_row(enrolment: Enrolment, update: Update | None) -> RolloutDevice:
    stats: EnrolmentStats | None = getattr(enrolment, "stats", None)
    return RolloutDevice(
        enrolment=enrolment,
        device=enrolment.device,
        update=update,
        measured=Measured(stats.answers, stats.failures, stats.scored, stats.correct)
        if stats
        else Measured(),
        p95_ms=sketch_from_row(stats.latency).quantile(0.95) if stats else None,
        seen_at=seen_at(enrolment.device),
    )


def _log(rollout: Rollout) -> tuple[LogEntry, ...]:
    """Return transitions and acts of the gate, newest first; a reason is told once."""
    acted = (
        GateLook.objects.filter(rollout=rollout).exclude(action__in=IDLE_ACTIONS).order_by("-pk")
    )
    looks = acted.values_list("at", "decision", "action", "verdict__reasons")[:MAX_LOG]
    entries = [
        LogEntry(at, "gate", f"{_words(decision)}: {_words(action)}", "; ".join(reasons or ()))
        for at, decision, action, reasons in looks
    ]
    told = {entry.reason for entry in entries}
    steps = (
        StageTransition.objects.filter(subject__rollout=rollout)
        .select_related("subject")
        .defer("subject__ledger")
    )
    entries += [
        LogEntry(step.at, f"stage {step.subject.index + 1}", _words(step.new), step.reason)
        for step in steps.order_by("-pk")[:MAX_LOG]
    ]
    moves = RolloutTransition.objects.filter(subject=rollout).order_by("-pk")[:MAX_LOG]
    entries += [
        LogEntry(row.at, "rollout", f"{_words(row.new)} by {row.actor}", row.reason)
        for row in moves
    ]
    entries.sort(key=lambda entry: entry.at, reverse=True)
    return tuple(
        replace(entry, reason="") if entry.kind != "gate" and entry.reason in told else entry
        for entry in entries[:MAX_LOG]
    )


def _words(name: str) -> str:
    return name.replace("_", " ")
