"""Append-only audit chain: who did what to which object.

    genesis -> sha256(line 1) -> sha256(line 2) -> ...

Each digest covers the digest before it, so a line cannot be changed or removed without breaking
every later one. Writers append under the lock of one row, which they hold until their transaction
ends: call `audit` last in a service, after all other rows are locked, so that nobody deadlocks.
"""

from collections.abc import Iterable
from datetime import datetime

from django.db import models, transaction
from django.utils import timezone

from builds.common.access_models import AuditEvent, AuditHead
from compiler.contract.canonical import Json, canonical_bytes, sha256_hex

GENESIS = "0" * 64
HEAD_ID = 1


def audit(*, actor: str, action: str, obj: models.Model, **detail: Json) -> AuditEvent:
    """Append one line to the audit chain, inside the caller's transaction.

    Args:
        actor: User name, `token <name> (#<id>)`, `device:<id>` or `system`.
        action: Dotted verb, e.g. `version.submit`.
        obj: The row it is about; must have a primary key.
        detail: Further facts, JSON values without floats' NaN.
    """
    with transaction.atomic():
        AuditHead.objects.get_or_create(pk=HEAD_ID, defaults={"sha256": GENESIS})
        head = AuditHead.objects.select_for_update().get(pk=HEAD_ID)
        event = AuditEvent(
            at=timezone.now(),
            actor=actor,
            action=action,
            object_type=obj._meta.label_lower,
            object_id=str(obj.pk),
            detail=detail,
            previous_sha256=head.sha256,
        )
        event.sha256 = line_sha256(event)
        event.save()
        head.sha256 = event.sha256
        head.save(update_fields=["sha256"])
    return event


def line_sha256(event: AuditEvent) -> str:
    """Return the digest that the line must have, from its own columns."""
    return sha256_hex(
        canonical_bytes(
            [
                event.previous_sha256,
                _microseconds(event.at),
                event.actor,
                event.action,
                event.object_type,
                event.object_id,
                event.detail,
            ]
        )
    )


def first_broken_line(events: Iterable[AuditEvent]) -> AuditEvent | None:
    """Return the first line (in primary key order) that breaks the chain, or None."""
    previous = GENESIS
    for event in events:
        if event.previous_sha256 != previous or event.sha256 != line_sha256(event):
            return event
        previous = event.sha256
    return None


def _microseconds(at: datetime) -> str:
    return at.astimezone(timezone.get_default_timezone()).isoformat(timespec="microseconds")
