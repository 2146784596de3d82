"""The suite runs on settings of its own, however it is started."""

import os
from pathlib import Path

from django.conf import settings


def test_no_test_touches_the_platform_of_this_checkout() -> None:
    assert settings.SETTINGS_MODULE == "tests.settings"
    assert Path(os.environ["SPARSEFLEET_STATE_DIR"]).name.startswith("sparsefleet-tests-")
