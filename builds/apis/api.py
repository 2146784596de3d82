"""The NinjaAPI object and what it does about errors: every one becomes a problem document."""

import logging
from http import HTTPStatus
from typing import Any

from django.db import OperationalError
from django.http import Http404, HttpRequest, HttpResponse
from ninja import NinjaAPI
from ninja.errors import AuthenticationError, HttpError, ValidationError
from ninja.openapi.schema import OpenAPISchema

from builds.apis.schemas import ProblemOut
from builds.common.auth import BrowserAuth, TokenAuth
from builds.common.errors import ApplicationError
from builds.common.problem import CONTENT_TYPE, busy_problem, problem, problem_of
from compiler.contract.errors import ContractError

logger = logging.getLogger(__name__)


class ManagementApi(NinjaAPI):
    """The API with its one error shape in the OpenAPI document."""

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
    return problem_of(error)


@api.exception_handler(ContractError)
def on_contract_error(_request: HttpRequest, error: ContractError) -> HttpResponse:
    return problem_of(error)


@api.exception_handler(ValidationError)
def on_validation_error(_request: HttpRequest, error: ValidationError) -> HttpResponse:
    errors = [
        {"at": ".".join(str(part) for part in item["loc"]), "message": item["msg"]}
        for item in error.errors
    ]
    detail = "; ".join(f"{item['at']}: {item['message']}" for item in errors)
    return problem(
        status=HTTPStatus.UNPROCESSABLE_ENTITY,
        code="app.invalid_input",
        detail=detail,
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
    return problem(status=HTTPStatus.NOT_FOUND, code="app.not_found", detail="no such object")


@api.exception_handler(HttpError)
def on_http_error(_request: HttpRequest, error: HttpError) -> HttpResponse:
    return problem(
        status=HTTPStatus(error.status_code), code="app.http_error", detail=error.message
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
