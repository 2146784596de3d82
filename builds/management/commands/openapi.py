"""`manage.py openapi`: the management API as `docs/openapi.json`."""

import json
from argparse import ArgumentParser
from importlib import import_module
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from ninja.responses import NinjaJSONEncoder

from builds.apis import api

PATH = settings.BASE_DIR / "docs" / "openapi.json"
PREFIX = "/api/v1/"


class Command(BaseCommand):
    """Write the OpenAPI document of every router, or check that the committed one is fresh."""

    help = "Write docs/openapi.json; --check fails when it is stale."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument("--check", action="store_true", help="write nothing, compare")

    def handle(self, *args: Any, **options: Any) -> None:  # noqa: ANN401 -- Django's signature
        """Run."""
        import_module(settings.ROOT_URLCONF)  # every app adds its routers there
        text = document()
        if options["check"]:
            if not PATH.exists() or PATH.read_text(encoding="utf-8") != text:
                raise CommandError("docs/openapi.json is stale; run manage.py openapi")
            print("docs/openapi.json is fresh")
            return
        PATH.write_text(text, encoding="utf-8")
        print(f"written: {PATH.name}, {len(json.loads(text)['paths'])} paths")


def document() -> str:
    """Return the OpenAPI document as sorted, indented JSON."""
    schema = api.get_openapi_schema(path_prefix=PREFIX)
    plain = json.loads(json.dumps(schema, cls=NinjaJSONEncoder))  # status codes become text
    return json.dumps(plain, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
