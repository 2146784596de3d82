"""`manage.py keys_init`: signing keys and the first update metadata."""

from typing import Any

from django.conf import settings
from django.core.management.base import CommandError

from builds.common.commands import DatabaseCommand, plain_errors
from builds.keys import INDEX_NAME
from builds.models import Repository
from builds.services.signing import keys_generate, repositories_init

BANNER = """
******************************************************************************
*  SIGNING KEYS WERE GENERATED AS PLAIN FILES (mode 0600).                   *
*  Whoever reads them can sign releases for every device that enrols here.   *
*  That is right for trying things out and wrong for a real fleet, whose     *
*  first ceremony is in docs/runbooks/signing.md.                            *
******************************************************************************
"""


class Command(DatabaseCommand):
    """Make signing keys and publish version 1 of the update metadata, once."""

    help = "Development and demo: make signing keys as files and the first update metadata, once."

    def handle(self, *args: Any, **options: Any) -> None:  # noqa: ANN401 -- Django's signature
        """Run."""
        has_keys = (settings.SPARSEFLEET.key_path / INDEX_NAME).exists()
        if not has_keys and Repository.objects.exists():
            raise CommandError(
                "update metadata exists but its keys are gone; restore them, new ones would not fit"
            )
        with plain_errors():
            if not has_keys:
                keys_generate()
                print(BANNER)
            created = repositories_init()
        print("update metadata was published" if created else "keys and update metadata exist")
