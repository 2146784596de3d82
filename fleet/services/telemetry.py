"""Telemetry batches: counted once, added up per device, per enrolment and per minute.

A batch counts for an enrolment when the device was told to tag it so (rollout, stage, arm) and when
it ran the bundle whose answers count there: in treatment the new one, in control the old one. What
a treatment device answered before its update went through counts for neither side. The latency of
the first answers after enrolment is kept out of the comparison in both arms (warm-up).
"""

import logging
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from django.db import IntegrityError, transaction

from builds.common.clock import Clock, SystemClock
from compiler.contract.degrade import Rung
from compiler.contract.telemetry import (
    MAX_REASONS,
    TelemetryBatch,
    saturating_sum,
    sketch_from_row,
)
from fleet.models import (
    DeviceStats,
    EnrolmentStats,
    TelemetryBatchKey,
    TelemetryRollup,
)
from fleet.models.counts import AnswerCounts
from fleet.services.running import bundle_of_device

logger = logging.getLogger(__name__)

COUNTS: Final = ("answers", "failures", "scored", "correct", "degraded")


@transaction.atomic
def telemetry_ingest(*, device_pk: int, batch: TelemetryBatch, clock: Clock | None = None) -> bool:
    """Count one batch; the same one again changes nothing. Eight queries when rows exist.

    Answers of a bundle that the device was never meant to run are dropped: they measure nothing.

    Returns:
        Whether it was new, and counted.
    """
    now = (clock or SystemClock()).now()
    if bundle_of_device(device_pk=device_pk, manifest_sha256=batch.manifest_sha256) is None:
        logger.info("device %d: telemetry of %s dropped", device_pk, batch.manifest_sha256[:12])
        return False
    if not _is_new(device_pk, batch, now):
        return False
    if batch.answers == 0:
        return True
    minute = now.replace(second=0, microsecond=0)
    stats = _device_stats(device_pk, batch)
    is_first = stats.updated_at is None or stats.updated_at < minute
    stats.updated_at = now
    stats.gauges = dict(batch.gauges) or stats.gauges
    stats.rung = min(batch.gauges.get("rung", stats.rung), max(Rung))
    stats.degraded_by = _merged(stats.degraded_by, batch.degraded_by)
    drain = sketch_from_row(stats.drain)
    drain.merge(batch.drain)
    stats.drain = drain.to_json()
    _add(stats, batch)
    counted = _enrolment_stats(device_pk, batch)
    if counted is not None:
        _add_to_enrolment(counted, batch, now)
    place = _minute_row(stats.device.target.name, batch, counted, minute)
    place.batches += 1
    place.devices += is_first
    _add(place, batch)
    return True


def batches_forget(*, before: datetime) -> int:
    """Forget the keys of batches older than any device keeps its own; return how many."""
    return TelemetryBatchKey.objects.filter(at__lt=before).delete()[0]


def _is_new(device_pk: int, batch: TelemetryBatch, now: datetime) -> bool:
    try:
        with transaction.atomic():
            TelemetryBatchKey.objects.create(
                device_id=device_pk, boot_id=batch.boot_id, seq=batch.seq, at=now
            )
    except IntegrityError:
        return False
    return True


def _merged(stored: Mapping[str, int], told: Mapping[str, int]) -> dict[str, int]:
    """Return sums by reason, the first `MAX_REASONS` of them; a device makes up no more."""
    found = dict(stored)
    for name, count in told.items():
        if name in found or len(found) < MAX_REASONS:
            found[name] = saturating_sum(found.get(name, 0), count)
    return found


def _device_stats(device_pk: int, batch: TelemetryBatch) -> DeviceStats:
    key: dict[str, Any] = {"device_id": device_pk, "manifest_sha256": batch.manifest_sha256}
    rows = DeviceStats.objects.select_for_update(of=("self",)).select_related("device__target")
    found = rows.filter(**key).first()
    if found is None:
        DeviceStats.objects.get_or_create(**key)
        found = rows.get(**key)
    return found


def _enrolment_stats(device_pk: int, batch: TelemetryBatch) -> EnrolmentStats | None:
    if batch.rollout_id is None or batch.stage is None or not batch.arm:
        return None
    rows = EnrolmentStats.objects.select_for_update(of=("self",)).select_related(
        "enrolment__rollout"
    )
    return rows.filter(
        enrolment__device_id=device_pk,
        enrolment__rollout_id=batch.rollout_id,
        enrolment__stage__index=batch.stage,
        enrolment__arm=batch.arm,
        enrolment__bundle_sha256=batch.manifest_sha256,
    ).first()


def _add_to_enrolment(row: EnrolmentStats, batch: TelemetryBatch, now: datetime) -> None:
    is_warm = row.answers >= int(row.enrolment.rollout.gate["warmup_answers"])
    if is_warm and row.enrolment.slow_ms is not None:
        row.timed = saturating_sum(row.timed, batch.latency_ms.count)
        slow = batch.latency_ms.count_above(row.enrolment.slow_ms)
        row.slow = saturating_sum(row.slow, slow)
    if is_warm and row.enrolment.thirsty_above is not None:
        row.drained = saturating_sum(row.drained, batch.drain.count)
        thirsty = batch.drain.count_above(row.enrolment.thirsty_above)
        row.thirsty = saturating_sum(row.thirsty, thirsty)
    row.updated_at = now
    _add(row, batch)


def _minute_row(
    target: str, batch: TelemetryBatch, counted: EnrolmentStats | None, minute: datetime
) -> TelemetryRollup:
    enrolment = counted.enrolment if counted is not None else None
    key: dict[str, Any] = {
        "rollout_id": enrolment.rollout_id if enrolment else None,
        "stage_index": batch.stage if enrolment else -1,
        "arm": enrolment.arm if enrolment else "",
        "manifest_sha256": batch.manifest_sha256,
        "target": target,
        "minute": minute,
    }
    rows = TelemetryRollup.objects.select_for_update()
    found = rows.filter(**key).first()
    if found is None:
        TelemetryRollup.objects.get_or_create(**key)
        found = rows.get(**key)
    return found


def _add(row: AnswerCounts, batch: TelemetryBatch) -> None:
    for name in COUNTS:
        setattr(row, name, saturating_sum(getattr(row, name), getattr(batch, name)))
    total = sketch_from_row(row.latency)
    total.merge(batch.latency_ms)
    row.latency = total.to_json()
    row.save()
