"""`manage.py keys_prepare`: the documents that the next signing ceremony shall sign."""

from argparse import ArgumentParser
from pathlib import Path

from django.conf import settings
from django.core.management.base import CommandError

from builds.ceremony import (
    NAMES,
    Change,
    Role,
    describe,
    first_documents,
    next_documents,
    write_folder,
)
from builds.common.clock import SystemClock
from builds.common.commands import DatabaseCommand, plain_errors
from builds.keys import read_public
from builds.services.ceremony import documents_current

DOCUMENTS = ", ".join(NAMES)


class Command(DatabaseCommand):
    """Write the next root and targets, unsigned, into a folder that goes to the holders."""

    help = "Prepare a ceremony: write the next root and targets documents, unsigned."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument("folder", type=Path, help="a new folder, e.g. on a memory stick")
        parser.add_argument(
            "--first", action="store_true", help="the first ceremony of an installation"
        )
        parser.add_argument(
            "--renew", action="append", default=[], choices=sorted(NAMES), help="only a new life"
        )
        parser.add_argument(
            "--add", action="append", default=[], type=Path, help="public.json of a key to trust"
        )
        parser.add_argument(
            "--revoke", action="append", default=[], help="identity of a key to trust no longer"
        )
        parser.add_argument(
            "--threshold", action="append", default=[], help="image-root=2: signatures needed"
        )
        parser.add_argument("--bits", type=int, help="spread releases over 2^BITS bins, 1 to 14")

    def handle(self, *args: object, **options: object) -> None:
        """Write the folder and say what it changes."""
        now = SystemClock().now()
        with plain_errors():
            current = documents_current()
            if bool(options["first"]) != (not current):
                raise CommandError(
                    "the first ceremony was held"
                    if current
                    else "no ceremony was held yet\nhint: --first with --add for every key"
                )
            publics = [read_public(Path(str(path))) for path in _list(options["add"])]
            bits = options["bits"] if isinstance(options["bits"], int) else None
            if bits is not None and not 1 <= bits <= 14:
                raise CommandError("--bits is 1 to 14")
            if not current:
                documents = first_documents(
                    publics, bits or settings.SPARSEFLEET.metadata_bin_bits, now
                )
            else:
                change = Change(
                    renew=frozenset(NAMES[str(name)] for name in _list(options["renew"])),
                    add=tuple(publics),
                    revoke=tuple(str(text) for text in _list(options["revoke"])),
                    thresholds=dict(_threshold(str(text)) for text in _list(options["threshold"])),
                    bits=bits,
                )
                documents = next_documents(current, change, now)
            folder = Path(str(options["folder"]))
            write_folder(folder, documents, current)
        for role, document in documents.items():
            print("\n".join(describe(role, document, current.get(role))))
        print(f"{folder} now goes to the holders: manage.py keys_sign {folder} --key THEIR_FOLDER")


def _list(value: object) -> list[object]:
    return list(value) if isinstance(value, list) else []


def _threshold(text: str) -> tuple[Role, int]:
    name, _, number = text.partition("=")
    if name not in NAMES or not number.isdecimal() or not name.endswith("-root"):
        raise CommandError(f"--threshold {text!r}: image-root=N or director-root=N")
    return NAMES[name], int(number)
