"""The device protocol: paths, signatures, tokens and documents under `/d/v1/`.

Chain of one update, device on the left:

    POST enrol          signed by the device key (RFC 9421)   -> device id, trust anchors
    POST token          signed by the device key              -> session token (HMAC, short-lived)
    GET  time-nonce                                           -> time and nonce, for a device whose
    clock is wrong: it signs that nonce
    POST rotate-key     signed by the old and the new key     -> the device has the new key
    GET  poll           session token, `If-None-Match`        -> 304, or an offer with the time of
    the next poll
    GET  updates/<id>/assignment?nonce=&network=              -> director assignment (TUF targets
    document) that echoes the nonce; 425 while the update has to wait for another network
    GET  /tuf/...                                             -> update metadata, release manifest
    GET  blobs/<sha256>?update=<id>                           -> bytes (Range, If-Range); 410 once
    the update may no longer proceed
    POST updates/<id>/report                                  -> facts about the update, ordered by
    (attempt, seq)
    GET  rules?nonce=                                         -> degrade rules, signed as an
    assignment is; 404 while none were ever set
    POST telemetry                                            -> batches, idempotent on (device,
    boot, seq)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar

from compiler.contract.canonical import Json, canonical_bytes, parse_object, require_sha256
from compiler.contract.errors import ContractError

DEVICE_PREFIX: Final = "/d/v1/"
PATH_ENROL: Final = "/d/v1/enrol"
PATH_TOKEN: Final = "/d/v1/token"  # noqa: S105 -- a path, not a secret
PATH_POLL: Final = "/d/v1/poll"
PATH_TELEMETRY: Final = "/d/v1/telemetry"
PATH_TIME: Final = "/d/v1/time-nonce"
PATH_ROTATE: Final = "/d/v1/rotate-key"
PATH_TUF: Final = "/tuf/"
ASSIGNMENT_SCHEMA: Final = "sparsefleet.assignment/1"
REPORT_SCHEMA: Final = "sparsefleet.report/1"
MAX_DOCUMENT_BYTES: Final = 256 * 1024
MAX_REPORT_TEXT: Final = 2_000
NONCE_BYTES: Final = 16
MAX_INTEGER: Final = (1 << 63) - 1
MAX_SEQ: Final = (1 << 31) - 1
MAX_SHOWN: Final = 64
"""Characters of a value that an error repeats."""
MAX_DOWNLOADED_BYTES: Final = 1 << 44  # 16 TiB; a sum over many devices still fits 63 bits

# RFC 9421: what a signature by the device key has to cover, and for how long it is good.
SIGNATURE_TAG: Final = "sparsefleet-device"
SIGNATURE_COMPONENTS: Final = (
    "@method",
    "@authority",
    "@target-uri",
    "content-digest",
    "content-type",
)
SIGNATURE_MAX_AGE_S: Final = 300
# The second signature of a rotation, by the new key.
NEW_KEY_TAG: Final = "sparsefleet-new-key"
# Code of the answer to a signature that is good but for its time.
CODE_CLOCK: Final = "fleet.clock"

Member = TypeVar("Member", bound=StrEnum)


class UpdateState(StrEnum):
    """State of one device taking one bundle; the table is `fleet.states.UPDATE_TRANSITIONS`."""

    QUEUED = "queued"
    OFFERED = "offered"
    AWAITING_CONSENT = "awaiting_consent"
    DOWNLOADING = "downloading"
    DOWNLOADED = "downloaded"
    APPLYING = "applying"
    STAGED = "staged"
    ACTIVATING = "activating"
    PROBATION = "probation"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    ROLLED_BACK = "rolled_back"
    REJECTED = "rejected"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    SUPERSEDED = "superseded"
    REMOVED = "removed"
    SKIPPED = "skipped"


TERMINAL_STATES: Final = frozenset(
    {
        UpdateState.SUCCEEDED,
        UpdateState.FAILED,
        UpdateState.ROLLED_BACK,
        UpdateState.REJECTED,
        UpdateState.TIMED_OUT,
        UpdateState.CANCELLED,
        UpdateState.SUPERSEDED,
        UpdateState.REMOVED,
        UpdateState.SKIPPED,
    }
)


class ReportFact(StrEnum):
    """What a report says beside the state: a fact of its own that moves no state."""

    NONE = ""
    DENIED = "denied"  # the bundle failed here and is not tried again before it is told to
    IN_PLACE = "in_place"  # space is short: the running bundle's own files are patched
    UNCONFIRMED = "unconfirmed"  # the assignment's deadline passed before the bundle was committed
    TOO_LATE = "too_late"  # the update was withdrawn when it ran already: it goes on to its end


class OfferKind(StrEnum):
    """What an offer asks for."""

    INSTALL = "install"
    ROLLBACK = "rollback"  # go back to the bundle named, whose sections the device already has


class Network(StrEnum):
    """What a device says about the network it is on."""

    UNKNOWN = "unknown"  # treated as not metered
    UNMETERED = "unmetered"
    METERED = "metered"


class NetworkPolicy(StrEnum):
    """What a rollout lets devices on metered networks fetch; for others it changes nothing."""

    ANY = "any"
    DELTA_ONLY = "delta_only"  # a delta, never whole sections
    WAIT_UNMETERED = "wait_unmetered"  # nothing, until the rollout's deadline has passed


@dataclass(frozen=True, slots=True)
class Offer:
    """One update offered to one device."""

    update_id: int
    attempt: int
    kind: OfferKind
    version: str
    manifest_sha256: str


@dataclass(frozen=True, slots=True)
class PollAnswer:
    """The whole answer to a poll. `offer` is None when there is nothing to do.

    `arm` and `rollout_id` tag telemetry: `treatment` or `control` in a running rollout, else empty.
    """

    poll_after_s: float
    offer: Offer | None
    rollout_id: int | None
    stage: int | None
    arm: str

    def to_bytes(self) -> bytes:
        """Return the canonical JSON body."""
        offer: Json = None
        if self.offer is not None:
            offer = {
                "update_id": self.offer.update_id,
                "attempt": self.offer.attempt,
                "kind": self.offer.kind.value,
                "version": self.offer.version,
                "manifest_sha256": self.offer.manifest_sha256,
            }
        return canonical_bytes(
            {
                "poll_after_s": self.poll_after_s,
                "offer": offer,
                "rollout_id": self.rollout_id,
                "stage": self.stage,
                "arm": self.arm,
            }
        )


def parse_poll_answer(data: bytes) -> PollAnswer:
    """Parse a poll answer.

    Raises:
        ContractError: A field is missing or of the wrong type.
    """
    document = parse_object(data, limit_bytes=MAX_DOCUMENT_BYTES)
    delay = document.get("poll_after_s")
    if isinstance(delay, bool) or not isinstance(delay, (int, float)) or not 0 < delay < 86_400:
        raise ContractError("poll_after_s must be a number of seconds in (0, 86400)")
    arm = document.get("arm", "")
    if not isinstance(arm, str):
        raise ContractError("arm must be a string")
    offer = document.get("offer")
    return PollAnswer(
        poll_after_s=float(delay),
        offer=None if offer is None else _offer(offer),
        rollout_id=optional_integer(document, "rollout_id"),
        stage=optional_integer(document, "stage"),
        arm=arm,
    )


def _offer(value: Json) -> Offer:
    if not isinstance(value, Mapping):
        raise ContractError("offer must be an object")
    return Offer(
        update_id=integer(value, "update_id"),
        attempt=integer(value, "attempt"),
        kind=one_of(OfferKind, value.get("kind"), "offer kind"),
        version=text(value, "version"),
        manifest_sha256=require_sha256(value.get("manifest_sha256"), "manifest_sha256"),
    )


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """A fact about one update, ordered by (attempt, seq) and never by a clock of the device.

    Attributes:
        state: State the device is in now.
        running_manifest_sha256: What it runs at this moment, or an empty string before the first
            bundle.
        downloaded_bytes: Payload bytes fetched for this update so far.
        code: Error code when the state is a bad end, else empty.
        fact: What else there is to say, if anything.
    """

    update_id: int
    attempt: int
    seq: int
    state: UpdateState
    running_manifest_sha256: str
    downloaded_bytes: int
    code: str
    message: str
    fact: ReportFact = ReportFact.NONE

    def to_bytes(self) -> bytes:
        """Return the canonical JSON body."""
        return canonical_bytes(
            {
                "schema": REPORT_SCHEMA,
                "update_id": self.update_id,
                "attempt": self.attempt,
                "seq": self.seq,
                "state": self.state.value,
                "running_manifest_sha256": self.running_manifest_sha256,
                "downloaded_bytes": self.downloaded_bytes,
                "code": self.code,
                "message": self.message.replace("\0", "")[:MAX_REPORT_TEXT],
                "fact": self.fact.value,
            }
        )


def parse_report(data: bytes) -> UpdateReport:
    """Parse an update report.

    Raises:
        ContractError: A field is missing, of the wrong type, or the state or fact is unknown.
    """
    document = parse_object(data, limit_bytes=MAX_DOCUMENT_BYTES)
    if document.get("schema") != REPORT_SCHEMA:
        raise ContractError(f"report schema must be {REPORT_SCHEMA!r}")
    running = text(document, "running_manifest_sha256")
    return UpdateReport(
        update_id=integer(document, "update_id"),
        attempt=integer(document, "attempt"),
        seq=integer(document, "seq", MAX_SEQ),
        state=one_of(UpdateState, document.get("state"), "update state"),
        running_manifest_sha256=require_sha256(running, "running_manifest_sha256")
        if running
        else "",
        downloaded_bytes=integer(document, "downloaded_bytes", MAX_DOWNLOADED_BYTES),
        code=text(document, "code"),
        message=text(document, "message")[:MAX_REPORT_TEXT],
        # Agents from before facts leave it out.
        fact=one_of(ReportFact, document.get("fact", ""), "fact"),
    )


@dataclass(frozen=True, slots=True)
class DeltaOffer:
    """A delta from the bundle a device runs to the assigned one; signed inside the assignment.

    `sha256` and `size_bytes` are of the bytes that travel. Those of a confidential bundle are
    sealed, and `plain_sha256` and `plain_bytes` are what they open to; else empty and 0.
    """

    base_manifest_sha256: str
    sha256: str
    size_bytes: int
    plain_sha256: str = ""
    plain_bytes: int = 0

    @property
    def opened(self) -> "DeltaOffer":
        """Return the offer with the bytes that the delta codec reads."""
        if not self.plain_sha256:
            return self
        return DeltaOffer(self.base_manifest_sha256, self.plain_sha256, self.plain_bytes)

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form."""
        document: dict[str, Json] = {
            "base_manifest_sha256": self.base_manifest_sha256,
            "sha256": self.sha256,
            "size_bytes": self.size_bytes,
        }
        if self.plain_sha256:
            document["plain_sha256"] = self.plain_sha256
            document["plain_bytes"] = self.plain_bytes
        return document


