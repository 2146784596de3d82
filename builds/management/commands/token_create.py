"""`manage.py token_create`: an API token for CI or a script, printed once."""

import json
from argparse import ArgumentParser

from django.db import transaction

from builds.common.audit import audit
from builds.common.auth import SYSTEM, token_create
from builds.common.commands import DatabaseCommand
from builds.common.roles import Role


class Command(DatabaseCommand):
    """Make an API token with a role."""

    help = "Make an API token; its text is printed once and not kept."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument("--name", required=True, help="what it is for")
        parser.add_argument("--role", choices=[role.value for role in Role], required=True)
        parser.add_argument("--json", action="store_true", help="print one JSON object")

    def handle(self, *args: object, **options: object) -> None:
        """Make it and print it."""
        role = Role(str(options["role"]))
        with transaction.atomic():
            token, text = token_create(name=str(options["name"]), role=role)
            audit(
                actor=SYSTEM.name,
                action="token.create",
                obj=token,
                name=token.name,
                role=role.value,
            )
        if options["json"]:
            self.stdout.write(json.dumps({"id": token.pk, "role": role.value, "token": text}))
        else:
            self.stdout.write(text)
            self.stderr.write(f"role {role.value}; shown only now", style_func=str)
