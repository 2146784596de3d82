"""Degrade rules of the fleet or a group: `manage.py degrade_rules set --file rules.json`."""

import json
from pathlib import Path

from django.core.management.base import CommandError, CommandParser

from builds.common.auth import SYSTEM
from builds.common.commands import DatabaseCommand
from builds.common.errors import ApplicationError
from compiler.contract.degrade import MAX_RULES_BYTES, Rung
from fleet.models import DegradeRules
from fleet.selectors.rules import rules_present
from fleet.services.rules import RulesPreview, rules_preview, rules_set


class Command(DatabaseCommand):
    """Show, preview, set and take back degrade rules."""

    help = "Show, preview, set or take back when devices do less."

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the options."""
        parser.add_argument("action", choices=("show", "preview", "set", "clear"))
        parser.add_argument("--file", type=Path, help="rules, sparsefleet.degrade/1")
        parser.add_argument("--group", default="", help="name of a group; empty: the whole fleet")
        parser.add_argument("--note", default="", help="why, for the audit")

    def handle(self, *args: object, **options: object) -> None:
        """Do it and say what was done."""
        action, group, file = str(options["action"]), str(options["group"]), options["file"]
        if (action in ("show", "clear")) != (file is None):
            raise CommandError("preview and set need --file, show and clear take none")
        document = _document(file) if isinstance(file, Path) else None
        try:
            preview = rules_preview(group=group, document=document)
            if action == "show":
                self._show(group)
                return
            if action == "clear" and not _is_set(group):
                self.stdout.write("no rules are set there: there is nothing to clear")
                return
            self._tell(preview)
            if action == "preview":
                return
            row = rules_set(actor=SYSTEM, group=group, document=document, note=str(options["note"]))
        except ApplicationError as error:
            hint = f"\nhint: {error.hint}" if error.hint else ""
            raise CommandError(f"{error}{hint}") from error
        self.stdout.write(f"{row}: devices follow when they ask next")

    def _show(self, group: str) -> None:
        rows = [row for row in rules_present() if not group or _scope(row) == group]
        for row in rows:
            text = "taken back" if row.document is None else json.dumps(row.document, indent=2)
            self.stdout.write(f"{row}, {row.created_at:%Y-%m-%d %H:%M} by {row.created_by}: {text}")
        if not rows and group:
            self.stdout.write(f"no rules are set for group {group}: it follows those of the fleet")
        elif not rows:
            self.stdout.write("no rules are set: devices follow their own")

    def _tell(self, preview: RulesPreview) -> None:
        for name, priority, rung, when, leave in preview.rules:
            self.stdout.write(f"{name} ({priority}): {when} -> {rung}, until {leave}")
        self.stdout.write(f"{len(preview.rules)} rules, {preview.devices} devices in scope")
        for each in sorted({Rung[row[2].upper()] for row in preview.rules}):
            self.stdout.write(f"{each.name.lower()}: {_who_has(each)}")


def _scope(row: DegradeRules) -> str:
    """Return the name of the group that rules are for; empty for the fleet."""
    return row.group.name if row.group else ""


def _is_set(group: str) -> bool:
    return any(_scope(row) == group and row.document is not None for row in rules_present())


def _who_has(rung: Rung) -> str:
    """Return what is known of the devices whose bundle has a rung."""
    if not rung.in_bundles:
        return "no bundle can have it: devices go to what theirs has instead"
    return "on how many of them the bundle has it is unknown: telemetry does not say"


def _document(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_RULES_BYTES + 1)
        document = json.loads(data)
    except OSError as error:
        raise CommandError(f"no rules in {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{path.name} cannot be read: {error}") from error
    if len(data) > MAX_RULES_BYTES or not isinstance(document, dict):
        raise CommandError(f"{path.name} is no rules document of at most {MAX_RULES_BYTES} bytes")
    return document
