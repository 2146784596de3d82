"""Nonces with which a device without a clock may sign: `t.<Unix seconds>.<random>.<mac>`. Pure.

    server secret -(HMAC-SHA256)-> nonce key -(HMAC-SHA256)-> nonce

A signature over such a nonce is as fresh as the nonce: this platform made it a moment ago, so the
signature was made after that, whatever the device's clock says. Nothing is stored for one until it
is used, and then for as long as any nonce.
"""

import hmac
import re
from typing import Final

PURPOSE: Final = b"sparsefleet.time-nonce/1"
LIFE_S: Final = 60
RANDOM_BYTES: Final = 8
MAC_HEX: Final = 32
_NONCE: Final = re.compile(r"(t\.(\d{1,10})\.[0-9a-f]{16})\.([0-9a-f]{32})", re.ASCII)


def nonce_key(secret: str) -> bytes:
    """Return the key for time nonces, derived from the server's secret."""
    return hmac.digest(secret.encode("utf-8"), PURPOSE, "sha256")


def issue(key: bytes, now: float, random: bytes) -> str:
    """Return a nonce that is good for `LIFE_S` seconds from `now`, Unix seconds."""
    text = f"t.{int(now)}.{random.hex()}"
    return f"{text}.{_mac(key, text)}"


def is_fresh(key: bytes, nonce: str, now: float) -> bool:
    """Return whether this platform made a nonce in the last `LIFE_S` seconds."""
    match = _NONCE.fullmatch(nonce)
    if match is None or not hmac.compare_digest(_mac(key, match[1]), match[3]):
        return False
    return 0 <= int(now) - int(match[2]) <= LIFE_S


def _mac(key: bytes, text: str) -> str:
    return hmac.digest(key, text.encode("ascii"), "sha256").hex()[:MAC_HEX]
