"""Devices join with a claim token and their own key, and leave for good."""

import base64
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.test import Client

from builds.common.errors import ForbiddenError, IllegalTransitionError, InvalidInputError
from builds.models import AuditEvent, Target
from builds.services.signing import keys_generate, repositories_init
from compiler.contract.canonical import sha256_hex
from compiler.contract.protocol import UpdateState
from fleet.errors import ClaimError
from fleet.models import ClaimToken, Device, DeviceNonce, Fingerprint
from fleet.services.claims import claim_create
from fleet.services.enrolment import device_admit
from fleet.services.signatures import nonces_forget
from fleet.states import DeviceEvent, DeviceState
from tests.factories.builds import make_model
from tests.factories.fleet import MANAGER, SimulatedFleet, facts, make_device, new_key
from tests.factories.signing import signed_headers

pytestmark = pytest.mark.django_db
HOST = "http://testserver"


@pytest.fixture(autouse=True)
def _keys(state_dir: Any) -> None:
    keys_generate()
    repositories_init()


@pytest.fixture
def claim() -> str:
    make_model("doc-reader")
    return claim_create(actor=MANAGER, name="lab", uses=2)[1]


class Newcomer:
    """A device that is not known yet."""

    def __init__(self, serial: str = "card-1") -> None:
        self.key, self.public = new_key()
        self.serial = serial
        self.client = Client()

    def body(self, claim: str, **changes: object) -> bytes:
        document = {
            "claim": claim,
            "serial": self.serial,
            "name": "a card",
            "public_key": base64.b64encode(self.public).decode(),
            "model": "doc-reader",
            "fingerprint": facts().to_json(),
            **changes,
        }
        return json.dumps(document).encode()

    def send(self, path: str, body: bytes, **how: Any) -> Any:
        headers = how.pop("headers", None) or signed_headers(
            self.key, self.public, url=HOST + path, body=body, **how
        )
        return self.client.post(path, body, content_type="application/json", headers=headers)

    def enrol(self, claim: str, **changes: object) -> Any:
        return self.send("/d/v1/enrol", self.body(claim, **changes))

    def token(self, **how: Any) -> Any:
        body = json.dumps({"device_id": sha256_hex(self.public)[:32]}).encode()
        return self.send("/d/v1/token", body, **how)


def test_it_enrols_a_device_and_activates_its_target(claim):
    answer = Newcomer().enrol(claim)
    assert answer.status_code == 201, answer.content
    document = answer.json()
    device = Device.objects.get()
    assert document["device_id"] == device.device_id == device.key_thumbprint[:32]
    assert document["state"] == "accepted"
    assert document["image_root"]["signed"]["_type"] == "root"
    assert document["director_root"]["signed"]["_type"] == "root"
    assert document["tuf_url"] == f"{HOST}/tuf/"
    assert Target.objects.get(name="x86-64-v3").active
    assert Fingerprint.objects.get().document["soc"] == "Test SoC"
    assert AuditEvent.objects.filter(action="device.enrol").count() == 1
    assert ClaimToken.objects.get().uses_left == 1


def test_it_knows_the_same_key_again_and_uses_no_claim_for_it(claim):
    device = Newcomer()
    assert device.enrol(claim).status_code == 201
    again = device.enrol("sfc_1_worn-out-and-wrong-token", fingerprint=facts("x86-64-v1").to_json())
    assert again.status_code == 200
    assert Device.objects.get().target.name == "x86-64-v1"
    assert ClaimToken.objects.get().uses_left == 1


def test_it_refuses_another_key_for_a_known_serial(claim):
    assert Newcomer().enrol(claim).status_code == 201
    answer = Newcomer().enrol(claim)
    assert answer.status_code == 409
    assert answer.json()["code"] == "fleet.serial_taken"


def test_it_refuses_a_claim_that_is_wrong_used_up_or_expired(claim):
    for text in (
        "",
        "sfc_1_",
        "sfc_99_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        claim[:-1] + "!",
        claim + "x",
    ):
        answer = Newcomer().enrol(text)
        assert (answer.status_code, answer.json()["code"]) == (403, "fleet.claim"), text
    assert DeviceNonce.objects.count() == 0  # nothing is stored for a stranger
    for number in range(2):
        assert Newcomer(f"card-{number}").enrol(claim).status_code == 201
    assert Newcomer("card-9").enrol(claim).status_code == 403
    late = claim_create(
        actor=MANAGER, name="late", uses=1, expires_at=datetime.now(UTC) - timedelta(seconds=1)
    )[1]
    assert Newcomer("card-9").enrol(late).status_code == 403
    assert Device.objects.count() == 2


