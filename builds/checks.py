"""System checks: impossible or unwise settings are named before anything starts.

`manage.py` runs the first before every command and both for `check --deploy`; the web process and
the workers ask `refuse_to_start`, and no process signs with keys that are refused (`key_ring`).
"""

import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from django.conf import settings
from django.core.checks import CheckMessage, Error, register
from django.core.exceptions import ImproperlyConfigured

from builds.errors import SigningKeysError
from builds.keys import INDEX_NAME, KeyRing, load_ring

READABLE_BY_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
RUNBOOK: Final = "see docs/runbooks/signing.md"


@register("builds")
def check_signing_keys(**_kwargs: Any) -> Sequence[CheckMessage]:  # noqa: ANN401 -- Django's
    """Key files must be private, and the ring readable."""
    folder = settings.SPARSEFLEET.key_path
    if not (folder / INDEX_NAME).exists():
        return []
    messages: list[CheckMessage] = []
    exposed = _exposed(folder)
    if exposed:
        messages.append(
            Error(
                f"signing keys can be read by others: {', '.join(exposed)}",
                hint="chmod 600 each file; assume that the keys are known and replace them",
                id="builds.E001",
            )
        )
    try:
        load_ring(folder)
    except SigningKeysError as error:
        messages.append(Error(str(error), hint=error.hint, id="builds.E002"))
    return messages


@register("builds", deploy=True)
def check_production_keys(**_kwargs: Any) -> Sequence[CheckMessage]:  # noqa: ANN401 -- Django's
    """In production no online role signs with a file, and no offline key is there at all."""
    chosen = settings.SPARSEFLEET
    if chosen.allows_file_keys:
        return []
    messages: list[CheckMessage] = []
    if chosen.demo_keys:
        messages.append(
            Error(
                "demo keys are allowed, and there is a database server",
                hint="unset SPARSEFLEET_DEMO_KEYS; " + RUNBOOK,
                id="builds.E003",
            )
        )
    try:
        ring = load_ring(chosen.key_path)
    except SigningKeysError:
        return messages
    return [*messages, *_faults(ring, chosen.offline_key_path)]


def refuse_to_start() -> None:
    """End a process that would sign with keys as they are.

    Raises:
        ImproperlyConfigured: A check has an error.
    """
    found = [*check_signing_keys(), *check_production_keys()]
    if found:
        raise ImproperlyConfigured("; ".join(f"{one.id}: {one.msg} ({one.hint})" for one in found))


def _faults(ring: KeyRing, offline: Path) -> Iterator[CheckMessage]:
    if ring.file_roles():
        yield Error(
            f"plain files would sign for {', '.join(ring.file_roles())} in production",
            hint="put HSM or KMS addresses into keys.json; " + RUNBOOK,
            id="builds.E004",
        )
    has_folder = offline.is_dir() and any(offline.iterdir())
    if ring.offline_roles() or has_folder:
        where = f"in {offline}" if has_folder else f"listed in {INDEX_NAME}"
        yield Error(
            f"offline keys are {where} on a machine that is online",
            hint="move each to its holder, and take it from here; " + RUNBOOK,
            id="builds.E005",
        )


def _exposed(folder: Path) -> list[str]:
    files = (path for path in folder.iterdir() if path.is_file())
    return sorted(path.name for path in files if path.stat().st_mode & READABLE_BY_OTHERS)
