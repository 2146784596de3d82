"""`manage.py states_print`: every state table of the server as a diagram in `docs/states/`."""

from argparse import ArgumentParser
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from django.apps import apps
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from builds.common.statemachine import mermaid

FOLDER = settings.BASE_DIR / "docs" / "states"
SUFFIX = "_TRANSITIONS"


class Command(BaseCommand):
    """Print every `..._TRANSITIONS` table of every app's `states` module."""

    help = "Write docs/states/*.md from the state tables; --check fails when one is stale."
    requires_system_checks = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument("--check", action="store_true", help="write nothing, compare")

    def handle(self, *args: Any, **options: Any) -> None:  # noqa: ANN401 -- Django's signature
        """Run."""
        stale = []
        FOLDER.mkdir(parents=True, exist_ok=True)
        for name, text in pages():
            path = FOLDER / f"{name}.md"
            if path.exists() and path.read_text(encoding="utf-8") == text:
                continue
            stale.append(path.name)
            if not options["check"]:
                path.write_text(text, encoding="utf-8")
        if options["check"] and stale:
            raise CommandError(f"stale: {', '.join(stale)}; run manage.py states_print")
        print(f"written: {', '.join(stale)}" if stale else "every diagram is fresh")


def pages() -> Iterator[tuple[str, str]]:
    """Yield (file stem, Markdown) of every state table of the installed apps."""
    for config in apps.get_app_configs():
        module_name = f"{config.name}.states"
        if find_spec(module_name) is None:
            continue
        for name, table in vars(import_module(module_name)).items():
            if name.endswith(SUFFIX) and isinstance(table, Mapping):
                stem = name.removesuffix(SUFFIX).lower().replace("_", "-")
                yield stem, _page(stem, config.name, table)


def _page(stem: str, app: str, table: Mapping[Any, Any]) -> str:
    title = stem.replace("-", " ").capitalize()
    source = f"Printed from `{app}/states.py` by `manage.py states_print`."
    return f"# {title}\n\n{source}\n\n```mermaid\n{mermaid(table)}```\n"
