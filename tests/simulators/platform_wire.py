"""The platform of this process as a transport of the agent's HTTP client, with faults to order."""

from collections.abc import Callable
from typing import Any

import httpx
from django.core.wsgi import get_wsgi_application

URL = "http://testserver"


class PlatformWire(httpx.BaseTransport):
    """Passes requests to Django without a socket.

    `lose_request` and `lose_answer` name paths whose next request or answer never arrives.
    """

    def __init__(self, wrap: Callable[[Any], Any] = lambda django: django) -> None:
        """Put `wrap` before Django, as the hot paths are."""
        self._inner = httpx.WSGITransport(app=wrap(get_wsgi_application()))
        self.lose_request: set[str] = set()
        self.lose_answer: set[str] = set()
        self.paths: list[str] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.paths.append(path)
        if path in self.lose_request:
            self.lose_request.remove(path)
            raise httpx.ConnectError("simulated")
        response = self._inner.handle_request(request)
        if path in self.lose_answer:
            self.lose_answer.remove(path)
            raise httpx.ReadError("simulated")
        return response
