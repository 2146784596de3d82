"""Fixtures for all tests: a fake clock, a blob folder, signing keys, and the three actors."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from django.conf import settings as django_settings
from hypothesis import settings as hypothesis_settings

from builds.common.auth import Actor
from builds.common.roles import Role

# Everywhere as in CI: the same examples in every run, and none fails for being slow.
hypothesis_settings.load_profile("ci")

DATABASE_FIXTURES = {"db", "transactional_db", "live_server", "django_db_setup"}


class FakeClock:
    """A clock that stands still until it is told to move."""

    def __init__(self, at: datetime) -> None:
        self.at = at

    def now(self) -> datetime:
        return self.at

    def advance(self, seconds: float) -> None:
        self.at += timedelta(seconds=seconds)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(datetime.now(UTC))


@pytest.fixture
def state_dir(tmp_path: Path) -> Iterator[Path]:
    """Give the test its own folder of blobs and keys."""
    environment = django_settings.SPARSEFLEET
    before = environment.state_dir
    environment.state_dir = tmp_path / "state"
    environment.state_dir.mkdir()
    yield environment.state_dir
    environment.state_dir = before


@pytest.fixture(autouse=True)
def _own_state_dir(request: pytest.FixtureRequest) -> None:
    if DATABASE_FIXTURES & set(request.fixturenames):
        request.getfixturevalue("state_dir")


@pytest.fixture
def release_manager() -> Actor:
    return Actor(name="release-manager", role=Role.RELEASE_MANAGER)


@pytest.fixture
def ci_bot() -> Actor:
    return Actor(name="token:1", role=Role.DEVELOPER)


@pytest.fixture
def stranger() -> Actor:
    return Actor(name="anonymous", role=None)
