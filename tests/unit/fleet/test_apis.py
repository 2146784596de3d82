"""The management API of the fleet, and the device API behind the edge, over HTTP."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from django.test import Client

from builds.common.auth import token_create
from builds.common.roles import Role
from builds.services.signing import keys_generate, release_publish, repositories_init
from compiler.contract.protocol import UpdateReport, UpdateState, assignment_from_json
from compiler.contract.telemetry import Sketch, TelemetryBatch
from fleet.models import Device, DeviceStats, Rollout, Update
from fleet.states import DeviceState
from tests.factories.fleet import SimulatedFleet, make_device
from tests.unit.fleet.test_edge import RealClock, Wire

pytestmark = pytest.mark.django_db


class Api:
    """A client with a token of one role."""

    def __init__(self, role: Role | None) -> None:
        self.client = Client()
        self.headers: dict[str, str] = {}
        if role is not None:
            self.headers = {"authorization": f"Bearer {token_create(name='t', role=role)[1]}"}

    def post(self, path: str, body: object = None, **headers: str) -> Any:
        return self.client.post(
            f"/api/v1{path}",
            json.dumps(body) if body is not None else "",
            content_type="application/json",
            headers={**self.headers, **headers},
        )

    def get(self, path: str) -> Any:
        return self.client.get(f"/api/v1{path}", headers=self.headers)


@pytest.fixture
def fleet() -> SimulatedFleet:
    fleet = SimulatedFleet(per_target=2)
    fleet.answers_per_s = 0
    fleet.release()
    return fleet


@pytest.fixture
def manager() -> Api:
    return Api(Role.RELEASE_MANAGER)


def request_of(fleet: SimulatedFleet, **changes: object) -> dict[str, object]:
    return {
        "model": fleet.model.name,
        "version": fleet.version.version,
        "group": fleet.group.name,
        "stages": [{"percent": 20}, {"percent": 50}, {"percent": 100}],
        "gate": {"profile": "lab", "min_answers": 100, "delta_wait_s": 0},
        **changes,
    }


def test_it_runs_a_rollout_from_the_request_to_the_halt(fleet, manager):
    made = manager.post("/rollouts", request_of(fleet), **{"Idempotency-Key": "one"})
    assert made.status_code == 201, made.content
    again = manager.post("/rollouts", request_of(fleet), **{"Idempotency-Key": "one"})
    assert again.json() == made.json()
    assert Rollout.objects.count() == 1
    pk = made.json()["id"]
    assert made.json()["state"] == "ready"
    assert made.json()["gate"]["min_answers"] == 100
    started = manager.post(f"/rollouts/{pk}/start")
    assert started.status_code == 200, started.content
    assert started.json()["state"] == "running"
    assert [stage["treatment_target"] for stage in started.json()["stages"]] == [2, 3, 5, 6]
    fleet.clock.at = datetime.now(UTC)  # the API has no other clock
    fleet.run(2)
    updates = manager.get(f"/rollouts/{pk}/updates?kind=install").json()["items"]
    assert {update["state"] for update in updates} == {"downloading"}
    assert {update["device_id"] for update in updates} <= {device.pk for device in fleet.devices}
    assert manager.get(f"/rollouts/{pk}/updates?kind=rollback").json()["items"] == []
    evidence = manager.get(f"/rollouts/{pk}/evidence").json()
    assert evidence["counts"]["installs"] == {"downloading": 2}
    assert evidence["looks"][0]["decision"] == "no_data"
    assert evidence["last_look"]["evidence"]["mode"] == "compare"
    halted = manager.post(f"/rollouts/{pk}/halt", {"reason": "enough"})
    assert halted.json()["state"] == "stopped"
    problem = manager.post(f"/rollouts/{pk}/halt")
    assert (problem.status_code, problem.json()["code"]) == (409, "app.illegal_transition")
    assert manager.get("/rollouts?state=stopped").json()["items"][0]["id"] == pk
    assert manager.post(f"/rollouts/{pk}/explode").status_code == 422
    for wrong in (
        "/rollouts?state=over",
        "/devices?state=happy",
        f"/rollouts/{pk}/updates?kind=push",
        f"/rollouts/{pk}/updates?state=half",
        f"/rollouts/{pk}/evidence?decision=maybe",
    ):
        assert manager.get(wrong).status_code == 422, wrong
    assert manager.get("/devices?state=accepted").json()["items"]


def test_it_lets_a_viewer_look_and_nothing_else(fleet):
    viewer = Api(Role.VIEWER)
    rollout = fleet.rollout()
    device = Device.objects.first()
    for path in (
        "/devices",
        f"/devices/{device.pk}",
        "/groups",
        "/rollouts",
        f"/rollouts/{rollout.pk}",
        f"/rollouts/{rollout.pk}/evidence",
    ):
        assert viewer.get(path).status_code == 200, path
    posts = {
        "/rollouts": request_of(fleet),
        "/groups": {"name": "g", "model": fleet.model.name},
        "/claim-tokens": {"name": "c", "uses": 1},
        f"/devices/{device.pk}/admit": {"action": "retire"},
        **{
            f"/rollouts/{rollout.pk}/{name}": {"reason": "x"}
            for name in ("start", "pause", "resume", "halt", "cancel", "rollback", "approve")
        },
        f"/rollouts/{rollout.pk}/promote": {"reason": "x"},
    }
    for path, body in posts.items():
        answer = viewer.post(path, body)
        assert (answer.status_code, answer.json()["code"]) == (403, "app.forbidden"), path
    assert viewer.get("/claim-tokens").status_code == 403
    for path in ("/devices", "/rollouts"):
        assert Api(None).get(path).status_code == 401


def test_it_shows_a_device_and_why_it_gets_what_it_gets(fleet, manager):
    rollout = fleet.rollout()
    fleet.run(2)
    treated = Update.objects.first().device_id
    document = manager.get(f"/devices/{treated}").json()
    assert document["updates"][0]["state"] == "downloading"
    assert document["why"]["answer"]["offer"]["update_id"] == Update.objects.first().pk
    assert any("is offered" in reason for reason in document["why"]["reasons"])
    assert any("counts as treatment" in reason for reason in document["why"]["reasons"])
    control = rollout.enrolments.filter(arm="control").first().device_id
    reasons = manager.get(f"/devices/{control}").json()["why"]["reasons"]
    assert any("to compare with (control)" in reason for reason in reasons)
    assert manager.get("/devices/999999").status_code == 404


def test_it_pages_devices_and_filters_them(fleet, manager):
    first = manager.get("/devices?limit=4").json()
    second = manager.get(f"/devices?limit=4&cursor={first['next']}").json()
    ids = [item["id"] for item in first["items"] + second["items"]]
    assert ids == sorted(ids, reverse=True)
    assert len(ids) == 6
    assert second["next"] is None
    assert len(manager.get("/devices?target=x86-64-v1").json()["items"]) == 2
    assert len(manager.get("/devices?version=1.0.0").json()["items"]) == 6
    assert manager.get("/devices?limit=0").json()["code"] == "app.invalid_input"


def test_it_makes_groups_and_claims_and_admits_devices(fleet, manager):
    body = {"name": "beta", "model": fleet.model.name, "filter": {"tags": ["beta"]}}
    assert manager.post("/groups", body).status_code == 201
    assert manager.post("/groups", body).status_code == 200
    assert manager.post("/groups", {**body, "filter": {}}).status_code == 409
    assert manager.get("/groups").json()["items"][0]["name"] == "beta"
    claim = manager.post("/claim-tokens", {"name": "lab", "uses": 3})
    assert claim.status_code == 201
    assert claim.json()["token"].startswith(f"sfc_{claim.json()['id']}_")
    listed = manager.get("/claim-tokens").json()["items"][0]
    assert "token" not in listed
    assert listed["uses_left"] == 3
    waiting = make_device(fleet.model, state=DeviceState.PENDING)
    admitted = manager.post(f"/devices/{waiting.pk}/admit", {"action": "accept"})
    assert admitted.json()["state"] == "accepted"


def test_it_previews_a_rollout(fleet, manager):
    answer = manager.post("/rollouts/preview", request_of(fleet))
    assert answer.status_code == 200, answer.content
    assert [stage["total"] for stage in answer.json()["stages"]] == [2, 3, 5, 6]
    wrong = manager.post("/rollouts/preview", request_of(fleet, gate={"alpha": 7}))
    assert (wrong.status_code, wrong.json()["code"]) == (422, "fleet.gate_spec")


def test_it_lists_in_as_many_queries_for_many_as_for_few(
    fleet, manager, django_assert_max_num_queries
):
    fleet.rollout()
    fleet.run(3)
    for path, limit in (("/devices", 3), ("/rollouts", 4), ("/groups", 3)):
        with django_assert_max_num_queries(limit):  # two of them are the token
            assert manager.get(path).status_code == 200


# --- the device API behind the edge ----------------------------------------------------------


class Agent:
    """One device with a session token."""

    def __init__(self, device_pk: int) -> None:
        self.client = Client()
        self.headers = {"authorization": f"Bearer {Wire(RealClock()).token(device_pk)}"}

    def post(self, path: str, body: bytes) -> Any:
        return self.client.post(
            f"/d/v1{path}", body, content_type="application/json", headers=self.headers
        )

    def get(self, path: str) -> Any:
        return self.client.get(f"/d/v1{path}", headers=self.headers)


def report(update: Update, state: UpdateState, seq: int, running: str) -> bytes:
    return UpdateReport(update.pk, 1, seq, state, running, 0, "", "").to_bytes()


def test_it_assigns_with_a_nonce_and_a_rising_number(fleet):
    keys_generate()
    repositories_init()
    fleet.rollout()
    fleet.run(1)
    update = Update.objects.select_related("bundle").first()
    release_publish(bundles=[update.bundle])
    agent = Agent(update.device_id)
    nonce = "ab" * 16
    seqs = []
    for _ in range(2):
        answer = agent.get(f"/updates/{update.pk}/assignment?nonce={nonce}")
        assert answer.status_code == 200, answer.content
        signed = answer.json()["signed"]
        [(path, target)] = signed["targets"].items()
        assignment = assignment_from_json(target["custom"])
        assert path.startswith(f"releases/{fleet.model.name}/2-")
        assert target["hashes"]["sha256"] == update.bundle.manifest_sha256
        assert assignment.nonce == nonce
        assert assignment.device_id == Device.objects.get(pk=update.device_id).device_id
        seqs.append(assignment.assignment_seq)
    assert seqs == [1, 2]
    update.refresh_from_db()
    assert update.state == UpdateState.OFFERED
    for bad in ("", "xyz", "AB" * 16, "ab" * 15):
        assert agent.get(f"/updates/{update.pk}/assignment?nonce={bad}").status_code == 422
    other = Device.objects.exclude(pk=update.device_id).first()
    assert Agent(other.pk).get(f"/updates/{update.pk}/assignment?nonce={nonce}").status_code == 404


def test_it_assigns_nothing_that_was_withdrawn(fleet, manager):
    rollout = fleet.rollout()
    fleet.run(1)
    update = Update.objects.first()
    manager.post(f"/rollouts/{rollout.pk}/halt")
    answer = Agent(update.device_id).get(f"/updates/{update.pk}/assignment?nonce={'ab' * 16}")
    assert (answer.status_code, answer.json()["code"]) == (410, "fleet.update_cancelled")


def test_it_takes_reports_and_telemetry(fleet):
    fleet.rollout()
    fleet.run(1)
    update = Update.objects.select_related("base_bundle").first()
    agent = Agent(update.device_id)
    old = update.base_bundle.manifest_sha256
    path = f"/updates/{update.pk}/report"
    answer = agent.post(path, report(update, UpdateState.DOWNLOADING, 1, old))
    assert answer.json() == {"state": "downloading", "new": True, "applied": True}
    answer = agent.post(path, report(update, UpdateState.DOWNLOADING, 1, old))
    assert answer.json() == {"state": "downloading", "new": False, "applied": True}
    batch = TelemetryBatch(
        "bootaaaa", 0, old, None, None, "", 2, 0, 2, 1, 0, Sketch({3: 2})
    ).to_bytes()
    assert agent.post("/telemetry", batch).json() == {"new": True}
    assert agent.post("/telemetry", batch).json() == {"new": False}


def test_it_refuses_bad_device_requests(fleet):
    fleet.rollout()
    fleet.run(1)
    update = Update.objects.first()
    agent = Agent(update.device_id)
    path = f"/updates/{update.pk}/report"
    good = json.loads(report(update, UpdateState.DOWNLOADING, 1, ""))
    for change in ({"schema": "x"}, {"state": "flying"}, {"seq": -1}, {"seq": True}):
        answer = agent.post(path, json.dumps({**good, **change}).encode())
        assert (answer.status_code, answer.json()["code"]) == (400, "contract.invalid"), change
    assert agent.post(path, b"{").status_code == 400
    assert agent.post(path, json.dumps({**good, "update_id": 77}).encode()).status_code == 422
    assert agent.post("/telemetry", b"x" * 70_000).status_code == 422
    assert agent.post("/telemetry", b"{}").status_code == 400
    nobody = Client().post("/d/v1/telemetry", b"{}", content_type="application/json")
    assert nobody.status_code == 401
    assert nobody["WWW-Authenticate"] == "Bearer"
    Device.objects.filter(pk=update.device_id).update(state="retired")
    assert agent.post("/telemetry", b"{}").status_code == 403


def test_it_answers_hostile_device_documents_with_problems(fleet):
    fleet.rollout()
    fleet.run(1)
    update = Update.objects.first()
    agent = Agent(update.device_id)
    answer = agent.post("/token", b'{"device_id":"\\ud800"}')
    assert (answer.status_code, answer.json()["code"]) == (400, "contract.invalid")
    good = json.loads(report(update, UpdateState.DOWNLOADING, 1, ""))
    path = f"/updates/{update.pk}/report"
    for change in (
        {"code": "x\ud800"},
        {"message": "\udfff"},
        {"code": "x\0"},
        {"seq": 2**31},
        {"downloaded_bytes": 2**62},
    ):
        answer = agent.post(path, json.dumps({**good, **change}).encode())
        assert (answer.status_code, answer.json()["code"]) == (400, "contract.invalid"), change
    running = Device.objects.get(pk=update.device_id).running_manifest_sha256
    document = json.loads(
        TelemetryBatch(
            "bootaaaa", 0, running, None, None, "", 2, 0, 2, 1, 0, Sketch({3: 2})
        ).to_bytes()
    )
    for change in (
        {"answers": 2**63 - 1},
        {"answers": 2**53, "latency_ms": [[0, 2**53]]},
        {"answers": 1_000_001},
        {"seq": 2**31},
        {"boot_id": "bootäöüß"},
    ):
        answer = agent.post("/telemetry", json.dumps({**document, **change}).encode())
        assert (answer.status_code, answer.json()["code"]) == (400, "contract.invalid"), change
    assert agent.post("/telemetry", json.dumps(document).encode()).json() == {"new": True}


def test_it_answers_wrong_methods_of_devices_with_problems(fleet):
    agent = Agent(Device.objects.first().pk)
    for answer, allowed in (
        (agent.post("/poll", b"{}"), "GET, HEAD"),
        (agent.post("/updates/1/assignment", b"{}"), "GET, HEAD"),
        (agent.get("/telemetry"), "POST"),
        (agent.get("/token"), "POST"),
    ):
        assert (answer.status_code, answer.json()["code"]) == (405, "fleet.method")
        assert answer["Content-Type"] == "application/problem+json"
        assert answer["Allow"] == allowed


def test_it_refuses_claims_that_end_at_no_sensible_time(manager):
    for end in (
        "0001-01-01T00:00:00+14:00",
        "9999-12-31T23:59:59-14:00",
        "2030-01-01T00:00:00",
    ):
        answer = manager.post("/claim-tokens", {"name": "c", "uses": 1, "expires_at": end})
        assert (answer.status_code, answer.json()["code"]) == (422, "app.invalid_input"), end
    assert "time zone" in answer.json()["detail"]
    assert answer.json()["hint"]
    good = {"name": "c", "uses": 1, "expires_at": "2030-01-01T00:00:00+14:00"}
    assert manager.post("/claim-tokens", good).status_code == 201


def test_it_shows_a_device_whose_stored_latency_is_damaged(fleet, manager):
    device = Device.objects.first()
    DeviceStats.objects.create(
        device=device,
        manifest_sha256=device.running_manifest_sha256,
        answers=2**62,
        latency=[[0, 2**54], [10**9, 1], "x"],
    )
    answer = manager.get(f"/devices/{device.pk}")
    assert answer.status_code == 200, answer.content
