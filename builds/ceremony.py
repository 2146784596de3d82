"""Ceremonies: the next root and targets, who may sign them, what follows on what. No database here.

    prepare (server) -> folder -> each holder signs, on a machine with one key -> publish (server)

A folder has one document for each role, `image-root.json` say, and in `current/` what it follows
on, so that a holder's machine, which knows nothing else, can say what changes. A root counts when
enough keys of the root before *and* of itself have signed; devices follow such a chain from the
oldest root that they know. Used by the commands `keys_prepare`, `keys_sign` and `keys_publish`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Final, cast

from securesystemslib.signer import Key
from tuf.api.exceptions import RepositoryError
from tuf.api.metadata import Metadata, Root, SuccinctRoles, Targets
from tuf.api.serialization import DeserializationError

from builds.errors import CeremonyError
from builds.keys import DIRECTOR, IMAGE, LAYOUT, PublicKey
from builds.metadata import (
    BIN_PREFIX,
    DIRECTOR_ONLINE,
    expiry,
    is_signed_for,
    new_director_root,
    new_image_root,
    new_targets,
    payload_of,
    succinct_roles,
    to_bytes,
)
from compiler.contract.canonical import sha256_hex

CURRENT: Final = "current"
MAX_DOCUMENT_BYTES: Final = 1 << 20
MIN_PREFIX: Final = 8
IMAGE_ROOT: Final = (IMAGE, "root")
IMAGE_TARGETS: Final = (IMAGE, "targets")
DIRECTOR_ROOT: Final = (DIRECTOR, "root")
# In the order in which they are published.
CEREMONIAL: Final = (DIRECTOR_ROOT, IMAGE_ROOT, IMAGE_TARGETS)
NAMES: Final = {f"{repository}-{role}": (repository, role) for repository, role in CEREMONIAL}
_NAME: Final = re.compile(r"(?P<name>[a-z]+-[a-z]+)\.json")
# Whose keys the targets document lists; those of all other roles are listed in a root.
BIN_ROLES: Final = ("build", "approve")

Role = tuple[str, str]
Document = Metadata[Root] | Metadata[Targets]
Documents = dict[Role, Document]


@dataclass(frozen=True, slots=True)
class Change:
    """What the next documents shall differ in.

    Attributes:
        renew: Documents to make anew even if nothing else changes.
        add: Keys to trust, each for its role.
        revoke: Key identities, or beginnings of them, to trust no longer.
        thresholds: Signatures that a document needs from now on, for roots and targets.
        bits: 2^bits bins; None leaves them.
    """

    renew: frozenset[Role] = frozenset()
    add: tuple[PublicKey, ...] = ()
    revoke: tuple[str, ...] = ()
    thresholds: Mapping[Role, int] = field(default_factory=dict)
    bits: int | None = None


def first_documents(publics: Sequence[PublicKey], bits: int, now: datetime) -> Documents:
    """Return version 1 of both roots and of the targets, unsigned.

    Raises:
        CeremonyError: A role has another number of keys than a new installation needs.
    """
    keys: dict[str, dict[str, list[Key]]] = {name: {} for name in LAYOUT}
    for public in publics:
        keys[public.repository].setdefault(public.role, []).append(public.key)
    for repository, roles in LAYOUT.items():
        for role, count in roles.items():
            found = keys[repository].get(role, [])
            if len({key.keyid for key in found}) != count:
                raise CeremonyError(
                    f"{repository} {role} needs {count} different keys, there are {len(found)}",
                    hint="make them with keys_make, and name every public.json",
                )
    documents: Documents = {
        DIRECTOR_ROOT: new_director_root(keys[DIRECTOR], now),
        IMAGE_ROOT: new_image_root(keys[IMAGE], now),
        IMAGE_TARGETS: new_targets(keys[IMAGE], bits, now),
    }
    _require_apart(documents)
    return documents


def next_documents(current: Documents, change: Change, now: datetime) -> Documents:
    """Return the next versions that a change asks for, unsigned.

    Raises:
        CeremonyError: The change is impossible, or leaves a role without enough keys.
    """
    revoked = [_keyid(current, text) for text in change.revoke]
    touched = {*change.renew, *change.thresholds}
    touched |= {document_of(public.repository, public.role) for public in change.add}
    touched |= {role for role in CEREMONIAL for keyid in revoked if keyid in _keyids(current[role])}
    if change.bits is not None:
        touched.add(IMAGE_TARGETS)
    following: Documents = {}
    for role in touched:
        document = _copy(current[role])
        document.signed.version += 1
        document.signed.expires = expiry(role[1], now)
        document.signatures.clear()
        following[role] = document
    for role, document in following.items():
        added = [one for one in change.add if document_of(one.repository, one.role) == role]
        if isinstance(document.signed, Root):
            _change_root(document.signed, added, revoked, change.thresholds.get(role))
        else:
            _change_targets(document.signed, added, revoked, change.bits)
    if IMAGE_ROOT in following and IMAGE_TARGETS not in following:
        root = cast("Root", following[IMAGE_ROOT].signed)
        if not is_signed_for(root, "targets", current[IMAGE_TARGETS]):
            # Other keys count from now on, so the targets have to be signed by them.
            renew = change.renew | {IMAGE_TARGETS}
            return next_documents(current, replace(change, renew=renew), now)
    if not following:
        raise CeremonyError("nothing would change", hint="name --renew, --add or --revoke")
    _require_apart({**current, **following})
    return following


def document_of(repository: str, role: str) -> Role:
    """Return the document that lists the keys of a role."""
    return IMAGE_TARGETS if repository == IMAGE and role in BIN_ROLES else (repository, "root")


def require_root_follows(current: Metadata[Root] | None, following: Metadata[Root]) -> None:
    """Check a root as a device does.

    Raises:
        CeremonyError: Wrong version, or too few signatures by the keys of either root.
    """
    _require_next(current, following, "root")
    for root, which in ((current, "before"), (following, "itself")):
        if root is not None and not is_signed_for(root.signed, "root", following):
            have = len(root.signed.roles["root"].keyids & following.signatures.keys())
            raise CeremonyError(
                f"the root is signed by {have} of {root.signed.roles['root'].threshold} keys that "
                f"the root {which} needs",
                hint="more holders must sign: keys_sign",
            )


def require_targets_follow(
    root: Root, current: Metadata[Targets] | None, following: Metadata[Targets]
) -> None:
    """Check the top-level targets against the root that will be published with them.

    Raises:
        CeremonyError: Wrong version, or too few signatures.
    """
    _require_next(current, following, "targets")
    if not is_signed_for(root, "targets", following):
        have = len(root.roles["targets"].keyids & following.signatures.keys())
        raise CeremonyError(
            f"targets are signed by {have} of {root.roles['targets'].threshold} keys",
            hint="more holders must sign: keys_sign",
        )


def entitled_keys(role: Role, documents: Documents, current: Documents) -> frozenset[str]:
    """Return who may sign the document of a role: for a root, keys of the root before too."""
    keyids: set[str] = set()
    roots = [found.get((role[0], "root")) for found in (documents, current)]
    for root in roots if role[1] == "root" else [roots[0] or roots[1]]:
        if root is not None:
            keyids |= set(cast("Root", root.signed).roles[role[1]].keyids)
    return frozenset(keyids)


def describe(role: Role, document: Document, current: Document | None) -> list[str]:
    """Return what a document says and changes, for the person who shall sign it."""
    lines = [
        f"{role[0]} {role[1]} version {document.signed.version}, "
        f"expires {document.signed.expires:%Y-%m-%d}",
        f"  what is signed has SHA-256 {sha256_hex(payload_of(document))}",
    ]
    new, old = _roles(document), _roles(current) if current is not None else {}
    for name in sorted(new.keys() | old.keys()):
        keyids, threshold = new.get(name, (frozenset(), 0))
        before, old_threshold = old.get(name, (frozenset(), 0))
        lines.append(f"  {name}: {threshold} of {len(keyids)} keys")
        if current is not None and threshold != old_threshold:
            lines.append(f"    threshold was {old_threshold}")
        lines += [f"    + {keyid}" for keyid in sorted(keyids - before)]
        lines += [f"    - {keyid}" for keyid in sorted(before - keyids)]
    return lines


def write_folder(folder: Path, documents: Documents, current: Documents) -> None:
    """Write a ceremony's folder.

    Raises:
        CeremonyError: The folder has something in it.
    """
    if folder.exists() and any(folder.iterdir()):
        raise CeremonyError(f"{folder} is not empty", hint="take a new folder for each ceremony")
    (folder / CURRENT).mkdir(parents=True, exist_ok=True)
    for where, found in ((folder, documents), (folder / CURRENT, current)):
        for role, document in found.items():
            write_document(where, role, document)


def write_document(folder: Path, role: Role, document: Document) -> None:
    """Write one document, whole or not at all."""
    path = folder / f"{role[0]}-{role[1]}.json"
    draft = path.with_suffix(".draft")
    draft.write_bytes(to_bytes(document))
    draft.replace(path)


def read_folder(folder: Path) -> tuple[Documents, Documents]:
    """Return the documents of a ceremony, and what they follow on.

    Raises:
        CeremonyError: There is none, or one is malformed.
    """
    documents = _read(folder)
    if not documents:
        raise CeremonyError(f"{folder} has no document of a ceremony", hint="run keys_prepare")
    return documents, _read(folder / CURRENT)


def _read(folder: Path) -> Documents:
    found: Documents = {}
    for path in sorted(folder.glob("*.json")):
        match = _NAME.fullmatch(path.name)
        role = NAMES.get(match["name"]) if match else None
        if role is None:
            raise CeremonyError(f"{path.name} belongs to no ceremony")
        if path.stat().st_size > MAX_DOCUMENT_BYTES:
            raise CeremonyError(f"{path.name} is larger than {MAX_DOCUMENT_BYTES} bytes")
        kind = Root if role[1] == "root" else Targets
        try:
            document: Document = Metadata.from_bytes(path.read_bytes())
        except (OSError, DeserializationError) as error:
            raise CeremonyError(f"{path.name} is no metadata: {error}") from error
        if not isinstance(document.signed, kind):
            raise CeremonyError(f"{path.name} is no {role[1]} metadata")
        found[role] = document
    return found


def _require_next(current: Document | None, following: Document, what: str) -> None:
    wanted = 1 if current is None else current.signed.version + 1
    if following.signed.version != wanted:
        raise CeremonyError(
            f"{what} has version {following.signed.version}, the next one is {wanted}",
            hint="somebody else published meanwhile? prepare anew",
        )


def _change_root(
    root: Root, add: Sequence[PublicKey], revoke: Sequence[str], threshold: int | None
) -> None:
    for public in add:
        is_online = public.repository == DIRECTOR and public.role != "root"
        for name in DIRECTOR_ONLINE if is_online else (public.role,):
            root.add_key(public.key, name)
    for keyid in revoke:
        for name, role in root.roles.items():
            if keyid in role.keyids:
                root.revoke_key(keyid, name)
    if threshold is not None:
        root.roles["root"].threshold = threshold
    for name, role in root.roles.items():
        if not 1 <= role.threshold <= len(role.keyids):
            raise CeremonyError(
                f"{name} would need {role.threshold} signatures of {len(role.keyids)} keys",
                hint="add a key in the same step as the other is revoked",
            )


def _change_targets(
    targets: Targets, add: Sequence[PublicKey], revoke: Sequence[str], bits: int | None
) -> None:
    delegations = targets.delegations
    assert delegations is not None
    bins = succinct_roles(Metadata(targets))
    kept = [keyid for keyid in bins.keyids if keyid not in revoke]
    keys = {keyid: delegations.keys[keyid] for keyid in kept}
    keys |= {public.key.keyid: public.key for public in add}
    if len(keys) != len(BIN_ROLES):
        raise CeremonyError(
            f"bins are signed by one key that builds and one that approves, not by {len(keys)}",
            hint="add the new key and revoke the old one in one step: two keys of one kind could"
            " publish alone",
        )
    delegations.keys = keys
    delegations.succinct_roles = SuccinctRoles(
        list(keys), len(BIN_ROLES), bins.bit_length if bits is None else bits, BIN_PREFIX
    )


def _require_apart(documents: Documents) -> None:
    """Refuse a key that has two jobs: whoever takes it would hold both."""
    jobs: dict[str, set[str]] = {}
    for (repository, _), document in documents.items():
        for name, (keyids, _) in _roles(document).items():
            job = "assignments" if repository == DIRECTOR and name in DIRECTOR_ONLINE else name
            for keyid in keyids:
                jobs.setdefault(keyid, set()).add(f"{repository} {job}")
    shared = {keyid: names for keyid, names in jobs.items() if len(names) > 1}
    for keyid, names in shared.items():
        raise CeremonyError(f"key {keyid[:MIN_PREFIX]} would be of {' and '.join(sorted(names))}")


def _roles(document: Document) -> dict[str, tuple[frozenset[str], int]]:
    """Return keys and threshold of each role that a document delegates to."""
    if isinstance(document.signed, Root):
        return {
            name: (frozenset(role.keyids), role.threshold)
            for name, role in document.signed.roles.items()
        }
    bins = succinct_roles(document)
    return {f"{1 << bins.bit_length} bins": (frozenset(bins.keyids), bins.threshold)}


def _keyids(document: Document) -> frozenset[str]:
    return frozenset().union(*(keyids for keyids, _ in _roles(document).values()))


def _keyid(current: Documents, text: str) -> str:
    known = frozenset().union(*map(_keyids, current.values()))
    found = [keyid for keyid in known if keyid.startswith(text)]
    if len(text) < MIN_PREFIX or len(found) != 1:
        raise CeremonyError(
            f"{text!r} names {len(found)} keys in use",
            hint=f"`keys_status` lists them; at least {MIN_PREFIX} characters",
        )
    return found[0]


def _copy(document: Document) -> Document:
    try:
        return Metadata.from_bytes(to_bytes(document))
    except RepositoryError as error:
        raise CeremonyError(f"published metadata cannot be read: {error}") from error
