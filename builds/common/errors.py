"""Errors of the web platform: one root, a stable code, an HTTP status, a hint."""

from http import HTTPStatus
from typing import ClassVar


class ApplicationError(Exception):
    """Root of every error that a service raises on purpose.

    Attributes:
        code: Stable, dotted identifier, shown to people and machines.
        status: HTTP status of the problem document.
        hint: What the reader can do about it, or an empty string.
        retryable: Whether the same call may succeed later.
    """

    code: ClassVar[str] = "app.error"
    status: ClassVar[HTTPStatus] = HTTPStatus.BAD_REQUEST
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class NotFoundError(ApplicationError):
    """No such object, or none that the caller may see."""

    code: ClassVar[str] = "app.not_found"
    status: ClassVar[HTTPStatus] = HTTPStatus.NOT_FOUND


class ForbiddenError(ApplicationError):
    """The caller's role does not allow this."""

    code: ClassVar[str] = "app.forbidden"
    status: ClassVar[HTTPStatus] = HTTPStatus.FORBIDDEN


class InvalidInputError(ApplicationError):
    """A field of the request is missing or wrong."""

    code: ClassVar[str] = "app.invalid_input"
    status: ClassVar[HTTPStatus] = HTTPStatus.UNPROCESSABLE_ENTITY


class ConflictError(ApplicationError):
    """The object is not in a state that allows this."""

    code: ClassVar[str] = "app.conflict"
    status: ClassVar[HTTPStatus] = HTTPStatus.CONFLICT


class IllegalTransitionError(ConflictError):
    """The state table has no such transition."""

    code: ClassVar[str] = "app.illegal_transition"


class ConcurrentTransitionError(ConflictError):
    """Somebody else changed the state first; look again."""

    code: ClassVar[str] = "app.concurrent_transition"
    retryable: ClassVar[bool] = True
