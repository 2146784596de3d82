"""Settings of the test processes: the real ones, with every file in a folder of their own.

pytest-django loads settings before any conftest, so the folder is set here, before the real
settings module is imported. SPARSEFLEET_DATABASE_URL chooses the database, as in production.
"""

import atexit
import os
import shutil
import tempfile

_FOLDER = tempfile.mkdtemp(prefix="sparsefleet-tests-")
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)
os.environ["SPARSEFLEET_STATE_DIR"] = _FOLDER
os.environ["SPARSEFLEET_DEBUG"] = "1"  # keys are files; pytest-django turns Django's DEBUG off
os.environ["SPARSEFLEET_RELEASE_APPROVAL"] = "automatic"

from dashboards.conf.settings import *  # noqa: E402, F403

PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
CELERY_BROKER_URL = "memory://"  # nobody consumes: every message of a test is lost
CELERY_BROKER_TRANSPORT = "memory"
CELERY_BROKER_TRANSPORT_OPTIONS: dict[str, object] = {}
STATIC_ROOT.mkdir(exist_ok=True)  # noqa: F405 -- whitenoise warns about a missing folder
