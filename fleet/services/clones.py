"""Cloned identities: read the trails of polls, and quarantine what must be two machines."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from builds.common.auth import SYSTEM
from builds.common.errors import ConflictError
from fleet.clones import RETURNS_OF_A_CLONE, Sighting, Trail, observed, trail_of
from fleet.models import Device, Heartbeat
from fleet.services.alerts import alert_raise
from fleet.services.enrolment import device_admit
from fleet.states import AlertKind, DeviceEvent, DeviceState

logger = logging.getLogger(__name__)

REASON: Final = (
    f"two machines use this identity: {RETURNS_OF_A_CLONE} times within a day a poll came from a "
    "start of the agent that another one had followed"
)


def trails_after(*, sightings: Mapping[int, Sequence[Sighting]]) -> dict[int, Trail]:
    """Return device -> its trail after more polls. One query; writes nothing."""
    rows = Heartbeat.objects.filter(device_id__in=sightings).values_list("device_id", "trail")
    known = {pk: trail_of(document) for pk, document in rows}
    return {pk: observed(known.get(pk, Trail()), seen) for pk, seen in sightings.items()}


def clones_quarantine(*, device_pks: Iterable[int]) -> None:
    """Quarantine devices that are two, each in a transaction of its own."""
    rows = Device.objects.filter(pk__in=list(device_pks), state=DeviceState.ACCEPTED.value)
    for device in rows if device_pks else ():
        try:
            device_admit(
                actor=SYSTEM, device_pk=device.pk, event=DeviceEvent.QUARANTINE, reason=REASON
            )
        except ConflictError:
            logger.info("%s left the fleet in the meantime", device)
            continue
        logger.warning("%s is quarantined: %s", device, REASON)
        alert_raise(
            kind=AlertKind.CLONE,
            serial=device.serial,
            key_thumbprint=device.key_thumbprint,
            text=f"Quarantined: {REASON}.",
        )
