"""`manage.py keys_init`: signing keys and the first update metadata."""

from typing import Any

from django.conf import settings
from django.core.management.base import CommandError

from builds.common.commands import DatabaseCommand
from builds.errors import SigningKeysError
from builds.keys import INDEX_NAME
from builds.models import Repository
from builds.services.signing import keys_generate, repositories_init

BANNER = """
******************************************************************************
*  SIGNING KEYS WERE GENERATED AS PLAIN FILES (mode 0600).                   *
*  Whoever reads them can sign releases for every device that enrols here.   *
*  That is right for trying things out and wrong for a real fleet: move the  *
*  root and targets keys offline, and put the others into a KMS or an HSM.   *
******************************************************************************
"""


class Command(DatabaseCommand):
    """Make signing keys and publish version 1 of the update metadata, once."""

    help = "Make signing keys (files, 0600) and the first update metadata; repeats are no-ops."

    def handle(self, *args: Any, **options: Any) -> None:  # noqa: ANN401 -- Django's signature
        """Run."""
        has_keys = (settings.SPARSEFLEET.key_path / INDEX_NAME).exists()
        if not has_keys and Repository.objects.exists():
            raise CommandError(
                "update metadata exists but its keys are gone; restore them, new ones would not fit"
            )
        try:
            if not has_keys:
                keys_generate()
                print(BANNER)
            created = repositories_init()
        except SigningKeysError as error:
            raise CommandError(f"{error} ({error.hint})" if error.hint else str(error)) from error
        print("update metadata was published" if created else "keys and update metadata exist")
