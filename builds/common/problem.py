"""RFC 9457 problem documents: the one JSON shape of every error over HTTP.

    {"type": "urn:sparsefleet:error:<code>", "title", "status", "detail", "code", "hint"}

Used by the management API (through its exception handlers) and by plain Django views.
"""

import json
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

from django.db import OperationalError
from django.http import HttpRequest, HttpResponse

from builds.common.errors import ApplicationError
from compiler.contract.errors import ContractError

logger = logging.getLogger(__name__)

CONTENT_TYPE: Final = "application/problem+json"
RETRY_AFTER_S: Final = 5


def problem(
    *,
    status: HTTPStatus,
    code: str,
    detail: str,
    hint: str = "",
    errors: list[object] | None = None,
) -> HttpResponse:
    """Return a problem document."""
    document: dict[str, object] = {
        "type": f"urn:sparsefleet:error:{code}",
        "title": status.phrase,
        "status": status.value,
        "detail": detail,
        "code": code,
        "hint": hint,
    }
    if errors:
        document["errors"] = errors
    return HttpResponse(json.dumps(document), status=status.value, content_type=CONTENT_TYPE)


def problem_of(error: ApplicationError | ContractError) -> HttpResponse:
    """Return the problem document of an error that was raised on purpose."""
    status = error.status if isinstance(error, ApplicationError) else HTTPStatus.BAD_REQUEST
    response = problem(status=status, code=error.code, detail=str(error), hint=error.hint)
    if error.retryable:
        response["Retry-After"] = str(RETRY_AFTER_S)
    return response


def busy_problem() -> HttpResponse:
    """Return the answer to a request that waited in vain for the database."""
    response = problem(
        status=HTTPStatus.SERVICE_UNAVAILABLE,
        code="app.database_busy",
        detail="the database is busy or away; nothing was changed",
        hint="send the same request again",
    )
    response["Retry-After"] = str(RETRY_AFTER_S)
    return response


class DatabaseBusyMiddleware:
    """Answers 503 with `Retry-After` when a request could not get at the database.

    SQLite gives up on a lock after `timeout` seconds; PostgreSQL may be restarting, or break a
    deadlock. All are passing, and every write of the platform is one transaction.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self._get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Pass the request on."""
        return self._get_response(request)

    def process_exception(self, request: HttpRequest, error: Exception) -> HttpResponse | None:
        """Answer for an `OperationalError`; leave all else alone."""
        if not isinstance(error, OperationalError):
            return None
        logger.warning("%s %s: %s", request.method, request.path, error)
        return busy_problem()
