"""`manage.py keys_sign`: a holder signs the documents of a ceremony, on a machine of their own."""

from argparse import ArgumentParser
from pathlib import Path

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from securesystemslib.signer import Signer

from builds.ceremony import describe, entitled_keys, read_folder, write_document
from builds.common.commands import confirmed, plain_errors
from builds.errors import CeremonyError
from builds.keys import PublicKey, load_key_folder, read_public
from builds.metadata import add_signatures
from builds.signers import load_signer


class Command(BaseCommand):
    """Add a signature to the documents that a key may sign; needs no database and no network."""

    help = "Sign the documents of a ceremony with one offline key."
    requires_system_checks = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument("folder", type=Path, help="the folder of the ceremony")
        parser.add_argument("--key", type=Path, help="the holder's folder: key.pem, public.json")
        parser.add_argument("--uri", default="", help="or a key in a token: hsm:2?label=TOKEN")
        parser.add_argument("--public", type=Path, help="with --uri: public.json of that key")
        parser.add_argument("--yes", action="store_true", help="do not ask")

    def handle(self, *args: object, **options: object) -> None:
        """Show what would be signed, ask, and sign."""
        folder = Path(str(options["folder"]))
        with plain_errors():
            public, signer = _signer(options)
            documents, current = read_folder(folder)
            mine = {
                role: document
                for role, document in documents.items()
                if role[0] == public.repository
                and public.key.keyid in entitled_keys(role, documents, current)
            }
            if not mine:
                raise CeremonyError(
                    f"key {public.key.keyid} may sign nothing here",
                    hint="is it the folder of another holder, or was the key revoked?",
                )
            lines = [
                line
                for role, document in mine.items()
                for line in describe(role, document, current.get(role))
            ]
            lines.append(f"key {public.key.keyid} will sign this.")
            confirmed(self.stdout, lines, is_sure=bool(options["yes"]))
            for role, document in mine.items():
                added = add_signatures(document, [signer])
                write_document(folder, role, document)
                done = "signed" if added else "was signed before"
                print(f"{role[0]} {role[1]} {document.signed.version} {done}")


def _signer(options: dict[str, object]) -> tuple[PublicKey, Signer]:
    if isinstance(options["key"], Path):
        return load_key_folder(options["key"])
    if not options["uri"] or not isinstance(options["public"], Path):
        raise CommandError("name a key: --key FOLDER, or --uri with --public")
    public = read_public(options["public"])
    uri = str(options["uri"])
    return public, load_signer(uri, public.key, Path(), settings.SPARSEFLEET.pin)
