"""The published files of update metadata: immutable by name, one swapped row for `timestamp.json`.

Every function runs inside the publisher's transaction, under the lock of its repository row.
"""

from collections.abc import Mapping, Set
from datetime import datetime
from typing import Final, TypeVar

from django.db.models import Max
from tuf.api.metadata import Metadata, Root, Snapshot, Targets, Timestamp

from builds.errors import SigningKeysError
from builds.keys import INIT_HINT
from builds.metadata import margin_of
from builds.models import MetadataFile, Repository

TIMESTAMP: Final = "timestamp"
NAMES_PER_QUERY: Final = 500
SignedT = TypeVar("SignedT", Root, Snapshot, Targets, Timestamp)


def repository_locked(name: str) -> Repository:
    """Lock a repository for publishing.

    Raises:
        SigningKeysError: It was never set up.
    """
    found = Repository.objects.select_for_update().filter(name=name).first()
    if found is None:
        raise SigningKeysError(f"the {name} repository was never set up", hint=INIT_HINT)
    return found


def file_put(repository: Repository, role: str, document: Metadata[SignedT], data: bytes) -> None:
    """Publish one signed document; only the timestamp replaces what was there."""
    values = {
        "version": document.signed.version,
        "data": data,
        "expires_at": document.signed.expires,
    }
    if role == TIMESTAMP:
        MetadataFile.objects.update_or_create(
            repository=repository, name="timestamp.json", defaults={"role": role, **values}
        )
        return
    MetadataFile.objects.create(
        repository=repository, role=role, name=_name(role, document.signed.version), **values
    )


def files_put(
    repository: Repository, documents: Mapping[str, tuple[Metadata[Targets], bytes]]
) -> None:
    """Publish many signed documents at once, none of them a timestamp."""
    MetadataFile.objects.bulk_create(
        [
            MetadataFile(
                repository=repository,
                role=role,
                name=_name(role, document.signed.version),
                version=document.signed.version,
                data=data,
                expires_at=document.signed.expires,
            )
            for role, (document, data) in documents.items()
        ],
        batch_size=NAMES_PER_QUERY,
    )


def heads_of(repository: Repository, versions: Mapping[str, int]) -> dict[str, Metadata[Targets]]:
    """Return these versions of targets documents, by role (a query for each 500)."""
    names = [_name(role, version) for role, version in versions.items()]
    found = {}
    for at in range(0, len(names), NAMES_PER_QUERY):
        rows = MetadataFile.objects.filter(
            repository=repository, name__in=names[at : at + NAMES_PER_QUERY]
        )
        for role, data in rows.values_list("role", "data"):
            found[role] = Metadata[Targets].from_bytes(bytes(data))
    return found


def head(repository: Repository, role: str) -> MetadataFile:
    """Return the newest file of a role.

    Raises:
        SigningKeysError: There is none.
    """
    found = MetadataFile.objects.filter(repository__name=repository.name, role=role)
    row = found.order_by("-version").first()
    if row is None:
        raise SigningKeysError(f"{repository} has no metadata of role {role!r}", hint=INIT_HINT)
    return row


def head_versions(repository: Repository) -> dict[str, int]:
    """Return the newest version of every role of a repository (1 query)."""
    rows = MetadataFile.objects.filter(repository=repository).values("role")
    return dict(rows.annotate(newest=Max("version")).values_list("role", "newest"))


def due_roles(repository: Repository, now: datetime) -> list[str]:
    """Return the online roles whose newest file is near its end."""
    return [role for role, at in _renewal_times(repository) if at <= now]


def next_refresh(repository: Repository, roles: Set[str]) -> datetime | None:
    """Return when the first of these online roles will have to be signed again."""
    return min((at for role, at in _renewal_times(repository) if role in roles), default=None)


def roles_expire(repository: Repository, roles: Set[str], now: datetime) -> None:
    """Make roles due at once, because the keys that signed them count no longer."""
    versions = head_versions(repository)
    names = [_name(role, version) for role, version in versions.items() if role in roles]
    for at in range(0, len(names), NAMES_PER_QUERY):
        MetadataFile.objects.filter(
            repository=repository, name__in=names[at : at + NAMES_PER_QUERY]
        ).update(expires_at=now)


def files_forget(repository: Repository, before: datetime) -> int:
    """Remove superseded files made before `before`, never a root; return how many."""
    versions = head_versions(repository)
    count = 0
    for role, version in versions.items():
        if role != "root":
            old = MetadataFile.objects.filter(
                repository=repository, role=role, version__lt=version, created_at__lt=before
            )
            count += old.delete()[0]
    return count


def _renewal_times(repository: Repository) -> list[tuple[str, datetime]]:
    newest = head_versions(repository)
    rows = MetadataFile.objects.filter(repository=repository).values_list(
        "role", "version", "expires_at"
    )
    times = []
    for role, version, expires_at in rows:
        margin = margin_of(role)
        if margin is not None and newest[role] == version:
            times.append((role, expires_at - margin))
    return times


def _name(role: str, version: int) -> str:
    return f"{version}.{role}.json"
