"""System checks: impossible or unwise settings are named before anything starts."""

import stat
from collections.abc import Sequence
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning, register

from builds.errors import SigningKeysError
from builds.keys import INDEX_NAME, load_ring

READABLE_BY_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@register("builds")
def check_signing_keys(**_kwargs: Any) -> Sequence[CheckMessage]:  # noqa: ANN401 -- Django's
    """Key files must be private; with a real database, they should not be files at all."""
    folder = settings.SPARSEFLEET.key_path
    if not (folder / INDEX_NAME).exists():
        return []
    messages: list[CheckMessage] = []
    exposed = [path.name for path in folder.iterdir() if path.stat().st_mode & READABLE_BY_OTHERS]
    if exposed:
        messages.append(
            Error(
                f"signing keys can be read by others: {', '.join(sorted(exposed))}",
                hint="chmod 600 each file; assume that the keys are known and replace them",
                id="builds.E001",
            )
        )
    try:
        ring = load_ring(folder)
    except SigningKeysError as error:
        return [*messages, Error(str(error), hint=error.hint, id="builds.E002")]
    if ring.uses_files() and settings.SPARSEFLEET.database_url:
        messages.append(
            Warning(
                "online signing keys are plain files on a production database",
                hint="put KMS or HSM addresses into keys.json",
                id="builds.W001",
            )
        )
    return messages
