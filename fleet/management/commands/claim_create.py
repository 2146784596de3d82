"""Make a claim token with which devices may join: `manage.py claim_create --name lab --uses 50`."""

import json
from datetime import timedelta
from typing import Final

from django.core.management.base import CommandError, CommandParser

from builds.common.auth import SYSTEM
from builds.common.clock import SystemClock
from builds.common.commands import DatabaseCommand
from fleet.services.claims import claim_create

MAX_HOURS: Final = 24.0 * 366 * 10


class Command(DatabaseCommand):
    """Make a claim token and print it; it cannot be had again."""

    help = "Make a claim token with which devices may join the fleet."

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the options."""
        parser.add_argument("--name", required=True, help="what it is for")
        parser.add_argument("--uses", type=int, default=1, help="how many devices may join with it")
        parser.add_argument("--hours", type=float, default=0.0, help="valid so long; 0: for ever")
        parser.add_argument("--device-class", default="", help="class that its devices get")
        parser.add_argument("--json", action="store_true", help="print JSON for machines")

    def handle(self, *args: object, **options: object) -> None:
        """Make it and print it."""
        hours = float(str(options["hours"]))
        if not 0 <= hours <= MAX_HOURS:
            raise CommandError(
                f"--hours {hours:g} is out of range: 0 for ever, at most {MAX_HOURS:g} (ten years)"
            )
        claim, token = claim_create(
            actor=SYSTEM,
            name=str(options["name"]),
            uses=int(str(options["uses"])),
            expires_at=SystemClock().now() + timedelta(hours=hours) if hours > 0 else None,
            device_class=str(options["device_class"]),
        )
        if options["json"]:
            document = {"token": token, "id": claim.pk, "name": claim.name, "uses": claim.uses_left}
            self.stdout.write(json.dumps(document))
        else:
            self.stdout.write(f"{token}\n(good for {claim.uses_left} devices; shown only now)")
