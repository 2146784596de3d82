"""Telemetry batches: counted once, added up per device, per enrolment and per minute.

A batch counts for an enrolment when the device was told to tag it so (rollout, stage, arm) and when
it ran the bundle whose answers count there: in treatment the new one, in control the old one. What
a treatment device answered before its update went through counts for neither side. The latency of
the first answers after enrolment is kept out of the comparison in both arms (warm-up).
"""

from datetime import datetime
from typing import Any, Final

from django.db import IntegrityError, transaction

from builds.common.clock import Clock, SystemClock
from compiler.contract.telemetry import Sketch, TelemetryBatch, sketch_from_json
from fleet.models import (
    Device,
    DeviceStats,
    Enrolment,
    EnrolmentStats,
    TelemetryBatchKey,
    TelemetryRollup,
)
from fleet.models.counts import AnswerCounts

COUNTS: Final = ("answers", "failures", "scored", "correct", "degraded")


@transaction.atomic
def telemetry_ingest(*, device_pk: int, batch: TelemetryBatch, clock: Clock | None = None) -> bool:
    """Count one batch; the same one again changes nothing. At most eleven queries.

    Returns:
        Whether it was new.
    """
    now = (clock or SystemClock()).now()
    if not _is_new(device_pk, batch, now):
        return False
    if batch.answers == 0:
        return True
    _add_to_device(device_pk, batch)
    enrolment = _enrolment(device_pk, batch)
    if enrolment is not None:
        _add_to_enrolment(enrolment, batch, now)
    _add_to_minute(device_pk, batch, enrolment, now)
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


def _enrolment(device_pk: int, batch: TelemetryBatch) -> Enrolment | None:
    if batch.rollout_id is None or batch.stage is None or not batch.arm:
        return None
    rows = Enrolment.objects.select_related("rollout").filter(
        device_id=device_pk,
        rollout_id=batch.rollout_id,
        stage__index=batch.stage,
        arm=batch.arm,
        bundle_sha256=batch.manifest_sha256,
    )
    return rows.first()


def _add_to_device(device_pk: int, batch: TelemetryBatch) -> None:
    DeviceStats.objects.get_or_create(device_id=device_pk, manifest_sha256=batch.manifest_sha256)
    row = DeviceStats.objects.select_for_update().get(
        device_id=device_pk, manifest_sha256=batch.manifest_sha256
    )
    _add(row, batch)
    row.save()


def _add_to_enrolment(enrolment: Enrolment, batch: TelemetryBatch, now: datetime) -> None:
    row = EnrolmentStats.objects.select_for_update().get(pk=enrolment.pk)
    is_warm = row.answers >= int(enrolment.rollout.gate["warmup_answers"])
    _add(row, batch)
    if is_warm and enrolment.slow_ms is not None:
        row.timed += batch.latency_ms.count
        row.slow += batch.latency_ms.count_above(enrolment.slow_ms)
    row.updated_at = now
    row.save()


def _add_to_minute(
    device_pk: int, batch: TelemetryBatch, enrolment: Enrolment | None, now: datetime
) -> None:
    target = Device.objects.values_list("target__name", flat=True).get(pk=device_pk)
    minute = now.replace(second=0, microsecond=0)
    key: dict[str, Any] = {
        "rollout_id": enrolment.rollout_id if enrolment else None,
        "stage_index": batch.stage if enrolment else -1,
        "arm": enrolment.arm if enrolment else "",
        "manifest_sha256": batch.manifest_sha256,
        "target": target,
        "minute": minute,
    }
    TelemetryRollup.objects.get_or_create(**key)
    row = TelemetryRollup.objects.select_for_update().get(**key)
    _add(row, batch)
    row.batches += 1
    first = TelemetryBatchKey.objects.filter(device_id=device_pk, at__gte=minute).count() == 1
    row.devices += first
    row.save()


def _add(row: AnswerCounts, batch: TelemetryBatch) -> None:
    for name in COUNTS:
        setattr(row, name, getattr(row, name) + getattr(batch, name))
    total: Sketch = sketch_from_json(row.latency)
    total.merge(batch.latency_ms)
    row.latency = total.to_json()
