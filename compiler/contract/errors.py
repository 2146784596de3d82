"""Errors of the contract: bytes from outside that do not keep the agreement."""

from typing import ClassVar


class ContractError(Exception):
    """Root of every error raised while reading bytes from another party.

    Attributes:
        code: Stable, dotted identifier.
        hint: What the reader can do about it, or an empty string.
        retryable: Whether fetching the same bytes again may help.
    """

    code: ClassVar[str] = "contract.invalid"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class LimitExceededError(ContractError):
    """A length or count is above its named limit; nothing was allocated for it."""

    code: ClassVar[str] = "contract.limit"


class DigestMismatchError(ContractError):
    """The bytes are not those that were signed for: drop them and fetch again."""

    code: ClassVar[str] = "contract.digest"
    retryable: ClassVar[bool] = True


class SignatureError(ContractError):
    """No trusted key signed these bytes: keep the running version and report the server."""

    code: ClassVar[str] = "contract.signature"
