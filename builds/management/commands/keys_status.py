"""`manage.py keys_status`: which keys count, which of them are here, what ends when, what waits."""

from argparse import ArgumentParser
from collections.abc import Iterator

from django.core.management.base import CommandError

from builds.ceremony import describe
from builds.common.clock import SystemClock
from builds.common.commands import DatabaseCommand, plain_errors
from builds.selectors.expiry import drafts_waiting, expiries, is_near
from builds.services.approvals import ring_here
from builds.services.ceremony import documents_current


class Command(DatabaseCommand):
    """Print the state of signing; status 1 when something needs a person, for monitoring."""

    help = "Show keys, expiry and waiting signatures; status 1 when something needs a person."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument("--keys", action="store_true", help="also list every key")

    def handle(self, *args: object, **options: object) -> None:
        """Print."""
        with plain_errors():
            now = SystemClock().now()
            rows = expiries(now)
            if not rows:
                raise CommandError("no update metadata was published\nhint: run keys_init")
            for row in rows:
                print(f"{'!' if is_near(row) else ' '} {row}")
            for draft in drafts_waiting():
                names = ", ".join(keyid[:12] for keyid in draft.waits_for) or "being published"
                print(f"  {draft} waits for {names}")
            if options["keys"]:
                for line in _keys():
                    print(line)
        if any(is_near(row) for row in rows):
            raise CommandError("something above needs a person")


def _keys() -> Iterator[str]:
    mine = ring_here().publics()
    for role, document in documents_current().items():
        yield from describe(role, document, None)
    yield "keys of this machine:" if mine else "this machine holds no keys"
    yield from (f"    {one.key.keyid} {one.repository} {one.role}" for one in mine)
