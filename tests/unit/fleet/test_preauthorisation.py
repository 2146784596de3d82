"""Devices that an operator knows join with their key alone; a second key never does."""

import io
import secrets
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from builds.common.errors import ConflictError, ForbiddenError, InvalidInputError
from builds.common.roles import Role
from builds.models import AuditEvent
from builds.services.signing import keys_generate, repositories_init
from compiler.contract.canonical import sha256_hex
from fleet.models import (
    ClaimToken,
    Device,
    DeviceNonce,
    IdentityAlert,
    Preauthorisation,
    ReplacedKey,
)
from fleet.services.alerts import alert_raise, alert_settle
from fleet.services.claims import claim_create
from fleet.services.enrolment import device_admit
from fleet.services.preauthorisation import preauthorisation_create, preauthorisation_revoke
from fleet.states import AlertKind, DeviceEvent, DeviceState
from tests.factories.builds import make_model
from tests.factories.fleet import MANAGER, make_device
from tests.unit.fleet.test_apis import Api
from tests.unit.fleet.test_enrolment import Newcomer

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _platform(state_dir: Any) -> None:
    keys_generate()
    repositories_init()
    make_model("doc-reader")


@pytest.fixture
def claim() -> str:
    return claim_create(actor=MANAGER, name="lab", uses=5)[1]


def allow(device: Newcomer, **how: Any) -> Preauthorisation:
    return preauthorisation_create(
        actor=MANAGER, serial=device.serial, key_thumbprint=sha256_hex(device.public), **how
    )


def open_alert() -> IdentityAlert:
    return IdentityAlert.objects.get(settled_at=None)


@pytest.mark.parametrize("with_claim", [False, True])
def test_it_lets_a_preauthorised_device_join_without_using_a_claim(claim, with_claim):
    device = Newcomer()
    row = allow(device, device_class="kiosk")
    answer = device.enrol(claim if with_claim else "")
    assert (answer.status_code, answer.json()["state"]) == (201, "accepted")
    enrolled = Device.objects.get()
    assert (enrolled.claim, enrolled.device_class) == (None, "kiosk")
    assert ClaimToken.objects.get().uses_left == 5
    row.refresh_from_db()
    assert (row.device_id, row.used_at is not None) == (enrolled.pk, True)
    assert device.token().status_code == 200
    assert device.enrol("").status_code == 200  # the same device, as ever
    enrolment = AuditEvent.objects.get(action="device.enrol")
    assert enrolment.detail["preauthorisation"] == row.pk
    assert AuditEvent.objects.filter(action="preauthorisation.create").count() == 1


def test_it_denies_by_default(claim):
    known, stranger = Newcomer("known"), Newcomer("stranger")
    allow(known)
    for how in ({}, {"serial": "known"}):
        answer = stranger.enrol("", **how)
        assert (answer.status_code, answer.json()["code"]) == (403, "fleet.claim")
    # the right key under another serial number is as unknown as any
    assert known.enrol("", serial="other").status_code == 403
    assert not Device.objects.exists()
    assert not DeviceNonce.objects.exists()


def test_it_lets_no_claim_take_a_serial_that_is_kept_for_a_key(claim):
    expected, thief = Newcomer(), Newcomer()
    allow(expected)
    answer = thief.enrol(claim)
    assert (answer.status_code, answer.json()["code"]) == (409, "fleet.serial_taken")
    assert ClaimToken.objects.get().uses_left == 5
    alert = open_alert()
    assert (alert.kind, alert.serial, alert.device) == ("second_key", "card-1", None)
    assert alert.key_thumbprint == sha256_hex(thief.public)
    assert expected.enrol("").status_code == 201


def test_it_raises_an_alert_about_a_second_key(claim):
    device, second = Newcomer(), Newcomer()
    device.enrol(claim)
    assert second.enrol(claim).status_code == 409
    alert = open_alert()
    assert (alert.kind, alert.device, alert.count) == ("second_key", Device.objects.get(), 1)
    assert alert.key_thumbprint == sha256_hex(second.public)
    line = AuditEvent.objects.get(action="alert.second_key")
    assert line.detail["serial"] == "card-1"
    assert Device.objects.get().key_thumbprint == sha256_hex(device.public)


def test_it_raises_it_for_a_stranger_without_a_claim_and_tells_him_nothing(claim):
    Newcomer().enrol(claim)
    known, unknown = Newcomer().enrol(""), Newcomer("card-2").enrol("")
    assert known.json() == unknown.json()
    assert "no good claim" in open_alert().text


def test_it_writes_at_most_once_a_minute_about_the_same(clock):
    def again(seconds: float) -> IdentityAlert:
        clock.advance(seconds)
        for _ in range(3):
            alert_raise(
                kind=AlertKind.SECOND_KEY,
                serial="card-1",
                key_thumbprint=secrets.token_hex(32),
                text="again",
                clock=clock,
            )
        return open_alert()

    assert again(0).count == 1
    assert again(59).count == 1
    assert again(2).count == 2
    assert AuditEvent.objects.filter(action="alert.second_key").count() == 1


def test_it_opens_a_new_alert_after_one_was_settled(claim):
    Newcomer().enrol(claim)
    Newcomer().enrol(claim)
    alert = alert_settle(actor=MANAGER, alert_id=open_alert().pk, note="a swapped board")
    assert (alert.settled_by, alert.note) == (MANAGER.name, "a swapped board")
    with pytest.raises(ConflictError):
        alert_settle(actor=MANAGER, alert_id=alert.pk)
    Newcomer().enrol(claim)
    assert open_alert().pk != alert.pk


