"""`manage.py release_approve`: the second signature of releases, at a terminal."""

from argparse import ArgumentParser

from django.core.management.base import CommandError

from builds.common.auth import Actor
from builds.common.commands import DatabaseCommand, confirmed, operator_name, plain_errors
from builds.common.roles import Role
from builds.models import Bundle
from builds.services.approvals import drafts_sign, release_approve


class Command(DatabaseCommand):
    """Approve the built bundles of a version, or sign what waits for the keys of this machine."""

    help = "Approve built bundles; without a version: list what waits and sign approved drafts."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument("model", nargs="?", default="")
        parser.add_argument("version", nargs="?", default="")
        parser.add_argument("--target", default="", help="only the bundle for this target")
        parser.add_argument("--yes", action="store_true", help="do not ask")

    def handle(self, *args: object, **options: object) -> None:
        """Show the bundles, ask, approve."""
        rows = Bundle.objects.filter(approved_at=None).select_related("version__model", "target")
        filters = {
            "version__model__name": options["model"],
            "version__version": options["version"],
            "target__name": options["target"],
        }
        bundles = list(rows.filter(**{key: text for key, text in filters.items() if text}))
        lines = [
            f"{bundle.version.model.name} {bundle.version.version} {bundle.target.name} "
            f"{bundle.manifest_sha256}"
            for bundle in bundles
        ]
        with plain_errors():
            if not options["version"]:
                print("\n".join(lines) or "no bundle waits for approval")
                print(f"signed and published: {len(drafts_sign())} files")
                return
            if not bundles:
                raise CommandError("no such bundle waits for approval")
            confirmed(self.stdout, lines, is_sure=bool(options["yes"]))
            actor = Actor(operator_name(), Role.ADMIN)
            for bundle in release_approve(actor=actor, bundles=bundles):
                state = "published" if bundle.published_at else "waits for keys of other machines"
                print(f"{bundle.manifest_sha256[:16]} {state}")
