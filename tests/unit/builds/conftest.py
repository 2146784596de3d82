"""Fixtures of the builds tests."""

from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _own_addresses(settings: Any) -> None:
    settings.ROOT_URLCONF = "tests.unit.builds.urls"
