"""Session tokens of devices: `<device pk>.<generation>.<expiry, Unix seconds>.<mac>`. Pure.

    server secret -(HMAC-SHA256)-> token key -(HMAC-SHA256)-> token

Checking one takes no look-up: the numbers are readable, the mac proves that this platform wrote
them. A token is taken back by raising the device's generation; the poll path knows the few devices
whose generation is above 0.
"""

import hmac
from dataclasses import dataclass
from typing import Final

PURPOSE: Final = b"sparsefleet.session-token/1"
MAC_HEX: Final = 32
MAX_DIGITS: Final = 18


@dataclass(frozen=True, slots=True)
class SessionToken:
    """What a valid token says; `expires_at` is Unix time, seconds."""

    device_pk: int
    generation: int
    expires_at: int


def token_key(secret: str) -> bytes:
    """Return the key for session tokens, derived from the server's secret."""
    return hmac.digest(secret.encode("utf-8"), PURPOSE, "sha256")


def issue(key: bytes, token: SessionToken) -> str:
    """Return the text of a token."""
    text = f"{token.device_pk}.{token.generation}.{token.expires_at}"
    return f"{text}.{_mac(key, text)}"


def check(key: bytes, text: str, now: float) -> SessionToken | None:
    """Return what a token says, or None when it is malformed, forged or expired.

    Args:
        key: From `token_key`.
        text: As the device sent it.
        now: Unix time, seconds.
    """
    if len(text) > 4 * MAX_DIGITS + MAC_HEX or not text.isascii():
        return None
    signed, _, mac = text.rpartition(".")
    if not hmac.compare_digest(_mac(key, signed), mac):
        return None
    device_pk, generation, expires_at = (int(part) for part in signed.split("."))
    if expires_at <= now:
        return None
    return SessionToken(device_pk, generation, expires_at)


def bearer(header: str) -> str:
    """Return the token of an `Authorization` header, or an empty string."""
    scheme, _, text = header.partition(" ")
    return text.strip() if scheme.lower() == "bearer" else ""


def _mac(key: bytes, text: str) -> str:
    return hmac.digest(key, text.encode("ascii"), "sha256").hex()[:MAC_HEX]
