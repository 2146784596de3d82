"""Checked access to parsed JSON: what a document of the contract may hold, or a typed error."""

from collections.abc import Mapping

from compiler.contract.canonical import Json
from compiler.contract.errors import ContractError, LimitExceededError


def require_fields(value: Json, expected: frozenset[str], what: str) -> Mapping[str, Json]:
    """Return `value` if it is an object with exactly the fields `expected`.

    Raises:
        ContractError: It is not; the message names the odd fields.
    """
    if not isinstance(value, dict):
        raise ContractError(f"{what} must be an object")
    if value.keys() != expected:
        raise ContractError(f"{what}: missing or unknown fields {sorted(value.keys() ^ expected)}")
    return value


def require_object(value: Json, what: str, most: int) -> Mapping[str, Json]:
    """Return `value` if it is an object of at most `most` members.

    Raises:
        ContractError: It is no object.
        LimitExceededError: It has too many members.
    """
    if not isinstance(value, dict):
        raise ContractError(f"{what} must be an object")
    if len(value) > most:
        raise LimitExceededError(f"{len(value)} {what}, limit {most}")
    return value


def require_list(value: Json, what: str, most: int) -> list[Json]:
    """Return `value` if it is a list of at most `most` items.

    Raises:
        ContractError: It is no list.
        LimitExceededError: It is too long.
    """
    if not isinstance(value, list):
        raise ContractError(f"{what} must be a list")
    if len(value) > most:
        raise LimitExceededError(f"{len(value)} {what}, limit {most}")
    return value


def require_integer(value: Json, what: str, low: int, high: int) -> int:
    """Return `value` if it is an integer in `low`..`high`; a boolean or a float is none.

    Raises:
        ContractError: It is anything else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ContractError(f"{what} must be an integer in {low}..{high}")
    return value


def require_text(value: Json, what: str, most: int) -> str:
    """Return `value` if it is a text of 1 to `most` characters, without lone surrogates.

    Raises:
        ContractError: It is anything else.
    """
    if not isinstance(value, str) or not 0 < len(value) <= most or not _is_unicode(value):
        raise ContractError(f"{what} must be a text of 1 to {most} characters")
    return value


def _is_unicode(value: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in value)
