"""Commands that need the platform's tables, and say so plainly when there are none."""

import getpass
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from django.core.management.base import BaseCommand, CommandError, OutputWrapper
from django.db import DatabaseError, connection
from django.db.migrations.executor import MigrationExecutor

from builds.common.errors import ApplicationError

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


@contextmanager
def plain_errors() -> Generator[None, None, None]:
    """Turn our errors into a line for the person at the terminal, with the hint below it.

    Raises:
        CommandError: Instead of any `ApplicationError`.
    """
    try:
        yield
    except ApplicationError as error:
        hint = f"\nhint: {error.hint}" if error.hint else ""
        raise CommandError(f"{error}{hint}") from error


def confirmed(out: OutputWrapper, lines: Sequence[str], *, is_sure: bool) -> None:
    """Show what is about to happen and go on only if the person says yes.

    Args:
        out: Where it is shown.
        lines: What will happen.
        is_sure: The person said yes on the command line.

    Raises:
        CommandError: They did not, or there is nobody to ask.
    """
    out.write("\n".join(lines))
    if is_sure:
        return
    if not sys.stdin.isatty():
        raise CommandError("nobody is there to say yes\nhint: look at the lines above, then --yes")
    if input("Type yes to go on: ").strip() != "yes":
        raise CommandError("nothing was done")


def operator_name() -> str:
    """Return how the audit chain calls the person at this terminal."""
    return f"console:{getpass.getuser()}"
