"""The publisher of the image repository: from approved bundles and due renewals to signed files.

    what shall be  ->  draft of each bin  -(build, approve: here or elsewhere)->  bins  ->  heads

What each bin shall say is worked out anew in every call; a draft that says the same is signed on,
any other is made again. So the order in which machines with different keys come by does not matter,
and losing a draft costs signatures only. Nothing half-signed is served. Every function runs inside
the caller's transaction, under the lock of the repository's row: a client sees the old timestamp
with everything it names, or the new one with everything it names.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from django.db.models import prefetch_related_objects
from tuf.api.metadata import Metadata, Root, Snapshot, TargetFile, Targets, Timestamp

from builds.errors import SigningKeysError
from builds.keys import IMAGE, KeyRing
from builds.metadata import (
    BIN_PREFIX,
    add_signatures,
    add_target,
    is_signed_for,
    margin_of,
    new_bin,
    new_snapshot,
    new_timestamp,
    payload_of,
    renewed,
    signed_bytes,
    succinct_roles,
    to_bytes,
)
from builds.models import Bundle, MetadataDraft, Repository
from builds.services.metadata_files import (
    due_roles,
    file_put,
    files_put,
    head,
    head_versions,
    heads_of,
    next_refresh,
)
from compiler.contract.manifest import target_path

TARGETS: Final = "targets"
HEADS: Final = frozenset({"snapshot", "timestamp"})
# When only other machines can go on, this one looks again after so long.
LOOK_AGAIN: Final = timedelta(minutes=1)
Documents = dict[str, Metadata[Targets]]


@dataclass(frozen=True, slots=True)
class Scene:
    """What is published, and what waits.

    Attributes:
        targets: Whom bins have to be signed by: the published targets, or the draft of the next.
        is_moving: Whether the targets are a draft that waits for every bin to be signed anew.
        versions: Newest published version of each role.
    """

    image: Repository
    root: Root
    targets: Metadata[Targets]
    is_moving: bool
    versions: Mapping[str, int]
    drafts: Mapping[str, MetadataDraft]

    @property
    def bins(self) -> frozenset[str]:
        """Return the names of all bins."""
        return frozenset(succinct_roles(self.targets).get_roles())

    @property
    def keyids(self) -> frozenset[str]:
        """Return the keys that may sign a bin."""
        return frozenset(succinct_roles(self.targets).keyids)


def publisher_scene(image: Repository) -> Scene:
    """Return what there is; the caller has locked the repository."""
    drafts = {row.role: row for row in MetadataDraft.objects.filter(repository=image)}
    waiting = drafts.get(TARGETS)
    published = waiting or head(image, TARGETS)
    return Scene(
        image=image,
        root=Metadata[Root].from_bytes(bytes(head(image, "root").data)).signed,
        targets=Metadata[Targets].from_bytes(bytes(published.data)),
        is_moving=waiting is not None,
        versions=head_versions(image),
        drafts=drafts,
    )


def publisher_advance(
    image: Repository, ring: KeyRing, now: datetime, *, bundles: Iterable[Bundle] = ()
) -> list[str]:
    """Sign what this machine can, publish what all have signed; return the roles published.

    Args:
        image: The locked row of the image repository.
        ring: The keys that this machine holds.
        now: Time of signing.
        bundles: Approved ones, beside those that the database knows to be approved and not yet
            published; what is published already changes nothing.

    Raises:
        SigningKeysError: A signer failed.
        BuildOutputError: A path was published before with other content.
    """
    scene = publisher_scene(image)
    due = set(due_roles(image, now))
    wanted = _wanted(scene, bundles)
    documents = _desired(scene, wanted, due, now)
    stale = [row.pk for role, row in scene.drafts.items() if role not in {*documents, TARGETS}]
    MetadataDraft.objects.filter(pk__in=stale).delete()
    finished, unfinished = _signed(scene, documents, ring, now)
    if not _can_finish(scene, finished, unfinished, ring):
        unfinished, finished = {**unfinished, **finished}, {}
    _drafts_put(scene, unfinished)
    if not finished and not (due & HEADS and holds_heads(scene.root, ring)):
        return []
    _bins_put(scene, finished, wanted, now)
    if finished and not scene.bins <= {*scene.versions, *finished}:
        return sorted(finished)
    heads_publish(image, scene.root, ring, now, bins=scene.bins)
    return [*sorted(finished), *sorted(HEADS)]


def heads_publish(
    image: Repository, root: Root, ring: KeyRing, now: datetime, *, bins: Set[str]
) -> None:
    """Sign and publish a snapshot of everything, and the timestamp that names it.

    Args:
        image: The locked row of the image repository.
        root: Says which keys.
        ring: Has them.
        now: Time of signing.
        bins: Those that will have to be renewed.

    Raises:
        SigningKeysError: This machine lacks the keys that the root names for it.
    """
    versions = head_versions(image)
    # A role that was ever listed stays: clients take one that vanished for an attack.
    named = {role: number for role, number in versions.items() if role == TARGETS or _is_bin(role)}
    snapshot: Metadata[Snapshot] = new_snapshot(named, versions.get("snapshot", 0) + 1, now)
    data = signed_bytes(snapshot, ring.signers(IMAGE, root.roles["snapshot"].keyids))
    timestamp: Metadata[Timestamp] = new_timestamp(
        snapshot.signed.version, data, versions.get("timestamp", 0) + 1, now
    )
    stamp = signed_bytes(timestamp, ring.signers(IMAGE, root.roles["timestamp"].keyids))
    if not is_signed_for(root, "snapshot", snapshot) or not is_signed_for(
        root, "timestamp", timestamp
    ):
        raise SigningKeysError(
            "this machine lacks the snapshot and timestamp keys that the root names",
            hint="keys.json must list them; `manage.py keys_status` shows which",
        )
    file_put(image, "snapshot", snapshot, data)
    file_put(image, "timestamp", timestamp, stamp)
    image.refresh_at = max(next_refresh(image, HEADS | bins) or now, now + LOOK_AGAIN)
    image.save(update_fields=["refresh_at", "updated_at"])


def holds_heads(root: Root, ring: KeyRing) -> bool:
    """Return whether a ring lists keys for snapshot and timestamp."""
    mine = ring.keyids()
    return all(mine & set(root.roles[role].keyids) for role in HEADS)


def bundle_path(bundle: Bundle) -> str:
    """Return the TUF target path of a bundle's manifest."""
    version = bundle.version
    return target_path(version.model.name, version.release_seq, bundle.target.name)


