"""What the management API asks; each states its query count."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from django.db.models import Count, Prefetch, Q, QuerySet, Sum

from builds.common.errors import NotFoundError
from compiler.contract.protocol import OfferKind
from compiler.contract.telemetry import Sketch, sketch_from_row
from fleet.models import (
    ClaimToken,
    Device,
    DeviceStats,
    EnrolmentStats,
    GateLook,
    Group,
    Rollout,
    Stage,
    TelemetryRollup,
    Update,
)

COUNTS: Final = (
    *("answers", "failures", "timed", "slow", "scored", "correct", "degraded"),
    *("drained", "thirsty"),
)
QUANTILES: Final = (0.5, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class RolloutCounts:
    """Devices and updates of one rollout.

    Attributes:
        devices_exposed: Devices that ever switched to the new bundle, whatever became of it.
        installs: State -> number of install updates.
        rollbacks: State -> number of rollback updates.
        downloaded_bytes: Payload bytes that devices fetched for the rollout.
    """

    devices_exposed: int
    installs: Mapping[str, int]
    rollbacks: Mapping[str, int]
    downloaded_bytes: int


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """What one arm of a rollout measured; quantiles of whole-answer latency in milliseconds."""

    counts: Mapping[str, int]
    latency_ms: Mapping[str, float | None]


def device_list(
    *, state: str = "", target: str = "", model: str = "", version: str = ""
) -> QuerySet[Device]:
    """Return devices with what they run, filtered by what is not empty (1 query)."""
    wanted = {
        "state": state,
        "target__name": target,
        "model__name": model,
        "running_bundle__version__version": version,
    }
    rows = Device.objects.select_related(
        "target", "model", "running_bundle__version", "heartbeat"
    ).defer("running_bundle__manifest", "public_key")
    return rows.filter(**{field: value for field, value in wanted.items() if value})


def device_get(device_pk: int) -> Device:
    """Return one device with its fingerprint (1 query).

    Raises:
        NotFoundError: There is none.
    """
    device = device_list().select_related("fingerprint").filter(pk=device_pk).first()
    if device is None:
        raise NotFoundError(f"no device {device_pk}")
    return device


def device_updates(device_pk: int, *, limit: int) -> list[Update]:
    """Return the newest updates of a device (1 query)."""
    rows = Update.objects.select_related("bundle__version").defer("bundle__manifest")
    return list(rows.filter(device_id=device_pk).order_by("-pk")[:limit])


def rollout_updates(rollout_id: int, *, kind: str = "", state: str = "") -> QuerySet[Update]:
    """Return the updates of a rollout, filtered by what is not empty (1 query)."""
    wanted = {"kind": kind, "state": state}
    rows = Update.objects.select_related("bundle__version").defer("bundle__manifest")
    return rows.filter(
        rollout_id=rollout_id, **{field: value for field, value in wanted.items() if value}
    )


def device_answers(device_pk: int) -> list[DeviceStats]:
    """Return what a device measured, per bundle, newest bundle first (1 query)."""
    return list(DeviceStats.objects.filter(device_id=device_pk).order_by("-pk"))


def group_list() -> QuerySet[Group]:
    """Return groups (1 query)."""
    return Group.objects.select_related("model")


def claim_list() -> QuerySet[ClaimToken]:
    """Return claim tokens with how many devices came with them (1 query)."""
    return ClaimToken.objects.annotate(device_count=Count("devices"))


def rollout_list(*, model: str = "", state: str = "") -> QuerySet[Rollout]:
    """Return rollouts with their stages, filtered by what is not empty (2 queries)."""
    wanted = {"model__name": model, "state": state}
    stages = Prefetch("stages", Stage.objects.defer("ledger").order_by("index"))
    rows = Rollout.objects.select_related("model", "version", "base_version", "group")
    return rows.prefetch_related(stages).filter(
        **{field: value for field, value in wanted.items() if value}
    )


def rollout_get(rollout_id: int) -> Rollout:
    """Return one rollout with its stages (2 queries).

    Raises:
        NotFoundError: There is none.
    """
    found = rollout_list().filter(pk=rollout_id).first()
    if found is None:
        raise NotFoundError(f"no rollout {rollout_id}")
    return found


def rollout_counts(rollout_id: int) -> RolloutCounts:
    """Return devices and updates of a rollout (2 queries)."""
    rows = Update.objects.filter(rollout_id=rollout_id).order_by()
    states: dict[str, dict[str, int]] = {kind.value: {} for kind in OfferKind}
    for kind, state, count in rows.values_list("kind", "state").annotate(Count("pk")):
        states[kind][state] = count
    install = Q(kind=OfferKind.INSTALL.value)
    totals = rows.aggregate(
        exposed=Count("device", filter=install & Q(activated_at__isnull=False), distinct=True),
        downloaded=Sum("downloaded_bytes"),
    )
    return RolloutCounts(
        devices_exposed=totals["exposed"],
        installs=states[OfferKind.INSTALL.value],
        rollbacks=states[OfferKind.ROLLBACK.value],
        downloaded_bytes=totals["downloaded"] or 0,
    )


def rollout_arms(rollout_id: int) -> Mapping[str, ArmSummary]:
    """Return arm -> what it measured over the whole rollout (2 queries)."""
    sums: dict[str, dict[str, int]] = {}
    stats = EnrolmentStats.objects.filter(enrolment__rollout_id=rollout_id).order_by()
    for arm, *values in stats.values_list("enrolment__arm").annotate(
        *(Sum(name) for name in COUNTS)
    ):
        sums[arm] = dict(zip(COUNTS, values, strict=True))
    sketches: dict[str, Sketch] = {}
    minutes = TelemetryRollup.objects.filter(rollout_id=rollout_id).order_by()
    for arm, latency in minutes.values_list("arm", "latency"):
        sketches.setdefault(arm, Sketch()).merge(sketch_from_row(latency))
    return {
        arm: ArmSummary(counts, _quantiles(sketches.get(arm, Sketch())))
        for arm, counts in sums.items()
    }


def look_list(rollout_id: int, *, decision: str = "") -> QuerySet[GateLook]:
    """Return the looks of a rollout's gate, filtered by what is not empty (1 query)."""
    rows = GateLook.objects.select_related("stage").filter(rollout_id=rollout_id)
    return rows.filter(decision=decision) if decision else rows


def last_look(rollout_id: int) -> GateLook | None:
    """Return the newest look of a rollout's gate (1 query)."""
    return look_list(rollout_id).order_by("-pk").first()


def _quantiles(sketch: Sketch) -> dict[str, float | None]:
    return {f"p{round(100 * q)}": sketch.quantile(q) for q in QUANTILES}


def answers_summary(row: DeviceStats) -> dict[str, Any]:
    """Return the numbers of one device with one bundle, without the sketch. Pure."""
    return {
        "manifest_sha256": row.manifest_sha256,
        "answers": row.answers,
        "failures": row.failures,
        "scored": row.scored,
        "correct": row.correct,
        "degraded": row.degraded,
        "latency_ms": _quantiles(sketch_from_row(row.latency)),
    }
