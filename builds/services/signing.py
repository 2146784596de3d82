"""Publishing releases and signing assignments.

One publisher at a time (the lock of the repository row), one transaction: a client sees the old
timestamp with everything it names, or the new one with everything it names.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from django.conf import settings
from django.db import transaction
from tuf.api.metadata import Metadata, Snapshot, Targets, Timestamp

from builds.common.clock import Clock, SystemClock
from builds.errors import BuildOutputError
from builds.keys import DIRECTOR, IMAGE, KeyRing, generate_ring, load_ring
from builds.metadata import (
    BIN_PREFIX,
    add_target,
    bin_signers,
    expiry,
    new_bins,
    new_director_root,
    new_image_root,
    new_snapshot,
    new_targets,
    new_timestamp,
    renewed,
    signed_bytes,
    succinct_roles,
    target_file,
)
from builds.models import Bundle, Delta, Repository
from builds.services.metadata_files import (
    due_roles,
    file_put,
    files_forget,
    head,
    head_versions,
    next_refresh,
    repository_locked,
)
from builds.states import DeltaState
from compiler.contract.canonical import sha256_hex
from compiler.contract.manifest import target_path
from compiler.contract.protocol import Assignment, DeltaOffer, NetworkPolicy, OfferKind
from compiler.contract.rules_order import RULES_PATH, RulesOrder

logger = logging.getLogger(__name__)

KEEP_SUPERSEDED: Final = timedelta(days=7)


def key_ring() -> KeyRing:
    """Return the signing keys of this process.

    Raises:
        SigningKeysError: There are none.
    """
    folder: Path = settings.SPARSEFLEET.key_path
    index = folder / "keys.json"
    stamp = index.stat().st_mtime_ns if index.exists() else 0
    return _ring(folder, stamp)


@lru_cache(maxsize=4)
def _ring(folder: Path, _stamp: int) -> KeyRing:
    return load_ring(folder)


def keys_generate() -> KeyRing:
    """Make the signing keys of a new installation; see `builds.keys.generate_ring`."""
    return generate_ring(settings.SPARSEFLEET.key_path)


@transaction.atomic
def repositories_init(*, clock: Clock | None = None) -> bool:
    """Publish version 1 of everything, signed; does nothing when that was done before.

    Returns:
        Whether the repositories are new.

    Raises:
        SigningKeysError: Keys are missing.
    """
    now = (clock or SystemClock()).now()
    image, created = Repository.objects.get_or_create(name=IMAGE)
    if not created:
        return False
    ring = key_ring()
    director = Repository.objects.create(name=DIRECTOR)
    for repository, root in (
        (director, new_director_root(ring, now)),
        (image, new_image_root(ring, now)),
    ):
        data = signed_bytes(root, ring.signers(repository.name, "root"))
        file_put(repository, "root", root, data)
    targets = new_targets(ring, settings.SPARSEFLEET.metadata_bin_bits, now)
    file_put(image, "targets", targets, signed_bytes(targets, ring.signers(IMAGE, "targets")))
    for name, document in new_bins(targets, now).items():
        file_put(image, name, document, signed_bytes(document, bin_signers(ring)))
    _publish_heads(image, ring, now)
    return True


@transaction.atomic
def release_publish(*, bundles: Iterable[Bundle], clock: Clock | None = None) -> int:
    """Name the manifests of `bundles` in the image repository; repeats change nothing.

    Returns:
        How many metadata bins were signed.

    Raises:
        SigningKeysError: Keys or metadata are missing.
        BuildOutputError: A path was published before with other content.
    """
    now = (clock or SystemClock()).now()
    image = repository_locked(IMAGE)
    ring = key_ring()
    roles = succinct_roles(_load(image, "targets"))
    changed: dict[str, Metadata[Targets]] = {}
    for bundle in bundles:
        path = bundle_path(bundle)
        name = roles.get_role_for_target(path)
        document = changed.get(name) or _load(image, name)
        if add_target(document, path, bundle.manifest_bytes):
            changed[name] = document
    for name, document in changed.items():
        file_put(
            image, name, renewed(document, name, now), signed_bytes(document, bin_signers(ring))
        )
    if changed:
        _publish_heads(image, ring, now)
    return len(changed)


@transaction.atomic
def metadata_refresh(*, clock: Clock | None = None) -> list[str]:
    """Sign again what is near its end; return the roles signed. Cheap when nothing is due."""
    now = (clock or SystemClock()).now()
    if not Repository.objects.filter(name=IMAGE, refresh_at__lte=now).exists():
        return []
    image = repository_locked(IMAGE)
    ring = key_ring()
    due = due_roles(image, now)
    for role in due:
        if role.startswith(f"{BIN_PREFIX}-"):
            document = renewed(_load(image, role), role, now)
            file_put(image, role, document, signed_bytes(document, bin_signers(ring)))
    if due:
        _publish_heads(image, ring, now)
    files_forget(image, now - KEEP_SUPERSEDED)
    _warn_of_offline_expiry(image, now)
    return due


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
        clock: The time of signing; this machine's by default.

    Returns:
        The signed TUF targets document with exactly one target.

    Raises:
        SigningKeysError: The director's key is missing.
        BuildOutputError: `delta` leads to another bundle.
    """
    now = (clock or SystemClock()).now()
    assignment = Assignment(
        device_id=device_id,
        key_thumbprint=key_thumbprint,
        assignment_seq=assignment_seq,
        nonce=nonce,
        kind=kind,
        security_floor=security_floor,
        network_policy=network_policy,
        delta=_delta_offer(bundle, delta),
    )
    path, length = bundle_path(bundle), len(bundle.manifest_bytes)
    target = target_file(path, length, bundle.manifest_sha256, assignment.to_json())
    expires = expiry("assignment", now)
    document = Metadata(Targets(version=assignment_seq, expires=expires, targets={path: target}))
    return signed_bytes(document, key_ring().signers(DIRECTOR, "targets"))


