"""Fixtures of the browser tests: a live server with a small world, and Chromium signed in to it."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.core.signals import request_finished, request_started
from django.test import Client

from builds.common.roles import Role
from tests.browser.chromium import Chromium
from tests.factories.builds import make_user
from tests.unit.dashboards.world import World, make_world

POLL_IN_FLIGHT_S = 0.3
WAIT_S = 120.0


class InFlight:
    """How many requests the live server is answering."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._count = 0
        request_started.connect(self.begin)
        request_finished.connect(self.end)

    def begin(self, **_: object) -> None:
        with self._lock:
            self._count += 1

    def end(self, **_: object) -> None:
        with self._idle:
            self._count -= 1
            self._idle.notify_all()

    def wait(self) -> None:
        """Wait until every answer is out."""
        with self._idle:
            assert self._idle.wait_for(lambda: self._count <= 0, WAIT_S), "an answer does not end"


@pytest.fixture(autouse=True)
def _own_addresses(settings: Any) -> None:
    settings.ROOT_URLCONF = "tests.unit.dashboards.urls"
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]


@pytest.fixture
def world(transactional_db: None) -> World:
    return make_world()


@pytest.fixture(scope="session")
def _browser(
    live_server: Any,  # so that the browser hangs up before the server ends
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Chromium]:
    binary = shutil.which("chromium")
    assert binary is not None, "the marker `browser` skips these tests where there is no Chromium"
    with Chromium(binary, tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="session")
def _in_flight() -> InFlight:
    return InFlight()


@pytest.fixture
def browser(_browser: Chromium, _in_flight: InFlight, transactional_db: None) -> Iterator[Chromium]:
    """Return the browser with empty records, scripts on, at the size of a desk screen.

    It leaves the site before the database is emptied: a page that polls on would use it meanwhile.
    """
    _browser.call("Network.clearBrowserCookies")
    _browser.call("Emulation.setScriptExecutionDisabled", value=False)
    _browser.open("about:blank")
    _browser.size(1440)
    _browser.errors.clear()
    _browser.requests.clear()
    yield _browser
    _browser.open("about:blank")
    time.sleep(POLL_IN_FLIGHT_S)
    _in_flight.wait()


@pytest.fixture
def signed_in(live_server: Any, browser: Chromium, world: World) -> Callable[[Role], str]:
    """Return a function that signs the browser in with a role and returns the server's address."""

    def as_role(role: Role) -> str:
        client = Client()
        client.force_login(make_user(role))
        name = django_settings.SESSION_COOKIE_NAME
        browser.cookie(live_server.url, name, client.cookies[name].value)
        return str(live_server.url)

    return as_role


@pytest.fixture(scope="session")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which pictures of the pages are left."""
    return tmp_path_factory.mktemp("gallery")