def _wanted(scene: Scene, bundles: Iterable[Bundle]) -> dict[str, list[Bundle]]:
    """Return the bundles that shall be published, by bin."""
    given = list(bundles)
    prefetch_related_objects(given, "version__model", "target")
    approved = Bundle.objects.filter(published_at=None, approved_at__isnull=False)
    waiting = approved.exclude(pk__in=[bundle.pk for bundle in given])
    roles = succinct_roles(scene.targets)
    wanted: dict[str, list[Bundle]] = {}
    for bundle in [*given, *waiting.select_related("version__model", "target")]:
        wanted.setdefault(roles.get_role_for_target(bundle_path(bundle)), []).append(bundle)
    return wanted


def _desired(
    scene: Scene, wanted: Mapping[str, Sequence[Bundle]], due: Set[str], now: datetime
) -> Documents:
    """Return the next version of each bin that has to change, unsigned."""
    missing = scene.bins - scene.versions.keys()
    names = scene.bins if scene.is_moving else {*wanted, *missing, *(due & scene.bins)}
    heads = heads_of(scene.image, {name: scene.versions[name] for name in names - missing})
    moved = _moved(scene) if scene.is_moving and missing else {}
    documents = {}
    for name in names:
        is_changed = scene.is_moving or name in due or name in missing
        document = new_bin(name, now) if name in missing else renewed(heads[name], name, now)
        document.signatures.clear()
        document.signed.targets.update(moved.get(name, {}))
        for bundle in wanted.get(name, ()):
            is_changed |= add_target(document, bundle_path(bundle), bundle.manifest_bytes)
        if is_changed:
            documents[name] = document
    return documents


