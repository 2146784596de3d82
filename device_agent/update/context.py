"""What the device knows about the update in progress; journalled with every state."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from compiler.contract.canonical import Json, require_sha256
from compiler.contract.errors import ContractError
from compiler.contract.protocol import (
    DeltaOffer,
    NetworkPolicy,
    Offer,
    OfferKind,
    ReportFact,
    UpdateState,
    delta_offer_from_json,
    integer,
    text,
)
from device_agent.errors import AgentError


@dataclass(frozen=True, slots=True)
class UpdateContext:
    """Facts of one update.

    Attributes:
        manifest_size: Bytes of the release manifest; 0 until it was verified.
        assignment_seq: Of the verified assignment.
        security_floor: That the assignment demands.
        network_policy: What the assignment lets this device fetch on a metered network.
        base_sha256: Manifest that the delta starts from, empty without a delta.
        content_key: Wrapped key of a confidential bundle, base64; empty for any other.
        delta: Signed offer of a delta; None when there is none or it proved useless.
        needed_bytes: Section bytes that were missing when the download began.
        fetched_before: Payload bytes fetched in earlier rounds (a delta that proved useless).
        in_place: Whether the objects of the running bundle are patched, see `low_space`.
        note: What that means here, for people.
        confirm_deadline: Unix time by which the bundle should be committed, seconds; 0 for none.
        fallbacks: How often a delta proved useless, so that sections were fetched whole.
        repairs: How often staging found a section damaged.
        resumes: Starts of the agent in the present state.
        seq: Reports made so far.
        outcome, code, message: How it ended, or will when cleaning is done.
        is_denied: Whether it ended in a way that speaks against the bundle.
        told: Facts reported so far, each once, with commas between.
    """

    update_id: int
    attempt: int
    kind: OfferKind
    version: str
    manifest_sha256: str
    manifest_size: int = 0
    assignment_seq: int = 0
    security_floor: int = 0
    network_policy: NetworkPolicy = NetworkPolicy.ANY
    base_sha256: str = ""
    content_key: str = ""
    delta: DeltaOffer | None = None
    needed_bytes: int = 0
    fetched_before: int = 0
    in_place: bool = False
    note: str = ""
    confirm_deadline: int = 0
    fallbacks: int = 0
    repairs: int = 0
    resumes: int = 0
    seq: int = 0
    outcome: UpdateState | None = None
    code: str = ""
    message: str = ""
    is_denied: bool = False
    told: str = ""

    @property
    def offer(self) -> tuple[int, int]:
        """Return what tells one offer from another."""
        return self.update_id, self.attempt

    def is_for(self, offer: Offer) -> bool:
        """Return whether this is the update of `offer`, in the same attempt."""
        return self.offer == (offer.update_id, offer.attempt)

    @property
    def end_fact(self) -> ReportFact:
        """Return what the last report says beside the outcome."""
        return ReportFact.DENIED if self.is_denied else ReportFact.NONE

    def has_told(self, fact: ReportFact) -> bool:
        """Return whether a fact was reported."""
        return fact.value in self.told.split(",")

    def telling(self, fact: ReportFact) -> "UpdateContext":
        """Return the context after a fact was reported."""
        return replace(self, told=",".join(filter(None, (self.told, fact.value))))

    def failed(
        self, error: AgentError, *, ran: bool = False, is_denied: bool = False
    ) -> "UpdateContext":
        """Return the context after `error` stopped the update; the first reason stays.

        Args:
            error: What stopped it.
            ran: Whether the bundle was the running one, so that something is restored now.
            is_denied: Whether it speaks against the bundle.
        """
        if self.outcome is not None:
            return self
        outcome = UpdateState.ROLLED_BACK if ran else error.ends_as
        return replace(
            self, outcome=outcome, code=error.code, message=str(error), is_denied=is_denied
        )

    def succeeded(self) -> "UpdateContext":
        """Return the context of an update that is done."""
        return replace(self, outcome=UpdateState.SUCCEEDED, code="", message="")

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form."""
        document: dict[str, Json] = {name: getattr(self, name) for name in _PLAIN}
        delta = self.delta
        document["kind"] = self.kind.value
        document["network_policy"] = self.network_policy.value
        document["outcome"] = None if self.outcome is None else self.outcome.value
        document["delta"] = None if delta is None else delta.to_json()
        return document


_NUMBERS = (
    "update_id",
    "attempt",
    "manifest_size",
    "assignment_seq",
    "security_floor",
    "needed_bytes",
    "fetched_before",
    "confirm_deadline",
    "fallbacks",
    "repairs",
    "resumes",
    "seq",
)
_TEXTS = (
    "version",
    "manifest_sha256",
    "base_sha256",
    "content_key",
    "code",
    "message",
    "note",
    "told",
)
_FLAGS = ("in_place", "is_denied")
_PLAIN = (*_NUMBERS, *_TEXTS, *_FLAGS)
# Left out by agents from before they existed.
_YOUNGER: Mapping[str, Json] = {
    "confirm_deadline": 0,
    "fallbacks": 0,
    "content_key": "",
    "note": "",
    "told": "",
}


def context_of(offer: Offer) -> UpdateContext:
    """Return the context of an update that was just offered."""
    return UpdateContext(
        offer.update_id, offer.attempt, offer.kind, offer.version, offer.manifest_sha256
    )


def context_from_json(document: Mapping[str, Json]) -> UpdateContext:
    """Parse a journalled context.

    Raises:
        ContractError: A field is missing or wrong.
    """
    document = {**_YOUNGER, **document}
    numbers = {name: integer(document, name) for name in _NUMBERS}
    texts = {name: text(document, name) for name in _TEXTS}
    require_sha256(texts["manifest_sha256"], "manifest_sha256")
    outcome, delta = document.get("outcome"), document.get("delta")
    try:
        return UpdateContext(
            kind=OfferKind(text(document, "kind")),
            network_policy=NetworkPolicy(str(document.get("network_policy", "any"))),
            delta=delta_offer_from_json(delta) if isinstance(delta, Mapping) else None,
            outcome=None if outcome is None else UpdateState(str(outcome)),
            **{name: document.get(name) is True for name in _FLAGS},  # type: ignore[arg-type]
            **numbers,  # type: ignore[arg-type]
            **texts,  # type: ignore[arg-type]
        )
    except ValueError as error:
        raise ContractError(f"journal: {error}") from error
