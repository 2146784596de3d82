"""The ways in to signing: releases, renewals, assignments, and the first metadata of all.

One publisher at a time (the lock of the repository row), one transaction (`publishing.py`).
"""

import json
import logging
from collections.abc import Iterable
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from django.conf import settings
from django.db import transaction
from tuf.api.metadata import Metadata, Root, TargetFile, Targets

from builds.ceremony import first_documents
from builds.common.auth import SYSTEM
from builds.common.clock import Clock, SystemClock
from builds.errors import BuildOutputError, SigningKeysError
from builds.keys import (
    DIRECTOR,
    IMAGE,
    INDEX_NAME,
    PUBLIC_NAME,
    KeyRing,
    generate_ring,
    load_key_folder,
    load_ring,
    read_public,
)
from builds.metadata import (
    add_signatures,
    expiry,
    is_signed_for,
    target_file,
    to_bytes,
)
from builds.models import Bundle, Delta, MetadataDraft, Repository
from builds.selectors.expiry import expiries, is_near
from builds.services.ceremony import documents_publish
from builds.services.metadata_files import due_roles, files_forget, head, repository_locked
from builds.services.publishing import HEADS, bundle_path, holds_heads, publisher_advance
from builds.states import DeltaState
from compiler.contract.canonical import sha256_hex
from compiler.contract.protocol import Assignment, DeltaOffer, NetworkPolicy, OfferKind
from compiler.contract.rules_order import RULES_PATH, RulesOrder

logger = logging.getLogger(__name__)

KEEP_SUPERSEDED: Final = timedelta(days=7)
RETRY: Final = timedelta(minutes=1)


def key_ring() -> KeyRing:
    """Return the signing keys of this process.

    Raises:
        SigningKeysError: There are none, or they are plain files where that is not allowed.
    """
    folder: Path = settings.SPARSEFLEET.key_path
    index = folder / INDEX_NAME
    stamp = index.stat().st_mtime_ns if index.exists() else 0
    ring = _ring(folder, stamp)
    if ring.file_roles() and not settings.SPARSEFLEET.allows_file_keys:
        raise SigningKeysError(
            f"plain files would sign for {', '.join(ring.file_roles())}",
            hint="put HSM or KMS addresses into keys.json; see docs/runbooks/signing.md",
        )
    return ring


@lru_cache(maxsize=4)
def _ring(folder: Path, _stamp: int) -> KeyRing:
    return load_ring(folder, settings.SPARSEFLEET.pin)


def keys_generate() -> KeyRing:
    """Make the signing keys of a new installation as files; see `builds.keys.generate_ring`.

    Raises:
        SigningKeysError: There are keys, or this is production: keys never make themselves there.
    """
    if not settings.SPARSEFLEET.allows_file_keys:
        raise SigningKeysError(
            "signing keys are not made by themselves in production",
            hint="hold the first ceremony: docs/runbooks/signing.md",
        )
    return generate_ring(settings.SPARSEFLEET.key_path, settings.SPARSEFLEET.offline_key_path)


@transaction.atomic
def repositories_init(*, clock: Clock | None = None) -> bool:
    """Publish version 1 of everything, signed; does nothing when that was done before.

    It is the first ceremony held by one process, which needs the folders of all offline keys.

    Returns:
        Whether the repositories are new.

    Raises:
        SigningKeysError: Keys are missing.
    """
    if Repository.objects.filter(name=IMAGE).exists():
        return False
    now = (clock or SystemClock()).now()
    ring = key_ring()
    folders = sorted(settings.SPARSEFLEET.offline_key_path.glob("*"))
    offline = [read_public(folder / PUBLIC_NAME) for folder in folders]
    documents = first_documents(
        [*offline, *ring.publics()], settings.SPARSEFLEET.metadata_bin_bits, now
    )
    for folder in folders:
        public, signer = load_key_folder(folder)
        add_signatures(documents[public.repository, public.role], [signer])
    documents_publish(documents=documents, ring=ring, now=now)
    return True


@transaction.atomic
def release_publish(*, bundles: Iterable[Bundle], clock: Clock | None = None) -> int:
    """Approve `bundles` without asking anybody, and name their manifests; repeats change nothing.

    What only other machines can sign is published when they have.

    Returns:
        How many metadata bins were published.

    Raises:
        SigningKeysError: Keys or metadata are missing.
        BuildOutputError: A path was published before with other content.
    """
    now = (clock or SystemClock()).now()
    image = repository_locked(IMAGE)
    rows = list(bundles)
    Bundle.objects.filter(pk__in=[row.pk for row in rows], approved_at=None).update(
        approved_at=now, approved_by=SYSTEM.name
    )
    return len(set(publisher_advance(image, key_ring(), now, bundles=rows)) - HEADS)


@transaction.atomic
def metadata_refresh(*, clock: Clock | None = None) -> list[str]:
    """Sign what is near its end or waits for keys of this machine; return the roles published.

    Cheap when there is nothing to do.

    Raises:
        SigningKeysError: Keys are missing, or a signer failed.
    """
    now = (clock or SystemClock()).now()
    is_due = Repository.objects.filter(name=IMAGE, refresh_at__lte=now).exists()
    if not is_due and not _drafts_wait_here():
        return []
    image = repository_locked(IMAGE)
    ring = key_ring()
    published = publisher_advance(image, ring, now)
    left = HEADS & set(due_roles(image, now))
    if left and not holds_heads(_root(IMAGE), ring):
        logger.warning("due, and no key here may sign it: %s", ", ".join(sorted(left)))
    if is_due and not published:
        # Only machines with other keys can go on.
        Repository.objects.filter(pk=image.pk).update(refresh_at=now + RETRY)
    files_forget(image, now - KEEP_SUPERSEDED)
    for row in expiries(now):
        if is_near(row):
            logger.warning("%s", row)
    return published


