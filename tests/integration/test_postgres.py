"""The database tests again, on PostgreSQL: the same modules, in a process of their own."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.engines import postgres_server

ROOT = Path(__file__).resolve().parents[2]
MARK = re.compile(r"pytest\.mark\.django_db")
OWN_SERVERS = re.compile(r"tests\.integration\.(engines|platform)|pytest\.mark\.(browser|redis)")
AREAS = ("builds", "fleet", "dashboards")

pytestmark = [pytest.mark.postgres, pytest.mark.xdist_group("postgres")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with postgres_server(tmp_path_factory.mktemp("postgres")) as address:
        yield address


def modules_of(area: str) -> list[str]:
    """Return the test modules of an area that use the database and no server of their own."""
    candidates = [
        *(ROOT / "tests" / "unit" / area).rglob("test_*.py"),
        *(ROOT / "tests" / "integration").glob(f"test_{area}_*.py"),
    ]
    texts = {path: path.read_text(encoding="utf-8") for path in candidates}
    return sorted(
        str(path.relative_to(ROOT))
        for path, text in texts.items()
        if MARK.search(text) and not OWN_SERVERS.search(text)
    )


@pytest.mark.parametrize("area", AREAS)
def test_it_passes_its_database_tests_on_postgresql(area: str, server: str) -> None:
    modules = modules_of(area)
    if not modules:
        pytest.skip(f"{area} has no database tests")
    kept = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *modules]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={
            **kept,
            "SPARSEFLEET_DATABASE_URL": server,
            "DJANGO_SETTINGS_MODULE": "tests.settings",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6_000:] + done.stderr[-2_000:]
    assert " passed" in done.stdout