@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        ({"serial": ""}, 422, "app.invalid_input"),
        ({"name": "x" * 97}, 422, "app.invalid_input"),
        ({"serial": "a\nb"}, 422, "app.invalid_input"),
        ({"model": "unknown"}, 404, "app.not_found"),
        ({"public_key": "!!"}, 400, "contract.invalid"),
        ({"fingerprint": []}, 400, "contract.invalid"),
        ({"fingerprint": {**facts().to_json(), "machine": "sparc64"}}, 400, "contract.invalid"),
        ({"fingerprint": {**facts().to_json(), "soc": 3}}, 400, "contract.invalid"),
        ({"fingerprint": facts(device_class="a/b").to_json()}, 422, "app.invalid_input"),
    ],
)
def test_it_refuses_what_it_cannot_use(claim, changes, status, code):
    answer = Newcomer().enrol(claim, **changes)
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert not Device.objects.exists()
    assert ClaimToken.objects.get().uses_left == 2


def test_it_issues_a_token_to_the_holder_of_the_key_only(claim):
    device = Newcomer()
    device.enrol(claim)
    answer = device.token()
    assert answer.status_code == 200, answer.content
    assert answer.json()["token"].count(".") == 3
    stranger = Newcomer()
    stranger.public = device.public
    assert stranger.token().json()["code"] == "fleet.signature"
    unknown = Newcomer().token()
    assert unknown.status_code == 401


def test_it_refuses_a_request_that_is_replayed_stale_or_not_fully_signed(claim):
    device = Newcomer()
    device.enrol(claim)
    body = json.dumps({"device_id": sha256_hex(device.public)[:32]}).encode()
    url = f"{HOST}/d/v1/token"
    headers = signed_headers(device.key, device.public, url=url, body=body)
    assert device.send("/d/v1/token", body, headers=headers).status_code == 200
    assert device.send("/d/v1/token", body, headers=headers).json()["code"] == "fleet.replay"
    for seconds in (-400, 60):
        answer = device.token(created=datetime.now(UTC) + timedelta(seconds=seconds))
        assert (answer.status_code, answer.json()["code"]) == (401, "fleet.clock"), seconds
    bad = [
        {"tag": "something-else"},
        {"components": ("@method", "@authority", "content-digest", "content-type")},
        {"nonce": "short"},
        {"keyid": "0" * 64},
    ]
    for how in bad:
        answer = device.token(**how)
        assert (answer.status_code, answer.json()["code"]) == (401, "fleet.signature"), how
    other_body = device.send("/d/v1/token", body + b" ", headers=dict(headers))
    assert other_body.json()["code"] == "fleet.signature"
    no_signature = device.send("/d/v1/token", body, headers={"x": "y"})
    assert no_signature.status_code == 401


def test_it_forgets_nonces_when_their_signatures_are_too_old(claim, clock):
    Newcomer().enrol(claim)
    assert DeviceNonce.objects.count() == 1
    clock.at = datetime.now(UTC)
    assert nonces_forget(clock=clock) == 0
    clock.advance(700)
    assert nonces_forget(clock=clock) == 1


def test_it_lets_a_device_wait_until_somebody_accepts_it():
    make_model("doc-reader")
    claim = claim_create(actor=MANAGER, name="shy", uses=1, accepts=False)[1]
    device = Newcomer()
    assert device.enrol(claim).json()["state"] == "pending"
    assert device.token().json()["code"] == "fleet.device_state"
    device_admit(actor=MANAGER, device_pk=Device.objects.get().pk, event=DeviceEvent.ACCEPT)
    assert device.token().status_code == 200


def test_it_takes_everything_from_a_retired_device():
    fleet = SimulatedFleet(per_target=2)
    fleet.release()
    rollout = fleet.rollout()
    update = rollout.updates.first()
    device_admit(actor=MANAGER, device_pk=update.device_id, event=DeviceEvent.RETIRE, reason="sold")
    update.refresh_from_db()
    assert update.state == UpdateState.REMOVED
    device = Device.objects.get(pk=update.device_id)
    assert (device.state, device.token_generation) == (DeviceState.RETIRED, 1)
    with pytest.raises(IllegalTransitionError):
        device_admit(actor=MANAGER, device_pk=device.pk, event=DeviceEvent.ACCEPT)


def test_it_asks_for_the_role(ci_bot, stranger):
    device = make_device(state=DeviceState.PENDING)
    for actor in (ci_bot, stranger):
        with pytest.raises(ForbiddenError):
            device_admit(actor=actor, device_pk=device.pk, event=DeviceEvent.ACCEPT)
        with pytest.raises(ForbiddenError):
            claim_create(actor=actor, name="x", uses=1)


@pytest.mark.parametrize("wrong", [{"uses": 0}, {"name": ""}, {"device_class": "A b"}])
def test_it_refuses_an_impossible_claim_token(wrong):
    with pytest.raises(InvalidInputError):
        claim_create(actor=MANAGER, **{"name": "x", "uses": 1, **wrong})


def test_it_does_not_overuse_a_claim_between_check_and_use(clock):
    from fleet.services.claims import claim_check, claim_use

    _, text = claim_create(actor=MANAGER, name="one", uses=1)
    claim = claim_check(text=text, now=clock.now())
    claim_use(claim=claim, now=clock.now())
    with pytest.raises(ClaimError):
        claim_use(claim=claim, now=clock.now())
