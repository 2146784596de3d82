"""What a ceremony starts from, and what becomes of the documents that its holders signed.

Publishing checks what a device checks, in the same order, and refuses what a device would refuse:
a root without the keys of the root before would strand every device in the field.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import cast

from django.db import transaction
from tuf.api.metadata import Metadata, Root, Targets

from builds.ceremony import (
    CEREMONIAL,
    DIRECTOR_ROOT,
    IMAGE_ROOT,
    IMAGE_TARGETS,
    Document,
    Documents,
    require_root_follows,
    require_targets_follow,
)
from builds.common.audit import audit
from builds.errors import CeremonyError
from builds.keys import IMAGE, KeyRing
from builds.metadata import is_signed_for, payload_of, succinct_roles, to_bytes
from builds.models import MetadataDraft, MetadataFile, Repository
from builds.services.metadata_files import file_put, head, head_versions, roles_expire
from builds.services.publishing import (
    HEADS,
    TARGETS,
    heads_publish,
    holds_heads,
    publisher_advance,
)
from compiler.contract.canonical import sha256_hex


def documents_current() -> Documents:
    """Return the newest published root and targets; empty before the first ceremony."""
    found: Documents = {}
    for repository, role in CEREMONIAL:
        rows = MetadataFile.objects.filter(repository__name=repository, role=role)
        newest = rows.order_by("-version").first()
        if newest is not None:
            found[repository, role] = Metadata.from_bytes(bytes(newest.data))
    return found


@transaction.atomic
def documents_publish(
    *,
    documents: Documents,
    ring: KeyRing,
    now: datetime,
    at_once: bool = False,
    actor: str = "system",
) -> list[str]:
    """Publish what a ceremony has signed, and sign again what hangs on it.

    Targets with other keys for bins are kept aside until every bin is signed by them, here or by
    machines with the other key, so that devices are served all the time.

    Args:
        documents: Signed by their holders; what is published already is passed over.
        ring: Online keys of this machine.
        now: Time of publishing.
        at_once: Publish such targets now: what the old keys signed is refused from this moment, and
            so is everything else until all bins are signed anew. For a stolen key.
        actor: Who does it, for the audit chain.

    Returns:
        What happened, a line each.

    Raises:
        CeremonyError: A device would refuse it.
        SigningKeysError: This machine lacks the online keys that the new root names.
    """
    published = documents_current()
    new = {
        role: document
        for role, document in documents.items()
        if not _is_same(document, published.get(role))
    }
    if not new:
        return ["everything is published already"]
    if any(document.signed.is_expired(now) for document in new.values()):
        raise CeremonyError("a document is past its time", hint="prepare anew")
    for repository in {role[0] for role in documents}:
        Repository.objects.get_or_create(name=repository)
    rows = {row.name: row for row in Repository.objects.select_for_update().order_by("name")}
    lines = [
        _root_publish(rows[role[0]], new[role], published.get(role))
        for role in (DIRECTOR_ROOT, IMAGE_ROOT)
        if role in new
    ]
    if IMAGE_ROOT in new or IMAGE_TARGETS in new:
        lines += _image_publish(rows[IMAGE], new, published, ring, now, at_once=at_once)
    _audit(rows, new, actor)
    return lines


def _audit(rows: Mapping[str, Repository], new: Documents, actor: str) -> None:
    for (repository, role), document in new.items():
        audit(
            actor=actor,
            action="signing.ceremony",
            obj=rows[repository],
            role=f"{repository} {role}",
            version=document.signed.version,
            sha256=sha256_hex(payload_of(document)),
        )


def _root_publish(repository: Repository, following: Document, current: Document | None) -> str:
    root = cast("Metadata[Root]", following)
    require_root_follows(cast("Metadata[Root] | None", current), root)
    file_put(repository, "root", root, to_bytes(root))
    return f"{repository.name} root {root.signed.version} is published"


def _image_publish(
    image: Repository,
    new: Documents,
    published: Documents,
    ring: KeyRing,
    now: datetime,
    *,
    at_once: bool,
) -> list[str]:
    root = cast("Metadata[Root]", new.get(IMAGE_ROOT) or published[IMAGE_ROOT]).signed
    if not holds_heads(root, ring):
        raise CeremonyError(
            "this machine lacks the snapshot and timestamp keys that the root names, so devices"
            " would be left with metadata that they refuse",
            hint="publish where keys.json lists them",
        )
    lines = []
    targets = cast("Metadata[Targets] | None", new.get(IMAGE_TARGETS))
    current = cast("Metadata[Targets] | None", published.get(IMAGE_TARGETS))
    if targets is not None:
        require_targets_follow(root, current, targets)
        lines.append(_targets_put(image, root, targets, current, now, at_once=at_once))
    elif current is None or not is_signed_for(root, TARGETS, current):
        raise CeremonyError(
            "the published targets are not signed by the keys that the root names",
            hint="a change of keys for targets needs new targets in the same ceremony",
        )
    signed = set(publisher_advance(image, ring, now))
    if not HEADS & signed:
        signed |= _heads_again(image, root, ring, now)
    lines.append(f"signed again: {len(signed)} files")
    waiting = MetadataDraft.objects.filter(repository=image).exclude(role=TARGETS).count()
    if waiting:
        lines.append(f"{waiting} bins wait for keys of other machines")
    return lines


def _targets_put(
    image: Repository,
    root: Root,
    targets: Metadata[Targets],
    current: Metadata[Targets] | None,
    now: datetime,
    *,
    at_once: bool,
) -> str:
    MetadataDraft.objects.filter(repository=image, role=TARGETS).delete()
    is_moving = current is not None and _delegation(targets) != _delegation(current)
    can_wait = current is not None and is_signed_for(root, TARGETS, current) and not at_once
    version = targets.signed.version
    if is_moving and can_wait:
        MetadataDraft.objects.create(
            repository=image, role=TARGETS, version=version, data=to_bytes(targets)
        )
        return f"image targets {version} are published as soon as every bin is signed for them"
    file_put(image, TARGETS, targets, to_bytes(targets))
    if is_moving:
        roles_expire(image, frozenset(succinct_roles(targets).get_roles()), now)
    return f"image targets {version} are published"


def _heads_again(image: Repository, root: Root, ring: KeyRing, now: datetime) -> frozenset[str]:
    """Sign snapshot and timestamp for a new root, once every bin exists; return what was signed."""
    newest = Metadata[Targets].from_bytes(bytes(head(image, TARGETS).data))
    bins = frozenset(succinct_roles(newest).get_roles())
    if not bins <= head_versions(image).keys():
        return frozenset()
    heads_publish(image, root, ring, now, bins=bins)
    return HEADS


def _delegation(targets: Metadata[Targets]) -> tuple[frozenset[str], int]:
    bins = succinct_roles(targets)
    return frozenset(bins.keyids), bins.bit_length


def _is_same(document: Document, published: Document | None) -> bool:
    return published is not None and payload_of(document) == payload_of(published)
