"""Canonical JSON: one value, one byte string, so that a digest over it means something.

Rules: UTF-8, keys sorted, no white space, no NaN or infinity, duplicate keys refused. Floats are
allowed only where a schema asks for them and are written by Python's shortest round-trip form (RFC
8785 does the same for the values we use).
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence

from compiler.contract.errors import ContractError, LimitExceededError

Json = str | int | float | bool | None | Sequence["Json"] | Mapping[str, "Json"]

MAX_DOCUMENT_BYTES = 16 * 1024 * 1024
SHA256_PATTERN = re.compile(r"[0-9a-f]{64}")
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def canonical_bytes(value: Json) -> bytes:
    """Return the canonical UTF-8 JSON encoding of `value`.

    Raises:
        ContractError: It has no such encoding: not finite, too deep, a cycle, half of a pair of
            surrogates, or an integer of too many digits.
    """
    try:
        text = json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
        return text.encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise ContractError(f"not representable as canonical JSON: {error}") from error


def parse_object(data: bytes, *, limit_bytes: int = MAX_DOCUMENT_BYTES) -> dict[str, Json]:
    """Parse one JSON object strictly.

    Raises:
        LimitExceededError: `data` is longer than `limit_bytes`; it was not parsed.
        ContractError: Not UTF-8 JSON, no object, duplicate keys, too deep, not finite, or
            a string that is no Unicode text (half of a surrogate pair).
    """
    if len(data) > limit_bytes:
        raise LimitExceededError(f"document of {len(data)} bytes, limit {limit_bytes}")
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique_pairs,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ContractError(f"not a strict JSON document: {error}") from error
    if not isinstance(value, dict):
        raise ContractError("a JSON object is expected")
    if _SURROGATE_ESCAPE.search(data):
        _require_unicode(value)
    return value


def sha256_hex(data: bytes | bytearray | memoryview) -> str:
    """Return the lower-case hexadecimal SHA-256 of `data`."""
    return hashlib.sha256(data).hexdigest()


def require_sha256(value: object, what: str) -> str:
    """Return `value` if it is 64 lower-case hexadecimal digits (digests become file names).

    Raises:
        ContractError: It is anything else.
    """
    if not isinstance(value, str) or SHA256_PATTERN.fullmatch(value) is None:
        raise ContractError(
            f"{what} is not a SHA-256 digest", hint="write 64 lower-case hexadecimal digits"
        )
    return value


def _require_unicode(value: dict[str, Json]) -> None:
    """Refuse strings that no UTF-8 text can hold; only an escape can bring one in."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (UnicodeEncodeError, RecursionError) as error:
        raise ContractError("half of a surrogate pair in a JSON string") from error


def _unique_pairs(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ContractError("duplicate key in JSON object")
    return result


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ContractError(f"{text} is beyond the range of a double")
    return value


def _refuse_constant(name: str) -> Json:
    raise ContractError(f"{name} is not allowed in JSON")