def delta_offer_from_json(value: Mapping[str, Json]) -> DeltaOffer:
    """Parse an offer of a delta.

    Raises:
        ContractError: A field is missing or of the wrong type.
    """
    is_sealed = value.get("plain_sha256") is not None
    return DeltaOffer(
        base_manifest_sha256=require_sha256(
            value.get("base_manifest_sha256"), "base_manifest_sha256"
        ),
        sha256=require_sha256(value.get("sha256"), "delta sha256"),
        size_bytes=integer(value, "size_bytes"),
        plain_sha256=require_sha256(value["plain_sha256"], "plain_sha256") if is_sealed else "",
        plain_bytes=integer(value, "plain_bytes") if is_sealed else 0,
    )


@dataclass(frozen=True, slots=True)
class Assignment:
    """The `custom` part of a director's targets document: the whole state a device shall have.

    `network_policy` is said only if it is not `any`.
    `content_key` opens a confidential bundle: base64 of a key wrapped for this device, or empty.

    Attributes:
        retry_failed: Somebody decided that a bundle which failed here is tried once more.
        confirm_deadline: Unix time, seconds: a device that has not committed by then says so; 0 for
            none.
    """

    device_id: str
    key_thumbprint: str
    assignment_seq: int
    nonce: str
    kind: OfferKind
    security_floor: int
    delta: DeltaOffer | None
    network_policy: NetworkPolicy = NetworkPolicy.ANY
    content_key: str = ""
    retry_failed: bool = False
    confirm_deadline: int = 0

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form stored as `custom` of the one target."""
        document: dict[str, Json] = {
            "schema": ASSIGNMENT_SCHEMA,
            "device_id": self.device_id,
            "key_thumbprint": self.key_thumbprint,
            "assignment_seq": self.assignment_seq,
            "nonce": self.nonce,
            "kind": self.kind.value,
            "security_floor": self.security_floor,
            "delta": None if self.delta is None else self.delta.to_json(),
            "retry_failed": self.retry_failed,
            "confirm_deadline": self.confirm_deadline,
        }
        if self.network_policy is not NetworkPolicy.ANY:
            document["network_policy"] = self.network_policy.value
        if self.content_key:
            document["content_key"] = self.content_key
        return document


def assignment_from_json(document: Mapping[str, Json]) -> Assignment:
    """Build an assignment from the verified `custom` object.

    Raises:
        ContractError: A field is missing or of the wrong type.
    """
    if document.get("schema") != ASSIGNMENT_SCHEMA:
        raise ContractError(f"assignment schema must be {ASSIGNMENT_SCHEMA!r}")
    delta = document.get("delta")
    if delta is not None and not isinstance(delta, Mapping):
        raise ContractError("delta must be an object or null")
    policy = document.get("network_policy", NetworkPolicy.ANY.value)
    retry_failed = document.get("retry_failed", False)
    if not isinstance(retry_failed, bool):
        raise ContractError("retry_failed must be true or false")
    return Assignment(
        device_id=text(document, "device_id"),
        key_thumbprint=require_sha256(document.get("key_thumbprint"), "key_thumbprint"),
        assignment_seq=integer(document, "assignment_seq"),
        nonce=text(document, "nonce"),
        kind=one_of(OfferKind, document.get("kind"), "offer kind"),
        security_floor=integer(document, "security_floor"),
        delta=None if delta is None else delta_offer_from_json(delta),
        network_policy=one_of(NetworkPolicy, policy, "network policy"),
        content_key=text(document, "content_key") if "content_key" in document else "",
        retry_failed=retry_failed,
        confirm_deadline=optional_integer(document, "confirm_deadline") or 0,
    )


def integer(document: Mapping[str, Json], name: str, limit: int = MAX_INTEGER) -> int:
    """Return the non-negative integer field `name`, at most `limit`.

    Raises:
        ContractError: It is missing, not an integer, negative, or above `limit`.
    """
    value = document.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ContractError(f"{name} must be a non-negative integer")
    if value > limit:
        raise ContractError(f"{name} is above its limit of {limit}")
    return value


def optional_integer(document: Mapping[str, Json], name: str) -> int | None:
    """Return the non-negative integer field `name`, or None when it is null or absent."""
    return None if document.get(name) is None else integer(document, name)


def one_of(kind: type[Member], value: Json, name: str) -> Member:
    """Return the member of an enumeration of texts whose value is `value`.

    Raises:
        ContractError: There is none; `name` says of what.
    """
    found = next((member for member in kind if member == value), None)
    if found is None:
        raise ContractError(f"unknown {name} {str(value)[:MAX_SHOWN]!r}")
    return found


def text(document: Mapping[str, Json], name: str) -> str:
    """Return the string field `name`.

    Raises:
        ContractError: It is missing, not a string, or holds a NUL (no database column can).
    """
    value = document.get(name)
    if not isinstance(value, str) or "\0" in value:
        raise ContractError(f"{name} must be a string without NUL")
    return value
