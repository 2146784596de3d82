"""RFC 9457 problem documents: the one JSON shape of every error over HTTP.

    {"type": "urn:sparsefleet:error:<code>", "title", "status", "detail", "code", "hint"}

Used by the management API (through its exception handlers) and by plain Django views.
"""

import json
from http import HTTPStatus
from typing import Final

from django.http import HttpResponse

from builds.common.errors import ApplicationError
from compiler.contract.errors import ContractError

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
