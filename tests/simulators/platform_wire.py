"""The platform of this process as a transport of the agent's HTTP client, with faults to order."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from django.core.signals import request_finished, request_started
from django.core.wsgi import get_wsgi_application
from django.db import close_old_connections

URL = "http://testserver"


@contextmanager
def _open_connection() -> Iterator[None]:
    """Keep the test's transaction: outside tests a request ends with its connection looked at."""
    signals = (request_started, request_finished)
    for signal in signals:
        signal.disconnect(close_old_connections)
    try:
        yield
    finally:
        for signal in signals:
            signal.connect(close_old_connections)


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
        with _open_connection():
            answer = self._inner.handle_request(request)
            body = answer.read()
            answer.close()
        response = httpx.Response(
            answer.status_code, headers=answer.headers, stream=httpx.ByteStream(body)
        )
        if path in self.lose_answer:
            self.lose_answer.remove(path)
            raise httpx.ReadError("simulated")
        return response
