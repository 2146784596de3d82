"""Commands: a claim token for a script, and stored looks decided again."""

import io
import json

import pytest
from django.core.management import CommandError, call_command

from fleet.models import ClaimToken, GateLook
from fleet.services.claims import claim_check
from tests.factories.fleet import SimulatedFleet

pytestmark = pytest.mark.django_db


def run(*arguments: str) -> str:
    output = io.StringIO()
    call_command(*arguments, stdout=output)
    return output.getvalue()


def test_it_prints_a_claim_token_for_machines(clock):
    document = json.loads(run("claim_create", "--name", "demo", "--uses", "5", "--json"))
    claim = claim_check(text=document["token"], now=clock.now())
    assert (claim.name, claim.uses_left, document["uses"]) == ("demo", 5, 5)


def test_it_prints_a_claim_token_for_people_that_ends(clock):
    text = run("claim_create", "--name", "day", "--hours", "24", "--device-class", "car")
    assert text.startswith("sfc_")
    claim = ClaimToken.objects.get()
    assert claim.device_class == "car"
    assert claim.expires_at is not None


@pytest.mark.parametrize("hours", ["1e300", "-1", "nan", "inf", "99999"])
def test_it_refuses_hours_that_no_calendar_holds(hours):
    with pytest.raises(CommandError, match="at most 87840"):
        run("claim_create", "--name", "day", f"--hours={hours}")
    assert not ClaimToken.objects.exists()


@pytest.mark.parametrize(
    "arguments", [("claim_create", "--name", "day"), ("gate_replay", "1")], ids=lambda a: a[0]
)
def test_it_asks_for_a_database_first(monkeypatch, arguments):
    monkeypatch.setattr("builds.common.commands.database_fault", lambda: "there is no database yet")
    with pytest.raises(CommandError, match="hint: run manage"):
        run(*arguments)


@pytest.fixture
def fleet() -> SimulatedFleet:
    fleet = SimulatedFleet(per_target=2)
    fleet.answers_per_s = 20
    fleet.run(3)
    fleet.release()
    fleet.rollout()
    fleet.run(12)
    return fleet


def test_it_decides_every_stored_look_again(fleet):
    looks = GateLook.objects.count()
    assert looks > 5
    rollout = str(GateLook.objects.first().rollout_id)
    assert f"{looks} looks decided again, 0 differ" in run("gate_replay", "--rollout", rollout)
    last = GateLook.objects.last()
    assert f"look {last.pk}: stored {last.decision}" in run("gate_replay", str(last.pk))


def test_it_notices_a_verdict_or_evidence_that_was_changed(fleet):
    look = GateLook.objects.filter(evidence__increments__0__isnull=False).last()
    look.evidence["increments"][0][2] += 30
    look.save()
    with pytest.raises(CommandError, match="does not follow"):
        run("gate_replay", str(look.pk))
    with pytest.raises(CommandError):
        run("gate_replay", "--rollout", str(look.rollout_id))


def test_it_wants_one_look_or_one_rollout_that_exists():
    for arguments in ((), ("1", "--rollout", "1"), ("12345",), ("--rollout", "12345")):
        with pytest.raises(CommandError):
            run("gate_replay", *arguments)
