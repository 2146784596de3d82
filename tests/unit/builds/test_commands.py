"""Commands against a database that is not there yet, and what tokens are called in the audit."""

import subprocess
import sys
from pathlib import Path

import pytest
from django.conf import settings
from django.core.management import CommandError, call_command
from django.db import connection

from builds.common import commands
from builds.common.auth import token_actor
from builds.models import AuditEvent


@pytest.mark.parametrize("database", ["absent", "empty"])
def test_it_says_migrate_instead_of_a_traceback(tmp_path: Path, database: str) -> None:
    file = tmp_path / "sparsefleet.sqlite3"
    if database == "empty":
        file.touch()
    run = subprocess.run(
        [sys.executable, "manage.py", "token_create", "--name", "ci", "--role", "viewer"],
        cwd=settings.BASE_DIR,
        env={"SPARSEFLEET_STATE_DIR": str(tmp_path), "SPARSEFLEET_NO_BOOTSTRAP": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert run.stderr.startswith("error: ")
    assert (
        "\nhint: run manage.py migrate, or name the platform's folder: SPARSEFLEET_STATE_DIR"
        in (run.stderr)
    )
    assert run.stderr.count("\n") == 2
    assert file.exists() is (database == "empty")


@pytest.mark.skipif(connection.vendor != "sqlite", reason="only SQLite's database is a file")
@pytest.mark.parametrize("name", ["audit_verify", "bootstrap_access", "keys_init"])
def test_it_stops_every_command_that_needs_tables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setitem(connection.settings_dict, "NAME", str(tmp_path / "absent"))
    with pytest.raises(CommandError, match="no database yet"):
        call_command(name)
    assert not (tmp_path / "absent").exists()


@pytest.mark.django_db
def test_it_calls_a_token_by_its_name_in_the_audit(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.database_fault() is None
    call_command("token_create", name="nightly", role="developer")
    text = capsys.readouterr().out.split()[0]
    actor = token_actor(text)
    assert actor is not None
    event = AuditEvent.objects.get(action="token.create")
    assert event.detail == {"name": "nightly", "role": "developer"}
    assert actor.name == f"token nightly (#{event.object_id})"