def rules_sign(*, order: RulesOrder, clock: Clock | None = None) -> bytes:
    """Return a director document that orders degrade rules for one device.

    Raises:
        SigningKeysError: The director's key is missing.
    """
    now = (clock or SystemClock()).now()
    body = order.body()
    target = target_file(RULES_PATH, len(body), sha256_hex(body), order.to_json())
    expires = expiry("assignment", now)
    document = Metadata(
        Targets(version=order.revision, expires=expires, targets={RULES_PATH: target})
    )
    return signed_bytes(document, key_ring().signers(DIRECTOR, "targets"))


def trust_anchors() -> dict[str, Any]:
    """Return the newest root of both repositories, as JSON values for a device that enrols.

    Raises:
        SigningKeysError: The repositories were never set up.
    """
    rows = {row.name: row for row in Repository.objects.filter(name__in=(IMAGE, DIRECTOR))}
    anchors = {}
    for name in (IMAGE, DIRECTOR):
        repository = rows.get(name) or Repository(name=name)
        anchors[f"{name}_root"] = json.loads(bytes(head(repository, "root").data))
    return anchors


def bundle_path(bundle: Bundle) -> str:
    """Return the TUF target path of a bundle's manifest."""
    version = bundle.version
    return target_path(version.model.name, version.release_seq, bundle.target.name)


def _publish_heads(image: Repository, ring: KeyRing, now: datetime) -> None:
    versions: Mapping[str, int] = head_versions(image)
    named = {
        role: number
        for role, number in versions.items()
        if role == "targets" or role.startswith(f"{BIN_PREFIX}-")
    }
    snapshot: Metadata[Snapshot] = new_snapshot(named, versions.get("snapshot", 0) + 1, now)
    data = signed_bytes(snapshot, ring.signers(IMAGE, "snapshot"))
    file_put(image, "snapshot", snapshot, data)
    timestamp: Metadata[Timestamp] = new_timestamp(
        snapshot.signed.version, data, versions.get("timestamp", 0) + 1, now
    )
    file_put(
        image, "timestamp", timestamp, signed_bytes(timestamp, ring.signers(IMAGE, "timestamp"))
    )
    image.refresh_at = next_refresh(image)
    image.save(update_fields=["refresh_at", "updated_at"])


def _load(repository: Repository, role: str) -> Metadata[Targets]:
    return Metadata[Targets].from_bytes(bytes(head(repository, role).data))


def _delta_offer(bundle: Bundle, delta: Delta | None) -> DeltaOffer | None:
    if delta is None or delta.state != DeltaState.READY.value:
        return None
    if delta.new_id != bundle.pk:
        raise BuildOutputError(f"{delta} does not lead to {bundle}")
    return DeltaOffer(
        base_manifest_sha256=delta.base.manifest_sha256,
        sha256=delta.sha256,
        size_bytes=delta.size_bytes,
    )


def _warn_of_offline_expiry(image: Repository, now: datetime) -> None:
    for role in ("root", "targets"):
        left = head(image, role).expires_at - now
        if left < timedelta(days=30):
            logger.warning("image %s expires in %d days: hold a signing ceremony", role, left.days)
