"""Let a device join with its own key: `manage.py device_preauthorise --serial S --key T`."""

from django.core.management.base import CommandError, CommandParser

from builds.common.auth import SYSTEM
from builds.common.commands import DatabaseCommand
from builds.common.errors import ApplicationError
from fleet.services.preauthorisation import preauthorisation_create


class Command(DatabaseCommand):
    """Pre-authorise one serial number and key."""

    help = "Let the device with this serial number and key join without a claim token."

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the options."""
        parser.add_argument("--serial", required=True, help="serial number of the device")
        parser.add_argument(
            "--key", required=True, help="its thumbprint, as `device_agent thumbprint` prints it"
        )
        parser.add_argument("--device-class", default="", help="class that it gets")
        parser.add_argument(
            "--replaces", action="store_true", help="it is enrolled and gets this key instead"
        )

    def handle(self, *args: object, **options: object) -> None:
        """Do it and say so."""
        try:
            row = preauthorisation_create(
                actor=SYSTEM,
                serial=str(options["serial"]),
                key_thumbprint=str(options["key"]),
                device_class=str(options["device_class"]),
                replaces=bool(options["replaces"]),
            )
        except ApplicationError as error:
            hint = f"\nhint: {error.hint}" if error.hint else ""
            raise CommandError(f"{error}{hint}") from error
        self.stdout.write(f"{row.serial} may join with key {row.key_thumbprint[:16]}")