@pytest.mark.parametrize("state", [DeviceState.ACCEPTED, DeviceState.QUARANTINED])
def test_it_gives_a_device_that_lost_its_key_a_new_one(claim, state):
    lost, reborn = Newcomer(), Newcomer()
    lost.enrol(claim)
    before = Device.objects.get()
    if state == DeviceState.QUARANTINED:
        device_admit(actor=MANAGER, device_pk=before.pk, event=DeviceEvent.QUARANTINE)
    allow(reborn, replaces=True)
    answer = reborn.enrol("")
    assert (answer.status_code, answer.json()["device_id"]) == (200, before.device_id)
    after = Device.objects.get()
    assert (after.pk, after.state) == (before.pk, state)
    assert after.key_thumbprint == sha256_hex(reborn.public)
    assert after.token_generation > before.token_generation
    assert ReplacedKey.objects.get().key_thumbprint == sha256_hex(lost.public)
    assert lost.enrol(claim).json()["code"] == "fleet.key_taken"
    assert "replaced" in open_alert().text
    assert lost.enrol(claim, serial="another").json()["code"] == "fleet.key_taken"
    assert AuditEvent.objects.get(action="device.key").detail["old"] == sha256_hex(lost.public)


@pytest.mark.parametrize("event", [DeviceEvent.RETIRE])
def test_it_brings_no_retired_device_back(claim, event):
    lost, reborn = Newcomer(), Newcomer()
    lost.enrol(claim)
    device_admit(actor=MANAGER, device_pk=Device.objects.get().pk, event=event)
    allow(reborn, replaces=True)
    answer = reborn.enrol("")
    assert (answer.status_code, answer.json()["code"]) == (403, "fleet.device_state")
    assert Preauthorisation.objects.get().used_at is None


def test_it_refuses_what_makes_no_sense(claim):
    device, other = Newcomer(), Newcomer("card-2")
    with pytest.raises(ConflictError, match="no device has"):
        allow(other, replaces=True)
    device.enrol(claim)
    for newcomer, how in ((device, {"replaces": True}), (Newcomer(), {})):
        with pytest.raises(ConflictError):
            allow(newcomer, **how)
    allow(other)
    with pytest.raises(ConflictError, match="exists"):
        allow(Newcomer("card-2"))
    for thumbprint in ("", "A" * 64, "0" * 63, "g" * 64):
        with pytest.raises(InvalidInputError):
            preauthorisation_create(actor=MANAGER, serial="card-3", key_thumbprint=thumbprint)
    with pytest.raises(InvalidInputError):
        preauthorisation_create(actor=MANAGER, serial="", key_thumbprint="0" * 64)


def test_it_asks_for_the_role(ci_bot, stranger):
    alert_raise(kind=AlertKind.CLONE, serial="s", key_thumbprint="0" * 64, text="x")
    for actor in (ci_bot, stranger):
        with pytest.raises(ForbiddenError):
            preauthorisation_create(actor=actor, serial="s", key_thumbprint="0" * 64)
        with pytest.raises(ForbiddenError):
            preauthorisation_revoke(actor=actor, preauthorisation_id=1)
        with pytest.raises(ForbiddenError):
            alert_settle(actor=actor, alert_id=open_alert().pk)


def test_it_is_had_over_http(claim):
    manager, viewer = Api(Role.RELEASE_MANAGER), Api(Role.VIEWER)
    body = {"serial": "card-9", "key_thumbprint": "ab" * 32}
    assert viewer.post("/preauthorisations", body).status_code == 403
    made = manager.post("/preauthorisations", body)
    assert made.status_code == 201, made.content
    assert (made.json()["used_at"], made.json()["device"]) == (None, None)
    assert manager.post("/preauthorisations", body).status_code == 409
    assert [row["serial"] for row in manager.get("/preauthorisations").json()["items"]] == [
        "card-9"
    ]
    path = f"/api/v1/preauthorisations/{made.json()['id']}"
    assert manager.client.delete(path, headers=manager.headers).status_code == 204
    assert manager.client.delete(path, headers=manager.headers).status_code == 404
    Newcomer().enrol(claim)
    Newcomer().enrol(claim)
    (alert,) = viewer.get("/identity-alerts?open_only=true").json()["items"]
    assert (alert["kind"], alert["serial"]) == ("second_key", "card-1")
    settle = f"/identity-alerts/{alert['id']}/settle"
    assert viewer.post(settle, {}).status_code == 403
    assert manager.post(settle, {"reason": "known"}).json()["note"] == "known"
    assert viewer.get("/identity-alerts?open_only=true").json()["items"] == []


def test_it_quarantines_and_releases_over_http():
    device = make_device()
    manager = Api(Role.RELEASE_MANAGER)
    for action, state in (("quarantine", "quarantined"), ("release", "accepted")):
        answer = manager.post(f"/devices/{device.pk}/admit", {"action": action, "reason": "x"})
        assert (answer.status_code, answer.json()["state"]) == (200, state)


def test_it_is_a_command():
    output = io.StringIO()
    call_command("device_preauthorise", "--serial", "s", "--key", "ab" * 32, stdout=output)
    assert "s may join" in output.getvalue()
    assert Preauthorisation.objects.get().created_by == "system"
    with pytest.raises(CommandError, match="hint"):
        call_command("device_preauthorise", "--serial", "s", "--key", "cd" * 32)
