"""What the pages about devices ask.

Every function states its query count, which does not grow with the number of devices.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from django.core.exceptions import ObjectDoesNotExist
from django.db.models import Count, F, Q, QuerySet

from builds.common.errors import NotFoundError
from builds.models import Bundle
from compiler.contract.degrade import Rung
from compiler.contract.telemetry import known_gauges, sketch_from_row
from fleet.models import (
    Device,
    DeviceStats,
    DeviceTransition,
    Enrolment,
    Update,
    UpdateTransition,
)
from fleet.selectors.pages import Measured, heard_since, silence_limit
from fleet.states import DeviceState

MAX_UPDATES = 30
MAX_HISTORY = 100


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One thing that happened, for a timeline."""

    at: datetime
    kind: str
    text: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DeviceAnswers:
    """What one device measured with one bundle; `bundle` is None when we did not build it.

    `huge_share` is the share of its weights on huge pages; without them decoding takes about twice
    as long. `threads` and `huge_share` are None when the device did not say, and so is `rung`, the
    name of the one it stands on. `degraded_by` counts degraded answers by reason, most first.
    `energy_mj` is of an answer, a model's estimate if `energy_is_model`; `drain` is percent of the
    battery per active hour.
    """

    bundle: Bundle | None
    manifest_sha256: str
    measured: Measured
    p95_ms: float | None
    threads: int | None
    huge_share: float | None
    rung: str | None
    rules_revision: int | None
    degraded: int
    degraded_by: tuple[tuple[str, int], ...]
    energy_mj: float | None
    energy_is_model: bool
    drain: float | None


@dataclass(frozen=True, slots=True)
class DeviceDetail:
    """One device with its updates, its timeline (newest first) and its measurements."""

    device: Device
    seen_at: datetime | None
    updates: tuple[Update, ...]
    history: tuple[LogEntry, ...]
    answers: tuple[DeviceAnswers, ...]


def seen_at(device: Device) -> datetime | None:
    """Return when a device was heard last, by poll or report. Needs `heartbeat` joined. Pure."""
    try:
        polled: datetime | None = device.heartbeat.at
    except ObjectDoesNotExist:
        polled = None
    moments = [moment for moment in (polled, device.last_seen_at) if moment is not None]
    return max(moments, default=None)


def device_rows(
    *, text: str = "", target: str = "", state: str = "", signal: str = "", now: datetime
) -> QuerySet[Device]:
    """Return devices, newest first, for keyset paging by primary key. One query.

    Args:
        text: Part of name or serial, start of the device id, or a version that it runs.
        target: Name of a target.
        state: State of membership.
        signal: `online` or `silent`, see `silence_limit`; `degraded`: does less than its bundle
            asks for, as it last said.
        now: The current time.
    """
    devices = (
        Device.objects.select_related("target", "model", "running_bundle__version", "heartbeat")
        .defer("running_bundle__manifest")
        .order_by("-pk")
    )
    if target:
        devices = devices.filter(target__name=target)
    if state:
        devices = devices.filter(state=state)
    heard = heard_since(silence_limit(now))
    if signal == "online":
        devices = devices.filter(heard)
    elif signal == "silent":
        devices = devices.filter(state=DeviceState.ACCEPTED.value).exclude(heard)
    elif signal == "degraded":
        devices = devices.filter(pk__in=_below_normal().values("device_id"))
    if text:
        devices = devices.filter(
            Q(name__icontains=text)
            | Q(serial__icontains=text)
            | Q(device_id__startswith=text)
            | Q(running_bundle__version__version=text)
        )
    return devices


def device_state_counts() -> Mapping[str, int]:
    """Return how many devices are in each state. One query."""
    counts = dict(Device.objects.order_by().values_list("state").annotate(Count("pk")))
    return {state.value: counts.get(state.value, 0) for state in DeviceState}


def below_normal_count() -> int:
    """Return how many devices do less than their bundle asks for, as they last said. One query."""
    return _below_normal().count()


def _below_normal() -> QuerySet[DeviceStats]:
    return DeviceStats.objects.filter(
        rung__gt=Rung.NORMAL.value,
        manifest_sha256=F("device__running_manifest_sha256"),
        device__state=DeviceState.ACCEPTED.value,
    )


