"""The fleet's version number: counted up in every transaction that may change a poll's answer."""

from django.db.models import F

from fleet.models import FleetVersion

ROW_ID = 1


def fleet_version_bump() -> None:
    """Tell every process that its snapshot is old, as soon as this transaction has committed.

    Call it late: the row stays locked until the transaction ends.
    """
    if not FleetVersion.objects.filter(pk=ROW_ID).update(number=F("number") + 1):
        FleetVersion.objects.get_or_create(pk=ROW_ID)
        FleetVersion.objects.filter(pk=ROW_ID).update(number=F("number") + 1)
