"""Requests signed by a device key: RFC 9421 with required components, a body digest and a nonce.

    device key -(signs)-> method, authority, target URI, body digest, content type, time, nonce

The signature proves possession of the key named by `keyid`, the SHA-256 of the raw public key. It
is fresh by its time, or, for a device whose clock is wrong, by a nonce that this platform handed
out a moment ago. Each nonce is accepted once per key while its signature could still be replayed.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from cryptography.exceptions import InvalidKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from django.conf import settings
from django.db import IntegrityError, transaction
from http_message_signatures import HTTPMessageVerifier, HTTPSignatureKeyResolver, algorithms
from http_message_signatures.exceptions import HTTPMessageSignaturesException, InvalidSignature

from builds.common.clock import Clock, SystemClock
from compiler.contract.canonical import sha256_hex
from compiler.contract.protocol import SIGNATURE_COMPONENTS, SIGNATURE_MAX_AGE_S, SIGNATURE_TAG
from fleet.common.time_nonces import RANDOM_BYTES, is_fresh, issue, nonce_key
from fleet.errors import DeviceClockError, DeviceSignatureError, ReplayError
from fleet.models import DeviceNonce

MIN_NONCE: Final = 16
MAX_NONCE: Final = 64
SKEW_S: Final = 5
TIMES: Final = ("created", "expires")
MAX_TIME_S: Final = 1 << 40
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


@dataclass(frozen=True, slots=True)
class SignedBy:
    """Who signed: thumbprint of the key, and how far its clock is ahead of ours, seconds."""

    thumbprint: str
    clock_skew_s: int


class _Verifier(HTTPMessageVerifier):
    """Leaves time to `_require_fresh`, which knows nonces that are fresher than any clock."""

    def validate_created_and_expires(self, sig_input: Any, max_age: Any = None) -> None:  # noqa: ANN401, ARG002 -- the library's
        """Check that there is a time; `max_age` is not looked at."""
        if "created" not in sig_input.params:
            raise InvalidSignature('the signature has no "created"')
        if not all(0 <= sig_input.params.get(name, 0) < MAX_TIME_S for name in TIMES):
            raise InvalidSignature("the signature's time is none")


class _OneKey(HTTPSignatureKeyResolver):
    def __init__(self, thumbprint: str, key: Ed25519PublicKey) -> None:
        self._thumbprint = thumbprint
        self._key = key

    def resolve_public_key(self, key_id: str) -> Ed25519PublicKey | None:
        return self._key if key_id == self._thumbprint else None


def signature_require(
    *,
    request: SignedRequest,
    public_key: bytes,
    tag: str = SIGNATURE_TAG,
    clock: Clock | None = None,
) -> SignedBy:
    """Check that the holder of `public_key` made this request, just now and for the first time.

    Args:
        request: As it came.
        public_key: Raw Ed25519 key, 32 bytes.
        tag: Of the signature, when there are several.
        clock: This machine's by default.

    Raises:
        DeviceSignatureError: No such signature, or not over all that it must cover.
        DeviceClockError: It is good, and too old or from the future.
        ReplayError: The nonce was used before.
    """
    thumbprint = sha256_hex(public_key)
    clock = clock or SystemClock()
    try:
        key = Ed25519PublicKey.from_public_bytes(public_key)
    except (ValueError, InvalidKey) as error:
        raise DeviceSignatureError("the public key is not an Ed25519 key") from error
    verifier = _Verifier(
        signature_algorithm=algorithms.ED25519, key_resolver=_OneKey(thumbprint, key)
    )
    try:
        results = verifier.verify(
            request,
            max_age=None,
            expect_tag=tag,
            require_components=SIGNATURE_COMPONENTS,
            body=request.body,
        )
    except (HTTPMessageSignaturesException, ValueError) as error:
        raise DeviceSignatureError(
            f"the request is not properly signed: {error}", hint="sign with the device key"
        ) from error
    nonce = _nonce_of(results)
    skew_s = _require_fresh(results[0].parameters, nonce, clock.now().timestamp())
    _use_nonce(thumbprint, nonce, clock)
    return SignedBy(thumbprint, skew_s)


def time_nonce(*, clock: Clock | None = None) -> tuple[int, str]:
    """Return the time, Unix seconds, and a nonce that may be signed in the next minute."""
    now = (clock or SystemClock()).now().timestamp()
    return int(now), issue(nonce_key(settings.SECRET_KEY), now, secrets.token_bytes(RANDOM_BYTES))


def nonces_forget(*, clock: Clock | None = None) -> int:
    """Remove nonces whose signatures are too old to be accepted anyway; return how many."""
    limit = (clock or SystemClock()).now() - KEEP_NONCES
    return DeviceNonce.objects.filter(at__lt=limit).delete()[0]


def _require_fresh(parameters: Mapping[str, Any], nonce: str, now: float) -> int:
    """Return how far the signer's clock is ahead, seconds.

    Raises:
        DeviceClockError: Neither its time nor its nonce is of this moment.
    """
    created = int(parameters["created"])
    expires = int(parameters.get("expires", created + SIGNATURE_MAX_AGE_S))
    end = min(expires, created + SIGNATURE_MAX_AGE_S)
    in_time = created - SKEW_S <= now <= end + SKEW_S
    if not in_time and not is_fresh(nonce_key(settings.SECRET_KEY), nonce, now):
        raise DeviceClockError(
            f"the signature's time is {created - now:+.0f} s from the time here",
            hint="set the device's clock, or sign a nonce of /d/v1/time-nonce",
        )
    return round(created - now)


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