def device_page(*, device_pk: int) -> DeviceDetail:
    """Return one device with updates, history and measurements. Seven queries.

    Raises:
        NotFoundError: No such device.
    """
    device = (
        Device.objects.select_related(
            "target",
            "model",
            "fingerprint",
            "running_bundle__version",
            "previous_bundle__version",
            "heartbeat",
        )
        .defer("running_bundle__manifest", "previous_bundle__manifest")
        .filter(pk=device_pk)
        .first()
    )
    if device is None:
        raise NotFoundError(f"there is no device {device_pk}")
    updates = (
        Update.objects.select_related("bundle__version", "base_bundle__version", "rollout")
        .defer("bundle__manifest", "base_bundle__manifest", "rollout__gate")
        .filter(device=device)
    )
    return DeviceDetail(
        device=device,
        seen_at=seen_at(device),
        updates=tuple(updates.order_by("-pk")[:MAX_UPDATES]),
        history=_history(device),
        answers=_answers(device),
    )


def _history(device: Device) -> tuple[LogEntry, ...]:
    entries = [LogEntry(device.enrolled_at, "device", "enrolled with its own key")]
    entries += [
        LogEntry(row.at, "device", f"{row.new} by {row.actor}", row.reason)
        for row in DeviceTransition.objects.filter(subject=device).order_by("-pk")[:MAX_HISTORY]
    ]
    steps = (
        UpdateTransition.objects.filter(subject__device=device)
        .select_related("subject__bundle__version")
        .defer("subject__bundle__manifest")
    )
    for step in steps.order_by("-pk")[:MAX_HISTORY]:
        text = f"{step.subject.bundle.version.version}: {step.new.replace('_', ' ')}"
        kind = "rollback" if step.subject.kind == "rollback" else "update"
        entries.append(LogEntry(step.at, kind, text, step.reason))
    joined = (
        Enrolment.objects.filter(device=device)
        .select_related("stage", "rollout__version")
        .defer("stage__ledger", "rollout__gate", "baseline")
    )
    for enrolment in joined.order_by("-pk")[:MAX_HISTORY]:
        text = (
            f"joined stage {enrolment.stage.index + 1} of rollout {enrolment.rollout_id} "
            f"as {enrolment.arm}"
        )
        entries.append(LogEntry(enrolment.at, "rollout", text))
    entries.sort(key=lambda entry: entry.at, reverse=True)
    return tuple(entries[:MAX_HISTORY])


def _answers(device: Device) -> tuple[DeviceAnswers, ...]:
    rows = list(DeviceStats.objects.filter(device=device).order_by("-pk")[:MAX_UPDATES])
    digests = [row.manifest_sha256 for row in rows]
    bundles = {
        bundle.manifest_sha256: bundle
        for bundle in Bundle.objects.select_related("version")
        .defer("manifest")
        .filter(manifest_sha256__in=digests)
    }
    return tuple(
        DeviceAnswers(
            bundle=bundles.get(row.manifest_sha256),
            manifest_sha256=row.manifest_sha256,
            measured=Measured(row.answers, row.failures, row.scored, row.correct),
            p95_ms=sketch_from_row(row.latency).quantile(0.95),
            threads=gauges.get("threads"),
            huge_share=_huge_share(gauges),
            rung=_rung_name(gauges.get("rung")),
            rules_revision=gauges.get("rules_revision"),
            degraded=row.degraded,
            degraded_by=tuple(sorted(row.degraded_by.items(), key=lambda item: (-item[1], item))),
            energy_mj=_thousandth(gauges.get("energy_uj_per_answer")),
            energy_is_model=gauges.get("energy_is_model") == 1,
            drain=_thousandth(gauges.get("battery_millipercent_per_active_hour")),
        )
        for row in rows
        for gauges in [known_gauges(row.gauges)]
    )


def _rung_name(value: int | None) -> str | None:
    known = {rung.value for rung in Rung}
    return None if value not in known else Rung(value).name.lower().replace("_", " ")


def _thousandth(value: int | None) -> float | None:
    return None if value is None else value / 1000


def _huge_share(gauges: Mapping[str, int]) -> float | None:
    huge, total = gauges.get("huge_weight_bytes"), gauges.get("weight_bytes")
    return None if huge is None or not total else huge / total
