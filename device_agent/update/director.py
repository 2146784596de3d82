"""The director's assignment: which bundle this one device shall run, signed for it alone.

    director root (pinned at enrolment) -(keys)-> assignment = TUF targets with exactly one target

It is checked in the order of what an attacker could do: size, signature, time, device, nonce,
replay, names. Nothing of it is used before all of that.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, TypeVar

from tuf.api.exceptions import RepositoryError
from tuf.api.metadata import Metadata, Root, Targets

from compiler.contract.canonical import SHA256_PATTERN, Json, sha256_hex
from compiler.contract.errors import ContractError
from compiler.contract.manifest import MAX_MANIFEST_BYTES
from compiler.contract.protocol import MAX_DOCUMENT_BYTES, Assignment, assignment_from_json
from compiler.contract.rules_order import RULES_PATH, RulesOrder, rules_order_from_json
from device_agent.errors import (
    ExpiredError,
    MetadataError,
    NonceError,
    SignatureRefusedError,
    TargetNameError,
    WrongDeviceError,
)
from device_agent.update.image_repository import trust_errors
from device_agent.update.names import require_target_path

MAX_ROOT_ROTATIONS: Final = 32
OrderT = TypeVar("OrderT", Assignment, RulesOrder)
Rooter = Callable[[int], bytes | None]


@dataclass(frozen=True, slots=True)
class Directive:
    """A verified assignment.

    Attributes:
        path: TUF target path of the release manifest.
        length: Bytes of the manifest.
        sha256: Digest of the manifest.
        assignment: What the director says beside it.
        root: The director root that it was verified with, which may be newer than the pinned one.
    """

    path: str
    length: int
    sha256: str
    assignment: Assignment
    root: bytes
    root_version: int


@dataclass(frozen=True, slots=True)
class Expected:
    """What the assignment must say to be ours."""

    device_id: str
    key_thumbprint: str
    nonce: str
    now: datetime


def verify_assignment(
    data: bytes, pinned_root: bytes, newer_root: Rooter, expected: Expected
) -> Directive:
    """Verify an assignment.

    Args:
        data: As received.
        pinned_root: Director root that is trusted.
        newer_root: Returns the root document of a version, or None when there is none.
        expected: Of this device and this request.

    Raises:
        MetadataError: Malformed or oversized.
        SignatureRefusedError: Not signed by the director.
        ExpiredError: Past its time.
        WrongDeviceError, NonceError: Not the answer to this device's question.
        TargetNameError: A name outside the grammar.
    """
    signed, root, root_bytes = _verified(data, pinned_root, newer_root, expected.now)
    assignment = _own(signed, expected, assignment_from_json)
    if signed.version != assignment.assignment_seq:
        raise MetadataError("assignment_seq and metadata version differ")
    path, target = next(iter(signed.targets.items()))
    sha256 = target.hashes.get("sha256", "")
    if set(target.hashes) != {"sha256"} or SHA256_PATTERN.fullmatch(sha256) is None:
        raise TargetNameError("the assigned manifest must be named by one SHA-256")
    if not 0 < target.length <= MAX_MANIFEST_BYTES:
        raise MetadataError(f"a manifest of {target.length} bytes is not acceptable")
    return Directive(
        require_target_path(path), target.length, sha256, assignment, root_bytes, root.version
    )


def verify_rules(
    data: bytes, pinned_root: bytes, newer_root: Rooter, expected: Expected
) -> RulesOrder:
    """Verify an order about degrade rules; whether its revision is new is the caller's business.

    Args:
        data: As received.
        pinned_root: Director root that is trusted.
        newer_root: Returns the root document of a version, or None when there is none.
        expected: Of this device and this request.

    Raises:
        MetadataError: Malformed or oversized, or the rules are not those that were signed for.
        TrustError: As `verify_assignment`.
    """
    signed, _, _ = _verified(data, pinned_root, newer_root, expected.now)
    order = _own(signed, expected, rules_order_from_json)
    if signed.version != order.revision:
        raise MetadataError("revision and metadata version differ")
    path, target = next(iter(signed.targets.items()))
    body = order.body()
    if path != RULES_PATH or target.length != len(body):
        raise TargetNameError("the order is not about degrade rules")
    if target.hashes != {"sha256": sha256_hex(body)}:
        raise MetadataError("the rules are not those that were signed for")
    return order


def _verified(
    data: bytes, pinned_root: bytes, newer_root: Rooter, now: datetime
) -> tuple[Targets, Root, bytes]:
    """Return a document of the director in time, with the root that says so."""
    if len(data) > MAX_DOCUMENT_BYTES:
        raise MetadataError(f"document of {len(data)} bytes, limit {MAX_DOCUMENT_BYTES}")
    root, root_bytes = latest_root(pinned_root, newer_root)
    signed = _signed_targets(root, data)
    if root.is_expired(now):
        raise ExpiredError("the director root is past its time")
    if signed.is_expired(now):
        raise ExpiredError("the director's document is past its time")
    return signed, root, root_bytes


def latest_root(pinned: bytes, newer_root: Rooter) -> tuple[Root, bytes]:
    """Follow the chain of director roots; each is signed by itself and by the one before.

    Raises:
        MetadataError: A root is malformed or has the wrong version.
        SignatureRefusedError: A root is not signed by the one before.
    """
    with trust_errors():
        current = Metadata[Root].from_bytes(pinned)
        current.signed.verify_delegate(Root.type, current.signed_bytes, current.signatures)
        data = pinned
        first = current.signed.version + 1
        for version in range(first, first + MAX_ROOT_ROTATIONS):
            newer = newer_root(version)
            if newer is None:
                break
            following = Metadata[Root].from_bytes(newer)
            if following.signed.version != version:
                raise MetadataError(f"director root {version} calls itself another version")
            for root in (current.signed, following.signed):
                root.verify_delegate(Root.type, following.signed_bytes, following.signatures)
            current, data = following, newer
        return current.signed, data


def _signed_targets(root: Root, data: bytes) -> Targets:
    with trust_errors():
        document = Metadata[Targets].from_bytes(data)
        if not isinstance(document.signed, Targets):
            raise MetadataError("the director's document is no TUF targets document")
        try:
            root.verify_delegate(Targets.type, document.signed_bytes, document.signatures)
        except RepositoryError as error:
            raise SignatureRefusedError(f"director: {error}") from error
        return document.signed


def _own(
    signed: Targets, expected: Expected, from_json: Callable[[Mapping[str, Json]], OrderT]
) -> OrderT:
    """Return what the director says to this device, in answer to this question."""
    if len(signed.targets) != 1 or signed.delegations is not None:
        raise MetadataError("the director names exactly one target and delegates nothing")
    custom = next(iter(signed.targets.values())).custom
    if not isinstance(custom, dict):
        raise MetadataError("the director says nothing about the device")
    try:
        order = from_json(custom)
    except (ContractError, ValueError) as error:
        raise MetadataError(f"director: {error}") from error
    if order.device_id != expected.device_id:
        raise WrongDeviceError("the document is for another device")
    if order.key_thumbprint != expected.key_thumbprint:
        raise WrongDeviceError("the document is for another key")
    if order.nonce != expected.nonce:
        raise NonceError("the document does not echo the nonce of this request")
    return order
