"""Requests signed by a device key: RFC 9421 with required components, a body digest and a nonce.

    device key -(signs)-> method, authority, target URI, body digest, content type, time, nonce

The signature proves possession of the key named by `keyid`, the SHA-256 of the raw public key. Each
nonce is accepted once per key while its signature would still be young enough to be replayed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from cryptography.exceptions import InvalidKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from django.db import IntegrityError, transaction
from http_message_signatures import HTTPMessageVerifier, HTTPSignatureKeyResolver, algorithms
from http_message_signatures.exceptions import HTTPMessageSignaturesException

from builds.common.clock import Clock, SystemClock
from compiler.contract.canonical import sha256_hex
from compiler.contract.protocol import SIGNATURE_COMPONENTS, SIGNATURE_MAX_AGE_S, SIGNATURE_TAG
from fleet.errors import DeviceSignatureError, ReplayError
from fleet.models import DeviceNonce

MIN_NONCE: Final = 16
MAX_NONCE: Final = 64
KEEP_NONCES: Final = timedelta(seconds=2 * SIGNATURE_MAX_AGE_S)


@dataclass(frozen=True, slots=True)
class SignedRequest:
    """What a signature is checked against: the request as it came over the wire.

    Attributes:
        url: Absolute, as the device addressed it.
        headers: Names in any case.
        body: Raw bytes.
    """

    method: str
    url: str
    headers: Mapping[str, str]
    body: bytes


class _OneKey(HTTPSignatureKeyResolver):
    def __init__(self, thumbprint: str, key: Ed25519PublicKey) -> None:
        self._thumbprint = thumbprint
        self._key = key

    def resolve_public_key(self, key_id: str) -> Ed25519PublicKey | None:
        return self._key if key_id == self._thumbprint else None


def signature_require(
    *, request: SignedRequest, public_key: bytes, clock: Clock | None = None
) -> str:
    """Check that the holder of `public_key` made this request, just now and for the first time.

    Returns:
        The thumbprint of the key.

    Raises:
        DeviceSignatureError: No such signature, too old, or not over all that it must cover.
        ReplayError: The nonce was used before.
    """
    thumbprint = sha256_hex(public_key)
    try:
        key = Ed25519PublicKey.from_public_bytes(public_key)
    except (ValueError, InvalidKey) as error:
        raise DeviceSignatureError("the public key is not an Ed25519 key") from error
    verifier = HTTPMessageVerifier(
        signature_algorithm=algorithms.ED25519, key_resolver=_OneKey(thumbprint, key)
    )
    try:
        results = verifier.verify(
            request,
            max_age=timedelta(seconds=SIGNATURE_MAX_AGE_S),
            expect_tag=SIGNATURE_TAG,
            require_components=SIGNATURE_COMPONENTS,
            body=request.body,
        )
    except (HTTPMessageSignaturesException, ValueError) as error:
        raise DeviceSignatureError(
            f"the request is not properly signed: {error}",
            hint="sign with the device key; check that the device's clock is right",
        ) from error
    _use_nonce(thumbprint, _nonce_of(results), clock or SystemClock())
    return thumbprint


def nonces_forget(*, clock: Clock | None = None) -> int:
    """Remove nonces whose signatures are too old to be accepted anyway; return how many."""
    limit = (clock or SystemClock()).now() - KEEP_NONCES
    return DeviceNonce.objects.filter(at__lt=limit).delete()[0]


def _nonce_of(results: list[Any]) -> str:
    nonces = [result.nonce for result in results]
    if len(nonces) != 1 or not nonces[0] or not MIN_NONCE <= len(nonces[0]) <= MAX_NONCE:
        raise DeviceSignatureError(
            f"one signature with a nonce of {MIN_NONCE}..{MAX_NONCE} characters is needed"
        )
    return str(nonces[0])


def _use_nonce(thumbprint: str, nonce: str, clock: Clock) -> None:
    try:
        with transaction.atomic():
            DeviceNonce.objects.create(key_thumbprint=thumbprint, nonce=nonce, at=clock.now())
    except IntegrityError:
        raise ReplayError("this signed request was used before") from None
