"""`manage.py bootstrap_access`: the first users and the CI token, printed once."""

import json
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

from builds.common.commands import DatabaseCommand
from builds.services.access import FIRST_USERS, access_bootstrap


class Command(DatabaseCommand):
    """Make an administrator, a release manager, a viewer and a CI token."""

    help = "Make the first users and the CI token; secrets are printed once and not kept."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument("--json", action="store_true", help="print one JSON object")
        parser.add_argument("--reset", action="store_true", help="replace existing secrets")
        parser.add_argument(
            "--password",
            action="append",
            default=[],
            metavar="USER=PASSWORD",
            help="set this password instead of a random one",
        )

    def handle(self, *args: Any, **options: Any) -> None:  # noqa: ANN401 -- Django's signature
        """Run."""
        pairs = dict(item.partition("=")[::2] for item in options["password"])
        unknown = pairs.keys() - {name for name, _ in FIRST_USERS}
        if unknown or not all(pairs.values()):
            names = ", ".join(name for name, _ in FIRST_USERS)
            raise CommandError(f"--password takes USER=PASSWORD with USER one of {names}")
        users, token = access_bootstrap(passwords=pairs, reset=options["reset"])
        if options["json"]:
            document = {
                "users": [
                    {"name": user.name, "role": user.role.value, "password": user.secret}
                    for user in users
                ],
                "ci_token": token.secret,
            }
            print(json.dumps(document))
            return
        for user in users:
            print(f"{user.name:16} {user.role.value:16} {user.secret or '(unchanged)'}")
        print(f"{'CI token':16} {token.role.value:16} {token.secret or '(unchanged)'}")
