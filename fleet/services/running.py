"""What devices say that they run, and that they were heard at all.

A claim counts only when it names a bundle that this platform built for the device: one of its model
for its target, or one that it was sent (its target may have changed since). Any other is ignored.
Facts are ordered by the time at which this server received them, never by a clock of the device.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from django.db import transaction
from django.db.models import Exists, F, OuterRef, Q

from builds.common.enqueue import Task, enqueue
from builds.models import Bundle
from compiler.contract.protocol import UpdateState
from fleet.clones import Sighting, Trail
from fleet.models import Device, Heartbeat, Update, UpdateTransition
from fleet.services.clones import clones_quarantine, trails_after

BATCH = 2_000


@dataclass(frozen=True, slots=True)
class Beat:
    """One poll: who, when (server time), what it said it runs, and its boot and number there.

    `manifest_sha256` is empty when it runs nothing yet, and None when it did not say; so is `boot`.
    """

    device_pk: int
    at: datetime
    manifest_sha256: str | None
    boot: tuple[str, int] | None = None


def heartbeats_store(*, beats: Iterable[Beat]) -> int:
    """Store the newest poll of each device, and what changed; return how many devices polled.

    Devices whose polls come from two machines are quarantined. Three queries per `BATCH` devices,
    and some per device that says it runs something new.
    """
    beats = list(beats)
    count, clones = _store(beats)
    clones_quarantine(device_pks=clones)
    return count


@transaction.atomic
def _store(beats: list[Beat]) -> tuple[int, list[int]]:
    """Store polls; return how many devices polled, and those that are two."""
    newest = {beat.device_pk: beat for beat in beats}
    pks = sorted(newest)
    trails: dict[int, Trail] = {}
    for start in range(0, len(pks), BATCH):
        part = [newest[pk] for pk in pks[start : start + BATCH]]
        known = dict(
            Device.objects.filter(pk__in=[beat.device_pk for beat in part]).values_list(
                "pk", "running_manifest_sha256"
            )
        )
        part = [beat for beat in part if beat.device_pk in known]
        said = {beat.device_pk: _said(beat, known[beat.device_pk]) for beat in part}
        trails |= trails_after(sightings=_sightings(beats, known))
        Heartbeat.objects.bulk_create(
            [
                Heartbeat(
                    device_id=beat.device_pk,
                    at=beat.at,
                    manifest_sha256=said[beat.device_pk],
                    trail=trails[beat.device_pk].to_json(),
                )
                for beat in part
            ],
            update_conflicts=True,
            unique_fields=["device"],
            update_fields=["at", "manifest_sha256", "trail"],
        )
        for beat in part:
            manifest = said[beat.device_pk]
            if manifest != known[beat.device_pk]:
                device_runs(device_pk=beat.device_pk, manifest_sha256=manifest, at=beat.at)
    return len(pks), [pk for pk, trail in trails.items() if trail.is_of_a_clone]


def _sightings(beats: list[Beat], known: Mapping[int, str]) -> dict[int, list[Sighting]]:
    """Return device -> its polls in order; without any for one that does not say its boot."""
    found: dict[int, list[Sighting]] = {pk: [] for pk in known}
    for beat in beats:
        if beat.boot is not None and beat.device_pk in found:
            found[beat.device_pk].append(Sighting(*beat.boot, beat.at.timestamp()))
    return found


def _said(beat: Beat, known: str) -> str:
    """Return what the device runs by its own word, or what is known when that is no news."""
    manifest = beat.manifest_sha256
    if manifest is None or manifest == known:
        return known
    if manifest and bundle_of_device(device_pk=beat.device_pk, manifest_sha256=manifest) is None:
        return known
    return manifest


def bundle_of_device(*, device_pk: int, manifest_sha256: str) -> Bundle | None:
    """Return the bundle of this manifest if the device may have it, else None. One query."""
    device = Device.objects.filter(pk=device_pk)
    fits = Q(version__model__in=device.values("model"), target__in=device.values("target"))
    sent = Exists(Update.objects.filter(device_id=device_pk, bundle=OuterRef("pk")))
    rows = Bundle.objects.only("pk", "manifest_sha256").filter(manifest_sha256=manifest_sha256)
    return rows.filter(fits | Q(sent)).first()


def device_runs(*, device_pk: int, manifest_sha256: str, at: datetime) -> bool:
    """Note what a device runs, unless something newer is known; return whether that changed.

    A manifest that is no bundle of this device changes nothing.

    Args:
        device_pk: Row of the device.
        manifest_sha256: What it said; empty: nothing.
        at: When this server received it.
    """
    bundle = None
    if manifest_sha256:
        bundle = bundle_of_device(device_pk=device_pk, manifest_sha256=manifest_sha256)
        if bundle is None:
            return False
    rows = Device.objects.filter(pk=device_pk).exclude(running_manifest_sha256=manifest_sha256)
    rows = rows.filter(Q(running_at=None) | Q(running_at__lt=at))
    changed = rows.update(
        previous_bundle=F("running_bundle"),
        running_bundle=bundle,
        running_manifest_sha256=manifest_sha256,
        running_at=at,
    )
    if changed:
        _note_regression(device_pk, bundle, at)
    return changed == 1


def _note_regression(device_pk: int, bundle: Bundle | None, at: datetime) -> None:
    """Note that a device left the bundle of its newest update after that had succeeded.

    The update stays succeeded: a regression is a fact of its own.
    """
    newest = Update.objects.filter(device_id=device_pk).order_by("-pk").first()
    if newest is None or newest.state != UpdateState.SUCCEEDED or newest.regressed_at is not None:
        return
    if bundle is None or bundle.pk != newest.bundle_id:
        Update.objects.filter(pk=newest.pk).update(regressed_at=at)
        UpdateTransition.objects.create(
            subject=newest,
            old=newest.state,
            event="regressed",
            new=newest.state,
            actor=f"device:{device_pk}",
            reason="it runs another bundle" if bundle else "it runs no bundle that is known here",
        )
        enqueue(Task.ROLLOUT_LOOK, rollout_id=newest.rollout_id)
