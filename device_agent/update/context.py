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
        repairs: How often staging found a section damaged.
        resumes: Starts of the agent in the present state.
        seq: Reports made so far.
        outcome, code, message: How it ended, or will when cleaning is done.
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
    repairs: int = 0
    resumes: int = 0
    seq: int = 0
    outcome: UpdateState | None = None
    code: str = ""
    message: str = ""

    @property
    def offer(self) -> tuple[int, int]:
        """Return what tells one offer from another."""
        return self.update_id, self.attempt

    def is_for(self, offer: Offer) -> bool:
        """Return whether this is the update of `offer`, in the same attempt."""
        return self.offer == (offer.update_id, offer.attempt)

    def failed(self, error: AgentError, *, ran: bool = False) -> "UpdateContext":
        """Return the context after `error` stopped the update; the first reason stays.

        Args:
            error: What stopped it.
            ran: Whether the bundle was the running one, so that something is restored now.
        """
        if self.outcome is not None:
            return self
        outcome = UpdateState.ROLLED_BACK if ran else error.ends_as
        return replace(self, outcome=outcome, code=error.code, message=str(error))

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
    "repairs",
    "resumes",
    "seq",
)
_TEXTS = ("version", "manifest_sha256", "base_sha256", "content_key", "code", "message")
_PLAIN = (*_NUMBERS, *_TEXTS)


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
    numbers = {name: integer(document, name) for name in _NUMBERS}
    document = {"content_key": "", **document}  # journals of older agents have none
    texts = {name: text(document, name) for name in _TEXTS}
    require_sha256(texts["manifest_sha256"], "manifest_sha256")
    outcome, delta = document.get("outcome"), document.get("delta")
    try:
        return UpdateContext(
            kind=OfferKind(text(document, "kind")),
            network_policy=NetworkPolicy(str(document.get("network_policy", "any"))),
            delta=delta_offer_from_json(delta) if isinstance(delta, Mapping) else None,
            outcome=None if outcome is None else UpdateState(str(outcome)),
            **numbers,  # type: ignore[arg-type]
            **texts,  # type: ignore[arg-type]
        )
    except ValueError as error:
        raise ContractError(f"journal: {error}") from error
