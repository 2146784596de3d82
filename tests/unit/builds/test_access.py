"""Roles, tokens, sessions, the first users, and the audit chain."""

import json
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.contrib.auth import authenticate
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.test import Client

from builds.checks import check_production_keys, check_signing_keys, refuse_to_start
from builds.common.audit import audit, first_broken_line
from builds.common.auth import Actor, require, token_actor, token_create, user_actor
from builds.common.errors import ForbiddenError
from builds.common.roles import ROLE_PERMISSIONS, Permission, Role, roles_with
from builds.errors import SigningKeysError
from builds.models import ApiToken, AuditEvent, Membership
from builds.services.signing import key_ring, keys_generate
from tests.factories.builds import make_model, make_user

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("permission", list(Permission))
def test_it_lets_a_role_do_exactly_what_the_table_says(role: Role, permission: Permission) -> None:
    actor = Actor("a", role)
    if permission in ROLE_PERMISSIONS[role]:
        require(actor, permission)
        return
    with pytest.raises(ForbiddenError) as error:
        require(actor, permission)
    assert all(other.value in error.value.hint for other in roles_with(permission))


def test_it_keeps_releasing_and_approving_apart() -> None:
    manager, approver = ROLE_PERMISSIONS[Role.RELEASE_MANAGER], ROLE_PERMISSIONS[Role.APPROVER]
    assert Permission.ROLLOUT_APPROVE not in manager
    assert Permission.ROLLOUT_EDIT not in approver
    assert Permission.ROLLOUT_HALT in manager & approver
    assert not Actor("stranger", None).may(Permission.VIEW)


def test_it_knows_a_token_until_it_is_revoked() -> None:
    token, text = token_create(name="ci", role=Role.DEVELOPER)
    secret = text.split("_", 2)[2]
    assert secret not in token.secret_sha256
    assert token_actor(text) == Actor(f"token ci (#{token.pk})", Role.DEVELOPER)
    token.refresh_from_db()
    assert token.last_used_at is not None
    assert token_actor(text[:-1]) is None
    token.revoked_at = token.last_used_at
    token.save()
    assert token_actor(text) is None


def test_it_takes_the_role_of_a_session_from_the_membership() -> None:
    user = make_user(Role.VIEWER)
    assert user_actor(user) == Actor(user.username, Role.VIEWER)
    Membership.objects.all().delete()
    assert user_actor(user).role is None
    user.is_active = False
    assert user_actor(user).name == "anonymous"


def test_it_needs_the_csrf_token_of_a_browser() -> None:
    user = make_user(Role.RELEASE_MANAGER)
    client = Client(enforce_csrf_checks=True)
    client.force_login(user)
    assert client.get("/api/v1/models").status_code == 200
    answer = client.post("/api/v1/models", "{}", content_type="application/json")
    assert answer.status_code == 403


def test_it_makes_the_first_users_once() -> None:
    first, again, reset = StringIO(), StringIO(), StringIO()
    for stream, options in ((first, []), (again, []), (reset, ["--reset"])):
        run(stream, "--json", *options)
    made = json.loads(first.getvalue())
    assert [user["role"] for user in made["users"]] == ["admin", "release_manager", "viewer"]
    assert {user["password"] for user in json.loads(again.getvalue())["users"]} == {None}
    renewed = json.loads(reset.getvalue())
    admin = renewed["users"][0]
    assert authenticate(username="admin", password=admin["password"]) is not None
    assert token_actor(made["ci_token"]) is None
    actor = token_actor(renewed["ci_token"])
    assert actor is not None
    assert actor.role is Role.DEVELOPER
    assert ApiToken.objects.filter(revoked_at=None).count() == 1


def test_it_takes_a_password_that_was_asked_for() -> None:
    run(StringIO(), "--password", "viewer=open sesame")
    assert authenticate(username="viewer", password="open sesame") is not None
    with pytest.raises(CommandError, match="USER"):
        run(StringIO(), "--password", "nobody=x")


def run(stream: StringIO, *options: str) -> None:
    import contextlib

    with contextlib.redirect_stdout(stream):
        call_command("bootstrap_access", *options)


def test_it_names_keys_that_others_can_read_or_that_are_broken(
    state_dir: Path,
) -> None:
    assert check_signing_keys() == []
    keys_generate()
    assert check_signing_keys() == []
    folder = state_dir / "keys"
    (folder / "image-build-1.pem").chmod(0o644)
    assert [(m.id, "image-build-1" in m.msg) for m in check_signing_keys()] == [
        ("builds.E001", True)
    ]
    (folder / "image-build-1.pem").chmod(0o600)
    (folder / "keys.json").write_text('{"schema": "sparsefleet.keys/2"}')
    assert [m.id for m in check_signing_keys()] == ["builds.E002"]
    with pytest.raises(ImproperlyConfigured, match=r"builds\.E002"):
        refuse_to_start()


