"""Commands that need the platform's tables, and say so plainly when there are none."""

from pathlib import Path
from typing import Any, Final

from django.core.management.base import BaseCommand, CommandError
from django.db import DatabaseError, connection
from django.db.migrations.executor import MigrationExecutor

HINT: Final = (
    "run manage.py migrate, or name the platform's folder: SPARSEFLEET_STATE_DIR=... (the demo's is"
    " var/demo/platform)"
)


class DatabaseCommand(BaseCommand):
    """A command that starts only when the database is there and every migration was applied."""

    def execute(self, *args: Any, **options: Any) -> str | None:  # noqa: ANN401 -- Django's signature
        """Run, or end with status 1, an error and a hint.

        Raises:
            CommandError: The database is not ready, and the caller is a program.
        """
        fault = database_fault()
        if fault is None:
            return super().execute(*args, **options)
        text = f"error: {fault}\nhint: {HINT}"
        if not getattr(self, "_called_from_command_line", False):  # set by run_from_argv
            raise CommandError(text)
        self.stderr.write(text)
        raise SystemExit(1)


def database_fault() -> str | None:
    """Return why the database cannot be used, or None; makes no file and no table."""
    name = str(connection.settings_dict["NAME"])
    in_memory = name == ":memory:" or "mode=memory" in name
    if connection.vendor == "sqlite" and not in_memory and not Path(name).exists():
        return "there is no database yet"
    try:
        executor = MigrationExecutor(connection)
        missing = executor.migration_plan(executor.loader.graph.leaf_nodes())
    except DatabaseError as error:
        return f"the database cannot be used: {error}"
    return f"the database lacks {len(missing)} migrations" if missing else None
