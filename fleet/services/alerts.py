"""Alerts about identities: raised by what devices and strangers do, settled by people.

Anybody can make one happen by knowing a serial number, so each costs at most one row per kind and
serial, one audit line when it opens, and one write a minute.
"""

from datetime import datetime, timedelta
from typing import Final

from django.db import IntegrityError, transaction
from django.db.models import F, QuerySet

from builds.common.audit import audit
from builds.common.auth import Actor, require
from builds.common.clock import Clock, SystemClock
from builds.common.errors import ConflictError, NotFoundError
from builds.common.roles import Permission
from fleet.models import Device, IdentityAlert
from fleet.states import AlertKind

QUIET: Final = timedelta(minutes=1)


def alert_raise(
    *, kind: AlertKind, serial: str, key_thumbprint: str, text: str, clock: Clock | None = None
) -> None:
    """Open an alert, or count one more in the open one.

    Args:
        kind: What it is about.
        serial: Serial number that was shown.
        key_thumbprint: SHA-256 of the key that was shown.
        text: What happened, a sentence.
        clock: The time of it; this machine's by default.
    """
    now = (clock or SystemClock()).now()
    fields = {"last_at": now, "key_thumbprint": key_thumbprint, "text": text}
    open_rows = IdentityAlert.objects.filter(kind=kind.value, serial=serial, settled_at=None)
    if open_rows.filter(last_at__gt=now - QUIET).exists():
        return
    try:
        with transaction.atomic():
            if open_rows.update(count=F("count") + 1, **fields):
                return
            alert = IdentityAlert.objects.create(
                kind=kind.value,
                serial=serial,
                device=Device.objects.filter(serial=serial).first(),
                first_at=now,
                **fields,
            )
            audit(
                actor="system",
                action=f"alert.{kind.value}",
                obj=alert,
                serial=serial,
                key_thumbprint=key_thumbprint,
                text=text,
            )
    except IntegrityError:
        return  # a twin of this one was faster


@transaction.atomic
def alert_settle(
    *, actor: Actor, alert_id: int, note: str = "", clock: Clock | None = None
) -> IdentityAlert:
    """Close an alert; if the same happens again, a new one opens.

    Raises:
        ForbiddenError: The actor may not.
        NotFoundError: No such alert.
        ConflictError: It is settled.
    """
    require(actor, Permission.DEVICE_ADMIT)
    alert = IdentityAlert.objects.filter(pk=alert_id).first()
    if alert is None:
        raise NotFoundError(f"no alert {alert_id}")
    now = (clock or SystemClock()).now()
    if not _close(IdentityAlert.objects.filter(pk=alert_id), actor, note, now):
        raise ConflictError(f"alert {alert_id} is settled")
    audit(actor=actor.name, action="alert.settle", obj=alert, kind=alert.kind, note=note)
    alert.refresh_from_db()
    return alert


def alerts_close(*, actor: Actor, device: Device, kind: AlertKind, note: str) -> None:
    """Close the open alerts of a device that a decision about it has answered."""
    rows = IdentityAlert.objects.filter(device=device, kind=kind.value)
    _close(rows, actor, note, SystemClock().now())


def _close(rows: QuerySet[IdentityAlert], actor: Actor, note: str, now: datetime) -> int:
    return rows.filter(settled_at=None).update(settled_at=now, settled_by=actor.name, note=note)
