"""Requests signed by a device key, as an agent sends them."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from http_message_signatures import HTTPMessageSigner, MappingKeyResolver, algorithms

from compiler.contract.canonical import sha256_hex
from compiler.contract.protocol import SIGNATURE_COMPONENTS, SIGNATURE_TAG


@dataclass(slots=True)
class Message:
    """A request as the signature library sees it."""

    method: str
    url: str
    headers: dict[str, str] = field(default_factory=dict)


def signed_headers(
    key: Ed25519PrivateKey,
    public_key: bytes,
    *,
    url: str,
    body: bytes,
    method: str = "POST",
    created: datetime | None = None,
    nonce: str | None = None,
    tag: str = SIGNATURE_TAG,
    components: Sequence[str] = SIGNATURE_COMPONENTS,
    keyid: str = "",
) -> dict[str, str]:
    """Return the headers of a signed request."""
    message = Message(method, url, {"Content-Type": "application/json"})
    keyid = keyid or sha256_hex(public_key)
    signer = HTTPMessageSigner(
        signature_algorithm=algorithms.ED25519,
        key_resolver=MappingKeyResolver(public_keys={}, private_keys={keyid: key}),
    )
    signer.sign(
        message,
        key_id=keyid,
        created=created or datetime.now(UTC),
        nonce=secrets.token_hex(16) if nonce is None else nonce,
        tag=tag,
        covered_component_ids=components,
        body=body,
    )
    return message.headers
