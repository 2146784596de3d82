"""Whatever goes wrong below /api/v1/, the answer is a problem document that says what to do."""

import json
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
from django.conf import settings
from django.test import Client

from builds.common.auth import token_create
from builds.common.roles import Role
from builds.management.commands.openapi import document
from tests.factories.builds import make_user

pytestmark = pytest.mark.django_db
WRITING = frozenset({"post", "put", "patch", "delete"})


def writes() -> Iterator[tuple[str, str]]:
    """Every writing operation of the OpenAPI document, with something in place of parameters."""
    import_module(settings.ROOT_URLCONF)  # every app adds its routers there
    for path, operations in json.loads(document())["paths"].items():
        for method in sorted(WRITING & operations.keys()):
            yield method, re.sub(r"\{[^}]*\}", "1", path)


def is_problem(answer: Any, status: int, code: str) -> bool:
    body = answer.json()
    assert answer["Content-Type"] == "application/problem+json"
    assert (answer.status_code, body["status"], body["code"]) == (status, status, code)
    return bool(body["hint"])


def headers(role: Role = Role.DEVELOPER) -> dict[str, str]:
    return {"authorization": f"Bearer {token_create(name='t', role=role)[1]}"}


@pytest.mark.parametrize(
    "header", ["Bearer sf_1_wrong", "Bearer", "Bearer garbage", "Basic YTpi", "x", ""]
)
def test_it_refuses_a_wrong_token_at_every_writing_address(header: str) -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(make_user(Role.ADMIN))
    operations = list(writes())
    assert len(operations) > 10
    for method, path in operations:
        answer = client.generic(
            method.upper(), path, "{}", "application/json", headers={"authorization": header}
        )
        assert is_problem(answer, 401, "app.unauthenticated"), (method, path)
        assert answer["WWW-Authenticate"] == "Bearer"


def test_it_asks_a_session_for_its_csrf_token_at_every_writing_address() -> None:
    client = Client(enforce_csrf_checks=True)
    for method, path in writes():
        answer = client.generic(method.upper(), path, "{}", "application/json")
        assert is_problem(answer, 401, "app.unauthenticated"), (method, path)
    client.force_login(make_user(Role.ADMIN))
    for method, path in writes():
        answer = client.generic(method.upper(), path, "{}", "application/json")
        assert is_problem(answer, 403, "app.csrf"), (method, path)


def test_it_takes_a_write_with_session_and_csrf_token() -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(make_user(Role.ADMIN))
    secret = "a" * 32
    client.cookies["csrftoken"] = secret
    answer = client.post(
        "/api/v1/models",
        json.dumps({"name": "m"}),
        content_type="application/json",
        headers={"x-csrftoken": secret},
    )
    assert answer.status_code == 201


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH"])
@pytest.mark.parametrize("path", ["nosuch", "models/", "models/a/b/c/d", "nosuch/%00"])
def test_it_answers_an_unknown_address_with_a_problem(method: str, path: str) -> None:
    answer = Client(enforce_csrf_checks=True).generic(method, f"/api/v1/{path}", "x")
    assert answer.status_code == 404
    assert answer["Content-Type"] == "application/problem+json"
    assert method == "HEAD" or is_problem(answer, 404, "app.not_found")


def test_it_answers_a_wrong_method_with_a_problem() -> None:
    answer = Client().delete("/api/v1/models", headers=headers())
    assert is_problem(answer, 405, "app.method_not_allowed")
    assert answer["Allow"] == "GET, POST"


@pytest.mark.parametrize("path", ["models/absent/versions", f"bundles/{'0' * 64}", "builds/999"])
def test_it_gives_a_hint_when_an_object_is_absent(path: str) -> None:
    answer = Client().get(f"/api/v1/{path}", headers=headers())
    assert is_problem(answer, 404, "app.not_found")


def test_it_names_a_wrong_field_plainly() -> None:
    answer = Client().post(
        "/api/v1/models", "{}", content_type="application/json", headers=headers()
    )
    assert is_problem(answer, 422, "app.invalid_input")
    assert [item["at"] for item in answer.json()["errors"]] == ["name"]
    answer = Client().get("/api/v1/models?limit=x", headers=headers())
    assert [item["at"] for item in answer.json()["errors"]] == ["limit"]


def text_fields() -> Iterator[tuple[str, str, str]]:
    """Every text, object and list of objects that the body of a POST may hold: where, which."""
    spec = json.loads(document())
    for path, operations in spec["paths"].items():
        body = operations.get("post", {}).get("requestBody", {})
        for name in re.findall(r"schemas/(\w+In)\b", json.dumps(body)):
            for field, kinds in spec["components"]["schemas"][name]["properties"].items():
                for kind in re.findall(r'"type": "(string|object)"', json.dumps(kinds)):
                    if "enum" not in kinds and "format" not in json.dumps(kinds):
                        address = path.replace("{action}", "halt")
                        yield re.sub(r"\{[^}]*\}", "1", address), field, kind


@pytest.mark.parametrize("text", ["a\0b", "\0", "a\ud800"])
def test_it_refuses_text_that_no_database_keeps_wherever_it_stands(text: str) -> None:
    fields = list(text_fields())
    assert {"group", "note", "reason", "title", "rules", "gate"} <= {name for _, name, _ in fields}
    sent = headers(Role.ADMIN)
    for path, name, kind in fields:
        for value in [text] if kind == "string" else [{"a": [{"b": text}]}, {text: 1}]:
            body = json.dumps({name: value})
            answer = Client().post(path, body, content_type="application/json", headers=sent)
            assert is_problem(answer, 422, "app.invalid_input"), (path, name)
            assert name in answer.json()["detail"]


@pytest.mark.parametrize("path", ["models/a%00/versions", "builds?state=&model=%00", "nosuch/%00"])
def test_it_refuses_an_address_that_no_database_keeps(path: str) -> None:
    answer = Client().get(f"/api/v1/{path}", headers=headers())
    expected = (404, "app.not_found") if "nosuch" in path else (422, "app.invalid_input")
    assert is_problem(answer, *expected)


def test_it_says_that_a_request_is_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settings, "DATA_UPLOAD_MAX_MEMORY_SIZE", 100)
    answer = Client().post(
        "/api/v1/models",
        json.dumps({"name": "m", "title": "x" * 100}),
        content_type="application/json",
        headers=headers(),
    )
    assert is_problem(answer, 413, "app.too_large")
