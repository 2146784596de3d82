"""The key of a device is replaced; the device stays who it is.

    old key + new key -(sign)-> rotation request -> the row has the new key, in one UPDATE
    operator -(pre-authorises the new key)-> enrolment with it -> the same

`device_id` was derived from the first key and never changes; what is derived anew is the
thumbprint. A replaced key lets nobody in any more.
"""

from datetime import datetime

from django.db.models import F

from builds.common.audit import audit
from builds.common.clock import Clock, SystemClock
from compiler.contract.canonical import sha256_hex
from fleet.errors import DeviceStateError, KeyTakenError, RotationError
from fleet.models import Device, ReplacedKey
from fleet.services.versions import fleet_atomic, fleet_version_bump
from fleet.states import DeviceState


def key_replace(
    *, device: Device, public_key: bytes, actor: str, reason: str, now: datetime
) -> None:
    """Give a device another key, inside the caller's `fleet_atomic`; its tokens end.

    Raises:
        KeyTakenError: A device has or had the new key.
        RotationError: Somebody else replaced the key in the meantime.
    """
    old, new = device.key_thumbprint, sha256_hex(public_key)
    require_new_key(new)
    rows = Device.objects.filter(pk=device.pk, key_thumbprint=old)
    changed = rows.update(
        key_thumbprint=new,
        public_key=public_key,
        token_generation=F("token_generation") + 1,
    )
    if changed != 1:
        raise RotationError("the key was replaced in the meantime")
    ReplacedKey.objects.create(device=device, key_thumbprint=old, replaced_at=now, reason=reason)
    fleet_version_bump()
    device.refresh_from_db(fields=["key_thumbprint", "public_key", "token_generation"])
    audit(actor=actor, action="device.key", obj=device, old=old, new=new, reason=reason)


@fleet_atomic()
def device_key_rotate(
    *, device_pk: int, old_thumbprint: str, public_key: bytes, clock: Clock | None = None
) -> Device:
    """Replace the key of a member. The caller has checked that it holds both keys.

    Raises:
        DeviceStateError: It is no member; a quarantined one may not lock the other machine out.
        KeyTakenError: A device has or had the new key.
        RotationError: Another request replaced the key in the meantime.
    """
    device = Device.objects.select_for_update().get(pk=device_pk)
    if device.state != DeviceState.ACCEPTED:
        raise DeviceStateError(f"the device is {device.state}")
    if device.key_thumbprint != old_thumbprint:
        raise RotationError("the key was replaced in the meantime")
    key_replace(
        device=device,
        public_key=public_key,
        actor=f"device:{device.pk}",
        reason="rotated by the device",
        now=(clock or SystemClock()).now(),
    )
    return device


def require_new_key(thumbprint: str) -> None:
    """Check that no device has or had a key.

    Raises:
        KeyTakenError: One has or had.
    """
    is_known = Device.objects.filter(key_thumbprint=thumbprint).exists()
    if is_known or ReplacedKey.objects.filter(key_thumbprint=thumbprint).exists():
        raise KeyTakenError("a device has or had this key", hint="make a new one")