def _moved(scene: Scene) -> dict[str, dict[str, TargetFile]]:
    """Return every published target by its bin, for targets that delegate to other bins."""
    roles = succinct_roles(scene.targets)
    old = {
        role: version
        for role, version in scene.versions.items()
        if _is_bin(role) and role not in scene.bins
    }
    moved: dict[str, dict[str, TargetFile]] = {}
    for document in heads_of(scene.image, old).values():
        for path, target in document.signed.targets.items():
            moved.setdefault(roles.get_role_for_target(path), {})[path] = target
    return moved


def _signed(
    scene: Scene, documents: Documents, ring: KeyRing, now: datetime
) -> tuple[Documents, Documents]:
    """Add the signatures of this machine; return the documents that are complete, and the rest."""
    signers = ring.signers(IMAGE, scene.keyids)
    finished: Documents = {}
    unfinished: Documents = {}
    for name, fresh in documents.items():
        document = _draft_like(scene, name, fresh, now) or fresh
        payload = payload_of(document)
        add_signatures(document, signers, payload)
        is_done = is_signed_for(scene.targets.signed, name, document, payload)
        (finished if is_done else unfinished)[name] = document
    return finished, unfinished


def _draft_like(
    scene: Scene, name: str, fresh: Metadata[Targets], now: datetime
) -> Metadata[Targets] | None:
    """Return the draft of a bin if it says what it shall say, with signatures that still count."""
    row = scene.drafts.get(name)
    if row is None or row.version != fresh.signed.version:
        return None
    draft = Metadata[Targets].from_bytes(bytes(row.data))
    margin = margin_of(name) or timedelta(0)
    if draft.signed.targets != fresh.signed.targets or draft.signed.expires - margin <= now:
        return None
    for keyid in set(draft.signatures) - scene.keyids:
        del draft.signatures[keyid]
    return draft


def _can_finish(scene: Scene, finished: Documents, unfinished: Documents, ring: KeyRing) -> bool:
    """Return whether this machine may publish what is complete."""
    return bool(finished) and holds_heads(scene.root, ring) and not (scene.is_moving and unfinished)


def _bins_put(
    scene: Scene, finished: Documents, wanted: Mapping[str, Sequence[Bundle]], now: datetime
) -> None:
    roles = set(finished)
    if finished and scene.is_moving:
        file_put(scene.image, TARGETS, scene.targets, to_bytes(scene.targets))
        roles.add(TARGETS)
    files_put(scene.image, {name: (one, to_bytes(one)) for name, one in finished.items()})
    MetadataDraft.objects.filter(repository=scene.image, role__in=roles).delete()
    named = [bundle.pk for name in finished for bundle in wanted.get(name, ())]
    Bundle.objects.filter(pk__in=named, published_at=None).update(published_at=now)


def _drafts_put(scene: Scene, documents: Documents) -> None:
    """Keep aside what is not complete, or what only another machine can publish."""
    for name, document in documents.items():
        row = scene.drafts.get(name)
        data = to_bytes(document)
        if row is None or bytes(row.data) != data:
            MetadataDraft.objects.update_or_create(
                repository=scene.image,
                role=name,
                defaults={
                    "version": document.signed.version,
                    "data": data,
                    "waits_for": sorted(scene.keyids - document.signatures.keys()),
                },
            )


def _is_bin(role: str) -> bool:
    return role.startswith(f"{BIN_PREFIX}-")