def assignment_sign(
    *,
    device_id: str,
    key_thumbprint: str,
    assignment_seq: int,
    nonce: str,
    kind: OfferKind,
    bundle: Bundle,
    delta: Delta | None,
    security_floor: int,
    network_policy: NetworkPolicy = NetworkPolicy.ANY,
    content_key: str = "",
    retry_failed: bool = False,
    confirm_deadline: int = 0,
    clock: Clock | None = None,
) -> bytes:
    """Return a director document that assigns `bundle` to one device, and to nobody else.

    Args:
        device_id: Whom it is for.
        key_thumbprint: SHA-256 of the device's public key.
        assignment_seq: Rises with every assignment of this device, from 1; also the version.
        nonce: What the device sent with its question; a replayed answer carries another one.
        kind: Install, or go back to a bundle the device has.
        bundle: What the device shall run; always the full desired state.
        delta: How to get there from the bundle the device runs; only a ready one is named.
        security_floor: Least security epoch that the device may run from now on.
        network_policy: What it may fetch on a metered network.
        content_key: Wrapped for this device, base64, if the bundle is confidential; else empty.
        retry_failed: The device tries the bundle even if it failed there before.
        confirm_deadline: Unix time by which it should be committed, seconds; 0 for none.
        clock: The time of signing; this machine's by default.

    Raises:
        SigningKeysError, BuildOutputError: No director's key; `delta` leads to another bundle.
    """
    assignment = Assignment(
        device_id=device_id,
        key_thumbprint=key_thumbprint,
        assignment_seq=assignment_seq,
        nonce=nonce,
        kind=kind,
        security_floor=security_floor,
        network_policy=network_policy,
        delta=_delta_offer(bundle, delta),
        content_key=content_key,
        retry_failed=retry_failed,
        confirm_deadline=confirm_deadline,
    )
    return _directive(_assigned(bundle, assignment), assignment_seq, clock)


def _assigned(bundle: Bundle, assignment: Assignment) -> TargetFile:
    size, custom = len(bundle.manifest_bytes), assignment.to_json()
    return target_file(bundle_path(bundle), size, bundle.manifest_sha256, custom)


def rules_sign(*, order: RulesOrder, clock: Clock | None = None) -> bytes:
    """Return a director document that orders degrade rules for one device.

    Raises:
        SigningKeysError: The director's key is missing.
    """
    body = order.body()
    target = target_file(RULES_PATH, len(body), sha256_hex(body), order.to_json())
    return _directive(target, order.revision, clock)


def _directive(target: TargetFile, version: int, clock: Clock | None) -> bytes:
    """Return the director's document of one target."""
    expires = expiry("assignment", (clock or SystemClock()).now())
    document = Metadata(Targets(version=version, expires=expires, targets={target.path: target}))
    return _by_director(document)


def trust_anchors() -> dict[str, Any]:
    """Return the newest root of both repositories, as JSON values for a device that enrols.

    Raises:
        SigningKeysError: The repositories were never set up.
    """
    return {
        f"{name}_root": json.loads(bytes(head(Repository(name=name), "root").data))
        for name in (IMAGE, DIRECTOR)
    }


def _by_director(document: Metadata[Targets]) -> bytes:
    """Return a document signed by the online key that the newest director root names."""
    root = _root(DIRECTOR)
    add_signatures(document, key_ring().signers(DIRECTOR, root.roles[Targets.type].keyids))
    if not is_signed_for(root, Targets.type, document):
        raise SigningKeysError(
            "this machine lacks the key that the director root names for assignments",
            hint="`manage.py keys_status` shows which; keys.json must list it",
        )
    return to_bytes(document)


def _root(repository: str) -> Root:
    return _parsed_root(bytes(head(Repository(name=repository), "root").data))


@lru_cache(maxsize=4)
def _parsed_root(data: bytes) -> Root:
    return Metadata[Root].from_bytes(data).signed


def _drafts_wait_here() -> bool:
    """Return whether a draft waits for a key of this machine, or only for being published."""
    waiting = list(
        MetadataDraft.objects.filter(repository__name=IMAGE)
        .exclude(role=Targets.type)
        .values_list("waits_for", flat=True)
    )
    if not waiting:
        return False
    ring = key_ring()
    mine = ring.keyids()
    return any(
        mine & set(keyids) if keyids else bool(ring.public(IMAGE, "timestamp"))
        for keyids in waiting
    )


def _delta_offer(bundle: Bundle, delta: Delta | None) -> DeltaOffer | None:
    if delta is None or delta.state != DeltaState.READY.value:
        return None
    if delta.new_id != bundle.pk:
        raise BuildOutputError(f"{delta} does not lead to {bundle}")
    return DeltaOffer(
        base_manifest_sha256=delta.base.manifest_sha256,
        sha256=delta.sha256,
        size_bytes=delta.size_bytes,
        plain_sha256=delta.plain_sha256,
        plain_bytes=delta.plain_bytes,
    )