def test_it_refuses_files_as_keys_and_offline_keys_in_production(
    state_dir: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = settings.SPARSEFLEET
    keys_generate()
    refuse_to_start()
    for name, value in (("debug", False), ("demo_keys", True)):
        monkeypatch.setattr(chosen, name, value)
    monkeypatch.setattr(chosen, "database_url", "")
    refuse_to_start()
    monkeypatch.setattr(chosen, "database_url", "postgres://host/db")
    assert [m.id for m in check_production_keys()] == ["builds.E003", "builds.E004", "builds.E005"]
    monkeypatch.setattr(chosen, "demo_keys", False)
    assert [m.id for m in check_production_keys()] == ["builds.E004", "builds.E005"]
    assert all(message.is_serious() and message.hint for message in check_production_keys())
    with pytest.raises(ImproperlyConfigured, match="plain files would sign for image build"):
        refuse_to_start()
    with pytest.raises(SigningKeysError, match="plain files"):
        key_ring()
    # With tokens in the list, and the offline keys with their holders, it starts.
    (state_dir / "keys-offline").rename(state_dir / "away")
    index = state_dir / "keys" / "keys.json"
    document = json.loads(index.read_text())
    for roles in (document["image"], document["director"]):
        for slots in roles.values():
            for number, slot in enumerate(slots, 1):
                slot["uri"] = f"hsm:{number}?label=x"
    index.write_text(json.dumps(document))
    assert check_production_keys() == []
    refuse_to_start()
    document["image"]["root"] = document["image"]["build"]
    index.write_text(json.dumps(document))
    assert [m.id for m in check_production_keys()] == ["builds.E005"]


def test_keys_never_make_themselves_in_production(
    state_dir: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings.SPARSEFLEET, "debug", False)
    with pytest.raises(CommandError, match="not made by themselves"):
        call_command("keys_init")
    assert not (state_dir / "keys").exists()
    assert not (state_dir / "keys-offline").exists()


@pytest.mark.parametrize(
    "command",
    [
        ["-c", "import dashboards.conf.wsgi"],
        ["-m", "celery", "-A", "dashboards.conf.celery", "worker", "--pool", "solo"],
    ],
    ids=["web", "worker"],
)
def test_neither_web_nor_worker_starts_with_files_as_keys(
    state_dir: Path, command: list[str]
) -> None:
    keys_generate()
    run = subprocess.run(
        [sys.executable, *command],
        cwd=django_settings.BASE_DIR,
        env={"SPARSEFLEET_STATE_DIR": str(state_dir), "SPARSEFLEET_NO_BOOTSTRAP": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert run.returncode != 0
    assert "builds.E004: plain files would sign for image build" in run.stderr


def test_it_makes_keys_and_metadata_once_on_the_command_line(
    state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call_command("keys_init")
    assert "PLAIN FILES" in capsys.readouterr().out
    before = {path.name: path.read_bytes() for path in (state_dir / "keys").iterdir()}
    call_command("keys_init")
    assert "PLAIN FILES" not in capsys.readouterr().out
    assert before == {path.name: path.read_bytes() for path in (state_dir / "keys").iterdir()}
    for path in (state_dir / "keys").iterdir():
        path.unlink()
    assert list((state_dir / "keys-offline").iterdir())
    with pytest.raises(CommandError, match="restore them"):
        call_command("keys_init")


def write_three() -> list[AuditEvent]:
    model = make_model()
    return [audit(actor="a", action=f"x.{n}", obj=model, number=n) for n in range(3)]


@pytest.mark.parametrize(
    "damage",
    [
        lambda row: AuditEvent.objects.filter(pk=row.pk).update(actor="b"),
        lambda row: AuditEvent.objects.filter(pk=row.pk).update(detail={"number": 9}),
        lambda row: AuditEvent.objects.filter(pk=row.pk).update(sha256="0" * 64),
        lambda row: AuditEvent.objects.filter(pk=row.pk).delete(),
    ],
    ids=["actor", "detail", "digest", "removed"],
)
def test_it_notices_a_changed_audit_line(damage: Callable[[AuditEvent], Any]) -> None:
    rows = write_three()
    assert first_broken_line(AuditEvent.objects.all()) is None
    damage(rows[1])
    broken = first_broken_line(AuditEvent.objects.all())
    assert broken is not None
    assert broken.pk in {rows[1].pk, rows[2].pk}


def test_it_refuses_to_change_or_remove_an_audit_line() -> None:
    row = write_three()[0]
    with pytest.raises(TypeError, match="append-only"):
        row.save()
    with pytest.raises(TypeError, match="append-only"):
        row.delete()


def test_it_checks_the_audit_chain_on_the_command_line() -> None:
    rows = write_three()
    call_command("audit_verify")
    AuditEvent.objects.filter(pk=rows[2].pk).update(action="y")
    with pytest.raises(CommandError, match=str(rows[2].pk)):
        call_command("audit_verify")
