"""A database that is busy gets the caller a 503 with Retry-After, never a stack trace."""

import json

from django.db import OperationalError
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory

from builds.apis.api import on_busy_database
from builds.common.problem import DatabaseBusyMiddleware


def middleware() -> DatabaseBusyMiddleware:
    return DatabaseBusyMiddleware(lambda _request: HttpResponse("fine"))


def request() -> HttpRequest:
    return RequestFactory().post("/d/v1/telemetry")


def test_it_says_try_again_when_the_database_is_locked() -> None:
    answer = middleware().process_exception(request(), OperationalError("database is locked"))
    assert answer is not None
    assert answer.status_code == 503
    assert answer["Retry-After"] == "5"
    assert json.loads(answer.content)["code"] == "app.database_busy"


def test_it_leaves_other_errors_alone() -> None:
    assert middleware().process_exception(request(), ValueError("ours")) is None


def test_it_passes_a_request_on() -> None:
    assert middleware()(request()).content == b"fine"


def test_it_answers_the_management_api_in_the_same_way() -> None:
    answer = on_busy_database(request(), OperationalError("database is locked"))
    assert json.loads(answer.content)["code"] == "app.database_busy"
