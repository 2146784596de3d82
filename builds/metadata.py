"""Update metadata documents (TUF 1.0): how each is made, extended and signed. No database here.

    image root -(2 of 3)-> targets -(2 of 2)-> 2^bits bins -(build AND approve)-> release manifests
                       |-> snapshot, timestamp
    director root -(2 of 2)-> one online key -> one assignment per device

A stolen online key alone installs nothing: a release needs two keys of the image repository and an
assignment of the director that names the same digest. `build` and `approve` may sign in different
processes, one after the other: signatures are added to a document until its delegation is content.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Final, TypeVar

from securesystemslib.signer import Key, Signer
from tuf.api.exceptions import UnsignedMetadataError
from tuf.api.metadata import (
    Delegations,
    Metadata,
    MetaFile,
    Root,
    Snapshot,
    SuccinctRoles,
    TargetFile,
    Targets,
    Timestamp,
)
from tuf.api.serialization.json import CanonicalJSONSerializer, JSONSerializer

from builds.errors import BuildOutputError, SigningKeysError
from compiler.contract.canonical import Json, sha256_hex

BIN_PREFIX: Final = "bin"
LIFE: Final[Mapping[str, timedelta]] = MappingProxyType(
    {
        "root": timedelta(days=365),
        "targets": timedelta(days=180),
        BIN_PREFIX: timedelta(days=30),
        "snapshot": timedelta(days=7),
        "timestamp": timedelta(days=1),
        "assignment": timedelta(days=7),
    }
)
# An online role is signed again when less than this is left of its life.
MARGIN: Final[Mapping[str, timedelta]] = MappingProxyType(
    {
        BIN_PREFIX: timedelta(days=10),
        "snapshot": timedelta(days=3),
        "timestamp": timedelta(hours=12),
    }
)
# Roles of the director that its one online key signs; assignments are `targets`.
DIRECTOR_ONLINE: Final = ("targets", "snapshot", "timestamp")
_SERIALIZER: Final = JSONSerializer(compact=True)

# A root or targets document that expires within this time needs a ceremony now.
CEREMONY_MARGIN: Final = timedelta(days=60)

SignedT = TypeVar("SignedT", Root, Snapshot, Targets, Timestamp)
Keys = Mapping[str, Sequence[Key]]
AnyDocument = Metadata[Root] | Metadata[Snapshot] | Metadata[Targets] | Metadata[Timestamp]


def life_of(role: str) -> timedelta:
    """Return how long a new document of this role is valid."""
    return LIFE[BIN_PREFIX if role.startswith(f"{BIN_PREFIX}-") else role]


def margin_of(role: str) -> timedelta | None:
    """Return when before its end a document is signed again; None for offline roles."""
    return MARGIN.get(BIN_PREFIX if role.startswith(f"{BIN_PREFIX}-") else role)


def expiry(role: str, now: datetime) -> datetime:
    """Return when a document of this role that is signed now expires (whole seconds, UTC)."""
    return (now + life_of(role)).replace(microsecond=0)


def new_image_root(keys: Keys, now: datetime) -> Metadata[Root]:
    """Return version 1 of the image root, unsigned; `keys` has the public keys of each role."""
    root = Root(version=1, expires=expiry("root", now), consistent_snapshot=True)
    for role in ("root", "targets", "snapshot", "timestamp"):
        for key in keys[role]:
            root.add_key(key, role)
    root.roles["root"].threshold = 2
    root.roles["targets"].threshold = 2
    return Metadata(root)


def new_director_root(keys: Keys, now: datetime) -> Metadata[Root]:
    """Return version 1 of the director root, unsigned; its one online key has every other role."""
    root = Root(version=1, expires=expiry("root", now), consistent_snapshot=True)
    for key in keys["root"]:
        root.add_key(key, "root")
    root.roles["root"].threshold = 2
    for role in DIRECTOR_ONLINE:
        for key in keys["targets"]:
            root.add_key(key, role)
    return Metadata(root)


def new_targets(keys: Keys, bits: int, now: datetime) -> Metadata[Targets]:
    """Return version 1 of the top-level targets: no targets, 2^bits bins signed by two keys."""
    signers = [*keys["build"], *keys["approve"]]
    bins = SuccinctRoles([key.keyid for key in signers], len(signers), bits, BIN_PREFIX)
    delegations = Delegations({key.keyid: key for key in signers}, None, bins)
    return Metadata(Targets(version=1, expires=expiry("targets", now), delegations=delegations))


def new_bin(name: str, now: datetime) -> Metadata[Targets]:
    """Return version 1 of a bin, empty and unsigned."""
    return Metadata(Targets(version=1, expires=expiry(name, now)))


def succinct_roles(targets: Metadata[Targets]) -> SuccinctRoles:
    """Return the bins that the top-level targets delegate to."""
    delegations = targets.signed.delegations
    if delegations is None or delegations.succinct_roles is None:
        raise SigningKeysError("the top-level targets delegate to no bins")
    return delegations.succinct_roles


def add_target(bin_document: Metadata[Targets], path: str, data: bytes) -> bool:
    """Name `data` under `path`; return whether that changed anything.

    Raises:
        BuildOutputError: The path names other bytes already; a release is immutable.
    """
    digest = sha256_hex(data)
    known = bin_document.signed.targets.get(path)
    if known is not None:
        if known.hashes != {"sha256": digest}:
            raise BuildOutputError(f"{path} was published with other content")
        return False
    bin_document.signed.targets[path] = target_file(path, len(data), digest)
    return True


def target_file(
    path: str, length: int, sha256: str, custom: Mapping[str, Json] | None = None
) -> TargetFile:
    """Return the entry of one target."""
    fields = {"custom": dict(custom)} if custom is not None else None
    return TargetFile(
        length=length, hashes={"sha256": sha256}, path=path, unrecognized_fields=fields
    )


def renewed(document: Metadata[SignedT], role: str, now: datetime) -> Metadata[SignedT]:
    """Raise the version of a document and give it a new life; its signatures are void."""
    document.signed.version += 1
    document.signed.expires = expiry(role, now)
    return document


def new_snapshot(versions: Mapping[str, int], version: int, now: datetime) -> Metadata[Snapshot]:
    """Return a snapshot that names the current version of targets and every bin."""
    meta = {f"{role}.json": MetaFile(number) for role, number in versions.items()}
    return Metadata(Snapshot(version=version, expires=expiry("snapshot", now), meta=meta))


def new_timestamp(
    snapshot_version: int, snapshot_bytes: bytes, version: int, now: datetime
) -> Metadata[Timestamp]:
    """Return a timestamp that pins these bytes of the snapshot."""
    meta = MetaFile(snapshot_version, len(snapshot_bytes), {"sha256": sha256_hex(snapshot_bytes)})
    return Metadata(
        Timestamp(version=version, expires=expiry("timestamp", now), snapshot_meta=meta)
    )


def signed_bytes(document: Metadata[SignedT], signers: Iterable[Signer]) -> bytes:
    """Sign with every signer, dropping older signatures, and return the bytes to publish.

    Raises:
        SigningKeysError: A signer failed.
    """
    document.signatures.clear()
    add_signatures(document, signers)
    return to_bytes(document)


def add_signatures(
    document: AnyDocument, signers: Iterable[Signer], payload: bytes | None = None
) -> int:
    """Add the signatures of those signers whose key has not signed yet; return how many.

    The bytes to sign, `payload`, are made once for all of them: in a large document that is most of
    the work.

    Raises:
        SigningKeysError: A signer failed.
    """
    missing = [one for one in signers if one.public_key.keyid not in document.signatures]
    payload = payload_of(document) if payload is None else payload
    for signer in missing:
        document.signatures[signer.public_key.keyid] = signer.sign(payload)
    return len(missing)


def payload_of(document: AnyDocument) -> bytes:
    """Return the canonical bytes that are signed."""
    return CanonicalJSONSerializer().serialize(document.signed)


def to_bytes(document: AnyDocument) -> bytes:
    """Return a document as it is published."""
    return document.to_bytes(_SERIALIZER)


def is_signed_for(
    delegator: Root | Targets, role: str, document: AnyDocument, payload: bytes | None = None
) -> bool:
    """Return whether enough of the keys that `delegator` names have signed."""
    payload = payload_of(document) if payload is None else payload
    try:
        delegator.verify_delegate(role, payload, document.signatures)
    except UnsignedMetadataError:
        return False
    return True
