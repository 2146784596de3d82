"""The NinjaAPI object and what it does about errors: every one becomes a problem document."""

import logging
from collections.abc import Callable, Sequence
from functools import wraps
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Final

from django.conf import settings
from django.core.exceptions import RequestDataTooBig
from django.db import OperationalError
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseNotAllowed
from django.http.response import HttpResponseBase
from django.urls import URLPattern, URLResolver, re_path
from django.views.decorators.csrf import csrf_exempt
from ninja import NinjaAPI
from ninja.errors import AuthenticationError, HttpError, ValidationError
from ninja.openapi.schema import OpenAPISchema

from builds.apis.schemas import ProblemOut
from builds.common.auth import BrowserAuth, TokenAuth
from builds.common.errors import ApplicationError, InvalidInputError
from builds.common.problem import CONTENT_TYPE, busy_problem, problem, problem_of
from builds.pipeline import require_texts
from compiler.contract.errors import ContractError

logger = logging.getLogger(__name__)


MAX_ERRORS: Final = 20
DOCS_HINT: Final = "see /api/v1/docs for every address, method and field"
View = Callable[..., HttpResponseBase]
_HTTP_CODES: Final = MappingProxyType(
    {
        HTTPStatus.NOT_FOUND: "app.not_found",
        HTTPStatus.METHOD_NOT_ALLOWED: "app.method_not_allowed",
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "app.too_large",
    }
)


class ManagementApi(NinjaAPI):
    """The API with its one error shape, also for addresses and methods that it does not have."""

    @property
    def urls(self) -> tuple[list[URLResolver | URLPattern], str, str]:
        """Return the addresses of every router, then one for all the rest."""
        patterns, app, namespace = super().urls
        for pattern in patterns:
            if isinstance(pattern, URLPattern):
                pattern.callback = _with_method_problem(pattern.callback)
        return [*patterns, re_path("", unknown_address)], app, namespace

    def get_openapi_schema(self, **options: Any) -> OpenAPISchema:  # noqa: ANN401 -- ninja's
        """Return the document; every operation may answer with a problem document."""
        schema = super().get_openapi_schema(**options)
        schema["components"].setdefault("schemas", {})["Problem"] = ProblemOut.json_schema()
        answer = {
            "description": "A problem document (RFC 9457).",
            "content": {CONTENT_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
        for operations in schema["paths"].values():
            for operation in operations.values():
                operation["responses"].setdefault("default", answer)
        return schema


def _with_method_problem(view: View) -> View:
    @wraps(view)
    def answer(request: HttpRequest, *args: object, **kwargs: object) -> HttpResponseBase:
        try:
            require_texts([*kwargs.values(), *dict(request.GET).values()], "the address")
        except InvalidInputError as error:
            return on_application_error(request, error)
        response = view(request, *args, **kwargs)
        if not isinstance(response, HttpResponseNotAllowed):
            return response
        allowed = ", ".join(sorted(response["Allow"].split(", ")))
        problem_response = problem(
            status=HTTPStatus.METHOD_NOT_ALLOWED,
            code="app.method_not_allowed",
            detail=f"{request.method} is not possible here",
            hint=f"this address takes {allowed}; {DOCS_HINT}",
        )
        problem_response["Allow"] = allowed
        return problem_response

    return answer


@csrf_exempt
def unknown_address(request: HttpRequest) -> HttpResponse:
    """Answer for an address that no router has."""
    return problem(
        status=HTTPStatus.NOT_FOUND,
        code="app.not_found",
        detail=f"no such address: {request.path}",
        hint=DOCS_HINT,
    )


api = ManagementApi(
    title="Sparsefleet management API",
    version="1",
    description="Submit models, follow builds, and release bundles to device fleets.",
    urls_namespace="management",
    auth=[TokenAuth(), BrowserAuth()],
)


@api.exception_handler(ApplicationError)
def on_application_error(request: HttpRequest, error: ApplicationError) -> HttpResponse:
    if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        logger.error("%s %s: %s", request.method, request.path, error)
    if not error.hint and error.status in {HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY}:
        error.hint = DOCS_HINT
    return problem_of(error)


@api.exception_handler(ContractError)
def on_contract_error(_request: HttpRequest, error: ContractError) -> HttpResponse:
    return problem_of(error)


@api.exception_handler(ValidationError)
def on_validation_error(_request: HttpRequest, error: ValidationError) -> HttpResponse:
    errors = [
        {"at": _place(item["loc"]), "message": item["msg"]} for item in error.errors[:MAX_ERRORS]
    ]
    detail = "; ".join(f"{item['at']}: {item['message']}" for item in errors)
    return problem(
        status=HTTPStatus.UNPROCESSABLE_ENTITY,
        code="app.invalid_input",
        detail=detail,
        hint=DOCS_HINT,
        errors=list(errors),
    )


@api.exception_handler(AuthenticationError)
def on_authentication_error(_request: HttpRequest, _error: AuthenticationError) -> HttpResponse:
    response = problem(
        status=HTTPStatus.UNAUTHORIZED,
        code="app.unauthenticated",
        detail="no valid API token and no session",
        hint="send `Authorization: Bearer sf_<id>_<secret>`, or sign in",
    )
    response["WWW-Authenticate"] = "Bearer"
    return response


@api.exception_handler(Http404)
def on_not_found(_request: HttpRequest, _error: Http404) -> HttpResponse:
    return problem(
        status=HTTPStatus.NOT_FOUND, code="app.not_found", detail="no such object", hint=DOCS_HINT
    )


@api.exception_handler(HttpError)
def on_http_error(_request: HttpRequest, error: HttpError) -> HttpResponse:
    status = HTTPStatus(error.status_code)
    code = _HTTP_CODES.get(status, "app.http_error")
    return problem(status=status, code=code, detail=error.message, hint=DOCS_HINT)


@api.exception_handler(RequestDataTooBig)
def on_large_request(_request: HttpRequest, _error: RequestDataTooBig) -> HttpResponse:
    limit = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
    return problem(
        status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        code="app.too_large",
        detail=f"the request's body is larger than {limit} bytes",
        hint="upload files with PUT /api/v1/blobs/<sha256> and name them by their digest",
    )


@api.exception_handler(OperationalError)
def on_busy_database(request: HttpRequest, error: OperationalError) -> HttpResponse:
    logger.warning("%s %s: %s", request.method, request.path, error)
    return busy_problem()


@api.exception_handler(Exception)
def on_unexpected_error(request: HttpRequest, error: Exception) -> HttpResponse:
    logger.error("%s %s failed", request.method, request.path, exc_info=error)
    return problem(
        status=HTTPStatus.INTERNAL_SERVER_ERROR,
        code="app.internal",
        detail="an error of ours; it was logged",
    )


def _place(location: Sequence[object]) -> str:
    """Return where a wrong value stands, without ninja's names for body and parameter."""
    parts = [str(part) for part in location]
    skipped = 2 if parts[:2] == ["body", "body"] else 1
    return ".".join(parts[skipped:] or parts[:1])
