"""Fixtures of the page tests: the pages at the root, a small world, and the three actors."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import transaction
from django.test import Client

from builds.common.roles import Role
from tests.factories.builds import make_user
from tests.unit.dashboards.world import World, make_world


@pytest.fixture(autouse=True)
def _own_addresses(settings: Any) -> None:
    settings.ROOT_URLCONF = "tests.unit.dashboards.urls"
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]


@pytest.fixture(scope="module")
def _made_world(django_db_setup: None, django_db_blocker: Any) -> Iterator[World]:
    # Made once a module, in a transaction around those of its tests, and rolled back at the end.
    with django_db_blocker.unblock():
        frame = transaction.atomic()
        frame.__enter__()
        try:
            yield make_world()
        finally:
            transaction.set_rollback(True)
            frame.__exit__(None, None, None)


@pytest.fixture
def world(_made_world: World, db: None) -> World:
    """Return a world whose rows and objects the test may change."""
    return copy.deepcopy(_made_world)


@pytest.fixture
def sign_in(db: None) -> Callable[[Role], Client]:
    """Return a function that gives a browser in which somebody with this role is signed in."""

    def browser(role: Role) -> Client:
        client = Client()
        client.force_login(make_user(role))
        return client

    return browser


@pytest.fixture
def viewer(sign_in: Callable[[Role], Client]) -> Client:
    return sign_in(Role.VIEWER)


@pytest.fixture
def release_manager(sign_in: Callable[[Role], Client]) -> Client:
    return sign_in(Role.RELEASE_MANAGER)


@pytest.fixture
def stranger(db: None) -> Iterator[Client]:
    return Client()
