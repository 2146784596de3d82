"""What the pages ask about the fleet as a whole: what runs, what was measured, what is wrong.

Every function states its query count, which does not grow with the number of devices.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal

from django.conf import settings
from django.db.models import Count, Q, QuerySet, Sum

from fleet.models import Device, DeviceStats, Rollout, Stage, TelemetryRollup, Update
from fleet.states import DeviceState, RolloutState, StageState, UpdateState

MISSED_POLLS = 3
BAD_ENDS = (
    UpdateState.FAILED.value,
    UpdateState.ROLLED_BACK.value,
    UpdateState.REJECTED.value,
    UpdateState.TIMED_OUT.value,
)
ENDED_STATES = (
    RolloutState.STOPPED.value,
    RolloutState.ROLLED_BACK.value,
    RolloutState.FAILED.value,
)


@dataclass(frozen=True, slots=True)
class Measured:
    """Answers that devices gave and reported; sums add up with `+`."""

    answers: int = 0
    failures: int = 0
    scored: int = 0
    correct: int = 0

    def __add__(self, other: "Measured") -> "Measured":
        return Measured(
            self.answers + other.answers,
            self.failures + other.failures,
            self.scored + other.scored,
            self.correct + other.correct,
        )

    @property
    def accuracy(self) -> float | None:
        """Return the share of scored answers that were right, or None without any."""
        return self.correct / self.scored if self.scored else None

    @property
    def failure_ratio(self) -> float | None:
        """Return the share of answers that did not end, or None without any."""
        return self.failures / self.answers if self.answers else None


@dataclass(frozen=True, slots=True)
class FleetCounts:
    """Devices and updates at one moment; `recent` means the last 24 hours."""

    accepted: int
    pending: int
    online: int
    recent_succeeded: int
    recent_bad: int


@dataclass(frozen=True, slots=True)
class RunningVersion:
    """How many accepted devices run one version; empty names: nothing that we built."""

    model: str
    version: str
    devices: int


def measured_by_manifest(manifests: Iterable[str]) -> Mapping[str, Measured]:
    """Return what devices measured with each bundle, over all time. One query."""
    sums = (
        DeviceStats.objects.filter(manifest_sha256__in=set(manifests))
        .order_by()
        .values("manifest_sha256")
        .annotate(*(Sum(name) for name in ("answers", "failures", "scored", "correct")))
    )
    return {row["manifest_sha256"]: measured_of(row) for row in sums}


def measured_since(moment: datetime) -> Measured:
    """Return what all devices measured since `moment`, to the minute. One query."""
    names = ("answers", "failures", "scored", "correct")
    rows = TelemetryRollup.objects.filter(minute__gte=moment)
    return measured_of(rows.aggregate(*(Sum(name) for name in names)))


def measured_of(row: Mapping[str, object]) -> Measured:
    """Read the sums `answers__sum` ... of an aggregate; no rows count as zero. Pure."""
    names = ("answers", "failures", "scored", "correct")
    return Measured(*(sum_of(row, name) for name in names))


def sum_of(row: Mapping[str, object], name: str) -> int:
    """Read one sum of an aggregate (PostgreSQL adds big integers up to a decimal). Pure."""
    value = row.get(f"{name}__sum")
    return int(value) if isinstance(value, (int, Decimal)) else 0


def devices_running(*, bundle_id: int) -> int:
    """Return how many devices say that they run a bundle. One query."""
    return Device.objects.filter(running_bundle_id=bundle_id).count()


def device_counts_by_target() -> Mapping[int, int]:
    """Return how many devices that are not retired each target has. One query."""
    devices = Device.objects.exclude(state=DeviceState.RETIRED.value).order_by()
    return dict(devices.values_list("target_id").annotate(Count("pk")))


def silence_limit(now: datetime) -> datetime:
    """Return the moment before which a device must not have been heard last, to count as online."""
    return now - timedelta(seconds=MISSED_POLLS * settings.SPARSEFLEET.poll_after_s)


def heard_since(moment: datetime) -> Q:
    """Return the filter "a poll or a report of the device came since `moment`"."""
    return Q(heartbeat__at__gte=moment) | Q(last_seen_at__gte=moment)


def fleet_counts(now: datetime) -> FleetCounts:
    """Count devices and the updates of the last 24 hours. Two queries."""
    accepted = Q(state=DeviceState.ACCEPTED.value)
    devices = Device.objects.aggregate(
        accepted=Count("pk", filter=accepted),
        pending=Count("pk", filter=Q(state=DeviceState.PENDING.value)),
        online=Count("pk", filter=accepted & heard_since(silence_limit(now))),
    )
    updates = Update.objects.filter(finished_at__gte=now - timedelta(days=1)).aggregate(
        succeeded=Count("pk", filter=Q(state=UpdateState.SUCCEEDED.value)),
        bad=Count("pk", filter=Q(state__in=BAD_ENDS)),
    )
    return FleetCounts(
        accepted=devices["accepted"],
        pending=devices["pending"],
        online=devices["online"],
        recent_succeeded=updates["succeeded"],
        recent_bad=updates["bad"],
    )


def running_versions(*, limit: int) -> tuple[RunningVersion, ...]:
    """Return the versions that most accepted devices run. One query."""
    rows = (
        Device.objects.filter(state=DeviceState.ACCEPTED.value)
        .order_by()
        .values_list("running_bundle__version__model__name", "running_bundle__version__version")
        .annotate(devices=Count("pk"))
        .order_by("-devices")
    )
    return tuple(
        RunningVersion(model or "", version or "", count) for model, version, count in rows[:limit]
    )


def silent_devices(now: datetime, *, limit: int) -> Sequence[Device]:
    """Return accepted devices that were heard once and are silent now. One query."""
    known = Device.objects.filter(state=DeviceState.ACCEPTED.value)
    quiet = known.exclude(heard_since(silence_limit(now)))
    return list(quiet.select_related("target", "heartbeat").order_by("-pk")[:limit])


def rollouts_waiting() -> QuerySet[Rollout]:
    """Return rollouts that wait for somebody's approval. One query."""
    waiting = Rollout.objects.filter(state=RolloutState.AWAITING_APPROVAL.value)
    return waiting.select_related("model", "version").order_by("-pk")


def rollouts_ended_badly(since: datetime) -> QuerySet[Rollout]:
    """Return rollouts that were stopped, rolled back or failed since `since`. One query."""
    ended = Q(state__in=ENDED_STATES, finished_at__gte=since)
    rolling_back = Q(state=RolloutState.ROLLING_BACK.value)
    return (
        Rollout.objects.filter(ended | rolling_back)
        .select_related("model", "version")
        .order_by("-pk")
    )


def stages_held() -> QuerySet[Stage]:
    """Return stages that the gate holds for a person. One query."""
    held = Stage.objects.filter(
        state=StageState.HELD.value,
        rollout__state__in=(RolloutState.RUNNING.value, RolloutState.PAUSED.value),
    )
    return (
        held.defer("ledger", "rollout__gate")
        .select_related("rollout__model", "rollout__version")
        .order_by("-pk")
    )
