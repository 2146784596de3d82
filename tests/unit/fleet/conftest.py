"""Fixtures of the fleet tests."""

import pytest

from tests.factories.fleet import SteppedClock


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()
