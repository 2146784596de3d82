"""What a stranger can reach: every address of the platform is asked without any credentials.

A new address is closed unless it is added to `OPEN` on purpose, with the reason.
"""

from collections.abc import Iterator
from types import MappingProxyType
from typing import Final

import pytest
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver

METHODS: Final = ("get", "post", "put", "patch", "delete")
CLOSED: Final = frozenset({401, 403, 404, 405})
SAMPLES: Final = MappingProxyType(
    {"int": "1", "str": "x", "slug": "x", "path": "x/y.json", "uuid": "0" * 32}
)
OPEN: Final = MappingProxyType(
    {
        "healthz": "whether the process lives",
        "readyz": "whether it can serve",
        "theme": "light or dark, in a cookie",
        "login": "where credentials are given",
        "tuf-image-metadata": "signed, and secret to nobody",
        "tuf-image-target": "named by digest in signed metadata",
        "tuf-director-root": "the chain of trust itself",
        "tuf-director-root-version": "the chain of trust itself",
        "device-enrol": "asks for a claim, signed by the device's key",
        "device-token": "asks for a signature",
        "device-time": "a clock for devices that have none, limited in rate",
        "device-key": "asks for the signatures of two keys",
        "openapi-json": "describes the API",
        "openapi-view": "describes the API",
        "api-root": "names the API",
    }
)


def _routes(resolver: URLResolver, prefix: str = "") -> Iterator[tuple[str, str]]:
    for pattern in resolver.url_patterns:
        route = prefix + str(pattern.pattern)
        if isinstance(pattern, URLResolver):
            yield from _routes(pattern, route)
        elif isinstance(pattern, URLPattern):
            yield pattern.name or "", route


def _address(route: str) -> str:
    for kind, sample in SAMPLES.items():
        while f"<{kind}:" in route:
            head, _, tail = route.partition(f"<{kind}:")
            route = head + sample + tail.partition(">")[2]
    while "<" in route:
        head, _, tail = route.partition("<")
        route = head + "1" + tail.partition(">")[2]
    return "/" + route


ROUTES: Final = sorted(set(_routes(get_resolver())))
KEPT: Final = [
    *(route for name, route in ROUTES if name not in OPEN),
    f"d/v1/blobs/{'0' * 64}",  # answered before the routes, by `fleet.edge`
]


def test_there_are_routes_of_every_part() -> None:
    parts = {route.partition("/")[0] for _, route in ROUTES}
    assert {"api", "d", "tuf"} <= parts
    assert set(OPEN) <= {name for name, _ in ROUTES}, "a name that no address has"
    assert len(KEPT) > 60


@pytest.mark.django_db
@pytest.mark.parametrize("route", KEPT)
def test_a_stranger_gets_nothing(client: Client, route: str) -> None:
    client.raise_request_exception = False
    for method in METHODS:
        answer = getattr(client, method)(
            _address(route), **({} if method == "get" else {"content_type": "application/json"})
        )
        is_login = answer.status_code == 302 and "login" in answer.headers["Location"]
        assert is_login or answer.status_code in CLOSED, (method, answer.status_code)
