"""What devices say that they run, and that they were heard at all.

Facts are ordered by the time at which this server received them, never by a clock of the device.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from django.db import transaction
from django.db.models import F, Q

from builds.models import Bundle
from fleet.models import Device, Heartbeat

BATCH = 2_000


@dataclass(frozen=True, slots=True)
class Beat:
    """One poll: who, when (server time), and what it said it runs.

    `manifest_sha256` is empty when it runs nothing yet, and None when it did not say.
    """

    device_pk: int
    at: datetime
    manifest_sha256: str | None


@transaction.atomic
def heartbeats_store(*, beats: Iterable[Beat]) -> int:
    """Store the newest poll of each device, and what changed; return how many devices polled.

    Two queries per `BATCH` devices, and some per device that runs something else than before.
    """
    newest = {beat.device_pk: beat for beat in beats}
    pks = sorted(newest)
    for start in range(0, len(pks), BATCH):
        part = [newest[pk] for pk in pks[start : start + BATCH]]
        known = dict(
            Device.objects.filter(pk__in=[beat.device_pk for beat in part]).values_list(
                "pk", "running_manifest_sha256"
            )
        )
        part = [beat for beat in part if beat.device_pk in known]
        Heartbeat.objects.bulk_create(
            [
                Heartbeat(
                    device_id=beat.device_pk,
                    at=beat.at,
                    manifest_sha256=_said(beat, known[beat.device_pk]),
                )
                for beat in part
            ],
            update_conflicts=True,
            unique_fields=["device"],
            update_fields=["at", "manifest_sha256"],
        )
        for beat in part:
            manifest = _said(beat, known[beat.device_pk])
            if manifest != known[beat.device_pk]:
                device_runs(device_pk=beat.device_pk, manifest_sha256=manifest, at=beat.at)
    return len(pks)


def _said(beat: Beat, known: str) -> str:
    return known if beat.manifest_sha256 is None else beat.manifest_sha256


def device_runs(*, device_pk: int, manifest_sha256: str, at: datetime) -> bool:
    """Note what a device runs, unless something newer is known; return whether that changed.

    Args:
        device_pk: Row of the device.
        manifest_sha256: What it said; empty: nothing.
        at: When this server received it.
    """
    bundle = (
        Bundle.objects.only("pk").filter(manifest_sha256=manifest_sha256).first()
        if manifest_sha256
        else None
    )
    rows = Device.objects.filter(pk=device_pk).exclude(running_manifest_sha256=manifest_sha256)
    rows = rows.filter(Q(running_at=None) | Q(running_at__lt=at))
    changed = rows.update(
        previous_bundle=F("running_bundle"),
        running_bundle=bundle,
        running_manifest_sha256=manifest_sha256,
        running_at=at,
    )
    return changed == 1
