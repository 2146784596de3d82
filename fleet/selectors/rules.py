"""Which degrade rules are set, and which of them a device follows; each states its query count."""

from collections.abc import Mapping
from dataclasses import dataclass

from django.db.models import Max, QuerySet

from fleet.models import DegradeRules, Device


@dataclass(frozen=True, slots=True)
class RulesChoice:
    """What a device follows.

    Attributes:
        revision: Of all rules of the platform; 0 if none was ever set.
        document: The rules; None for those that the device has itself.
    """

    revision: int
    document: Mapping[str, object] | None


def rules_list() -> QuerySet[DegradeRules]:
    """Return every setting, newest first (1 query)."""
    return DegradeRules.objects.select_related("group").order_by("-pk")


def rules_present() -> QuerySet[DegradeRules]:
    """Return the newest setting of every scope, newest first (1 query)."""
    newest = DegradeRules.objects.order_by().values("group").annotate(pk_max=Max("pk"))
    return rules_list().filter(pk__in=newest.values("pk_max"))


def rules_of(device: Device) -> RulesChoice:
    """Return what a device follows: the newest of its groups', else the fleet's (1 query).

    Needs `target` joined.
    """
    rows = list(rules_present())
    revision = max((row.pk for row in rows), default=0)
    mine = [row for row in rows if row.document is not None]
    of_groups = [row for row in mine if row.group is not None and row.group.has(device)]
    of_fleet = [row for row in mine if row.group is None]
    chosen = next(iter([*of_groups, *of_fleet]), None)
    return RulesChoice(revision, None if chosen is None else chosen.document)
