"""Fixtures of the fleet tests."""

from typing import Any

import pytest

from tests.factories.fleet import SteppedClock


@pytest.fixture(autouse=True)
def _own_addresses(settings: Any) -> None:
    settings.ROOT_URLCONF = "tests.unit.fleet.urls"


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()
