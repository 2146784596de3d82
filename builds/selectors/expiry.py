"""When each role of the update metadata ends, and whether somebody should do something about it."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import Max

from builds.keys import OFFLINE
from builds.metadata import BIN_PREFIX, CEREMONY_MARGIN, margin_of
from builds.models import MetadataDraft, MetadataFile


@dataclass(frozen=True, slots=True)
class Expiry:
    """The newest published file of a role; of all bins the one that ends first.

    Attributes:
        left: Time until devices refuse it; negative after that.
        margin: Less left than this needs a person: a ceremony, or a look at why renewal fails.
    """

    repository: str
    role: str
    version: int
    expires_at: datetime
    left: timedelta
    margin: timedelta

    def __str__(self) -> str:
        days = self.left / timedelta(days=1)
        if days < 0:
            return f"{self.repository} {self.role} expired {-days:.1f} days ago"
        action = (
            "hold a signing ceremony"
            if (self.repository, self.role) in OFFLINE
            else "its renewal is late: see `manage.py keys_status`"
        )
        end = f"; {action}" if is_near(self) else ""
        return f"{self.repository} {self.role} expires in {days:.1f} days{end}"


def expiries(now: datetime) -> Sequence[Expiry]:
    """Return every role, the one that ends first on top (1 query)."""
    newest = MetadataFile.objects.values("repository", "role").annotate(last=Max("pk"))
    rows = MetadataFile.objects.filter(pk__in=newest.values("last"))
    first: dict[tuple[str, str], tuple[int, datetime]] = {}
    for repository, role, version, at in rows.values_list(
        "repository__name", "role", "version", "expires_at"
    ):
        key = (repository, "bins" if role.startswith(f"{BIN_PREFIX}-") else role)
        if key not in first or at < first[key][1]:
            first[key] = (version, at)
    found = [
        Expiry(repository, role, version, at, at - now, _margin(repository, role))
        for (repository, role), (version, at) in first.items()
    ]
    return sorted(found, key=lambda row: row.expires_at)


def is_near(row: Expiry) -> bool:
    """Return whether a role needs a person."""
    return row.left < row.margin


def drafts_waiting() -> Sequence[MetadataDraft]:
    """Return what is kept aside because more keys have to sign (1 query)."""
    return list(MetadataDraft.objects.defer("data").order_by("role"))


def _margin(repository: str, role: str) -> timedelta:
    if (repository, role) in OFFLINE:
        return CEREMONY_MARGIN
    # Renewed by a machine when twice this is left.
    margin = margin_of(f"{BIN_PREFIX}-0" if role == "bins" else role)
    return (margin or timedelta(0)) / 2
