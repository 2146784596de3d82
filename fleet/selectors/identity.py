"""What pages and the management API ask about identities; each states its query count."""

from django.db.models import QuerySet

from fleet.models import Device, IdentityAlert, Preauthorisation


def preauthorisation_list() -> QuerySet[Preauthorisation]:
    """Return pre-authorisations with their devices, newest first (1 query)."""
    return Preauthorisation.objects.select_related("device").order_by("-pk")


def alert_list(*, open_only: bool = False) -> QuerySet[IdentityAlert]:
    """Return alerts about identities with their devices, newest first (1 query)."""
    rows = IdentityAlert.objects.select_related("device").order_by("-pk")
    return rows.filter(settled_at=None) if open_only else rows


def quarantine_reason(device: Device) -> str:
    """Return why a device was quarantined last, or an empty string (1 query)."""
    row = device.transitions.filter(new="quarantined").order_by("-pk").first()
    return row.reason if row is not None else ""
