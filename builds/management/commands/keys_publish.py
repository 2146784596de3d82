"""`manage.py keys_publish`: what the holders of a ceremony signed goes to the devices."""

from argparse import ArgumentParser
from pathlib import Path

from builds.ceremony import describe, read_folder
from builds.common.clock import SystemClock
from builds.common.commands import DatabaseCommand, confirmed, operator_name, plain_errors
from builds.services.approvals import ring_here
from builds.services.ceremony import documents_current, documents_publish


class Command(DatabaseCommand):
    """Check a ceremony's documents as a device would, and publish them."""

    help = "Publish the signed documents of a ceremony."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument("folder", type=Path, help="the folder of the ceremony")
        parser.add_argument(
            "--at-once",
            action="store_true",
            help="a key was stolen: refuse what it signed from now on, even where that stops "
            "updates until other machines have signed every bin again",
        )
        parser.add_argument("--yes", action="store_true", help="do not ask")

    def handle(self, *args: object, **options: object) -> None:
        """Show what would change, ask, and publish."""
        with plain_errors():
            documents, _ = read_folder(Path(str(options["folder"])))
            current = documents_current()
            lines = [
                line
                for role, document in documents.items()
                for line in describe(role, document, current.get(role))
            ]
            confirmed(self.stdout, lines, is_sure=bool(options["yes"]))
            for line in documents_publish(
                documents=documents,
                ring=ring_here(),
                now=SystemClock().now(),
                at_once=bool(options["at_once"]),
                actor=operator_name(),
            ):
                print(line)
