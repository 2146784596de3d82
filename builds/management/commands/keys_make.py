"""`manage.py keys_make`: one signing key, as a file of its holder or in a token."""

from argparse import ArgumentParser
from pathlib import Path

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from builds.common.commands import plain_errors
from builds.errors import SigningKeysError
from builds.keys import (
    LAYOUT,
    OFFLINE,
    PUBLIC_NAME,
    PublicKey,
    add_file_slot,
    add_slot,
    make_key_folder,
    require_role,
    write_public,
)
from builds.signers import HSM_SCHEME, load_signer, require_pair, token_generate, token_import


class Command(BaseCommand):
    """Make a key of a role, or take in one that a token has; needs no database."""

    help = "Make one signing key: in a folder of its holder, in a token, or in this machine's ring."
    requires_system_checks = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument("repository", choices=sorted(LAYOUT))
        parser.add_argument(
            "role",
            help="root, targets, build, approve, snapshot or timestamp; the director's "
            "online role is targets",
        )
        parser.add_argument("--out", type=Path, help="folder of its holder: key.pem, public.json")
        parser.add_argument("--uri", default="", help="a key in a token: hsm:3?label=TOKEN")
        parser.add_argument(
            "--generate", action="store_true", help="make the key in the token, ECDSA P-256"
        )
        parser.add_argument(
            "--ring", action="store_true", help="list the key in keys.json of this machine"
        )

    def handle(self, *args: object, **options: object) -> None:
        """Make it and say what it is."""
        repository, role = str(options["repository"]), str(options["role"])
        uri, out = str(options["uri"]), options["out"]
        is_ring = bool(options["ring"])
        if not is_ring and not isinstance(out, Path):
            raise CommandError("say where the key goes: --out FOLDER, --ring, or both")
        with plain_errors():
            require_role(repository, role)
            if is_ring and (repository, role) in OFFLINE:
                raise SigningKeysError(
                    f"{repository} {role} is offline: no server lists its keys",
                    hint="--out FOLDER, on the machine of its holder",
                )
            public = (
                _from_token(repository, role, uri, is_new=bool(options["generate"]))
                if uri
                else _from_file(repository, role, out if isinstance(out, Path) else None, is_ring)
            )
            if uri and is_ring:
                add_slot(settings.SPARSEFLEET.key_path, public, uri)
            if isinstance(out, Path) and (uri or is_ring):
                out.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_public(out / PUBLIC_NAME, public)
        print(f"{repository} {role}: key {public.key.keyid}, {public.key.scheme}")


def _from_file(repository: str, role: str, out: Path | None, is_ring: bool) -> PublicKey:
    if not is_ring:
        assert out is not None
        return make_key_folder(out, repository, role)
    if not settings.SPARSEFLEET.allows_file_keys:
        raise SigningKeysError(
            "online roles do not sign with plain files in production",
            hint="--uri hsm:NUMBER?label=TOKEN",
        )
    return add_file_slot(settings.SPARSEFLEET.key_path, repository, role)


def _from_token(repository: str, role: str, uri: str, *, is_new: bool) -> PublicKey:
    pin, library = settings.SPARSEFLEET.pin, settings.SPARSEFLEET.pkcs11_library
    if not uri.startswith(HSM_SCHEME):
        raise SigningKeysError(
            f"{uri!r}: only keys of tokens are taken in here",
            hint="a key of a cloud KMS is listed in keys.json by hand",
        )
    key = token_generate(uri, library, pin) if is_new else token_import(uri, pin)
    require_pair(load_signer(uri, key, Path(), pin))
    return PublicKey(repository, role, key)
