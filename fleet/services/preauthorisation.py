"""Pre-authorisation: an operator says which key a serial number will come with.

    operator -(serial, thumbprint)-> row -(used once)-> a device that is a member at once

Whoever holds that key needs no claim token; a claim token does not let another key join under the
serial number. For a serial number that is enrolled it is the way to give its device a new key after
it lost its own.
"""

from datetime import datetime
from typing import Final

from django.db import IntegrityError, transaction

from builds.common.audit import audit
from builds.common.auth import Actor, require
from builds.common.errors import ConflictError, InvalidInputError, NotFoundError
from builds.common.roles import Permission
from compiler.contract.canonical import SHA256_PATTERN
from fleet.models import Device, Preauthorisation, ReplacedKey
from fleet.services.labels import require_class, require_label

TAKEN: Final = "a pre-authorisation for this serial number or key exists"


@transaction.atomic
def preauthorisation_create(
    *,
    actor: Actor,
    serial: str,
    key_thumbprint: str,
    device_class: str = "",
    replaces: bool = False,
) -> Preauthorisation:
    """Let the device with this serial number join with this key.

    Args:
        actor: Who says so.
        serial: Serial number of the device.
        key_thumbprint: SHA-256 of its raw public key, lower-case hexadecimal.
        device_class: Class that it gets whatever it says; empty: what it says.
        replaces: The serial number is enrolled, and its device shall have this key from now on.

    Raises:
        ForbiddenError: The actor may not.
        InvalidInputError: A value is malformed.
        ConflictError: The key or the serial number is taken, or there is nothing to replace.
    """
    require(actor, Permission.CLAIM_EDIT)
    require_label("serial", serial)
    if SHA256_PATTERN.fullmatch(key_thumbprint) is None:
        raise InvalidInputError(
            "key_thumbprint must be 64 lower-case hexadecimal digits",
            hint="`python -m device_agent thumbprint` prints it",
        )
    if device_class:
        require_class(device_class)
    _require_free(serial, key_thumbprint, replaces=replaces)
    row = Preauthorisation(
        serial=serial,
        key_thumbprint=key_thumbprint,
        device_class=device_class,
        replaces=replaces,
        created_by=actor.name,
    )
    _insert(row)
    audit(
        actor=actor.name,
        action="preauthorisation.create",
        obj=row,
        serial=serial,
        key_thumbprint=key_thumbprint,
        replaces=replaces,
    )
    return row


@transaction.atomic
def preauthorisation_revoke(*, actor: Actor, preauthorisation_id: int) -> None:
    """Take back a pre-authorisation that was not used.

    Raises:
        ForbiddenError: The actor may not.
        NotFoundError: There is none.
        ConflictError: It was used: retire the device instead.
    """
    require(actor, Permission.CLAIM_EDIT)
    row = Preauthorisation.objects.select_for_update().filter(pk=preauthorisation_id).first()
    if row is None:
        raise NotFoundError(f"no pre-authorisation {preauthorisation_id}")
    if row.used_at is not None:
        raise ConflictError("it was used", hint="retire the device instead")
    audit(actor=actor.name, action="preauthorisation.revoke", obj=row, serial=row.serial)
    row.delete()


def preauthorisation_of(*, serial: str) -> Preauthorisation | None:
    """Return the unused pre-authorisation of a serial number. One query."""
    return Preauthorisation.objects.filter(serial=serial, used_at=None).first()


def preauthorisation_use(*, row: Preauthorisation, device: Device, now: datetime) -> None:
    """Mark it used, inside the caller's transaction.

    Raises:
        ConflictError: It was used or revoked in the meantime.
    """
    rows = Preauthorisation.objects.filter(pk=row.pk, used_at=None)
    if rows.update(used_at=now, device=device) != 1:
        raise ConflictError("the pre-authorisation was used or revoked in the meantime")


def _insert(row: Preauthorisation) -> None:
    try:
        with transaction.atomic():
            row.save()
    except IntegrityError:
        raise ConflictError(TAKEN, hint="revoke that one first") from None


def _require_free(serial: str, key_thumbprint: str, *, replaces: bool) -> None:
    devices = Device.objects.filter(key_thumbprint=key_thumbprint)
    if devices.exists() or ReplacedKey.objects.filter(key_thumbprint=key_thumbprint).exists():
        raise ConflictError("a device has or had this key", hint="every device makes its own")
    is_enrolled = Device.objects.filter(serial=serial).exists()
    if is_enrolled and not replaces:
        raise ConflictError(
            f"serial number {serial!r} is enrolled",
            hint="set `replaces` to give its device this key instead of the one it has",
        )
    if replaces and not is_enrolled:
        raise ConflictError(f"no device has the serial number {serial!r}: there is no key yet")
